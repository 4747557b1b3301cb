"""A replay for people: where its blocks came from, and what the tiers did."""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvoffload.replay.report import ReplayReport
from kvoffload.text import duration, percent, size

_ENOUGH_TO_MEASURE = 10_000
"""References: below it a time for each says more about the start than about the cache."""


def table(report: ReplayReport) -> RenderableType:
    """The report for a terminal."""
    return Group(_hits(report), _work(report), _verdict(report))


def _hits(report: ReplayReport) -> Table:
    table = Table(
        title=f"{report.trace}: {report.requests:,} requests, {report.block_refs:,} block references, "
        f"{report.unique_blocks:,} unique blocks",
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    table.add_column("Blocks came from")
    table.add_column("blocks", justify="right")
    table.add_column("share", justify="right")
    ram = f"({report.policy}, {report.admission}, {report.capacity_blocks:,} blocks)"
    rows = [("offload tier " + ram, report.offload_hit_blocks)]
    if len(report.tiers) > 1:
        rows = [(tier.name, tier.hit_blocks) for tier in report.tiers]
        rows[0] = ("ram " + ram, report.tiers[0].hit_blocks)
    rows.append(("computed anew", report.block_refs - report.prefix_hit_blocks))
    if report.device_blocks:
        rows.insert(0, (f"device cache (lru, {report.device_blocks:,} blocks)", report.device_hit_blocks))
    for place, blocks in rows:
        table.add_row(place, f"{blocks:,}", _percent(blocks, report.block_refs))
    return table


def _work(report: ReplayReport) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("The offload tier")
    table.add_column("blocks", justify="right")
    table.add_column("bytes", justify="right")
    with_data = report.block_bytes > 0
    stored, loaded = size(report.bytes_stored), size(report.bytes_loaded)
    table.add_row("stored", f"{report.blocks_written:,}", stored if with_data else "")
    table.add_row("evicted", f"{report.blocks_evicted:,}", "")
    table.add_row("refused", f"{report.blocks_refused:,}", "")
    if report.blocks_dropped:
        table.add_row("dropped: no room", f"{report.blocks_dropped:,}", "")
    if with_data:
        table.add_row("loaded and verified", f"{report.blocks_verified:,}", loaded)
        if report.damage_injected:
            table.add_row("damaged on purpose", f"{report.damage_injected:,}", "")
        table.add_row("mismatches caught, turned into misses", f"{report.mismatches_caught:,}", "")
        for tier in report.tiers[1:]:
            table.add_row(f"written to {tier.name}", f"{tier.blocks_written:,}", size(tier.bytes_written))
            table.add_row(f"mismatches caught by {tier.name}", f"{tier.mismatches_caught:,}", "")
            if tier.outages:
                what = f"{tier.name} was unavailable, {tier.outages:,} times; not answered"
                table.add_row(what, f"{tier.unanswered_blocks:,}", duration(tier.outage_s))
            if tier.requests:
                table.add_row(f"requests to {tier.name}, cost", f"{tier.requests:,}", f"{tier.cost:.2g}")
        style = "bold red" if report.mismatches_served else "bold green"
        table.add_row("mismatches served", Text(f"{report.mismatches_served:,}", style), "")
    return table


def _verdict(report: ReplayReport) -> Text:
    saved = _percent(report.tokens_saved, report.tokens)
    text = Text(no_wrap=True, overflow="ignore")
    text.append(f"  {saved} of the prefill work is saved: ")
    text.append(f"{report.tokens_saved:,} of {report.tokens:,} tokens.\n")
    text.append(f"  A cache without limit would save {percent(report.infinite_hit_ratio)}")
    text.append(f", an optimal policy of this size {percent(report.optimum_hit_ratio)}.\n")
    if report.decode_tokens_per_s:
        text.append(f"  {assumption(report.decode_tokens_per_s)}.\n")
    if report.queue_requests:
        text.append(f"  {assumed_queue(report.queue_requests)}.\n")
    if report.skipped_lines:
        text.append(f"  {report.skipped_lines:,} bad lines of the trace were left out.\n")
    text.append(f"  CPU time for deciding: {duration(report.control_plane_s)}")
    if report.block_refs >= _ENOUGH_TO_MEASURE:
        text.append(f" ({duration(report.control_plane_s / report.block_refs)} a reference)")
    if report.block_bytes:
        text.append(f"; for bytes: {duration(report.data_plane_s)}")
    text.append(f".\n  Decisions: sha256 {report.decisions_sha256[:16]}\n")
    return text


def assumption(decode_tokens_per_s: float) -> str:
    """What a report says of ends that no trace has."""
    return f"Requests end when {decode_tokens_per_s:,g} tokens/s have generated their answers: assumed"


def assumed_queue(num_requests: int) -> str:
    """What a report says of a queue that no trace has."""
    return f"The next {num_requests:,} requests wait, and are expected: assumed"


def _percent(part: int, whole: int) -> str:
    return percent(part / whole) if whole else "-"
