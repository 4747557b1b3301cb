"""What a sweep says in words: at one size, which configuration is best, by how much, and how sure that is.

Owns the sentences and what may be claimed in them. Knows rows and intervals of differences; replays nothing.
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
"""Configurations that a sentence names before it counts the rest."""


class Certainty(Enum):
    """What chance leaves of the difference to LRU."""

    SURE = "its interval is above 0"
    LIKELY = "its interval is above 0, and too narrow: neighbouring windows are alike"
    NOT_SURE = "its interval contains 0"
    UNKNOWN = "too few requests for an interval"


@dataclass(frozen=True)
class Verdict:
    """The best configuration at one place: a trace, a device, a capacity, a store mode, tiers behind RAM.

    Attributes:
        number: of the best row, among all rows of the sweep.
        best: the row of most prefix hits, before it is told its verdict; LRU of several with equally many,
            else the first.
        baseline: LRU at this place, which is `best` itself where nothing beats it; None without LRU.
        where: the place in words, without trace and device: ``at 5%, on-compute``.
        certainty: of the difference between `best` and `baseline`; UNKNOWN without one.
        alike: rows that `best` is not better than beyond chance, most hits first. Not the baseline, of which
            `certainty` speaks. Where there are no intervals, only equals.
        rivals: how many other rows there are at this place.
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
        """What is to be said, in one sentence: ``hazard, +4.3 points over lru (sure), ...``."""
        parts = [self._of_best()]
        if self.alike:
            parts.append(f"{_listed(self.alike)} cannot be told apart from it")
        if self.rivals and self.best.ci_low is None:
            parts.append("too few requests to be sure")
        return "; ".join(parts)

    @property
    def line(self) -> str:
        """Where, and what: ``at 5%: hazard, +4.3 points over lru (sure), ...``."""
        return f"{self.where}: {self.words}"

    def _of_best(self) -> str:
        name = _name(self.best)
        if not self.rivals:
            return f"{name}; nothing else was measured"
        if self.baseline is None:
            return f"{name}, prefix-hit ratio {self.best.prefix_hit_ratio:.4f}; no lru to compare with"
        if self.baseline is self.best:
            return f"{name}; nothing beats it"
        said = f"{name}, {self._lead(self.baseline)}"
        if self.best.writes_vs_lru is not None:
            said += f", {_percent(self.best.writes_vs_lru)} of its writes"
        if self.best.gap_closed is not None:
            said += f", {_percent(self.best.gap_closed)} of the gap"
        return said

    def _lead(self, baseline: Row) -> str:
        lead = self.best.prefix_hit_ratio - baseline.prefix_hit_ratio
        # As many digits as it takes to see the lead at all; it is one block of the trace or more.
        digits = next(digits for digits in range(1, 20) if 100 * lead >= 10**-digits)
        said = f"{_points(lead, digits)} points over {_name(baseline)}"
        if self.certainty is Certainty.SURE:
            return f"{said} (sure)"
        if self.certainty is Certainty.LIKELY:
            return f"{said} (likely: the traffic changes slowly)"
        if self.best.diff_low is None or self.best.diff_high is None:
            return said
        low, high = _points(self.best.diff_low, digits), _points(self.best.diff_high, digits)
        return f"{said} (not sure: {low} to {high})"


def certainty_of(low: float | None, correlation: float | None) -> Certainty:
    """What chance leaves of a difference, from the interval of it (`bootstrap.Interval`), if there is one."""
    if low is None or correlation is None:
        return Certainty.UNKNOWN
    if low <= 0:
        return Certainty.NOT_SURE
    return Certainty.LIKELY if correlation > CORRELATED else Certainty.SURE


def verdicts_of(
    points: Sequence[Point], rows: Sequence[Row], difference: Callable[[int, int], Interval | None]
) -> list[Verdict]:
    """A verdict for each place, in the order of the rows.

    Args:
        points: what each row is of.
        difference: the paired interval of one row's ratio minus another's, by their numbers.

    Cost: one interval for each row.
    """
    places: dict[tuple[object, ...], list[int]] = {}
    for number, point in enumerate(points):
        places.setdefault(place(point), []).append(number)
    several_stores = len({row.store for row in rows}) > 1
    several_tiers = len({row.tiers for row in rows}) > 1
    return [_verdict(numbers, rows, difference, several_stores, several_tiers) for numbers in places.values()]


def _verdict(
    numbers: list[int],
    rows: Sequence[Row],
    difference: Callable[[int, int], Interval | None],
    several_stores: bool,
    several_tiers: bool,
) -> Verdict:
    # A winner that is no better than LRU is none.
    best = max(numbers, key=lambda number: (rows[number].prefix_hit_ratio, _is_baseline(rows[number])))
    baseline = next((rows[number] for number in numbers if _is_baseline(rows[number])), None)
    alike = []
    for number in numbers:
        if number != best and rows[number] is not baseline:
            behind = difference(number, best)
            if rows[number].prefix_hit_ratio == rows[best].prefix_hit_ratio or (behind and behind.high >= 0):
                alike.append(rows[number])
    return Verdict(
        number=best,
        best=rows[best],
        baseline=baseline,
        where=_where(rows[best], several_stores, several_tiers),
        certainty=certainty_of(rows[best].diff_low, rows[best].diff_correlation),
        alike=tuple(sorted(alike, key=lambda row: -row.prefix_hit_ratio)),
        rivals=len(numbers) - 1,
    )


def _is_baseline(row: Row) -> bool:
    return row.baseline == f"{row.policy}, {row.admission}"


def _where(row: Row, several_stores: bool, several_tiers: bool) -> str:
    typed_blocks = row.capacity == str(row.capacity_blocks)
    where = f"at {row.capacity_blocks:,} blocks" if typed_blocks else f"at {row.capacity}"
    where += f", {row.tiers} behind" if several_tiers else ""
    return f"{where}, {row.store}" if several_stores else where


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
