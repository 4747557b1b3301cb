"""A bound for the bytes written to a tier: a solid-state disk wears out with every write.

Counts blocks by the hour. Does not know keys or places.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from kvoffload.errors import ConfigError
from kvoffload.structures.keys import Keys
from kvoffload.tiers.contract import HOUR_S, JobResult, Mask, SecondaryTier, TierStats
from kvoffload.transfer import Blocks, Rows

_HOURS = 25
"""A day and one partial hour: so no 24 hours ever exceed the budget."""


class BudgetedTier(SecondaryTier):
    """A tier that writes at most so many bytes in any 24 hours; in all else it behaves as the wrapped tier.

    A write counts with its cost for the medium (`stored_bytes`), successful or not. Writes of earlier lives
    count if the tier remembers them. `TierStats.write_budget_bytes` is the rest of the budget.

    Args:
        tier: any `SecondaryTier` to which nothing has been written since it was opened. This one owns it from
            now on.
        max_write_bytes_per_day: 0 for a tier that is only read.
        clock: seconds since 1970. By default it does not follow when the system's clock is set.

    Thread and cost: those of the tier, and one `contains` for a batch that exceeds the budget.
    Raises: `ConfigError` for a negative budget.
    """

    def __init__(
        self,
        tier: SecondaryTier,
        max_write_bytes_per_day: int,
        clock: Callable[[], float] | None = None,
    ) -> None:
        if max_write_bytes_per_day < 0:
            raise ConfigError("max_write_bytes_per_day", max_write_bytes_per_day, "allowed: 0 or more")
        self._tier, self._max_bytes = tier, max_write_bytes_per_day
        self._clock = clock or steady_clock()
        self.name, self.identity = tier.name, tier.identity
        self.block_bytes, self.stored_bytes = tier.block_bytes, tier.stored_bytes
        self.written_before = tier.written_before
        self.shared, self.probe_timeout_s = tier.shared, tier.probe_timeout_s
        self.group_blocks = tier.group_blocks
        self._written_in_hour = Counter(tier.written_before)
        self._num_dropped = 0

    def submit_write(
        self, keys: Keys, pool: Blocks, rows: Rows, request: object | None = None
    ) -> tuple[int, Mask]:
        """As `SecondaryTier.submit_write`. Of a batch that exceeds the budget only the head is offered.

        The rest counts as dropped, except for blocks that the tier has. Blocks in flight to it count too.
        """
        left, num_offered = self._left_bytes(), len(keys)
        if num_offered * self.stored_bytes > left:
            missing = np.flatnonzero(~self._tier.contains(keys))
            room = left // self.stored_bytes
            if len(missing) > room:
                self._num_dropped += len(missing) - room
                num_offered = int(missing[room])
        job, head = self._tier.submit_write(keys[:num_offered], pool, rows[:num_offered], request)
        self._written_in_hour[self._hour()] += int(np.count_nonzero(head))
        taken = np.zeros(len(keys), np.bool_)
        taken[:num_offered] = head
        return job, taken

    @property
    def queue_room(self) -> int:
        return self._tier.queue_room

    def stats(self) -> TierStats:
        stats = self._tier.stats()
        budgets = [self._left_bytes(), stats.write_budget_bytes]
        return replace(
            stats,
            dropped=stats.dropped + self._num_dropped,
            write_budget_bytes=min(budget for budget in budgets if budget is not None),
        )

    def _hour(self) -> int:
        return int(self._clock()) // HOUR_S

    def _left_bytes(self) -> int:
        now = self._hour()
        for hour in [hour for hour in self._written_in_hour if not now - _HOURS < hour <= now]:
            count = self._written_in_hour.pop(hour)
            if hour > now:
                # The clock has been set back: what was written may be less than a day old.
                self._written_in_hour[now] += count
        return max(0, self._max_bytes - self._written_in_hour.total() * self.stored_bytes)

    # ---- passed on to the tier

    def begin_request(self, request_id: str) -> object:
        return self._tier.begin_request(request_id)

    def follow(self, request: object, path: Keys) -> None:
        self._tier.follow(request, path)

    def cut(self, keys: Keys, room: int) -> int:
        return self._tier.cut(keys, room)

    def finish_request(self, request: object, path: Keys) -> None:
        self._tier.finish_request(request, path)

    def contains(self, keys: Keys, request: object | None = None) -> Mask:
        return self._tier.contains(keys, request)

    def unknown(self, keys: Keys, request: object | None = None) -> Mask:
        return self._tier.unknown(keys, request)

    def submit_probe(self, keys: Keys) -> int:
        return self._tier.submit_probe(keys)

    def submit_read(self, keys: Keys, pool: Blocks, rows: Rows) -> int:
        return self._tier.submit_read(keys, pool, rows)

    def finished(self) -> list[JobResult]:
        return self._tier.finished()

    def delete(self, keys: Keys) -> int:
        return self._tier.delete(keys)

    def clear(self) -> None:
        self._tier.clear()

    def take_changes(self) -> list[tuple[list[bytes], bool]]:
        return self._tier.take_changes()

    def drain(self, timeout_s: float) -> bool:
        return self._tier.drain(timeout_s)

    def close(self) -> None:
        self._tier.close()


def steady_clock() -> Callable[[], float]:
    """Seconds since 1970 as the system says now, and from here on as they pass."""
    offset_s = time.time() - time.monotonic()
    return lambda: offset_s + time.monotonic()
