"""Search of a plan, from coarse to fine.

First measures a few purchases with all setups, then all coarse purchases with the best setups, and finally
the purchases near the answer. Knows cells and rows, but no replays or prices.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import msgspec
import numpy as np

from kvoffload.plan.fleet import NOTHING, Purchase
from kvoffload.plan.rows import Cell, Measured, Setup
from kvoffload.plan.targets import Choice, Difference, beside, other_ram

KEPT = 2
"""Number of setups that are measured at all coarse purchases, for RAM alone and for each kind of tier."""
_ROUNDS = 4
"""Largest number of rounds of bisection around the answer; twice as many after a search on a sample."""

Measure = Callable[[Sequence[Cell], int], "list[Measured]"]
"""Function that measures cells. The second argument, for the progress, is the number of later cells."""
Choose = Callable[[Sequence[Measured]], Choice]
"""Function that chooses among rows. The rows include the row without a purchase."""


@dataclass(frozen=True)
class TierAxis:
    """Axis of the search for one kind of tier behind RAM.

    Attributes:
        axis: field of `Purchase` with the number of drives or servers.
        counts: numbers of drives or servers to try, ascending, without 0.
        setups: setups of RAM with this kind of tier behind it.
        within_rating: function that is called with a setup that would wear the SSDs out. It returns the
            setups with a write budget that are measured in its place.
    """

    axis: Literal["drives", "servers"]
    counts: Sequence[int]
    setups: Sequence[Setup]
    within_rating: Callable[[Setup], Sequence[Setup]] = lambda setup: ()

    def with_ram(self, modules: int, count: int) -> Purchase:
        """Create the purchase of `count` drives or servers behind `modules` RAM modules."""
        return Purchase(modules, 0)._replace(**{self.axis: count})


@dataclass(frozen=True)
class Space:
    """Space of a search.

    Attributes:
        modules: numbers of RAM modules per host to try, ascending.
        setups: setups for purchases without a tier behind RAM.
        tiers: axes of the tiers behind RAM; a purchase has at most one kind of tier.
        allowed: predicate for the purchases to consider.
        edge: for each number of drives or servers, the purchase with as much RAM as the budget allows.
    """

    modules: Sequence[int]
    setups: Sequence[Setup]
    tiers: Sequence[TierAxis] = ()
    allowed: Callable[[Purchase], bool] = lambda purchase: True
    edge: Sequence[Purchase] = ()

    def cells(self, purchases: Iterable[Purchase], setups: Iterable[Setup]) -> list[Cell]:
        """List all combinations of an allowed purchase and a setup that fits it."""
        return [
            Cell(purchase, setup)
            for purchase, setup in itertools.product(purchases, setups)
            if bool(purchase.drives) == bool(setup.ssd_policy)
            and bool(purchase.servers) == bool(setup.server_admission)
            and self.allowed(purchase)
        ]

    @property
    def purchases(self) -> list[Purchase]:
        """Purchases of a coarse grid. The search measures them, then bisects near the answer."""
        alone = [Purchase(0, 0), *(axis.with_ram(0, n) for axis in self.tiers for n in axis.counts)]
        steps = [purchase._replace(modules=modules) for modules in self.modules for purchase in alone]
        return [purchase for purchase in dict.fromkeys((*steps, *self.edge)) if self.allowed(purchase)]

    @property
    def sample(self) -> list[Purchase]:
        """A few very different purchases.

        - RAM alone: the least, a medium amount, the most.
        - The least RAM with a medium tier, and with the largest tier.
        - Medium RAM with the smallest tier.
        """
        ram = _ends_and_middle(self.modules)
        purchases = [Purchase(modules, 0) for modules in ram]
        for axis in self.tiers:
            counts = _ends_and_middle(axis.counts)
            few = [(ram[0], n) for n in counts[1:]] + [(ram[len(ram) // 2], n) for n in counts[:1]]
            purchases += itertools.starmap(axis.with_ram, dict.fromkeys(few))
        return purchases


def search(
    space: Space,
    measure: Measure,
    difference: Difference,
    choose: Choose,
    begin: Measured,
) -> tuple[list[Measured], Choice]:
    """Search a space; returns all measured rows and the choice among them.

    1. Measure all setups of RAM at a few purchases. These measurements show any large difference.
    2. Measure tiers behind RAM at a few purchases. These replays take several times as long, so combine the
       tiers with few setups of RAM. SSDs are combined with the best setups and the setup that writes least;
       servers with the best setup and the setup that writes most, because other engines can use the blocks
       that a setup writes.
    3. If SSDs would wear out, measure the purchase with a write budget at the rating.
    4. Measure the best setups at all coarse purchases; if step 3 measured rows, include the best setup with a
       write budget.
    5. Bisect between the answer and its neighbours, down to single modules.

    A discarded setup may be the best at a purchase that was not measured. No number is interpolated.

    Args:
        begin: the row without a purchase.
    """
    table = _Table(space, measure, begin)
    rows, coarse = table.rows, space.purchases
    pairs = sum(len(axis.setups) * len(axis.counts) for axis in space.tiers)
    expected = pairs * (KEPT + 1) // len(space.setups) + KEPT * len(coarse)
    table.measure(space.cells(space.sample, space.setups), expected)
    # Setups with separate RAM and with shared RAM are both kept, because the answer compares them.
    apart = [setup for setup in space.setups if not setup.shared_ram]
    pools = [setup for setup in space.setups if setup.shared_ram]
    kept = _kept(rows, apart, difference)
    of_pools = _kept(rows, pools, difference) if pools else []
    in_front = {
        "drives": [*kept, *_extreme_writer(rows, min)],
        "servers": [*kept[:1], *of_pools[:1], *_extreme_writer(rows, max)],
    }
    kept += of_pools
    for axis in space.tiers:
        of_ram = {(setup.store, setup.policy, setup.admission) for setup in in_front[axis.axis]}
        tried = [setup for setup in axis.setups if (setup.store, setup.policy, setup.admission) in of_ram]
        table.measure(space.cells(space.sample, tried), KEPT * len(coarse))
        budgeted = table.measure_within_rating(axis, tried, KEPT * len(coarse))
        kept += _kept(rows, [*tried, *budgeted], difference)
        if budgeted and not any(setup.ssd_write_budget for setup in kept):
            kept += _kept(rows, budgeted, difference)[:1]
    table.measure(space.cells(coarse, kept), _ROUNDS * KEPT)
    return table.bisected(choose, kept)


def confirm(
    space: Space,
    measure: Measure,
    choose: Choose,
    begin: Measured,
    sampled: Choice,
    rows: Sequence[Measured],
    guess: Choose | None,
) -> tuple[list[Measured], Choice]:
    """Check the choice of a search on a sample by measurements on all sessions.

    Returns all measured rows and a new choice.

    1. Measure the recommended purchase with its two best setups. Also measure the purchase that saves most,
       the best infeasible purchase, and the rivals of the recommended purchase (`beside`, `other_ram`).
    2. Step 1 shows the error of the sample for the recommended purchase. Correct all rows of the sample by
       this error, and choose again. Measure this choice and its neighbours with the best setup of step 1, so
       that they differ only in the purchase.
    3. Bisect between the answer and its neighbours.

    Args:
        sampled: choice on the sample.
        rows: rows of the sample.
        guess: function that chooses among the row `begin` and the corrected rows, in this order. If `guess`
            is None, step 2 uses the neighbours in `sampled`.
    """
    purchase, table = sampled.chosen.row.purchase, _Table(space, measure, begin)
    ways = sorted((measured for measured in rows if measured.row.purchase == purchase), key=_quality)
    infeasible = [
        measured
        for measured in rows
        if not measured.row.feasible and measured.row.saved > sampled.most.row.saved
    ]
    best = sorted(infeasible, key=lambda measured: (-measured.row.saved, measured.row.price))[:1]
    compared = [beside(rows, sampled.chosen), other_ram(rows, sampled.chosen)]
    table.measure(_cells_of([*ways[-2:], sampled.most, *best, *compared]), 2 * KEPT)
    near, used = [sampled.smaller, sampled.larger], list[Setup]()
    if purchase != NOTHING:
        answer = max(
            (measured for cell, measured in table.rows.items() if cell.purchase == purchase), key=_quality
        )
        used = [answer.row.setup]
        if guess is not None:
            error = answer.row.saved - next(
                measured.row.saved for measured in ways if measured.row.setup in used
            )
            bought = [measured for measured in rows if measured.row.purchase != NOTHING]
            guessed = guess([begin, *(_corrected(measured, error) for measured in bought)])
            near = [guessed.chosen, guessed.smaller, guessed.larger]
    table.measure(
        [cell for wanted in _cells_of(near) for cell in space.cells([wanted.purchase], used) or [wanted]],
        KEPT,
    )
    return table.bisected(choose, None, 2 * _ROUNDS)


def _quality(measured: Measured) -> tuple[bool, float]:
    return measured.row.feasible, measured.row.saved


def _corrected(measured: Measured, error: float) -> Measured:
    return replace(measured, row=msgspec.structs.replace(measured.row, saved=measured.row.saved + error))


def _cells_of(rows: Iterable[Measured | None]) -> list[Cell]:
    """List the cells of all rows with a purchase. Skips None."""
    return [
        Cell(measured.row.purchase, measured.row.setup)
        for measured in rows
        if measured and measured.row.purchase != NOTHING
    ]


class _Table:
    """The measured rows of a space, by cell. Each cell is measured once."""

    def __init__(self, space: Space, measure: Measure, begin: Measured) -> None:
        self._space, self._measure, self._begin = space, measure, begin
        self.rows: dict[Cell, Measured] = {}

    def measure(self, cells: Iterable[Cell], later: int) -> None:
        new = [cell for cell in dict.fromkeys(cells) if cell not in self.rows]
        self.rows.update(zip(new, self._measure(new, later), strict=True))

    def measure_within_rating(self, axis: TierAxis, setups: Sequence[Setup], later: int) -> list[Setup]:
        """Replace the setups that wear out SSDs by setups with a write budget; measure and return these."""
        cells = [
            Cell(cell.purchase, setup)
            for cell, measured in self.rows.items()
            if cell.setup in setups and measured.row.is_worn
            for setup in axis.within_rating(cell.setup)
        ]
        self.measure(cells, later)
        return [*dict.fromkeys(cell.setup for cell in cells)]

    def bisected(
        self, choose: Choose, kept: Sequence[Setup] | None, most_rounds: int = _ROUNDS
    ) -> tuple[list[Measured], Choice]:
        """Bisect between the answer and its neighbours; return all rows and the choice.

        The new purchases are measured with the setups `kept` or, if `kept` is None, with the answer's setup.
        If the answer has a tier behind RAM and `kept` is given, also bisect between purchases of RAM alone,
        because an amount of RAM between two coarse sizes may be cheaper than the answer.
        """

        def without_tier(rows: Sequence[Measured]) -> Choice:
            return choose([measured for measured in rows if not _has_tier(measured)])

        answer = self._bisect(choose, kept, most_rounds)
        if _has_tier(answer.chosen) and kept is not None:
            self._bisect(without_tier, kept, most_rounds)
            answer = choose(self._all)
        return self._all, answer

    def _bisect(self, choose: Choose, kept: Sequence[Setup] | None, most_rounds: int) -> Choice:
        answer = choose(self._all)
        for rounds_left in reversed(range(most_rounds)):
            setups = [answer.chosen.row.setup] if kept is None else kept
            near = self._space.cells(_between(answer.chosen.row.purchase, self.rows), setups)
            if all(cell in self.rows for cell in near):
                break
            self.measure(near, rounds_left * KEPT)
            answer = choose(self._all)
        return answer

    @property
    def _all(self) -> list[Measured]:
        return [self._begin, *self.rows.values()]


def _has_tier(measured: Measured) -> bool:
    return bool(measured.row.ssd_drives or measured.row.servers)


def _ends_and_middle(values: Sequence[int]) -> list[int]:
    places = sorted({0, len(values) // 2, len(values) - 1}) if values else []
    return [values[place] for place in places]


def _kept(rows: dict[Cell, Measured], setups: Sequence[Setup], difference: Difference) -> list[Setup]:
    """Select up to `KEPT` setups, ranked by the number of purchases at which a setup is the best.

    A tie between two setups is decided by a second number: at how many purchases the setup is not
    significantly worse than the best setup. A purchase's infeasible rows count only if the purchase has no
    feasible row. If setups have equal results at every purchase (`_are_equal`), only the first of them is
    selected.
    """
    wins: dict[Setup, tuple[int, int, float]] = dict.fromkeys(setups, (0, 0, 0.0))
    by_purchase: dict[Purchase, list[Measured]] = {}
    for cell, measured in rows.items():
        if cell.setup in wins:
            by_purchase.setdefault(cell.purchase, []).append(measured)
    for rivals in by_purchase.values():
        possible = [measured for measured in rivals if measured.row.feasible] or rivals
        best = max(possible, key=lambda measured: measured.row.saved)
        for measured in possible:
            lead = difference(best, measured)
            is_best = measured.row.saved == best.row.saved
            alike = is_best or (lead is not None and lead.low <= 0)
            first, second, total = wins[measured.row.setup]
            wins[measured.row.setup] = (first + is_best, second + alike, total + measured.row.saved)
    ranked, kept = sorted(wins, key=lambda setup: wins[setup], reverse=True), list[Setup]()
    for setup in ranked:
        if wins[setup] > (0, 0, 0.0) and not any(_are_equal(rows, setup, other) for other in kept):
            kept.append(setup)
    return kept[:KEPT] or ranked[:1]


def _are_equal(rows: dict[Cell, Measured], setup: Setup, other: Setup) -> bool:
    """Return True if two setups have equal savings and writes wherever both were measured."""

    def writes(measured: Measured) -> tuple[float | None, ...]:
        row = measured.row
        return row.ram_write_bytes_per_s, row.ssd_write_bytes_per_s, row.server_write_bytes_per_s

    pairs = [(own, rows.get(Cell(cell.purchase, other))) for cell, own in rows.items() if cell.setup == setup]
    return all(
        rival is None or (writes(own) == writes(rival) and np.array_equal(own.hits, rival.hits))
        for own, rival in pairs
    )


def _extreme_writer(rows: dict[Cell, Measured], extreme: Callable[..., Setup]) -> list[Setup]:
    """Return a list with the setup that writes least (`extreme` is `min`) or most (`max`) to RAM.

    This setup also writes least or most to the tiers behind RAM. The list is empty if `rows` is empty.
    """
    written: dict[Setup, float] = {}
    for cell, measured in rows.items():
        written[cell.setup] = written.get(cell.setup, 0.0) + (measured.row.ram_write_bytes_per_s or 0.0)
    return [extreme(written, key=lambda setup: written[setup])] if written else []


def _between(chosen: Purchase, rows: dict[Cell, Measured]) -> list[Purchase]:
    """List the midpoints between the answer and its measured neighbours, along each axis."""
    known = {cell.purchase for cell in rows}
    if chosen == NOTHING:
        return []
    midpoints = []
    for axis, name in enumerate(Purchase._fields):
        origin = chosen._replace(**{name: 0})
        line = sorted(
            {purchase[axis] for purchase in known if purchase._replace(**{name: 0}) == origin} | {0}
        )
        place = line.index(chosen[axis])
        for neighbour in (*line[max(0, place - 1) : place], *line[place + 1 : place + 2]):
            middle = (neighbour + chosen[axis]) // 2
            if middle not in line and (middle or axis):
                midpoints.append(chosen._replace(**{name: middle}))
    return midpoints
