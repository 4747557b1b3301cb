"""kvoffload's manager behind vLLM's interface for managers.

Translates lookups of single blocks to lookups of batches, finished keys to plans, and the order of KV groups
to the order of the prefix. Decides nothing itself. Internal errors never reach the engine.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from vllm.v1.kv_offload.base import LookupResult as VLLMResult
from vllm.v1.kv_offload.base import OffloadingManager, PrepareStoreOutput, RequestOffloadingContext

from kvoffload.calls.recorded import RecordedManager
from kvoffload.core import manager as core
from kvoffload.core.hints import NO_HINTS, Hints
from kvoffload.core.miss_reasons import AUDIT, BEHIND_A_GAP, BUSY, KEPT_OUT, PAUSED
from kvoffload.core.plans import LoadPlan, StorePlan
from kvoffload.errors import ConfigError, GoneError
from kvoffload.integrations.containment import Method, T, contained
from kvoffload.integrations.vllm.scheduler_side.audits import Audited, Audits
from kvoffload.integrations.vllm.scheduler_side.events import Events
from kvoffload.integrations.vllm.scheduler_side.hints import envelope_hints, user_hints
from kvoffload.integrations.vllm.scheduler_side.inflight import InFlight
from kvoffload.integrations.vllm.scheduler_side.live_settings import LiveSettings
from kvoffload.integrations.vllm.scheduler_side.lookups import (
    BEFORE_ANY_STEP,
    Lookups,
    Request,
    path_of,
    positions_of,
)
from kvoffload.integrations.vllm.scheduler_side.metrics import (
    Metrics,
    value_of_reach,
    values_of_audits,
    values_of_what_if,
)
from kvoffload.integrations.vllm.scheduler_side.misses import LookupRecord, Misses, Reach
from kvoffload.integrations.vllm.scheduler_side.recording import call_recorder
from kvoffload.integrations.vllm.scheduler_side.sessions import Sessions
from kvoffload.integrations.vllm.scheduler_side.verification import Verifier
from kvoffload.integrations.vllm.shared.logs import logger
from kvoffload.integrations.vllm.shared.options import ALWAYS, DROP, STOP, VLLMOptions
from kvoffload.integrations.vllm.shared.pool import SharedPool
from kvoffload.integrations.vllm.shared.tiers import (
    DISK,
    EXTERNAL,
    HOST,
    USUAL_KEY_BYTES,
    EngineTiers,
    PoolMemory,
    is_named,
    leave_out_tiers,
)
from kvoffload.integrations.vllm.worker_side.slots_spec import SlotsSpec, slots_per_group
from kvoffload.metrics.counts import Value
from kvoffload.node.node_manager import NodeManager
from kvoffload.node.pool_directory import PoolDirectory
from kvoffload.tiering.tiered_manager import AnyManager, TieredManager
from kvoffload.tiers.rate_limited_log import RateLimitedLog
from kvoffload.whatif import Shadows
from kvoffload.whatif.live_shadows import LiveShadows, usual_one_in

_NOTHING = PrepareStoreOutput(keys_to_store=[], store_spec=SlotsSpec(np.empty(0, np.int32)), evicted_keys=[])
"""Answer to an offer of blocks: vLLM stores none of them, and does not offer them again."""
_NO_ROWS = np.empty(0, np.int64)
CONFUSED_SESSION = (
    "kvoffload: request %s has streaming input, and vLLM's own connector confuses its blocks: its further "
    "blocks are not stored; use KVOffloadConnector (docs/upstream.md)"
)


@dataclass(eq=False)
class Arrival:
    """Facts about a request, kept from its arrival to its end.

    Every request has an `Arrival`, even without a lookup.

    Attributes:
        has_adapter: True if the request uses a LoRA adapter and therefore must not load from tiers.
        is_outdated: True if the request must store nothing more, because the cache was reset during the
            request, or because vLLM's connector confuses the request's blocks (`Sessions`).
        ran_unasked: True if the request has begun without a lookup, for example because the GPU's cache has
            the prompt.
    """

    hints: Hints = NO_HINTS
    has_adapter: bool = False
    is_outdated: bool = False
    ran_unasked: bool = False


_UNKNOWN = Arrival()


def _forget_lookups_ahead(manager: KVOffloadManager) -> None:
    manager._lookups.ahead = []


def _contained(answer: Any) -> Callable[[Method[T]], Method[T]]:
    """Return a decorator for methods that may change the manager.

    The decorated method contains errors, so that it returns `answer` instead of raising one, and clears
    `Lookups.ahead`.
    """
    return contained(answer, before=_forget_lookups_ahead)


def _shares_blocks(manager: KVOffloadManager) -> bool:
    return manager._node_pool is not None


_ends = contained(None, before=_forget_lookups_ahead, when_broken=_shares_blocks)
"""Decorator for methods that end a request, a transfer or a step. Like `_contained`, with one difference:
if several engines share the pool, the method runs even after an internal error, because it releases blocks
and slots that other engines need."""


class KVOffloadManager(OffloadingManager):
    """Adapter that serves the calls of vLLM's connector with a manager of kvoffload (`core`).

    - The path of a request has all keys that vLLM has recorded before the first lookup. So a hit refreshes
      the whole prefix, including the blocks that the GPU's own cache served.
    - The keys of all KV groups form one path, in the order of their tokens. So a partial store has the
      leading blocks of every group.

    Args:
        tokens_per_block: tokens in a block, for events.
        blocks_per_chunk: number of engine blocks in a slot.
        tiers: the tiers behind RAM; None: no tiers.
        node_pool: the pool that this engine shares with other engines; None: the engine has its own pool.
        sessions: finds the requests whose blocks vLLM's connector confuses; None if it confuses no blocks.
        steps_in_flight: largest number of steps that vLLM has scheduled and whose end it has not yet seen. A
            larger number is safe: after a reset, the slots of dropped transfers are free a little later.

    Attributes:
        core: the manager that decides.
        broken: True after an internal error, or after a difference in an audit with ``on_difference``
            ``stop``. Nothing is offloaded until the next reset.
        audits: the audits of stored blocks; None if no audit is configured.
        options: the options of the engine.
        pool: the memory of RAM's slots.
        what_if: estimates the hits with other settings; None without the option ``what_if``.

    Thread: the scheduler's.
    """

    def __init__(
        self,
        options: VLLMOptions,
        pool: SharedPool,
        *,
        enable_events: bool = False,
        tokens_per_block: int = 0,
        blocks_per_chunk: int = 1,
        tiers: EngineTiers | None = None,
        node_pool: PoolDirectory | None = None,
        sessions: Sessions | None = None,
        steps_in_flight: int = 16,
    ) -> None:
        self.broken = False
        self._sessions = sessions
        self.metrics = Metrics()
        self._log, self._events = RateLimitedLog(logger.name), Events()
        self.options, self.pool, self._sealing = options, pool, options.verification == ALWAYS
        self._node_pool = node_pool
        self._enable_events, self._tokens_per_block = enable_events, tokens_per_block
        self._blocks_per_chunk = blocks_per_chunk
        self._tiers = tiers
        self._arrivals: dict[str, Arrival] = {}
        self._requests: dict[str, Request] = {}
        self._looked_up_early: list[Request] = []
        self._step = 0
        self._loads: InFlight[LoadPlan] = InFlight()
        self._stores: InFlight[StorePlan] = InFlight()
        self._dropped: list[LoadPlan | StorePlan] = []
        self._dropped_step, self._steps_in_flight = 0, steps_in_flight
        may_be_busy = node_pool is not None or self._sealing
        self._misses, self._reach = Misses(BUSY if may_be_busy else BEHIND_A_GAP), Reach(time.monotonic())
        self._verifier: Verifier | None = None
        self.audits: Audits | None = None
        self._tiered: TieredManager | None = None
        self._call_recorder = call_recorder(options)
        self._live: LiveSettings | None = None
        if options.live_settings is not None:
            self._live = LiveSettings(options.live_settings, options)
        self.what_if: LiveShadows | None = None
        self._build(USUAL_KEY_BYTES)

    def _build(self, key_bytes: int) -> None:
        """Create the manager, the tiers and the verifier for keys of this length.

        Closes the previous tiers and verifier.
        """
        options, pool = self.options, self.pool
        given: dict[str, Any] = {
            "key_bytes": key_bytes,
            "policy": options.policy,
            "admission": options.admission,
            "store": options.store,
            "enable_events": self._enable_events,
            "block_size": self._tokens_per_block,
            "explain_misses": True,
        }
        if options.tenants is not None:
            given["tenants"] = options.tenants.in_blocks(options.ram_bytes, pool.num_slots)
        make_ram_manager: Callable[..., core.OffloadingManager] = core.OffloadingManager
        if self._node_pool is not None:
            if key_bytes != USUAL_KEY_BYTES:
                raise ConfigError("ram", "shared", f"keys have {key_bytes} bytes; needed: {USUAL_KEY_BYTES}")
            share = options.ram.share_blocks(pool.num_slots)
            make_ram_manager = partial(NodeManager, directory=self._node_pool, share_blocks=share)
        if self._call_recorder is not None:
            make_ram_manager = partial(RecordedManager, recorder=self._call_recorder)
        if self._tiered is not None:
            self._tiered.close()
            self._tiered = None
        if self._tiers is not None and (opened := self._tiers.open(pool.slot_stride, key_bytes)):
            self._tiered = TieredManager(
                pool.num_slots,
                ram=PoolMemory(pool, self._sealing),
                tiers=opened,
                deadline_s=options.tier_deadline_s,
                recompute_s_per_block=self._recompute_s_per_block(),
                make_ram_manager=make_ram_manager,
                **given,
            )
        self.core: AnyManager = self._tiered or make_ram_manager(pool.num_slots, **given)
        if options.tenants is not None:
            options.tenants.set_tiers(self.core, options.tiers)
        self._misses.attach(self.core)
        if self._live is not None:
            self._live.apply_to(self.core)
        if self.what_if is not None:
            self.what_if.close()
        if options.what_if:
            self.what_if = LiveShadows(self._shadows(options.policy), time.monotonic(), logger)
        if self._sealing:
            if self._verifier is not None:
                self._verifier.close()
            self._verifier = Verifier(self.core, self.pool, self._on_damage)
        if options.audit is not None:
            self.audits = Audits(options.audit, self.core, pool)
        self._lookups = Lookups(
            self.core, self._verifier, None if self._node_pool is None else options.tier_deadline_s
        )

    def _shadows(self, policy: str) -> Shadows:
        """Create caches that simulate the settings of the option ``what_if``. `policy`: the policy of RAM."""
        options = self.options
        return Shadows(
            options.what_if,
            self.core.usable_blocks,
            policy=policy,
            admission=options.admission,
            one_in=options.what_if_sample or usual_one_in(self._tokens_per_block),
            refuses_unasked=self._tiered is None or self._tiered.ram_manager.refuses_unasked,
        )

    def _recompute_s_per_block(self) -> float | None:
        tokens_per_s = self.options.recompute_tokens_per_s
        return self._tokens_per_block / tokens_per_s if tokens_per_s else None

    # ---- requests

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        """Record that a request has arrived, with the user's hints. Its keys are not known yet."""
        self._arrival(req_context.req_id)
        self._add_user_hints(req_context)
        return RequestOffloadingContext()

    @_contained(None)
    def _add_user_hints(self, req_context: Any) -> None:
        try:
            hints = user_hints(getattr(req_context, "kv_transfer_params", None))
        except ValueError as error:
            self._log.warn("hints", "kvoffload: %s; ignored", error)
        else:
            self.add_hints(req_context.req_id, hints)
        if (envelope := getattr(req_context, "kv_hints", None)) is not None:
            hints, actions = envelope_hints(envelope)
            self.metrics.kv_hints.update(actions)
            self.add_hints(req_context.req_id, hints)

    def add_hints(self, request_id: str, hints: Hints) -> None:
        """Add hints to a request. Call this before the request's first lookup, or when it finishes."""
        if hints is not NO_HINTS:
            arrival = self._arrival(request_id)
            arrival.hints = arrival.hints.updated(hints)

    def note_adapter(self, request_id: str) -> None:
        """Record that a request uses a LoRA adapter. Call this before the first lookup of the request.

        A key contains the adapter's name and path, but not its contents, so that a block of an older version
        of the adapter could be found. Therefore the request does not load from tiers, unless the user has
        named the weights for every tier. If engines share the pool, the request neither loads nor stores.
        """
        if self._node_pool is not None or not all(is_named(tier) for tier in self.options.tiers):
            self._arrival(request_id).has_adapter = True

    def _is_kept_out(self, req_context: Any) -> bool:
        """Return True if a request must not use the cache: it has an adapter, and engines share the pool."""
        return self._node_pool is not None and self._arrivals.get(req_context.req_id, _UNKNOWN).has_adapter

    def _arrival(self, request_id: str) -> Arrival:
        arrival = self._arrivals.get(request_id)
        if arrival is None:
            arrival = self._arrivals[request_id] = Arrival()
        return arrival

    def on_request_finished(self, req_context: Any) -> None:
        """Count the uses of a finished request's blocks. Transfers of the request may still be in flight."""
        self._misses.forget(req_context.req_id)
        if self._sessions is not None:
            self._sessions.forget(req_context.req_id)
        self._finish(req_context, self._arrivals.pop(req_context.req_id, _UNKNOWN).hints)

    @_ends
    def _finish(self, req_context: Any, hints: Hints) -> None:
        request = self._requests.pop(req_context.req_id, None)
        if request is not None:
            self._release(request)
            self.core.finish_request(request.ctx, hints=hints)
            if self.what_if is not None:
                self.what_if.finished(request.ctx, request.num_skipped, request.asked_end)

    @_contained(None)
    def expect(self, req_context: Any) -> None:
        """Protect the blocks of a request that waits in vLLM's queue: evict other blocks first."""
        if path_of(req_context):
            self.core.expect(self._request(req_context).ctx)

    @_contained(None)
    def withdraw(self, request_id: str) -> None:
        """End the protection that `expect` began, because the request no longer waits."""
        self._misses.begins(request_id)
        if (request := self._requests.get(request_id)) is not None:
            self.core.withdraw(request.ctx)

    @_contained(None)
    def touch(self, keys: Collection[bytes], req_context: Any) -> None:
        """Count a use of these blocks by the request now, instead of when the request finishes."""
        if keys:
            self.core.touch(list(keys), self._request(req_context, keys).ctx)

    def _request(self, req_context: Any, keys: Collection[bytes] = ()) -> Request:
        """Return the record of a request. The first call for the request creates the record."""
        request = self._requests.get(req_context.req_id)
        if request is None:
            path = path_of(req_context)
            self._fit_to(path or keys)
            arrival = self._arrivals.get(req_context.req_id, _UNKNOWN)
            ctx = self.core.begin_request(req_context.req_id, path, hints=arrival.hints)
            request = Request(ctx, path)
            if self._tiered is not None:
                leave_out_tiers(self._tiered, ctx, req_context)
                if arrival.has_adapter:
                    self._tiered.leave_out_tiers(ctx)
            if arrival.ran_unasked:
                arrival.ran_unasked = False
                request.begun_step = BEFORE_ANY_STEP
            self._requests[req_context.req_id] = request
        return request

    def _fit_to(self, keys: Collection[bytes]) -> None:
        """Create the manager again if the engine's first keys have another length than expected."""
        first = next(iter(keys), None)
        if first is not None and len(first) != self.core.key_bytes and not self._requests:
            self._build(len(first))

    def _release(self, request: Request) -> None:
        if self._verifier is not None:
            self._verifier.release(request.checks)

    # ---- lookup

    def lookup(self, key: bytes, req_context: Any) -> VLLMResult:
        """Return the state of a block.

        A block with the result HIT can be loaded; if verification is on, it has been verified.
        """
        ahead = self._lookups.ahead
        if ahead and ahead[-1] is key:
            ahead.pop()
            return VLLMResult.HIT
        if self.broken or self._is_kept_out(req_context):
            self._record_of_miss(req_context).singles[key] = False
            return VLLMResult.MISS
        # `contained`, inlined: vLLM calls this for each block, and a wrapper costs as much as the lookup.
        try:
            request = self._requests.get(req_context.req_id) or self._request(req_context, (key,))
            if request.may_run(self._step):
                # The request was preempted, perhaps by a reset before this step. vLLM crashes if one step
                # both reports the preemption and begins a load of the request (docs/upstream.md).
                self._looked_up_early.append(request)
                return VLLMResult.RETRY
            answer = self._lookups.block(key, request)
            if request.was_preempted:
                request.begun_step = self._step
            record = self._misses.record_of(self._step, req_context, request)
            if answer is VLLMResult.HIT and self._audited(request, req_context.req_id, (key,)):
                answer, record.reason = VLLMResult.MISS, AUDIT
            record.singles[key] = answer is VLLMResult.HIT
            return answer
        except Exception:
            self.stop_after_error("lookup")
            return VLLMResult.MISS

    def lookup_prefix(self, keys: list[bytes], req_context: Any) -> tuple[int, bool]:
        """Return the number of ready blocks before the first block that is not ready, and a flag.

        The flag is True if this first block may be ready soon, so that vLLM should look up again later.
        """
        if self.broken or self._is_kept_out(req_context):
            if keys:
                self._record_of_miss(req_context).prefixes.setdefault(keys[0][-4:], (keys, 0))
            return 0, False
        return self._lookup_prefix(keys, req_context)

    @_contained((0, False))
    def _lookup_prefix(self, keys: list[bytes], req_context: Any) -> tuple[int, bool]:
        request = self._request(req_context, keys)
        if request.may_run(self._step):
            request.wait_again(self._step)
        num_ready, wait = self._lookups.prefix(keys, request)
        record = self._misses.record_of(self._step, req_context, request)
        if num_ready and not wait and self._audited(request, req_context.req_id, keys):
            num_ready, record.reason = 0, AUDIT
        if keys:
            record.prefixes.setdefault(keys[0][-4:], (keys, num_ready))
        return num_ready, wait

    def _record_of_miss(self, req_context: Any) -> LookupRecord:
        """Return the lookup record of a request that must not use the cache, with the reason for that."""
        record = self._misses.record_of(self._step, req_context)
        record.reason = PAUSED if self.broken else KEPT_OUT
        return record

    def _audited(self, request: Request, request_id: str, keys: Collection[bytes]) -> bool:
        """Return True if this request with a hit is audited: then vLLM must compute the request's blocks."""
        if self.audits is None or not self.audits.takes(request, request_id, keys):
            return False
        self._lookups.ahead = []
        self._release(request)
        return True

    def get_load_source(self, key: bytes, req_context: Any) -> Any:
        """Return the place from which a hit was served, in vLLM's terms.

        If a tier promoted the block for this request, the result is ``disk`` or, for a shared tier,
        ``external_unspecified``. Otherwise it is ``host``.
        """
        if self._tiered is None:
            return HOST
        request = self._requests.get(req_context.req_id)
        number = 0 if request is None else self._tiered.source_of(key, request.ctx)
        return HOST if number == 0 else EXTERNAL if self._tiered.is_shared(number) else DISK

    def has_promoted_for(self, req_context: Any) -> bool:
        """Return True if a tier has promoted blocks for this request that are not loaded yet."""
        request = self._requests.get(req_context.req_id)
        return self._tiered is not None and request is not None and self._tiered.has_promoted(request.ctx)

    # ---- load

    @_contained(lambda keys, req_context: SlotsSpec(np.full(len(keys), -1, np.int32)))
    def prepare_load(self, keys: Collection[bytes], req_context: Any) -> SlotsSpec:
        """Pin blocks for which `lookup` has returned HIT, and return their slots.

        After an error, or if another engine has reset the pool, all slots are -1, and the load will fail.
        """
        request = self._request(req_context, keys)
        request.begun_step = BEFORE_ANY_STEP
        try:
            plan = self.core.prepare_load(list(keys), request.ctx)
        except GoneError as error:  # another engine has reset the shared pool: a failed load
            self._log.warn("gone", "kvoffload: blocks left the shared pool before their load: %s", error)
            self._misses.begins(req_context.req_id)
            self._release(request)
            return SlotsSpec(np.full(len(keys), -1, np.int32))
        self._loads.add(plan, keys)
        self._release(request)
        self._misses.load(req_context.req_id, list(keys))
        self.metrics.counts["hit_blocks"] += len(plan)
        return SlotsSpec(plan.slots)

    @_ends
    def complete_load(self, keys: Collection[bytes], req_context: Any) -> None:
        """Unpin the blocks of a finished load. Blocks that a worker could not load are forgotten."""
        for plan in self._loads.take(req_context.req_id, keys):
            if self._dropped:
                self._end_dropped()
            failed = self.pool.take_failed(plan.slots)
            damaged = _NO_ROWS if failed is None else np.flatnonzero(failed)
            self.metrics.counts["failed_load_blocks"] += len(damaged)
            self.core.complete_load(plan, damaged=damaged)

    # ---- store

    @_contained(_NOTHING)
    def prepare_store(self, keys: Collection[bytes], req_context: Any) -> PrepareStoreOutput | None:
        """Choose which offered blocks to store. Returns None if vLLM should offer the blocks again later."""
        if self._arrivals.get(req_context.req_id, _UNKNOWN).is_outdated or self._is_kept_out(req_context):
            return _NOTHING
        request = self._request(req_context, keys)
        request.begun_step = BEFORE_ANY_STEP  # vLLM offers blocks of running requests, after a step
        self._misses.count_begun(self.core, (req_context.req_id,))
        self._release(request)
        offered = list(keys)
        # Stable: blocks that end at the same token stay in the order of their groups.
        positions = positions_of(req_context)
        places = [positions.get(key, 0) for key in offered]
        audited = None if self.audits is None else self.audits.pin(offered)
        order = None if places == sorted(places) else np.argsort(places, kind="stable")
        ordered = offered if order is None else [offered[row] for row in order.tolist()]
        plan = self.core.prepare_store(ordered, request.ctx)
        return self._output_of(plan, offered, order, audited, req_context.req_id)

    def _output_of(
        self,
        plan: StorePlan | None,
        offered: list[bytes],
        order: npt.NDArray[np.intp] | None = None,
        audited: Audited | None = None,
        request_id: str = "",
    ) -> PrepareStoreOutput | None:
        """Translate the plan of a store to vLLM's form, with the blocks in the order of `offered`.

        Returns None if vLLM should offer the blocks again later.

        Args:
            plan: the plan for the offer; None if the manager has no room for it.
            order: the manager has received ``offered[order]``; None: it has received `offered`.
            audited: further blocks, which the workers only compare. `SlotsSpec.audited` of the result marks
                them.
        """
        if plan is None and audited is not None:
            assert self.audits is not None
            self.audits.unpin(audited.plan)
        if plan is None:
            # If nothing is in flight, the request's own blocks fill RAM, and a later offer would fail, too.
            stats = self.core.stats()
            in_flight = stats.writing or stats.condemned or stats.ready > stats.evictable
            return None if in_flight else _NOTHING
        slots, stored = plan.slots, offered
        if order is not None:
            rows = order[plan.rows]
            back = np.argsort(rows)
            slots, stored = slots[back], [offered[row] for row in rows[back].tolist()]
        elif len(plan) < len(offered):
            stored = [offered[row] for row in plan.rows.tolist()]
        self._stores.add(plan, stored)
        spec = SlotsSpec(slots)
        if audited is not None:
            stored, spec = self._with_audited(plan, offered, order, audited, request_id)
        if self._sealing or self._blocks_per_chunk > 1:
            keys = self.core.pack(stored)
            spec.digests = keys.digests if self._sealing else None
            spec.num_slots = slots_per_group(keys) if self._blocks_per_chunk > 1 else None
        return PrepareStoreOutput(keys_to_store=stored, store_spec=spec, evicted_keys=[*plan.evicted])

    def _with_audited(
        self,
        plan: StorePlan,
        offered: list[bytes],
        order: npt.NDArray[np.intp] | None,
        audited: Audited,
        request_id: str,
    ) -> tuple[list[bytes], SlotsSpec]:
        """Merge the blocks to store and the blocks to compare, in the order of `offered`."""
        assert self.audits is not None
        rows = np.concatenate([plan.rows if order is None else order[plan.rows], audited.rows])
        slots = np.concatenate([plan.slots, audited.plan.slots])
        is_audited = np.arange(len(rows)) >= len(plan)
        back = np.argsort(rows)
        self.audits.begin(audited.plan, [offered[row] for row in audited.rows.tolist()], request_id)
        return [offered[row] for row in rows[back].tolist()], SlotsSpec(slots[back], audited=is_audited[back])

    @_ends
    def complete_store(self, keys: Collection[bytes], req_context: Any, success: bool = True) -> None:
        """Make the blocks of a finished store readable, except blocks that a worker could not store."""
        if self.audits is not None:
            self._end_audits(req_context.req_id, keys, success)
        for plan in self._stores.take(req_context.req_id, keys):
            if self._dropped:
                self._end_dropped()
            failed = self.pool.take_failed(plan.slots)
            if not success:
                failed = np.full(len(plan), True)
            if failed is None or not failed.any():
                self.core.complete_store(plan)
                continue
            self.metrics.counts["failed_store_blocks"] += int(np.count_nonzero(failed))
            for piece, lost in zip(plan.split(), failed.tolist(), strict=True):
                self.core.complete_store(piece, success=not lost)

    def _end_audits(self, request_id: str, keys: Collection[bytes], success: bool) -> None:
        assert self.audits is not None
        assert self.options.audit is not None
        reaction = self.options.audit.on_difference
        for difference in self.audits.end(request_id, keys, success=success):
            self._log.error("audit", "kvoffload: %s (on_difference: %s)", difference, reaction)
            if reaction == DROP:
                self.core.discard([difference.key])
                if self._tiered is not None:
                    self._tiered.distrust([difference.key])
            elif reaction == STOP and not self.broken:
                self.broken, self._lookups.ahead = True, []
                logger.error("kvoffload: the audit stops offloading until the cache is reset")

    # ---- blocks that the device drops, which belong to no request

    @_contained(_NOTHING)
    def store_dropped(self, keys: list[bytes]) -> PrepareStoreOutput | None:
        """Choose which blocks to store before the device drops them.

        Returns None if vLLM should offer the blocks again later.

        Args:
            keys: keys of the blocks that the device will drop next, the warmest first.
        """
        self._fit_to(keys)
        audited = None if self.audits is None else self.audits.pin(keys)
        return self._output_of(self.core.prepare_store(keys), keys, None, audited)

    @_contained(None)
    def keep_dropped(self, keys: list[bytes]) -> None:
        """Record that the device dropped these blocks before they could be offered.

        A block that is in RAM is then no longer a duplicate. A block that is not in RAM counts as lost.
        """
        self._fit_to(keys)
        self.metrics.counts["lost_blocks"] += self.core.keep(keys)

    # ---- steps, resets, reports

    def on_schedule_end(self, context: Any) -> None:
        """End a step: poll the tiers, and unpin the verified blocks of requests that have begun.

        The poll starts to promote the blocks that this step's lookups have found in tiers. Requests that were
        preempted in this step may load in the next step.
        """
        if self._sessions is not None:
            for request_id in self._sessions.continued(context.new_req_ids, context.preempted_req_ids):
                self._arrival(request_id).is_outdated = True
                self._log.warn("sessions", CONFUSED_SESSION, request_id)
        self._count_misses((*context.new_req_ids, *context.preempted_req_ids))
        self._end_step(context)

    @contained(None, when_broken=lambda manager: True)
    def _count_misses(self, begun: Sequence[str]) -> None:
        self._misses.count_begun(None if self.broken else self.core, begun)

    @_ends
    def _end_step(self, context: Any) -> None:
        if self._dropped and self._step - self._dropped_step > self._steps_in_flight:
            # If the transfers in flight at the reset have every slot, no new transfer can begin.
            self._end_dropped()
        if self._tiered is not None:
            self._tiered.poll()
        if self._live is not None:
            has_changed = self._live.step()
            if has_changed and self.what_if is not None:
                self.what_if.restart(partial(self._shadows, self._live.policy), time.monotonic())
        for request_id in context.new_req_ids:
            if (request := self._requests.get(request_id)) is not None:
                request.begun_step = self._step
                self._release(request)
            else:
                self._arrival(request_id).ran_unasked = True
        for request_id in context.preempted_req_ids:
            if (arrival := self._arrivals.get(request_id)) is not None:
                arrival.ran_unasked = False
            if (request := self._requests.get(request_id)) is not None:
                request.wait_again(self._step)
        for request in self._looked_up_early:
            request.wait_again(self._step)
        self._looked_up_early.clear()
        self._step += 1
        if self.what_if is not None:
            self.what_if.work()

    @_contained(False)
    def has_pending_work(self) -> bool:
        """Return True while a request may wait for a tier: vLLM then makes steps even if no request runs."""
        return self._tiered is not None and self._tiered.has_jobs

    def reset_cache(self) -> None:
        """Forget all blocks. vLLM waits for the transfers in flight before it begins new transfers.

        Requests that are running now store nothing afterwards: vLLM would also offer blocks that they
        computed before the reset, and the memory of a block that has left the sliding window may hold other
        data.
        """
        self.broken = False
        if self._tiers is not None:
            self._tiers.log_unreached()
        self._forget()

    @_contained(None)
    def _forget(self) -> None:
        for arrival in self._arrivals.values():
            arrival.is_outdated = True
        plans: list[LoadPlan | StorePlan] = [*self._loads.drain(), *self._stores.drain()]
        if self.audits is not None:
            plans += self.audits.reset()
        for request in self._requests.values():
            self._release(request)
        if self._verifier is not None:
            self._verifier.reset()
        for request_id in self._requests.keys() - self._arrivals.keys():
            # The request ended while offloading was paused.
            self.core.finish_request(self._requests.pop(request_id).ctx)
        # Only vLLM's next step waits for the transfers in flight. Other engines of a pool, and promotions
        # from tiers, do not wait, so the slots of these transfers must not be free yet.
        is_alone = self._node_pool is None and self._tiered is None
        self.core.reset(drop_in_flight=is_alone)
        self._dropped = [] if is_alone else self._dropped + plans
        self._dropped_step = self._step
        if self._tiered is not None and not self._tiered.drain(self.options.tier_deadline_s):
            for lane in self._tiered.lanes:
                if not lane.tier.drain(0.0):
                    logger.error(
                        "kvoffload: the tier %s has not confirmed this reset in %g s; until it does, its old "
                        "blocks may be served to other engines, and after a restart to this engine",
                        lane.tier.name, self.options.tier_deadline_s,
                    )  # fmt: skip
        if self.what_if is not None:
            self.what_if.reset()
        self._events.reset(self.core)

    def _end_dropped(self) -> None:
        """End the plans of the transfers that were in flight at a reset.

        Call this when a transfer or a step that began after the reset has ended. All earlier transfers have
        then ended, too, because vLLM waits for them at the beginning of the first step after the reset.
        """
        dropped, self._dropped = self._dropped, []
        for plan in dropped:
            if isinstance(plan, LoadPlan):
                self.core.unpin(plan)
            else:
                self.core.complete_store(plan, success=False)

    def take_events(self) -> list[Any]:
        """Return the events since the last call, in vLLM's form. vLLM calls this in every step."""
        return self._take_events() if self._enable_events else []

    @_contained(list)
    def _take_events(self) -> list[Any]:
        return self._events.take(self.core)

    def get_stats(self) -> Any:
        """Return the changed metrics, or None if no report is due. vLLM calls this in every step."""
        if not self.metrics.is_due(time.monotonic(), is_idle=not self._arrivals):
            return None
        of_manager = self._values_of_manager()  # first, because an error pauses offloading
        self.metrics.counts["lookup_blocks"] = self._misses.num_lookups
        values = [*of_manager, *self.metrics.of_adapter(self._misses.by_reason(self.core), self.broken)]
        if self.audits is not None:
            values += values_of_audits(self.audits)
        return self.metrics.take(values)

    @_contained(())
    def _values_of_manager(self) -> Sequence[Value]:
        now_s = time.monotonic()
        values = [*self.metrics.of_manager(self.core)]
        values.append(value_of_reach(self._reach.seconds(self.core.miss_record, now_s)))
        if self.what_if is not None:
            values += values_of_what_if(self.what_if.due(now_s))
        return values

    def shutdown(self) -> None:
        """Close the shadows, the verifier, the tiers and the pool, and end the recording of calls."""
        if self.what_if is not None:
            self.what_if.close()
        if self._verifier is not None:
            self._verifier.close()
        if self._tiered is not None:
            self._tiered.close()
        ram = self.core.ram_manager if isinstance(self.core, TieredManager) else self.core
        if isinstance(ram, NodeManager):
            ram.close()
        if isinstance(ram, RecordedManager):
            ram.end_recording()
        self.pool.close()

    def stop_after_error(self, method: str) -> None:
        """Log and count an internal error. The engine continues without offloading."""
        self.broken, self._lookups.ahead = True, []
        self.metrics.counts["internal_errors"] += 1
        if self._node_pool is not None:
            for request in self._requests.values():
                with contextlib.suppress(Exception):
                    self._release(request)
        logger.exception(
            "kvoffload: internal error in %s; nothing is offloaded until the cache is reset", method
        )

    def _on_damage(self, key: bytes) -> None:
        self.metrics.counts["verification_failures"] += 1
        self._log.error(
            "damage", "kvoffload: the checksum of block %s does not match; it is computed again", key.hex()
        )
