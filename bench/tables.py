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
    capacities = [capacity for capacity in shown if rows.optimum(trace, device, store, capacity) is not None]
    if not capacities:
        return ""
    lines = []
    for policy, admission in _contestants(rows, trace, device, store):
        cells = [rows.find(trace, device, store, capacity, policy, admission) for capacity in capacities]
        if any(cells):
            lines.append([_label(policy, admission), *(_cell(rows, cell) for cell in cells)])
    best = [rows.optimum(trace, device, store, capacity) for capacity in capacities]
    lines.append(["*optimum*", *("" if ratio is None else f"*{ratio:.3f}*" for ratio in best)])
    return markdown([store, *capacities], lines)


def _contestants(rows: Rows, trace: str, device: str, store: str) -> list[tuple[str, str]]:
    """Return the pairs of policy and admission rule that have a row."""
    swept = rows.contestants(trace, device, store)
    return [(policy, admission) for policy, admission in swept if admission == "all" or policy in GATED]


def _label(policy: str, admission: str) -> str:
    return f"`{policy}`" if admission == "all" else f"`{policy}`, `{admission}`"


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
        "device as large as RAM",
        "victim tier",
        "1x",
        "5%",
        _LRU,
        ("lru", "all", "on-device-eviction"),
    ),
    Choice(
        "device as large as RAM, RAM smaller than the live working set",
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
        "chat, expensive writes", "`lru` with `tinylfu`", "0", "2%", _LRU, ("lru", "tinylfu", "on-compute")
    ),
)


def table_of_choices(rows: Rows) -> str:
    """Format the recommended choices: hits gained, in points, and change of writes, on the shown traces."""
    lines = []
    for choice in CHOICES:
        cells = []
        for trace in SHOWN_TRACES:
            ends = [
                rows.find(trace, choice.device, store, choice.capacity, policy, admission)
                for policy, admission, store in (choice.before, choice.after)
            ]
            before, after = ends
            if before is None or after is None:
                cells += ["", ""]
            else:
                points = f"{100 * (after.hits - before.hits):+.1f}"
                cells += [points, f"{round(100 * (after.writes / before.writes - 1)):+d}%"]
        lines.append([choice.situation, choice.choose, _name(choice.before), choice.capacity, *cells])
    gains = ("gain in hits, points", "change of writes")
    header = [f"{trace}: {gain}" for trace in SHOWN_TRACES for gain in gains]
    return markdown(["when", "choose", "instead of", "RAM", *header], lines)


def _name(contestant: tuple[str, str, str]) -> str:
    policy, _, store = contestant
    return f"`{policy}`" if store == "on-compute" else f"`{policy}` victim tier"


def advice(rows: Rows) -> str:
    """Text between the markers ``advice``."""
    return table_of_choices(rows)


def tables(rows: Rows) -> str:
    """Text between the markers ``tables``: hits of policies with default parameters, without a device."""
    columns = [(trace, capacity) for trace in SHOWN_TRACES for capacity in SHOWN_CAPACITIES]
    lines = []
    for policy, admission in _contestants(rows, SHOWN_TRACES[0], "0", "on-compute"):
        if "," in policy:
            continue
        found = [rows.find(trace, "0", "on-compute", size, policy, admission) for trace, size in columns]
        lines.append(
            [_label(policy, admission), *("" if row is None else f"{row.hits:.3f}" for row in found)]
        )
    best = [rows.optimum(trace, "0", "on-compute", size) for trace, size in columns]
    lines.append(["*optimum*", *("" if ratio is None else f"*{ratio:.3f}*" for ratio in best)])
    return markdown(["hits", *(f"{trace}, {size}" for trace, size in columns)], lines)


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
