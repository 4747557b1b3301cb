"""The promotion of blocks from tiers into RAM, for requests whose prefix continues in a tier.

Owns the reads, the slots of RAM that are reserved for them, and the probes of shared tiers. RAM's policy
decides which blocks leave RAM.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvoffload.core.miss_record import TIER_GAVE_UP
from kvoffload.core.plans import LookupResult, StorePlan
from kvoffload.core.request import RequestContext
from kvoffload.structures.keys import Keys
from kvoffload.tiering.lane import LaneJob, TierLane
from kvoffload.tiering.stack import TierStack
from kvoffload.tiering.wait import TierWait
from kvoffload.tiering.worth import Rows, fastest_source, num_worth_reading
from kvoffload.tiers.contract import NO_JOB, JobResult, Mask

MOST_DISTRUSTED = 10_000
"""Limit of the keys that `Promotion.distrust` remembers (about 1 MB). Above the limit, no tier is read."""


class Promotion:
    """Reads blocks from tiers into RAM, for requests that wait for these blocks.

    Attributes:
        promoting: maps the key of each block that is being read to the number of its tier, from 1, and to the
            plan of the read.
        asking: requests that have looked up single keys since the last `poll`.
        ahead: requests in the engine's queue for which no block has been read ahead yet.
        trusts_no_tier: True after `distrust` was called for more than `MOST_DISTRUSTED` blocks.

    Thread: the scheduler's. Cost: none while no tier is read.
    """

    def __init__(self, stack: TierStack) -> None:
        self._stack = stack
        timeouts = [lane.tier.probe_timeout_s for lane in stack.lanes]
        self._probe_timeout_s = min(stack.deadline_s, max(timeouts, default=0.0))
        self.promoting: dict[bytes, tuple[int, StorePlan]] = {}
        self.asking: dict[RequestContext, TierWait] = {}
        self.ahead: dict[RequestContext, TierWait] = {}
        self.trusts_no_tier = False
        self._distrusted: set[bytes] = set()

    @property
    def _num_reading(self) -> int:
        """Number of blocks that tiers are reading. Stuck tiers do not count."""
        return sum(lane.num_reading for lane in self._stack.lanes if not lane.tier.is_stuck)

    def poll(self) -> None:
        """Start reads for the single keys looked up in this step, and read ahead for one queued request."""
        asking, self.asking = self.asking, {}
        for ctx, wait in asking.items():
            wanted, wait.wanted = wait.wanted, []
            if not wait.finished:
                self.begin(self._stack.ram.pack([*dict.fromkeys(wanted)]), ctx, wait)
        if self.ahead and self._num_reading == 0:
            self._read_ahead()  # one request a step, so that a burst of requests does not prolong a step

    def begin(self, keys: Keys, ctx: RequestContext, wait: TierWait, max_blocks: int | None = None) -> bool:
        """Start to read missing blocks from tiers, if the reads are faster than computing and RAM has room.

        Returns True if nothing was started, because the tier of the first block must first end other reads
        (`SecondaryTier.read_room`).

        Args:
            max_blocks: number of slots that the read may reserve if no other read is in flight; None for up
                to twice `TierStack.max_in_flight`.
        """
        for lane in self._stack.lanes:
            lane.tier.missed(keys)
        chosen = self._choose(keys, ctx, wait)
        if chosen is None:
            return False
        missing, sources = chosen
        # Blocks for which their tier has no room now are not given up, and a later call reads them.
        room = self._read_room(missing, sources)
        if room == 0:
            return missing[0] == keys[0]
        plan = self._reserve(missing[:room], ctx, wait, max_blocks)
        if plan is not None:
            self._read(plan, sources[: len(plan.keys)], wait)
        return False

    def request_key(self, key: bytes, ctx: RequestContext, wait: TierWait) -> LookupResult:
        """Queue a single key, and return RETRY. The next `poll` promotes the block or probes for it.

        If no tier can have the block, queues nothing and returns MISS. Also returns MISS if the request has
        waited too long for blocks.
        """
        keys = self._stack.ram.pack([key])
        for lane in self._stack.lanes:
            lane.tier.missed(keys)
        if not self.trusted(keys).all():
            return LookupResult.MISS
        is_below = self._stack.below(keys, wait)[1].any()
        if not is_below and not self._awaits_probe_of(keys, wait):
            return LookupResult.MISS
        wait.wanted.append(key)
        self.asking[ctx] = wait
        return self.result_for([key], wait) if is_below else LookupResult.RETRY

    def result_for(self, keys: Sequence[bytes], wait: TierWait) -> LookupResult:
        """Return the lookup result for blocks that are in tiers.

        The result is RETRY while the request may wait for the blocks. It is MISS after the time limit of the
        request, or if the tier from which the first block is being read is stuck (`GuardedTier.is_stuck`).
        """
        if keys[0] in self.promoting and self._stack.lanes[self.promoting[keys[0]][0] - 1].tier.is_stuck:
            return LookupResult.MISS
        had_given_up = wait.gave_up
        if not wait.keeps_waiting(self._stack.clock(), self._stack.deadline_s):
            self._stack.counts.gave_up += not had_given_up
            return LookupResult.MISS
        for key in keys:
            if key in self.promoting:
                wait.came_from[key], _ = self.promoting[key]
        return LookupResult.RETRY

    def awaits_probe(self, key: bytes, wait: TierWait) -> bool:
        """Return True if a probe for this block is in flight and the request still waits for it."""
        if not any(key in lane.probing for lane in self._stack.lanes):
            return False
        return wait.waits_for_probe(self._stack.clock(), self._probe_timeout_s, self._stack.deadline_s)

    def end_read(self, lane: TierLane, plan: StorePlan, result: JobResult) -> None:
        """End a read: make sound blocks ready in RAM, and release the slots of the other blocks."""
        # A block may have become distrusted since the read began.
        stack, ok = self._stack, result.ok & self.trusted(plan.keys)
        lane.end_read(result, stack.clock())
        for key in plan.keys:
            # After a reset, a later read of the block may be in flight.
            if key in self.promoting and self.promoting[key][1] is plan:
                del self.promoting[key]
        read, lost = plan, None
        if not ok.all():
            read, lost = plan.split([np.flatnonzero(ok), np.flatnonzero(~ok)])
        if len(read.keys):
            stack.memory.seal(read.keys, read.slots)
            stack.counts.promoted += len(read.keys)
        num_stale = 0 if result.stale is None else int(np.count_nonzero(result.stale))
        stack.counts.stale += num_stale
        stack.ram.complete_store(read)
        if lost is not None:
            stack.counts.lost += len(lost.keys) - num_stale
            stack.ram.complete_store(lost, success=False)
            stack.ram.note_absent(lost.keys, TIER_GAVE_UP)

    # ---- wrong blocks with intact bytes

    def distrust(self, keys: Sequence[bytes]) -> bool:
        """Stop reading these blocks until `trust_again` is called.

        If this call makes the number of distrusted blocks exceed `MOST_DISTRUSTED`, no block at all is read
        from now on, and the call returns True.
        """
        if self.trusts_no_tier:
            return False
        self._distrusted.update(keys)
        self.trusts_no_tier = len(self._distrusted) > MOST_DISTRUSTED
        return self.trusts_no_tier

    def trust_again(self) -> None:
        """Trust all tiers and blocks again. Call this after a reset of all tiers."""
        self._distrusted.clear()
        self.trusts_no_tier = False

    def trusted(self, keys: Sequence[bytes]) -> Mask:
        """Return a mask of the blocks that may be read."""
        if self.trusts_no_tier:
            return np.zeros(len(keys), np.bool_)
        return ~self.is_distrusted(keys)

    def is_distrusted(self, keys: Sequence[bytes]) -> Mask:
        """Return a mask of the blocks that were passed to `distrust`. Ignores `trusts_no_tier`."""
        if not self._distrusted:
            return np.zeros(len(keys), np.bool_)
        return np.array([key in self._distrusted for key in keys], np.bool_)

    # ---- the steps of a promotion

    def _choose(self, keys: Keys, ctx: RequestContext, wait: TierWait) -> tuple[Keys, Rows] | None:
        """Choose the blocks to read into RAM, and the tier to read each block from.

        Returns the keys in prefix order, and for each key the index of its tier in `stack.lanes`. Returns
        None if no block is worth reading. Also sends probes, and updates `wait.may_wait_s` and
        `wait.given_up`.
        """
        stack = self._stack
        in_ram = stack.ram.contains(keys, ctx)
        in_tiers, below = stack.below(keys, wait)
        reachable = in_ram | below
        num_trusted = len(keys)
        if not (trusted := in_ram | self.trusted(keys)).all():
            num_trusted = int(np.argmin(trusted))
            reachable[num_trusted:] = False
        if num_trusted:
            self._probe(keys[:num_trusted], reachable[:num_trusted], wait)
        if wait.given_up:
            reachable &= in_ram | np.array([key not in wait.given_up for key in keys], np.bool_)
        end = reachable.tobytes().find(0)  # `argmin` releases the interpreter's lock, as `unique` does
        length = len(keys) if end < 0 else end
        compute_s = stack.compute_s
        wait.may_wait_s = stack.deadline_s
        if compute_s is not None:
            wait.may_wait_s = min(stack.deadline_s, length * compute_s)
        wanted = np.flatnonzero(~in_ram[:length])
        if len(wanted) == 0:
            return None
        missing = keys.take(wanted)
        if len(rows := {key: row for row, key in reversed([*enumerate(missing)])}) < len(missing):
            # A store plan has each key once, and `sources` must match it.
            wanted = wanted[sorted(rows.values())]
            missing = keys.take(wanted)
        sources = fastest_source(stack.lanes, np.array([mask[wanted] for mask in in_tiers]), compute_s)
        now = stack.clock()
        spent_s = wait.probed_for_s(now, self._probe_timeout_s)
        num_worth = num_worth_reading(stack.lanes, sources, wanted, length, compute_s, now, spent_s)
        if num_worth < len(wanted):
            stack.counts.not_worth += len(wanted) - num_worth
            wait.given_up.update(missing[num_worth:])
        return (missing[:num_worth], sources[:num_worth]) if num_worth else None

    def _read_room(self, missing: Keys, sources: Rows) -> int:
        """Return the number of leading blocks that the tiers can read now."""
        room = len(missing)
        for row in {*sources.tolist()}:
            at = np.flatnonzero(sources == row)
            count = self._stack.lanes[row].tier.read_room(
                missing if len(at) == len(missing) else missing.take(at)
            )
            if count < len(at):
                room = min(room, int(at[count]))
        return room

    def _reserve(
        self, missing: Keys, ctx: RequestContext, wait: TierWait, max_blocks: int | None
    ) -> StorePlan | None:
        """Reserve slots of RAM for as many leading blocks as fit; return None if no block fits.

        The request stops waiting for the blocks that do not fit.
        """
        stack = self._stack
        room = stack.max_in_flight - self._num_reading
        if self._num_reading == 0:
            # No other request waits for a read, and a whole prefix is worth most. Half of RAM stays free.
            room = max_blocks or max(room, min(2 * room, stack.ram.usable_blocks // 2))
        plan = stack.ram.prepare_store(missing[:room], ctx, admitted=True) if room > 0 else None
        num_reserved = 0 if plan is None else len(plan.keys)
        if num_reserved < len(missing):
            # If they were requested again in every step, these blocks would evict the reserved blocks.
            stack.counts.no_room += len(missing) - num_reserved
            wait.given_up.update(missing[num_reserved:])
        return plan if num_reserved else None

    def _read(self, plan: StorePlan, sources: Rows, wait: TierWait) -> None:
        """Start to read the blocks of a plan, each from its tier in `sources` (an index in `stack.lanes`)."""
        rows = sorted(set(sources.tolist()))
        # To split a plan costs as much as to read it, so a plan for a single tier stays whole.
        shares = [plan] if len(rows) == 1 else plan.split([np.flatnonzero(sources == row) for row in rows])
        for row, share in zip(rows, shares, strict=True):
            lane = self._stack.lanes[row]
            job = lane.tier.submit_read(share.keys, self._stack.memory.pool, share.slots)
            if job == NO_JOB:
                self._stack.counts.lost += len(share.keys)
                wait.given_up.update(share.keys)
                self._stack.ram.complete_store(share, success=False)
                continue
            lane.jobs[job] = LaneJob(share, self._stack.clock())
            lane.num_reading += len(share.keys)
            self.promoting.update(dict.fromkeys(share.keys, (row + 1, share)))

    def _read_ahead(self) -> None:
        """Start reads for the oldest request in `ahead`, and remove the request from `ahead`.

        The request's lookup may still read the blocks that cannot be read now.
        """
        ctx, wait = next(iter(self.ahead.items()))
        del self.ahead[ctx]
        path, counts = ctx.keys(), self._stack.counts
        before = counts.no_room, counts.not_worth
        if len(path):
            trial = TierWait(wait.records, left_out=wait.left_out)
            self.begin(path, ctx, trial, self._stack.max_in_flight)
            promoted = {key: self.promoting[key][0] for key in path if key in self.promoting}
            wait.came_from.update(promoted)
            counts.read_ahead += len(promoted)
            counts.no_room, counts.not_worth = before

    # ---- probes of shared tiers

    def _probe(self, keys: Keys, reachable: Mask, wait: TierWait) -> None:
        """Ask each shared tier for the blocks whose presence is unknown.

        A block is useless behind a gap. Therefore the probe of a tier ends at the first block that is neither
        `reachable` nor of unknown presence in this tier.
        """
        for lane, unknown in self._unknown(keys, wait):
            gaps = np.flatnonzero(~(reachable | unknown))
            end = int(gaps[0]) if len(gaps) else len(keys)
            wanted = np.flatnonzero(unknown[:end] & ~reachable[:end])
            if len(wanted):
                lane.probe(keys.take(wanted), self._stack.clock())

    def _unknown(self, keys: Keys, wait: TierWait) -> list[tuple[TierLane, Mask]]:
        """Return, for each usable shared tier, a mask of the blocks whose presence needs a probe."""
        now = self._stack.clock()
        return [
            (lane, lane.tier.unknown(keys, wait.records[lane.row]))
            for lane in self._stack.lanes
            if lane.tier.shared and lane.row not in wait.left_out and not self._stack.is_silent(lane, now)
        ]

    def _awaits_probe_of(self, keys: Keys, wait: TierWait) -> bool:
        """Return True if a block needs a probe and the request still waits for probes."""
        if not any(unknown.any() for _, unknown in self._unknown(keys, wait)):
            return False
        return wait.waits_for_probe(self._stack.clock(), self._probe_timeout_s, self._stack.deadline_s)
