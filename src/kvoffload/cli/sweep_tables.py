"""A sweep for people: a table for each trace and device, policies down, capacities across."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from statistics import median

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvoffload.cli.replay_table import assumption
from kvoffload.sweep.table import Row

_CORRELATED = 0.35
"""Two standard errors for 32 windows: if half of the rows are above, windows are not independent."""


def tables(rows: Sequence[Row]) -> Iterator[RenderableType]:
    """The tables, in the order of the rows."""
    several_stores = len({row.store for row in rows}) > 1
    several_tiers = len({row.tiers for row in rows}) > 1
    for _, group in groupby(rows, lambda row: (row.trace_sha256, row.trace, row.device)):
        yield _table(list(group), several_stores, several_tiers)


def _table(rows: list[Row], several_stores: bool, several_tiers: bool) -> RenderableType:
    first = rows[0]
    cells = {(_label(row, several_stores, several_tiers), row.capacity): row for row in rows}
    labels, capacities = (list(dict.fromkeys(key[part] for key in cells)) for part in (0, 1))
    # Not the table's own title, which is folded at the table's width.
    behind = f", {first.tiers} behind RAM" if first.tier_blocks and not several_tiers else ""
    title = Text(
        f"{first.trace}, {_device(rows)}{behind}: prefix-hit ratio, and writes per reference", "italic"
    )
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("", no_wrap=True)
    at = {row.capacity: row for row in rows}
    for capacity in capacities:
        table.add_column(_heading(at[capacity]), justify="right")
    for label in labels:
        table.add_row(label, *(_cell(cells.get((label, capacity))) for capacity in capacities))
    table.add_section()
    # What can be reached depends on when blocks are stored.
    for store, tiers in dict.fromkeys((row.store, row.tiers) for row in rows):
        best = {
            row.capacity: row.optimum_hit_ratio for row in rows if (row.store, row.tiers) == (store, tiers)
        }
        if any(ratio is not None for ratio in best.values()):
            label = f"optimum, {store}" if several_stores else "optimum"
            label += f", {tiers} behind" if several_tiers else ""
            ratios = (best.get(capacity) for capacity in capacities)
            table.add_row(label, *("" if ratio is None else f"{ratio:.4f}      -" for ratio in ratios))
    table.add_row("no limit", *(f"{at[capacity].infinite_hit_ratio:.4f}      -" for capacity in capacities))
    note = "  * the best at this capacity"
    if first.ci_low is not None:
        note += f", or not told apart from it (paired bootstrap, 95%, seed {first.seed})"
    if first.decode_tokens_per_s:
        note += f"\n  {assumption(first.decode_tokens_per_s)}"
    correlations = [
        row.diff_correlation for row in rows if row.diff_vs_lru and row.diff_correlation is not None
    ]
    if correlations and median(correlations) > _CORRELATED:
        note += (
            "\n  The traffic changes slowly over this trace: there is less certainty than * says "
            "(docs/sweep.md)"
        )
    return Group(title, table, Text(note + "\n"))


def _label(row: Row, several_stores: bool, several_tiers: bool) -> str:
    label = row.policy if row.admission == "all" else f"{row.policy}, {row.admission}"
    label += f", {row.tiers} behind" if several_tiers else ""
    return f"{label}, {row.store}" if several_stores else label


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


def _cell(row: Row | None) -> Text:
    if row is None:
        return Text()
    mark, style = ("*", "bold") if row.among_best else (" ", "")
    return Text(f"{row.prefix_hit_ratio:.4f}{mark} {row.writes_per_ref:5.3f}", style)
