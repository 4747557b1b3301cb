"""Epochs that this process has seen: the present number of each epoch key, and ended numbers. No I/O.

A server that restores a snapshot or a backup, or fails over to a replica that missed a reset, returns to an
ended epoch and its blocks. The tier then resets the cache again instead of using that epoch.
"""

from __future__ import annotations

from collections.abc import Sequence

MOST_ENDED = 1 << 16
"""Limit of remembered ended epochs: 256 resets of a cluster, which has 256 epochs."""


class EpochHistory:
    """Epoch numbers by epoch key, and the numbers that have ended. All nodes of a cluster share one.

    An epoch ends when this process resets it, or sees another number under the same key, for example because
    another machine has reset the cache. Numbers are random and never reused, so an ended number on a server
    is always outdated.

    Args:
        most_ended: limit of remembered numbers; the oldest are forgotten first.

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
        """Record the present number of each key; None leaves a key unchanged."""
        for name, number in zip(names, numbers, strict=True):
            if number is not None and self._present.get(name) != number:
                self.end([name], now)
                self._present[name] = number

    def is_present(self, number: int) -> bool:
        """Return True if this is the last known number of a key. Cost: O(keys)."""
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
        """Return True if this number had ended at `since`: a server that returns it to a later request has
        restored it."""
        return self._ended.get(number, float("inf")) <= since

    def is_outdated(self, number: int, since: float) -> bool:
        """Return True if this number has ended after `since`, so that an old reply may contain it."""
        return number in self._ended and not self.has_ended(number, since)
