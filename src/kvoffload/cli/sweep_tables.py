"""Terminal form of a sweep: verdicts, and a table of policies and capacities for each trace and device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from statistics import median
from typing import NamedTuple

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvoffload.cli.replay_table import assumed_ends, assumed_queue
from kvoffload.sweep.bootstrap import CORRELATED
from kvoffload.sweep.table import Row
from kvoffload.sweep.verdict import Verdict, ram_of
from kvoffload.text import outside_blocks, percent, size

_WIDEST = 100
"""Largest number of characters per line. Columns of a wider table continue in a table below."""

_OF_A_COLUMN, _OF_A_TABLE = 3, 1
"""Characters that rich adds to the width of each column, and to the width of the table."""


class _Cell(NamedTuple):
    """Texts for one configuration at one capacity: hits, writes, and the share of the gap between LRU and the
    optimum that the configuration closes."""

    hits: str = ""
    writes: str = ""
    gap: str = ""
    style: str = ""


_Line = dict[str, _Cell]
"""One line of a table: capacity as typed by the user -> cell."""


class _Several(NamedTuple):
    """Flags that are True for an axis on which the rows have several values. The labels of table lines then
    name the value.
    """

    stores: bool
    tiers: bool
    pools: bool


def tables(rows: Sequence[Row], width: int = _WIDEST) -> Iterator[RenderableType]:
    """Render a table for each trace and device, in the order of the rows.

    A table has at most `width` and at most 100 characters per line.
    """
    several = _Several(
        len({row.store for row in rows}) > 1,
        len({row.tiers for row in rows}) > 1,
        len({row.shared_ram for row in rows}) > 1,
    )
    for _, group in groupby(rows, lambda row: (row.trace_sha256, row.trace, row.device)):
        yield _table(list(group), several, min(width, _WIDEST))


def words(verdicts: Sequence[Verdict]) -> Iterator[RenderableType]:
    """Render the verdicts: a line for each capacity, store mode and tiers."""

    def table_of(verdict: Verdict) -> tuple[str, str, str]:
        return verdict.best.trace_sha256, verdict.best.trace, verdict.best.device

    for _, group in groupby(verdicts, table_of):
        of_table = list(group)
        rows = [verdict.best for verdict in of_table]
        lines = Table.grid(padding=(0, 1))
        lines.add_column(no_wrap=True)
        lines.add_column()
        for verdict in of_table:
            lines.add_row(Text(f"  {verdict.where}:"), Text(verdict.words))
        yield Group(Text(f"{rows[0].trace}, {_device(rows)}, in words", "italic"), lines, Text())


def _table(rows: list[Row], several: _Several, width: int) -> RenderableType:
    body: dict[str, _Line] = {}
    for row in rows:
        body.setdefault(_label(row, several), {})[row.capacity] = _cell(row)
    bounds = _bounds(rows, several)
    headings = {row.capacity: _heading(row) for row in rows}
    widths = [max(len(cell[part]) for line in [*body.values(), *bounds.values()] for cell in line.values())
              for part in range(3)]  # fmt: skip
    # Rich would wrap the cells. Instead, capacities that do not fit continue in a table below.
    label_width = max(map(len, [*body, *bounds]))
    column = max(sum(widths) + sum(width > 0 for width in widths) - 1, *map(_longest_line, headings.values()))
    room = width - label_width - _OF_A_COLUMN - _OF_A_TABLE
    across = max(1, room // (column + _OF_A_COLUMN))
    capacities = list(headings)
    parts = []
    for start in range(0, len(capacities), across):
        table = Table(box=box.SIMPLE_HEAD)
        table.add_column("", no_wrap=True)
        shown = capacities[start : start + across]
        for capacity in shown:
            table.add_column(Text(headings[capacity], justify="right"), no_wrap=True)
        for section in (body, bounds):
            for label, line in section.items():
                table.add_row(label, *(_text(line.get(capacity, _Cell()), widths) for capacity in shown))
            table.add_section()
        parts.append(table)
    return Group(_title(rows, several), *parts, _note(rows))


def _title(rows: list[Row], several: _Several) -> Text:
    # Printed here, because rich would wrap its own title at the table's width.
    first = rows[0]
    tiers = f", {first.tiers} behind RAM" if first.tier_blocks and not several.tiers else ""
    writes = "writes per reference" if first.bytes_written is None else "bytes written"
    columns = f"prefix-hit ratio, {writes}"
    if any(row.gap_closed is not None for row in rows):
        columns += ", share of the gap from lru to the optimum"
    return Text(f"{first.trace}, {_device(rows)}{tiers}\n{columns}", "italic")


def _bounds(rows: list[Row], several: _Several) -> dict[str, _Line]:
    """Build the lines of upper bounds: the optimum at each capacity, and an unlimited cache."""
    bounds: dict[str, _Line] = {}
    for row in rows:
        label = f"optimum, {row.store}" if several.stores else "optimum"
        label += f", {row.tiers} behind" if several.tiers else ""
        label += f", {ram_of(row)}" if several.pools else ""
        bounds.setdefault(label, {})[row.capacity] = _Cell(f"{row.optimum_hit_ratio:.4f} ", "-")
    bounds["no limit"] = {row.capacity: _Cell(f"{row.infinite_hit_ratio:.4f} ", "-") for row in rows}
    return bounds


def _note(rows: list[Row]) -> Text:
    note = "  * the best at this capacity"
    if rows[0].ci_low is not None:
        note += f", or not told apart from it (paired bootstrap, 95%, seed {rows[0].seed})"
    if rows[0].decode_tokens_per_s:
        note += f"\n  {assumed_ends(rows[0].decode_tokens_per_s)}"
    if rows[0].queue_requests:
        note += f"\n  {assumed_queue(rows[0].queue_requests)}"
    if rows[0].instances > 1:
        ram, instances = "RAM of this size each", rows[0].instances
        if any(row.shared_ram for row in rows):
            pool = f"one pool of {instances} times this size (shared RAM)"
            ram = f"{ram}, or {pool}" if not all(row.shared_ram for row in rows) else pool
        note += f"\n  {instances} instances have {ram}; requests go by {rows[0].routing}"
        shares = [row.others_hit_ratio for row in rows]
        note += f"\n  Of all references {_range(shares)} hit what another instance had written"
    correlations = [
        row.diff_correlation for row in rows if row.diff_vs_lru and row.diff_correlation is not None
    ]
    if correlations and median(correlations) > CORRELATED:
        note += "\n  The traffic changes slowly over this trace: the intervals are too narrow (docs/sweep.md)"
    for sentence in outside_blocks(rows[0].share_outside_blocks):
        note += f"\n  {sentence}"
    return Text(note + "\n")


def _range(shares: list[float]) -> str:
    low, high = percent(min(shares)), percent(max(shares))
    return low if low == high else f"{low} to {high}"


def _label(row: Row, several: _Several) -> str:
    label = row.policy if row.admission == "all" else f"{row.policy}, {row.admission}"
    label += f", {row.tiers} behind" if several.tiers else ""
    label += f", {row.store}" if several.stores else ""
    return f"{label}, {ram_of(row)}" if several.pools else label


def _device(rows: list[Row]) -> str:
    sizes = {row.device_blocks for row in rows}
    if sizes == {0}:
        return "no device cache"
    typed = rows[0].device
    if len(sizes) > 1:
        return f"behind a device cache of {typed} the tier's size"
    blocks = f"{sizes.pop():,} blocks"
    return "behind a device cache of " + (blocks if typed.isdigit() else f"{typed} ({blocks})")


def _heading(row: Row) -> str:
    blocks = f"{row.capacity_blocks:,}"
    return blocks if row.capacity == str(row.capacity_blocks) else f"{row.capacity}\n{blocks}"


def _longest_line(text: str) -> int:
    return max(map(len, text.split("\n")))


def _cell(row: Row) -> _Cell:
    mark, style = ("*", "bold") if row.among_best else (" ", "")
    writes = f"{row.writes_per_ref:.3f}" if row.bytes_written is None else size(row.bytes_written)
    # Rounded before formatting, so that a share just below 0 does not become -0%.
    gap = "" if row.gap_closed is None else f"{round(100 * row.gap_closed)}%"
    return _Cell(f"{row.prefix_hit_ratio:.4f}{mark}", writes, gap, style)


def _text(cell: _Cell, widths: Sequence[int]) -> Text:
    parts = (cell[part].rjust(width) for part, width in enumerate(widths) if width)
    return Text(" ".join(parts), cell.style)
