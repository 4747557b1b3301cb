"""Terminal form of a timed replay: waits, busy links, tiers and assumptions."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Group, RenderableType
from rich.text import Text

from kvoffload.cli.output import Lines, terminal_table
from kvoffload.pages.page import Table
from kvoffload.simulate.machine import QUANTITIES, Quantity
from kvoffload.simulate.report import (
    OVERLOADED,
    Distribution,
    TimedOutcome,
    TimedReport,
    break_even_sentence,
)
from kvoffload.text import duration, outside_blocks, percent, size

_ENDLESS = "grows without end"
_PROMPTS = (
    "as recorded; the last token is always computed",
    "end with their last full block, which is always computed",
)
"""Two notes on the lengths of prompts. The first is for traces with exact lengths, the second for traces that
record only whole blocks."""


def table(report: TimedReport) -> RenderableType:
    waits, links, tiers = map(terminal_table, (_waits(report), _links(report), _tiers(report)))
    return Group(waits, links, tiers, _summary(report), terminal_table(_assumptions(report)))


def _waits(report: TimedReport) -> Table:
    runs = (report.with_offload, report.without)

    def wait_of(cell: Callable[[TimedOutcome], str]) -> Callable[[TimedOutcome], str]:
        return lambda run: _ENDLESS if _has_endless_queue(report, run) else cell(run)

    cells: tuple[tuple[str, Callable[[TimedOutcome], str]], ...] = (
        ("TTFT, mean", wait_of(lambda run: duration(run.ttft_s.mean))),
        ("p50", wait_of(lambda run: duration(run.ttft_s.p50))),
        ("p90", wait_of(lambda run: duration(run.ttft_s.p90))),
        ("p99", wait_of(lambda run: duration(run.ttft_s.p99))),
        ("waiting, mean / p90", wait_of(lambda run: _pair(run.waiting_s))),
        ("loading, mean / p90", lambda run: _pair(run.loading_s)),
        ("longest queue", lambda run: f"{run.most_waiting:,}"),
        ("hit ratio", lambda run: f"{run.hit_ratio:.3f}"),
        ("hit ratio of the device", _device_hit_ratio),
        ("GPU computes prompts", lambda run: duration(run.prefill_s)),
        ("GPU is busy", lambda run: percent(run.device_busy_share)),
        ("finished after", lambda run: duration(run.seconds)),
    )
    rows = [(name, *map(cell, runs)) for name, cell in cells]
    title = f"{report.trace} on {report.machine.name}: {runs[0].requests:,} requests, {_arrivals(report)}"
    return Table(title, ("", "with offloading#", "without#"), rows)


def _links(report: TimedReport) -> Table:
    rows = [
        (link.name, f"{link.jobs:,}", size(link.bytes_moved), percent(link.busy_share),
         size(link.most_bytes_waiting), size(link.bytes_left))
        for link in report.with_offload.links
    ]  # fmt: skip
    headings = ("Link", "jobs#", "moved#", "busy#", "longest queue#", "left at the end#")
    return Table("", headings, rows)


def _tiers(report: TimedReport) -> Table:
    tiers = report.with_offload.tiers
    rows = []
    for tier in tiers:
        numbers = (tier.hit_blocks, tier.written, tier.evicted, tier.not_offered)
        rows.append((tier.name, *(f"{number:,}" for number in numbers), "yes" if tier.keeps_up else "no"))
    headings = ("Tier", "blocks hit#", "written#", "evicted#", "not offered#", "keeps up")
    return Table("", headings, rows, ["" if tier.keeps_up else "bad" for tier in tiers])


def _summary(report: TimedReport) -> RenderableType:
    run, without = report.with_offload, report.without
    share = report.gpu_seconds_saved / without.prefill_s if without.prefill_s else 0.0
    lines = [_engines(report)] if report.instances > 1 else []
    lines += [
        f"{report.gpu_seconds_saved / 3600:,.2f} GPU-hours of prompts saved, {percent(share)} of them.",
        _first_tokens(report),
    ]
    if report.at_once:
        lines.append(f"With {report.at_once} requests at once: {report.speed_up:.2f} times the throughput.")
    lines.append(break_even_sentence("RAM", report.break_even_tokens))
    lines += [f"{miss}." for miss in run.misses()]
    lines += outside_blocks(report.share_outside_blocks, "hit ratios")
    return Group(Lines(lines), Text())


def _has_endless_queue(report: TimedReport, run: TimedOutcome) -> bool:
    """Return True if requests arrive faster than they are served. Waits then grow with the length of the
    trace.

    With `at_once` the result is False, because then a request arrives only when another request ends.
    """
    return run.is_overloaded and not report.at_once


def _first_tokens(report: TimedReport) -> str:
    before, after = report.without.ttft_s, report.with_offload.ttft_s
    sides = {"without offloading": report.without, "with offloading": report.with_offload}
    endless = [name for name, run in sides.items() if _has_endless_queue(report, run)]
    if not endless:
        return (
            f"TTFT p50 {duration(before.p50)} -> {duration(after.p50)}, "
            f"p90 {duration(before.p90)} -> {duration(after.p90)}."
        )
    texts = [f"TTFT {' and '.join(endless)} {_ENDLESS}."]
    for name, run in sides.items():
        if name not in endless:
            wait = run.ttft_s
            texts.append(f"TTFT {name}: p50 {duration(wait.p50)}, p90 {duration(wait.p90)}.")
    return " ".join([*texts, OVERLOADED, "Try --load 0.5."])


def _assumptions(report: TimedReport) -> Table:
    machine = report.machine
    rows = [("model", "", machine.model or "unknown")]
    for name in QUANTITIES:
        quantity: Quantity | None = getattr(machine, name)
        if quantity is not None:
            rows.append((name, f"{quantity.value:.4g}", quantity.source))
    each = " in each engine" if report.instances > 1 else ""
    rows += [
        ("device", f"{report.device_blocks:,}", f"blocks of {size(report.block_bytes)}{each}"),
        ("requests at a time", f"{report.max_running:,}", f"assumed{each}"),
        ("tokens a step", f"{report.step_tokens:,}", "assumed"),
        ("prompts", "", _PROMPTS[report.share_outside_blocks is None]),
    ]
    return Table("", ("Assumption", "value", "source"), rows)


def _engines(report: TimedReport) -> str:
    ram = f"{report.capacity_blocks:,} blocks of RAM each"
    if report.shared_ram:
        ram = f"one pool of {report.instances * report.capacity_blocks:,} blocks of RAM"
    return f"{report.instances} engines have {ram}; requests go by {report.routing}."


def _pair(distribution: Distribution) -> str:
    return f"{duration(distribution.mean)} / {duration(distribution.p90)}"


def _device_hit_ratio(run: TimedOutcome) -> str:
    hits = run.device_hit_blocks + run.offload_hit_blocks
    return f"{run.device_hit_blocks * run.hit_ratio / hits:.3f}" if hits else "0.000"


def _arrivals(report: TimedReport) -> str:
    if report.at_once:
        return f"{report.at_once} at once"
    return "as recorded" if report.load == 1.0 else f"{report.load:g} times as dense"
