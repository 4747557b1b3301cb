"""What a sweep says of each combination: a measurement beside LRU's, the optimum's, and its own chance.

Owns the columns. Depends on measurements alone, so it is computed anew whenever a sweep is finished.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from kvoffload.sweep.bootstrap import Interval, Resamples, Sums
from kvoffload.sweep.grid import Point
from kvoffload.sweep.task import Measurement, TraceSource

YARDSTICK = "lru"

_SMALLEST_GAP = 0.001
"""A share of a gap smaller than this is noise."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One combination on one trace. All ratios are shares of the trace's block references.

    Attributes:
        trace, trace_sha256: its name, and what is in it.
        requests, block_refs, unique_blocks: its size.
        policy, admission, store: what was replayed.
        capacity, capacity_blocks: of the RAM tier, as typed and in blocks.
        device, device_blocks: of the device cache in front of it, as typed and in blocks.
        tiers, tier_blocks: what is behind RAM, as typed, and how many blocks that holds.
        decode_tokens_per_s: the speed at which requests were assumed to generate their answers; 0: they ended
            as soon as they were served.
        queue_requests: how many requests were assumed to wait in the engine's queue.
        instances: of the engine, each with RAM and device of these sizes, which share the last tier; routing:
            which of them served what.
        prefix_hit_ratio: references served by device and tier together, along the prefix.
        ci_low, ci_high, ci_correlation: its confidence interval, and whether that holds
            (`bootstrap.Interval`); null for fewer requests than `FEWEST_WINDOWS`.
        offload_hit_ratio: what RAM and the tiers behind it add to the device; tier_hit_ratio: the part of
            it that comes from behind RAM.
        others_hit_ratio: the part of that which another instance had written: what sharing brings.
        block_hit_ratio: share of references whose block the tier held, at any depth.
        blocks_written, writes_per_ref: what was stored in RAM, and per reference; bytes_written: the same in
            bytes, null where nobody has said what a token takes.
        tier_writes_per_ref: what was written to the tiers behind RAM, per reference.
        optimum_hit_ratio: of the best policy at this point; null where it is not known.
        infinite_hit_ratio: of a cache that never evicts.
        baseline: the row that the next columns compare with: LRU at the same sizes and moment to store,
            with admission ``all`` if that is in the sweep, else with the first rule; null without LRU.
        diff_vs_lru, diff_low, diff_high, diff_correlation: prefix-hit ratio minus the baseline's, and the
            confidence interval of this paired difference: no difference is shown if it contains 0.
        gap_closed: ``diff_vs_lru / (optimum_hit_ratio - baseline's)``; null if that gap is below 0.001.
        writes_vs_lru: blocks written over the baseline's.
        among_best: no other row of this trace, device and capacity is better beyond chance.
        verdict: of the best row at its sizes, store mode and tiers: what is to be said there in words
            (`verdict.Verdict.line`); null in the others.
        decisions_sha256: digest of the decision log: equal digests, equal decisions.
        seed, resamples: of the confidence intervals.
        version: of kvoffload.
    """

    trace: str
    trace_sha256: str
    requests: int
    block_refs: int
    unique_blocks: int
    policy: str
    admission: str
    store: str
    capacity: str
    capacity_blocks: int
    device: str
    device_blocks: int
    tiers: str
    tier_blocks: int
    decode_tokens_per_s: float
    queue_requests: int
    instances: int
    routing: str
    prefix_hit_ratio: float
    ci_low: float | None
    ci_high: float | None
    ci_correlation: float | None
    offload_hit_ratio: float
    tier_hit_ratio: float
    others_hit_ratio: float
    block_hit_ratio: float
    blocks_written: int
    writes_per_ref: float
    bytes_written: int | None
    tier_writes_per_ref: float
    optimum_hit_ratio: float | None
    infinite_hit_ratio: float
    baseline: str | None = None
    diff_vs_lru: float | None = None
    diff_low: float | None = None
    diff_high: float | None = None
    diff_correlation: float | None = None
    gap_closed: float | None = None
    writes_vs_lru: float | None = None
    among_best: bool = False
    verdict: str | None = None
    decisions_sha256: str
    seed: int
    resamples: int
    version: str


class TimedRow(Row, frozen=True, kw_only=True):
    """A row with what no two runs have in common.

    Attributes:
        control_plane_s: seconds spent deciding, on a machine that did other replays meanwhile.
    """

    control_plane_s: float


@dataclass(frozen=True)
class SweptTrace:
    """What rows need to know of a trace.

    Attributes:
        refs: references in each window (`bootstrap.window_sums`).
    """

    source: TraceSource
    name: str
    requests: int
    block_refs: int
    unique_blocks: int
    refs: Sums


class Runs:
    """The measurements of a sweep beside each other: each point's, and what chance says of any two.

    Attributes:
        traces, points: of the sweep; what each measurement is of.
        measured: one for each point, in their order.
        seed, resamples: of the intervals.
    """

    def __init__(
        self,
        traces: Sequence[SweptTrace],
        points: Sequence[Point],
        measured: Sequence[Measurement],
        *,
        seed: int,
        resamples: int,
    ) -> None:
        self.traces, self.points, self.measured = traces, points, measured
        self.seed, self.resamples = seed, resamples
        self._draws = [Resamples(trace.refs, resamples, seed) for trace in traces]
        self._hits = [np.array(measurement.window_hits, np.int64) for measurement in measured]

    def ratio(self, number: int) -> Interval | None:
        """The interval of one point's prefix-hit ratio."""
        return self._draws[self.points[number].trace].ratio(self._hits[number])

    def difference(self, number: int, other: int) -> Interval | None:
        """The paired interval of one point's ratio minus another's; both are of one trace."""
        return self._draws[self.points[number].trace].difference(self._hits[number], self._hits[other])


def rows_of(runs: Runs, *, block_bytes: int | None = None, timings: bool = False) -> list[Row]:
    """A row for each point, in their order; what is said in words is not in them yet.

    Args:
        block_bytes: of a block; None if nobody has said what a token takes.
    """
    points, measured = runs.points, runs.measured
    baselines, best = _baselines(points), _best(points, measured)
    rows = []
    for number, point in enumerate(points):
        rival = best[_group(point)]
        versus = runs.difference(number, rival)
        row = _measured(runs, number, block_bytes)
        # Where nothing is known of chance, only equals are equal.
        among_best = versus.high >= 0 if versus else _hits(measured[number]) == _hits(measured[rival])
        row = msgspec.structs.replace(row, among_best=among_best)
        baseline = baselines.get(place(point))
        if baseline is not None:
            row = _compared(row, runs, number, baseline)
        if timings:
            seconds = measured[number].report.control_plane_s
            row = TimedRow(**msgspec.structs.asdict(row), control_plane_s=seconds)
        rows.append(row)
    return rows


def violations(rows: Sequence[Row]) -> list[str]:
    """One line for each row that is better than the best there can be: an error of ours, not a success."""
    found = []
    for row in rows:
        bounds = {"an optimal policy": row.optimum_hit_ratio, "a cache without limit": row.infinite_hit_ratio}
        for name, bound in bounds.items():
            if bound is not None and row.prefix_hit_ratio > bound:
                device = f", device {row.device}" if row.device_blocks else ""
                device += f", tiers {row.tiers}" if row.tier_blocks else ""
                found.append(
                    f"{row.trace}: {row.policy}, {row.admission}, {row.store}, capacity {row.capacity}"
                    f"{device}: prefix-hit ratio {row.prefix_hit_ratio!r}, but {name} reaches {bound!r}"
                )
    return found


def _group(point: Point) -> tuple[object, ...]:
    """What is compared with each other: everything at the same sizes on one trace."""
    behind = sum(tier.num_blocks for tier in point.tier_options)
    return point.trace, point.device, point.capacity, behind


def place(point: Point) -> tuple[object, ...]:
    """What has one baseline, one optimum and one verdict: a trace and sizes, a moment to store, tiers."""
    return *_group(point), point.store, point.tiers


def _baselines(points: Sequence[Point]) -> dict[tuple[object, ...], int]:
    found: dict[tuple[object, ...], int] = {}
    for number, point in enumerate(points):
        if point.policy == YARDSTICK and (place(point) not in found or point.admission == "all"):
            found[place(point)] = number
    return found


def _best(points: Sequence[Point], measured: Sequence[Measurement]) -> dict[tuple[object, ...], int]:
    found: dict[tuple[object, ...], int] = {}
    for number, point in enumerate(points):
        rival = found.get(_group(point))
        if rival is None or _hits(measured[number]) > _hits(measured[rival]):
            found[_group(point)] = number
    return found


def _measured(runs: Runs, number: int, block_bytes: int | None) -> Row:
    """The row of one point, compared with none."""
    point, report = runs.points[number], runs.measured[number].report
    trace, interval = runs.traces[point.trace], runs.ratio(number)
    behind = report.tiers[1:]
    return Row(
        trace=trace.name,
        trace_sha256=trace.source.digest,
        requests=trace.requests,
        block_refs=trace.block_refs,
        unique_blocks=trace.unique_blocks,
        policy=point.policy,
        admission=point.admission,
        store=point.store,
        capacity=point.capacity,
        capacity_blocks=point.capacity_blocks,
        device=point.device,
        device_blocks=point.device_blocks,
        tiers=point.tiers,
        tier_blocks=sum(tier.num_blocks for tier in point.tier_options),
        decode_tokens_per_s=report.decode_tokens_per_s,
        queue_requests=report.queue_requests,
        instances=point.instances,
        routing=point.routing,
        prefix_hit_ratio=report.prefix_hit_ratio,
        ci_low=interval.low if interval else None,
        ci_high=interval.high if interval else None,
        ci_correlation=interval.correlation if interval else None,
        offload_hit_ratio=report.offload_hit_blocks / trace.block_refs,
        tier_hit_ratio=sum(tier.hit_blocks for tier in behind) / trace.block_refs,
        others_hit_ratio=report.hit_blocks_of_others / trace.block_refs,
        block_hit_ratio=report.block_hit_ratio,
        blocks_written=report.blocks_written,
        writes_per_ref=report.writes_per_ref,
        bytes_written=None if block_bytes is None else report.blocks_written * block_bytes,
        tier_writes_per_ref=sum(tier.blocks_written for tier in behind) / trace.block_refs,
        optimum_hit_ratio=report.optimum_hit_ratio,
        infinite_hit_ratio=report.infinite_hit_ratio,
        decisions_sha256=report.decisions_sha256,
        seed=runs.seed,
        resamples=runs.resamples,
        version=report.version,
    )


def _compared(row: Row, runs: Runs, number: int, baseline: int) -> Row:
    """The row beside its baseline's."""
    point, lru = runs.points[baseline], runs.measured[baseline].report
    gap = None if row.optimum_hit_ratio is None else row.optimum_hit_ratio - lru.prefix_hit_ratio
    difference = row.prefix_hit_ratio - lru.prefix_hit_ratio
    interval = runs.difference(number, baseline)
    return msgspec.structs.replace(
        row,
        baseline=f"{point.policy}, {point.admission}",
        diff_vs_lru=difference,
        diff_low=interval.low if interval else None,
        diff_high=interval.high if interval else None,
        diff_correlation=interval.correlation if interval else None,
        gap_closed=difference / gap if gap is not None and gap >= _SMALLEST_GAP else None,
        writes_vs_lru=row.blocks_written / lru.blocks_written if lru.blocks_written else None,
    )


def _hits(measurement: Measurement) -> int:
    return measurement.report.prefix_hit_blocks
