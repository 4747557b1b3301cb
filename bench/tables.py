"""Tables of a sweep in Markdown. `--write` puts a selection into docs/policies.md.

Reads docs/data/sweep.csv (columns: docs/sweep.md) or the named file. `targets` checks `hazard`. Knows only
the names of policies.

    python bench/tables.py [SWEEP.csv] [--write]
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from targets import Row, Rows, largest_shortfalls, table_of_targets

ROOT = Path(__file__).resolve().parent.parent
SWEEP = ROOT / "docs" / "data" / "sweep.csv"
DOCUMENT = ROOT / "docs" / "policies.md"
CAPACITIES = ("1%", "2%", "5%", "10%", "20%")
DEVICES = ("0", "0.25x", "0.5x", "1x")
SHOWN_TRACES, SHOWN_CAPACITIES = ("agentic_3h", "conversation_first60"), ("1%", "5%")
"""Columns of the document's table, without a device. Printed tables have all columns."""
GATED = ("lru",)
"""Policies with a row for each admission rule; the table would be too long with all policies."""


def read_rows(path: Path) -> Rows:
    """Read the rows of a sweep."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = [
            Row(
                trace=row["trace"],
                device=row["device"],
                store=row["store"],
                capacity=row["capacity"],
                policy=row["policy"],
                admission=row["admission"],
                hits=float(row["prefix_hit_ratio"]),
                added=float(row["offload_hit_ratio"]),
                writes=float(row["writes_per_ref"]),
                optimum=float(row["optimum_hit_ratio"]) if row["optimum_hit_ratio"] else None,
            )
            for row in csv.DictReader(file)
        ]
    return Rows(rows)


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Format a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def table_of_hits(rows: Rows, trace: str, device: str, store: str, shown: Sequence[str] = CAPACITIES) -> str:
    """Format policies by capacities: hits, writes, share of the gap closed. Empty if not swept."""
    header, *lines = _hits(rows, trace, device, store, shown)
    return markdown(header, lines) if lines else ""


def _hits(rows: Rows, trace: str, device: str, store: str, shown: Sequence[str]) -> list[list[str]]:
    """Header and lines of a table of hits; only the header if not swept."""
    capacities = [capacity for capacity in shown if rows.optimum(trace, device, store, capacity) is not None]
    if not capacities:
        return [[store]]
    lines = [[store, *capacities]]
    for policy, admission in rows.contestants(trace, device, store):
        if admission != "all" and policy not in GATED:
            continue
        cells = [rows.find(trace, device, store, capacity, policy, admission) for capacity in capacities]
        if any(cells):
            name = f"`{policy}`" if admission == "all" else f"`{policy}`, `{admission}`"
            lines.append([name, *(_cell(rows, cell) for cell in cells)])
    best = [rows.optimum(trace, device, store, capacity) for capacity in capacities]
    lines.append(["*optimum*", *("" if ratio is None else f"*{ratio:.3f}*" for ratio in best)])
    return lines


def _cell(rows: Rows, row: Row | None) -> str:
    if row is None:
        return ""
    gap = rows.gap_closed(row)
    share = "" if gap is None or (row.policy, row.admission) == ("lru", "all") else f", {_percent(gap)}"
    return f"{row.hits:.3f}, {row.writes:.2f}{share}"


def _percent(share: float) -> str:
    return f"{round(100 * share):+d}%".replace("+0%", "0%")


@dataclass(frozen=True)
class Choice:
    """A recommendation, and the two rows of each trace that support it."""

    situation: str
    choose: str
    device: str
    capacity: str
    before: tuple[str, str, str]
    after: tuple[str, str, str]


_LRU = ("lru", "all", "on-compute")
CHOICES = (
    Choice(
        "device and RAM of similar size",
        "victim tier",
        "1x",
        "5%",
        _LRU,
        ("lru", "all", "on-device-eviction"),
    ),
    Choice(
        "similar size, RAM smaller than the live working set",
        "victim tier with `hazard`",
        "1x",
        "1%",
        ("lru", "all", "on-device-eviction"),
        ("hazard", "all", "on-device-eviction"),
    ),
    Choice(
        "RAM smaller than the live working set", "`hazard`", "0", "1%", _LRU, ("hazard", "all", "on-compute")
    ),
    Choice(
        "RAM much larger than the live working set",
        "`lru` (numbers: `hazard`)",
        "0",
        "20%",
        _LRU,
        ("hazard", "all", "on-compute"),
    ),
    Choice(
        "chat, expensive writes", "`lru` with `tinylfu`", "0", "2%", _LRU, ("lru", "tinylfu", "on-compute")
    ),
    Choice("similar size, no victim tier", "`hazard`", "1x", "5%", _LRU, ("hazard", "all", "on-compute")),
    Choice(
        "similar size, no victim tier, chat",
        "`lru` with `tinylfu`",
        "1x",
        "5%",
        _LRU,
        ("lru", "tinylfu", "on-compute"),
    ),
)


def table_of_choices(rows: Rows) -> str:
    """Format the recommended choices: hits and writes per reference before and after, on every trace."""
    lines = []
    for choice in CHOICES:
        cells = []
        for trace in rows.traces:
            ends = [
                rows.find(trace, choice.device, store, choice.capacity, policy, admission)
                for policy, admission, store in (choice.before, choice.after)
            ]
            before, after = ends
            cells.append(
                ""
                if before is None or after is None
                else f"{before.hits:.3f} → {after.hits:.3f} ({before.writes:.2f} → {after.writes:.2f})"
            )
        size = f"{choice.capacity}, device {choice.device}" if choice.device != "0" else choice.capacity
        lines.append([choice.situation, choice.choose, _name(choice.before), size, *cells])
    return markdown(["when", "choose", "instead of", "measured at", *rows.traces], lines)


def _name(contestant: tuple[str, str, str]) -> str:
    policy, _, store = contestant
    return f"`{policy}`" if store == "on-compute" else f"`{policy}` victim tier"


def advice(rows: Rows) -> str:
    """Text between the markers ``advice``."""
    return table_of_choices(rows)


def tables(rows: Rows) -> str:
    """Text between the markers ``tables``: the shown traces, without a device."""
    sides = [_hits(rows, trace, "0", "on-compute", SHOWN_CAPACITIES) for trace in SHOWN_TRACES]
    cells = [{name: cells for name, *cells in side[1:]} for side in sides]
    header = ["on-compute", *(f"{trace}, {size}" for trace in SHOWN_TRACES for size in SHOWN_CAPACITIES)]
    return markdown(header, ([name, *(cell for side in cells for cell in side[name])] for name in cells[0]))


def all_tables(rows: Rows) -> str:
    """Format the targets, and each trace with every device and store mode."""
    sections = [_targets(rows)]
    for trace in rows.traces:
        for device in DEVICES:
            title = f"### {trace}, device {device}" if device != "0" else f"### {trace}"
            stores = ("on-compute", "on-device-eviction")
            sections += [title, *(table_of_hits(rows, trace, device, store) for store in stores)]
    return "\n\n".join(section for section in sections if section)


def _targets(rows: Rows) -> str:
    targets = table_of_targets(rows, CAPACITIES, DEVICES)
    shortfalls = largest_shortfalls(rows, CAPACITIES, how_many=1)
    title = "Largest shortfall of `hazard` below LRU (in points):"
    return f"### Targets of `hazard`\n\n{targets}\n\n{title}\n\n{shortfalls}"


def put(document: str, name: str, text: str) -> str:
    """Put `text` between the markers `name` of a document. Raises `ValueError` if they are missing."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    before, has_begin, behind_begin = document.partition(begin)
    _, has_end, after = behind_begin.partition(end)
    if not has_begin or not has_end:
        raise ValueError(f"no markers {begin} {end}")
    return f"{before}{begin}\n\n{text}\n\n{end}{after}"


def put_all(document: str, rows: Rows) -> str:
    """Put all tables into a document."""
    return put(put(document, "advice", advice(rows)), "tables", tables(rows))


def main(arguments: list[str]) -> None:
    paths = [argument for argument in arguments if argument != "--write"]
    rows = read_rows(Path(paths[0]) if paths else SWEEP)
    if "--write" in arguments:
        DOCUMENT.write_text(put_all(DOCUMENT.read_text(encoding="utf-8"), rows), encoding="utf-8")
    else:
        print(advice(rows), all_tables(rows), sep="\n\n")


if __name__ == "__main__":
    main(sys.argv[1:])
