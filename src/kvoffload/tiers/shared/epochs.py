"""Epochs that this process has seen: the present number of each epoch key, and ended numbers. No I/O.

A server that restores a snapshot, a backup, or a replica that missed a reset brings back an epoch that has
ended, with its blocks. The tier resets the cache again instead of using an ended epoch.
"""

from __future__ import annotations

from collections.abc import Sequence

MOST_ENDED = 1 << 16
"""Ended epochs that are remembered: 256 resets of a cluster, which has 256 epochs."""


class EpochHistory:
    """Epoch numbers by epoch key, and the numbers that have ended. All nodes of a cluster share one.

    An epoch ends when this process resets it, or sees another number under the same key. The reason does not
    matter: between the two observations another machine may have reset the cache. Numbers are random and
    never given out twice, so an ended number on a server is always an old one.

    Args:
        most_ended: numbers that are remembered; the oldest are forgotten first.

    Attributes:
        has_warned: a warning about persistence has been logged.

    Times are of `time.monotonic`. Memory: about 150 bytes for each number. Thread: one.
    """

    def __init__(self, most_ended: int = MOST_ENDED) -> None:
        self._most_ended = most_ended
        self._present: dict[bytes, int] = {}
        # Number -> when this process learned that it has ended, oldest first.
        self._ended: dict[int, float] = {}
        self.has_warned = False

    def enter(self, names: Sequence[bytes], numbers: Sequence[int | None], now: float) -> None:
        """Record the present number of each key; None leaves a key as it was."""
        for name, number in zip(names, numbers, strict=True):
            if number is not None and self._present.get(name) != number:
                self.end([name], now)
                self._present[name] = number

    def is_present(self, number: int) -> bool:
        """Return True if a key has this number now, as far as is known. Cost: O(keys)."""
        return number in self._present.values()

    def end(self, names: Sequence[bytes], now: float) -> None:
        """Record that the present epochs of these keys have ended."""
        for name in names:
            if (number := self._present.pop(name, None)) is not None:
                self.end_number(number, now)

    def end_number(self, number: int, now: float) -> None:
        """Record that this number has ended, under any key."""
        self._ended.setdefault(number, now)
        if len(self._ended) > self._most_ended:
            del self._ended[next(iter(self._ended))]

    def has_ended(self, number: int, since: float) -> bool:
        """Return True if a server that returned this number, asked at `since` or later, has restored it."""
        return self._ended.get(number, float("inf")) <= since

    def is_outdated(self, number: int, since: float) -> bool:
        """Return True if the number has ended, but the server may have been asked before: that proves
        nothing."""
        return number in self._ended and not self.has_ended(number, since)
