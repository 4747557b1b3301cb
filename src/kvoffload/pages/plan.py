"""The page of a plan: the answer in words, what else could be bought, and what all of it rests on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvoffload.pages.page import Chart, Data, Part, Table, Text, page
from kvoffload.plan.clock import InTime
from kvoffload.plan.plan import PlanAnswer
from kvoffload.plan.rows import PlanRow
from kvoffload.plan.words import PLACEHOLDERS, goods, money, shares, ttft
from kvoffload.text import interval, percent, size

_GIB = 2**30


def plan_page(found: PlanAnswer, command: str) -> str:
    """The page; `command` is what made it."""
    return page(f"What to buy for {found.trace}", found.words, _parts(found), found.to_json(), command)


def _parts(found: PlanAnswer) -> Iterator[Part]:
    if found.vllm:
        yield Text(f"Each engine is started with ({PLACEHOLDERS})", [found.vllm], is_code=True)
    yield _frontier(found)
    yield _over_ram(found)
    yield _places(found)
    if any(row.ssd_drives and row.drive_writes_a_day is not None for row in found.rows):
        yield _wear(found)
    if found.needed_ttft_p90_s is not None:
        yield _wait_for_money(found, found.needed_ttft_p90_s)
    if found.in_time is not None:
        yield _waits(found.in_time)
        yield _links(found.in_time)
    yield _over_time(found)
    yield _purchases(found)
    yield Text("What the recording cannot tell", found.cannot_tell)
    rows = [(one.name, one.value, one.source) for one in found.assumptions]
    yield Table("What this rests on", ("what", "value", "source"), rows)


def _points(rows: Sequence[PlanRow], x: Sequence[float], name: str, **look: object) -> dict[str, object]:
    """A trace of a chart: what rows save, over `x`, with what they are on hover."""
    return {
        "type": "scatter", "mode": "markers", "name": name, "x": list(x),
        "y": [100 * row.saved for row in rows], "text": [_hover(row) for row in rows],
        "hovertemplate": "%{y:.1f} %<br>%{text}<extra></extra>", **look,
    }  # fmt: skip


def _hover(row: PlanRow) -> str:
    said = f"{goods(row)}<br>{row.setup}"
    return said if row.feasible else f"{said}<br>cannot be: {row.why_not}"


def _flat(name: str, y: float, x: Sequence[float], dash: str = "dot") -> dict[str, object]:
    """A horizontal line."""
    return {
        "type": "scatter", "mode": "lines", "name": f"{name}: {percent(y)}", "x": [min(x), max(x)],
        "y": [100 * y, 100 * y], "line": {"dash": dash, "width": 1.5}, "hoverinfo": "name",
    }  # fmt: skip


def _frontier(found: PlanAnswer) -> Chart:
    can = [row for row in found.rows if row.feasible]
    cannot = [row for row in found.rows if not row.feasible]
    prices = [row.price for row in found.rows]
    some = [row for row in found.sampled if row.feasible]
    data: Data = [
        _points(can, [row.price for row in can], "can be had", marker={"size": 7, "opacity": 0.6}),
        _points(found.frontier, [row.price for row in found.frontier], "most for the money",
                mode="lines+markers", line={"shape": "hv"}, marker={"size": 8}),
        _points([found.chosen], [found.chosen.price], "recommended", marker={"size": 16, "symbol": "star"}),
        _flat("ceiling", found.ceiling, prices),
    ]  # fmt: skip
    if cannot:
        data.insert(1, _points(cannot, [row.price for row in cannot], "cannot be",
                               marker={"size": 7, "symbol": "x", "opacity": 0.6}))  # fmt: skip
    note = "Each point is a purchase, used in one way."
    if some:
        name = f"on one of {found.one_in:,} sessions"
        data.append(_points(some, [row.price for row in some], name, marker={"size": 5, "opacity": 0.4}))
        note += " What was measured on a part of the sessions led to the others, and is not what they save."
    axes = {"xaxis": {"title": {"text": f"price, {found.currency}"}, "rangemode": "tozero"}, "yaxis": _SAVED}
    return Chart("frontier", "Cost against saving", data, axes, note)


_SAVED = {"title": {"text": "saved, % of the prefill"}, "rangemode": "tozero"}


def _over_ram(found: PlanAnswer) -> Chart:
    """What each way to use RAM saves, over its size; only measured points."""
    alone = [row for row in found.sampled or found.rows if not (row.ssd_drives or row.servers)]
    setups = sorted({row.setup for row in alone if row.ram_modules})
    data: Data = []
    for setup in setups:
        line = sorted((row for row in alone if row.setup == setup), key=lambda row: row.ram_bytes)
        sizes = [row.ram_bytes / _GIB for row in line]
        data.append(_points(line, sizes, str(setup), mode="lines+markers"))
    bought = [row for row in alone if row.ram_modules]
    best = {row.ram_bytes / _GIB: 100 * max(one.optimum for one in bought if one.ram_bytes == row.ram_bytes)
            for row in sorted(bought, key=lambda row: row.ram_bytes)}  # fmt: skip
    sizes = [0.0, *best]
    data += [
        {"type": "scatter", "mode": "lines+markers", "name": "optimum", "x": list(best),
         "y": list(best.values()), "line": {"dash": "dash"},
         "hovertemplate": "%{y:.1f} %<extra>optimum</extra>"},
    ]  # fmt: skip
    if not found.sampled:
        data += [_flat("ceiling", found.ceiling, sizes), _flat("the GPUs alone", found.by_gpus, sizes)]
    axes = {"xaxis": {"title": {"text": "RAM, GiB"}}, "yaxis": _SAVED}
    note = "Without SSDs and servers" if found.has_servers else "Without SSDs"
    note += ". Between two points nothing was measured; the optimum knows the future."
    note += f" On one of {found.one_in:,} sessions." if found.sampled else ""
    return Chart("over-ram", "Saving over RAM", data, axes, note)


def _places(found: PlanAnswer) -> Chart:
    names = [f"{goods(row)}, {money(row.price, found.currency)}" for row in found.frontier]
    fields = [("GPUs", "by_gpus"), ("RAM", "by_ram"), ("SSDs", "by_ssds")]
    fields += [("servers", "by_servers")] if found.has_servers else []
    data: Data = [
        {"type": "bar", "name": name, "x": list(range(1, len(names) + 1)), "customdata": names,
         "y": [100 * getattr(row, field) for row in found.frontier],
         "hovertemplate": f"%{{y:.1f}} % by {name}<br>%{{customdata}}<extra></extra>"}
        for name, field in fields
    ]  # fmt: skip
    ticks = {"tickvals": list(range(1, len(names) + 1)), "title": {"text": "purchases, cheapest first"}}
    layout = {"barmode": "stack", "xaxis": ticks, "yaxis": _SAVED}
    return Chart(
        "places", "Where blocks come from", data, layout, "Of the purchases with most for the money."
    )


def _wear(found: PlanAnswer) -> Chart:
    rows = [row for row in found.rows if row.ssd_drives and row.drive_writes_a_day is not None]
    data: Data = []
    for name, some in (("can be had", [one for one in rows if one.feasible]),
                       ("cannot be", [one for one in rows if not one.feasible])):  # fmt: skip
        symbol = "circle" if name == "can be had" else "x"
        if some:
            wear = [float(one.drive_writes_a_day or 0) for one in some]
            data.append(_points(some, wear, name, marker={"size": 8, "symbol": symbol}))
    axes = {"xaxis": {"title": {"text": "drive writes a day"}, "rangemode": "tozero"}, "yaxis": _SAVED}
    return Chart("wear", "What SSDs have to write", data, axes, "Capacities of a drive, each day.")


def _wait_for_money(found: PlanAnswer, asked_s: float) -> Chart:
    timed = [row for row in found.purchases if row.ttft_p90_s is not None]
    prices = [row.price for row in timed]
    data: Data = [
        {"type": "scatter", "mode": "markers", "name": name, "x": [row.price for row in rows],
         "y": [row.ttft_p90_s for row in rows], "text": [_hover(row) for row in rows],
         "hovertemplate": "%{y:.3g} s<br>%{text}<extra></extra>", "marker": marker}
        for name, rows, marker in (("timed", timed, {"size": 8}),
                                   ("recommended", [found.chosen], {"size": 16, "symbol": "star"}))
    ]  # fmt: skip
    data.append({"type": "scatter", "mode": "lines", "name": f"asked for: {asked_s:g} s",
                 "x": [min(prices), max(prices)], "y": [asked_s, asked_s],
                 "line": {"dash": "dot", "width": 1.5}, "hoverinfo": "name"})  # fmt: skip
    axes = {"xaxis": {"title": {"text": f"price, {found.currency}"}, "rangemode": "tozero"},
            "yaxis": {"title": {"text": "p90 of time to first token, s"}, "rangemode": "tozero"}}  # fmt: skip
    note = "Each point is a purchase that was timed; between two of them nothing is known."
    return Chart("wait-for-money", "Cost against waiting", data, axes, note)


def _waits(found: InTime) -> Chart:
    data: Data = [
        {"type": "bar", "name": name, "x": [what for what, _ in ttft(run)],
         "y": [value for _, value in ttft(run)], "hovertemplate": f"%{{y:.3g}} s<extra>{name}</extra>"}
        for name, run in (("recommended", found.with_offload), ("the GPUs alone", found.without))
    ]  # fmt: skip
    layout = {"barmode": "group", "yaxis": {"title": {"text": "seconds"}, "rangemode": "tozero"}}
    (waiting, loading), (before, _) = shares(found.with_offload), shares(found.without)
    note = f"In simulated time on {found.machine.name}, {found.requests:,} requests"
    note += f" of the busiest of {found.engines:,} engines. " if found.engines > 1 else ". "
    note += f"Of the mean, {waiting} is waiting and {loading} loading; by the GPUs alone {before} is waiting."
    return Chart("waits", "Time to first token", data, layout, note)


def _links(found: InTime) -> Table:
    headings = ("what moves", "moved, GB#", "busy#", "longest queue, GB#", "left at the end, GB#")
    rows = [
        (one.name, f"{one.bytes_moved / 1e9:,.2f}", percent(one.busy_share),
         f"{one.most_bytes_waiting / 1e9:,.2f}", f"{one.bytes_left / 1e9:,.2f}")
        for one in found.with_offload.links
    ]  # fmt: skip
    return Table("Links and disks in that time", headings, rows)


def _over_time(found: PlanAnswer) -> Chart:
    numbers = list(range(1, len(found.over_time) + 1))
    data: Data = [
        {"type": "scatter", "mode": "lines", "name": name, "x": numbers,
         "y": [100 * getattr(one, field) for one in found.over_time],
         "hovertemplate": f"%{{y:.1f}} %<extra>{name}</extra>"}
        for name, field in (("recommended", "chosen"), ("the GPUs alone", "by_gpus"))
    ]  # fmt: skip
    axes = {"xaxis": {"title": {"text": "window of the recording"}}, "yaxis": _SAVED}
    note = (
        "Windows have equally many requests; intervals are made of them. The first begin with empty caches."
    )
    return Chart("over-time", "Saving over time", data, axes, note)


def _purchases(found: PlanAnswer) -> Table:
    shared = ("servers",) if found.has_servers else ()
    headings = ("RAM", "SSD", *shared, f"{found.currency}#", "saved#", "95 %#", "of ceiling#",
                "drive writes a day#", "used so; or why not")  # fmt: skip
    rows, marks = [], []
    for row in found.purchases:
        rows.append((
            size(row.ram_bytes) if row.ram_bytes else "-",
            size(row.ssd_bytes, 1000) if row.ssd_bytes else "-",
            *((str(row.servers) if row.servers else "-",) if shared else ()),
            f"{row.price:,.0f}", percent(row.saved), interval(row.saved_low, row.saved_high),
            "" if row.of_ceiling is None else percent(row.of_ceiling, 0),
            "" if row.drive_writes_a_day is None else f"{row.drive_writes_a_day:,.2f}",
            str(row.setup) if row.feasible else row.why_not,
        ))  # fmt: skip
        marks.append("chosen" if row == found.chosen else "" if row.feasible else "cannot")
    return Table("Purchases, the best use of each", headings, rows, marks)
