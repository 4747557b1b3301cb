"""Terminal form of a replay: sources of blocks, work of the tiers, saving."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from kvoffload.cli.output import Lines, terminal_table
from kvoffload.pages.page import Table
from kvoffload.replay.report import ReplayReport
from kvoffload.text import duration, outside_blocks, percent, size
from kvoffload.whatif.estimate import with_error
from kvoffload.whatif.setting import CURRENT

_ENOUGH_TO_MEASURE = 10_000
"""Smallest number of references for which the time per reference is shown. With fewer references, the
start-up time dominates."""


def table(report: ReplayReport) -> RenderableType:
    tables = [_sources(report), work(report)]
    tables += [_tenants(report)] if report.tenants else []
    tables += [_what_if(report)] if report.what_if else []
    return Group(*map(terminal_table, tables), _summary(report))


def _sources(report: ReplayReport) -> Table:
    ram = f"({report.policy}, {report.admission}, {_ram(report)})"
    rows = [("offload tier " + ram, report.offload_hit_blocks)]
    if len(report.tiers) > 1:
        rows = [(tier.name, tier.hit_blocks) for tier in report.tiers]
        rows[0] = ("ram " + ram, report.tiers[0].hit_blocks)
    rows.append(("computed", report.block_refs - report.prefix_hit_blocks))
    if report.device_blocks:
        blocks = f"{report.device_blocks:,} blocks{_each(report)}"
        rows.insert(0, (f"device cache (lru, {blocks})", report.device_hit_blocks))
    title = (
        f"{report.trace}: {report.requests:,} requests, {report.block_refs:,} block references, "
        f"{report.unique_blocks:,} unique blocks"
    )
    cells = [(source, f"{blocks:,}", _share(blocks, report.block_refs)) for source, blocks in rows]
    return Table(title, ("Source of blocks", "blocks#", "share#"), cells)


def _ram(report: ReplayReport) -> str:
    """Describe the capacity of each engine's RAM, or of the pool that engines share."""
    if report.shared_ram:
        return f"one pool of {report.instances * report.capacity_blocks:,} blocks"
    return f"{report.capacity_blocks:,} blocks{_each(report)}"


def _each(report: ReplayReport) -> str:
    return " each" if report.instances > 1 else ""


def work(report: ReplayReport) -> Table:
    """Build the table of blocks and bytes moved by the tiers."""
    has_data = report.block_bytes > 0
    rows = [
        ("stored", report.blocks_written, size(report.bytes_stored) if has_data else ""),
        ("evicted", report.blocks_evicted, ""),
        ("refused", report.blocks_refused, ""),
    ]
    if report.blocks_dropped:
        rows.append(("dropped: no room", report.blocks_dropped, ""))
    if has_data:
        rows.append(("loaded and verified", report.blocks_verified, size(report.bytes_loaded)))
        if report.damage_injected:
            rows.append(("damaged on purpose", report.damage_injected, ""))
        rows.append(("mismatches caught, turned into misses", report.mismatches_caught, ""))
        for tier in report.tiers[1:]:
            rows.append((f"written to {tier.name}", tier.blocks_written, size(tier.bytes_written)))
            rows.append((f"mismatches caught by {tier.name}", tier.mismatches_caught, ""))
            if tier.outages:
                outage = f"{tier.name} was unavailable, {tier.outages:,} times; not answered"
                rows.append((outage, tier.unanswered_blocks, duration(tier.outage_s)))
            if tier.requests:
                rows.append((f"requests to {tier.name}, cost", tier.requests, f"{tier.cost:.2g}"))
        rows.append(("mismatches served", report.mismatches_served, ""))
    marks = [""] * len(rows)
    if has_data:
        marks[-1] = "bad" if report.mismatches_served else "good"
    cells = [(name, f"{blocks:,}", detail) for name, blocks, detail in rows]
    return Table("", ("Offload tier", "blocks#", "bytes#"), cells, marks)


def _tenants(report: ReplayReport) -> Table:
    cells = [
        (
            row.tenant,
            f"{row.min_blocks:,}",
            "-" if row.max_blocks is None else f"{row.max_blocks:,}",
            f"{row.block_refs:,}",
            _share(row.prefix_hit_blocks, row.block_refs),
            f"{row.blocks_held:,}",
            f"{row.blocks_evicted:,}",
        )
        for row in report.tenants
    ]
    headings = ("Tenant", "min#", "max#", "references#", "hits#", "held at the end#", "evicted#")
    return Table("", headings, cells)


def _what_if(report: ReplayReport) -> Table:
    """Build the table of the estimates for other settings."""
    cells = [
        (
            row.setting,
            with_error(row.hit_ratio, row.error),
            "" if row.setting == CURRENT else with_error(row.gain, row.gain_error, "+"),
        )
        for row in report.what_if
    ]
    marks = ["good" if row.is_better else "" for row in report.what_if]
    title = f"What if: hits of the blocks looked up in RAM, by a sample of 1 in {report.what_if_sample}"
    return Table(title, ("Setting of RAM", "hits#", "gain#"), cells, marks)


def _summary(report: ReplayReport) -> RenderableType:
    saved = _share(report.tokens_saved, report.tokens)
    lines = [
        f"{saved} of the prefill work is saved: {report.tokens_saved:,} of {report.tokens:,} tokens.",
        f"A cache without limit would save {percent(report.infinite_hit_ratio)}, an optimal policy of this "
        f"size {percent(report.optimum_hit_ratio)}.",
        *outside_blocks(report.share_outside_blocks),
    ]
    if report.instances > 1:
        lines.append(_instances(report))
    if report.decode_tokens_per_s:
        lines.append(f"{assumed_ends(report.decode_tokens_per_s)}.")
    if report.queue_requests:
        lines.append(f"{assumed_queue(report.queue_requests)}.")
    if report.skipped_lines:
        lines.append(f"{report.skipped_lines:,} bad lines of the trace were left out.")
    cpu = f"CPU time for deciding: {duration(report.control_plane_s)}"
    if report.block_refs >= _ENOUGH_TO_MEASURE:
        cpu += f" ({duration(report.control_plane_s / report.block_refs)} a reference)"
    if report.block_bytes:
        cpu += f"; for bytes: {duration(report.data_plane_s)}"
    lines += [f"{cpu}.", f"Decisions: sha256 {report.decisions_sha256[:16]}"]
    return Group(Lines(lines), Text())


def _instances(report: ReplayReport) -> str:
    """Describe RAM, routing and shared hits of several engines."""
    ram = "RAM of the given size each"
    if report.shared_ram:
        ram = f"one pool of RAM, {report.instances} times the given size"
    text = f"{report.instances} engines have {ram}; requests go by {report.routing}"
    if report.shared_ram or len(report.tiers) > 1:
        share_of_others = percent(report.hit_blocks_of_others / max(1, report.block_refs))
        text += f"; {share_of_others} of all references hit what another engine had written"
    return f"{text}."


def assumed_ends(decode_tokens_per_s: float) -> str:
    """Describe the assumed ends of requests, which no trace records."""
    return f"Requests end when {decode_tokens_per_s:,g} tokens/s have generated their answers: assumed"


def assumed_queue(num_requests: int) -> str:
    """Describe the assumed queue of the engine, which no trace records."""
    return f"The next {num_requests:,} requests wait, and are expected: assumed"


def _share(part: int, whole: int) -> str:
    return percent(part / whole) if whole else "-"
