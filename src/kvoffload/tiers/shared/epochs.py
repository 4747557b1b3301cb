"""Epochs that this process has seen: the present number of each epoch key, and ended numbers. No I/O.

A server may return to an ended epoch in two cases: it has restored a backup, or a replica without the last
reset has taken over. The tier then resets the cache again, because the blocks of the epoch are outdated.
"""

from __future__ import annotations

from collections.abc import Sequence

MOST_ENDED = 1 << 16
"""Limit of remembered ended epochs. A reset of a cluster ends 256 epochs, so this is enough for 256
resets."""


class EpochHistory:
    """Present and ended epoch numbers. All nodes of a cluster share one history.

    An epoch ends when this process resets the cache, or reads another number under the epoch's key. Another
    number appears, for example, after a reset by another machine. Numbers are random and never reused.

    Args:
        most_ended: limit of remembered ended numbers; the oldest are forgotten first.

    Attributes:
        has_warned: True after a warning about persistence.

    Times are of `time.monotonic`. Memory: about 150 bytes for each number. Thread: one.
    """

    def __init__(self, most_ended: int = MOST_ENDED) -> None:
        self._most_ended = most_ended
        self._present: dict[bytes, int] = {}
        # Ended number -> time when this process learned of its end, oldest first.
        self._ended: dict[int, float] = {}
        self.has_warned = False

    def record(self, names: Sequence[bytes], numbers: Sequence[int | None], now: float) -> None:
        """Record the present number of each epoch key. If a key has a new number, its former epoch has ended.

        If the number of a key is None, the recorded number of the key stays.
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
        """Return True if this number had already ended at `since`, when a request was sent.

        If the request nevertheless reads the number, the server has restored an old epoch.
        """
        return self._ended.get(number, float("inf")) <= since

    def is_outdated(self, number: int, since: float) -> bool:
        """Return True if this number ended after a request was sent at the time `since`.

        The request may have read the number before it ended, so the server is not at fault.
        """
        return number in self._ended and not self.has_ended(number, since)
