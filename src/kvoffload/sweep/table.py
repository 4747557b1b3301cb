"""Output rows of a sweep: measurements with confidence intervals, compared with LRU and with the optimum.

Defines the columns. Rows are computed from the measurements alone; when a sweep ends, all are computed again.
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
"""Baseline policy: every other policy is compared with it."""

_SMALLEST_GAP = 0.001
"""Smallest difference between the hit ratios of the optimum and of the baseline for which `gap_closed` is
computed. With a smaller difference the quotient would be noise."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Output row: one policy and admission rule with one set of sizes, replayed on one trace.

    All ratios are shares of the trace's block references.

    Attributes:
        trace, trace_sha256: name and content digest of the trace.
        share_outside_blocks: share of the prompt tokens that are in no whole block. Ratios do not count these
            tokens. Null if unknown.
        capacity, device, tiers: sizes of RAM, the device cache and the tiers behind RAM, as the user wrote
            them.
        capacity_blocks, device_blocks, tier_blocks: these sizes in blocks.
        decode_tokens_per_s, queue_requests, instances, routing, shared_ram: assumptions of the replay, see
            `ReplayConfig`. All sizes are for one instance, even if instances share RAM.
        prefix_hit_ratio: block references served by device, RAM and tiers. A request's hits end at its first
            missing block.
        ci_low, ci_high, ci_correlation: confidence interval of the prefix-hit ratio (`bootstrap.Interval`);
            null for fewer requests than `FEWEST_WINDOWS`.
        offload_hit_ratio: references served by RAM and the tiers behind it.
        tier_hit_ratio: references served by the tiers behind RAM.
        others_hit_ratio: references served from shared RAM or the shared tier, if another instance wrote the
            block.
        block_hit_ratio: references to resident blocks, also after a request's first missing block.
        blocks_written, bytes_written: writes to RAM; `bytes_written` is null if the block size is unknown.
        writes_per_ref: blocks written to RAM per block reference.
        tier_writes_per_ref: blocks written to the tiers behind RAM, per reference.
        optimum_hit_ratio: upper bound for any policy with these sizes. For several instances with
            device caches and separate RAM no such bound is known: the value is `infinite_hit_ratio`.
        infinite_hit_ratio: prefix-hit ratio of an unlimited cache.
        baseline: policy and admission rule of the LRU row with which this row is compared. Both rows belong
            to the same scenario (`place`). The rule is ``all`` if the sweep includes ``all``, otherwise the
            sweep's first rule. Null if the sweep does not include LRU.
        diff_vs_lru: prefix-hit ratio minus the prefix-hit ratio of the baseline.
        diff_low, diff_high, diff_correlation: paired confidence interval of `diff_vs_lru`. The difference is
            significant if the interval does not contain 0.
        gap_closed: ``diff_vs_lru / (optimum_hit_ratio - baseline's ratio)``; null if the divisor is below
            0.001.
        writes_vs_lru: blocks written, divided by the blocks that the baseline wrote.
        among_best: True if no other row with these sizes on this trace is significantly better.
        verdict: verdict of a scenario (`verdict.Verdict.line`), in the scenario's best row; null in other
            rows.
        decisions_sha256: digest of the decision log. Equal digests mean equal decisions.
        seed, resamples: parameters of the confidence intervals.
        version: version of kvoffload.
    """

    trace: str
    trace_sha256: str
    requests: int
    block_refs: int
    unique_blocks: int
    share_outside_blocks: float | None = None
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
    shared_ram: bool
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
    optimum_hit_ratio: float
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
    """Row with the CPU time of the replay's decisions. Unlike other columns, it differs from run to run.

    Attributes:
        control_plane_s: CPU seconds that the decisions took. Other replays may have run on the machine at the
            same time.
    """

    control_plane_s: float


@dataclass(frozen=True)
class SweptTrace:
    """Summary of a trace.

    Attributes:
        refs: number of block references in each window. The windows are up to 32 nearly equal parts of the
            trace (`bootstrap.window_sums`).
        share_outside_blocks, warnings, duration_s: see `Trace`.
    """

    source: TraceSource
    name: str
    requests: int
    block_refs: int
    unique_blocks: int
    refs: Sums
    share_outside_blocks: float | None = None
    warnings: tuple[str, ...] = ()
    duration_s: float = 0.0


class Runs:
    """Measurements of a sweep, with confidence intervals of hit ratios and of their differences.

    Attributes:
        traces, points: traces of the sweep, and points of its grid.
        measured: a measurement for each point, in the order of `points`.
        seed, resamples: parameters of the intervals.
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
        """Compute the confidence interval of a point's prefix-hit ratio."""
        return self._draws[self.points[number].trace].ratio(self._hits[number])

    def difference(self, number: int, baseline: int) -> Interval | None:
        """Compute the paired confidence interval of one point's hit ratio minus another point's hit ratio.

        The points `number` and `baseline` must have the same trace.
        """
        return self._draws[self.points[number].trace].difference(self._hits[number], self._hits[baseline])


def rows_of(runs: Runs, *, block_bytes: int | None = None, timings: bool = False) -> list[Row]:
    """Create a row for each point, in the order of the points. The rows have no verdicts yet.

    Args:
        block_bytes: bytes of a block; None if unknown.
        timings: True to add the column `TimedRow.control_plane_s`.
    """
    points, measured = runs.points, runs.measured
    baselines, best = baselines_of(points), _best(points, measured)
    rows = []
    for number, point in enumerate(points):
        rival = best[_sizes(point)]
        lead = runs.difference(number, rival)
        row = _row(runs, number, block_bytes)
        # Without an interval, only rows with as many hits as the best row are among the best.
        among_best = lead.high >= 0 if lead else _hits(measured[number]) == _hits(measured[rival])
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
    """Describe each row with more hits than an optimal policy or an unlimited cache.

    No policy can have more hits than the optimum, so each of these rows proves a bug of kvoffload.
    """
    lines = []
    for row in rows:
        bounds = {"an optimal policy": row.optimum_hit_ratio, "a cache without limit": row.infinite_hit_ratio}
        for name, bound in bounds.items():
            if row.prefix_hit_ratio > bound:
                device = f", device {row.device}" if row.device_blocks else ""
                device += f", tiers {row.tiers}" if row.tier_blocks else ""
                device += ", shared RAM" if row.shared_ram else ""
                lines.append(
                    f"{row.trace}: {row.policy}, {row.admission}, {row.store}, capacity {row.capacity}"
                    f"{device}: prefix-hit ratio {row.prefix_hit_ratio!r}, but {name} reaches {bound!r}"
                )
    return lines


def _sizes(point: Point) -> tuple[object, ...]:
    """Return a grouping key: trace and sizes. `Row.among_best` compares all rows that have the same key."""
    return point.trace, point.device, point.capacity, point.config.tier_blocks


def place(point: Point) -> tuple[object, ...]:
    """Return the key of a point's scenario: trace, sizes, separate or shared RAM, store mode, and tiers.

    All rows of a scenario are compared with the same baseline, and share one verdict.
    """
    return *_sizes(point), point.config.shared_ram, point.config.store, point.tiers


def baselines_of(points: Sequence[Point]) -> dict[tuple[object, ...], int]:
    baselines: dict[tuple[object, ...], int] = {}
    for number, point in enumerate(points):
        is_first = place(point) not in baselines
        if point.config.policy == YARDSTICK and (is_first or point.config.admission == "all"):
            baselines[place(point)] = number
    return baselines


def _best(points: Sequence[Point], measured: Sequence[Measurement]) -> dict[tuple[object, ...], int]:
    best: dict[tuple[object, ...], int] = {}
    for number, point in enumerate(points):
        rival = best.get(_sizes(point))
        if rival is None or _hits(measured[number]) > _hits(measured[rival]):
            best[_sizes(point)] = number
    return best


def _row(runs: Runs, number: int, block_bytes: int | None) -> Row:
    """Create the row of point `number`. The columns that compare this row with other rows stay empty."""
    point, report = runs.points[number], runs.measured[number].report
    trace, config, interval = runs.traces[point.trace], point.config, runs.ratio(number)
    tiers = report.tiers[1:]
    return Row(
        trace=trace.name,
        trace_sha256=trace.source.digest,
        requests=trace.requests,
        block_refs=trace.block_refs,
        unique_blocks=trace.unique_blocks,
        share_outside_blocks=trace.share_outside_blocks,
        policy=str(config.policy),
        **config.columns(),
        capacity=point.capacity,
        device=point.device,
        tiers=point.tiers,
        tier_blocks=config.tier_blocks,
        instances=config.instances,
        routing=config.routing,
        prefix_hit_ratio=report.prefix_hit_ratio,
        ci_low=interval.low if interval else None,
        ci_high=interval.high if interval else None,
        ci_correlation=interval.correlation if interval else None,
        offload_hit_ratio=report.offload_hit_blocks / trace.block_refs,
        tier_hit_ratio=sum(tier.hit_blocks for tier in tiers) / trace.block_refs,
        others_hit_ratio=report.hit_blocks_of_others / trace.block_refs,
        block_hit_ratio=report.block_hit_ratio,
        blocks_written=report.blocks_written,
        writes_per_ref=report.writes_per_ref,
        bytes_written=None if block_bytes is None else report.blocks_written * block_bytes,
        tier_writes_per_ref=sum(tier.blocks_written for tier in tiers) / trace.block_refs,
        optimum_hit_ratio=report.optimum_hit_ratio,
        infinite_hit_ratio=report.infinite_hit_ratio,
        decisions_sha256=report.decisions_sha256,
        seed=runs.seed,
        resamples=runs.resamples,
        version=report.version,
    )


def _compared(row: Row, runs: Runs, number: int, baseline: int) -> Row:
    point, lru = runs.points[baseline], runs.measured[baseline].report
    gap = row.optimum_hit_ratio - lru.prefix_hit_ratio
    difference = row.prefix_hit_ratio - lru.prefix_hit_ratio
    interval = runs.difference(number, baseline)
    return msgspec.structs.replace(
        row,
        baseline=f"{point.config.policy}, {point.config.admission}",
        diff_vs_lru=difference,
        diff_low=interval.low if interval else None,
        diff_high=interval.high if interval else None,
        diff_correlation=interval.correlation if interval else None,
        gap_closed=difference / gap if gap >= _SMALLEST_GAP else None,
        writes_vs_lru=row.blocks_written / lru.blocks_written if lru.blocks_written else None,
    )


def _hits(measurement: Measurement) -> int:
    return measurement.report.prefix_hit_blocks
