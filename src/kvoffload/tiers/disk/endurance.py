"""How much may still be written today: a solid-state disk is good for so many bytes, and then for none.

Counts bytes by the hour. Does not know what they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvoffload.tiers.disk.format import HOUR_S

_HOURS = 25
"""A day, and the hour that is only partly in it: so no 24 hours ever see more than the budget."""


class EnduranceBudget:
    """A budget of bytes for every 24 hours.

    Args:
        max_bytes_per_day: None for no limit.
        clock: seconds since 1970.
    """

    def __init__(self, max_bytes_per_day: int | None, clock: Callable[[], float]) -> None:
        self._max_bytes, self._clock = max_bytes_per_day, clock
        self._spent: dict[int, int] = {}

    def restore(self, blocks: Mapping[int, int], block_bytes: int) -> None:
        """Count blocks that earlier lives have written, by hours since 1970."""
        for hour, count in blocks.items():
            self._spent[hour] = self._spent.get(hour, 0) + count * block_bytes

    def left(self) -> int | None:
        """Bytes that may be written now; None: no limit."""
        if self._max_bytes is None:
            return None
        now = int(self._clock()) // HOUR_S
        self._spent = {hour: spent for hour, spent in self._spent.items() if now - _HOURS < hour <= now}
        return max(0, self._max_bytes - sum(self._spent.values()))

    def spend(self, num_bytes: int) -> None:
        """Note bytes that are written now."""
        if self._max_bytes is not None:
            hour = int(self._clock()) // HOUR_S
            self._spent[hour] = self._spent.get(hour, 0) + num_bytes
