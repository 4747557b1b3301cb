"""State that promotion and cascade share: RAM, the tiers behind it, settings and counters. Starts no job."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kvoffload.core.manager import OffloadingManager
from kvoffload.core.request import RequestContext
from kvoffload.errors import ConfigError, finite
from kvoffload.structures.keys import Keys
from kvoffload.tiering.lane import TieringCounts, TierLane
from kvoffload.tiering.wait import TierWait
from kvoffload.tiers.contract import GroupedTier, Mask, Memory, SecondaryTier, check_tiers

LONGEST_WAIT_S = 1e9
"""Limit of a wait for tiers, in seconds: about 30 years. The operating system refuses longer waits."""


@dataclass(eq=False)
class TierStack:
    """RAM and the tiers behind it.

    Attributes:
        ram: the manager of RAM's slots.
        memory: the memory of RAM's slots.
        in_flight_share: share of RAM's usable slots that writes may pin. Reads may reserve the same share.
        compute_s: seconds to compute a block; None while unknown.
    """

    ram: OffloadingManager
    memory: Memory
    lanes: list[TierLane]
    in_flight_share: float
    deadline_s: float
    compute_s: float | None
    clock: Callable[[], float]
    counts: TieringCounts

    @property
    def max_in_flight(self) -> int:
        """Limit of blocks pinned for writes: `in_flight_share` of RAM's present usable slots."""
        return share_of(self.in_flight_share, self.ram.usable_blocks)

    def extend_paths(self, ctx: RequestContext, wait: TierWait) -> None:
        """Report a request's path, as far as it is known, to the tiers that store blocks in groups."""
        for lane in self.lanes:
            if lane.tier.group_blocks > 1:
                lane.tier.extend_path(wait.records[lane.row], ctx.keys())

    def below(self, keys: Keys, wait: TierWait) -> tuple[list[Mask], Mask]:
        """Find the blocks that are in tiers.

        Returns two values: a list with a mask for each tier, and one mask of the blocks that are in any tier.
        A tier that is silent (`is_silent`) or excluded from this request (`wait.left_out`) counts as empty.
        """
        now = self.clock()
        in_tiers = [
            np.zeros(len(keys), np.bool_)
            if lane.row in wait.left_out or self.is_silent(lane, now)
            else lane.tier.contains(keys, wait.records[lane.row])
            for lane in self.lanes
        ]
        return in_tiers, np.logical_or.reduce(in_tiers)

    def is_silent(self, lane: TierLane, now: float) -> bool:
        """Return True if a tier must not be read now, because it does not answer or its reads fail."""
        return lane.is_stalled(now, self.deadline_s) or lane.is_failing(now)

    def drain(self, until: float) -> bool:
        """Drain every tier. Returns False if a tier exceeds the deadline.

        First each tier gets an equal share of the time, so that a tier that hangs leaves time for the others.
        Then the slow tiers get the rest.

        Args:
            until: the deadline, as a time of `time.monotonic`.
        """
        slow = []
        for row, lane in enumerate(self.lanes):
            if not lane.tier.drain(_left_s(until) / (len(self.lanes) - row)):
                slow.append(lane)
        if len(self.lanes) == 1 or not _left_s(until):
            return not slow
        drained = [lane.tier.drain(_left_s(until)) for lane in slow]
        return all(drained)


def _left_s(until: float) -> float:
    return min(max(0.0, until - time.monotonic()), LONGEST_WAIT_S)


def share_of(max_in_flight: float, capacity_blocks: int) -> int:
    """Convert `max_in_flight`, a share of `capacity_blocks`, to a number of blocks, at least 1."""
    return max(1, int(max_in_flight * capacity_blocks))


def check_compute_s(seconds: float | None) -> float | None:
    """Return `seconds`, the time to compute a block, if it is valid; otherwise raise `ConfigError`.

    None is valid.
    """
    if seconds is not None and not finite(seconds) > 0:
        raise ConfigError("recompute_s_per_block", seconds, "allowed: more than 0 seconds, or None")
    return seconds


def check_stack(
    capacity_blocks: int,
    memory: Memory,
    tiers: Sequence[SecondaryTier],
    deadline_s: float,
    max_in_flight: float,
) -> None:
    """Raise `ConfigError` if an argument of a `TieredManager` is invalid."""
    if not hasattr(memory, "pool"):
        raise ConfigError("ram", memory, "allowed: a MemoryTier")
    check_tiers(tiers)
    num_slots, block_bytes = memory.pool.shape
    if num_slots < capacity_blocks:
        raise ConfigError("ram", f"{num_slots} slots", f"allowed: {capacity_blocks} or more")
    if not finite(deadline_s) > 0:
        raise ConfigError("deadline_s", deadline_s, "allowed: more than 0 seconds")
    if not 0 < finite(max_in_flight) <= 1:
        raise ConfigError("max_in_flight", max_in_flight, "allowed: a share, more than 0 and up to 1")
    most = share_of(max_in_flight, capacity_blocks)
    for tier in tiers:
        if tier.block_bytes != block_bytes:
            raise ConfigError(
                f"tier {tier.name}", f"blocks of {tier.block_bytes} bytes", f"RAM has blocks of {block_bytes}"
            )
        if isinstance(tier, GroupedTier) and tier.group_blocks > most:
            raise ConfigError(
                f"tier {tier.name}",
                f"objects of {tier.group_blocks} blocks",
                f"RAM of {capacity_blocks} blocks can have at most {most} blocks in flight: make RAM "
                "larger, or pack= smaller on all machines",
            )
