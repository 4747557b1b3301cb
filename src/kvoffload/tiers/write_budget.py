"""A limit of the bytes written to a disk in a day: every write wears a solid-state disk.

Counts bytes by the hour. Does not know keys or tiers.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping

from kvoffload.errors import ConfigError

HOUR_S = 3600
DAY_S = 24 * HOUR_S

_HOURS = 25
"""A day and the current, partial hour, so that no period of 24 hours exceeds the budget."""


class WriteBudget:
    """A limit of the bytes that tiers write in any 24 hours. Several tiers may share one object.

    A write counts with its bytes on the medium, even if it fails. Writes before a restart count, too.

    Args:
        max_bytes_per_day: 0 for tiers that are only read.
        clock: seconds since 1970. The default ignores later changes of the system's clock.

    Thread: the scheduler's. Raises: `ConfigError` for a negative budget.
    """

    def __init__(self, max_bytes_per_day: int, clock: Callable[[], float] | None = None) -> None:
        if max_bytes_per_day < 0:
            raise ConfigError("max_write_bytes_per_day", max_bytes_per_day, "allowed: 0 or more")
        self._max_bytes, self._clock = max_bytes_per_day, clock or _steady_clock()
        self._bytes_by_hour = Counter[int]()
        self._num_tiers = 0

    def add_tier(self, stored_bytes: int, written_before: Mapping[int, int]) -> None:
        """Count a tier's earlier writes: blocks of `stored_bytes`, by hour since 1970."""
        self._num_tiers += 1
        for hour, num_blocks in written_before.items():
            self._bytes_by_hour[hour] += num_blocks * stored_bytes

    def spend(self, num_bytes: int) -> None:
        """Count a write."""
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
        return max(0, self._max_bytes - self._bytes_by_hour.total())

    @property
    def left_bytes_each(self) -> int:
        """An equal share of `left_bytes` for each tier, so that the counters of the tiers add up."""
        return self.left_bytes // max(1, self._num_tiers)

    def _hour(self) -> int:
        return int(self._clock()) // HOUR_S


def budget_of_recording(max_per_day: float, duration_s: float, clock: Callable[[], float]) -> WriteBudget:
    """Create the budget of a replay of `duration_s` seconds: at most ``max_per_day * duration_s / DAY_S``.

    A budget of a whole day would never bind in a recording of minutes. The budget of a longer recording is
    divided into equal periods of at most the 25 hours for which a `WriteBudget` remembers a write.

    Args:
        max_per_day: in any unit that `WriteBudget.spend` then gets, such as blocks.
        clock: seconds of the recording.
    """
    periods = max(1, math.ceil(duration_s / (_HOURS * HOUR_S)))
    return WriteBudget(int(max_per_day * min(1.0, duration_s / periods / DAY_S)), clock)


def _steady_clock() -> Callable[[], float]:
    """Return a clock of seconds since 1970 that starts at the system's time and follows monotonic time."""
    offset_s = time.time() - time.monotonic()
    return lambda: offset_s + time.monotonic()
