"""Finds losses: configurations that have fewer hits with some size of RAM than with the next smaller size.

Writes the sentence about losses for sweeps and plans. Replays nothing.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from kvoffload.sweep.table import Row
from kvoffload.text import percent

_MOST_LOST = 0.005
"""Losses of at most half a percentage point are not reported."""
_NAMED = 2
"""Largest number of losses that the sentence names; further losses are counted."""


class Measured(NamedTuple):
    """Hits of one configuration with one size of RAM.

    Attributes:
        configuration: everything except the size of RAM. Measurements of equal configurations are compared.
        name: the configuration in words.
        ram: size of RAM, in any unit.
        size: the size of RAM in words.
        share: the prefix-hit ratio.
    """

    configuration: Hashable
    name: str
    ram: int
    size: str
    share: float


def less_with_more(measured: Iterable[Measured]) -> list[str]:
    """Describe the losses in one sentence, the largest loss first. Returns [] if there is no loss."""
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
    """Return `less_with_more` for the rows of a sweep."""
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
