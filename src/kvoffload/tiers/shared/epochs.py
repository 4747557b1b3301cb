"""Record of the epochs that this process has seen. Does no I/O.

An epoch is the time between two resets of the cache. The server stores the random number of the present epoch
under an epoch key. If a server returns to an ended epoch, it has restored a backup, or a replica that missed
the last reset has taken over. The tier then resets the cache again, because the blocks are outdated.
"""

from __future__ import annotations

from collections.abc import Sequence

MOST_ENDED = 1 << 16
"""Largest number of ended epochs to remember. A reset of a cluster ends 256 epochs, so this is enough for
256 resets."""


class EpochHistory:
    """The number of the present epoch under each epoch key, and the numbers of ended epochs.

    An epoch ends when this process resets the cache, or when it reads a new number under the epoch's key, for
    example because another machine has reset the cache. Numbers are random and never reused. All nodes of a
    cluster share one history.

    Args:
        most_ended: largest number of ended epochs to remember; the oldest are forgotten first.

    Attributes:
        has_warned: True if the warning about the server's persistence has been logged.

    The arguments `now` and `since` are times of `time.monotonic`. Memory: about 150 bytes for each number.
    Thread: one.
    """

    def __init__(self, most_ended: int = MOST_ENDED) -> None:
        self._most_ended = most_ended
        self._present: dict[bytes, int] = {}
        # Ended number -> time when this process learned of its end, oldest first.
        self._ended: dict[int, float] = {}
        self.has_warned = False

    def record(self, names: Sequence[bytes], numbers: Sequence[int | None], now: float) -> None:
        """Record the number that was read under each epoch key; None keeps the number recorded for the key.

        If a key has a new number, the epoch with the old number has ended.
        """
        for name, number in zip(names, numbers, strict=True):
            if number is not None and self._present.get(name) != number:
                self.end([name], now)
                self._present[name] = number

    def is_present(self, number: int) -> bool:
        """Return True if `number` is the present number of any key. Cost: O(keys)."""
        return number in self._present.values()

    def end(self, names: Sequence[bytes], now: float) -> None:
        """Record that the present epochs of these keys have ended."""
        for name in names:
            if (number := self._present.pop(name, None)) is not None:
                self.end_number(number, now)

    def end_number(self, number: int, now: float) -> None:
        """Record that this number has ended at `now`, unless its end is already recorded."""
        self._ended.setdefault(number, now)
        if len(self._ended) > self._most_ended:
            del self._ended[next(iter(self._ended))]

    def has_ended(self, number: int, since: float) -> bool:
        """Return True if the epoch with this number ended before `since`, when a request was sent.

        If the request nevertheless reads this number, the server has restored an old epoch.
        """
        return self._ended.get(number, float("inf")) <= since

    def is_outdated(self, number: int, since: float) -> bool:
        """Return True if the epoch with this number ended after `since`, when a request was sent.

        The server may have replied with this number before the epoch ended, so the server is not at fault.
        """
        return number in self._ended and not self.has_ended(number, since)
