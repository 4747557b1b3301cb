"""Choice of the cheapest purchase within a limit for the time to first token.

A timed replay takes as long as several untimed replays, so this module selects the purchases to time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvoffload.plan.clock import Clock
from kvoffload.plan.fleet import NOTHING
from kvoffload.plan.rows import Measured
from kvoffload.plan.targets import Choice, Outcome, best_of_each, frontier


def choose_by_wait(rows: Sequence[Measured], most_s: float, clock: Clock) -> Choice:
    """Choose the cheapest purchase whose 90th percentile of the time to first token is at most `most_s`.

    Purchases with the same number of drives, ordered by RAM, form a ladder. A ladder includes purchases that
    add no savings, because RAM in front of the same SSDs shortens waits.

    Each ladder is bisected for its cheapest purchase within the limit, on the assumption that more RAM never
    lengthens waits. The bisection starts from a purchase that is known to be within the limit. If there is
    none, purchases are timed in descending order of RAM, until one is within the limit or the wait no longer
    decreases.

    Only the best row of each purchase is timed. If no timed row is within the limit, the timed row with the
    shortest wait is chosen.
    """
    limit = _Limit(most_s, clock)
    best_savings, purchases = frontier(rows), best_of_each(rows)
    limit.wait_s(purchases[0], later=1)  # times the row without a purchase
    chosen: Measured | None = None
    smaller: Measured | None = None
    for drives in sorted({measured.row.ssd_drives for measured in purchases}):
        ladder = [measured for measured in purchases if measured.row.ssd_drives == drives]
        ladder = [measured for measured in ladder if chosen is None or measured.row.price < chosen.row.price]
        place = limit.cheapest(ladder)
        if place is not None:
            chosen, smaller = ladder[place], ladder[place - 1] if place else None
    outcome = Outcome.BUY
    if chosen is None:
        timed = [measured for measured in purchases if limit.is_known(measured)]
        chosen = min(timed, key=lambda measured: (limit.wait_s(measured), measured.row.price))
        outcome = Outcome.NOT_REACHED
    elif chosen.row.purchase == NOTHING:
        outcome = Outcome.BUY_NOTHING
    row = chosen.row
    larger = [
        measured
        for measured in best_savings
        if measured.row.price > row.price and measured.row.saved > row.saved
    ]
    most = best_savings[-1] if best_savings[-1].row.saved > row.saved else chosen
    return Choice(outcome, chosen, most, smaller, larger[0] if larger else None, None)


@dataclass(frozen=True)
class _Limit:
    """A limit for the 90th percentile of the time to first token, and the clock that times rows."""

    most_s: float
    clock: Clock

    def wait_s(self, measured: Measured, later: int = 0) -> float:
        return self.clock.outcome(measured.row, later).ttft_s.p90

    def reaches(self, measured: Measured, later: int = 0) -> bool:
        return self.wait_s(measured, later) <= self.most_s

    def is_known(self, measured: Measured) -> bool:
        return self.clock.known(measured.row) is not None

    def cheapest(self, ladder: Sequence[Measured]) -> int | None:
        """Bisect a ladder for its cheapest row within the limit; returns the row's index, or None."""
        known = [place for place, measured in enumerate(ladder) if self.is_known(measured)]
        high = next((place for place in known if self.reaches(ladder[place])), None)
        if high is None:
            high = self._from_the_largest(ladder)
        if high is None:
            return None
        low = max((place for place in known if place < high), default=-1)
        while high - low > 1:
            middle = (low + high) // 2
            if self.reaches(ladder[middle], later=(high - low).bit_length() - 2):
                high = middle
            else:
                low = middle
        return high

    def _from_the_largest(self, ladder: Sequence[Measured]) -> int | None:
        above = float("inf")
        for place in reversed(range(len(ladder))):
            if self.reaches(ladder[place], later=len(ladder).bit_length()):
                return place
            wait_s = self.wait_s(ladder[place])
            if wait_s >= above:
                return None
            above = wait_s
        return None
