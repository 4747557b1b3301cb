"""Which cells of a plan are measured: few places with every setup, then more with the best setups, then near
the answer.

Owns the order of the search. Knows cells and rows; neither replays nor prices.
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
from kvoffload.plan.targets import Choice, Difference, beside

KEPT = 2
"""Setups that are measured everywhere, of those of RAM alone and of those with each thing behind it."""
_ROUNDS = 4
"""Of halving the steps around the answer; twice as many where a sample said where that is."""

Measure = Callable[[Sequence[Cell], int], "list[Measured]"]
"""Cells -> their rows. The number: how many cells are expected to follow, for an estimate of the time."""
Choose = Callable[[Sequence[Measured]], Choice]
"""Rows, one of which buys nothing -> the choice among them."""


@dataclass(frozen=True)
class Behind:
    """What may stand behind RAM.

    Attributes:
        axis: which number of a purchase this is.
        counts: that are looked at, ascending, without 0 (`Fleet.steps`, `Fleet.server_steps`).
        setups: ways to use it and RAM.
    """

    axis: Literal["drives", "servers"]
    counts: Sequence[int]
    setups: Sequence[Setup]

    def with_ram(self, modules: int, count: int) -> Purchase:
        """So many of it, behind so many modules."""
        return Purchase(modules, 0)._replace(**{self.axis: count})


@dataclass(frozen=True)
class Space:
    """What is searched.

    Attributes:
        modules: of a host, ascending.
        setups: ways to use RAM alone.
        behind: what may stand behind RAM; a purchase has one of these at most.
        allowed: whether a purchase is looked at.
        edge: purchases besides the coarse ones: what a budget just buys.
    """

    modules: Sequence[int]
    setups: Sequence[Setup]
    behind: Sequence[Behind] = ()
    allowed: Callable[[Purchase], bool] = lambda purchase: True
    edge: Sequence[Purchase] = ()

    def cells(self, purchases: Iterable[Purchase], setups: Iterable[Setup]) -> list[Cell]:
        """Every setup at every purchase where it makes sense and that is looked at."""
        return [
            Cell(purchase, setup)
            for purchase, setup in itertools.product(purchases, setups)
            if bool(purchase.drives) == bool(setup.ssd_policy)
            and bool(purchase.servers) == bool(setup.server_admission)
            and self.allowed(purchase)
        ]

    @property
    def purchases(self) -> list[Purchase]:
        """Those that are looked at before anything of the answer is known."""
        alone = [Purchase(0, 0), *(its.with_ram(0, n) for its in self.behind for n in its.counts)]
        steps = [one._replace(modules=modules) for modules in self.modules for one in alone]
        return [one for one in dict.fromkeys((*steps, *self.edge)) if self.allowed(one)]

    @property
    def sample(self) -> list[Purchase]:
        """A few: RAM at both ends and in the middle; all else behind little RAM and behind a middling
        amount."""
        ram = _ends_and_middle(self.modules)
        found = [Purchase(one, 0) for one in ram]
        for its in self.behind:
            counts = _ends_and_middle(its.counts)
            few = [(ram[0], one) for one in counts[1:]] + [(ram[len(ram) // 2], one) for one in counts[:1]]
            found += itertools.starmap(its.with_ram, dict.fromkeys(few))
        return found


def search(
    space: Space,
    measure: Measure,
    difference: Difference,
    choose: Choose,
    begin: Measured,
) -> tuple[list[Measured], Choice]:
    """Measure what an answer takes; all rows, and the choice among them.

    1. Every setup of RAM at a few places: where setups differ much, they differ there.
    2. At a few places, for a replay with either costs several times one without: SSDs behind those that were
       best most often and the one that writes least; servers behind the best one and the one that writes
       most, because what is stored is there for others.
    3. The best of each at every coarse place.
    4. Between the answer and its neighbours, in halves: purchases come in single modules.

    A setup that is given up may be the best at a place in between; it was then behind at all places that were
    looked at. No number is interpolated.

    Args:
        begin: the row that buys nothing.
    """
    found = _Found(measure)
    rows, look, coarse = found.rows, found.look, space.purchases
    behind = sum(len(its.setups) * len(its.counts) for its in space.behind) * (KEPT + 1) // len(space.setups)
    look(space.cells(space.sample, space.setups), behind + KEPT * len(coarse))
    kept = _kept(rows, space.setups, difference)
    before = {
        "drives": [*kept, *_that_writes(rows, min)],
        "servers": [*kept[:1], *_that_writes(rows, max)],
    }
    for its in space.behind:
        first = {(one.store, one.policy, one.admission) for one in before[its.axis]}
        tried = [one for one in its.setups if (one.store, one.policy, one.admission) in first]
        look(space.cells(space.sample, tried), KEPT * len(coarse))
        kept += _kept(rows, tried, difference)
    look(space.cells(coarse, kept), _ROUNDS * KEPT)
    return _halved(space, found, kept, choose, begin)


def confirm(
    space: Space,
    measure: Measure,
    choose: Choose,
    begin: Measured,
    sampled: Choice,
    rows: Sequence[Measured],
    guess: Choose | None,
) -> tuple[list[Measured], Choice]:
    """Measure on all what a search on a sample has found; all rows so measured, and the choice among them.

    1. The recommended purchase with the two setups that were best for it, the one that saves most, the best
       of those that cannot be, and what tells whether sharing is worth it (`beside`), each with its best
       setup.
    2. What would be recommended if the sample were wrong by as much everywhere as in step 1, and its
       neighbours, used as the first was used best: what is compared differs in one thing.
    3. Half-way between the answer and its neighbours.

    Args:
        sampled: what was chosen on the sample; rows: its rows.
        guess: chooses among rows that are corrected and not measured; None to take `sampled` for step 2.
    """
    its, found = sampled.chosen.row.purchase, _Found(measure)
    ways = sorted((one for one in rows if one.row.purchase == its), key=_how_good)
    cannot = [one for one in rows if not one.row.feasible and one.row.saved > sampled.most.row.saved]
    best = sorted(cannot, key=lambda one: (-one.row.saved, one.row.price))[:1]
    found.look(_cells_of([*ways[-2:], sampled.most, *best, beside(rows, sampled.chosen)]), 2 * KEPT)
    near, used = [sampled.smaller, sampled.larger], list[Setup]()
    if its != NOTHING:
        answer = max((one for cell, one in found.rows.items() if cell.purchase == its), key=_how_good)
        used = [answer.row.setup]
        if guess is not None:
            by = answer.row.saved - next(one.row.saved for one in ways if one.row.setup in used)
            guessed = guess([begin, *(_corrected(one, by) for one in rows if one.row.purchase != NOTHING)])
            near = [guessed.chosen, guessed.smaller, guessed.larger]
    found.look([cell for one in _cells_of(near) for cell in space.cells([one.purchase], used) or [one]], KEPT)
    return _halved(space, found, None, choose, begin, 2 * _ROUNDS)


def _how_good(one: Measured) -> tuple[bool, float]:
    return one.row.feasible, one.row.saved


def _corrected(one: Measured, by: float) -> Measured:
    return replace(one, row=msgspec.structs.replace(one.row, saved=one.row.saved + by))


def _cells_of(rows: Iterable[Measured | None]) -> list[Cell]:
    """Of those that buy something."""
    return [Cell(one.row.purchase, one.row.setup) for one in rows if one and one.row.purchase != NOTHING]


class _Found:
    """Rows of cells, each measured once."""

    def __init__(self, measure: Measure) -> None:
        self._measure = measure
        self.rows: dict[Cell, Measured] = {}

    def look(self, cells: Iterable[Cell], later: int) -> None:
        new = [cell for cell in dict.fromkeys(cells) if cell not in self.rows]
        self.rows.update(zip(new, self._measure(new, later), strict=True))


def _halved(
    space: Space,
    found: _Found,
    kept: Sequence[Setup] | None,
    choose: Choose,
    begin: Measured,
    most_rounds: int = _ROUNDS,
) -> tuple[list[Measured], Choice]:
    """Half-way between the answer and its neighbours, until nothing is left between; with these setups, or
    with the answer's alone."""
    answer = choose([begin, *found.rows.values()])
    for left in reversed(range(most_rounds)):
        setups = [answer.chosen.row.setup] if kept is None else kept
        near = space.cells(_between(answer.chosen.row.purchase, found.rows), setups)
        if all(cell in found.rows for cell in near):
            break
        found.look(near, left * KEPT)
        answer = choose([begin, *found.rows.values()])
    return [begin, *found.rows.values()], answer


def _ends_and_middle(values: Sequence[int]) -> list[int]:
    places = sorted({0, len(values) // 2, len(values) - 1}) if values else []
    return [values[place] for place in places]


def _kept(rows: dict[Cell, Measured], setups: Sequence[Setup], difference: Difference) -> list[Setup]:
    """The setups that are best most often, then those that cannot be told apart from the best most often.

    Among those that can be; what wears out SSDs everywhere is kept only if all do. Of those that do the same
    everywhere, as an admission rule that refuses nothing, one.
    """
    wins: dict[Setup, tuple[int, int, float]] = dict.fromkeys(setups, (0, 0, 0.0))
    by_purchase: dict[Purchase, list[Measured]] = {}
    for cell, one in rows.items():
        if cell.setup in wins:
            by_purchase.setdefault(cell.purchase, []).append(one)
    for rivals in by_purchase.values():
        possible = [one for one in rivals if one.row.feasible] or rivals
        best = max(possible, key=lambda one: one.row.saved)
        for one in possible:
            lead = difference(best, one)
            is_best = one.row.saved == best.row.saved
            alike = is_best or (lead is not None and lead.low <= 0)
            first, second, total = wins[one.row.setup]
            wins[one.row.setup] = (first + is_best, second + alike, total + one.row.saved)
    ranked, kept = sorted(wins, key=lambda one: wins[one], reverse=True), list[Setup]()
    for setup in ranked:
        if wins[setup] > (0, 0, 0.0) and not any(_do_the_same(rows, setup, other) for other in kept):
            kept.append(setup)
    return kept[:KEPT] or ranked[:1]


def _do_the_same(rows: dict[Cell, Measured], one: Setup, other: Setup) -> bool:
    """Whether two setups save and write the same wherever both were measured."""

    def done(its: Measured) -> tuple[float | None, ...]:
        row = its.row
        return row.ram_write_bytes_per_s, row.ssd_write_bytes_per_s, row.server_write_bytes_per_s

    pairs = [(its, rows.get(Cell(cell.purchase, other))) for cell, its in rows.items() if cell.setup == one]
    return all(
        rival is None or (done(its) == done(rival) and np.array_equal(its.hits, rival.hits))
        for its, rival in pairs
    )


def _that_writes(rows: dict[Cell, Measured], extreme: Callable[..., Setup]) -> list[Setup]:
    """The setup that writes least to RAM (`min`), or most (`max`), and so to what is behind it; none where no
    times are known."""
    written: dict[Setup, float] = {}
    for cell, one in rows.items():
        written[cell.setup] = written.get(cell.setup, 0.0) + (one.row.ram_write_bytes_per_s or 0.0)
    return [extreme(written, key=lambda one: written[one])] if written else []


def _between(chosen: Purchase, rows: dict[Cell, Measured]) -> list[Purchase]:
    """Half-way between the answer and the next ones below and above that were measured, along each axis."""
    known = {cell.purchase for cell in rows}
    if chosen == NOTHING:
        return []
    found = []
    for axis, name in enumerate(Purchase._fields):
        others = chosen._replace(**{name: 0})
        line = sorted({one[axis] for one in known if one._replace(**{name: 0}) == others} | {0})
        place = line.index(chosen[axis])
        for other in (*line[max(0, place - 1) : place], *line[place + 1 : place + 2]):
            middle = (other + chosen[axis]) // 2
            if middle not in line and (middle or axis):
                found.append(chosen._replace(**{name: middle}))
    return found
