"""A limit of the bytes written to a disk in a day, so that solid-state disks do not wear out early.

Counts the bytes of each hour. Does not know keys or tiers.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping

from kvoffload.errors import ConfigError, finite

HOUR_S = 3600
DAY_S = 24 * HOUR_S

_HOURS = 25
"""Number of hours whose writes are summed. They are the current hour and the 24 hours before it."""


class WriteBudget:
    """A limit of the bytes that tiers write in any 24 hours. Several tiers may share one budget.

    A write counts with its size on the medium, even if it fails. Writes before a restart count, too.

    Args:
        max_bytes_per_day: limit in any 24 hours; 0 for tiers that are only read.
        clock: returns seconds since 1970. The default ignores later changes of the system's clock.
        is_even: True to spend the budget at an even rate, as replays do (`budget_of_recording`). The budget
            then starts at 0 and grows with time. Writes never exceed the part that has accrued so far.

    Thread: the scheduler's. Raises: `ConfigError` for a negative or infinite budget.
    """

    def __init__(
        self, max_bytes_per_day: float, clock: Callable[[], float] | None = None, *, is_even: bool = False
    ) -> None:
        if not finite(max_bytes_per_day) >= 0:
            raise ConfigError("max_write_bytes_per_day", max_bytes_per_day, "allowed: 0 or more")
        self._max_bytes, self._clock = max_bytes_per_day, clock or _steady_clock()
        self._bytes_by_hour = Counter[int]()
        self._num_tiers = 0
        self._spent, self._began_s = 0, self._clock() if is_even else None

    def add_tier(self, stored_bytes: int, written_before: Mapping[int, int]) -> None:
        """Register a tier that shares the budget, and count the blocks that it wrote before it was opened.

        Args:
            stored_bytes: bytes of a block on the medium.
            written_before: number of blocks that the tier wrote, by hour since 1970.
        """
        self._num_tiers += 1
        for hour, num_blocks in written_before.items():
            self._bytes_by_hour[hour] += num_blocks * stored_bytes

    def spend(self, num_bytes: int) -> None:
        """Count a write of `num_bytes`."""
        self._spent += num_bytes
        self._bytes_by_hour[self._hour()] += num_bytes

    @property
    def left_bytes(self) -> int:
        """Bytes that may be written now."""
        now = self._hour()
        for hour in [hour for hour in self._bytes_by_hour if not now - _HOURS < hour <= now]:
            num_bytes = self._bytes_by_hour.pop(hour)
            if hour > now:
                # The clock was set back: these writes may be less than a day old.
                self._bytes_by_hour[now] += num_bytes
        remaining = self._max_bytes - self._bytes_by_hour.total()
        if self._began_s is not None:
            remaining = min(
                remaining, self._max_bytes * (self._clock() - self._began_s) / DAY_S - self._spent
            )
        return max(0, int(remaining))

    @property
    def left_bytes_each(self) -> int:
        """Share of one tier in `left_bytes`. Shares are equal, so that they add up to `left_bytes`."""
        return self.left_bytes // max(1, self._num_tiers)

    @property
    def bytes_each(self) -> float:
        """Share of one tier in a day's budget, in bytes. All tiers have equal shares."""
        return self._max_bytes / max(1, self._num_tiers)

    def earned_bytes_each(self, seconds: float) -> float:
        """Return one tier's share of the budget that accrues in `seconds`, in bytes."""
        return self.bytes_each * seconds / DAY_S

    def now_s(self) -> float:
        """Return the present time of the budget's clock, in seconds."""
        return self._clock()

    def _hour(self) -> int:
        return int(self._clock()) // HOUR_S


def budget_of_recording(max_per_day: float, clock: Callable[[], float]) -> WriteBudget:
    """Create the write budget of a replay, which accrues at an even rate over the time of the recording.

    With the budget of a whole day, a recording of a few minutes would never reach the limit. With the budget
    of these minutes, granted at once, the replay would spend all of it on the first blocks, which a tier that
    has run for days already has.

    Args:
        max_per_day: budget of 24 hours, in the unit of `WriteBudget.spend`, such as blocks.
        clock: returns the time in the recording, in seconds.
    """
    return WriteBudget(max_per_day, clock, is_even=True)


def _steady_clock() -> Callable[[], float]:
    """Return a clock of seconds since 1970. It starts at the system's time and follows monotonic time."""
    offset_s = time.time() - time.monotonic()
    return lambda: offset_s + time.monotonic()
