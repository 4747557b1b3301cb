"""A replay through several instances of an engine: each has RAM of its own, and they share the last tier
behind it.

Each is a `Replay` of its part of the trace; their requests are served in the order of the whole. Owns which
instance wrote what, and the report of all together.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec
import numpy as np
import numpy.typing as npt

from kvoffload.replay.keys import KEY_BYTES
from kvoffload.replay.optimum import infinite, optimum
from kvoffload.replay.replay import Replay, ReplayConfig
from kvoffload.replay.report import ReplayReport, TierReport
from kvoffload.replay.routing import check_instances, check_routing, route
from kvoffload.structures.keys import Keys
from kvoffload.tiers.contract import Mask
from kvoffload.tiers.simulated import SimulatedTier
from kvoffload.tiers.spec import SizedTierOptions
from kvoffload.traces.trace import Trace
from kvoffload.transfer import Blocks, Rows

_SUMMED = (
    "requests", "block_refs", "prefix_hit_blocks", "device_hit_blocks", "offload_hit_blocks", "tokens",
    "tokens_saved", "blocks_written", "blocks_evicted", "blocks_refused", "blocks_dropped", "control_plane_s",
    "data_plane_s",
)  # fmt: skip


class SharedTier(SimulatedTier):
    """A simulated tier of several managers, which call it in turns.

    Attributes:
        user: the instance whose turn it is.
        read_of_others: for each instance, the blocks that it has read and another one had written.
    """

    def __init__(self, options: SizedTierOptions, num_instances: int) -> None:
        super().__init__(
            options.num_blocks, key_bytes=KEY_BYTES, policy=options.policy, admission=options.admission
        )
        self.user = 0
        self.read_of_others = [0] * num_instances
        self._writers: dict[bytes, int] = {}

    def submit_write(
        self, keys: Keys, pool: Blocks, rows: Rows, request: object | None = None
    ) -> tuple[int, Mask]:
        job, taken = super().submit_write(keys, pool, rows, request)
        self._writers.update(dict.fromkeys(keys.take(taken), self.user))
        return job, taken

    def submit_read(self, keys: Keys, pool: Blocks, rows: Rows) -> int:
        here = keys.take(self._manager.contains(keys))
        self.read_of_others[self.user] += sum(self._writers[key] != self.user for key in here)
        return super().submit_read(keys, pool, rows)


class SharedReplay:
    """One run of a trace through several instances, without bytes. As `Replay`: construct, `run`.

    Which requests wait in a queue, and when they end, is known of each instance by itself: ends are told
    before its own next request.

    Attributes:
        hits_per_request: as of `Replay`.
    """

    def __init__(self, trace: Trace, config: ReplayConfig) -> None:
        self._trace, self._config = trace, config
        num_instances = check_instances(config.instances)
        self._instance_of = route(trace, num_instances, check_routing(config.routing))
        alone = replace(config, instances=1)
        self._shared: SharedTier | None = None
        if config.tiers:
            last = config.tiers[-1]
            assert isinstance(last, SizedTierOptions), "without bytes all tiers are simulated"
            self._shared = SharedTier(last, num_instances)
        parts = [trace.of_requests(np.flatnonzero(self._instance_of == one)) for one in range(num_instances)]
        self._refs = [part.block_refs for part in parts]
        self._replays = [Replay(part, alone, shared=self._shared) for part in parts]
        self.hits_per_request = np.zeros(trace.requests, np.int32)

    def run(self, progress: Callable[[int], None] = lambda requests: None) -> ReplayReport:
        """Replay every request. `progress` is told how many are done, about 200 times."""
        step = max(1, self._trace.requests // 200)
        served = [0] * len(self._replays)
        for request, instance in enumerate(self._instance_of.tolist()):
            self._take_turn(instance)
            self._replays[instance].serve(served[instance])
            served[instance] += 1
            if (request + 1) % step == 0:
                progress(request + 1)
        reports = []
        for number, one in enumerate(self._replays):
            self._take_turn(number)
            reports.append(one.finish())
            self.hits_per_request[self._instance_of == number] = one.hits_per_request
        progress(self._trace.requests)
        return self._together(reports)

    @property
    def hits_of_instances(self) -> list[npt.NDArray[np.int32]]:
        """As `hits_per_request`, for each instance that is asked for a block the hits of its own requests."""
        return [one.hits_per_request for one, refs in zip(self._replays, self._refs, strict=True) if refs]

    def _take_turn(self, instance: int) -> None:
        if self._shared is not None:
            self._shared.user = instance

    def _together(self, reports: Sequence[ReplayReport]) -> ReplayReport:
        trace, config, refs = self._trace, self._config, max(1, self._trace.block_refs)
        sums = {name: sum(getattr(one, name) for one in reports) for name in _SUMMED}
        best = infinite(trace).prefix_hit_blocks
        if config.device_blocks == 0:
            # All that the instances hold, as if it were one cache: none of them can do better.
            shared = config.tiers[-1].num_blocks if config.tiers else 0
            together = config.instances * (config.offload_blocks - shared) + shared
            best = optimum(trace, together, 0, config.store).prefix_hit_blocks
        digests = "".join(one.decisions_sha256 for one in reports)
        return msgspec.structs.replace(
            reports[0],
            **sums,
            unique_blocks=trace.unique_blocks,
            prefix_hit_ratio=sums["prefix_hit_blocks"] / refs,
            block_hit_ratio=sum(one.block_hit_ratio * one.block_refs for one in reports) / refs,
            infinite_hit_ratio=infinite(trace).prefix_hit_blocks / refs,
            optimum_hit_ratio=best / refs,
            writes_per_ref=sums["blocks_written"] / refs,
            decisions_sha256=hashlib.sha256(digests.encode()).hexdigest(),
            policy_state={},
            instances=config.instances,
            routing=config.routing,
            hit_blocks_of_others=0 if self._shared is None else sum(self._shared.read_of_others),
            tiers=[
                self._tier(place, [one.tiers[place] for one in reports])
                for place in range(len(reports[0].tiers))
            ],
        )

    def _tier(self, place: int, reports: Sequence[TierReport]) -> TierReport:
        """One tier of all; of the shared one each has counted everything but hits."""
        hits = sum(one.hit_blocks for one in reports)
        if place and place == len(self._config.tiers):
            return msgspec.structs.replace(reports[-1], hit_blocks=hits)
        return msgspec.structs.replace(
            reports[0],
            hit_blocks=hits,
            blocks_written=sum(one.blocks_written for one in reports),
            blocks_evicted=sum(one.blocks_evicted for one in reports),
        )


def replay_of(trace: Trace, config: ReplayConfig) -> Replay | SharedReplay:
    """The replay without bytes that a configuration asks for."""
    return Replay(trace, config) if config.instances == 1 else SharedReplay(trace, config)
