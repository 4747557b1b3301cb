"""What a purchase is to reach, and which purchase is recommended. Knows rows; replays nothing."""

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
"""The part of what could be added that is taken for enough where no target says what is."""
ABOUT = 1.1
"""Times a price that are about the same price."""

Difference = Callable[[Measured, Measured], "Interval | None"]


@dataclass(frozen=True)
class Target:
    """What is asked for: at most one of the last four, and a budget or none.

    Attributes:
        budget: of money.
        saved: share of the prefill that need not be computed, 0 to 1.
        of_ceiling: the same as a share of what caches without limit save.
        gpu_hours_a_day: that what is bought saves; takes the GPUs' speed.
        ttft_p90_s: how long nine of ten requests wait at most for their first token; takes a machine.
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
            with problems:
                if value is not None and not (0 <= value <= most and value < math.inf):
                    allowed = "0 to 1: a share" if most == 1 else "a number, 0 or more"
                    raise ConfigError(field, value, f"allowed: {allowed}")
        with problems:
            if self.ttft_p90_s is not None and not 0 < self.ttft_p90_s < math.inf:
                raise ConfigError("target-ttft-p90", self.ttft_p90_s, "allowed: seconds, more than 0")
        problems.check()
        given = {"target-saved": self.saved, "target-of-ceiling": self.of_ceiling,
                 "target-gpu-hours": self.gpu_hours_a_day, "target-ttft-p90": self.ttft_p90_s}  # fmt: skip
        several = [name for name, value in given.items() if value is not None]
        if len(several) > 1:
            why = f"allowed: one target beside a budget, not also {' and '.join(several[1:])}"
            raise ConfigError(several[0], given[several[0]], why)

    @property
    def is_given(self) -> bool:
        """Whether something is asked for besides a budget."""
        targets = (self.saved, self.of_ceiling, self.gpu_hours_a_day, self.ttft_p90_s)
        return any(one is not None for one in targets)

    def needed(self, evidence: Evidence, fleet: Fleet) -> float | None:
        """The share of the prefill that must be saved; None without a target of that kind.

        Raises `ConfigError` with the ceiling for more than caches without limit save, and where rates or
        waits are asked for and none can be known.
        """
        if self.ttft_p90_s is not None and not (fleet.machine and evidence.duration_s):
            why = "it takes --machine, and a recording with times"
            raise ConfigError("target-ttft-p90", self.ttft_p90_s, why)
        ceiling, share, field, value = evidence.ceiling, self.saved, "target-saved", self.saved
        most = f"{ceiling:.4f}"
        if self.of_ceiling is not None:
            return self.of_ceiling * ceiling
        if self.gpu_hours_a_day is not None:
            field, value = "target-gpu-hours", self.gpu_hours_a_day
            all_of_it = evidence.gpus_worth(1.0, fleet)
            if all_of_it is None:
                why = "it takes --prefill-tokens-per-s or --machine, and a recording with times"
                raise ConfigError(field, value, why)
            share = evidence.device_share + value / 24 / all_of_it
            most = f"{24 * all_of_it * (ceiling - evidence.device_share):,.2f}"
        if share is not None and share > ceiling:
            raise ConfigError(field, value, f"the ceiling is {most}: caches without limit save no more")
        return share


class Outcome(Enum):
    """What came of a target."""

    BUY = "this is to be bought"
    BUY_NOTHING = "what is there already is enough, or nothing that can be had is better"
    NOT_REACHED = "nothing that can be had reaches the target"


@dataclass(frozen=True)
class Choice:
    """What is recommended.

    Attributes:
        chosen: the row; where the target is not reached, the one that comes nearest.
        most: the most that can be had within the limits, whatever it costs more.
        smaller: the next smaller purchase, and what it saves at best; None if there is none.
        larger: the next larger one that can be had and saves more.
        needed: the share that must be saved; None without such a target.
    """

    outcome: Outcome
    chosen: Measured
    most: Measured
    smaller: Measured | None
    larger: Measured | None
    needed: float | None

    def of_each(self, change: Callable[[Measured], Measured]) -> Choice:
        """The same choice of rows of which more is known."""
        return replace(
            self,
            chosen=change(self.chosen),
            most=change(self.most),
            smaller=self.smaller and change(self.smaller),
            larger=self.larger and change(self.larger),
        )


def best_of_each(rows: Sequence[Measured], *, feasible_first: bool = False) -> list[Measured]:
    """The best feasible row of each purchase, the cheapest purchase first.

    Args:
        feasible_first: where none of a purchase's rows can be, its best one is there all the same.
    """
    best: dict[Purchase, Measured] = {}
    for one in rows:
        rival = best.get(one.row.purchase)
        if not (one.row.feasible or feasible_first):
            continue
        if rival is None or _rank(one) > _rank(rival):
            best[one.row.purchase] = one
    return sorted(best.values(), key=lambda one: (one.row.price, -one.row.saved))


def _rank(one: Measured) -> tuple[bool, float, bool]:
    """What is better is higher; of equals the yardstick, which is simple."""
    row = one.row
    return row.feasible, row.saved, (row.policy, row.admission) == (YARDSTICK, "all")


def frontier(rows: Sequence[Measured]) -> list[Measured]:
    """Of these, the purchases that save more than every one that costs as much or less."""
    found: list[Measured] = []
    for one in best_of_each(rows):
        if not found or one.row.saved > found[-1].row.saved:
            found.append(one)
    return found


def beside(rows: Sequence[Measured], chosen: Measured) -> Measured | None:
    """What tells whether sharing is worth it: for a row with servers the best one without, and the reverse.

    Of those that can be for about the same price the one that saves most, else the cheapest. None where
    servers were not looked at or cannot be, and where nothing is bought.
    """
    others = [one for one in best_of_each(rows) if one.row.purchase != NOTHING
              and bool(one.row.servers) != bool(chosen.row.servers)]  # fmt: skip
    if chosen.row.purchase == NOTHING or not others:
        return None
    about = [one for one in others if one.row.price <= ABOUT * chosen.row.price]
    return max(about, key=lambda one: (one.row.saved, -one.row.price), default=others[0])


def choose(rows: Sequence[Measured], needed: float | None, difference: Difference) -> Choice:
    """The cheapest purchase that saves what is needed.

    Without a need, the cheapest that adds `ENOUGH` of the most that can be added, or that cannot be told
    apart from it: the last modules bring little, and a budget need not be spent.

    Args:
        rows: measured; one of them buys nothing.
        difference: the paired interval of what one row saves minus another.
    """
    ladder = frontier(rows)
    most, outcome = ladder[-1], Outcome.BUY
    if needed is None:
        added = [one.row.saved - ladder[0].row.saved for one in ladder]
        enough = [one for one, its in zip(ladder, added, strict=True)
                  if its >= ENOUGH * added[-1] or _alike(difference(most, one))]  # fmt: skip
        chosen = enough[0]
    else:
        reaching = [one for one in ladder if one.row.saved >= needed]
        chosen = reaching[0] if reaching else most
        outcome = Outcome.BUY if reaching else Outcome.NOT_REACHED
    if outcome is Outcome.BUY and chosen.row.purchase == NOTHING:
        outcome = Outcome.BUY_NOTHING
    place = ladder.index(chosen)
    smaller = ladder[place - 1] if place else None
    larger = ladder[place + 1] if place + 1 < len(ladder) else None
    return Choice(outcome, chosen, most, smaller, larger, needed)


def _alike(lead: Interval | None) -> bool:
    """Whether a lead may be chance. Where nothing is known of chance, only equals are equal."""
    return lead is not None and lead.low <= 0
