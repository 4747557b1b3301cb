"""The cheapest purchase whose users wait no longer for first tokens than was asked for.

Owns which purchases are timed: a timed replay costs as much as several without a clock.
Knows rows and a clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvoffload.plan.clock import Clock
from kvoffload.plan.fleet import NOTHING
from kvoffload.plan.rows import Measured
from kvoffload.plan.targets import Choice, Outcome, best_of_each, frontier


def choose_by_wait(rows: Sequence[Measured], most_s: float, clock: Clock) -> Choice:
    """The cheapest purchase that the clock gives a p90 of time to first token of `most_s` seconds or less.

    RAM with each number of drives is a ladder of its own, with rungs that save no more by count: RAM in front
    of the same SSDs shortens waits. A ladder is searched by halves, from what is known of it. So the next
    cheaper purchase of that ladder was timed and does not reach the target; waits need not fall from rung to
    rung, and what is cheaper still is not looked at. Where the largest of a ladder does not reach it, smaller
    ones are timed as long as waits fall.

    Of each purchase the row that saves most is timed. Not reached: of the rows that were timed the one that
    comes nearest.
    """
    asked = _Asked(most_s, clock)
    every, purchases = frontier(rows), best_of_each(rows)
    asked.wait_s(purchases[0], later=1)  # what buys nothing
    chosen: Measured | None = None
    smaller: Measured | None = None
    for drives in sorted({one.row.ssd_drives for one in purchases}):
        ladder = [one for one in purchases if one.row.ssd_drives == drives]
        ladder = [one for one in ladder if chosen is None or one.row.price < chosen.row.price]
        place = asked.cheapest(ladder)
        if place is not None:
            chosen, smaller = ladder[place], ladder[place - 1] if place else None
    outcome = Outcome.BUY
    if chosen is None:
        timed = [one for one in purchases if asked.is_known(one)]
        chosen = min(timed, key=lambda one: (asked.wait_s(one), one.row.price))
        outcome = Outcome.NOT_REACHED
    elif chosen.row.purchase == NOTHING:
        outcome = Outcome.BUY_NOTHING
    row = chosen.row
    more = [one for one in every if one.row.price > row.price and one.row.saved > row.saved]
    most = every[-1] if every[-1].row.saved > row.saved else chosen
    return Choice(outcome, chosen, most, smaller, more[0] if more else None, None)


@dataclass(frozen=True)
class _Asked:
    """What is asked for, and who knows whether a row reaches it."""

    most_s: float
    clock: Clock

    def wait_s(self, one: Measured, later: int = 0) -> float:
        return self.clock.outcome(one.row, later).ttft_s.p90

    def reaches(self, one: Measured, later: int = 0) -> bool:
        return self.wait_s(one, later) <= self.most_s

    def is_known(self, one: Measured) -> bool:
        return self.clock.known(one.row) is not None

    def cheapest(self, ladder: Sequence[Measured]) -> int | None:
        """The place of the first rung that reaches it, as far as halves tell; None if none does."""
        known = [place for place, one in enumerate(ladder) if self.is_known(one)]
        high = next((place for place in known if self.reaches(ladder[place])), None)
        if high is None:
            high = self._from_the_top(ladder)
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

    def _from_the_top(self, ladder: Sequence[Measured]) -> int | None:
        above = float("inf")
        for place in reversed(range(len(ladder))):
            if self.reaches(ladder[place], later=len(ladder).bit_length()):
                return place
            wait_s = self.wait_s(ladder[place])
            if wait_s >= above:
                return None
            above = wait_s
        return None
