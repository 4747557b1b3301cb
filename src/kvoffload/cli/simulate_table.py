"""A timed replay for people: who waits how long, what was busy, and what all of it rests on."""

from __future__ import annotations

from collections.abc import Callable

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvoffload.simulate.machine import QUANTITIES, Quantity
from kvoffload.simulate.report import (
    OVERLOADED,
    Distribution,
    TimedOutcome,
    TimedReport,
    break_even_sentence,
)
from kvoffload.text import duration, percent, size


def table(report: TimedReport) -> RenderableType:
    """The report for a terminal."""
    return Group(_waits(report), _links(report), _tiers(report), _words(report), _assumptions(report))


def _waits(report: TimedReport) -> Table:
    one, other = report.with_offload, report.without
    table = Table(
        title=f"{report.trace} on {report.machine.name}: {one.requests:,} requests, {_how_they_come(report)}",
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    table.add_column("")
    table.add_column("with offloading", justify="right")
    table.add_column("without", justify="right")
    for name, what in (("mean", "TTFT, mean"), ("p50", "p50"), ("p90", "p90"), ("p99", "p99")):
        table.add_row(what, *(duration(getattr(run.ttft_s, name)) for run in (one, other)))
    cells: tuple[tuple[str, Callable[[TimedOutcome], str]], ...] = (
        ("of that waiting, mean / p90", lambda run: _pair(run.waiting_s)),
        ("loading, mean / p90", lambda run: _pair(run.loading_s)),
        ("longest queue", lambda run: f"{run.most_waiting:,}"),
        ("hit ratio", lambda run: f"{run.hit_ratio:.3f}"),
        ("of that from the device", lambda run: _share(run.device_hit_blocks, run)),
        ("GPU computes prompts", lambda run: duration(run.prefill_s)),
        ("GPU is busy", lambda run: percent(run.device_busy_share)),
        ("all is done after", lambda run: duration(run.seconds)),
    )
    for what, cell in cells:
        table.add_row(what, cell(one), cell(other))
    return table


def _links(report: TimedReport) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("What moves", "jobs", "moved", "busy", "longest queue", "left at the end"):
        table.add_column(name, justify="left" if name == "What moves" else "right")
    for link in report.with_offload.links:
        table.add_row(
            link.name,
            f"{link.jobs:,}",
            size(link.bytes_moved),
            percent(link.busy_share),
            size(link.most_bytes_waiting),
            size(link.bytes_left),
        )
    return table


def _tiers(report: TimedReport) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("Tier", "blocks hit", "written", "evicted", "not offered", "keeps up"):
        table.add_column(name, justify="left" if name == "Tier" else "right")
    for tier in report.with_offload.tiers:
        numbers = (tier.hit_blocks, tier.written, tier.evicted, tier.not_offered)
        keeps_up = Text("yes") if tier.keeps_up else Text("no", "bold red")
        table.add_row(tier.name, *(f"{number:,}" for number in numbers), keeps_up)
    return table


def _words(report: TimedReport) -> Text:
    one, other = report.with_offload, report.without
    text = Text(no_wrap=True, overflow="ignore")
    share = report.gpu_seconds_saved / other.prefill_s if other.prefill_s else 0.0
    text.append(
        f"  {report.gpu_seconds_saved / 3600:,.2f} GPU-hours of prompts saved, {percent(share)} of them.\n"
    )
    text.append(f"  TTFT p50 {duration(other.ttft_s.p50)} -> {duration(one.ttft_s.p50)}, ")
    text.append(f"p90 {duration(other.ttft_s.p90)} -> {duration(one.ttft_s.p90)}.\n")
    if report.at_once:
        text.append(
            f"  With {report.at_once} requests at once: {report.speed_up:.2f} times the throughput.\n"
        )
    text.append(f"  {break_even_sentence('RAM', report.break_even_tokens)}\n")
    for miss in one.misses():
        text.append(f"  {miss}.\n")
    if not report.at_once and other.is_overloaded:
        text.append(f"  {OVERLOADED} Try --load 0.5.\n")
    return text


def _assumptions(report: TimedReport) -> Table:
    machine = report.machine
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("All of it rests on", "", "which is"):
        table.add_column(name, no_wrap=name != "which is", overflow="fold")
    table.add_row("model", "", machine.model or "not said")
    for name in QUANTITIES:
        found: Quantity | None = getattr(machine, name)
        if found is not None:
            table.add_row(name, f"{found.value:.4g}", found.source)
    table.add_row("device", f"{report.device_blocks:,}", f"blocks of {size(report.block_bytes)}")
    table.add_row("requests at a time", f"{report.max_running:,}", "assumed")
    table.add_row("tokens a step", f"{report.step_tokens:,}", "assumed")
    table.add_row("prompts", "", "end with their last full block, which is always computed")
    return table


def _pair(found: Distribution) -> str:
    return f"{duration(found.mean)} / {duration(found.p90)}"


def _share(blocks: int, run: TimedOutcome) -> str:
    hits = run.device_hit_blocks + run.offload_hit_blocks
    return f"{blocks * run.hit_ratio / hits:.3f}" if hits else "0.000"


def _how_they_come(report: TimedReport) -> str:
    if report.at_once:
        return f"{report.at_once} at once"
    return "as recorded" if report.load == 1.0 else f"{report.load:g} times as dense"
