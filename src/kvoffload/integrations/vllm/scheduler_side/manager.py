"""vLLM's interface of a manager, in front of ours.

Owns the translation: vLLM asks key by key where we take batches, completes sets of keys where we hand out
plans, and lists the blocks of one KV group after the other where we want prefix order. Decides nothing, and
lets no error of ours reach the engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from vllm.v1.kv_offload.base import LookupResult as VLLMResult
from vllm.v1.kv_offload.base import OffloadingManager, PrepareStoreOutput, RequestOffloadingContext

from kvoffload.core import manager as core
from kvoffload.core.hints import NO_HINTS, Hints
from kvoffload.core.plans import LoadPlan, StorePlan
from kvoffload.integrations.vllm.scheduler_side.containment import contained
from kvoffload.integrations.vllm.scheduler_side.events import Events
from kvoffload.integrations.vllm.scheduler_side.hints import told_by_user
from kvoffload.integrations.vllm.scheduler_side.inflight import InFlight
from kvoffload.integrations.vllm.scheduler_side.lookups import (
    BEFORE_ANY_STEP,
    Lookups,
    Request,
    path_of,
    positions_of,
)
from kvoffload.integrations.vllm.scheduler_side.metrics import Metrics
from kvoffload.integrations.vllm.scheduler_side.verification import Checks, Verifier
from kvoffload.integrations.vllm.shared.logs import logger, rate_limited_log
from kvoffload.integrations.vllm.shared.options import ALWAYS, VLLMOptions
from kvoffload.integrations.vllm.shared.pool import SharedPool
from kvoffload.integrations.vllm.shared.tiers import (
    DISK,
    ELSEWHERE,
    HOST,
    PoolMemory,
    is_named,
    leave_out_tiers,
    say_what_a_reset_misses,
    tier_counts,
)
from kvoffload.integrations.vllm.worker_side.slots_spec import SlotsSpec, slots_per_group
from kvoffload.tiering.manager import AnyManager, TieredManager
from kvoffload.tiers.contract import SecondaryTier

USUAL_KEY_BYTES = 36
"""A SHA-256 and the number of the KV group. With another hash the length follows from the first key."""

_NOTHING = PrepareStoreOutput(keys_to_store=[], store_spec=SlotsSpec(np.empty(0, np.int32)), evicted_keys=[])
"""Nothing is stored, and vLLM does not repeat the offer."""
_NO_ROWS = np.empty(0, np.int64)
METRICS_INTERVAL_S = 0.1
"""While requests run, what cache, policy and tiers count is shown no more often."""


class KVOffloadManager(OffloadingManager):
    """Our manager as vLLM's connector calls it.

    A request's path is the list of keys that vLLM has recorded when it first asks: so a hit refreshes the
    whole prefix, including what the GPU's own cache served. Several KV groups share one path, in the order of
    their tokens, so that a partial store keeps the head of every group.

    Args:
        tokens_per_block: tokens in a block, for events. blocks_per_chunk: engine blocks in a slot.
        open_tiers: makes the tiers behind RAM; called with the bytes of a block and of a key.
        missing_tiers: the places of those that could not be opened: a reset does not reach them.

    Attributes:
        core: the manager that decides. broken: an error was contained, and nothing is offloaded until a
        reset. num_lost: blocks that the device dropped before they could be offered.

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
        open_tiers: Callable[[int, int], list[SecondaryTier]] | None = None,
        missing_tiers: Sequence[str] = (),
    ) -> None:
        self.broken = False
        self.num_lost = 0
        self._log = rate_limited_log()
        self.metrics = Metrics()
        self._events = Events()
        self._options, self._pool = options, pool
        self._enable_events, self._tokens_per_block = enable_events, tokens_per_block
        self._blocks_per_chunk = blocks_per_chunk
        self._requests: dict[str, Request] = {}
        self._told: dict[str, Hints] = {}
        self._running: set[str] = set()
        self._outdated: set[str] = set()
        self._asked_again: list[Request] = []
        # Requests that run without a lookup, such as prompts that the GPU's cache covers.
        self._never_asked: set[str] = set()
        self._step = 0
        self._adapted: set[str] = set()
        self._loads: InFlight[LoadPlan] = InFlight()
        self._stores: InFlight[StorePlan] = InFlight()
        self._verifier: Verifier | None = None
        self._sealing = options.verify == ALWAYS
        self._shown_s = 0.0
        # vLLM calls this in every step; most engines have nothing to do there.
        if not enable_events:
            self.take_events = list  # type: ignore[method-assign]
        self.core: AnyManager
        self._tiered: TieredManager | None = None
        self._open_tiers, self._missing_tiers = open_tiers, missing_tiers
        self._build(USUAL_KEY_BYTES)

    def _build(self, key_bytes: int) -> None:
        options, pool = self._options, self._pool
        given: dict[str, Any] = {
            "key_bytes": key_bytes,
            "policy": options.policy,
            "admission": options.admission,
            "store": options.store,
            "enable_events": self._enable_events,
            "block_size": self._tokens_per_block,
        }
        if self._tiered is not None:
            self._tiered.close()
            self._tiered = None
        if self._open_tiers is not None and key_bytes != USUAL_KEY_BYTES:
            logger.error(
                "kvoffload: no tiers behind RAM: keys have %d bytes; blocks that outlive the engine need the "
                "%d of --prefix-caching-hash-algo sha256 or sha256_cbor", key_bytes, USUAL_KEY_BYTES
            )  # fmt: skip
        elif self._open_tiers is not None and (tiers := self._open_tiers(pool.slot_stride, key_bytes)):
            self._tiered = TieredManager(
                pool.num_slots,
                ram=PoolMemory(pool, self._sealing),
                tiers=tiers,
                deadline_s=options.tier_deadline_s,
                recompute_s_per_block=self._recompute_s_per_block(),
                **given,
            )
        self.core = self._tiered or core.OffloadingManager(pool.num_slots, **given)
        if self._sealing:
            if self._verifier is not None:
                self._verifier.close()
            self._verifier = Verifier(self.core, self._pool, self._on_damage)
        self._lookups = Lookups(self.core, self._verifier, tiered=self._tiered is not None)

    def _recompute_s_per_block(self) -> float | None:
        tokens_per_s = self._options.recompute_tokens_per_s
        return self._tokens_per_block / tokens_per_s if tokens_per_s else None

    # ---- requests

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        """Record name and hints: the request's keys come later."""
        self._running.add(req_context.req_id)
        self._hear_user(req_context)
        return RequestOffloadingContext()

    @contained(lambda req_context: None)
    def _hear_user(self, req_context: Any) -> None:
        try:
            hints = told_by_user(getattr(req_context, "kv_transfer_params", None))
        except ValueError as error:
            self._log.warn("hints", "kvoffload: %s; ignored", error)
        else:
            self.hear(req_context.req_id, hints)

    def hear(self, request_id: str, hints: Hints) -> None:
        """What is known of a request besides: before its first lookup, or when it has ended."""
        if hints is not NO_HINTS:
            self._told[request_id] = self._told.get(request_id, NO_HINTS).updated(hints)

    def has_adapter(self, request_id: str) -> None:
        """Record, before the first lookup, that a LoRA adapter computes the request.

        Its keys have the adapter's name and path, not its contents. The request loads from no tier, unless
        the user has named the weights for every tier.
        """
        if not all(is_named(tier) for tier in self._options.tiers):
            self._adapted.add(request_id)

    def on_request_finished(self, req_context: Any) -> None:
        """Commit what the request used. Its transfers may end later."""
        self._adapted.discard(req_context.req_id)
        self._running.discard(req_context.req_id)
        self._outdated.discard(req_context.req_id)
        self._never_asked.discard(req_context.req_id)
        self._finish(req_context, self._told.pop(req_context.req_id, NO_HINTS))

    @contained(lambda req_context, hints: None)
    def _finish(self, req_context: Any, hints: Hints) -> None:
        request = self._requests.pop(req_context.req_id, None)
        if request is not None:
            self._release(request)
            self.core.finish_request(request.ctx, hints=hints)

    @contained(lambda req_context: None)
    def expect(self, req_context: Any) -> None:
        """The request waits in vLLM's queue, and its keys are recorded: other blocks leave before its own."""
        if path_of(req_context):
            self.core.expect(self._request(req_context).ctx)

    @contained(lambda request_id: None)
    def withdraw(self, request_id: str) -> None:
        """The request waits no more."""
        if (request := self._requests.get(request_id)) is not None:
            self.core.withdraw(request.ctx)

    @contained(lambda keys, req_context: None)
    def touch(self, keys: Collection[bytes], req_context: Any) -> None:
        """Commit now that the request uses these blocks."""
        if keys:
            self.core.touch(list(keys), self._request(req_context, keys).ctx)

    def _request(self, req_context: Any, keys: Collection[bytes] = ()) -> Request:
        """The request, begun when it is first seen. The length of keys follows from the first one of all."""
        request = self._requests.get(req_context.req_id)
        if request is None:
            path = path_of(req_context)
            first = next(iter(path or keys), None)
            if first is not None and len(first) != self.core.key_bytes and not self._requests:
                self._build(len(first))
            hints = self._told.get(req_context.req_id, NO_HINTS)
            request = Request(self.core.begin_request(req_context.req_id, path, hints=hints), path)
            if self._tiered is not None:
                leave_out_tiers(self._tiered, request.ctx, req_context)
                if req_context.req_id in self._adapted:
                    self._tiered.leave_out_tiers(request.ctx)
            if req_context.req_id in self._never_asked:
                self._never_asked.discard(req_context.req_id)
                request.begun_step = BEFORE_ANY_STEP
            self._requests[req_context.req_id] = request
        return request

    def _release(self, request: Request) -> None:
        if self._verifier is not None and request.checks.by_key:
            self._verifier.release(request.checks)

    # ---- lookup

    def lookup(self, key: bytes, req_context: Any) -> VLLMResult:
        """State of one block. A HIT will load; if verification is on, it has been verified."""
        ahead = self._lookups.ahead
        if ahead and ahead[-1] is key:
            ahead.pop()
            return VLLMResult.HIT
        if self.broken:
            return VLLMResult.MISS
        # `contained`, inlined: this is called for each block, and a call costs as much as the answer.
        try:
            request = self._requests.get(req_context.req_id) or self._request(req_context, (key,))
            if request.may_run(self._step):
                # It was preempted, perhaps by a reset before this step. vLLM dies if the step that reports
                # the preemption also begins a load of the request (docs/upstream.md).
                self._asked_again.append(request)
                return VLLMResult.RETRY
            answer = self._lookups.one(key, request)
            if request.was_preempted:
                request.begun_step = self._step
            if request.is_first_lookup(self._step):
                self.metrics.num_lookups += 1 + len(self._lookups.ahead)
            return answer
        except Exception:
            self._break("lookup")
            return VLLMResult.MISS

    @contained(lambda keys, req_context: (0, False))
    def lookup_prefix(self, keys: list[bytes], req_context: Any) -> tuple[int, bool]:
        """Return the number of ready leading blocks, and True if the next one may soon be ready."""
        request = self._request(req_context, keys)
        if request.may_run(self._step):
            request.wait_again()
        if request.is_first_lookup(self._step):
            self.metrics.num_lookups += len(keys)
        return self._lookups.prefix(keys, request)

    def get_load_source(self, key: bytes, req_context: Any) -> Any:
        """Where a hit came from, in vLLM's words: ``host``; ``disk``, or ``external_unspecified`` for a
        server, if it was promoted for this request."""
        if self._tiered is None:
            return HOST
        request = self._requests.get(req_context.req_id)
        number = 0 if request is None else self._tiered.source_of(key, request.ctx)
        return HOST if number == 0 else ELSEWHERE if self._tiered.is_shared(number) else DISK

    def has_promoted_for(self, req_context: Any) -> bool:
        """Return True if a tier has promoted blocks of this request, and their load is not complete."""
        request = self._requests.get(req_context.req_id)
        return self._tiered is not None and request is not None and self._tiered.has_promoted(request.ctx)

    # ---- load

    @contained(lambda keys, req_context: SlotsSpec(np.full(len(keys), -1, np.int32)))
    def prepare_load(self, keys: Collection[bytes], req_context: Any) -> SlotsSpec:
        """Pin blocks that `lookup` has answered with HIT."""
        request = self._request(req_context, keys)
        request.begun_step = BEFORE_ANY_STEP
        plan = self.core.prepare_load(list(keys), request.ctx)
        self._loads.add(plan, keys)
        self._release(request)
        self.metrics.counts["hit_blocks"] += len(plan)
        return SlotsSpec(plan.slots)

    @contained(lambda keys, req_context: None)
    def complete_load(self, keys: Collection[bytes], req_context: Any) -> None:
        """Unpin the blocks of a load that has ended; forget those that a worker could not load."""
        for plan in self._loads.take(req_context.req_id, keys):
            failed = self._pool.take_failed(plan.slots)
            damaged = _NO_ROWS if failed is None else np.flatnonzero(failed)
            self.metrics.counts["failed_load_blocks"] += len(damaged)
            self.core.complete_load(plan, damaged=damaged)

    # ---- store

    @contained(lambda keys, req_context: _NOTHING)
    def prepare_store(self, keys: Collection[bytes], req_context: Any) -> PrepareStoreOutput | None:
        """Choose which of the offered blocks are stored. None: none now, perhaps later."""
        if req_context.req_id in self._outdated:
            return _NOTHING
        request = self._request(req_context, keys)
        request.begun_step = BEFORE_ANY_STEP  # vLLM offers stores of running requests, after a step has ended
        self._release(request)
        offered = list(keys)
        # Blocks that end at the same token stay in the order of their groups.
        positions = positions_of(req_context)
        places = [positions.get(key, 0) for key in offered]
        if places == sorted(places):
            return self._chosen(self.core.prepare_store(offered, request.ctx), offered)
        order = np.argsort(places, kind="stable")
        plan = self.core.prepare_store([offered[row] for row in order.tolist()], request.ctx)
        return self._chosen(plan, offered, order)

    def _chosen(
        self, plan: StorePlan | None, offered: list[bytes], order: npt.NDArray[np.intp] | None = None
    ) -> PrepareStoreOutput | None:
        """A plan for the blocks ``offered[order]`` in vLLM's form: in the order of `offered`."""
        if plan is None:
            # With nothing in flight all room is this request's own: a later offer would fail too.
            stats = self.core.stats()
            under_way = stats.writing or stats.condemned or stats.ready > stats.evictable
            return None if under_way else _NOTHING
        slots, stored = plan.slots, offered
        if order is not None:
            rows = order[plan.rows]
            back = np.argsort(rows)
            slots, stored = slots[back], [offered[row] for row in rows[back].tolist()]
        elif len(plan) < len(offered):
            stored = [offered[row] for row in plan.rows.tolist()]
        self._stores.add(plan, stored)
        spec = SlotsSpec(slots)
        if self._sealing or self._blocks_per_chunk > 1:
            keys = self.core.pack(stored)
            spec.digests = keys.digests if self._sealing else None
            spec.num_slots = slots_per_group(keys) if self._blocks_per_chunk > 1 else None
        return PrepareStoreOutput(keys_to_store=stored, store_spec=spec, evicted_keys=[*plan.evicted])

    @contained(lambda keys, req_context, success=True: None)
    def complete_store(self, keys: Collection[bytes], req_context: Any, success: bool = True) -> None:
        """End a store; forget blocks that a worker could not store."""
        for plan in self._stores.take(req_context.req_id, keys):
            failed = self._pool.take_failed(plan.slots)
            if not success:
                failed = np.full(len(plan), True)
            if failed is None or not failed.any():
                self.core.complete_store(plan)
                continue
            self.metrics.counts["failed_store_blocks"] += int(np.count_nonzero(failed))
            for piece, lost in zip(plan.split(), failed.tolist(), strict=True):
                self.core.complete_store(piece, success=not lost)

    # ---- blocks that the device drops: they belong to no request of ours

    @contained(lambda keys: _NOTHING)
    def store_dropped(self, keys: list[bytes]) -> PrepareStoreOutput | None:
        """Choose which blocks to store of those that the device drops next, given from the warmest."""
        return self._chosen(self.core.prepare_store(keys), keys)

    @contained(lambda keys: None)
    def keep_dropped(self, keys: list[bytes]) -> None:
        """The device has dropped these blocks without an offer: they are no longer duplicates."""
        lost = self.core.keep(keys)
        self.num_lost += lost
        self.metrics.counts["lost_blocks"] += lost

    # ---- the rest

    @contained(lambda context: None)
    def on_schedule_end(self, context: Any) -> None:
        """End a step: begin the promotions that it needs, and release the blocks verified for requests that
        now run. Requests preempted by the step may load in the next one.
        """
        if self._tiered is not None:
            self._tiered.poll()
        for request_id in context.new_req_ids:
            if (request := self._requests.get(request_id)) is not None:
                request.begun_step = self._step
                self._release(request)
            else:
                self._never_asked.add(request_id)
        for request_id in context.preempted_req_ids:
            self._never_asked.discard(request_id)
            if (request := self._requests.get(request_id)) is not None:
                request.wait_again()
        for request in self._asked_again:
            request.wait_again()
        self._asked_again.clear()
        self._step += 1

    @contained(lambda: False)
    def has_pending_work(self) -> bool:
        """Whether vLLM must keep stepping while no request runs: one may wait for a tier."""
        return self._tiered is not None and self._tiered.has_jobs

    def reset_cache(self) -> None:
        """Forget everything. vLLM waits for transfers under way before it begins new ones.

        Requests that run now store nothing more: a reset has to forget what they have computed. vLLM also
        offers their blocks again from the beginning, including blocks that left the sliding window long ago
        and now hold other data.
        """
        self.broken = False
        say_what_a_reset_misses(self._missing_tiers)
        self._forget()

    @contained(lambda: None)
    def _forget(self) -> None:
        self._outdated = set(self._running)
        self._loads.clear()
        self._stores.clear()
        for request in self._requests.values():
            request.checks = Checks()
        if self._verifier is not None:
            self._verifier.reset()
        self.core.reset(drop_in_flight=True)
        self._events.reset(self.core)

    @contained(list)
    def take_events(self) -> list[Any]:
        """Events since the last call, in vLLM's form."""
        return self._events.take(self.core)

    @contained(lambda: None)
    def get_stats(self) -> Any:
        """What has changed since the last time: ten times a second, and after the last request.

        vLLM asks after every step; whoever reads it asks every few seconds.
        """
        now = time.monotonic()
        if now - self._shown_s < METRICS_INTERVAL_S and self._running:
            return None
        self._shown_s, counters = now, self.core.counters()
        taken = self.metrics.take(counters)
        self.metrics.show(taken, counters, self.core.policy)
        if self._tiered is not None:
            self.metrics.add_tiers(taken, tier_counts(self._tiered), self._tiered.counts)
        return taken

    def shutdown(self) -> None:
        """Close tiers and pool."""
        if self._verifier is not None:
            self._verifier.close()
        if self._tiered is not None:
            self._tiered.close()
        self._pool.close()

    def _before_call(self) -> None:
        self._lookups.ahead = []

    def _break(self, where: str) -> None:
        """Contain an error of ours: the engine continues without offloading."""
        self.broken, self._lookups.ahead = True, []
        self.metrics.counts["internal_errors"] += 1
        logger.exception(
            "kvoffload: internal error in %s; nothing is offloaded until the cache is reset", where
        )

    def _on_damage(self, key: bytes) -> None:
        self.metrics.counts["verification_failures"] += 1
        self._log.error(
            "damage", "kvoffload: block %s is not what was stored: it is computed again", key.hex()
        )
