"""Targets of a plan, and the choice of a purchase. Knows rows, but replays nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from kvoffload.errors import ConfigError, Problems
from kvoffload.plan.evidence import Evidence
from kvoffload.plan.fleet import NOTHING, Fleet, Purchase
from kvoffload.plan.rows import Measured
from kvoffload.sweep.bootstrap import Interval
from kvoffload.sweep.table import YARDSTICK

ENOUGH = 0.95
"""If no target is set, a purchase must reach this share of the largest gain. The gain of a purchase is its
savings minus the savings of the GPUs' own caches."""
ABOUT = 1.1
"""Two prices are about the same if the higher price is at most this multiple of the lower price."""

Difference = Callable[[Measured, Measured], "Interval | None"]
"""Function of two rows. Returns the 95 % confidence interval of a difference: savings of the first row minus
savings of the second row. None if there is no interval."""


@dataclass(frozen=True)
class Target:
    """Target of a plan. All fields are optional. Besides the budget, at most one field may be set.

    Attributes:
        budget: limit for the price.
        saved: share of the prefill to save, 0 to 1.
        of_ceiling: share of the savings of unlimited caches, 0 to 1.
        gpu_hours_a_day: GPU-hours per day to save; needs the speed of the GPUs.
        ttft_p90_s: limit for the 90th percentile of the time to first token; needs a machine.
    """

    budget: float | None = None
    saved: float | None = None
    of_ceiling: float | None = None
    gpu_hours_a_day: float | None = None
    ttft_p90_s: float | None = None

    def __post_init__(self) -> None:
        problems = Problems("plan")
        for field, value, most in (("budget", self.budget, math.inf), ("target-saved", self.saved, 1.0),
                                   ("target-of-ceiling", self.of_ceiling, 1.0),
                                   ("target-gpu-hours", self.gpu_hours_a_day, math.inf)):  # fmt: skip
            if value is not None and not (0 <= value <= most and value < math.inf):
                allowed = "0 to 1: a share" if most == 1 else "a number, 0 or more"
                problems.add(field, value, f"allowed: {allowed}")
        if self.ttft_p90_s is not None and not 0 < self.ttft_p90_s < math.inf:
            problems.add("target-ttft-p90", self.ttft_p90_s, "allowed: seconds, more than 0")
        problems.check()
        given = {"target-saved": self.saved, "target-of-ceiling": self.of_ceiling,
                 "target-gpu-hours": self.gpu_hours_a_day, "target-ttft-p90": self.ttft_p90_s}  # fmt: skip
        several = [name for name, value in given.items() if value is not None]
        if len(several) > 1:
            why = f"allowed: one target besides a budget; leave out {' and '.join(several[1:])}"
            raise ConfigError(several[0], given[several[0]], why)

    @property
    def is_given(self) -> bool:
        """True if a target other than the budget is set."""
        return (self.saved, self.of_ceiling, self.gpu_hours_a_day, self.ttft_p90_s) != (None,) * 4

    def needed(self, evidence: Evidence, fleet: Fleet) -> float | None:
        """Compute the share of the prefill to save; None without a target for savings.

        Raises: `ConfigError` if unlimited caches save less than the target, or if the target needs a machine,
        a speed or times that are missing.
        """
        if self.ttft_p90_s is not None and not (fleet.machine and evidence.duration_s):
            why = "it needs --machine, and a recording with times"
            raise ConfigError("target-ttft-p90", self.ttft_p90_s, why)
        ceiling, share, field, value = evidence.ceiling, self.saved, "target-saved", self.saved
        most = f"{ceiling:.4f}"
        if self.of_ceiling is not None:
            return self.of_ceiling * ceiling
        if self.gpu_hours_a_day is not None:
            field, value = "target-gpu-hours", self.gpu_hours_a_day
            all_gpus = evidence.gpus_worth(1.0, fleet)
            if all_gpus is None:
                why = "it needs --prefill-tokens-per-s or --machine, and a recording with times"
                raise ConfigError(field, value, why)
            share = evidence.device_share + value / 24 / all_gpus
            most = f"{24 * all_gpus * (ceiling - evidence.device_share):,.2f}"
        if share is not None and share > ceiling:
            raise ConfigError(field, value, f"the ceiling is {most}: unlimited caches save no more")
        return share


class Outcome(Enum):
    """Result of a choice."""

    BUY = "buy the chosen purchase"
    BUY_NOTHING = "the GPUs are enough, or no feasible purchase is better"
    NOT_REACHED = "no feasible purchase reaches the target"


@dataclass(frozen=True)
class Choice:
    """Recommended purchase and its neighbours, each with its best row.

    Attributes:
        chosen: the recommended row; if no row reaches the target, the row nearest to the target.
        most: the feasible row that saves most within the budget.
        smaller: the next cheaper purchase; None if no purchase is cheaper.
        larger: the next larger feasible purchase that saves more; None if no purchase saves more.
        needed: share of the prefill to save; None if the target is not a share.
    """

    outcome: Outcome
    chosen: Measured
    most: Measured
    smaller: Measured | None
    larger: Measured | None
    needed: float | None

    def of_each(self, change: Callable[[Measured], Measured]) -> Choice:
        return replace(
            self,
            chosen=change(self.chosen),
            most=change(self.most),
            smaller=self.smaller and change(self.smaller),
            larger=self.larger and change(self.larger),
        )


def best_of_each(rows: Sequence[Measured], *, feasible_first: bool = False) -> list[Measured]:
    """List the best feasible row of each purchase, cheapest purchase first.

    Args:
        feasible_first: True to list a purchase without a feasible row, too, by its best infeasible row. False
            to leave such a purchase out.
    """
    best: dict[Purchase, Measured] = {}
    for measured in rows:
        rival = best.get(measured.row.purchase)
        if not (measured.row.feasible or feasible_first):
            continue
        if rival is None or _rank(measured) > _rank(rival):
            best[measured.row.purchase] = measured
    return sorted(best.values(), key=lambda measured: (measured.row.price, -measured.row.saved))


def _rank(measured: Measured) -> tuple[bool, float, bool]:
    """Sort key, larger for a better row: feasible rows, then more savings, then LRU because it is simple."""
    row = measured.row
    return row.feasible, row.saved, (row.policy, row.admission) == (YARDSTICK, "all")


def frontier(rows: Sequence[Measured]) -> list[Measured]:
    """List the purchases that save more than every purchase of the same or a lower price."""
    kept: list[Measured] = []
    for best in best_of_each(rows):
        if not kept or best.row.saved > kept[-1].row.saved:
            kept.append(best)
    return kept


def beside(rows: Sequence[Measured], chosen: Measured) -> Measured | None:
    """Find the rival of a row with servers among the purchases without servers, and vice versa.

    The rival is the best feasible row whose price is at most `ABOUT` times the price of `chosen`. If every
    feasible row costs more, the rival is the cheapest feasible row. Returns None if `chosen` buys nothing, or
    if there is no feasible rival, for example because servers were not searched.
    """
    rivals = [measured for measured in best_of_each(rows) if measured.row.purchase != NOTHING
              and bool(measured.row.servers) != bool(chosen.row.servers)]  # fmt: skip
    if chosen.row.purchase == NOTHING or not rivals:
        return None
    about = [measured for measured in rivals if measured.row.price <= ABOUT * chosen.row.price]
    return max(about, key=lambda measured: (measured.row.saved, -measured.row.price), default=rivals[0])


def other_ram(rows: Sequence[Measured], chosen: Measured) -> Measured | None:
    """Find the best feasible row that has the purchase of `chosen`, but separate RAM if `chosen` has shared
    RAM, or shared RAM if `chosen` has separate RAM."""
    rivals = [
        measured
        for measured in rows
        if measured.row.feasible
        and measured.row.purchase == chosen.row.purchase != NOTHING
        and measured.row.shared_ram != chosen.row.shared_ram
    ]
    return max(rivals, key=_rank, default=None)


def choose(rows: Sequence[Measured], needed: float | None, difference: Difference) -> Choice:
    """Choose the cheapest purchase that saves the share `needed`.

    If no purchase saves this share, choose the purchase that saves most. If `needed` is None, choose the
    cheapest purchase that passes one of two tests:

    - Its gain is at least `ENOUGH` times the largest gain of a purchase. The gain of a purchase is its
      savings minus the savings of the row without a purchase.
    - Its savings are not significantly below the largest savings.

    Args:
        rows: measured rows, including the row without a purchase.
        needed: share of the prefill to save.
        difference: returns the confidence interval of the difference in savings between two rows.
    """
    ladder = frontier(rows)
    most, outcome = ladder[-1], Outcome.BUY
    if needed is None:
        added = [measured.row.saved - ladder[0].row.saved for measured in ladder]
        enough = [measured for measured, gain in zip(ladder, added, strict=True)
                  if gain >= ENOUGH * added[-1] or _alike(difference(most, measured))]  # fmt: skip
        chosen = enough[0]
    else:
        reaching = [measured for measured in ladder if measured.row.saved >= needed]
        chosen = reaching[0] if reaching else most
        outcome = Outcome.BUY if reaching else Outcome.NOT_REACHED
    if outcome is Outcome.BUY and chosen.row.purchase == NOTHING:
        outcome = Outcome.BUY_NOTHING
    place = ladder.index(chosen)
    smaller = ladder[place - 1] if place else None
    larger = ladder[place + 1] if place + 1 < len(ladder) else None
    return Choice(outcome, chosen, most, smaller, larger, needed)


def _alike(lead: Interval | None) -> bool:
    """Return True if the lead of one row over another may be 0 or negative.

    `lead`: confidence interval of the lead; if it is None, returns False.
    """
    return lead is not None and lead.low <= 0
