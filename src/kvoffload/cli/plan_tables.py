"""A plan for people: the answer in words, the purchases, what the answer rests on."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvoffload.plan.plan import PlanAnswer
from kvoffload.plan.rows import PlanRow
from kvoffload.plan.words import money
from kvoffload.text import duration, interval, percent, size

_WIDEST = 120
_ROOMY, _NARROW = 110, 6
"""Columns of text for all columns of the table, and how many of these are shown in fewer."""
_PLACE_OF_WAITS = 5
"""Where waits stand, if they were asked for. Servers then are not looked at."""
_PLACE_OF_SERVERS = 3
"""Where servers stand, if they were looked at."""


def tables(found: PlanAnswer, width: int = _WIDEST) -> Iterator[RenderableType]:
    """The parts of the answer, the most important first."""
    yield Text("\n".join(found.words) + "\n")
    yield _purchases(found, min(width, _WIDEST))
    yield Text(
        "\n".join(["What the recording cannot tell", *(f"  {one}" for one in found.cannot_tell)]) + "\n"
    )
    yield _assumptions(found)


def _purchases(found: PlanAnswer, width: int) -> RenderableType:
    table = Table(box=box.SIMPLE_HEAD, width=width)
    names = ["", "RAM", "SSD", found.currency, "saved", "drive writes a day", "95 %", "of ceiling"]
    if found.needed_ttft_p90_s is not None:
        names.insert(_PLACE_OF_WAITS, "TTFT p90")
    if found.has_servers:
        names.insert(_PLACE_OF_SERVERS, "servers")
    shown = len(names) if width >= _ROOMY else _NARROW + found.has_servers
    for name in names[:shown]:
        table.add_column(name, justify="right" if name else "left", max_width=12)
    table.add_column("used so; or why not", ratio=1)
    shown_rows = _worth_a_line(found)
    for row in shown_rows:
        *numbers, use = _cells(row, found)
        table.add_row(*numbers[:shown], use, style="" if row.feasible else "dim")
    title = f"{found.trace}: what saves more than all that is cheaper; * is recommended"
    title += "; x would, and cannot be" if any(not row.feasible for row in shown_rows) else ""
    return Group(Text(title, "italic"), table)


def _worth_a_line(found: PlanAnswer) -> list[PlanRow]:
    """The frontier, and what would be on it if it could be; the output has every row."""
    shown: list[PlanRow] = []
    most_that_cannot = 0.0
    for row in found.purchases:
        if row.feasible and (row in found.frontier or row == found.chosen):
            shown.append(row)
        elif not row.feasible and row.saved > max([most_that_cannot, *(one.saved for one in shown)]):
            most_that_cannot = row.saved
            shown.append(row)
    return shown


def _cells(row: PlanRow, found: PlanAnswer) -> list[str]:
    mark = "*" if row == found.chosen else "" if row.feasible else "x"
    cells = [
        mark,
        size(row.ram_bytes) if row.ram_bytes else "-",
        size(row.ssd_bytes, 1000) if row.ssd_bytes else "-",
        money(row.price, "").strip(),
        percent(row.saved),
        "" if row.drive_writes_a_day is None else f"{row.drive_writes_a_day:,.2f}",
        interval(row.saved_low, row.saved_high),
        "" if row.of_ceiling is None else percent(row.of_ceiling, 0),
        str(row.setup) if row.feasible else row.why_not,
    ]  # fmt: skip
    if found.needed_ttft_p90_s is not None:
        cells.insert(_PLACE_OF_WAITS, "" if row.ttft_p90_s is None else duration(row.ttft_p90_s))
    if found.has_servers:
        cells.insert(_PLACE_OF_SERVERS, str(row.servers) if row.servers else "-")
    return cells


def _assumptions(found: PlanAnswer) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    for one in found.assumptions:
        table.add_row(f"  {one.name}", one.value, one.source)
    return Group(Text("What this rests on", "italic"), table, Text())
