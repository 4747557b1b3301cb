"""Facts about a recording, before any purchase: rates, the ceiling of savings, and hits of the GPUs.

Numbers are sums over all replicas. Simulates only unlimited caches and the caches of the GPUs, because these
do not depend on a purchase.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from kvoffload.errors import ConfigError
from kvoffload.plan.fleet import Fleet
from kvoffload.replay.device_cache import run_device
from kvoffload.replay.optimum import infinite
from kvoffload.sweep.bootstrap import RESAMPLES, WINDOWS, Interval, Resamples, Sums, window_sums
from kvoffload.sweep.measuring import swept
from kvoffload.sweep.table import SweptTrace
from kvoffload.sweep.task import Share, TraceSource, load
from kvoffload.traces.trace import Trace

_BUSY_MS = 60_000
"""Period, in ms, over which peak traffic is averaged. Shorter peaks do not matter, because RAM buffers the
writes."""


@dataclass(frozen=True)
class Evidence:
    """The recording, divided among the replicas of a fleet.

    Attributes:
        name: name of the trace.
        assumed: assumptions that the conversion to a trace has made; empty if there are none.
        traces: a trace for each replica. Replicas without block references are left out.
        whole: the trace of all replicas together; None unless replicas may share servers or RAM.
        requests, block_refs: number of requests and of block references of all replicas.
        tokens: number of prompt tokens in full blocks.
        share_outside_blocks: share of the prompt tokens that are in no whole block; None if unknown.
        warnings: defects of the recording that affect the answer.
        time_unit: as in `Trace`; empty if ms are assumed.
        duration_s: time from the first arrival to the last; 0 if the recording has no times.
        busy: block references per second in the busiest minute, divided by the mean rate of the whole
            recording.
        footprint_blocks: the largest number of unique blocks that one replica has.
        ceiling_hits: block references that unlimited caches would serve.
        apart_hits: block references that unlimited caches would serve if each replica had its own cache.
        refs: for each window, the number of block references.
        window_ends_s: for each window, the time of its last arrival, in seconds after the first arrival of
            the recording; empty if the recording has no times.
        device_hits: for each window, the number of block references that the GPUs alone would serve.
        draws: random draws of the windows, for the confidence intervals.
    """

    name: str
    assumed: str
    traces: tuple[SweptTrace, ...]
    whole: SweptTrace | None
    requests: int
    block_refs: int
    tokens: int
    share_outside_blocks: float | None
    warnings: tuple[str, ...]
    time_unit: str
    duration_s: float
    busy: float
    footprint_blocks: int
    ceiling_hits: int
    apart_hits: int
    refs: Sums
    window_ends_s: tuple[float, ...]
    device_hits: Sums
    draws: Resamples

    @property
    def ceiling(self) -> float:
        """Prefix-hit ratio of unlimited caches."""
        return self.ceiling_hits / self.block_refs

    @property
    def ceiling_apart(self) -> float:
        """Prefix-hit ratio of unlimited caches, if replicas share nothing."""
        return self.apart_hits / self.block_refs

    @property
    def replayed(self) -> tuple[SweptTrace, ...]:
        """All traces that a plan replays: the trace of each replica, then `whole` if it is not None."""
        return self.traces if self.whole is None else (*self.traces, self.whole)

    @property
    def device_share(self) -> float:
        """Prefix-hit ratio of the GPUs alone."""
        return int(self.device_hits.sum()) / self.block_refs

    def per_second(self, blocks: int, fleet: Fleet) -> float | None:
        """Convert a number of blocks in the whole recording to bytes per second of the fleet.

        Returns None if the recording has no times.
        """
        return blocks * fleet.block_bytes * fleet.scale / self.duration_s if self.duration_s else None

    def gpus_worth(self, share: float, fleet: Fleet) -> float | None:
        """Return the number of GPUs that compute this share of the prefill; None without times or speeds."""
        if not (self.duration_s and fleet.tokens_per_s):
            return None
        return share * self.tokens * fleet.scale / self.duration_s / fleet.tokens_per_s

    def interval(self, hits: Sums) -> Interval | None:
        """Compute the confidence interval of a prefix-hit ratio. `hits`: number of hits in each window."""
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
    """Read the recording and divide it among the replicas.

    Args:
        one_in: use one session in this many.
        is_shared: True if the replicas may share servers or RAM.

    Raises: errors of `load`, and `ConfigError` for a recording or a sample without a full block.
    """
    shares, traces = list[Trace](), list[SweptTrace]()
    for replica in range(fleet.replicas):
        own = replace(source, share=Share(fleet.load, fleet.routing, fleet.replicas, replica, one_in))
        if load(own).block_refs:
            shares.append(load(own))
            traces.append(swept(own))
    if not shares:
        load(source).check_blocks(source.name_or_path)
        raise ConfigError("sample", one_in, "the sample has no whole block; give a smaller number")
    undivided = replace(source, share=Share(fleet.load, one_in=one_in))
    apart = sum(infinite(share).prefix_hit_blocks for share in shares)
    windows = together([trace.refs for trace in traces])
    refs = int(windows.sum())
    duration_s, busy = _pace(shares)
    return Evidence(
        name=shares[0].name,
        assumed=shares[0].assumed,
        traces=tuple(traces),
        whole=swept(undivided) if is_shared else None,
        requests=sum(share.requests for share in shares),
        block_refs=refs,
        tokens=refs * shares[0].block_tokens,
        share_outside_blocks=_outside_blocks(shares),
        warnings=tuple(load(source).warnings),
        time_unit=shares[0].time_unit,
        duration_s=duration_s,
        busy=busy,
        footprint_blocks=max(share.unique_blocks for share in shares),
        ceiling_hits=infinite(load(undivided)).prefix_hit_blocks if is_shared else apart,
        apart_hits=apart,
        refs=windows,
        window_ends_s=_window_ends(shares, len(windows)) if duration_s else (),
        device_hits=together(
            [window_sums(run_device(share, fleet.device_blocks).served) for share in shares]
        ),
        draws=Resamples(windows, resamples, seed),
    )


def together(windows: Sequence[Sums]) -> Sums:
    """Add the sums of all replicas, window by window. Replicas may have different numbers of windows."""
    longest = max(map(len, windows))
    padded = (np.pad(sums, (0, longest - len(sums))) for sums in windows)
    total: Sums = sum(padded, np.zeros(longest, np.int64))
    return total


def _window_ends(shares: Sequence[Trace], count: int) -> tuple[float, ...]:
    """Compute, for each window, the last arrival at any replica, in seconds after the first arrival."""
    first = min(int(share.timestamps_ms.min()) for share in shares)
    latest = np.zeros(count)
    for share in shares:
        windows = min(WINDOWS, share.requests)
        lasts = np.arange(1, windows + 1) * share.requests // windows - 1
        latest[:windows] = np.maximum(latest[:windows], (share.timestamps_ms[lasts] - first) / 1000)
    return tuple(latest.tolist())


def _outside_blocks(shares: Sequence[Trace]) -> float | None:
    """Compute the share of the prompt tokens of all replicas that are in no whole block; None if unknown."""
    prompts = [int(share.prompt_tokens.sum()) for share in shares if share.prompt_tokens is not None]
    if len(prompts) < len(shares):
        return None
    return 1 - sum(share.block_refs * share.block_tokens for share in shares) / max(1, sum(prompts))


def _pace(shares: Sequence[Trace]) -> tuple[float, float]:
    """Return `Evidence.duration_s` and `Evidence.busy`. If the recording has no times, return 0 and 1."""
    times: npt.NDArray[np.int64] = np.concatenate([share.timestamps_ms for share in shares])
    lengths = np.concatenate([np.diff(share.offsets) for share in shares])
    first, last = int(times.min()), int(times.max())
    if first == last:
        return 0.0, 1.0
    # Only minutes with requests are counted, because a recording may have gaps of weeks.
    _, minute = np.unique((times - first) // _BUSY_MS, return_inverse=True)
    most = float(np.bincount(minute, weights=lengths).max()) / _BUSY_MS
    return (last - first) / 1000, max(1.0, most / (int(lengths.sum()) / (last - first)))
