"""HTML page of a plan: the answer in sentences, all purchases, the assumptions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from kvoffload.pages.check import check_table
from kvoffload.pages.page import Chart, Data, Part, Table, Text, page
from kvoffload.plan.clock import InTime
from kvoffload.plan.plan import PlanAnswer
from kvoffload.plan.rows import PlanRow
from kvoffload.plan.words import PLACEHOLDERS, goods, money, shares, ttft
from kvoffload.text import counted, duration, interval, percent, size

_GIB = 2**30
_MANY_MINUTES_S = 3 * 3600
"""Duration in seconds above which the time axis is in hours."""
_PURCHASES = "Purchases, the best use of each; * is recommended, x is infeasible"


def plan_page(answer: PlanAnswer, command: str) -> str:
    """Build the page; `command` is the command line that made the page."""
    sections = [Text(section.title, section.sentences) for section in answer.sections]
    return page(f"What to buy for {answer.trace}", sections, _parts(answer), answer.to_json(), command)


def _parts(answer: PlanAnswer) -> Iterator[Part]:
    if answer.vllm:
        yield Text(f"Each engine is started with ({PLACEHOLDERS})", [answer.vllm], is_code=True)
    yield _frontier(answer)
    yield _over_ram(answer)
    yield _places(answer)
    if any(row.ssd_drives and row.drive_writes_a_day is not None for row in answer.rows):
        yield _wear(answer)
    if answer.needed_ttft_p90_s is not None:
        yield _wait_for_money(answer, answer.needed_ttft_p90_s)
    if answer.in_time is not None:
        yield _waits(answer.in_time)
        yield _links(answer.in_time)
    yield _over_time(answer)
    yield _with_short_reasons(purchases_table(answer, answer.purchases, _PURCHASES), answer.purchases)
    if answer.present is not None and answer.check is not None:
        yield Text("A running server beside its replay", [answer.present.sentence])
        yield check_table(answer.check)
    yield Text("What the recording cannot tell", answer.cannot_tell)
    rows = [(assumption.name, assumption.value, assumption.source) for assumption in answer.assumptions]
    yield Table("Assumptions", ("assumption", "value", "source"), rows)


def _points(rows: Sequence[PlanRow], x: Sequence[float], name: str, **look: object) -> dict[str, object]:
    """Build the points of a chart: the savings of row `i` at ``x[i]``. Hover text names the purchase."""
    return {
        "type": "scatter", "mode": "markers", "name": name, "x": list(x),
        "y": [100 * row.saved for row in rows], "text": [_hover(row) for row in rows],
        "hovertemplate": "%{y:.1f}%<br>%{text}<extra></extra>", **look,
    }  # fmt: skip


def _hover(row: PlanRow) -> str:
    label = f"{goods(row)}<br>{row.setup}"
    return label if row.feasible else f"{label}<br>infeasible: {row.why_not}"


def _line(rows: Sequence[PlanRow], name: str, **look: object) -> dict[str, object]:
    return _points(rows, [row.ram_bytes / _GIB for row in rows], name, mode="lines+markers", **look)


def _flat(name: str, y: float, x: Sequence[float]) -> dict[str, object]:
    return {
        "type": "scatter", "mode": "lines", "name": f"{name}: {percent(y)}", "x": [min(x), max(x)],
        "y": [100 * y, 100 * y], "line": {"dash": "dot", "width": 1.5}, "hoverinfo": "name",
    }  # fmt: skip


def _frontier(answer: PlanAnswer) -> Chart:
    feasible = [row for row in answer.rows if row.feasible]
    infeasible = [row for row in answer.rows if not row.feasible]
    prices = [row.price for row in answer.rows]
    sampled = [row for row in answer.sampled if row.feasible]
    data: Data = [
        _points(feasible, [row.price for row in feasible], "feasible", marker={"size": 7, "opacity": 0.6}),
        _points(answer.frontier, [row.price for row in answer.frontier], "most for the money",
                mode="lines+markers", line={"shape": "hv"}, marker={"size": 8}),
        _points([answer.chosen], [answer.chosen.price], "recommended", marker={"size": 16, "symbol": "star"}),
        _flat("ceiling", answer.ceiling, prices),
    ]  # fmt: skip
    for reason in sorted({row.exceeds for row in infeasible}, reverse=True):
        rows = [row for row in infeasible if row.exceeds == reason]
        data.insert(1, _points(rows, [row.price for row in rows], f"infeasible: {reason}",
                               marker={"size": 7, "symbol": "x", "opacity": 0.6}))  # fmt: skip
    note = "Each point is a purchase, used in one way."
    if sampled:
        name = f"on one of {answer.one_in:,} sessions"
        data.append(
            _points(sampled, [row.price for row in sampled], name, marker={"size": 5, "opacity": 0.4})
        )
        note += " Points on a part of the sessions guided the search; they do not estimate the saving."
    axes = {"xaxis": {"title": {"text": f"price, {answer.currency}"}, "rangemode": "tozero"}, "yaxis": _SAVED}
    return Chart("frontier", "Cost against saving", data, axes, note)


_SAVED = {"title": {"text": "saved, % of the prefill"}, "rangemode": "tozero"}


def _over_ram(answer: PlanAnswer) -> Chart:
    """Build the chart of the savings as a function of RAM. Every point is measured.

    The best setup of each size and the recommended setup are drawn. A click on the legend draws other setups.
    """
    alone = [row for row in answer.sampled or answer.rows if not (row.ssd_drives or row.servers)]
    setups = sorted({row.setup for row in alone if row.ram_modules})
    bought = [row for row in alone if row.ram_modules]
    best_of = {row.ram_bytes: row for row in sorted(bought, key=lambda row: row.saved)}
    data: Data = [_line([best_of[ram] for ram in sorted(best_of)], "best setup of each size")]
    hidden_lines: Data = []
    for setup in setups:
        rows = sorted((row for row in alone if row.setup == setup), key=lambda row: row.ram_bytes)
        if setup == answer.chosen.setup:
            data.append(_line(rows, f"recommended: {setup}", line={"dash": "dashdot"}))
        else:
            hidden = {"visible": "legendonly", "legendgroup": "others", "showlegend": not hidden_lines}
            hidden_lines.append(_line(rows, "other setups: click", **hidden))
    best = dict[float, float]()
    for row in sorted(bought, key=lambda row: (row.ram_bytes, row.optimum)):
        best[row.ram_bytes / _GIB] = 100 * row.optimum
    sizes = [0.0, *best]
    data += [
        {"type": "scatter", "mode": "lines+markers", "name": "optimum", "x": list(best),
         "y": list(best.values()), "line": {"dash": "dash"},
         "hovertemplate": "%{y:.1f}%<extra>optimum</extra>"},
    ]  # fmt: skip
    data += hidden_lines
    if not answer.sampled:
        data += [_flat("ceiling", answer.ceiling, sizes), _flat("the GPUs alone", answer.by_gpus, sizes)]
    axes = {"xaxis": {"title": {"text": "RAM, GiB"}}, "yaxis": _SAVED}
    note = "Without SSDs and servers" if answer.has_servers else "Without SSDs"
    note += ". Only the points are measured; the optimum knows the future."
    note += f" On one of {answer.one_in:,} sessions." if answer.sampled else ""
    return Chart("over-ram", "Saving over RAM", data, axes, note)


def _places(answer: PlanAnswer) -> Chart:
    names = [f"{goods(row)}, {money(row.price, answer.currency)}" for row in answer.frontier]
    fields = [("GPUs", "by_gpus"), ("RAM", "by_ram"), ("SSDs", "by_ssds")]
    fields += [("servers", "by_servers")] if answer.has_servers else []
    data: Data = [
        {"type": "bar", "name": name, "x": list(range(1, len(names) + 1)), "customdata": names,
         "y": [100 * getattr(row, field) for row in answer.frontier],
         "hovertemplate": f"%{{y:.1f}}% by {name}<br>%{{customdata}}<extra></extra>"}
        for name, field in fields
    ]  # fmt: skip
    labels = [f"<b>★ {_short(row)}</b>" if row == answer.chosen else _short(row) for row in answer.frontier]
    ticks = {"tickvals": list(range(1, len(names) + 1)), "ticktext": labels,
             "title": {"text": "cheapest first; ★ recommended"}}  # fmt: skip
    layout = {"barmode": "stack", "xaxis": ticks, "yaxis": _SAVED}
    return Chart(
        "places", "Where blocks come from", data, layout, "Of the purchases with most for the money."
    )


def _short(row: PlanRow) -> str:
    """Return a purchase's label below a bar: ``64 GiB``, ``64 GiB + 3.84 TB``, ``64 GiB + 2 servers``."""
    parts = [size(row.ram_bytes)] if row.ram_bytes else []
    parts += [size(row.ssd_bytes, 1000)] if row.ssd_bytes else []
    parts += [counted(row.servers, "server")] if row.servers else []
    return " + ".join(parts) or "nothing"


def _wear(answer: PlanAnswer) -> Chart:
    rows = [row for row in answer.rows if row.ssd_drives and row.drive_writes_a_day is not None]
    data: Data = []
    for name, symbol, feasible in (("feasible", "circle", True), ("infeasible", "x", False)):
        shown = [row for row in rows if row.feasible == feasible]
        if shown:
            wear = [float(row.drive_writes_a_day or 0) for row in shown]
            data.append(_points(shown, wear, name, marker={"size": 8, "symbol": symbol}))
    axes = {"xaxis": {"title": {"text": "drive writes a day"}, "rangemode": "tozero"}, "yaxis": _SAVED}
    return Chart("wear", "Writes of SSDs", data, axes, "Capacities of a drive per day.")


def _wait_for_money(answer: PlanAnswer, asked_s: float) -> Chart:
    timed = [row for row in answer.purchases if row.ttft_p90_s is not None]
    prices = [row.price for row in timed]
    data: Data = [
        {"type": "scatter", "mode": "markers", "name": name, "x": [row.price for row in rows],
         "y": [row.ttft_p90_s for row in rows], "text": [_hover(row) for row in rows],
         "hovertemplate": "%{y:.3g} s<br>%{text}<extra></extra>", "marker": marker}
        for name, rows, marker in (("timed", timed, {"size": 8}),
                                   ("recommended", [answer.chosen], {"size": 16, "symbol": "star"}))
    ]  # fmt: skip
    data.append({"type": "scatter", "mode": "lines", "name": f"target: {asked_s:g} s",
                 "x": [min(prices), max(prices)], "y": [asked_s, asked_s],
                 "line": {"dash": "dot", "width": 1.5}, "hoverinfo": "name"})  # fmt: skip
    axes = {"xaxis": {"title": {"text": f"price, {answer.currency}"}, "rangemode": "tozero"},
            "yaxis": {"title": {"text": "p90 of time to first token, s"}, "rangemode": "tozero"}}  # fmt: skip
    note = "Each point is a purchase with simulated waiting times."
    return Chart("wait-for-money", "Cost against waiting", data, axes, note)


def _waits(timed: InTime) -> Chart | Text:
    """Build the chart of the times to first token.

    If the queue of a run grows without end, the chart has no bars for the run, because the times would depend
    on the length of the recording.
    """
    names = ("p50", "mean", "p90", "p99")
    runs = {"recommended": timed.with_offload, "the GPUs alone": timed.without}
    stable = {name: run for name, run in runs.items() if not run.is_overloaded}
    endless = [f"The time to first token of {name} grows without end." for name in runs if name not in stable]
    if not stable:
        return Text("Time to first token", endless)
    data: Data = [
        {"type": "bar", "name": name, "x": names,
         "y": [dict(ttft(run))[percentile] for percentile in names],
         "hovertemplate": f"%{{y:.3g}} s<extra>{name}</extra>"}
        for name, run in stable.items()
    ]  # fmt: skip
    layout = {"barmode": "group", "yaxis": {"title": {"text": "seconds"}, "rangemode": "tozero"}}
    note = f"In simulated time on {timed.machine.name}, {timed.requests:,} requests"
    note += f" of the busiest of {timed.engines:,} engines." if timed.is_one_of_several else "."
    for name, run in stable.items():
        waiting, loading = shares(run)
        note += f" Of the mean of {name}, {waiting} is waiting"
        note += f" and {loading} loading." if run is timed.with_offload else "."
    return Chart("waits", "Time to first token", data, layout, " ".join([note, *endless]))


def _links(timed: InTime) -> Table:
    headings = ("link", "moved, GB#", "busy#", "longest queue, GB#", "left at the end, GB#")
    rows = [
        (link.name, f"{link.bytes_moved / 1e9:,.2f}", percent(link.busy_share),
         f"{link.most_bytes_waiting / 1e9:,.2f}", f"{link.bytes_left / 1e9:,.2f}")
        for link in timed.with_offload.links
    ]  # fmt: skip
    return Table("Links and disks in simulated time", headings, rows)


def _over_time(answer: PlanAnswer) -> Chart:
    label, unit_s = ("hours", 3600.0) if answer.duration_s > _MANY_MINUTES_S else ("minutes", 60.0)
    ends: list[float] = [window.until_s / unit_s for window in answer.over_time if window.until_s is not None]
    if not ends:
        label, ends = "window of the recording", list(range(1, len(answer.over_time) + 1))
    data: Data = [
        {"type": "scatter", "mode": "lines", "name": name, "x": ends,
         "y": [100 * getattr(window, field) for window in answer.over_time],
         "hovertemplate": f"%{{y:.1f}}%<extra>{name}</extra>"}
        for name, field in (("recommended", "chosen"), ("the GPUs alone", "by_gpus"))
    ]  # fmt: skip
    axes = {"xaxis": {"title": {"text": label}, "rangemode": "tozero"}, "yaxis": _SAVED}
    note = "Windows have the same number of requests; intervals are computed from them. Caches begin empty."
    return Chart("over-time", "Saving over time", data, axes, note)


def _with_short_reasons(table: Table, rows: Sequence[PlanRow]) -> Table:
    """Replace the reasons why rows are infeasible by short names.

    Notes below the table explain each short name by an example.
    """
    cells = [
        shown if row.feasible else [*shown[:-1], row.exceeds]
        for shown, row in zip(table.rows, rows, strict=True)
    ]
    examples = {row.exceeds: f"{row.exceeds}, for example {goods(row)}: {row.why_not}." for row in rows[::-1]
                if not row.feasible}  # fmt: skip
    return replace(table, rows=cells, notes=list(examples.values())[::-1])


def purchases_table(answer: PlanAnswer, rows: Sequence[PlanRow], title: str) -> Table:
    """Build the table of purchases for the page and the terminal, with the reason for each infeasible row."""
    has_waits = answer.needed_ttft_p90_s is not None
    headings = ["", "RAM", "SSD", "servers#", f"{answer.currency}#", "saved#", "TTFT p90#",
                "drive writes a day#", "95%#", "of ceiling#", "use, or why infeasible"]  # fmt: skip
    cells = [
        (
            "*" if row == answer.chosen else "" if row.feasible else "x",
            size(row.ram_bytes) if row.ram_bytes else "-",
            size(row.ssd_bytes, 1000) if row.ssd_bytes else "-",
            str(row.servers) if row.servers else "-",
            f"{row.price:,.0f}",
            percent(row.saved),
            "" if row.ttft_p90_s is None else duration(row.ttft_p90_s),
            "" if row.drive_writes_a_day is None else f"{row.drive_writes_a_day:,.2f}",
            interval(row.saved_low, row.saved_high),
            "" if row.of_ceiling is None else percent(row.of_ceiling, 0),
            str(row.setup) if row.feasible else row.why_not,
        )
        for row in rows
    ]
    absent = {heading for heading, is_shown in (("servers#", answer.has_servers), ("TTFT p90#", has_waits))
              if not is_shown}  # fmt: skip
    kept = [position for position, heading in enumerate(headings) if heading not in absent]
    marks = ["chosen" if row == answer.chosen else "" if row.feasible else "cannot" for row in rows]
    return Table(title, [headings[at] for at in kept], [[row[at] for at in kept] for row in cells], marks)
