"""Replay of a trace through the manager, policy and admission rule that engines use.

Requests are replayed one at a time, in file order:

1. The request's leading blocks that are on the device are hits. The blocks that follow are hits as far as
   they are in RAM or in a tier behind RAM.
2. The missing blocks are stored, in prefix order.
3. The request ends as soon as it is served or, if a decode speed is given, when its answer is generated
   (`replay.ends`). Then all its blocks become the most recently used blocks, the first block last.

If the trace has hints (`Hints`), the manager receives them when a request begins and when it ends.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from kvoffload._version import __version__
from kvoffload.core.manager import OffloadingManager
from kvoffload.core.plans import ON_DEVICE_EVICTION, LookupResult, StorePlan
from kvoffload.core.request import RequestContext
from kvoffload.core.tenants import OTHER, Quota
from kvoffload.errors import ConfigError, TierError
from kvoffload.replay.config import ReplayConfig, slots_needed
from kvoffload.replay.data import DataPlane
from kvoffload.replay.decisions import DecisionLog
from kvoffload.replay.device_cache import Device, run_devices
from kvoffload.replay.ends import End, EndsAtOnce, EndsWhenGenerated
from kvoffload.replay.engines import Engines
from kvoffload.replay.members import SETTLE_S, open_members
from kvoffload.replay.observer import Decision, Observer, Watch
from kvoffload.replay.optimum import infinite, optimum
from kvoffload.replay.report import HeldBlocks, ReplayReport, TenantReport, TierReport
from kvoffload.replay.routing import route
from kvoffload.replay.trace_keys import FINGERPRINT, KEY_BYTES, TraceKeys
from kvoffload.structures.keys import Keys
from kvoffload.tiering.tiered_manager import AnyManager, TieredManager
from kvoffload.tiers.contract import SecondaryTier
from kvoffload.tiers.guarded import GuardedTier
from kvoffload.tiers.simulated import NoMemory
from kvoffload.tiers.spec import TierOwner
from kvoffload.traces.trace import Trace
from kvoffload.whatif import Estimate, Shadows


def shadows_of(trace: Trace, config: ReplayConfig) -> Shadows | None:
    """Create the shadow caches for the settings to try, `config.what_if`. Returns None if there are none."""
    if not config.what_if:
        return None
    return Shadows(
        config.what_if,
        config.capacity_blocks,
        policy=config.policy,
        admission=config.admission,
        one_in=config.what_if_sample,
        most_blocks=trace.unique_blocks,
        refuses_unasked=not config.tiers,
    )


class Replay:
    """A single run of a trace through one manager. Use once: construct, then `run`.

    The RAM serves one engine or, with `ReplayConfig.shared_ram`, several engines. Several engines share only
    RAM: each has its own device, its own queue, and its own manager of the tiers behind RAM.

    Args:
        trace: the requests.
        config: caches and assumptions.
        data: the data plane, which moves bytes. None: only decisions are replayed.
        decisions: file for the decision log. None: the log is only hashed.
        shared: a tier, shared by several replays, that replaces the last tier of `config`.
        engine_of: with `ReplayConfig.shared_ram`, the number of each request's engine. None:
            `ReplayConfig.routing` assigns requests to engines.
        observer: receives every decision; None: no observer.
        recorded_s: if `trace` is a part of a recording, the length of the whole recording in seconds. None:
            the length of `trace`.

    Attributes:
        hits_per_request: for each request, the number of its prefix hits on the device and in all tiers;
            int32.
        manager: the manager of the engine that serves the current request.
        shadows: shadow caches for the settings in `ReplayConfig.what_if`; None if there are no settings.
    """

    def __init__(
        self,
        trace: Trace,
        config: ReplayConfig,
        data: DataPlane | None = None,
        decisions: BinaryIO | None = None,
        *,
        shared: SecondaryTier | None = None,
        engine_of: npt.NDArray[np.int32] | None = None,
        observer: Observer | None = None,
        recorded_s: float | None = None,
    ) -> None:
        self._trace, self._config, self._data = trace, config, data
        self._recorded_s = trace.duration_s if recorded_s is None else recorded_s
        self._log = DecisionLog(decisions)
        tokens_per_s = config.decode_tokens_per_s
        self._ends = EndsWhenGenerated(trace, tokens_per_s) if tokens_per_s else EndsAtOnce()
        self._keys = TraceKeys(trace)
        self._offsets: list[int] = trace.offsets.tolist()
        self._is_victim_tier = config.store == ON_DEVICE_EVICTION
        self._request = 0
        if self._is_victim_tier and not config.device_blocks:
            raise ConfigError(
                "store", config.store, "it needs a device cache: set device_blocks to 1 or more"
            )
        # Before the tiers are opened, because it refuses a setting with an unknown policy.
        self.shadows = shadows_of(trace, config)
        num_slots = slots_needed(trace, config.pool_blocks)
        self._members = self._open_members(num_slots, shared) if config.tiers else []
        managers: Sequence[AnyManager] = self._members
        if not managers:
            ram_manager = OffloadingManager(num_slots, **config.manager_options(num_slots))
            managers = [ram_manager] * config.engines_of_pool
        self.manager = managers[0]
        self._tiered = self._members[0] if self._members else None
        self._engine_of = engine_of
        if config.shared_ram and engine_of is None:
            self._engine_of = route(trace, config.instances, config.routing)
        self._engines = Engines(
            managers, trace, self._keys, config.queue_requests, self._engine_of, config.admission
        )
        self._device: Device | None = None
        if config.device_blocks:
            self._device = Device(trace, run_devices(trace, config.device_blocks, self._engine_of))
        # With several engines, the contents of the devices are not tracked.
        followed = self._device if self._engine_of is None else None
        self._watch: Watch | None = None
        if observer is not None:
            self._watch = Watch(observer, trace, self.manager, self._keys, followed)
        # Code of the block in each slot, for the decision log.
        self._held = np.full(num_slots, -1, np.int32)
        self.hits_per_request = np.zeros(trace.requests, np.int32)
        self._device_hits = self._tier_hits = self._block_hits = self._damaged = self._dropped = 0
        self._control_s = self._tiers_s = self._tiers_cpu_s = 0.0

    def _open_members(self, num_slots: int, shared: SecondaryTier | None) -> list[TieredManager]:
        """Open the tiers behind RAM, and create the manager of each engine that uses this RAM."""
        trace, config = self._trace, self._config
        ram = self._data.ram if self._data is not None else NoMemory(num_slots)
        owner = TierOwner(
            ram.pool.shape[1],
            KEY_BYTES,
            FINGERPRINT,
            counts_blocks=True,
            # An engine without requests has no times.
            clock=lambda: float(trace.timestamps_ms[self._request]) / 1000 if trace.requests else 0.0,
            recorded_s=self._recorded_s,
        )
        return open_members(
            config.tiers,
            ram,
            owner,
            config.engines_of_pool,
            shared,
            config.tier_tenants,
            **config.manager_options(num_slots),
        )

    def run(self, progress: Callable[[int], None] = lambda requests: None) -> ReplayReport:
        """Replay every request. Calls `progress` about 200 times, with the number of requests served."""
        step = max(1, self._trace.requests // 200)
        with contextlib.ExitStack() as stack:
            for member in self._members:
                stack.callback(member.close)
            for request in range(self._trace.requests):
                self.serve(request)
                if (request + 1) % step == 0:
                    progress(request + 1)
            progress(self._trace.requests)
            return self.finish()

    @property
    def hits_of_instances(self) -> list[npt.NDArray[np.int32]]:
        """Prefix hits of the requests: an array for each engine that has block references.

        If the replay has only one engine, the list is empty; use `hits_per_request`.
        """
        if self._engine_of is None:
            return []
        own = (self._engine_of == engine for engine in range(self._config.instances))
        lengths = np.diff(self._trace.offsets)
        return [self.hits_per_request[requests] for requests in own if lengths[requests].any()]

    def finish(self) -> ReplayReport:
        """End the requests that have not ended yet, and return the report. Call it after the last `serve`."""
        self._end(self._ends.rest())
        return self._report()

    def serve(self, request: int) -> None:
        """Replay one request. Requests must be served in order. `run` calls this method for all requests."""
        self._request = request
        self._end(self._ends.due(request))
        codes = self._trace.refs[self._offsets[request] : self._offsets[request + 1]]
        keys = self._keys.of_blocks(codes)
        start, bytes_before = time.thread_time(), self._bytes_cpu_s()
        self._switch_to(request)
        ctx = self._engines.serve(request)
        device = self._device
        on_device = device.served(request) if device is not None else 0
        if device is not None and self._is_victim_tier:
            resident = device.contains(codes) | self.manager.contains(keys, ctx)
        wanted = (codes[on_device:], keys[on_device:]) if on_device else (codes, keys)
        watch = self._watch
        if watch is not None:
            watch.observer.arrives(request, codes, watch.places)
        from_tier = self._load(request, *wanted, ctx)
        self._engines.loaded(request, wanted[0][:from_tier])
        self._log.numbers(request, "hit", on_device, from_tier)
        if watch is not None:
            watch.observer.served(request, codes, on_device + from_tier, watch.places)
        if device is not None and self._is_victim_tier:
            resident[: on_device + from_tier] = True  # promoted blocks, too
            self._block_hits += int(np.count_nonzero(resident))
            dropped = device.serve(request)
            if len(dropped):
                self._store(request, dropped, self._keys.of_blocks(dropped), None)
        else:
            self._store(request, codes, keys, ctx)
            if watch is not None and device is not None and self._engine_of is None:
                device.serve(request)  # so that the observer sees which blocks are on the device
        if self._ends.are_late:
            # As in engines, blocks of a running request are recent before the request ends.
            self.manager.touch(keys, ctx)
        self._device_hits += on_device
        self._tier_hits += from_tier
        self.hits_per_request[request] = on_device + from_tier
        self._control_s += time.thread_time() - start - (self._bytes_cpu_s() - bytes_before)
        self._end(self._ends.served(request, ctx))

    def _switch_to(self, request: int) -> None:
        """Make the engine that serves this request the current one, so that later calls use its manager."""
        engine = self._engines.number_of(request)
        self.manager = self._engines.switch_to(engine)
        if self._members:
            self._tiered = self._members[engine]
            if self._watch is not None:
                self._watch.places.switch_to(self._tiered)

    def _end(self, ends: Iterable[End]) -> None:
        start, bytes_before = time.thread_time(), self._bytes_cpu_s()
        for request, ctx in ends:
            self._switch_to(request)
            self.manager.finish_request(ctx, hints=self._trace.hints_of(request).at_end)
            if self.shadows is not None:
                self.shadows.finished(ctx)
            if self._watch is not None:
                self._watch.offered(self._trace.refs[self._offsets[request] : self._offsets[request + 1]])
            if self._ends.are_late and self._is_victim_tier and self._device is not None:
                # The manager assumes that the device still holds the request's blocks. An engine keeps them
                # until the request ends; the device of the replay may have dropped some of them.
                codes = self._trace.refs[self._offsets[request] : self._offsets[request + 1]]
                self.manager.keep(self._keys.of_blocks(codes[~self._device.contains(codes)]))
            if len(self._members) > 1 and self._tiered is not None:
                self._settle(self._tiered)  # a tier that engines share has jobs of one engine at a time
        for engine, member in enumerate(self._members):
            self._engines.switch_to(engine)
            self._settle(member)
        if self._watch is not None:
            self._watch.settled()
        self._control_s += time.thread_time() - start - (self._bytes_cpu_s() - bytes_before)
        if self.shadows is not None and self.shadows.is_due:
            self.shadows.work()

    def _load(self, request: int, codes: npt.NDArray[np.int32], keys: Keys, ctx: RequestContext) -> int:
        """Load the leading blocks of a request that are in RAM or can be promoted to RAM.

        Returns the number of loaded blocks or, if some were damaged, of blocks before the first damaged one.
        """
        if self._tiered is not None:
            hits = self._promote(self._tiered, request, keys, ctx)
            self._note_own(self._tiered, request, codes[:hits], keys[:hits], ctx)
        else:
            hits = self.manager.lookup(keys, ctx).num_ready
        if hits == 0 and not self._is_victim_tier:
            return 0
        if self._data is None or hits == 0:
            # Without bytes a load only updates the manager. A victim tier also reports a load of 0 blocks.
            self.manager.complete_load(self.manager.prepare_load(keys[:hits], ctx))
            return hits
        plan = self.manager.prepare_load(keys[:hits], ctx)
        sound = self._data.load(plan)
        damaged = np.flatnonzero(~sound)
        self.manager.complete_load(plan, damaged.tolist())
        if len(damaged) == 0:
            return hits
        self._damaged += len(damaged)
        self._log.blocks(request, "damaged", self._ids(codes[damaged]))
        if self._watch is not None:
            self._watch.decided(request, Decision.DAMAGED, codes[damaged])
        return int(damaged[0])

    def _promote(self, manager: TieredManager, request: int, keys: Keys, ctx: RequestContext) -> int:
        """Promote a request's leading blocks from the tiers behind RAM, and wait for the promotions.

        Returns the number of leading blocks that are in RAM afterwards.
        """
        events = manager.take_events()
        if self._watch is not None:
            self._watch.events(request, events)
        lookup = manager.lookup(keys, ctx)
        while lookup.stopped_by is LookupResult.RETRY:
            self._settle(manager)
            lookup = manager.lookup(keys, ctx)
        events = manager.take_events()
        for event in events:
            kind = "evict" if event.removed else "promote"
            self._log.blocks(request, kind, self._keys.ids(event.keys))
        if self._watch is not None:
            self._watch.events(request, events)
        return lookup.num_ready

    def _note_own(
        self,
        manager: TieredManager,
        request: int,
        codes: npt.NDArray[np.int32],
        keys: Keys,
        ctx: RequestContext,
    ) -> None:
        """Record that the engine owns the blocks that it promoted from its own tiers.

        Otherwise `Engines` might count hits of these blocks as hits of blocks that another engine stored.
        """
        if len(self._members) == 1 or not manager.has_promoted(ctx):
            return
        num_own = len(manager.lanes) - self._config.shares_last_tier
        own = [number > 0 and not manager.is_shared(number) for number in range(1 + num_own)]
        own += [False] * self._config.shares_last_tier
        sources = [manager.source_of(key, ctx) for key in keys]
        self._engines.stored(request, codes[np.array(own)[sources]])

    def _settle(self, manager: TieredManager) -> None:
        start, start_cpu = time.perf_counter(), time.thread_time()
        if not manager.settle(SETTLE_S):
            raise TierError(f"a tier has not answered for {SETTLE_S:.0f} s; is it overloaded or unreachable?")
        self._tiers_s += time.perf_counter() - start
        self._tiers_cpu_s += time.thread_time() - start_cpu

    def _store(
        self, request: int, codes: npt.NDArray[np.int32], keys: Keys, ctx: RequestContext | None
    ) -> None:
        """Offer blocks to RAM: the blocks of a request or, if `ctx` is None, blocks that the device drops."""
        if self._watch is not None and self._tiered is not None:
            self._watch.events(request, self._tiered.take_events())
        plan = self.manager.prepare_store(keys, ctx)
        if plan is None:
            dropped = self.manager.stats().dropped
            if self._watch is not None:
                self._watch.not_stored(request, codes, dropped - self._dropped)
            if not self._is_victim_tier:
                self._block_hits += len(codes) - (dropped - self._dropped)
            self._log.numbers(request, "full", dropped - self._dropped)
            self._dropped = dropped
            return
        slots, stored = plan.slots, codes[plan.rows]
        num_absent = len(plan.missing_rows) - len(stored)
        if num_absent:
            self._dropped += plan.num_dropped
        self._log_store(request, codes, stored, slots, plan)
        if self._watch is not None:
            self._watch.stored(request, codes[plan.missing_rows], plan)
            self._watch.offered(stored)
        self._held[slots] = stored
        self._engines.stored(request, stored)
        if not self._is_victim_tier:
            self._block_hits += len(codes) - len(stored) - num_absent
        if self._data is not None and len(stored):
            self._data.store(plan)
        self.manager.complete_store(plan)
        if self._watch is not None and self._tiered is not None:
            self._tiered.take_events()  # dropped, because the observer has the same evictions from the plan

    def _log_store(
        self,
        request: int,
        codes: npt.NDArray[np.int32],
        stored: npt.NDArray[np.int32],
        slots: npt.NDArray[np.int32],
        plan: StorePlan,
    ) -> None:
        missing = codes[plan.missing_rows]
        admitted = len(missing) - plan.num_refused
        if admitted:
            self._log.numbers(request, "admit", admitted)
        if len(missing) > len(stored):
            self._log.blocks(request, "refuse", self._ids(missing[admitted:]))
            self._log.blocks(request, "drop", self._ids(missing[len(stored) : admitted]))
        num_evicted = plan.num_evicted
        if num_evicted:
            evicted = (
                self._keys.ids(plan.evicted)
                if self._tiered is not None
                else self._ids(self._held[slots[-num_evicted:]])
            )
            self._log.blocks(request, "evict", evicted)
        self._log.blocks(request, "store", self._ids(stored))

    def _ids(self, codes: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
        return self._trace.block_ids.take(codes)

    def _bytes_cpu_s(self) -> float:
        """Return the CPU seconds that this thread has spent on moving bytes and on waiting for tiers."""
        return self._tiers_cpu_s + (self._data.cpu_s if self._data is not None else 0.0)

    def _report(self) -> ReplayReport:
        trace, config, data, stats = self._trace, self._config, self._data, self.manager.stats()
        refs = max(1, trace.block_refs)
        hits = self._device_hits + self._tier_hits
        best = optimum(trace, config.offload_blocks, config.device_blocks, config.store, self._engine_of)
        return ReplayReport(
            trace=trace.name,
            policy=self.manager.policy.name,
            **config.columns(),
            requests=trace.requests,
            block_refs=trace.block_refs,
            unique_blocks=trace.unique_blocks,
            skipped_lines=trace.skipped_lines,
            prefix_hit_blocks=hits,
            prefix_hit_ratio=hits / refs,
            device_hit_blocks=self._device_hits,
            offload_hit_blocks=self._tier_hits,
            block_hit_ratio=self._block_hits / refs,
            infinite_hit_ratio=infinite(trace).prefix_hit_blocks / refs,
            optimum_hit_ratio=best.prefix_hit_blocks / refs,
            tokens=trace.block_refs * trace.block_tokens,
            tokens_saved=hits * trace.block_tokens,
            share_outside_blocks=trace.share_outside_blocks,
            assumed=trace.assumed,
            blocks_promoted=sum(member.counts.promoted for member in self._members),
            blocks_written=stats.stored,
            blocks_evicted=stats.evicted,
            blocks_refused=stats.refused,
            blocks_dropped=stats.dropped,
            writes_per_ref=stats.stored / refs,
            block_bytes=data.block_bytes if data else 0,
            bytes_stored=data.bytes_stored if data else 0,
            bytes_loaded=data.bytes_loaded if data else 0,
            blocks_verified=data.blocks_verified if data else 0,
            mismatches_caught=self._damaged,
            mismatches_served=data.mismatches_served if data else 0,
            damage_injected=data.damage_injected if data else 0,
            control_plane_s=self._control_s,
            data_plane_s=self._tiers_s + (data.cpu_s if data else 0.0),
            decisions_sha256=self._log.hexdigest(),
            version=__version__,
            policy_state=stats.policy,
            tiers=self._tier_reports(),
            instances=config.instances,
            routing=config.routing if config.instances > 1 else "",
            hit_blocks_of_others=self._engines.hit_blocks_of_others,
            what_if_sample=0 if self.shadows is None else self.shadows.one_in,
            what_if=self._estimates(),
            tenants=self._tenant_reports(),
        )

    def _tenant_reports(self) -> list[TenantReport]:
        """Create a report for each tenant with a quota, and a last report for all other requests together."""
        quotas, trace = self._config.tenants, self._trace
        if not quotas:
            return []
        names = [*(name for name in quotas if name != OTHER), OTHER]
        lengths, tenant_of = np.diff(trace.offsets), np.full(trace.requests, names.index(OTHER))
        if trace.hints is not None:
            numbers = [names.index(hints.tenant if hints.tenant in quotas else OTHER)
                       for hints in trace.hints.different]  # fmt: skip
            tenant_of = np.array(numbers)[trace.hints.numbers]
        refs = np.bincount(tenant_of, lengths, len(names)).tolist()
        hits = np.bincount(tenant_of, self.hits_per_request, len(names)).tolist()
        stats = self.manager.stats().tenants
        return [
            TenantReport(
                tenant=name,
                min_blocks=quotas.get(name, Quota()).min_blocks,
                max_blocks=quotas.get(name, Quota()).max_blocks,
                block_refs=int(refs[number]),
                prefix_hit_blocks=int(hits[number]),
                blocks_held=stats[name].held,
                blocks_evicted=stats[name].evicted,
            )
            for number, name in enumerate(names)
        ]

    def _estimates(self) -> list[Estimate]:
        """Let the shadow caches process pending requests, then estimate the hit ratio of each setting."""
        if self.shadows is None:
            return []
        self.shadows.work()
        return self.shadows.estimates()

    def _tier_reports(self) -> list[TierReport]:
        """Create a report for RAM and one for each tier behind it.

        A tier's counters are summed over all engines that use this RAM.
        """
        stats, data, members = self.manager.stats(), self._data, self._members
        hits = [self._tier_hits]
        if members:
            hits = np.sum([member.hit_blocks for member in members], axis=0).tolist()
        ram = TierReport(
            name="ram",
            hit_blocks=hits[0],
            blocks_written=stats.stored,
            blocks_evicted=stats.evicted,
            bytes_written=stats.stored * data.block_bytes if data else 0,
            bytes_read=data.bytes_loaded if data else 0,
            mismatches_caught=self._damaged,
        )
        reports = [ram]
        for level, lane in enumerate(members[0].lanes if members else []):
            tiers = [member.lanes[level].tier for member in members]
            if self._config.shares_last_tier and level == len(self._config.tiers) - 1:
                tiers = [lane.tier]
            reports.append(_tier_report(lane.tier.name, hits[1 + level], tiers))
        return reports


def _tier_report(name: str, hit_blocks: int, tiers: Sequence[SecondaryTier | GuardedTier]) -> TierReport:
    """Create the report of a tier that each engine opened on its own: sum the counters over `tiers`."""
    stats, held = [tier.stats() for tier in tiers], tiers[0].tenants()

    def total(counter: str) -> Any:
        return sum(getattr(of_one, counter) for of_one in stats)

    return TierReport(
        name=name,
        hit_blocks=hit_blocks,
        blocks_written=total("written"),
        blocks_evicted=total("evicted"),
        bytes_written=total("bytes_written"),
        bytes_read=total("bytes_read"),
        mismatches_caught=total("mismatches"),
        requests=total("puts") + total("gets"),
        cost=total("cost"),
        unanswered_blocks=total("timeouts"),
        outages=total("outages"),
        outage_s=total("outage_s"),
        tenants=[HeldBlocks(tenant, row.min, row.max, row.held, row.evicted) for tenant, row in held.items()],
    )
