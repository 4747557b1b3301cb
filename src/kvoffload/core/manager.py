"""The offloading manager, which decides the contents of a cache and owns the life cycle of its blocks.

Owns index, slots, events and counters. A policy chooses the victims; an admission rule chooses
the blocks that enter. The manager moves no bytes and does no I/O: it returns plans, and the caller copies
and reports results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from kvoffload.core.admission import DEFAULT_ADMISSION, Admission, create_admission
from kvoffload.core.event_list import EventList, EventSink
from kvoffload.core.expected import Expected, Queue
from kvoffload.core.hints import NO_HINTS, Hints, Labels
from kvoffload.core.kernels import blocks, call_log, loads, lookups, misses, stores, uses, victims
from kvoffload.core.kernels.offers import NO_ROOM
from kvoffload.core.kernels.victims import FIRST_WRONG
from kvoffload.core.log import NO_REQUEST, Call, Log
from kvoffload.core.miss_record import NUM_CODES, RESET, MissRecord, by_reason
from kvoffload.core.on_compute import OnCompute
from kvoffload.core.on_device_eviction import OnDeviceEviction
from kvoffload.core.plans import (
    ALL_READY,
    ON_COMPUTE,
    ON_DEVICE_EVICTION,
    STORES,
    THEN_MISS,
    LoadPlan,
    LookupResult,
    ManagerStats,
    OffloadingEvent,
    PrefixLookup,
    StorePlan,
    complete,
    misuse,
)
from kvoffload.core.policy import DEFAULT_POLICY, POLICIES, EvictionPolicy
from kvoffload.core.request import AGAIN, RequestContext, batch_of, room_for
from kvoffload.core.returning import known_keys
from kvoffload.core.slots import SlotArray, Slots, readmit, retire
from kvoffload.core.state import Cache, Entering, blank_load, blank_store
from kvoffload.core.tenants import OTHER, Quota, TenantNumbers, Tenants, check_quotas
from kvoffload.core.unseen import MOST_UNSEEN, unseen_keys
from kvoffload.errors import ConfigError, MisuseError, check_integer
from kvoffload.structures.index import ABSENT, MAX_POSITIONS, Index
from kvoffload.structures.jit import compile_all
from kvoffload.structures.keys import MAX_KEY_BYTES, Keys
from kvoffload.structures.lists import LIST, UNLISTED, Lists

if TYPE_CHECKING:
    from kvoffload.core.policy_change import PolicyChange

_NO_ROWS = np.empty(0, np.int32)
_RESULTS = (LookupResult.MISS, LookupResult.HIT, LookupResult.HIT_PENDING)
"""Mapping: return value of `lookups.state_of_key` -> result of `lookup_key`."""


class OffloadingManager:
    """Tracks the blocks of one tier and decides which blocks enter and leave.

    Life of a block: `prepare_store` assigns a slot, and `complete_store` makes the block readable.
    `prepare_load` pins the block for a read, and `complete_load` unpins it. A later store may evict the
    block. `touch` and `finish_request` report to the policy which blocks a request has used, each block once
    per request.

    Methods take a batch of keys in prefix order, as a list of ``bytes`` or as `Keys`. Thread: the scheduler's
    only; no call waits. The cost of calls that serve a request does not depend on the capacity.

    Args:
        capacity_blocks: number of slots.
        key_bytes: length of every key. A key of vLLM is a block hash and 4 more bytes.
        policy: the eviction policy: a name with optional parameters (``s3fifo,small_share=0.2``),
            ``module:Class``, or a subclass of `EvictionPolicy`.
        admission: the admission rule: ``all``, ``reuse:2``, ..., or an `Admission`.
        store: time at which the engine offers blocks. ``on-compute``: as soon as the device has computed
            them. ``on-device-eviction``: when the device drops them. The tier is then a *victim* tier, for
            blocks that the device no longer holds.
        enable_events: True to record events for `take_events`.
        medium: name of this tier in events.
        block_size: tokens in a block, for events.
        explain_misses: True to record why blocks are absent, for `count_misses`. Memory: 8 bytes per slot.
        tenants: quotas, as for `set_tenants`; none by default.

    Attributes:
        index: maps keys to slots.
        slots: the state of each slot.
        policy, admission: the objects, for reports and audits.
        store_mode: the object of the argument `store`; it calls policies and admission rules in Python.
        queue: the waiting requests.
        policy_may_refuse: True if the policy may refuse new blocks.
        refuses_unasked: True if a policy may refuse blocks even if the user has not set its `write_cost`.
        miss_counts: number of blocks that `count_misses` has counted, by code of `miss_record`.

    Raises:
        ConfigError: names the argument, its value and the allowed values.
        PolicyError: raised by `prepare_store` if a policy breaks its contract. The manager is unchanged, but
            the policy's order may be inconsistent. Call `reset`, or stop using the manager.
    """

    def __init__(
        self,
        capacity_blocks: int,
        *,
        key_bytes: int = 32,
        policy: str | type[EvictionPolicy] = DEFAULT_POLICY,
        admission: str | Admission | None = DEFAULT_ADMISSION,
        store: str = ON_COMPUTE,
        enable_events: bool = False,
        medium: str = "CPU",
        block_size: int = 0,
        explain_misses: bool = False,
        tenants: Mapping[str, Quota] | None = None,
    ) -> None:
        capacity_blocks = check_integer("capacity_blocks", capacity_blocks, MAX_POSITIONS // 2)
        key_bytes = check_integer("key_bytes", key_bytes, MAX_KEY_BYTES)
        self.capacity_blocks, self.key_bytes = capacity_blocks, key_bytes
        self.medium, self.block_size = medium, block_size
        self.index = Index(capacity_blocks, key_bytes).populate()
        self.policy = POLICIES.find(policy)(self.index)
        self.admission = create_admission(admission, key_bytes, capacity_blocks)
        if store not in STORES:
            raise ConfigError("store", store, f"allowed: {', '.join(STORES)}")
        self.policy_may_refuse, self.refuses_unasked = self.policy.refuses, True
        self.slots = Slots(capacity_blocks)
        self._follows_device = store == ON_DEVICE_EVICTION
        self._state = Cache(
            index=self.index,
            slots=self.slots,
            duplicates=Lists(capacity_blocks if self._follows_device else 0, 1),
            known=known_keys(self.index, self._follows_device and self.policy.needs_returns()),
            follows_device=self._follows_device,
            expected=Expected(0, key_bytes),
            misses=MissRecord(capacity_blocks if explain_misses else 0),
            tenants=Tenants(0),
            holds=np.empty(0, np.int32),
            log=Log(0),
        )
        self._cache = self._state.memory
        self.miss_counts = np.zeros(NUM_CODES, np.int64)
        mode = OnDeviceEviction if self._follows_device else OnCompute
        self.store_mode = mode(self.policy, self.admission, self._state)
        self._events: EventSink | None = EventList(block_size, medium) if enable_events else None
        self._labels, self.queue = Labels(), self.new_queue()
        self._epoch = self._void_before = 0
        self._change: PolicyChange | None = None
        self._wanted_blocks = capacity_blocks
        self._tenants = TenantNumbers()
        compile_all()
        if tenants:
            self.set_tenants(tenants)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_cache"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._cache = self._state.memory
        # The addresses in the pickle are those of another process.
        if self._change is not None:
            self._change.bind()
        self.store_mode.decide_by(self.policy)
        self.queue.attach(self._state.make_queue, self.store_mode.expect)
        compile_all()

    # ---- requests

    def begin_request(
        self, request_id: str, keys: Sequence[bytes] = (), *, hints: Hints = NO_HINTS
    ) -> RequestContext:
        """Create the context of one inference request. Pass it to every call for this request.

        Args:
            request_id: text for messages; it need not be unique.
            keys: all keys of the request's prefix, if known. Give them if the device serves the head of the
                prefix and only the tail is looked up here. Then hits refresh the whole path, and stores
                protect the path.
            hints: labels that are known at the beginning.
        """
        ctx = RequestContext(request_id, self.key_bytes, self, room_for(len(keys)))
        if keys:
            ctx.add(keys)
        if hints is not NO_HINTS:
            ctx.set_hints(hints, self._labels.number(hints))
            self.set_tenant(ctx, hints.tenant)
        return ctx

    def expect(self, ctx: RequestContext) -> None:
        """Register a request that waits in the engine's queue. `begin_request` must have received its keys.

        Until `withdraw` or `finish_request`, stores evict the request's blocks only if there are not enough
        other blocks. This also holds for blocks of the request that are stored later. The number of expected
        keys is limited, and keys of earlier requests come first (`Queue`). Cost: the cost of a lookup.
        """
        self.queue.join(self._context(ctx))

    def new_queue(self, share: Callable[[], int] | None = None) -> Queue:
        """Create another queue of waiting requests. All queues share one limit of expected keys.

        Needed if several engines use one manager. `share`: as for `Queue`.
        """
        return Queue(self._state.make_queue, self.store_mode.expect, share)

    def withdraw(self, ctx: RequestContext) -> None:
        """Unregister a request that no longer waits. Other waiting requests may then expect more keys.

        Cost: an index probe for each key that becomes expected or is no longer expected.
        """
        self.queue.leave(ctx)

    def finish_request(
        self, ctx: RequestContext, path: Sequence[bytes] = (), *, hints: Hints = NO_HINTS
    ) -> None:
        """End a request and report the use of its whole path to the policy. Transfers may still be in flight.

        Blocks that the request has already touched or stored are not counted again, but only reordered: a
        policy that orders by recency makes the first block of the path the most recent.

        Args:
            ctx: the request.
            path: the request's keys in prefix order. Give it if earlier calls passed keys in another order.
            hints: labels that are known at the end, added to the earlier hints.
        """
        if ctx.finished or ctx.owner is not self or ctx.unpacked_keys:
            ctx = self._context(ctx)
        if hints is not NO_HINTS:
            hints = ctx.hints.updated(hints)
            ctx.set_hints(hints, self._labels.number(hints))
        if path:
            self._use(path, ctx, whole_path=True)
        num_unreported = uses.finish(self._cache, ctx.memory, bool(path))
        self._report_uses(ctx, num_unreported)
        if not self.store_mode.is_compiled:
            self.store_mode.finished(ctx, num_unreported)
        if self.admission is not None and ctx.num_observations > 1:
            # The rule counted the path in parts, so the tail is more recent than the head.
            self.admission.refresh(ctx.keys())
        self.queue.leave(ctx)
        ctx.finished = True

    def touch(self, keys: Sequence[bytes], ctx: RequestContext | None = None) -> None:
        """Report the use of a request's whole prefix to the policy now, not only in `finish_request`.

        `keys` includes blocks that another tier or the device has served.

        The admission rule also counts absent blocks. A second touch of a block by the same request changes
        nothing. If `ctx` is None, every call counts as a separate access.
        """
        self._use(keys, self._context(ctx))

    # ---- lookup

    def lookup(self, keys: Sequence[bytes], ctx: RequestContext | None = None) -> PrefixLookup:
        """Return the number of leading ready blocks, and the state of the next block.

        Does not affect the eviction order. Cost: one index probe for each key up to the first block that is
        not ready.
        """
        if ctx is None or ctx.owner is not self or ctx.finished or ctx.unpacked_keys:
            ctx = self._context(ctx)
        batch = keys if type(keys) is list else batch_of(keys, self.key_bytes)
        while (ready := lookups.lookup(self._cache, ctx.memory, batch)) < AGAIN:
            ctx.make_room(keys, ready)
        if ready < 0:
            return PrefixLookup(~ready, LookupResult.HIT_PENDING)
        usual = ALL_READY if ready == len(keys) else THEN_MISS
        return usual[ready] if ready < len(usual) else PrefixLookup(ready, usual[0].stopped_by)

    def contains(self, keys: Sequence[bytes], ctx: RequestContext | None = None) -> npt.NDArray[np.bool_]:
        """Return a mask of the blocks that are ready or in flight. Shape ``(len(keys),)``, bool.

        Does not affect the eviction order.
        """
        is_present: npt.NDArray[np.bool_] = self._slots(keys, ctx) != ABSENT
        return is_present

    def slots_of(self, keys: Sequence[bytes]) -> SlotArray:
        """Return the slot of each block; -1 for an absent block. A block in flight has a slot, too.

        Does not affect the eviction order. Needed by tiers whose bytes are not in RAM.
        """
        return self._slots(keys, None)

    def ready_slots_of(self, keys: Sequence[bytes]) -> SlotArray:
        """Return the slot of each ready block; -1 for a block that is absent or in flight."""
        slots = self.slots_of(keys)
        slots[(slots != ABSENT) & (self.slots.ref_cnt[slots] < 0)] = ABSENT
        return slots

    def lookup_key(self, key: bytes, ctx: RequestContext | None = None) -> LookupResult:
        """Return the state of one block, for engines that look up single keys. Cost: one index probe."""
        state = lookups.state_of_key(self._cache, key)
        if state == AGAIN:
            raise ValueError(f"key {key.hex()} has {len(key)} bytes; all keys here have {self.key_bytes}")
        if ctx is not None:
            if ctx.finished or ctx.owner is not self:
                self._context(ctx)
            # Packed later, in a batch: packing a single key costs more than the lookup.
            ctx.unpacked_keys.append(key)
            if len(ctx.unpacked_keys) >= 4096:
                self._flush(ctx)
        return _RESULTS[state]

    def count_misses(self, ctx: RequestContext, start: int, keys: Sequence[bytes] | None = None) -> int:
        """Count the blocks that a request must compute, by the reason of the miss (`stats().misses`).

        Call this method when a request stops waiting for blocks. Leading blocks that can be loaded are not
        counted. The reason of an absent block is the block's last recorded event, such as ``evicted``. A
        block without an event counts as ``never_seen``, or as ``unknown`` if the record may have dropped the
        event. Without `explain_misses` every absent block counts as ``unknown``.

        Args:
            ctx: the request.
            start: number of leading blocks of the path that need not be computed; ignored with `keys`.
            keys: blocks to count, in prefix order; None to count the path from `start` on.

        Returns:
            The number of counted blocks.

        Cost: two CPU cache misses for each absent block. In a long run of blocks with the same reason, only
        every eighth block is looked up.
        """
        ctx = self._context(ctx)
        start = check_integer("start", start, MAX_POSITIONS, 0)
        count, first = (ctx.length - start, start) if keys is None else (len(ctx.extend(keys)), -1)
        return misses.count_misses(self._cache, ctx.memory, first, count, self.miss_counts)

    def note_absent(self, keys: Sequence[bytes], event: int) -> None:
        """Record that the blocks `keys` are absent because of `event`, a code of `miss_record`."""
        misses.note_absent(self._cache, self.pack(keys).words, event)

    @property
    def miss_record(self) -> MissRecord:
        """The record of the last events of absent blocks. Empty without `explain_misses`."""
        return self._state.misses

    def pack(self, keys: Sequence[bytes]) -> Keys:
        """Convert a list of keys to `Keys`. Raises `ValueError` if a key does not have `key_bytes` bytes."""
        if isinstance(keys, Keys):
            if keys.key_bytes != self.key_bytes:
                raise ValueError(f"keys of {keys.key_bytes} bytes; all keys here have {self.key_bytes}")
            return keys
        return Keys.pack(keys, self.key_bytes)

    # ---- load

    def prepare_load(self, keys: Sequence[bytes], ctx: RequestContext | None = None) -> LoadPlan:
        """Pin ready blocks until `complete_load`.

        Raises:
            MisuseError: a block is not ready. The error names its key, and nothing is pinned.
        """
        plan = self._pin(keys, ctx, "prepare_load")
        if self._follows_device:
            self.store_mode.observe(plan.request)
        return plan

    def complete_load(self, plan: LoadPlan, damaged: Sequence[int] | npt.NDArray[np.integer] = ()) -> None:
        """Unpin the blocks of a load that has ended, successful or not.

        Args:
            plan: from `prepare_load`.
            damaged: rows of the plan whose blocks have wrong bytes. These blocks are forgotten and become
                misses.
        """
        self._unpin(plan, damaged, "complete_load")
        if self._follows_device and plan.epoch == self._epoch:
            request = plan.request
            if num_new := loads.loaded(self._cache, request.memory, plan.memory):
                self.store_mode.used(*request.used(num_new))

    def pin(self, keys: Sequence[bytes]) -> LoadPlan:
        """Pin ready blocks until `unpin`, for a write to another tier.

        Unlike `prepare_load`, a pin counts neither as a use nor as a load.
        """
        return self._pin(keys, None, "pin")

    def pin_ready(self, keys: Sequence[bytes]) -> tuple[LoadPlan, npt.NDArray[np.intp]]:
        """Pin the ready blocks among `keys`, as `pin` does.

        Returns the plan and the rows of `keys` that are pinned.
        """
        batch = self.pack(keys)
        rows = np.flatnonzero(self.ready_slots_of(batch) != ABSENT)
        return self.pin(batch.take(rows)), rows

    def unpin(self, plan: LoadPlan, damaged: Sequence[int] | npt.NDArray[np.integer] = ()) -> None:
        """Remove the pins that `pin` has set. `damaged`: as for `complete_load`."""
        self._unpin(plan, damaged, "unpin")

    def discard(self, keys: Sequence[bytes]) -> int:
        """Forget the ready blocks among `keys`; return their number.

        A pinned block becomes a miss at once; its slot is reused when the last pin is released.
        """
        batch = self.pack(keys)
        return self._discard(batch, np.full(len(batch), ABSENT, np.int32))

    # ---- store

    def prepare_store(
        self, keys: Sequence[bytes], ctx: RequestContext | None = None, *, admitted: bool = False
    ) -> StorePlan | None:
        """Choose the offered blocks to store, assign slots to them, and evict other blocks if there are too
        few free slots.

        Blocks that are resident or in flight are skipped. The plan contains the missing blocks before the
        first block that the admission rule or the policy refuses or that has no room. In a victim tier, rule
        and policy decide on each block separately. Blocks of this request are not evicted. The new blocks are
        in flight until `complete_store`.

        Args:
            keys: the offered blocks, in prefix order.
            ctx: the request that offers the blocks.
            admitted: True if the admission rule and the policy must accept all blocks, for example because
                they are promoted from another tier.

        Returns:
            The plan. It has no keys if there is nothing to store. The result is None if there is no room for
            any missing block, because every slot is pinned, in flight, used by this request, or protected by
            a quota. Then nothing is stored or evicted, and the same offer may succeed later.
        """
        if ctx is None or ctx.owner is not self or ctx.finished or ctx.unpacked_keys:
            ctx = self._context(ctx)
        batch = keys if type(keys) is list else batch_of(keys, self.key_bytes)
        cache, plan = self._cache, blank_store(len(keys), self.key_bytes)
        kept = blank_store(len(keys), self.key_bytes) if self._follows_device else plan
        enters = stores.BY_ALL if admitted else 0 if self.policy_may_refuse else stores.BY_POLICY
        step = stores.ALL if self.store_mode.is_compiled else stores.OFFER
        while (stored := stores.prepare_store(cache, ctx.memory, batch, plan, kept, step, enters)) < AGAIN:
            ctx.make_room(keys, stored)
        if step == stores.OFFER and stored >= 0:
            offered = Entering.over(plan)
            stored = self.store_mode.store(ctx, offered, Entering.over(kept), enters, admitted)
        if stored < 0:
            if stored == NO_ROOM:
                return None
            raise self.store_mode.wrong_victim(plan, FIRST_WRONG - stored)
        store_plan = StorePlan(ctx, plan, stored, self._epoch)
        if self._events is not None and store_plan.num_evicted:
            self._events.add(store_plan.evicted, removed=True)
        return store_plan

    def keep(self, keys: Sequence[bytes]) -> int:
        """Record that the device dropped these blocks without offering them; return how many of them are
        absent here.

        Called for a victim tier. The resident blocks among `keys` are no longer duplicates and return to the
        policy's order.
        """
        ctx, cache, batch = self._context(None), self._cache, batch_of(keys, self.key_bytes)
        new, kept = (blank_store(len(keys), self.key_bytes) for _ in range(2))
        while (result := stores.prepare_store(cache, ctx.memory, batch, new, kept, stores.KEEP, 1)) < AGAIN:
            ctx.make_room(keys, result)
        self.store_mode.keep(Entering.over(kept), ctx)
        return Entering.over(new).num_missing

    def complete_store(self, plan: StorePlan, success: bool = True) -> None:
        """End a store. After success the stored blocks are readable. After a failure the slots of the plan
        are free.

        All copies into the slots of the plan must have ended before this call.
        """
        if not self._close(plan, StorePlan, "complete_store"):
            return
        if plan.epoch != self._epoch:
            # A `reset` has forgotten the blocks.
            self.slots.release(plan.slots)
            if len(holds := self._state.holds):
                holds[plan.slots] = 0
        elif success:
            blocks.become_ready(self._cache, plan.memory)
            if self._events is not None and plan.num_stored:
                self._events.add(plan.keys, removed=False)
        else:
            self.policy.remove(plan.slots)
            blocks.abandon(self._cache, plan.memory)

    # ---- the whole cache

    def set_tenants(self, quotas: Mapping[str, Quota]) -> None:
        """Replace the quotas of all tenants. Evicts nothing; later stores follow the new quotas.

        The tenant of a request is the `tenant` of the hints that `begin_request` received. It is ``other`` if
        `quotas` does not name this tenant, or if the request began before the first call. ``other`` can have
        a quota, too. A block belongs to the tenant that stored the block, even while requests of other
        tenants use it.

        Rules for a store; the policy chooses among the permitted victims:

        - A store may evict blocks of another tenant only if this tenant would keep its minimum in the worst
          case, when all victims of the store are blocks of this tenant.
        - While a tenant is below its minimum, its stores evict blocks of other tenants first, and the policy
          must accept all its new blocks.
        - While a tenant is at its maximum, its stores evict only its own blocks, even while slots are free.

        Args:
            quotas: mapping: name of a tenant -> quota. The sum of the minimums must not exceed the number of
                usable slots; during a resize, this is the number after the resize.

        Raises: `ConfigError` for invalid quotas; then the old quotas stay. Cost: O(blocks).
        """
        self._tenants.set(quotas, self._wanted_blocks)
        if not self._state.has_tenants:
            if not quotas:
                return
            self._state.exchange("tenants", Tenants(self.capacity_blocks))
            self._state.has_tenants = 1
        tenants = self._state.tenants
        tenants.recount(self.slots.filled(), self.slots.idle())
        self._tenants.write(tenants)

    def disown(self) -> None:
        """Remove the owner of all blocks. Call this after the first `set_tenants`.

        Needed if the blocks come from an earlier run, because then the tenants that stored them are unknown.
        Stores evict blocks without an owner first. The first tenant that loads a block without an owner
        becomes the block's owner. Cost: O(blocks).
        """
        tenants, nobody = self._state.tenants, self._tenants.nobody()
        tenants.owner[self.slots.filled()] = nobody
        tenants.orphans |= 1 << nobody
        tenants.recount(self.slots.filled(), self.slots.idle())
        self._tenants.write(tenants)

    def set_tenant(self, ctx: RequestContext, tenant: str) -> None:
        """Set the tenant of a request's later loads and stores. Replaces ``hints.tenant``."""
        if self._state.has_tenants:
            ctx.set_tenant(self._tenants.number(tenant))

    def owners_of(self, slots: SlotArray) -> list[str]:
        """Return the name of the tenant that owns the block in each slot.

        Without quotas all names are ``other``.
        """
        if not self._state.has_tenants:
            return [OTHER] * len(slots)
        return [self._tenants.name(number) for number in self._state.tenants.owner[slots].tolist()]

    @property
    def tenants(self) -> dict[str, Quota]:
        """The quotas, by name of the tenant."""
        return dict(self._tenants.quotas)

    def reset(self, *, drop_in_flight: bool = False) -> None:
        """Forget every block, the policy's order and ghosts, and the admission rule's counts.

        A slot in use by a transfer stays reserved until the transfer ends. The record of misses is kept, and
        the forgotten blocks get the reason ``reset``. The counters of `stats` are not reset. Cost:
        O(capacity).

        Args:
            drop_in_flight: True if the caller guarantees that no transfer is in flight. Then all slots are
                free at once, and a later `complete_load` or `complete_store` of an old plan does nothing.
        """
        ready = self.slots.ready()
        self._state.discarded += len(ready)
        if len(ready) and self._events is not None:
            self._events.add(self.index.keys_at(ready), removed=True)
        self._epoch += 1
        if drop_in_flight:
            self._void_before = self._epoch
        if self._state.misses.num_entries:
            self.note_absent(self.index.keys_at(self.slots.filled()), RESET)
        self.slots.reset(drop_in_flight=drop_in_flight)
        if self._state.has_tenants:
            self._state.tenants.recount(_NO_ROWS, _NO_ROWS)
        self.index.clear()
        self.store_mode.reset()
        if self.admission is not None:
            self.admission.reset()

    @property
    def memory(self) -> Any:
        """The manager's `Cache` struct, in the form in which compiled kernels accept it."""
        return self._cache

    @property
    def epoch(self) -> int:
        """The number of resets. A store whose plan has an earlier epoch stores nothing."""
        return self._epoch

    def take_events(self) -> list[OffloadingEvent]:
        """Return the events since the last call, in order.

        All events since the manager's creation together give the set of readable blocks.
        """
        return [] if self._events is None else self._events.take()

    def stats(self) -> ManagerStats:
        """Return a copy of the counters, the number of slots in each state, and the policy's statistics.

        Cost: O(1).
        """
        stats = self.counters()
        stats.policy = self.policy.stats()
        stats.misses = by_reason(self.miss_counts)
        if self._state.has_tenants:
            stats.tenants = self._tenants.stats(self._state.tenants)
        return stats

    def counters(self) -> ManagerStats:
        """Return the same as `stats`, but with empty `policy`, `misses` and `tenants`.

        Meant for frequent calls. Cost: 3 us.
        """
        return ManagerStats.of(self._state, self.slots)

    # ---- another policy

    def prepare_policy_change(self, policy: str | type[EvictionPolicy]) -> PolicyChange:
        """Create another policy for `begin_policy_change`. Changes nothing.

        Thread: any. Cost: O(capacity), and seconds if the policy's kernels must be compiled.

        Raises: `ConfigError` for an unknown policy.
        """
        from kvoffload.core.policy_change import PolicyChange  # its kernels take seconds to compile

        return PolicyChange(policy, self.policy, POLICIES.find(policy)(self.index), self._follows_device)

    def begin_policy_change(self, change: PolicyChange) -> None:
        """Begin to replace the policy. Nothing is evicted, and no block moves.

        Calls of `advance_policy_change` add the blocks to the new policy, coldest first. Until the new policy
        has all blocks, the old policy decides. Blocks that are used or stored during the change are added
        last. The old policy's counts, ghosts and learnt parameters are lost. A `reset` does not stop the
        change. If one of the two policies is in Python, `begin_policy_change` itself completes the change.

        Cost: O(1); O(blocks) if a policy is in Python. The first `advance_policy_change` costs O(blocks) if
        the old policy has neither `ordered_lists` nor `ordered_heap`.

        Raises: `MisuseError` during another change, or if the current policy is not the policy from which
        `change` was prepared.
        """
        if self._change is not None or change.old is not self.policy:
            raise MisuseError(f"policy {change.new.name}: the policy is changing, or has changed since")
        change.new.resized(self.usable_blocks)
        if change.handover is not None:
            change.bind()
            self._change = change
            self._decide_by(change.handover)
            return
        ordered = self.slots.filled()
        if self._follows_device:
            ordered = ordered[self._state.duplicates.links[ordered, LIST] == UNLISTED]
        change.adopt_all(self._state, ordered)
        self._complete_policy_change(change)

    def advance_policy_change(self, num_blocks: int = 256) -> bool:
        """Continue a change of the policy; return True while the change is incomplete.

        Call this method regularly while it returns True, for instance once a scheduler step.

        Args:
            num_blocks: approximate number of blocks that this call adds to the new policy, 1 us each. If
                requests use blocks faster than calls add them, later calls add more, so that the change ends.
        """
        change, num_blocks = self._change, check_integer("num_blocks", num_blocks, MAX_POSITIONS, 0)
        if change is not None and change.advance(self._state, num_blocks):
            self._complete_policy_change(change)
        return self._change is not None

    def _complete_policy_change(self, change: PolicyChange) -> None:
        self._change = None
        self._state.exchange("known", change.known)
        self._decide_by(change.new)

    # ---- another size

    @property
    def usable_blocks(self) -> int:
        """Number of usable slots, at most `capacity_blocks`. A resize changes this number in steps
        (`advance_resize`).
        """
        return self.capacity_blocks - self.slots.num_unused

    def begin_resize(self, num_blocks: int) -> None:
        """Begin to change the number of usable slots to `num_blocks`; `advance_resize` does the work.

        To remove slots, the manager first takes free slots, then evicts blocks that the policy chooses.
        Pinned blocks, blocks in flight and the minimums of tenants are protected. If only such blocks are
        left, the resize waits until other blocks are evictable. The lists and ghosts of policies keep the
        sizes that follow from `capacity_blocks`.

        Raises:
            ConfigError: `num_blocks` is below 1, above `capacity_blocks`, or below the sum of all minimums.

        Cost: O(1).
        """
        check_integer("num_blocks", num_blocks, self.capacity_blocks)
        check_quotas(self._tenants.quotas, num_blocks)
        self._wanted_blocks = num_blocks

    def advance_resize(self, num_blocks: int = 256) -> bool:
        """Continue a resize; return True while the resize is incomplete.

        Call this method regularly while it returns True, for instance once a scheduler step.

        Args:
            num_blocks: largest number of blocks to evict in this call; larger values than `MOST_UNSEEN` have
                the effect of `MOST_UNSEEN`. In addition, the call adds or removes up to ``32 * num_blocks``
                free slots. Cost: 1 us for each evicted block.

        Raises: `PolicyError`, as `prepare_store`.
        """
        before, num_blocks = self.usable_blocks, check_integer("num_blocks", num_blocks, MAX_POSITIONS, 0)
        excess, most_free = before - self._wanted_blocks, 32 * num_blocks
        if excess < 0:
            readmit(self.slots.memory, min(-excess, most_free))
        elif excess > 0:
            excess -= retire(self.slots.memory, min(excess, most_free))
            if excess and not self.slots.num_free:
                self._shrink(min(excess, num_blocks, MOST_UNSEEN))
        usable, change = self.usable_blocks, self._change
        if usable != before:
            for policy in (self.policy,) if change is None else (change.old, change.new):
                policy.resized(usable)
        return usable != self._wanted_blocks

    def _shrink(self, num_blocks: int) -> None:
        keys, memory = unseen_keys(self.key_bytes)[:num_blocks], blank_store(num_blocks, self.key_bytes)
        ctx = RequestContext("", self.key_bytes, self, room_for(num_blocks))
        cache, mode, step = self._cache, self.store_mode, stores.SHRINK
        evicted = stores.prepare_store(cache, ctx.memory, keys.words, memory, memory, step, stores.BY_ALL)
        if evicted > 0 and not self._state.replace:
            victims.give(cache, ctx.memory, memory)
            mode.choose(Entering.over(memory), ctx)
            step = stores.SHRINK_CHOSEN
            evicted = stores.prepare_store(cache, ctx.memory, [], memory, memory, step, stores.BY_ALL)
            if evicted > 0:
                self.policy.remove(Entering.over(memory).slots[:evicted])
        if evicted < 0:
            raise mode.wrong_victim(memory, FIRST_WRONG - evicted)
        if evicted and self._events is not None:
            self._events.add(StorePlan(ctx, memory, evicted, self._epoch).evicted, removed=True)

    def refuse_only_if_asked(self) -> None:
        """Set `refuses_unasked` to False: from now on the policy refuses blocks only if the user has set its
        `write_cost`.
        """
        self.refuses_unasked = False
        self.policy_may_refuse = self._may_refuse(self.policy)

    # ---- private

    num_members = 1
    """Number of engines that share these blocks."""
    not_ready_error: ClassVar[type[MisuseError]] = MisuseError
    """Raised by `prepare_load` and `pin` for a block that is not ready."""

    def _decide_by(self, policy: EvictionPolicy) -> None:
        """Let `policy` decide from now on. All resident blocks must already be in the policy's order."""
        self.policy, self.policy_may_refuse = policy, self._may_refuse(policy)
        self.store_mode.decide_by(policy)
        self._state.tenants.marks.fill(0)  # places in the lists of the old policy

    def _may_refuse(self, policy: EvictionPolicy) -> bool:
        return policy.refuses and (self.refuses_unasked or policy.write_cost is not None)

    def _context(self, ctx: RequestContext | None) -> RequestContext:
        if ctx is None:
            ctx = RequestContext("", self.key_bytes, self)
            ctx.set_number(NO_REQUEST)
            return ctx
        if ctx.owner is not self:
            raise MisuseError(f"request {ctx.request_id!r} was begun by another manager")
        if ctx.finished:
            raise MisuseError(f"request {ctx.request_id!r} has finished")
        if ctx.unpacked_keys:
            self._flush(ctx)
        return ctx

    def _flush(self, ctx: RequestContext) -> None:
        ctx.flush()
        call_log.log_call(self._cache, ctx.memory, Call.EXTEND, 0, 0)

    def _pin(self, keys: Sequence[bytes], ctx: RequestContext | None, call: str) -> LoadPlan:
        if ctx is None or ctx.owner is not self or ctx.finished or ctx.unpacked_keys:
            ctx = self._context(ctx)
        batch = keys if type(keys) is list else batch_of(keys, self.key_bytes)
        plan = blank_load(len(keys))
        is_load = call == "prepare_load"
        while (pinned := loads.pin(self._cache, ctx.memory, batch, plan, is_load)) < AGAIN:
            ctx.make_room(keys, pinned)
        if pinned < 0:
            raise self.not_ready_error(f"{call} of a block that is not ready: key {keys[~pinned].hex()}")
        return LoadPlan(ctx, keys, plan, self._epoch)

    def _unpin(self, plan: LoadPlan, damaged: Sequence[int] | npt.NDArray[np.integer], call: str) -> None:
        rows = np.unique(np.asarray(damaged, np.int32)) if len(damaged) else _NO_ROWS
        if len(rows) and not 0 <= rows[0] <= rows[-1] < len(plan):
            raise MisuseError(f"{call}: damaged rows {rows.tolist()} of a plan of {len(plan)} blocks")
        if not self._close(plan, LoadPlan, call):
            return
        if len(rows):
            self._state.log.put(Call.DAMAGED, 0, rows)
        is_load = call == "complete_load"
        if is_load and self._state.has_tenants:
            tenant = self._state.member or plan.request.tenant
            self._state.tenants.loaded[tenant] += len(plan) - len(rows)
        if loads.unpin(self._cache, plan.memory, is_load):
            self.slots.num_evictable -= self.slots.release(plan.slots)
        if len(rows):
            if is_load:
                self._state.loaded -= len(rows)
            self._discard(plan.keys.take(rows), plan.slots[rows])

    def _close(self, plan: LoadPlan | StorePlan, kind: type, call: str) -> bool:
        """Mark a plan as completed. Return False if a `reset` with `drop_in_flight` has made the plan void.

        Raises: `MisuseError` if the plan is completed already, of another kind, or from another manager.
        """
        if not isinstance(plan, kind):
            raise MisuseError(f"{call} of a {type(plan).__name__}: it takes a {kind.__name__}")
        if plan.request.owner is not self:
            raise misuse(plan, call, "belongs to another manager")
        complete(plan, call)
        return plan.epoch >= self._void_before

    def _use(self, keys: Sequence[bytes], ctx: RequestContext, *, whole_path: bool = False) -> None:
        batch = batch_of(keys, self.key_bytes)
        while (num_used := uses.touch(self._cache, ctx.memory, batch, whole_path)) < AGAIN:
            ctx.make_room(keys, num_used)
        self._report_uses(ctx, num_used)

    def _report_uses(self, ctx: RequestContext, num_used: int) -> None:
        """Report references and uses to a policy or an admission rule in Python.

        The kernels have already reported them to a compiled policy.
        """
        if not self.store_mode.is_compiled:
            self.store_mode.observe(ctx)
        if num_used:
            self.store_mode.used(*ctx.used(num_used))

    def _slots(self, keys: Sequence[bytes], ctx: RequestContext | None) -> SlotArray:
        ctx = self._context(ctx)
        positions, slots = ctx.extend(keys), np.empty(len(keys), np.int32)
        lookups.resolve(self._cache, ctx.memory, positions, slots)
        return slots

    def _discard(self, batch: Keys, slots: SlotArray) -> int:
        num_removed = blocks.discard(self._cache, batch.words, slots)
        slots = slots[:num_removed]
        if num_removed:
            if self._events is not None:
                self._events.add(self.index.keys_at(slots), removed=True)
            self.store_mode.removed(slots)
            self.slots.condemn(slots)
        return num_removed
