"""Replay of a trace on several engines or machines, each with its own RAM.

Each RAM serves the requests of one engine or, with `shared_ram`, of all engines of one machine. The last tier
behind RAM is shared by all engines if one simulated tier stands for it (`may_be_shared`). Requests are served
in the order of the trace. This module also records which manager wrote each block of a shared tier, and
combines the reports.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec
import numpy as np
import numpy.typing as npt

from kvoffload.errors import ConfigError
from kvoffload.replay.config import ReplayConfig
from kvoffload.replay.data import DataPlane
from kvoffload.replay.observer import Observer
from kvoffload.replay.optimum import infinite, optimum
from kvoffload.replay.replay import Replay
from kvoffload.replay.report import ReplayReport, TierReport, sums_of
from kvoffload.replay.routing import route
from kvoffload.replay.trace_keys import KEY_BYTES
from kvoffload.structures.keys import Keys
from kvoffload.tiers.contract import Mask
from kvoffload.tiers.simulated import SimulatedTier
from kvoffload.tiers.spec import SizedTierOptions
from kvoffload.traces.trace import Trace
from kvoffload.transfer import Blocks, Rows

_SUMMED = (
    "requests", "block_refs", "prefix_hit_blocks", "device_hit_blocks", "offload_hit_blocks", "tokens",
    "tokens_saved", "blocks_written", "blocks_evicted", "blocks_refused", "blocks_dropped",
    "blocks_promoted", "bytes_stored", "bytes_loaded", "blocks_verified", "mismatches_caught",
    "mismatches_served", "damage_injected", "control_plane_s", "data_plane_s",
)  # fmt: skip
_SUMMED_OF_TIERS = ("hit_blocks", "blocks_written", "blocks_evicted", "bytes_written", "bytes_read",
                    "mismatches_caught")  # fmt: skip
_SUMMED_OF_TENANTS = ("block_refs", "prefix_hit_blocks", "blocks_held", "blocks_evicted")


class SharedTier(SimulatedTier):
    """Simulated tier that several managers share. The managers call the tier one at a time.

    Attributes:
        user: number of the manager that calls the tier; the replay sets it before each request.
        read_of_others: for each manager, how many blocks it read that another manager had written.
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
        job, accepted = super().submit_write(keys, pool, rows, request)
        self._writers.update(dict.fromkeys(keys.take(accepted), self.user))
        return job, accepted

    def submit_read(self, keys: Keys, pool: Blocks, rows: Rows) -> int:
        resident = keys.take(self._manager.contains(keys))
        self.read_of_others[self.user] += sum(self._writers[key] != self.user for key in resident)
        return super().submit_read(keys, pool, rows)


class SharedReplay:
    """A single run of a trace through several instances. Use once: construct, then `run`.

    A manager finishes requests that have ended only when its next request arrives, not when a request of
    another manager does.

    Args:
        data: for each manager, a data plane that moves bytes. An empty list replays without bytes; this is
            required if there are tiers behind RAM.
        observe: creates the observer of one manager; None: no observers. It is called with the trace of the
            manager's requests, and with the positions of these requests in the whole trace.

    Attributes:
        hits_per_request: as in `Replay`.
    """

    def __init__(
        self,
        trace: Trace,
        config: ReplayConfig,
        data: Sequence[DataPlane] = (),
        *,
        observe: Callable[[Trace, npt.NDArray[np.int64]], Observer] | None = None,
    ) -> None:
        self._trace, self._config = trace, config
        engine_of = route(trace, config.instances, config.routing)
        # Each manager serves one engine or, with shared RAM, the engines of a machine.
        num_managers = config.machines if config.shared_ram else config.instances
        engines = config.instances // num_managers
        self._manager_of = engine_of // engines
        self._of_manager = replace(config, instances=engines, machines=1, shared_ram=engines > 1)
        self._shared: SharedTier | None = None
        if config.shares_last_tier:
            last = config.tiers[-1]
            assert isinstance(last, SizedTierOptions), "without bytes all tiers are simulated"
            if (limit := getattr(last, "max_write_blocks_per_day", None)) is not None:
                why = "a tier that instances share has no write budget; leave the limit out"
                raise ConfigError("max_write_blocks_per_day", limit, why)
            self._shared = SharedTier(last, num_managers)
        self._replays, self._refs = list[Replay](), list[int]()
        planes: Sequence[DataPlane | None] = data or [None] * num_managers
        for manager, plane in zip(range(num_managers), planes, strict=True):
            requests = np.flatnonzero(self._manager_of == manager)
            own = trace.of_requests(requests)
            of_own = engine_of[requests] % engines if engines > 1 else None
            observer = None if observe is None else observe(own, requests)
            self._replays.append(
                Replay(
                    own,
                    self._of_manager,
                    plane,
                    shared=self._shared,
                    engine_of=of_own,
                    observer=observer,
                    recorded_s=trace.duration_s,
                )
            )
            self._refs.append(own.block_refs)
        self.hits_per_request = np.zeros(trace.requests, np.int32)

    def run(self, progress: Callable[[int], None] = lambda requests: None) -> ReplayReport:
        """Replay every request. Calls `progress` about 200 times, with the number of requests served."""
        step = max(1, self._trace.requests // 200)
        served = [0] * len(self._replays)
        for request, manager in enumerate(self._manager_of.tolist()):
            self._switch_to(manager)
            self._replays[manager].serve(served[manager])
            served[manager] += 1
            if (request + 1) % step == 0:
                progress(request + 1)
        reports = []
        for manager, replay in enumerate(self._replays):
            self._switch_to(manager)
            reports.append(replay.finish())
            self.hits_per_request[self._manager_of == manager] = replay.hits_per_request
        progress(self._trace.requests)
        return self._combined(reports)

    @property
    def hits_of_instances(self) -> list[npt.NDArray[np.int32]]:
        """Prefix hits of the requests: an array for each instance that has block references."""
        pairs = zip(self._replays, self._refs, strict=True)
        return [
            hits for own, refs in pairs if refs for hits in own.hits_of_instances or [own.hits_per_request]
        ]

    def _switch_to(self, manager: int) -> None:
        if self._shared is not None:
            self._shared.user = manager

    def _combined(self, reports: Sequence[ReplayReport]) -> ReplayReport:
        trace, config, refs = self._trace, self._config, max(1, self._trace.block_refs)
        sums = sums_of(reports, *_SUMMED)
        best = infinite(trace).prefix_hit_blocks
        of_others = 0 if self._shared is None else sum(self._shared.read_of_others)
        if config.shared_ram:
            of_others = sum(report.hit_blocks_of_others for report in reports)
        if config.shared_ram and self._shared is None:
            best = sum(round(report.optimum_hit_ratio * report.block_refs) for report in reports)
        elif config.device_blocks == 0:
            # A single cache with the capacity of all instances is an upper bound.
            shared = config.tiers[-1].num_blocks if self._shared is not None else 0
            capacity = len(reports) * (self._of_manager.offload_blocks - shared) + shared
            best = optimum(trace, capacity, 0, config.store).prefix_hit_blocks
        digests = "".join(report.decisions_sha256 for report in reports)
        return msgspec.structs.replace(
            reports[0],
            **sums,
            unique_blocks=trace.unique_blocks,
            share_outside_blocks=trace.share_outside_blocks,
            prefix_hit_ratio=sums["prefix_hit_blocks"] / refs,
            block_hit_ratio=sum(report.block_hit_ratio * report.block_refs for report in reports) / refs,
            infinite_hit_ratio=infinite(trace).prefix_hit_blocks / refs,
            optimum_hit_ratio=best / refs,
            writes_per_ref=sums["blocks_written"] / refs,
            decisions_sha256=hashlib.sha256(digests.encode()).hexdigest(),
            policy_state={},
            instances=config.instances,
            routing=config.routing,
            shared_ram=config.shared_ram,
            hit_blocks_of_others=of_others,
            tenants=[
                msgspec.structs.replace(rows[0], **sums_of(rows, *_SUMMED_OF_TENANTS))
                for rows in zip(*(report.tenants for report in reports), strict=True)
            ],
            tiers=[
                self._combined_tier(level, [report.tiers[level] for report in reports])
                for level in range(len(reports[0].tiers))
            ],
        )

    def _combined_tier(self, level: int, reports: Sequence[TierReport]) -> TierReport:
        """Sum the counters of a tier over the reports of all managers. The tier's `level` is 0 for RAM.

        If the tier is shared, only the hits are summed, because its other counters already cover all
        managers.
        """
        is_shared = level and level == len(self._config.tiers) and self._shared is not None
        names = ("hit_blocks",) if is_shared else _SUMMED_OF_TIERS
        return msgspec.structs.replace(reports[-1], **sums_of(reports, *names))


def replay_of(trace: Trace, config: ReplayConfig) -> Replay | SharedReplay:
    """Create a replay without bytes: a `Replay` if the configuration allows it, else a `SharedReplay`."""
    return Replay(trace, config) if has_one_manager(config) else SharedReplay(trace, config)


def has_one_manager(config: ReplayConfig) -> bool:
    """Return True if a `Replay` can replay this configuration, False if only a `SharedReplay` can."""
    return config.instances == 1 or (config.shared_ram and config.machines == 1)
