"""Finds losses: measurements in which a configuration has fewer hits with more RAM.

Each size of RAM is compared with the next smaller size. The module also writes the sentence that reports
losses to users of sweeps and plans. Replays nothing.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from kvoffload.sweep.table import Row
from kvoffload.text import percent

_MOST_LOST = 0.005
"""Losses of up to this hit ratio, half a percentage point, are not reported."""
_NAMED = 2
"""The sentence describes at most this many losses, and gives only the number of the others."""


class Measured(NamedTuple):
    """Measured hit ratio of one configuration with one size of RAM.

    Attributes:
        configuration: the configuration without the size of RAM. Only measurements with equal configurations
            are compared with each other.
        name: the configuration in words, for the sentence.
        ram: size of RAM, in the same unit for all measurements.
        size: size of RAM in words, for the sentence.
        share: the prefix-hit ratio.
    """

    configuration: Hashable
    name: str
    ram: int
    size: str
    share: float


def less_with_more(measured: Iterable[Measured]) -> list[str]:
    """Return a text that describes the losses, the largest first, as the only item of a list.

    The list is empty if there is no loss.
    """
    curves: dict[Hashable, list[Measured]] = {}
    for point in sorted(measured, key=lambda point: point.ram):
        curves.setdefault(point.configuration, []).append(point)
    losses = [
        (smaller, larger)
        for curve in curves.values()
        for smaller, larger in pairwise(curve)
        if smaller.ram < larger.ram and smaller.share - larger.share > _MOST_LOST
    ]
    if not losses:
        return []
    losses.sort(key=lambda loss: loss[1].share - loss[0].share)
    named = [
        f"{smaller.name} from {percent(smaller.share)} at {smaller.size} to {percent(larger.share)} at "
        f"{larger.size}"
        for smaller, larger in losses[:_NAMED]
    ]
    named += [f"{len(losses) - _NAMED:,} more"] if len(losses) > _NAMED else []
    return [f"Less with more RAM: {'; '.join(named)}. Prefer a row whose neighbours agree."]


def losses_of(rows: Sequence[Row]) -> list[str]:
    """Describe the losses among the rows of a sweep, as `less_with_more` does."""
    has_stores = len({row.store for row in rows}) > 1
    has_traces = len({row.trace for row in rows}) > 1

    def measured(row: Row) -> Measured:
        configuration = (
            row.trace_sha256, row.policy, row.admission, row.store, row.device, row.tiers, row.instances,
            row.shared_ram,
        )  # fmt: skip
        parts = [row.policy, "" if row.admission == "all" else row.admission, row.store if has_stores else ""]
        parts += [f"{row.tiers} behind" if row.tier_blocks else "", row.trace if has_traces else ""]
        name = ", ".join(filter(None, parts))
        return Measured(configuration, name, row.capacity_blocks, row.capacity, row.prefix_hit_ratio)

    return less_with_more(map(measured, rows))
