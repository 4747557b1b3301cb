"""A twin of replays with shared RAM: serves the requests of several engines with their managers."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvoffload.core.plans import LookupResult
from kvoffload.core.request import RequestContext
from kvoffload.node.node_manager import NodeManager
from kvoffload.node.pool_directory import SHARED_MEMORY, PoolDirectory
from kvoffload.replay.config import ReplayConfig, slots_needed
from kvoffload.replay.data import DataPlane
from kvoffload.replay.replay import Replay
from kvoffload.replay.report import ReplayReport
from kvoffload.replay.trace_keys import FINGERPRINT, KEY_BYTES, TraceKeys
from kvoffload.structures.keys import Keys
from kvoffload.tiering.tiered_manager import AnyManager, TieredManager
from kvoffload.tiers.contract import SecondaryTier
from kvoffload.tiers.simulated import NoMemory
from kvoffload.tiers.spec import TierOptions, TierOwner, open_tiers
from kvoffload.traces.trace import Trace

_LONG_S = 60.0


class ByHand(NamedTuple):
    """Results of the twin. `places`: loaded blocks from RAM, then from each tier."""

    hits: list[int]
    of_others: int
    stored: int
    evicted: int
    places: list[int]


def by_hand(
    trace: Trace,
    config: ReplayConfig,
    managers: Sequence[AnyManager],
    *,
    num_own_tiers: int = 0,
    plane: DataPlane | None = None,
) -> ByHand:
    """Serve each request with the manager, the device (a list) and the queue of its engine."""
    keys, num_engines = TraceKeys(trace), config.instances
    devices: list[list[int]] = [[] for _ in range(num_engines)]
    begun: dict[int, RequestContext] = {}
    writer: dict[int, int] = {}
    hits, of_others, stored, evicted = [], 0, 0, 0
    tiered = [manager for manager in managers if isinstance(manager, TieredManager)]

    def codes_of(request: int) -> list[int]:
        return trace.refs[trace.offsets[request] : trace.offsets[request + 1]].tolist()

    def keys_of(codes: Sequence[int]) -> Any:
        return keys.of_blocks(np.array(codes, np.int32))

    def begin(request: int) -> RequestContext:
        manager = managers[request % num_engines]
        return manager.begin_request(str(request), keys_of(codes_of(request)))

    for request in range(trace.requests):
        _settle(*tiered)
        engine, codes = request % num_engines, codes_of(request)
        manager = managers[engine]
        ctx = begun.pop(request, None) or begin(request)
        manager.withdraw(ctx)
        for place in range(1, config.queue_requests + 1):
            later = request + place * num_engines
            if later < trace.requests and later not in begun:
                begun[later] = begin(later)
                manager.expect(begun[later])
        device = devices[engine]
        served = next((n for n, code in enumerate(codes) if code not in device), len(codes))
        loaded = codes[served:][: _num_ready(manager, keys_of(codes[served:]), ctx)]
        if loaded:
            if isinstance(manager, TieredManager):
                sources = [manager.source_of(key, ctx) for key in keys_of(loaded)]
                own = (
                    code for code, source in zip(loaded, sources, strict=True) if 0 < source <= num_own_tiers
                )
                writer.update(dict.fromkeys(own, engine))
            load = manager.prepare_load(keys_of(loaded), ctx)
            assert plane is None or plane.load(load).all()
            manager.complete_load(load)
        hits.append(served + len(loaded))
        of_others += sum(writer[code] != engine for code in loaded)
        older, fit = [code for code in device if code not in codes], codes[: config.device_blocks]
        devices[engine] = older[max(0, len(older) + len(fit) - config.device_blocks) :] + fit[::-1]
        if (plan := manager.prepare_store(keys_of(codes), ctx)) is not None:
            stored, evicted = stored + len(plan.rows), evicted + plan.num_evicted
            writer.update((codes[row], engine) for row in plan.rows.tolist())
            if plane is not None:
                plane.store(plan)
            manager.complete_store(plan)
        manager.finish_request(ctx)
        if isinstance(manager, TieredManager):
            _settle(manager, *tiered)
    places = [sum(blocks) for blocks in zip(*(member.hit_blocks for member in tiered), strict=True)]
    if tiered:
        stored += sum(member.counts.promoted for member in tiered)
        evicted = managers[0].stats().evicted
    return ByHand(hits, of_others, stored, evicted, places)


def _settle(*managers: TieredManager) -> None:
    """Let the engines step until their tiers have no job."""
    for manager in managers:
        assert manager.settle(_LONG_S)


def _num_ready(manager: AnyManager, keys: Keys, ctx: RequestContext) -> int:
    """Look up a prefix until nothing is promoted."""
    while (result := manager.lookup(keys, ctx)).stopped_by is LookupResult.RETRY:
        assert isinstance(manager, TieredManager)
        _settle(manager)
    return result.num_ready


def check(
    trace: Trace,
    config: ReplayConfig,
    managers: Sequence[AnyManager],
    *,
    num_own_tiers: int = 0,
    planes: Sequence[DataPlane | None] = (None, None),
) -> ReplayReport:
    """Compare a replay with the twin. `planes`: the bytes of the replay and of the twin."""
    run = Replay(trace, config, planes[0])
    report = run.run()
    twin = by_hand(trace, config, managers, num_own_tiers=num_own_tiers, plane=planes[1])
    assert run.hits_per_request.tolist() == twin.hits
    counts = report.hit_blocks_of_others, report.blocks_written, report.blocks_evicted
    assert counts == (twin.of_others, twin.stored, twin.evicted)
    if config.tiers:
        assert [tier.hit_blocks for tier in report.tiers] == twin.places
    return report


@contextlib.contextmanager
def members(
    trace: Trace,
    config: ReplayConfig,
    *,
    own: Sequence[TierOptions] = (),
    shared: Sequence[TierOptions] = (),
    plane: DataPlane | None = None,
) -> Iterator[list[AnyManager]]:
    """Create the managers of engines that share a pool, as processes do.

    Args:
        own: tiers that each engine opens.
        shared: a tier that all engines use.
    """
    num_slots = slots_needed(trace, config.pool_blocks)
    memory = NoMemory(num_slots) if plane is None else plane.ram
    owner = TierOwner(memory.pool.shape[1], KEY_BYTES, FINGERPRINT, counts_blocks=True)
    with contextlib.ExitStack() as stack:
        root = Path(tempfile.mkdtemp(prefix="kvoffload-test-", dir=SHARED_MEMORY))
        stack.callback(shutil.rmtree, root)
        managers: list[AnyManager] = []
        of_all = open_tiers(shared, owner)
        for number in range(config.instances):
            name = f"engine-{number}"
            directory = PoolDirectory.join({"test": 1}, name, keep_s=60.0, root=root, has_keeper=False)
            stack.callback(directory.close)
            make = partial(NodeManager, directory=directory, clock=lambda: 0.0)
            if not own and not of_all:
                managers.append(ram := make(num_slots, **config.manager_options(num_slots)))
                stack.callback(ram.close)
                continue
            alone = TierOwner(owner.block_bytes, KEY_BYTES, FINGERPRINT, replica=name, counts_blocks=True)
            tiers: list[SecondaryTier] = [*open_tiers(own, alone), *of_all]
            member = TieredManager(
                num_slots, ram=memory, tiers=tiers, deadline_s=_LONG_S, max_in_flight=1.0,
                make_ram_manager=make, **config.manager_options(num_slots),
            )  # fmt: skip
            assert isinstance(member.ram_manager, NodeManager)
            stack.callback(member.ram_manager.close)
            stack.callback(member.close)
            managers.append(member)
        yield managers
