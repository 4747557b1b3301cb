"""Endurance of SSDs: the savings that a write budget at the drives' rating costs.

Knows rows and their measurement; the search is in `plan.search`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec

from kvoffload.plan.rows import Cell, Measured, PlanRow


class Endurance(msgspec.Struct, frozen=True, kw_only=True):
    """Cost of the drives' rating for one purchase with SSDs.

    Attributes:
        row: the row with a write budget at the rating.
        budget_bytes_a_day: bytes per day that the budgets of all engines allow.
        unlimited: share of the prefill that the purchase would save if SSDs did not wear out.
        unlimited_writes_a_day: drive writes per day of these savings.
        cost: `unlimited` minus the savings of `row`.
    """

    row: PlanRow
    budget_bytes_a_day: int
    unlimited: float
    unlimited_writes_a_day: float
    cost: float


def budgeted_row(rows: Sequence[Measured], chosen: Measured) -> Measured | None:
    """Return the row with a write budget to report: the chosen row, or the feasible row that saves most.

    None if no feasible row has a write budget.
    """
    if chosen.row.ssd_write_budget:
        return chosen
    feasible = [measured for measured in rows if measured.row.ssd_write_budget and measured.row.feasible]
    return max(feasible, key=lambda measured: (measured.row.saved, -measured.row.price), default=None)


def unlimited_cell(row: PlanRow) -> Cell:
    """Return the purchase of a row without a write budget, whose SSDs take every block."""
    setup = replace(row.setup, ssd_write_budget=0.0, ssd_admission="all")
    return Cell(row.purchase, setup)


def endurance_of(
    rows: Sequence[Measured], chosen: Measured, measure: Callable[[Cell], Measured]
) -> tuple[Endurance | None, list[Measured]]:
    """Compute the cost of the rating; returns None and no rows without a row with a write budget.

    Cost: at most one measurement, whose row is returned too.
    """
    limited = budgeted_row(rows, chosen)
    if limited is None:
        return None, []
    row, cell = limited.row, unlimited_cell(limited.row)
    known = [one for one in rows if one.row.purchase == row.purchase and not one.row.ssd_write_budget]
    new = [] if any(one.row.setup == cell.setup for one in known) else [measure(cell)]
    best = max([*known, *new], key=lambda measured: measured.row.saved).row
    assert best.drive_writes_a_day is not None, "rows with a write budget have times"
    endurance = Endurance(
        row=row,
        budget_bytes_a_day=row.write_budget_bytes,
        unlimited=best.saved,
        unlimited_writes_a_day=best.drive_writes_a_day,
        cost=best.saved - row.saved,
    )
    return endurance, new
