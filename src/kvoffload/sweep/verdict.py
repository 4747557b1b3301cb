"""Verdicts of a sweep: for each scenario the best policy and admission rule, and their lead over LRU.

A scenario (`table.place`) is one combination of trace, sizes, store mode, tiers, and separate or shared RAM.
This module formats the sentences of the summary from rows of results and confidence intervals. It replays
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from kvoffload.sweep.bootstrap import CORRELATED, Interval
from kvoffload.sweep.grid import Point
from kvoffload.sweep.table import Row, place
from kvoffload.text import percent

_NAMED = 3
"""Number of configurations that a longer list names before it says ``and 3 others``."""


class Certainty(Enum):
    """Certainty of a lead of one row over another, derived from the confidence interval of the lead."""

    SURE = "the interval is above 0"
    LIKELY = "the interval is above 0, but too narrow: neighbouring windows are correlated"
    NOT_SURE = "the interval contains 0"
    UNKNOWN = "too few requests for an interval"


@dataclass(frozen=True)
class Verdict:
    """The best policy and admission rule of one scenario (`table.place`).

    Attributes:
        number: index of the best row among all rows of the sweep.
        best: the row with most prefix hits. If several rows tie, `best` is the LRU row if it is among them,
            or else the first of them.
        baseline: the LRU row of this scenario; None without LRU. May be the same row as `best`.
        where: the scenario in words, without trace and device: ``at 5%, on-compute``.
        certainty: certainty of the lead of `best` over `baseline`; UNKNOWN if there is no interval.
        alike: rows that are not significantly worse than `best`, most hits first. If the trace is too short
            for intervals, rows with exactly as many hits as `best`. The baseline is left out.
        rivals: number of the other rows of this scenario.
    """

    number: int
    best: Row
    baseline: Row | None
    where: str
    certainty: Certainty
    alike: tuple[Row, ...]
    rivals: int

    @property
    def words(self) -> str:
        """The verdict in one sentence: ``hazard, +4.3 points over lru (sure), ...``."""
        clauses = [self._about_best()]
        if self.alike:
            clauses.append(f"{_listed(self.alike)} cannot be told apart from it")
        if self.rivals and self.best.ci_low is None:
            clauses.append("too few requests to be sure")
        return "; ".join(clauses)

    @property
    def line(self) -> str:
        """The scenario and the verdict: ``at 5%: hazard, +4.3 points over lru (sure), ...``."""
        return f"{self.where}: {self.words}"

    def _about_best(self) -> str:
        name = _name(self.best)
        if not self.rivals:
            return f"{name}; nothing else was measured"
        if self.baseline is None:
            return f"{name}, prefix-hit ratio {self.best.prefix_hit_ratio:.4f}; no lru to compare with"
        if self.baseline is self.best:
            return f"{name}; nothing beats it"
        text = f"{name}, {self._lead(self.baseline)}"
        if self.best.writes_vs_lru is not None:
            text += f", {_percent(self.best.writes_vs_lru)} of its writes"
        if self.best.gap_closed is not None:
            text += f", {_percent(self.best.gap_closed)} of the gap"
        return text

    def _lead(self, baseline: Row) -> str:
        lead = self.best.prefix_hit_ratio - baseline.prefix_hit_ratio
        # As many digits as needed to show the lead, which is at least one block of the trace.
        digits = next(digits for digits in range(1, 20) if 100 * lead >= 10**-digits)
        text = f"{_points(lead, digits)} points over {_name(baseline)}"
        if self.certainty is Certainty.SURE:
            return f"{text} (sure)"
        if self.certainty is Certainty.LIKELY:
            return f"{text} (likely: the traffic changes slowly)"
        if self.best.diff_low is None or self.best.diff_high is None:
            return text
        low, high = _points(self.best.diff_low, digits), _points(self.best.diff_high, digits)
        return f"{text} (not sure: {low} to {high})"


def certainty_of(low: float | None, correlation: float | None) -> Certainty:
    """Classify the lead of one row over another by the lead's confidence interval.

    A lead is significant if the interval's lower limit `low` is above 0. A significant lead is LIKELY instead
    of SURE if neighbouring windows have a `correlation` above `CORRELATED`. If there is no interval, both
    arguments are None.
    """
    if low is None or correlation is None:
        return Certainty.UNKNOWN
    if low <= 0:
        return Certainty.NOT_SURE
    return Certainty.LIKELY if correlation > CORRELATED else Certainty.SURE


def verdicts_of(
    points: Sequence[Point], rows: Sequence[Row], difference: Callable[[int, int], Interval | None]
) -> list[Verdict]:
    """Create a verdict for each scenario, in the order of the rows.

    Args:
        points: the point of each row.
        difference: takes the indices of two rows, and returns the paired interval of the first row's ratio
            minus the second row's ratio.

    Cost: computes about one interval for each row.
    """
    places: dict[tuple[object, ...], list[int]] = {}
    for number, point in enumerate(points):
        places.setdefault(place(point), []).append(number)
    several_stores = len({row.store for row in rows}) > 1
    several_tiers = len({row.tiers for row in rows}) > 1
    several_pools = len({row.shared_ram for row in rows}) > 1

    def where(row: Row) -> str:
        typed_blocks = row.capacity == str(row.capacity_blocks)
        parts = [f"at {row.capacity_blocks:,} blocks" if typed_blocks else f"at {row.capacity}"]
        parts[0] += f", {row.tiers} behind" if several_tiers else ""
        parts += [row.store] if several_stores else []
        parts += [ram_of(row)] if several_pools else []
        return ", ".join(parts)

    return [_verdict(numbers, rows, difference, where) for numbers in places.values()]


def ram_of(row: Row) -> str:
    """Return ``shared RAM`` if the row's instances share RAM, otherwise ``separate RAM``."""
    return "shared RAM" if row.shared_ram else "separate RAM"


def _verdict(
    numbers: list[int],
    rows: Sequence[Row],
    difference: Callable[[int, int], Interval | None],
    where: Callable[[Row], str],
) -> Verdict:
    # LRU wins ties.
    best = max(numbers, key=lambda number: (rows[number].prefix_hit_ratio, _is_baseline(rows[number])))
    baseline = next((rows[number] for number in numbers if _is_baseline(rows[number])), None)
    alike = []
    for number in numbers:
        if number != best and rows[number] is not baseline:
            lead = difference(number, best)
            if rows[number].prefix_hit_ratio == rows[best].prefix_hit_ratio or (lead and lead.high >= 0):
                alike.append(rows[number])
    return Verdict(
        number=best,
        best=rows[best],
        baseline=baseline,
        where=where(rows[best]),
        certainty=certainty_of(rows[best].diff_low, rows[best].diff_correlation),
        alike=tuple(sorted(alike, key=lambda row: -row.prefix_hit_ratio)),
        rivals=len(numbers) - 1,
    )


def _is_baseline(row: Row) -> bool:
    return row.baseline == f"{row.policy}, {row.admission}"


def _name(row: Row) -> str:
    return row.policy if row.admission == "all" else f"{row.policy} with {row.admission}"


def _listed(rows: Sequence[Row]) -> str:
    names = [_name(row) for row in rows]
    if len(names) > _NAMED + 1:
        names[_NAMED:] = [f"{len(names) - _NAMED} others"]
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _points(share: float, digits: int) -> str:
    points = round(100 * share, digits)
    return f"{points:+.{digits}f}" if points else "0"


def _percent(share: float) -> str:
    return "less than 1%" if 0 < share < 0.005 else percent(share, 0)
