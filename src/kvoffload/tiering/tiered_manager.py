"""RAM with tiers behind it, as one manager.

Passes the calls of an engine to RAM's manager, to promotion and to cascade. RAM's policy decides which blocks
leave RAM. Each tier's policy and admission rule decide which blocks the tier stores.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvoffload.core.hints import NO_HINTS, Hints
from kvoffload.core.manager import OffloadingManager
from kvoffload.core.miss_record import READY
from kvoffload.core.plans import LoadPlan, LookupResult, OffloadingEvent, PrefixLookup, StorePlan
from kvoffload.core.policy import EvictionPolicy
from kvoffload.core.request import RequestContext
from kvoffload.core.tenants import OTHER, Quota, TenantStats
from kvoffload.errors import ConfigError
from kvoffload.structures.keys import Keys
from kvoffload.tiering.cascade import Cascade
from kvoffload.tiering.lane import TieringCounts, TierLane
from kvoffload.tiering.misses import change_of
from kvoffload.tiering.promotion import MOST_DISTRUSTED, Promotion
from kvoffload.tiering.stack import TierStack, check_compute_s, check_stack
from kvoffload.tiering.wait import TierWait
from kvoffload.tiering.worth import break_even
from kvoffload.tiers.contract import Mask, Memory, SecondaryTier, TierStats

_LOG = logging.getLogger("kvoffload.tiering")
HIT, MISS, RETRY = LookupResult.HIT, LookupResult.MISS, LookupResult.RETRY
_SETTLE_SLICE_S, _SETTLE_PAUSE_S = 0.02, 0.0005
"""After a tier failed to drain, `settle` drains for at most 20 ms between two polls, then pauses 0.5 ms."""


class TieredManager:
    """A manager of RAM with tiers behind it, used like an `OffloadingManager`. Call `poll` once a step.

    **Cascade.** When the store of a block is complete, the block is offered to every tier. At the end of a
    request, the request's blocks in RAM are offered again to tiers that lack them. Each tier's policy and
    admission rule decide which offered blocks the tier writes. During the write, a block is pinned in RAM.
    Blocks for a busy tier are queued; if RAM evicts a queued block before the tier has room, the block is not
    written. No request waits for a write. A block that RAM refuses to store reaches no tier. Therefore RAM's
    policy refuses blocks only if ``write_cost`` is set.

    **Promote.** If a looked-up prefix continues in a tier, the manager reserves slots of RAM for the blocks
    that fit, and reads and verifies these blocks. Until the read ends, `lookup` returns RETRY. Then sound
    blocks are HIT, and failed blocks are MISS. Requests for the same blocks share one read. Neither RAM's
    admission rule nor RAM's policy can refuse a promoted block.

    **Probe.** The manager does not know which blocks a shared tier has. Therefore a lookup sends the tier one
    probe for the rest of the path. Until the answer arrives, `lookup` returns RETRY, for at most the tier's
    `probe_timeout_s` in all.

    **Slow and failing tiers.**

    - If a read is expected to take longer than computing its blocks, the read is shortened or skipped. Every
      10 s one such read runs in full, as a trial, to measure the tier's speed.
    - If several tiers have a block, it is read from the tier with the shortest expected read. While
      `recompute_s_per_block` is unknown, it is read from the first of these tiers.
    - A request waits for blocks no longer than computing them would take, and no longer than `deadline_s`.
      After that, `lookup` returns MISS instead of RETRY.
    - After three consecutive reads without a sound block, a tier is not read for 10 s.
    - If a job has run for more than four times `deadline_s`, its tier gets no new jobs until the job ends.
    - An exception of a tier counts as a miss and as a failure of the tier (`GuardedTier`).

    Args:
        capacity_blocks: number of RAM's slots. This and every keyword that is not listed here is an argument
            of `OffloadingManager`.
        ram: the memory of RAM's slots: a `MemoryTier`, with or without checksums.
        tiers: from the fastest to the slowest. The manager owns them from now on: `close` closes them.
        deadline_s: longest time that a request waits for tiers.
        recompute_s_per_block: seconds to compute a block; None while unknown. May be set at any time.
        max_in_flight: share of `usable_blocks` that the writes to all tiers together may pin; 1.0 for no
            limit. Slow tiers get smaller parts of the share. Reads may reserve the same share of slots, or
            twice the share if no other read runs, up to half of `usable_blocks`.
        clock: monotonic seconds.
        make_ram_manager: creates the manager of RAM; `NodeManager` for RAM that processes share.

    Attributes:
        ram_manager: the `OffloadingManager` of RAM.
        hit_blocks: number of loaded blocks by source: RAM, then each tier. If a load has a damaged block,
            only the blocks before it count.
        counts: counters of promotion and cascade.

    Thread: the scheduler's, see `OffloadingManager`. No call waits for a tier, except `settle`, `drain`,
    `flush`, `close`, and `reset` with `drop_in_flight`.
    Cost: while no tier is read, a call costs one Python call and one dictionary lookup more than the same
    call of an `OffloadingManager`.
    """

    def __init__(
        self,
        capacity_blocks: int,
        *,
        ram: Memory,
        tiers: Sequence[SecondaryTier],
        deadline_s: float = 2.0,
        recompute_s_per_block: float | None = None,
        max_in_flight: float = 0.25,
        enable_events: bool = False,
        clock: Callable[[], float] = time.monotonic,
        make_ram_manager: Callable[..., OffloadingManager] = OffloadingManager,
        **manager: Any,
    ) -> None:
        self.ram_manager = make_ram_manager(capacity_blocks, enable_events=enable_events, **manager)
        check_stack(self.ram_manager.capacity_blocks, ram, tiers, deadline_s, max_in_flight)
        # A block that RAM's policy refuses reaches no tier, so the user must enable refusal by `write_cost`.
        if tiers:
            self.ram_manager.refuse_only_if_asked()
        self._stack = TierStack(
            ram=self.ram_manager,
            memory=ram,
            lanes=[TierLane(tier, row, clock) for row, tier in enumerate(tiers)],
            in_flight_share=max_in_flight,
            deadline_s=deadline_s,
            compute_s=check_compute_s(recompute_s_per_block),
            clock=clock,
            counts=TieringCounts(),
        )
        self.lanes, self.counts = self._stack.lanes, self._stack.counts
        self.promotion, self._cascade = Promotion(self._stack), Cascade(self._stack)
        self.waits: dict[RequestContext, TierWait] = {}
        self._reports_events = enable_events
        self.hit_blocks = [0] * (1 + len(tiers))
        self._void_through = -1  # last epoch whose plans a `reset` has voided
        self._adopt(self.ram_manager)
        for lane in self.lanes:
            if enable_events:
                lane.tier.take_changes()  # the tier reports changes from the first call on
            if lane.tier.shared:
                text = break_even(lane.tier, recompute_s_per_block)
                _LOG.info("tier %s: %s", lane.tier.name, text)

    def _adopt(self, ram: OffloadingManager) -> None:
        """Take over the attributes and methods of RAM's manager that do not concern the tiers."""
        self.capacity_blocks, self.key_bytes = ram.capacity_blocks, ram.key_bytes
        self.index, self.slots, self.admission = ram.index, ram.slots, ram.admission
        self.medium, self.block_size, self.store_mode = ram.medium, ram.block_size, ram.store_mode
        self.touch, self.contains, self.pack, self.discard = ram.touch, ram.contains, ram.pack, ram.discard
        self.slots_of, self.ready_slots_of = ram.slots_of, ram.ready_slots_of
        self.prepare_load, self.pin, self.unpin = ram.prepare_load, ram.pin, ram.unpin
        self.pin_ready = ram.pin_ready
        self.keep, self.stats, self.counters = ram.keep, ram.stats, ram.counters
        self.miss_counts, self.miss_record = ram.miss_counts, ram.miss_record
        self.prepare_policy_change = ram.prepare_policy_change
        self.begin_policy_change = ram.begin_policy_change
        self.advance_policy_change = ram.advance_policy_change
        self.set_tenants = ram.set_tenants
        self.begin_resize, self.advance_resize = ram.begin_resize, ram.advance_resize

    def set_tier_tenants(self, tier: str, quotas: Mapping[str, Quota]) -> None:
        """Replace the quotas of a tier behind RAM, in blocks of the tier.

        See `OffloadingManager.set_tenants`.

        When RAM offers a block, the block's tenant in RAM becomes its tenant in the tier. Each tenant
        therefore needs a quota of RAM, which may be `Quota()`. A block that an earlier run wrote belongs to
        the first tenant that loads it. Until then, the tier evicts this block before other blocks.

        Raises: `ConfigError` for an unknown tier, a tenant without a quota of RAM, or a tier without support
        for quotas.
        """
        if tier not in self.tier_names:
            raise ConfigError("tier", tier, f"allowed: {', '.join(self.tier_names) or 'none'}")
        for name in quotas:
            if name != OTHER and name not in self.ram_manager.tenants:
                raise ConfigError(
                    "tenants", name, "a tenant of a tier needs a quota of RAM, which may be empty"
                )
        lane = self.lanes[self.tier_names.index(tier)]
        lane.tier.set_tenants(quotas, self._owner_of)
        lane.has_quotas |= bool(quotas)

    def _owner_of(self, keys: Keys) -> str:
        slots = self.ram_manager.slots_of(keys[:1])
        return self.ram_manager.owners_of(slots)[0] if slots[0] >= 0 else OTHER

    @property
    def policy(self) -> EvictionPolicy:
        """The policy of RAM."""
        return self.ram_manager.policy

    @property
    def usable_blocks(self) -> int:
        """Number of RAM's slots that the manager may fill now, see `OffloadingManager.usable_blocks`."""
        return self.ram_manager.usable_blocks

    @property
    def recompute_s_per_block(self) -> float | None:
        """Seconds to compute a block; None while unknown."""
        return self._stack.compute_s

    @recompute_s_per_block.setter
    def recompute_s_per_block(self, seconds: float | None) -> None:
        self._stack.compute_s = check_compute_s(seconds)

    # ---- requests

    def begin_request(
        self, request_id: str, keys: Sequence[bytes] = (), *, hints: Hints = NO_HINTS
    ) -> RequestContext:
        """Open a request, see `OffloadingManager.begin_request`."""
        ctx = self.ram_manager.begin_request(request_id, keys, hints=hints)
        self.waits[ctx] = wait = TierWait([lane.tier.begin_request(request_id) for lane in self.lanes])
        if self.promotion.trusts_no_tier:
            wait.left_out.update(range(len(self.lanes)))
        self._stack.extend_paths(ctx, wait)
        return ctx

    def finish_request(
        self, ctx: RequestContext, path: Sequence[bytes] = (), *, hints: Hints = NO_HINTS
    ) -> None:
        """Finish a request, see `OffloadingManager.finish_request`.

        The tiers are notified later: when all stores of the request are complete.
        """
        self.ram_manager.finish_request(ctx, path, hints=hints)
        self.promotion.ahead.pop(ctx, None)
        wait = self.waits.get(ctx)
        if wait is not None:
            wait.finished = True
            self._end_if_complete(ctx, wait)

    def expect(self, ctx: RequestContext) -> None:
        """Register a request that waits in the engine's queue, see `OffloadingManager.expect`.

        While the request waits, and no other read is in flight, the manager reads the request's blocks that
        are only in tiers into RAM.
        """
        self.ram_manager.expect(ctx)
        wait = self.waits[ctx]
        if len(wait.left_out) < len(self.lanes):
            self.promotion.ahead[ctx] = wait

    def withdraw(self, ctx: RequestContext) -> None:
        """Report that a request no longer waits in the queue, see `OffloadingManager.withdraw`."""
        self.ram_manager.withdraw(ctx)
        self.promotion.ahead.pop(ctx, None)

    def leave_out_tiers(self, ctx: RequestContext, *, shared: bool | None = None) -> None:
        """Exclude tiers from the loads of this request.

        Blocks that the request stores are still offered to all tiers.

        Args:
            shared: True to exclude only tiers that machines share, False to exclude only the other tiers,
                None to exclude all tiers.
        """
        left_out = self.waits[ctx].left_out
        left_out.update(lane.row for lane in self.lanes if shared in (None, lane.tier.shared))
        if len(left_out) == len(self.lanes):
            self.promotion.ahead.pop(ctx, None)

    def distrust(self, keys: Sequence[bytes]) -> None:
        """Forget these blocks in RAM and on disks, and load these blocks from no tier until a reset.

        Call this method for blocks whose bytes are wrong although the checksum is valid. Shared servers keep
        such blocks, and other processes may store them again. Therefore this process remembers the keys until
        a reset. After more than `MOST_DISTRUSTED` keys, nothing is loaded from tiers until the reset.
        """
        self.ram_manager.discard(keys)
        if not self.lanes:
            return
        for lane in self.lanes:
            lane.tier.delete(self.pack(keys))
        if self.promotion.distrust(keys):
            _LOG.error(
                "audits found %d wrong blocks: nothing is loaded from tiers until the cache is reset",
                MOST_DISTRUSTED,
            )
            for ctx in self.waits:
                self.leave_out_tiers(ctx)

    def source_of(self, key: bytes, ctx: RequestContext) -> int:
        """Return the source of a block for this request: 0 for RAM, otherwise the number of a tier, from 1.

        Call this method before the block's load is complete; afterwards the source is forgotten.
        """
        wait = self.waits.get(ctx)
        return wait.came_from.get(key, 0) if wait is not None else 0

    def restart_wait(self, ctx: RequestContext) -> None:
        """Restart a request's wait for tiers with the full `deadline_s`, even after a time-out."""
        wait = self.waits.get(ctx)
        if wait is not None:
            wait.restart()

    def has_promoted(self, ctx: RequestContext) -> bool:
        """Return True if the request has promoted blocks whose load is not complete."""
        wait = self.waits.get(ctx)
        return wait is not None and bool(wait.came_from)

    # ---- lookup and load

    def lookup(self, keys: Sequence[bytes], ctx: RequestContext | None = None) -> PrefixLookup:
        """Look up a prefix, see `OffloadingManager.lookup`, and start to promote its blocks from tiers.

        Returns RETRY while the request waits for the first block that is not in RAM: the block is being
        promoted, its tier has no room for another read, or a tier has not yet answered a probe of the block.
        If `ctx` is None, searches only RAM.
        """
        in_ram = self.ram_manager.lookup(keys, ctx)
        if in_ram.stopped_by is HIT or ctx is None or not self.lanes:
            return in_ram
        wait = self.waits[ctx]
        if len(wait.left_out) == len(self.lanes):
            return in_ram
        self._stack.extend_paths(ctx, wait)
        missing = self.pack(keys[in_ram.num_ready :])
        awaits_room = self.promotion.begin(missing, ctx, wait)
        if awaits_room or missing[0] in self.promotion.promoting:
            return PrefixLookup(in_ram.num_ready, self.promotion.result_for(missing, wait))
        if in_ram.stopped_by is MISS and self.promotion.awaits_probe(missing[0], wait):
            return PrefixLookup(in_ram.num_ready, RETRY)
        return in_ram

    def lookup_key(self, key: bytes, ctx: RequestContext | None = None) -> LookupResult:
        """Look up a block, see `OffloadingManager.lookup_key`.

        Returns RETRY if a tier has the block, or if the block's presence in a shared tier is unknown; after
        the request's time limit, returns MISS. The next `poll` starts one promotion and one probe for all
        such blocks of the request.
        """
        result = self.ram_manager.lookup_key(key, ctx)
        if result is HIT or ctx is None or not self.lanes:
            return result
        wait = self.waits[ctx]
        if len(wait.left_out) == len(self.lanes):
            return result
        if result is MISS and key not in wait.given_up:
            return self.promotion.request_key(key, ctx, wait)
        if key not in self.promotion.promoting:
            return result
        return self.promotion.result_for([key], wait)

    def count_misses(self, ctx: RequestContext, start: int, keys: Sequence[bytes] | None = None) -> int:
        """Count blocks that a request will compute, see `OffloadingManager.count_misses`.

        If a tier has a block that the request computes nevertheless, the reason is ``behind_a_gap`` if an
        earlier block of the prefix is neither in RAM nor in a tier, otherwise ``tier_gave_up``.
        """
        count = self.ram_manager.count_misses(ctx, start, keys)
        wait = self.waits.get(ctx)
        if count and wait is not None and len(wait.left_out) < len(self.lanes):
            batch = ctx.keys()[start:] if keys is None else self.pack(keys)
            codes = ctx.found(len(batch))
            in_tier = self._stack.below(batch, wait)[1] | self._given_up(batch, wait)
            self.miss_counts += change_of(codes, in_tier & (codes != READY))
        return count

    def _given_up(self, keys: Keys, wait: TierWait) -> Mask:
        """Return a mask of the blocks for whose promotion this request no longer waits."""
        late: Collection[bytes] = self.promotion.promoting if wait.gave_up else ()
        if not (late or wait.given_up):
            return np.zeros(len(keys), np.bool_)
        return np.array([key in late or key in wait.given_up for key in keys], np.bool_)

    def complete_load(self, plan: LoadPlan, damaged: Sequence[int] | npt.NDArray[np.integer] = ()) -> None:
        """End a load, see `OffloadingManager.complete_load`, and add its blocks to `hit_blocks`."""
        self.ram_manager.complete_load(plan, damaged)
        if plan.epoch <= self._void_through:
            return
        num_usable = min(damaged) if len(damaged) else len(plan.keys)
        self.hit_blocks[0] += num_usable
        wait = self.waits.get(plan.request)
        if wait is not None and wait.came_from:
            for key in plan.keys[:num_usable]:
                self.hit_blocks[0] -= 1
                self.hit_blocks[wait.came_from.pop(key, 0)] += 1

    # ---- store

    def prepare_store(
        self, keys: Sequence[bytes], ctx: RequestContext | None = None, *, admitted: bool = False
    ) -> StorePlan | None:
        """Begin a store, see `OffloadingManager.prepare_store`."""
        plan = self.ram_manager.prepare_store(keys, ctx, admitted=admitted)
        wait = self.waits.get(ctx) if ctx is not None else None
        if plan is not None and wait is not None:
            wait.num_storing += len(plan.keys)
        return plan

    def complete_store(self, plan: StorePlan, success: bool = True) -> None:
        """End a store, see `OffloadingManager.complete_store`, and offer its blocks to the tiers."""
        self.ram_manager.complete_store(plan, success)
        if plan.epoch <= self._void_through:
            return
        wait = self.waits.get(plan.request)
        if success and plan.completed and plan.epoch == self.ram_manager.epoch:
            if wait is not None:
                self._stack.extend_paths(plan.request, wait)
            self._cascade.offer_to_all(plan.keys, wait)
        if wait is not None:
            wait.num_storing -= len(plan.keys)
            self._end_if_complete(plan.request, wait)

    # ---- jobs

    def poll(self) -> bool:
        """Process the jobs that tiers have finished, and start new jobs. Call it once a step.

        Returns True while jobs are in flight. Cost: O(1) while there are no jobs.
        """
        for lane in self.lanes:
            if lane.jobs:
                for result in lane.tier.finished():
                    plan = lane.jobs.pop(result.job).plan
                    if isinstance(plan, LoadPlan):
                        self._cascade.end_write(lane, plan, result)
                        if (wrong := self.promotion.is_distrusted(plan.keys)).any():
                            lane.tier.delete(plan.keys.take(wrong))  # since the write began
                    elif isinstance(plan, StorePlan):
                        self.promotion.end_read(lane, plan, result)
                    else:
                        lane.probing.difference_update(plan)
        self._cascade.poll()
        self.promotion.poll()
        return self.has_jobs

    @property
    def has_jobs(self) -> bool:
        """True if a tier has a job, or will get one in the next `poll`.

        Jobs of a tier that is stuck (`GuardedTier.is_stuck`) do not count, because they may never end.
        """
        return bool(self.promotion.asking) or any(lane.has_jobs for lane in self.lanes)

    def settle(self, timeout_s: float) -> bool:
        """Wait until no job is in flight; return False on time-out. For tests, replays and shutdown.

        If a tier is stuck (`GuardedTier.is_stuck`), does not wait for the tier's jobs, and returns False.
        """
        until, slice_s = time.monotonic() + timeout_s, timeout_s / 10
        while self.poll():
            # In slices: a failed tier may never drain, while the other tiers still have work. Long slices at
            # first, because in a replay the size of the next offer must not depend on the speed of a disk.
            # `drain` may also succeed before the work is done, if a tier has no room or has lost results.
            if not self._stack.drain(min(until, time.monotonic() + slice_s)):
                slice_s = min(slice_s, _SETTLE_SLICE_S)
                time.sleep(min(_SETTLE_PAUSE_S, max(0.0, until - time.monotonic())))
            if time.monotonic() >= until:
                return not self.poll() and not any(lane.jobs for lane in self.lanes)
        return not any(lane.jobs for lane in self.lanes)

    def offer_all(self) -> None:
        """Queue all blocks of RAM for every tier that lacks them.

        Later calls of `poll` offer the blocks. `flush` also waits for the writes.
        """
        keys = self.index.keys_at(self.slots.ready())
        for lane in self.lanes:
            lane.waiting.update(dict.fromkeys(keys.take(~lane.tier.contains(keys))))

    def flush(self, timeout_s: float) -> bool:
        """Write each block of RAM to every tier that lacks the block and admits it.

        Call this method before a process or a machine stops, so that the blocks can be used after a restart.
        Returns False on time-out, or if a tier failed to write or dropped some of the blocks.
        """
        until, num_lost = time.monotonic() + timeout_s, self.num_lost()
        self.offer_all()
        return self.settle(timeout_s) and self._stack.drain(until) and self.num_lost() == num_lost

    def drain(self, timeout_s: float) -> bool:
        """Wait until no tier has a job, and the blocks, deletions and resets of all tiers are durable.

        Returns False on time-out, if a tier is closed, or if a tier has failed to forget its blocks at a
        reset.
        """
        return self._stack.drain(time.monotonic() + timeout_s)

    def reset(self, *, drop_in_flight: bool = False) -> None:
        """Forget every block in RAM and in the tiers, see `OffloadingManager.reset`.

        If `drop_in_flight` is False, the call does not wait. To make the reset durable, call `drain`
        afterwards.

        If `drop_in_flight` is True, the caller promises that its own transfers have ended. The call waits
        twice, each time up to `deadline_s`: first for the tiers' jobs, then until the resets of all tiers are
        durable. If a job of a tier still runs after the first wait, slots in flight stay reserved.
        """
        deadline_s = self._stack.deadline_s
        self.promotion.asking.clear()
        for lane in self.lanes:
            lane.waiting.clear()
        nothing_runs = drop_in_flight and self.settle(deadline_s)
        if nothing_runs:
            self._void_through = self.ram_manager.epoch
        self.ram_manager.reset(drop_in_flight=nothing_runs)
        self.promotion.promoting.clear()
        for lane in self.lanes:
            lane.tier.clear()
        self.promotion.trust_again()
        if drop_in_flight:
            self._stack.drain(time.monotonic() + deadline_s)
        self.promotion.asking.clear()
        for ctx, wait in [*self.waits.items()]:
            wait.came_from.clear()
            wait.wanted.clear()
            if nothing_runs:
                wait.num_storing = 0
                self._end_if_complete(ctx, wait)

    def close(self, timeout_s: float = 10.0) -> None:
        """Wait up to `timeout_s` for the jobs in flight, and close the tiers.

        Call `flush` first to write the blocks that are queued for a tier. For each tier, logs the number of
        blocks that the tier has not accepted.
        """
        self._cascade.stop()
        self.settle(timeout_s)
        for lane in self.lanes:
            lane.tier.close()

    # ---- reports

    def take_events(self) -> list[OffloadingEvent]:
        """Return RAM's events, see `OffloadingManager.take_events`, then the events of shared tiers.

        In an event of a shared tier, the medium is the tier's name. A shared tier reports only blocks that
        this manager has written. It reports a block as stored when the server has confirmed the write, and as
        removed when a probe or read has found the block missing.
        """
        events = self.ram_manager.take_events()
        if self._reports_events:
            for lane in self.lanes:
                for keys, removed in lane.tier.take_changes():
                    changed: Keys = self.pack(keys)
                    events.append(OffloadingEvent(changed, self.block_size, lane.tier.name, removed))
        return events

    def is_shared(self, number: int) -> bool:
        """Return True if several machines share tier `number`: 0 is RAM, which is never shared."""
        return number > 0 and self.lanes[number - 1].tier.shared

    @property
    def tier_names(self) -> list[str]:
        """The name of each tier."""
        return [lane.tier.name for lane in self.lanes]

    def tier_tenants(self) -> list[dict[str, TenantStats]]:
        """Return the counts of each tier's tenants; empty for a tier without quotas."""
        return [lane.tier.tenants() for lane in self.lanes]

    def tier_stats(self) -> list[TierStats]:
        """Return the counters of each tier.

        If a tier could not start a job, the job's blocks count as failed.
        """
        return [lane.tier.stats() for lane in self.lanes]

    def num_lost(self) -> int:
        """Return the number of blocks that tiers failed to write or read, or dropped.

        Includes blocks that left RAM before a tier could write them (`TieringCounts.not_offered`).
        """
        return self.counts.not_offered + sum(stats.failed + stats.dropped for stats in self.tier_stats())

    # ---- inside

    def _end_if_complete(self, ctx: RequestContext, wait: TierWait) -> None:
        """If the request has finished and its stores have ended, offer its blocks, and close its records."""
        if not wait.finished or wait.num_storing:
            return
        del self.waits[ctx]
        wait.left_out.clear()
        self._stack.extend_paths(ctx, wait)
        path = ctx.keys()
        in_tiers, _ = self._stack.below(path, wait)
        for lane in self.lanes:
            is_here = self.ready_slots_of(path) >= 0
            self._cascade.offer(lane, path.take(is_here & ~in_tiers[lane.row]), wait)
            lane.tier.finish_request(wait.records[lane.row], path)


AnyManager: TypeAlias = OffloadingManager | TieredManager
"""A manager of RAM, with or without tiers behind it."""
