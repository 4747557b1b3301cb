"""Combines the results of all engines of a timed replay into one outcome."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from kvoffload.replay.report import sums_of
from kvoffload.simulate.engine import Engine
from kvoffload.simulate.offload import NoOffload
from kvoffload.simulate.report import (
    Distribution,
    LinkReport,
    TimedOutcome,
    TimedTierReport,
    combined_links,
)
from kvoffload.traces.trace import Trace

_OF_ENGINES = 2
"""Number of links that each engine has even with shared RAM: ``load`` and ``store``, first in its report."""


def outcome_of(
    trace: Trace, engines: Sequence[Engine], offloads: Sequence[NoOffload], *, shared_ram: bool
) -> TimedOutcome:
    """Combine the results of all engines of a run.

    Each engine created its reports of links and tiers when its last request ended. If engines share RAM, each
    report covers the whole RAM and the tiers behind it; therefore these reports are taken only from the
    engine that ended last.
    """
    last = max(range(len(engines)), key=lambda number: engines[number].ended_s)
    seconds = engines[last].ended_s
    device_hits = sum(engine.device_hits for engine in engines)
    loaded = sum(offload.hits() for offload in offloads)
    came_s, began_s, loaded_s, first_token_s = (
        np.concatenate([getattr(engine, name) for engine in engines])
        for name in ("came_s", "began_s", "loaded_s", "first_token_s")
    )
    counts = offloads[last].counts
    of_each = {"lost"} if shared_ram else {*counts}
    counts |= {name: sum(offload.counts[name] for offload in offloads) for name in of_each & {*counts}}
    busy_s = sum(engine.busy_s for engine in engines)
    return TimedOutcome(
        requests=trace.requests,
        seconds=seconds,
        device_hit_blocks=device_hits,
        offload_hit_blocks=loaded,
        hit_ratio=(device_hits + loaded) / max(1, trace.block_refs),
        prefill_s=sum(engine.prefill_s for engine in engines),
        prefill_tokens=sum(engine.prefill_tokens for engine in engines),
        device_busy_share=busy_s / (len(engines) * seconds) if seconds else 0.0,
        ttft_s=Distribution.of(first_token_s - came_s),
        waiting_s=Distribution.of(began_s - came_s),
        loading_s=Distribution.of(loaded_s - began_s),
        most_waiting=max(engine.most_waiting for engine in engines),
        **counts,
        links=_links(engines, engines[last], shared_ram),
        tiers=_tiers(engines, engines[last], loaded, shared_ram),
    )


def _links(engines: Sequence[Engine], last: Engine, shared_ram: bool) -> list[LinkReport]:
    """Combine all engines' reports of links with the same name into one (`combined_links`)."""
    if len(engines) == 1:
        return last.links
    links, num_own = [], min(_OF_ENGINES, len(last.links)) if shared_ram else len(last.links)
    for number in range(num_own):
        same = [engine.links[number] for engine in engines if engine.links]
        together = combined_links(same)
        busy_share = together.busy_s / (len(engines) * last.ended_s) if last.ended_s else 0.0
        links.append(msgspec.structs.replace(together, busy_share=busy_share))
    return links + last.links[num_own:]


def _tiers(engines: Sequence[Engine], last: Engine, loaded: int, shared_ram: bool) -> list[TimedTierReport]:
    """Combine the tier reports of all engines, RAM first. For shared tiers, take the reports of `last`."""
    if len(engines) == 1 or not last.tiers:
        return last.tiers
    of_ram = [engine.tiers[0] for engine in engines if engine.tiers]
    ram = msgspec.structs.replace(last.tiers[0], keeps_up=all(report.keeps_up for report in of_ram))
    if len(last.tiers) == 1:
        ram = msgspec.structs.replace(ram, hit_blocks=loaded)
    if not shared_ram:
        ram = msgspec.structs.replace(ram, **sums_of(of_ram, "written", "evicted", "not_offered"))
    if shared_ram or len(last.tiers) == 1:
        return [ram, *last.tiers[1:]]
    reports = [engine.tiers for engine in engines if engine.tiers]
    ram = msgspec.structs.replace(ram, hit_blocks=sum(report[0].hit_blocks for report in reports))
    below = [
        msgspec.structs.replace(
            last.tiers[level],
            **sums_of((report[level] for report in reports), "hit_blocks", "not_offered"),
            keeps_up=all(report[level].keeps_up for report in reports),
        )
        for level in range(1, len(last.tiers))
    ]
    return [ram, *below]
