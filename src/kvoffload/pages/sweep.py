"""HTML page of a sweep: verdicts in sentences, and charts of hits and writes as functions of the capacity."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from kvoffload.pages.page import Chart, Data, Part, Table, Text, page
from kvoffload.sweep.monotone import losses_of
from kvoffload.sweep.outputs import as_json
from kvoffload.sweep.table import Row
from kvoffload.sweep.verdict import Verdict, ram_of
from kvoffload.text import outside_blocks

_RATIO = {"title": {"text": "prefix-hit ratio, %"}, "rangemode": "tozero"}


def sweep_page(rows: Sequence[Row], verdicts: Sequence[Verdict], command: str) -> str:
    """Build the page; `command` is the command line that made the page."""
    names = ", ".join(dict.fromkeys(row.trace for row in rows))
    several = len({(row.trace, row.device) for row in rows}) > 1
    lines = [f"{_place(verdict.best)}, {verdict.line}." if several else f"{verdict.line}."
             for verdict in verdicts]  # fmt: skip
    lines = [line[0].upper() + line[1:] for line in lines]
    lines += losses_of(rows)
    outside = {row.trace: row.share_outside_blocks for row in rows}
    for name, share in outside.items():
        lines += [f"{name}: {sentence}" for sentence in outside_blocks(share)]
    return page(f"Sweep of {names}", [Text("", lines)], _parts(rows), as_json(rows), command)


def _place(row: Row) -> str:
    return f"{row.trace}, {f'device of {row.device}' if row.device_blocks else 'no device cache'}"


def _label(row: Row) -> str:
    parts = [row.policy, "" if row.admission == "all" else row.admission, row.store,
             f"{row.tiers} behind" if row.tier_blocks else "",
             ram_of(row) if row.instances > 1 else ""]  # fmt: skip
    return ", ".join(part for part in parts if part)


def _parts(rows: Sequence[Row]) -> Iterator[Part]:
    groups = groupby(rows, lambda row: (row.trace_sha256, row.trace, row.device))
    for number, (_, group) in enumerate(groups):
        of_place = list(group)
        title = _place(of_place[0])
        yield Chart(f"hits-{number}", f"Hits over capacity: {title}", _hits(of_place), _axes(_RATIO),
                    "Bars are 95% intervals. The optimum knows the future.")  # fmt: skip
        yield Chart(f"writes-{number}", f"Writes over capacity: {title}", _writes(of_place),
                    _axes({"title": {"text": "blocks written per reference"}, "rangemode": "tozero"}),
                    "Writes of RAM and of the tiers behind RAM.")  # fmt: skip
        yield Chart(f"hits-and-writes-{number}", f"Hits against writes: {title}", _against(of_place),
                    {"xaxis": {"title": {"text": "blocks written per reference"}, "rangemode": "tozero"},
                     "yaxis": _RATIO}, "Configurations above and to the left are better.")  # fmt: skip
        yield _table(of_place, title)


def _axes(yaxis: object) -> dict[str, object]:
    return {"xaxis": {"title": {"text": "blocks of RAM"}, "type": "log"}, "yaxis": yaxis}


def _lines(rows: Sequence[Row]) -> dict[str, list[Row]]:
    lines: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row.capacity_blocks):
        lines.setdefault(_label(row), []).append(row)
    return lines


def _hits(rows: Sequence[Row]) -> Data:
    data: Data = []
    for label, line in _lines(rows).items():
        spread = [(row.ci_low, row.ci_high, row.prefix_hit_ratio) for row in line]
        known = [(low, high, at) for low, high, at in spread if low is not None and high is not None]
        bars = {"type": "data", "symmetric": False, "thickness": 1, "width": 2,
                "array": [100 * (high - at) for _, high, at in known],
                "arrayminus": [100 * (at - low) for low, _, at in known]}  # fmt: skip
        data.append(
            {"type": "scatter", "mode": "lines+markers", "name": label,
             "x": [row.capacity_blocks for row in line], "y": [100 * row.prefix_hit_ratio for row in line],
             "text": [row.capacity for row in line], **({"error_y": bars} if len(known) == len(line) else {}),
             "hovertemplate": f"%{{y:.2f}}%<br>{label}, %{{text}}<extra></extra>"}
        )  # fmt: skip
    for store, is_shared in dict.fromkeys((row.store, row.shared_ram) for row in rows):
        bounded = [row for row in rows
                   if (row.store, row.shared_ram) == (store, is_shared) and not row.tier_blocks]  # fmt: skip
        best = {row.capacity_blocks: 100 * row.optimum_hit_ratio for row in bounded}
        if best:
            sizes = sorted(best)
            data.append(
                {"type": "scatter", "mode": "lines", "x": sizes,
                 "name": f"optimum, {store}" + (", shared RAM" if is_shared else ""),
                 "y": [best[blocks] for blocks in sizes], "line": {"dash": "dash"},
                 "hovertemplate": "%{y:.2f}%<extra>optimum</extra>"}
            )  # fmt: skip
    sizes = [row.capacity_blocks for row in rows]
    limit = 100 * rows[0].infinite_hit_ratio
    data.append({"type": "scatter", "mode": "lines", "name": "no limit", "x": [min(sizes), max(sizes)],
                 "y": [limit, limit], "line": {"dash": "dot"}, "hoverinfo": "name"})  # fmt: skip
    return data


def _writes(rows: Sequence[Row]) -> Data:
    return [
        {"type": "scatter", "mode": "lines+markers", "name": label, "text": [row.capacity for row in line],
         "x": [row.capacity_blocks for row in line],
         "y": [row.writes_per_ref + row.tier_writes_per_ref for row in line],
         "hovertemplate": f"%{{y:.3f}}<br>{label}, %{{text}}<extra></extra>"}
        for label, line in _lines(rows).items()
    ]  # fmt: skip


def _against(rows: Sequence[Row]) -> Data:
    return [
        {"type": "scatter", "mode": "lines+markers", "name": label, "text": [row.capacity for row in line],
         "x": [row.writes_per_ref + row.tier_writes_per_ref for row in line],
         "y": [100 * row.prefix_hit_ratio for row in line],
         "hovertemplate": f"%{{y:.2f}}%, %{{x:.3f}} writes<br>{label}, %{{text}}<extra></extra>"}
        for label, line in _lines(rows).items()
    ]  # fmt: skip


def _table(rows: Sequence[Row], title: str) -> Table:
    headings = ("configuration", "capacity", "blocks#", "hits#", "95%#", "optimum#", "writes per reference#")
    cells = [
        (
            _label(row), row.capacity, f"{row.capacity_blocks:,}", f"{row.prefix_hit_ratio:.4f}",
            "" if row.ci_low is None or row.ci_high is None else f"{row.ci_low:.4f} to {row.ci_high:.4f}",
            f"{row.optimum_hit_ratio:.4f}",
            f"{row.writes_per_ref + row.tier_writes_per_ref:.3f}",
        )
        for row in rows
    ]  # fmt: skip
    return Table(f"Rows: {title}", headings, cells, ["chosen" if row.among_best else "" for row in rows])
