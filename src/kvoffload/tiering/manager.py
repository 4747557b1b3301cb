"""Tiers behind RAM: which blocks cascade to them, and which are promoted when a request asks for them.

Owns the jobs between RAM and the tiers, and which requests wait for them. Decides neither which blocks leave
RAM (the manager's policy does) nor what a tier keeps (its own policy and admission rule do).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from kvoffload.core.hints import NO_HINTS, Hints
from kvoffload.core.manager import OffloadingManager
from kvoffload.core.plans import LoadPlan, LookupResult, OffloadingEvent, PrefixLookup, StorePlan
from kvoffload.core.request import RequestContext
from kvoffload.errors import ConfigError
from kvoffload.structures.keys import Keys
from kvoffload.tiering.lane import Job, TieringCounts, TierLane
from kvoffload.tiering.pins import write_room
from kvoffload.tiering.wait import TierWait
from kvoffload.tiering.worth import num_worth_reading, soonest, what_it_needs
from kvoffload.tiers.contract import NO_JOB, GroupedTier, JobResult, Mask, Memory, SecondaryTier, TierStats
from kvoffload.tiers.rate_limited_log import RateLimitedLog

HIT, MISS, RETRY = LookupResult.HIT, LookupResult.MISS, LookupResult.RETRY


class TieredManager(OffloadingManager):
    """An `OffloadingManager` of RAM with tiers behind it: the same calls, and `poll` once a step.

    **Cascade.** A block is offered to every tier when its store is complete, and again when a request that
    used it finishes while it is in RAM; each tier's own admission rule decides. It is pinned in RAM while it
    is written. What a busy tier cannot take waits for its turn, and is lost to it if it leaves RAM before; no
    request waits for a write. Blocks reach the tiers only through RAM: a block that RAM's admission rule
    refuses reaches none of them, and RAM's policy refuses nothing unless its ``write_cost`` is set.

    **Promote.** When a request asks for a prefix that continues in a tier, room is reserved for as much of it
    as fits, and its blocks are read and verified; meanwhile the answer is RETRY. Blocks that arrive are HIT
    from then on; those that cannot be read are MISS. Requests that want the same blocks wait for the same
    read. Neither RAM's admission rule nor its policy can refuse a promoted block.

    **Ask first.** Of a tier that machines share it is not known what it holds. A lookup asks it, once for the
    whole rest of a path; meanwhile the answer is RETRY, for no longer than the tier's `probe_timeout_s` in
    all.

    **Do no harm.** A read that is expected to take longer than computing the blocks is cut where it still
    pays, or not begun, except for one every 10 s, to learn whether that still holds. Of several tiers that
    have a block the one that is expected to bring it first is asked; while the time to compute is unknown,
    the first of them. One whose last three reads brought nothing is left alone for 10 s. A request that has
    waited longer than computing would have taken, or longer than `deadline_s`, gets MISS instead of RETRY
    from then on. A tier whose oldest job is late by four deadlines gets no more jobs until it answers. An
    exception of a tier, in whichever call, is a miss and a failure of the tier (`GuardedTier`).

    Args:
        capacity_blocks, and all keywords that are not below: as for `OffloadingManager`.
        ram: the memory of RAM's slots: a `MemoryTier`, with or without checksums.
        tiers: from the fastest to the slowest. The manager owns them from now on: `close` closes them.
        deadline_s: the longest time that a request waits for tiers.
        recompute_s_per_block: how long it takes to compute one block; None while unknown. May be set at any
            time.
        max_in_flight: the share of RAM's slots that may be pinned for the writes of all tiers together, of
            which a slow tier gets less; 1.0 bounds nothing. The same share may be reserved for reads, and
            twice as much, up to half of RAM, for one that is alone.
        clock: monotonic seconds.

    Attributes:
        hit_blocks: blocks that were loaded, by where they came from: RAM, then each tier. Of a load with
            damaged blocks only those before the first damaged one count.
        counts: what happened between RAM and the tiers.

    Thread: as `OffloadingManager`. No call waits for a tier, except `settle` and `close`.
    Cost: while no tier is asked, one dictionary lookup a call more than an `OffloadingManager`.
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
        **manager: Any,
    ) -> None:
        super().__init__(capacity_blocks, enable_events=enable_events, **manager)
        num_slots, block_bytes = ram.pool.shape
        if num_slots < self.capacity_blocks:
            raise ConfigError("ram", f"{num_slots} slots", f"allowed: {self.capacity_blocks} or more")
        if not deadline_s > 0:
            raise ConfigError("deadline_s", deadline_s, "allowed: more than 0 seconds")
        if not 0 < max_in_flight <= 1:
            raise ConfigError("max_in_flight", max_in_flight, "allowed: a share, more than 0 and up to 1")
        for tier in tiers:
            if tier.block_bytes != block_bytes:
                raise ConfigError(
                    f"tier {tier.name}",
                    f"blocks of {tier.block_bytes} bytes",
                    f"those of RAM have {block_bytes}",
                )
            most = max(1, int(max_in_flight * self.capacity_blocks))
            if isinstance(tier, GroupedTier) and tier.group_blocks > most:
                raise ConfigError(
                    f"tier {tier.name}",
                    f"objects of {tier.group_blocks} blocks",
                    f"RAM of {self.capacity_blocks} blocks has at most {most} on their way: make it "
                    "larger, or pack= smaller on all machines",
                )
        # A block that RAM's policy refuses would reach no tier, so it refuses only if the user asks for it.
        self.policy_may_refuse &= not tiers or self.policy.write_cost is not None
        self._ram = ram
        self._lanes = [TierLane(tier, clock) for tier in tiers]
        self.deadline_s, self.recompute_s_per_block = deadline_s, recompute_s_per_block
        self._clock, self._log = clock, RateLimitedLog("kvoffload.tiering")
        self._max_in_flight = max(1, int(max_in_flight * self.capacity_blocks))
        timeouts = [lane.tier.probe_timeout_s for lane in self._lanes]
        self._probe_timeout_s = min(deadline_s, max(timeouts, default=0.0))
        self._num_reading = 0
        # Blocks that are being promoted, and the number of their tier, from 1.
        self._promoting: dict[bytes, int] = {}
        self._requests: dict[RequestContext, TierWait] = {}
        self._asking: dict[RequestContext, TierWait] = {}
        # Requests that wait in the engine's queue, and for which nothing has been read yet.
        self._ahead: dict[RequestContext, TierWait] = {}
        self.hit_blocks = [0] * (1 + len(tiers))
        self.counts = TieringCounts()
        for tier in (lane.tier for lane in self._lanes):
            if enable_events:
                tier.take_changes()  # from now on it remembers them
            if tier.shared:
                needed = what_it_needs(tier, recompute_s_per_block)
                logging.getLogger("kvoffload.tiering").info("tier %s: %s", tier.name, needed)

    # ---- requests

    def begin_request(
        self, request_id: str, keys: Sequence[bytes] = (), *, hints: Hints = NO_HINTS
    ) -> RequestContext:
        """As `OffloadingManager.begin_request`."""
        ctx = super().begin_request(request_id, keys, hints=hints)
        self._requests[ctx] = TierWait([lane.tier.begin_request(request_id) for lane in self._lanes])
        self._follow(ctx, self._requests[ctx])
        return ctx

    def finish_request(
        self, ctx: RequestContext, path: Sequence[bytes] = (), *, hints: Hints = NO_HINTS
    ) -> None:
        """As `OffloadingManager.finish_request`. Tiers learn of the request when its stores are complete."""
        super().finish_request(ctx, path, hints=hints)
        self._ahead.pop(ctx, None)
        request = self._requests.get(ctx)
        if request is not None:
            request.finished = True
            self._end(ctx, request)

    def expect(self, ctx: RequestContext) -> None:
        """As `OffloadingManager.expect`. What only tiers have is read ahead, while nobody else reads."""
        super().expect(ctx)
        request = self._requests[ctx]
        if len(request.left_out) < len(self._lanes):
            self._ahead[ctx] = request

    def withdraw(self, ctx: RequestContext) -> None:
        """As `OffloadingManager.withdraw`."""
        super().withdraw(ctx)
        self._ahead.pop(ctx, None)

    def leave_out_tiers(self, ctx: RequestContext, *, shared: bool | None = None) -> None:
        """This request gets nothing from tiers; what it stores reaches them all the same.

        Args:
            shared: True for only those that machines share, False for only the others.
        """
        rows = [row for row, lane in enumerate(self._lanes) if shared in (None, lane.tier.shared)]
        left_out = self._requests[ctx].left_out
        left_out.update(rows)
        if len(left_out) == len(self._lanes):
            self._ahead.pop(ctx, None)

    def source_of(self, key: bytes, ctx: RequestContext) -> int:
        """Where a ready block of this request came from: the number of the tier, from 1; 0 for RAM.

        Until its load is complete.
        """
        request = self._requests.get(ctx)
        return request.came_from.get(key, 0) if request is not None else 0

    def has_promoted(self, ctx: RequestContext) -> bool:
        """Return True if blocks of this request came from a tier, and their load is not complete."""
        request = self._requests.get(ctx)
        return request is not None and bool(request.came_from)

    # ---- promote

    def lookup(self, keys: Sequence[bytes], ctx: RequestContext | None = None) -> PrefixLookup:
        """As `OffloadingManager.lookup`; RETRY if the prefix continues with blocks that are being promoted.

        The lookup begins their promotion. Without a request only RAM is asked.
        """
        found = super().lookup(keys, ctx)
        if found.stopped_by is HIT or ctx is None or not self._lanes:
            return found
        request = self._requests[ctx]
        if len(request.left_out) == len(self._lanes):
            return found
        self._follow(ctx, request)
        rest = self.pack(keys[found.num_ready :])
        self._promote(rest, ctx, request)
        if rest[0] in self._promoting:
            return PrefixLookup(found.num_ready, self._wait(rest, request))
        if found.stopped_by is MISS and self._waits_for_probe(rest[0], request):
            return PrefixLookup(found.num_ready, RETRY)
        return found

    def lookup_key(self, key: bytes, ctx: RequestContext | None = None) -> LookupResult:
        """As `OffloadingManager.lookup_key`. A block in a tier, or that may be in one, is RETRY; `poll`
        begins to promote them, and asks for them in one probe a step."""
        result = super().lookup_key(key, ctx)
        if result is HIT or ctx is None or not self._lanes:
            return result
        request = self._requests[ctx]
        if len(request.left_out) == len(self._lanes):
            return result
        if result is MISS and key not in request.given_up:
            one = self.pack([key])
            is_below = self._below(one, request)[1].any()
            if not is_below and not self._may_be_below(one, request):
                return MISS
            request.wanted.append(key)
            self._asking[ctx] = request
            if not is_below:
                return RETRY
        elif key not in self._promoting:
            return result
        return self._wait([key], request)

    def complete_load(self, plan: LoadPlan, damaged: Sequence[int] | npt.NDArray[np.integer] = ()) -> None:
        """As `OffloadingManager.complete_load`; counts the request's blocks by where they came from."""
        super().complete_load(plan, damaged)
        num_usable = min(damaged) if len(damaged) else len(plan.keys)
        request = self._requests.get(plan.request)
        self.hit_blocks[0] += num_usable
        if request is not None and request.came_from:
            for key in plan.keys[:num_usable]:
                came_from = request.came_from.pop(key, 0)
                self.hit_blocks[0] -= 1
                self.hit_blocks[came_from] += 1

    # ---- cascade

    def prepare_store(
        self, keys: Sequence[bytes], ctx: RequestContext | None = None, *, admitted: bool = False
    ) -> StorePlan | None:
        """As `OffloadingManager.prepare_store`."""
        plan = super().prepare_store(keys, ctx, admitted=admitted)
        request = self._requests.get(ctx) if ctx is not None else None
        if plan is not None and request is not None:
            request.num_storing += len(plan.keys)
        return plan

    def complete_store(self, plan: StorePlan, success: bool = True) -> None:
        """As `OffloadingManager.complete_store`; offers the stored blocks to the tiers."""
        super().complete_store(plan, success)
        request = self._requests.get(plan.request)
        if success and plan.epoch == self._epoch:
            if request is not None:
                self._follow(plan.request, request)
            for row in range(len(self._lanes)):
                self._cascade(row, plan.keys, request)
        if request is not None:
            request.num_storing -= len(plan.keys)
            self._end(plan.request, request)

    # ---- jobs

    def poll(self) -> bool:
        """End the jobs that tiers have finished and begin new ones; returns whether jobs are under way.

        Call it once a step. Cost: O(1) while there are no jobs.
        """
        for number, lane in enumerate(self._lanes, 1):
            if lane.jobs:
                for result in lane.tier.finished():
                    self._take_in(number, lane, lane.jobs.pop(result.job), result)
        for row, lane in enumerate(self._lanes):
            if lane.waiting:
                self._offer_waiting(row, lane)
        asking, self._asking = self._asking, {}
        for ctx, request in asking.items():
            wanted, request.wanted = request.wanted, []
            if not request.finished:
                self._promote(self.pack([*dict.fromkeys(wanted)]), ctx, request)
        if self._ahead and self._num_reading == 0:
            self._read_ahead()  # one a step: a burst of requests must not make one step long
        return self.has_jobs

    @property
    def has_jobs(self) -> bool:
        """Whether a tier has a job, or is about to get one."""
        return bool(self._asking) or any(lane.jobs or lane.waiting for lane in self._lanes)

    def settle(self, timeout_s: float) -> bool:
        """Wait until no job is under way; False on time-out. For tests, replays and shutdown."""
        until = time.monotonic() + timeout_s
        while self.poll():
            if not self._drain(until):
                return False
        return True

    def flush(self, timeout_s: float) -> bool:
        """Write all that RAM has to every tier that lacks it and admits it; False on time-out, or if a tier
        failed at or dropped some of it.

        For the end of a process whose blocks are wanted again, and before a machine is taken down.
        """
        until, num_lost = time.monotonic() + timeout_s, self._num_lost()
        keys = self.index.keys_at(self.slots.ready())
        for lane in self._lanes:
            lane.waiting.update(dict.fromkeys(keys.take(~lane.tier.contains(keys))))
        return self.settle(timeout_s) and self._drain(until) and self._num_lost() == num_lost

    def _num_lost(self) -> int:
        return self.counts.not_offered + sum(stats.failed + stats.dropped for stats in self.tier_stats())

    def _drain(self, until: float) -> bool:
        """Whether all tiers are done by then; every one is asked, even if one hangs."""
        drained = [lane.tier.drain(max(0.0, until - time.monotonic())) for lane in self._lanes]
        return all(drained)

    def reset(self, *, drop_in_flight: bool = False) -> None:
        """As `OffloadingManager.reset`; tiers forget everything as well.

        With `drop_in_flight` it first waits, for at most `deadline_s`, for the tiers' own jobs: the caller
        cannot vouch for those. If one still runs then, slots in flight stay reserved. In any case it then
        waits, at most as long again, until the tiers would not remember their blocks even after a crash.
        """
        self._asking.clear()
        for lane in self._lanes:
            lane.waiting.clear()
        nothing_runs = drop_in_flight and self.settle(self.deadline_s)
        super().reset(drop_in_flight=nothing_runs)
        self._promoting.clear()
        for lane in self._lanes:
            lane.tier.clear()
        if drop_in_flight:
            self._drain(time.monotonic() + self.deadline_s)
        self._asking.clear()
        for ctx, request in [*self._requests.items()]:
            request.came_from.clear()
            request.wanted.clear()
            if nothing_runs:
                request.num_storing = 0
                self._end(ctx, request)

    def take_events(self) -> list[OffloadingEvent]:
        """As `OffloadingManager.take_events`; of tiers that machines share, under the tier's name, what this
        manager has written there, and what of that it has found gone. Nothing is said of what others wrote,
        and what leaves a server is known when it is asked for."""
        if self._events is not None:
            for lane in self._lanes:
                for keys, removed in lane.tier.take_changes():
                    event = OffloadingEvent(self.pack(keys), self.block_size, lane.tier.name, removed)
                    self._events.append(event)
        return super().take_events()

    def is_shared(self, number: int) -> bool:
        """Whether machines share the tier of this number, from 1."""
        return number > 0 and self._lanes[number - 1].tier.shared

    @property
    def tier_names(self) -> list[str]:
        """The name of each tier behind RAM."""
        return [lane.tier.name for lane in self._lanes]

    def tier_stats(self) -> list[TierStats]:
        """The counters of each tier behind RAM; blocks of jobs that it did not begin have failed."""
        return [lane.tier.stats() for lane in self._lanes]

    def close(self, timeout_s: float = 10.0) -> None:
        """Let jobs end, for at most `timeout_s`, and close the tiers. What waits for its turn is not written:
        `flush` before does that."""
        for lane in self._lanes:
            lane.waiting.clear()
        self.settle(timeout_s)
        for lane in self._lanes:
            lane.tier.close()

    # ---- inside

    def _follow(self, ctx: RequestContext, request: TierWait) -> None:
        """Tell tiers that write blocks in groups what is known of a request's path."""
        for lane, record in zip(self._lanes, request.records, strict=True):
            if lane.tier.group_blocks > 1:
                lane.tier.follow(record, ctx.keys())

    def _below(self, keys: Keys, request: TierWait) -> tuple[list[Mask], Mask]:
        """Which blocks each tier has, and which are in any tier; one that is stalled or failing counts as
        empty."""
        found, now = [], self._clock()
        for row, (lane, record) in enumerate(zip(self._lanes, request.records, strict=True)):
            is_silent = row in request.left_out or self._is_silent(lane, now)
            found.append(np.zeros(len(keys), np.bool_) if is_silent else lane.tier.contains(keys, record))
        return found, np.logical_or.reduce(found)

    def _unknown(self, keys: Keys, request: TierWait) -> list[tuple[TierLane, Mask]]:
        """Which blocks each shared tier would have to be asked for, before it can say whether it has them."""
        now = self._clock()
        return [
            (lane, lane.tier.unknown(keys, record))
            for row, (lane, record) in enumerate(zip(self._lanes, request.records, strict=True))
            if lane.tier.shared and row not in request.left_out and not self._is_silent(lane, now)
        ]

    def _is_silent(self, lane: TierLane, now: float) -> bool:
        return lane.is_stalled(now, self.deadline_s) or lane.is_failing(now)

    def _probe(self, keys: Keys, found: Mask, request: TierWait) -> None:
        """Ask shared tiers, all at once, for blocks of this run that have not been found, as far as the run
        can go on."""
        for lane, unknown in self._unknown(keys, request):
            open_ends = np.flatnonzero(~(found | unknown))
            end = int(open_ends[0]) if len(open_ends) else len(keys)
            wanted = np.flatnonzero(unknown[:end] & ~found[:end])
            if len(wanted) == 0:
                continue
            lane.probe(keys.take(wanted), self._clock())

    def _may_be_below(self, one: Keys, request: TierWait) -> bool:
        """Whether a request waits to learn if a shared tier has this block."""
        if not any(unknown.any() for _, unknown in self._unknown(one, request)):
            return False
        return request.waits_for_probe(self._clock(), self._probe_timeout_s, self.deadline_s)

    def _waits_for_probe(self, key: bytes, request: TierWait) -> bool:
        """Whether shared tiers are being asked for this block, and the request waits for the answer."""
        if not any(key in lane.probing for lane in self._lanes):
            return False
        return request.waits_for_probe(self._clock(), self._probe_timeout_s, self.deadline_s)

    def _promote(
        self, keys: Keys, ctx: RequestContext, request: TierWait, most_blocks: int | None = None
    ) -> None:
        """Begin to read the blocks of this run that only tiers have, if there is room and it is worth it."""
        here = self.contains(keys, ctx)
        in_tiers, below = self._below(keys, request)
        reachable = here | below
        self._probe(keys, reachable, request)
        if request.given_up:
            reachable &= here | np.array([key not in request.given_up for key in keys], np.bool_)
        blocked = reachable.tobytes().find(0)  # `argmin` gives up the interpreter's lock, as `unique` does
        length = len(keys) if blocked < 0 else blocked
        request.may_wait_s = self.deadline_s
        if self.recompute_s_per_block is not None:
            request.may_wait_s = min(self.deadline_s, length * self.recompute_s_per_block)
        wanted = np.flatnonzero(~here[:length])
        if len(wanted) == 0:
            return
        missing = keys.take(wanted)
        compute_s = self.recompute_s_per_block
        come_from = soonest(self._lanes, np.array([mask[wanted] for mask in in_tiers]), compute_s)
        now = self._clock()
        spent_s = request.probed_for_s(now, self._probe_timeout_s)
        num_worth = num_worth_reading(self._lanes, come_from, wanted, length, compute_s, now, spent_s)
        if num_worth < len(wanted):
            self.counts.not_worth += len(wanted) - num_worth
            request.given_up.update(missing[num_worth:])
            missing, come_from = missing[:num_worth], come_from[:num_worth]
            if num_worth == 0:
                return
        room = self._max_in_flight - self._num_reading
        if self._num_reading == 0:
            # Nobody else waits: a prefix is worth most as a whole, and half of RAM stays free.
            room = most_blocks or max(room, min(2 * room, self.capacity_blocks // 2))
        plan = super().prepare_store(missing[:room], ctx, admitted=True) if room > 0 else None
        num_taken = 0 if plan is None else len(plan.keys)
        if num_taken < len(missing):
            # If they were asked for again at every step, they would evict those that found room.
            self.counts.no_room += len(missing) - num_taken
            request.given_up.update(missing[num_taken:])
        if plan is None or num_taken == 0:
            return
        self._num_reading += num_taken
        come_from = come_from[:num_taken]
        numbers = sorted(set(come_from.tolist()))
        # To split a plan costs as much as to read: where all is of one kind, here and below, it stays whole.
        parts = [plan]
        if len(numbers) > 1:
            parts = plan.split([np.flatnonzero(come_from == number) for number in numbers])
        for number, part in zip(numbers, parts, strict=True):
            self._read(number, part, request)

    def _read_ahead(self) -> None:
        """Begin to read for the request that has waited longest, once, as if it asked now. What cannot be
        read yet it does not give up."""
        ctx, request = next(iter(self._ahead.items()))
        del self._ahead[ctx]
        path, counts, before = ctx.keys(), self.counts, (self.counts.no_room, self.counts.not_worth)
        if len(path):
            as_if_now = TierWait(request.records, left_out=request.left_out)
            self._promote(path, ctx, as_if_now, self._max_in_flight)
            promoted = {key: self._promoting[key] for key in path if key in self._promoting}
            request.came_from.update(promoted)
            counts.read_ahead += len(promoted)
            counts.no_room, counts.not_worth = before

    def _read(self, number: int, part: StorePlan, request: TierWait) -> None:
        """Begin to read the blocks of a plan from one tier."""
        lane = self._lanes[number]
        job = lane.tier.submit_read(part.keys, self._ram.pool, part.slots)
        if job == NO_JOB:
            self._num_reading -= len(part.keys)
            self.counts.lost += len(part.keys)
            request.given_up.update(part.keys)
            super().complete_store(part, success=False)
            return
        lane.jobs[job] = Job(part, self._clock())
        lane.num_reading += len(part.keys)
        self._promoting.update(dict.fromkeys(part.keys, number + 1))

    def _wait(self, keys: Sequence[bytes], request: TierWait) -> LookupResult:
        """RETRY, or MISS once the request has waited long enough for these blocks."""
        had_given_up = request.gave_up
        if not request.keeps_waiting(self._clock(), self.deadline_s):
            self.counts.gave_up += not had_given_up
            return MISS
        for key in keys:
            if key in self._promoting:
                request.came_from[key] = self._promoting[key]
        return RETRY

    def _take_in(self, number: int, lane: TierLane, job: Job, result: JobResult) -> None:
        """End a job: the blocks that were read become ready, those that were written are unpinned."""
        plan, ok, seconds = job.plan, result.ok, result.seconds
        if isinstance(plan, Keys):
            lane.probing.difference_update(plan)
            return
        if isinstance(plan, LoadPlan):
            lane.has_written(len(plan.keys), int(np.count_nonzero(ok)), seconds)
            self.unpin(plan)
            return
        self._num_reading -= len(plan.keys)
        lane.has_read(ok, result.stale, seconds, self._clock())
        for key in plan.keys:
            self._promoting.pop(key, None)
        read, lost = plan, None
        if not ok.all():
            read, lost = plan.split([np.flatnonzero(ok), np.flatnonzero(~ok)])
        if len(read.keys):
            self._ram.seal(read.keys, read.slots)
            self.counts.promoted += len(read.keys)
        num_stale = 0 if result.stale is None else int(np.count_nonzero(result.stale))
        self.counts.stale += num_stale
        super().complete_store(read)
        if lost is not None:
            self.counts.lost += len(lost.keys) - num_stale
            super().complete_store(lost, success=False)

    def _cascade(self, row: int, keys: Keys, request: TierWait | None) -> None:
        """Offer ready blocks to a tier; those that it takes stay pinned until they are written. Those for
        which it has no time now wait."""
        lane = self._lanes[row]
        room = self._room_for_writes(row)
        if len(keys) > room:
            room = lane.tier.cut(keys, room)
            lane.waiting.update(dict.fromkeys(keys[room:]))
            num_lost = max(0, len(lane.waiting) - self.capacity_blocks)
            for key in [*islice(lane.waiting, num_lost)]:
                del lane.waiting[key]
            self._not_offered(lane, num_lost)
        if room == 0 or len(keys) == 0:
            return
        offered = self.pin(keys[:room])
        # A tier takes its own checksum of the bytes that it gets: damaged bytes must not get a valid one.
        sound = self._ram.verify_slots(offered.keys, offered.slots)
        if not sound.all():
            offered, damaged = offered.split([np.flatnonzero(sound), np.flatnonzero(~sound)])
            self.unpin(damaged, damaged=range(len(damaged.keys)))
        record = request.records[row] if request is not None else None
        job, taken = lane.tier.submit_write(offered.keys, self._ram.pool, offered.slots, record)
        kept = offered
        if not taken.all():
            kept, others = offered.split([np.flatnonzero(taken), np.flatnonzero(~taken)])
            self.unpin(others)
        if job == NO_JOB:
            self.unpin(kept)
            return
        lane.jobs[job] = Job(kept, self._clock())
        lane.num_writing += len(kept.keys)

    def _room_for_writes(self, row: int) -> int:
        lane = self._lanes[row]
        if lane.is_stalled(self._clock(), self.deadline_s):
            return 0
        if self._max_in_flight == self.capacity_blocks:
            # As in a replay, whose decisions may not depend on how fast a disk is.
            room = lane.tier.queue_room
        else:
            room = min(write_room(self._lanes, row, self._max_in_flight), lane.tier.queue_room)
        group = lane.tier.group_blocks
        if group > 1 and room < group:
            return 0 if lane.num_writing else group  # one group at least, or none would ever be written
        return room

    def _offer_waiting(self, row: int, lane: TierLane) -> None:
        """Offer the blocks that have waited the longest, if they are still here: once a step, because a tier
        that takes none, as one that is closed, leaves the room for the next ones, up to all of RAM."""
        if (room := min(self._room_for_writes(row), len(lane.waiting))) == 0:
            return
        keys = self.pack([*islice(lane.waiting, room + 1)])
        keys = keys[: lane.tier.cut(keys, room)]
        for key in keys:
            del lane.waiting[key]
        here = self.ready_slots_of(keys) >= 0
        self._not_offered(lane, int(np.count_nonzero(~here & ~lane.tier.contains(keys))))
        self._cascade(row, keys.take(here), None)

    def _not_offered(self, lane: TierLane, num_blocks: int) -> None:
        if num_blocks:
            self.counts.not_offered += num_blocks
            self._log.warn(
                f"waiting {id(lane)}",
                "tier %s: %d blocks left RAM before it could take them: it writes slower than blocks come",
                lane.tier.name,
                num_blocks,
            )

    def _end(self, ctx: RequestContext, request: TierWait) -> None:
        """If the request has finished and its stores have ended, report to the tiers what it used."""
        if not request.finished or request.num_storing:
            return
        del self._requests[ctx]
        request.left_out.clear()
        self._follow(ctx, request)
        path = ctx.keys()
        in_tiers, _ = self._below(path, request)
        for row, lane in enumerate(self._lanes):
            self._cascade(row, path.take((self.ready_slots_of(path) >= 0) & ~in_tiers[row]), request)
            lane.tier.finish_request(request.records[row], path)
