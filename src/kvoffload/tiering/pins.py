"""How many blocks of RAM each tier may have pinned while it writes them. Pins nothing."""

from __future__ import annotations

from collections.abc import Sequence

from kvoffload.tiering.lane import TierLane

_LEAST_WEIGHT = 0.25
"""Of the quickest tier's part a slow one keeps this much: enough for its writes to overlap, and to show when
it is no longer slow."""


def write_room(lanes: Sequence[TierLane], row: int, budget: int) -> int:
    """How many more blocks this tier may have pinned: what is left of its part of one budget for all tiers.

    The parts are in proportion to how fast the tiers write, within a factor of four; equal while that is not
    known. At least one block each. Their sum is the budget, so that a slow tier, or one that hangs with its
    part pinned, takes nothing from the others.
    """
    lane = lanes[row]
    if len(lanes) > 1:
        weights = _weights([one.write_seconds for one in lanes])
        budget = max(1, int(budget * weights[row] / sum(weights)))
    return max(0, budget - lane.num_writing)


def _weights(seconds_per_block: Sequence[float]) -> list[float]:
    known = [seconds for seconds in seconds_per_block if seconds > 0.0]
    quickest = min(known, default=0.0)
    return [max(_LEAST_WEIGHT, quickest / seconds) if seconds > 0.0 else 1.0 for seconds in seconds_per_block]
