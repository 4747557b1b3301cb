"""The cascade: offers RAM's blocks to the tiers behind RAM. The tiers write in the background.

Owns two things: the pins of blocks that are being written, and a queue of blocks for each busy tier. Each
tier's admission rule and policy decide which of the offered blocks the tier stores.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import islice

import numpy as np

from kvoffload.core.plans import LoadPlan
from kvoffload.structures.keys import Keys
from kvoffload.tiering.lane import LaneJob, TierLane
from kvoffload.tiering.stack import TierStack
from kvoffload.tiering.wait import TierWait
from kvoffload.tiers.contract import NO_JOB, JobResult
from kvoffload.tiers.rate_limited_log import RateLimitedLog

_LOGGER = logging.getLogger("kvoffload.tiering")
_MIN_WEIGHT = 0.25
"""Smallest weight of a slow tier when tiers divide the blocks in flight; the fastest tier has weight 1. With
a smaller weight, the slow tier's writes would not overlap, and its measured speed would be too low."""


class Cascade:
    """Writes ready blocks from RAM to the tiers behind RAM.

    Thread: the scheduler's. Cost: none while there are no offered or queued blocks.
    """

    def __init__(self, stack: TierStack) -> None:
        self._stack = stack
        self._log = RateLimitedLog("kvoffload.tiering")

    def poll(self) -> None:
        """Offer queued blocks to their tiers."""
        for lane in self._stack.lanes:
            if lane.waiting:
                self._offer_waiting(lane)

    def offer_to_all(self, keys: Keys, wait: TierWait | None) -> None:
        """Offer ready blocks to every tier."""
        for lane in self._stack.lanes:
            self.offer(lane, keys, wait)

    def offer(self, lane: TierLane, keys: Keys, wait: TierWait | None) -> None:
        """Offer ready blocks to a tier.

        Blocks that the tier accepts are pinned until the write ends. Blocks for which the tier has no room
        now are queued.

        Args:
            wait: state of the request that used the blocks; None if unknown.
        """
        room = self._room(lane)
        if len(keys) > room:
            room = lane.tier.cut(keys, room)
            self._let_wait(lane, keys[room:])
        if room == 0 or len(keys) == 0:
            return
        ram, memory = self._stack.ram, self._stack.memory
        offered, _ = ram.pin_ready(keys[:room])
        if not len(offered):
            return
        # The tier computes a checksum of its own. Damaged bytes must not get a valid checksum.
        sound = memory.verify_slots(offered.keys, offered.slots)
        if not sound.all():
            offered, damaged = offered.split([np.flatnonzero(sound), np.flatnonzero(~sound)])
            ram.unpin(damaged, damaged=range(len(damaged.keys)))
        record = wait.records[lane.row] if wait is not None else None
        for plan in self._by_owner(lane, offered):
            self._submit(lane, plan, record)

    def _by_owner(self, lane: TierLane, offered: LoadPlan) -> list[LoadPlan]:
        """Split an offer into one offer for each tenant, if the tier has quotas."""
        if not lane.has_quotas:
            return [offered]
        owners = self._stack.ram.owners_of(offered.slots)
        if len(names := [*dict.fromkeys(owners)]) <= 1:
            return [offered]
        numbers = np.array([names.index(owner) for owner in owners])
        return offered.split([np.flatnonzero(numbers == number) for number in range(len(names))])

    def _submit(self, lane: TierLane, offered: LoadPlan, record: object | None) -> None:
        ram, memory = self._stack.ram, self._stack.memory
        job, accepted = lane.tier.submit_write(offered.keys, memory.pool, offered.slots, record)
        written = offered
        if not accepted.all():
            written, rejected = offered.split([np.flatnonzero(accepted), np.flatnonzero(~accepted)])
            ram.unpin(rejected)
        if job == NO_JOB:
            ram.unpin(written)
            return
        lane.jobs[job] = LaneJob(written, self._stack.clock())
        lane.num_writing += len(written.keys)
        lane.num_accepted += len(written.keys)

    def end_write(self, lane: TierLane, plan: LoadPlan, result: JobResult) -> None:
        """Unpin the blocks of a write that has ended."""
        lane.end_write(len(plan.keys), int(np.count_nonzero(result.ok)), result.seconds)
        self._stack.ram.unpin(plan)

    def stop(self) -> None:
        """Clear the queues.

        Logs a warning for each tier that has not accepted some blocks: blocks that have left RAM, and blocks
        that were still queued.
        """
        for lane in self._stack.lanes:
            keys = self._stack.ram.pack([*lane.waiting])
            missing = keys.take(~lane.tier.contains(keys))
            num_left = int(np.count_nonzero(self._stack.ram.ready_slots_of(missing) < 0))
            lane.waiting.clear()
            self._stack.counts.not_offered += num_left
            num_lost, num_queued = lane.num_lost + num_left, len(missing) - num_left
            lane.num_lost = 0
            if num_lost or num_queued:
                queued = f"; {num_queued} were queued at close: call flush() first" if num_queued else ""
                _LOGGER.warning(
                    "tier %s: %d of %d blocks left RAM before the tier could write them%s",
                    lane.tier.name,
                    num_lost,
                    lane.num_accepted + num_lost + num_queued,
                    queued,
                )

    def _offer_waiting(self, lane: TierLane) -> None:
        """Remove the oldest blocks from a tier's queue, and offer the blocks that are still in RAM.

        Makes one offer in each call, instead of a loop until the tier is full: a closed tier accepts no block
        and is never full, so that a loop would offer, and lose, the whole queue.
        """
        if (room := min(self._room(lane), len(lane.waiting))) == 0:
            return
        ram = self._stack.ram
        keys = ram.pack([*islice(lane.waiting, room + 1)])
        keys = keys[: lane.tier.cut(keys, room)]
        for key in keys:
            del lane.waiting[key]
        is_here = ram.ready_slots_of(keys) >= 0
        self._count_lost(lane, int(np.count_nonzero(~is_here & ~lane.tier.contains(keys))))
        self.offer(lane, keys.take(is_here), None)

    def _let_wait(self, lane: TierLane, keys: Keys) -> None:
        """Queue blocks for a busy tier.

        If the queue is longer than RAM's capacity, the oldest queued blocks are dropped and count as lost.
        """
        lane.waiting.update(dict.fromkeys(keys))
        num_lost = max(0, len(lane.waiting) - self._stack.ram.capacity_blocks)
        for key in [*islice(lane.waiting, num_lost)]:
            del lane.waiting[key]
        self._count_lost(lane, num_lost)

    def _room(self, lane: TierLane) -> int:
        """Return the number of blocks that may be offered to a tier now."""
        stack = self._stack
        if lane.is_stalled(stack.clock(), stack.deadline_s):
            return 0
        room = lane.tier.queue_room
        # If all of RAM is allowed, as in a replay, decisions must not depend on the speed of a disk.
        if stack.in_flight_share != 1.0:
            room = min(write_room(stack.lanes, lane.row, stack.max_in_flight), room)
        group = lane.tier.group_blocks
        if group > 1 and room < group:
            return 0 if lane.num_writing else group  # at least one group, or none would ever be written
        return room

    def _count_lost(self, lane: TierLane, num_blocks: int) -> None:
        if num_blocks:
            self._stack.counts.not_offered += num_blocks
            lane.num_lost += num_blocks
            self._log.warn(
                f"waiting {id(lane)}",
                "tier %s: %d blocks left RAM unwritten: the tier writes slower than blocks arrive",
                lane.tier.name,
                num_blocks,
            )


def write_room(lanes: Sequence[TierLane], row: int, budget: int) -> int:
    """Return the number of further blocks that may be pinned for writes to tier `row`.

    So that a slow or hanging tier cannot pin all `budget` blocks, each tier gets a share in proportion to its
    write speed, at least one block. A slow tier counts with at least a quarter of the fastest tier's speed. A
    tier of unknown speed counts as the fastest tier.
    """
    share = budget
    if len(lanes) > 1:
        weights = _weights([lane.write_s_per_block for lane in lanes])
        share = max(1, int(budget * weights[row] / sum(weights)))
    return max(0, share - lanes[row].num_writing)


def _weights(seconds_per_block: Sequence[float]) -> list[float]:
    fastest = min((seconds for seconds in seconds_per_block if seconds > 0.0), default=0.0)
    return [max(_MIN_WEIGHT, fastest / seconds) if seconds > 0.0 else 1.0 for seconds in seconds_per_block]
