"""What a recording says of a fleet before anything is bought: its rates, its ceiling, what the GPUs have.

Owns how the requests of several replicas are counted together. Replays nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from kvoffload.errors import ConfigError
from kvoffload.plan.fleet import Fleet
from kvoffload.replay.device import run_device
from kvoffload.replay.optimum import infinite
from kvoffload.sweep.bootstrap import RESAMPLES, Interval, Resamples, Sums, window_sums
from kvoffload.sweep.measuring import swept
from kvoffload.sweep.table import SweptTrace
from kvoffload.sweep.task import Share, TraceSource, load
from kvoffload.traces.trace import Trace

_BUSY_MS = 60_000
"""How long a tier has to keep up with the busiest traffic: what is written waits in RAM for less."""


@dataclass(frozen=True)
class Evidence:
    """The recording as the fleet gets it.

    Attributes:
        name: of the trace.
        traces: what each replica gets, without those that get nothing.
        whole: what all of them get, in the order of the recording; None unless they may share a tier.
        requests, block_refs, tokens: of all replicas; tokens of full blocks.
        duration_s: from the first arrival to the last; 0: nothing is known of rates.
        busy: references a second of the busiest minute, over those of an average one.
        footprint_blocks: different blocks of the replica that has most.
        ceiling_hits: block references that caches without limit would serve. apart_hits: the same of replicas
            that share nothing.
        refs: block references in each window. device_hits: those that the GPUs serve alone.
        draws: of the windows, for intervals.
    """

    name: str
    traces: tuple[SweptTrace, ...]
    whole: SweptTrace | None
    requests: int
    block_refs: int
    tokens: int
    duration_s: float
    busy: float
    footprint_blocks: int
    ceiling_hits: int
    apart_hits: int
    refs: Sums
    device_hits: Sums
    draws: Resamples

    @property
    def ceiling(self) -> float:
        """The prefix-hit ratio of caches without limit."""
        return self.ceiling_hits / self.block_refs

    @property
    def ceiling_apart(self) -> float:
        """The same of replicas that share nothing."""
        return self.apart_hits / self.block_refs

    @property
    def replayed(self) -> tuple[SweptTrace, ...]:
        """All that is replayed for a plan; the whole is last."""
        return self.traces if self.whole is None else (*self.traces, self.whole)

    @property
    def device_share(self) -> float:
        """The prefix-hit ratio of the GPUs alone."""
        return int(self.device_hits.sum()) / self.block_refs

    def per_second(self, blocks: int, fleet: Fleet) -> float | None:
        """Bytes a second, of so many blocks of the recording; None if it has no times."""
        return blocks * fleet.block_bytes * fleet.scale / self.duration_s if self.duration_s else None

    def gpus_worth(self, share: float, fleet: Fleet) -> float | None:
        """GPUs that do nothing but compute this share of the prefill; None if that cannot be known."""
        if not (self.duration_s and fleet.tokens_per_s):
            return None
        return share * self.tokens * fleet.scale / self.duration_s / fleet.tokens_per_s

    def interval(self, hits: Sums) -> Interval | None:
        """Of the prefix-hit ratio."""
        return self.draws.ratio(hits)


def gather(
    source: TraceSource,
    fleet: Fleet,
    *,
    seed: int = 0,
    resamples: int = RESAMPLES,
    one_in: int = 1,
    is_shared: bool = False,
) -> Evidence:
    """Read the recording and divide it. Raises as `load`, and `ConfigError` if it has no block.

    `one_in`: look at one of so many sessions. `is_shared`: the replicas may share a tier.
    """
    parts, traces = list[Trace](), list[SweptTrace]()
    for replica in range(fleet.replicas):
        its = replace(source, share=Share(fleet.load, fleet.routing, fleet.replicas, replica, one_in))
        if load(its).block_refs:
            parts.append(load(its))
            traces.append(swept(its))
    if not parts:
        trace = load(source)
        why = f"it must have a request of at least one block ({trace.block_tokens} tokens)"
        raise ConfigError("trace", source.name_or_path, why)
    whole, all_of_it = None, replace(source, share=Share(fleet.load, one_in=one_in))
    apart = sum(infinite(part).prefix_hit_blocks for part in parts)
    if is_shared:
        whole = swept(all_of_it)
    windows = together([trace.refs for trace in traces])
    refs = int(windows.sum())
    duration_s, busy = _pace(parts)
    return Evidence(
        name=parts[0].name,
        traces=tuple(traces),
        whole=whole,
        requests=sum(part.requests for part in parts),
        block_refs=refs,
        tokens=refs * parts[0].block_tokens,
        duration_s=duration_s,
        busy=busy,
        footprint_blocks=max(part.unique_blocks for part in parts),
        ceiling_hits=infinite(load(all_of_it)).prefix_hit_blocks if is_shared else apart,
        apart_hits=apart,
        refs=windows,
        device_hits=together([window_sums(run_device(part, fleet.device_blocks).served) for part in parts]),
        draws=Resamples(windows, resamples, seed),
    )


def together(windows: Sequence[Sums]) -> Sums:
    """The sums of all replicas in each window; a replica with few requests has fewer windows: the first."""
    longest = max(map(len, windows))
    found: Sums = sum((np.pad(one, (0, longest - len(one))) for one in windows), np.zeros(longest, np.int64))
    return found


def _pace(parts: Sequence[Trace]) -> tuple[float, float]:
    """The duration in seconds, and how much busier the busiest minute is than an average one."""
    times: npt.NDArray[np.int64] = np.concatenate([part.timestamps_ms for part in parts])
    lengths = np.concatenate([np.diff(part.offsets) for part in parts])
    first, last = int(times.min()), int(times.max())
    if first == last:
        return 0.0, 1.0
    # Only minutes that have requests: between two there may be weeks.
    _, minute = np.unique((times - first) // _BUSY_MS, return_inverse=True)
    most = float(np.bincount(minute, weights=lengths).max()) / _BUSY_MS
    return (last - first) / 1000, max(1.0, most / (int(lengths.sum()) / (last - first)))
