"""The life-cycle of a block: the one place that decides what a cache of blocks holds.

Owns the index, the slots, the events and the counters. Asks a policy which blocks leave and an admission rule
which may enter. Moves no bytes and does no I/O: its plans say what to copy where; the caller copies, and
reports the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import numpy as np
import numpy.typing as npt

from kvoffload.core import kernels
from kvoffload.core.admission import DEFAULT_ADMISSION, Admission, create_admission
from kvoffload.core.on_compute import OnCompute
from kvoffload.core.on_device_eviction import OnDeviceEviction
from kvoffload.core.plans import (
    ON_COMPUTE,
    ON_DEVICE_EVICTION,
    STORES,
    LoadPlan,
    LookupResult,
    ManagerStats,
    OffloadingEvent,
    PrefixLookup,
    StorePlan,
)
from kvoffload.core.policy import DEFAULT_POLICY, POLICIES, EvictionPolicy
from kvoffload.core.protection import Protected
from kvoffload.core.request import RequestContext
from kvoffload.core.slots import SlotArray, Slots
from kvoffload.errors import ConfigError, MisuseError, PolicyError
from kvoffload.structures.index import ABSENT, MAX_POSITIONS, Index
from kvoffload.structures.keys import MAX_KEY_BYTES, Keys

_INT32, _UINT64 = np.dtype(np.int32), np.dtype(np.uint64)
_NO_ROWS = np.empty(0, np.int32)
_UNNAMED = -2
_RESTORED_REQUEST = 1024
"""An order is restored in batches of this many blocks: for some policies a long batch takes long."""
_RESULTS = (LookupResult.MISS, LookupResult.HIT, LookupResult.HIT_PENDING)
"""Indexed by what `kernels.state_of_key` returns."""


class OffloadingManager:
    """Keeps track of which blocks a tier holds, and decides which it keeps.

    A block's life: `prepare_store` gives it a slot, `complete_store` makes it readable, `prepare_load`
    pins it while it is read and `complete_load` unpins it, until it is evicted for another block. A request's
    uses are committed once, by `touch` or at the latest by `finish_request`.

    Every method takes a batch of keys as a list of ``bytes`` or as `Keys`. Batches are in prefix order.
    Single-threaded: all calls come from the scheduler's thread, and none of them blocks. Only the constructor
    and `reset` do work in proportion to the capacity.

    Args:
        capacity_blocks: number of slots.
        key_bytes: length of every key. vLLM's keys are a block hash and 4 more bytes.
        policy: which blocks leave: a name, ``module:Class``, or a subclass of `EvictionPolicy`. Parameters
            follow a name: ``s3fifo,small_share=0.2``.
        admission: which blocks may enter: ``all``, ``reuse:2``, ..., or an `Admission`.
        store: when blocks are offered: ``on-compute`` (as soon as the device has computed them; the tier
            then holds what the device holds, and more) or ``on-device-eviction`` (when the device drops
            them: a *victim* tier, which holds what the device does not).
        enable_events: whether events are recorded for `take_events`.
        medium: name of this tier in events.
        block_size: tokens in a block, for events.

    Attributes:
        index: key -> slot; slots: the state of each.
        policy, admission: the objects, for reports and audits.
        store_mode: how the manager uses its policy; chosen by `store`.
        policy_may_refuse: whether a policy that weighs blocks may refuse a new one.

    Raises:
        ConfigError: names the argument, its value and what is allowed.
        PolicyError: from `prepare_store`, when a policy breaks its contract. The manager is unchanged, but
            the policy's own order can no longer be trusted: `reset`, or stop.
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
    ) -> None:
        capacity_blocks = _check_integer("capacity_blocks", capacity_blocks, MAX_POSITIONS // 2)
        key_bytes = _check_integer("key_bytes", key_bytes, MAX_KEY_BYTES)
        self.capacity_blocks = capacity_blocks
        self.key_bytes = key_bytes
        self.medium = medium
        self.block_size = block_size
        self.index = Index(capacity_blocks, key_bytes).populate()
        self.policy = POLICIES.find(policy)(self.index)
        self.admission = create_admission(admission, key_bytes, capacity_blocks)
        if self.admission is not None and self.admission.key_bytes not in (None, key_bytes):
            raise ConfigError("admission", self.admission.key_bytes, f"its keys must have {key_bytes} bytes")
        if store not in STORES:
            raise ConfigError("store", store, f"allowed: {', '.join(STORES)}")
        self.policy_may_refuse = True
        self._policy_observes = type(self.policy).observe is not EvictionPolicy.observe
        self.slots = Slots(capacity_blocks)
        mode = OnDeviceEviction if store == ON_DEVICE_EVICTION else OnCompute
        self.store_mode = mode(self.policy, self.slots)
        self._events: list[OffloadingEvent] | None = [] if enable_events else None
        self._epoch = 0
        self._void_before = 0
        self._counts = ManagerStats(capacity=capacity_blocks)

    # ---- requests

    def begin_request(self, request_id: str, keys: Sequence[bytes] = ()) -> RequestContext:
        """Open the record of one inference request; pass it to every call made for that request.

        Args:
            request_id: for messages; need not be unique.
            keys: the request's whole prefix, if it is known. Give it if the device serves the head and only
                the rest is looked up here: a hit then refreshes the whole path from the root, and all of it
                is protected while the request stores.
        """
        ctx = RequestContext(request_id, self.key_bytes, self, max(32, len(keys)))
        if keys:
            ctx.extend(keys)
        return ctx

    def finish_request(self, ctx: RequestContext, path: Sequence[bytes] = ()) -> None:
        """Commit what the request used: its whole path at once. Transfers may still be in flight.

        `path` is the whole path in prefix order; give it if the calls for this request came in another order.

        Blocks that the request has already touched, or stored itself, are not accessed a second time; they
        only take their place in the order of the path.
        """
        ctx = self._context(ctx)
        ctx.flush()
        positions = ctx.extend(path) if path else np.arange(ctx.length, dtype=np.int32)
        self._commit(ctx, positions, whole_path=True)
        if self.admission is not None and ctx.num_observations > 1:
            # Counted in parts, the last part is the most recent: put the path in order.
            self.admission.refresh(ctx.keys())
        ctx.finished = True

    def touch(self, keys: Sequence[bytes], ctx: RequestContext | None = None) -> None:
        """Commit now that the request uses these blocks: its whole prefix, wherever it was served from.

        The admission rule counts absent blocks too. A second touch by the same request changes nothing.
        Without a request every call is an access of its own.
        """
        ctx = self._context(ctx)
        self._commit(ctx, ctx.extend(keys))

    # ---- lookup

    def lookup(self, keys: Sequence[bytes], ctx: RequestContext | None = None) -> PrefixLookup:
        """Length of the leading run of ready blocks, and what ended it. Changes no order.

        Cost: one index probe for each key up to the first that is not ready.
        """
        ctx = self._context(ctx)
        positions = ctx.extend(keys)
        index, path = self.index, ctx.path
        ready = kernels.leading_ready(
            index.table,
            index.keys,
            self.slots.ref_cnt,
            self.slots.version,
            path.keys,
            ctx.records,
            positions,
        )
        if ready < 0:
            return PrefixLookup(~ready, LookupResult.HIT_PENDING)
        return PrefixLookup(ready, LookupResult.HIT if ready == len(positions) else LookupResult.MISS)

    def contains(self, keys: Sequence[bytes], ctx: RequestContext | None = None) -> npt.NDArray[np.bool_]:
        """Which of these blocks are here, ready or in flight: shape ``(len(keys),)``. Changes no order."""
        ctx = self._context(ctx)
        found: npt.NDArray[np.bool_] = self._resolve(ctx, ctx.extend(keys)) != ABSENT
        return found

    def slots_of(self, keys: Sequence[bytes]) -> SlotArray:
        """The slot of each block that is here, ready or in flight, and -1 for the others. Changes no order.

        For tiers whose bytes are not in RAM.
        """
        ctx = self._context(None)
        return self._resolve(ctx, ctx.extend(keys))

    def ready_slots_of(self, keys: Sequence[bytes]) -> SlotArray:
        """As `slots_of`, but -1 also for blocks in flight."""
        slots = self.slots_of(keys)
        slots[(slots != ABSENT) & (self.slots.ref_cnt[slots] < 0)] = ABSENT
        return slots

    def lookup_key(self, key: bytes, ctx: RequestContext | None = None) -> LookupResult:
        """State of one block, for engines that ask key by key. Cost: one index probe."""
        if len(key) != self.key_bytes:
            raise ValueError(f"key {key.hex()} has {len(key)} bytes; all keys here have {self.key_bytes}")
        if ctx is not None:
            if ctx.finished or ctx.owner is not self:
                self._context(ctx)
            # Packed later, in a batch: to pack one key costs more than the lookup.
            ctx.unpacked_keys.append(key)
            if len(ctx.unpacked_keys) >= 4096:
                ctx.flush()
        return _RESULTS[kernels.state_of_key(self.index.table, self.index.keys, self.slots.ref_cnt, key)]

    def pack(self, keys: Sequence[bytes]) -> Keys:
        """`keys` as this manager reads them. Raises `ValueError` for keys of another length."""
        if isinstance(keys, Keys):
            if keys.key_bytes != self.key_bytes:
                raise ValueError(f"keys of {keys.key_bytes} bytes; all keys here have {self.key_bytes}")
            return keys
        return Keys.pack(keys, self.key_bytes)

    # ---- load

    def prepare_load(self, keys: Sequence[bytes], ctx: RequestContext | None = None) -> LoadPlan:
        """Pin blocks that `lookup` found ready, until `complete_load`.

        Raises:
            MisuseError: names the first key that is not ready; nothing is pinned.
        """
        ctx = self._context(ctx)
        plan = self._pin(keys, ctx, "prepare_load")
        if self.store_mode.learns_at_load:
            self._observe(ctx)
        return plan

    def complete_load(self, plan: LoadPlan, damaged: Sequence[int] | npt.NDArray[np.integer] = ()) -> None:
        """Unpin the blocks of a load that has ended, successful or not.

        Args:
            plan: from `prepare_load`.
            damaged: rows of the plan whose bytes were not what was stored. Those blocks are forgotten and are
                misses from now on.
        """
        num_damaged = self._unpin(plan, damaged, "complete_load")
        if plan.epoch >= self._void_before:
            self._counts.loaded += len(plan.slots) - num_damaged
        if plan.epoch == self._epoch:
            self.store_mode.loaded(plan.slots)

    def pin(self, keys: Sequence[bytes]) -> LoadPlan:
        """As `prepare_load`, for a reader that is not the device: nothing is learnt from it or counted.

        A block is pinned while it is written to a tier behind this one.
        """
        return self._pin(keys, self._context(None), "pin")

    def unpin(self, plan: LoadPlan, damaged: Sequence[int] | npt.NDArray[np.integer] = ()) -> None:
        """The end of a `pin`; `damaged` as for `complete_load`."""
        self._unpin(plan, damaged, "unpin")

    def discard(self, keys: Sequence[bytes]) -> int:
        """Forget ready blocks that cannot be trusted; returns how many were here.

        A block that is being read is forgotten at once too: it becomes a miss, and its slot is reused when
        the last pin is released.
        """
        batch = self.pack(keys)
        return self._discard(batch, np.full(len(batch), ABSENT, np.int32))

    # ---- store

    def prepare_store(
        self, keys: Sequence[bytes], ctx: RequestContext | None = None, *, admitted: bool = False
    ) -> StorePlan | None:
        """Choose which of the offered blocks are stored, give them slots, and name the blocks that leave.

        Blocks that are here or in flight are left out. Of the others the leading run that the admission rule
        admits is stored, as much of its head as there is room for. No block of this request is evicted for
        it. The blocks are in flight until `complete_store`.

        Args:
            keys: the blocks, in prefix order.
            ctx: the request that they belong to.
            admitted: they enter if there is room, and neither admission rule nor policy may refuse them:
                they are being promoted from a tier behind, or restored.

        Returns:
            The plan; its `keys` are empty if there was nothing to store. None if there is something to store
            and no room for any of it, because all blocks are pinned, in flight or this request's own: then
            nothing has changed, and the same offer may succeed later.
        """
        ctx = self._context(ctx)
        positions = ctx.extend(keys)
        index, path = self.index, ctx.path
        fresh = np.empty((len(positions), index.keys.shape[1]), _UINT64)
        rows = np.empty(len(positions), _INT32)
        num_fresh = kernels.missing(
            index.table, index.keys, self.slots.version, path.keys, ctx.records, positions, fresh, rows
        )
        room = self._room(num_fresh, ctx)
        if num_fresh and not room:
            self._counts.dropped += num_fresh
            return None
        if not self.store_mode.learns_at_load:
            self._observe(ctx)
        num_admitted = num_fresh
        if num_fresh and self.admission is not None and not admitted:
            num_admitted = self.store_mode.admit(self.admission, fresh[:num_fresh], rows[:num_fresh])
        count = min(num_admitted, room)

        slots = np.empty(count, _INT32)
        evicted = np.empty((max(0, count - self.slots.num_free), index.keys.shape[1]), _UINT64)
        num_refused = 0
        if count:
            enters = admitted or not self.policy_may_refuse
            protected = Protected(
                self.slots.ref_cnt, index, ctx, one_prefix=self.store_mode.one_prefix, admitted=enters
            )
            num_refused = self._place(
                ctx, positions, rows[:num_fresh], fresh[:count], slots, evicted, protected
            )
            if num_refused:
                slots, evicted = slots[:-num_refused], evicted[: len(evicted) - num_refused]
        num_stored = len(slots)
        if self.store_mode.takes_back and num_fresh < len(positions):
            held = self._resolve(ctx, positions)
            self._counts.kept += self.store_mode.keep(ctx, positions, held, rows[:num_stored])
        if num_refused and num_admitted > count:
            behind = rows[num_stored:num_admitted]
            behind[:] = np.roll(behind, -num_refused)
        self._counts.dropped += num_admitted - count
        self._counts.refused += num_fresh - num_admitted + num_refused
        return StorePlan(
            ctx,
            Keys(fresh if num_stored == len(fresh) else fresh[:num_stored], self.key_bytes),
            slots,
            rows if num_fresh == len(rows) else rows[:num_fresh],
            Keys(evicted, self.key_bytes),
            num_admitted - count,
            num_fresh - num_admitted + num_refused,
            self,
            self._epoch,
        )

    def complete_store(self, plan: StorePlan, success: bool = True) -> None:
        """End a store: its blocks become readable, or, if it failed, are forgotten and their slots freed.

        All copies into the plan's slots must have ended before this call.
        """
        if not self._close(plan, StorePlan, "complete_store"):
            return
        count = len(plan.slots)
        if plan.epoch != self._epoch:
            self.slots.release(plan.slots)
            return
        if success:
            self.slots.become_ready(plan.slots)
            self._counts.stored += count
            if self._events is not None and count:
                self._emit(plan.keys, removed=False)
        else:
            self.policy.remove(plan.slots)
            index = self.index
            kernels.abandon(index.table, index.keys, self.slots.version, plan.slots)
            self.slots.abandon(plan.slots)
            self._counts.store_failed += count

    def restore_uses(self, slots: SlotArray, used: npt.NDArray[np.bool_]) -> None:
        """Report the uses of restored blocks to the policy: for tiers that outlive their process.

        Args:
            slots: slots of ready blocks, the most recently used first.
            used: whether each was used after it was stored.
        """
        again, size = slots[used], _RESTORED_REQUEST
        for batch, is_use in ((again, True), (slots, False)):
            for start in reversed(range(0, len(batch), size)):
                part = batch[start : start + size]
                self.policy.access(part, np.full(len(part), is_use))

    # ---- everything at once

    def reset(self, *, drop_in_flight: bool = False) -> None:
        """Forget every block, order, ghost and count. Cost: O(capacity).

        Slots that a transfer still uses stay reserved until that transfer is completed.

        Args:
            drop_in_flight: the caller guarantees that no transfer is under way: all slots are free at once,
                and completing an old plan does nothing.
        """
        ready = self.slots.ready()
        self._counts.discarded += len(ready)
        if len(ready) and self._events is not None:
            self._emit(self.index.keys_at(ready), removed=True)
        self._epoch += 1
        if drop_in_flight:
            self._void_before = self._epoch
        self.slots.reset(drop_in_flight=drop_in_flight)
        self.index.clear()
        self.store_mode.reset()
        if self.admission is not None:
            self.admission.reset()

    def take_events(self) -> list[OffloadingEvent]:
        """Events since the last call, in order. Applied to a set of keys they give the readable blocks."""
        events = self._events or []
        if self._events is not None:
            self._events = []
        return events

    def stats(self) -> ManagerStats:
        """A copy of the counters, and the current use of the slots. Cost: O(1)."""
        stats = copy(self._counts)
        slots = self.slots
        stats.free, stats.writing, stats.ready = slots.num_free, slots.num_writing, slots.num_ready
        stats.evictable, stats.condemned = slots.num_evictable, slots.num_condemned
        stats.duplicates = self.store_mode.num_duplicates
        stats.policy = self.policy.stats()
        return stats

    # ---- inside

    def _context(self, ctx: RequestContext | None) -> RequestContext:
        if ctx is None:
            return RequestContext("", self.key_bytes, self)
        if ctx.owner is not self:
            raise MisuseError(f"request {ctx.request_id!r} was begun by another manager")
        if ctx.finished:
            raise MisuseError(f"request {ctx.request_id!r} has finished")
        return ctx

    def _pin(self, keys: Sequence[bytes], ctx: RequestContext, call: str) -> LoadPlan:
        batch = self.pack(keys)
        positions = ctx.extend(batch)
        index, path = self.index, ctx.path
        slots = np.empty(len(batch), np.int32)
        pinned = kernels.pin(
            index.table,
            index.keys,
            self.slots.ref_cnt,
            self.slots.version,
            path.keys,
            ctx.records,
            positions,
            slots,
        )
        if pinned < 0:
            raise MisuseError(f"{call} of a block that is not ready: key {batch[~pinned].hex()}")
        self.slots.num_evictable -= pinned
        return LoadPlan(ctx, batch, slots, self, self._epoch)

    def _unpin(self, plan: LoadPlan, damaged: Sequence[int] | npt.NDArray[np.integer], call: str) -> int:
        """Unpin the blocks of a plan and forget the damaged ones; returns how many are damaged."""
        rows = np.unique(np.asarray(damaged, np.int32)) if len(damaged) else _NO_ROWS
        if len(rows) and not 0 <= rows[0] <= rows[-1] < len(plan.slots):
            raise MisuseError(f"{call}: damaged rows {rows.tolist()} of a plan of {len(plan.slots)} blocks")
        if self._close(plan, LoadPlan, call):
            self.slots.unpin(plan.slots)
            if len(rows):
                self._discard(plan.keys.take(rows), plan.slots[rows])
        return len(rows)

    def _close(self, plan: LoadPlan | StorePlan, kind: type, call: str) -> bool:
        """Mark a plan as completed; False if a `reset` has made it void."""
        if not isinstance(plan, kind):
            raise MisuseError(f"{call} of a {type(plan).__name__}: it takes a {kind.__name__}")
        if plan.completed or plan.owner is not self:
            key = plan.keys[0].hex() if len(plan.keys) else "none"
            why = "is completed" if plan.completed else "belongs to another manager"
            raise MisuseError(f"{call} of a plan that {why}: request {plan.request_id!r}, key {key}")
        plan.completed = True
        return plan.epoch >= self._void_before

    def _commit(self, ctx: RequestContext, positions: SlotArray, *, whole_path: bool = False) -> None:
        index = self.index
        slots, reused = np.empty(len(positions), np.int32), np.empty(len(positions), np.bool_)
        found = kernels.access(
            index.table,
            index.keys,
            self.slots.version,
            ctx.path.keys,
            ctx.records,
            positions,
            whole_path,
            slots,
            reused,
        )
        self._observe(ctx)
        if found:
            self.store_mode.used(slots[:found], reused[:found])

    def _observe(self, ctx: RequestContext) -> None:
        """Report the request's blocks to policy and admission rule: each once a request."""
        start, stop = ctx.observed, ctx.length
        if start == stop or not (self._policy_observes or self.admission is not None):
            return
        ctx.observed = stop
        ctx.num_observations += 1
        if self._policy_observes:
            self.policy.observe(ctx.keys(), self._resolve(ctx, np.arange(start, stop, dtype=np.int32)), start)
        if self.admission is not None:
            self.admission.count(ctx.keys()[start:])

    def _resolve(self, ctx: RequestContext, positions: SlotArray) -> SlotArray:
        """The slot of the block at each of these path positions, or ABSENT."""
        index, slots = self.index, np.empty(len(positions), np.int32)
        kernels.resolve(
            index.table, index.keys, self.slots.version, ctx.path.keys, ctx.records, positions, slots
        )
        return slots

    def _room(self, wanted: int, ctx: RequestContext) -> int:
        """How many of `wanted` new blocks fit: free slots, and blocks that may be evicted."""
        short = wanted - self.slots.num_free
        if short <= 0:
            return wanted
        evictable = self.slots.num_evictable
        if short > evictable - ctx.length:
            index = self.index
            evictable -= kernels.own_evictable(
                index.table,
                index.keys,
                self.slots.ref_cnt,
                self.slots.version,
                ctx.path.keys,
                ctx.records,
                ctx.length,
            )
        return wanted if short <= evictable else self.slots.num_free + evictable

    def _place(
        self,
        ctx: RequestContext,
        positions: SlotArray,
        rows: SlotArray,
        fresh: npt.NDArray[np.uint64],
        slots: SlotArray,
        evicted: npt.NDArray[np.uint64],
        protected: Protected,
    ) -> int:
        """Give slots to blocks for which there is room: free slots first, then those of the policy's victims.

        Returns how many of them the policy refuses; those end up after the others, in all arrays.
        """
        index, path = self.index, ctx.path
        num_free = len(slots) - len(evicted)
        if len(evicted):
            slots.fill(_UNNAMED)
        slots[:num_free] = self.slots.next_free(num_free)
        num_refused = self.store_mode.choose(rows, fresh, slots, num_free, protected)
        num_stored = len(slots) - num_refused
        wrong = kernels.place(
            index.table,
            index.keys,
            self.slots.ref_cnt,
            self.slots.version,
            path.table,
            path.keys,
            ctx.records,
            positions,
            rows,
            slots[:num_stored],
            num_free,
            evicted[: num_stored - num_free],
        )
        if wrong >= 0:
            raise PolicyError(
                f"policy {self.policy.name!r} named slot {slots[wrong]} as the victim for key "
                f"{fresh[wrong].tobytes()[: self.key_bytes].hex()}: it is protected, absent, or was "
                f"named before"
            )
        num_evicted = num_stored - num_free
        if num_evicted:
            self.store_mode.evicted(slots[num_free:num_stored])
        self.slots.occupy(num_free, num_evicted)
        self._counts.evicted += num_evicted
        if self._events is not None and num_evicted:
            self._emit(Keys(evicted[:num_evicted], self.key_bytes), removed=True)
        return num_refused

    def _discard(self, batch: Keys, slots: SlotArray) -> int:
        index, ctx = self.index, self._context(None)
        positions = ctx.extend(batch)
        found = kernels.discard(
            index.table,
            index.keys,
            self.slots.ref_cnt,
            self.slots.version,
            ctx.path.keys,
            ctx.records,
            positions,
            slots,
        )
        slots = slots[:found]
        if found:
            self._counts.discarded += found
            if self._events is not None:
                self._emit(self.index.keys_at(slots), removed=True)
            self.store_mode.removed(slots)
            self.slots.condemn(slots)
        return found

    def _emit(self, keys: Keys, *, removed: bool) -> None:
        assert self._events is not None
        self._events.append(OffloadingEvent(keys, self.block_size, self.medium, removed))


def _check_integer(field: str, value: object, largest: int) -> int:
    """`value` as an int, numpy's integers included."""
    if isinstance(value, (int, np.integer)) and 1 <= value <= largest:
        return int(value)
    raise ConfigError(field, value, f"allowed: 1 to {largest}")
