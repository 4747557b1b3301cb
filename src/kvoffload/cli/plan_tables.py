"""Terminal form of a plan: the answer in words, the purchases, the assumptions."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.text import Text

from kvoffload.cli.check_table import checked_table
from kvoffload.cli.output import Lines, terminal_table
from kvoffload.pages.page import Table
from kvoffload.pages.plan import purchases_table
from kvoffload.plan.plan import PlanAnswer
from kvoffload.plan.rows import PlanRow

_WIDEST = 120
_ROOMY, _NARROW = 110, 6
"""A terminal of `_ROOMY` or more characters per line shows all columns of the table. A narrower terminal
shows the first `_NARROW` columns and the last column; if rows have cache servers, one column more."""


def tables(answer: PlanAnswer, width: int = _WIDEST) -> Iterator[RenderableType]:
    """Render the parts of the answer, the most important first."""
    yield Lines(answer.words, indent="")
    yield Text()
    rows = _worth_a_line(answer)
    title = f"{answer.trace}: purchases that save more than every cheaper one; * is recommended"
    title += "; x is infeasible" if any(not row.feasible for row in rows) else ""
    table = purchases_table(answer, rows, title)
    if width < _ROOMY:
        table = _first_columns(table, _NARROW + answer.has_servers)
    yield terminal_table(table, width=min(width, _WIDEST))
    if answer.present is not None and answer.check is not None:
        yield Lines([answer.present.sentence], indent="")
        yield checked_table(answer.check)
    yield Text("What the recording cannot tell")
    yield Lines(answer.cannot_tell)
    yield Text()
    assumptions = [
        (assumption.name, assumption.value, assumption.source) for assumption in answer.assumptions
    ]
    if width < _ROOMY:
        yield Text("Assumptions")
        yield Lines([f"{name}: {value}; {source}" for name, value, source in assumptions])
    else:
        yield terminal_table(Table("Assumptions", ("", "", ""), assumptions))


def _first_columns(table: Table, count: int) -> Table:
    """Return a table with the first `count` columns and the last column."""
    rows = [(*row[:count], row[-1]) for row in table.rows]
    return Table(table.title, (*table.headings[:count], table.headings[-1]), rows, table.marks)


def _worth_a_line(answer: PlanAnswer) -> list[PlanRow]:
    """Return the rows to show: the frontier, the recommended row, and some infeasible rows.

    The frontier consists of the rows that save more than every cheaper row. An infeasible row is shown if it
    saves more than every row that is shown before it.
    """
    shown: list[PlanRow] = []
    most_infeasible = 0.0
    for row in answer.purchases:
        if row.feasible and (row in answer.frontier or row == answer.chosen):
            shown.append(row)
        elif not row.feasible and row.saved > max([most_infeasible, *(other.saved for other in shown)]):
            most_infeasible = row.saved
            shown.append(row)
    return shown
