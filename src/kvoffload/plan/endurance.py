"""Endurance of SSDs: the savings that are lost if a write budget limits writes to the rating of the drives.

The rating is the number of drive writes per day that a drive is made for. The search is in `plan.search`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import msgspec
import numpy as np

from kvoffload.plan.evidence import Evidence
from kvoffload.plan.fleet import Fleet
from kvoffload.plan.rows import Cell, Measured, PlanRow
from kvoffload.replay.replay import Replay
from kvoffload.replay.write_bound import bound_within_writes, oracle_within_writes
from kvoffload.sweep.task import load
from kvoffload.tiers.write_budget import DAY_S


class Endurance(msgspec.Struct, frozen=True, kw_only=True):
    """Savings that one purchase with SSDs loses because writes are limited to the drives' rating.

    All savings are shares of the prefill.

    Attributes:
        row: the row with a write budget equal to the rating.
        budget_bytes_a_day: bytes per day that the write budgets of all engines allow together.
        unlimited: savings of the purchase without a write budget.
        unlimited_writes_a_day: drive writes per day without a write budget.
        cost: `unlimited` minus the savings of `row`.
        bound: upper bound of the savings with this RAM and write budget. No policy or admission rule exceeds
            the bound, even if it knows the future (`replay.write_bound`).
        of_bound: gain of `row` over the GPUs alone, divided by the gain of `bound` over the GPUs alone.
        ram_alone: savings of the same RAM without SSDs.
        oracle: savings if an oracle, which knows the future, chose the blocks to write to SSDs. Assumes that
            SSDs do not change the hits of RAM.
        of_oracle: gain of `row` over `ram_alone`, divided by the gain of `oracle` over `ram_alone`.
    """

    row: PlanRow
    budget_bytes_a_day: int
    unlimited: float
    unlimited_writes_a_day: float
    cost: float
    bound: float
    of_bound: float
    ram_alone: float
    oracle: float
    of_oracle: float


def budgeted_row(rows: Sequence[Measured], chosen: Measured) -> Measured | None:
    """Return the row whose write budget is reported; None if no feasible row has a write budget.

    If the chosen row has a write budget, return the chosen row. Otherwise return the best feasible row with a
    write budget. Without budgets, some rows would wear the SSDs of their purchase out. If any such purchase
    also has a feasible row with a budget, only the purchase with the best worn row is considered.
    """
    if chosen.row.ssd_write_budget:
        return chosen
    feasible = [measured for measured in rows if measured.row.ssd_write_budget and measured.row.feasible]
    purchases = {measured.row.purchase for measured in feasible}
    worn = [measured for measured in rows if measured.row.is_worn and measured.row.purchase in purchases]
    if worn:
        best = max(worn, key=_quality).row.purchase
        feasible = [measured for measured in feasible if measured.row.purchase == best]
    return max(feasible, key=_quality, default=None)


def _quality(measured: Measured) -> tuple[float, float]:
    return measured.row.saved, -measured.row.price


def unlimited_cell(row: PlanRow) -> Cell:
    """Return the row's purchase and setup, but with every block admitted to SSDs, and no write budget."""
    setup = replace(row.setup, ssd_write_budget=0.0, ssd_admission="all")
    return Cell(row.purchase, setup)


class _Limits(NamedTuple):
    """The fields `bound`, `ram_alone` and `oracle` of `Endurance`: savings as shares of the prefill."""

    bound: float
    ram_alone: float
    oracle: float


def _limits_of(row: PlanRow, fleet: Fleet, evidence: Evidence) -> _Limits:
    """Compute the limits of a row with a write budget, from the hits of all replicas together."""
    cell = Cell(row.purchase, row.setup)
    per_day = cell.max_writes_per_day(fleet)
    assert per_day is not None, "the row has a write budget"
    hits = np.zeros(3, np.int64)
    for swept, point in zip(evidence.traces, cell.points(fleet, evidence), strict=True):
        trace, config = load(swept.source), point.config
        max_writes = int(per_day * trace.duration_s / DAY_S)
        bound = bound_within_writes(
            trace, config.capacity_blocks, config.tier_blocks, max_writes, config.device_blocks, config.store
        )
        alone = Replay(trace, replace(config, tiers=()))
        alone.run()
        own = alone.hits_per_request
        hits += (bound, int(own.sum()), oracle_within_writes(trace, own, max_writes))
    return _Limits(*(hits / evidence.block_refs).tolist())


def endurance_of(
    rows: Sequence[Measured],
    chosen: Measured,
    fleet: Fleet,
    evidence: Evidence,
    measure: Callable[[Cell], Measured],
) -> tuple[Endurance | None, list[Measured]]:
    """Compute the savings that are lost because of the rating. Also returns the rows measured for this.

    Returns None and an empty list if no feasible row has a write budget. Cost: at most one measurement, and
    for each replica a replay without SSDs and an upper bound.
    """
    limited = budgeted_row(rows, chosen)
    if limited is None:
        return None, []
    row, cell = limited.row, unlimited_cell(limited.row)
    known = [
        measured
        for measured in rows
        if measured.row.purchase == row.purchase and not measured.row.ssd_write_budget
    ]
    new = [] if any(measured.row.setup == cell.setup for measured in known) else [measure(cell)]
    best = max([*known, *new], key=lambda measured: measured.row.saved).row
    assert best.drive_writes_a_day is not None, "rows with a write budget have times"
    limits = _limits_of(row, fleet, evidence)
    endurance = Endurance(
        row=row,
        budget_bytes_a_day=row.write_budget_bytes,
        unlimited=best.saved,
        unlimited_writes_a_day=best.drive_writes_a_day,
        cost=best.saved - row.saved,
        bound=limits.bound,
        of_bound=_share(row.saved, limits.bound, evidence.device_share),
        ram_alone=limits.ram_alone,
        oracle=limits.oracle,
        of_oracle=_share(row.saved, limits.oracle, limits.ram_alone),
    )
    return endurance, new


def _share(saved: float, most: float, start: float) -> float:
    """Return the gain ``saved - start`` divided by the largest gain ``most - start``.

    Returns 1 if nothing can be gained.
    """
    return (saved - start) / (most - start) if most > start else 1.0
