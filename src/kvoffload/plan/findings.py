"""Findings of a plan. The answer, its sentences and its assumptions are made from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvoffload.plan.clock import InTime
from kvoffload.plan.endurance import Endurance
from kvoffload.plan.evidence import Evidence
from kvoffload.plan.fleet import Fleet
from kvoffload.plan.rows import Measured, PlanRow, difference
from kvoffload.plan.targets import Choice, Target
from kvoffload.sweep.bootstrap import Interval


@dataclass(frozen=True)
class Findings:
    """Inputs and results of a search.

    Attributes:
        rows: rows measured on all sessions.
        in_time: timed replays of the chosen row; None if they are not possible (`clock_of`,
            `Clock.can_time`).
        one_in: N if the search used a sample of one in N sessions; 1 if the search used all sessions.
        sampled: rows of a search on a sample; empty if the search used all sessions.
        endurance: savings lost to the write budgets of SSDs; None if no feasible row has a write budget.
    """

    fleet: Fleet
    target: Target
    evidence: Evidence
    rows: Sequence[Measured]
    choice: Choice
    in_time: InTime | None = None
    one_in: int = 1
    sampled: Sequence[Measured] = ()
    endurance: Endurance | None = None

    @property
    def row(self) -> PlanRow:
        return self.choice.chosen.row

    @property
    def currency(self) -> str:
        return self.fleet.prices.currency

    def difference(self, row: Measured, baseline: Measured) -> Interval | None:
        """Compute the confidence interval of a difference: savings of `row` minus savings of `baseline`."""
        return difference(self.evidence, row, baseline)
