"""A tier behind RAM, with its unfinished jobs, speed and health. Makes no decisions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvoffload.core.plans import LoadPlan, StorePlan
from kvoffload.structures.keys import Keys
from kvoffload.tiering.speed import ReadSpeed
from kvoffload.tiers.contract import NO_JOB, JobResult, SecondaryTier
from kvoffload.tiers.guarded import GuardedTier

_STALLED_AFTER_DEADLINES = 4
_FAILING_AFTER_READS = 3
_RETRY_AFTER_S = 10.0
_WRITE_DECAY = 0.9
"""Decay factor of the average write time. With this factor about the last ten writes count."""


@dataclass
class TieringCounts:
    """Counters of promotion and cascade, in blocks unless noted."""

    promoted: int = 0
    lost: int = 0
    """Blocks that were not promoted, because the read failed or the checksum did not match."""
    no_room: int = 0
    """Blocks that a tier had, but that were not read because RAM had no room."""
    not_worth: int = 0
    """Blocks that a tier had, but that were not read because computing them is faster."""
    not_offered: int = 0
    """Blocks that left RAM before a tier could write them, because the tier was slow or did not answer."""
    read_ahead: int = 0
    """Blocks read for requests that waited in the engine's queue."""
    gave_up: int = 0
    """Number of requests that stopped waiting at their time limit."""
    stale: int = 0
    """Blocks that a shared tier's presence cache listed, although the server had lost them."""


@dataclass
class LaneJob:
    """A job that a tier has not finished.

    Attributes:
        plan: for a write, the `LoadPlan` of the pinned blocks; for a read, the `StorePlan` of the reserved
            slots; for a probe, the keys.
        since: time of submission.
    """

    plan: LoadPlan | StorePlan | Keys
    since: float


class TierLane:
    """A tier behind RAM, with its unfinished jobs and speed.

    Attributes:
        tier: the tier in a `GuardedTier`, so that no call raises.
        row: position in the stack, from 0 for the fastest tier.
        jobs: unfinished jobs by their number.
        num_reading, num_writing: blocks in flight.
        write_s_per_block: recent average of the seconds to write a block, including time in the tier's
            queue; 0 before the first write.
        probing: blocks of the probes in flight.
        waiting: queue of blocks in RAM, oldest first. The cascade offers them when the tier has room.
        num_accepted: blocks that the tier has accepted for writing.
        num_lost: queued blocks that left RAM before the tier accepted them.
        has_quotas: True after quotas of tenants have been set, even if they were removed later.
    """

    def __init__(self, tier: SecondaryTier, row: int, clock: Callable[[], float]) -> None:
        self.tier, self.row = GuardedTier(tier, clock), row
        self.jobs: dict[int, LaneJob] = {}
        self.speed = ReadSpeed()
        self._next_trial = 0.0
        self.num_reading = self.num_writing = 0
        self.write_s_per_block = 0.0
        self._failed_reads, self._next_try = 0, 0.0
        self.waiting: dict[bytes, None] = {}
        self.num_accepted = self.num_lost = 0
        self.probing: set[bytes] = set()
        self.has_quotas = False

    def probe(self, keys: Keys, now: float) -> None:
        """Ask a shared tier which of these blocks it has. Leaves out blocks with a probe in flight."""
        is_new = np.array([key not in self.probing for key in keys], np.bool_)
        if not is_new.any():
            return
        new = keys.take(is_new)
        job = self.tier.submit_probe(new)
        if job != NO_JOB:
            self.jobs[job] = LaneJob(new, now)
            self.probing.update(new)

    def is_stalled(self, now: float, deadline_s: float) -> bool:
        """Return True if the oldest job has run for more than four times `deadline_s`.

        A stalled tier gets no new jobs. A tier that is stuck (`GuardedTier.is_stuck`) does not count as
        stalled, because it rejects all jobs.
        """
        if not self.jobs or self.tier.is_stuck:
            return False
        oldest = next(iter(self.jobs.values()))
        return now - oldest.since > _STALLED_AFTER_DEADLINES * deadline_s

    def is_failing(self, now: float) -> bool:
        """Return True if the tier must not be read now.

        Reads pause for 10 s after the third consecutive failed read, and after each further failed read.
        """
        return now < self._next_try

    @property
    def has_jobs(self) -> bool:
        """True if blocks are queued, or jobs are in flight in a tier that is not stuck."""
        return bool(self.waiting) or (bool(self.jobs) and not self.tier.is_stuck)

    def end_read(self, result: JobResult, now: float) -> None:
        """Update speed and health after a read.

        The speed is computed from sound blocks only, because a failed block may have taken no time. A read
        that found only stale blocks (`JobResult.stale`) does not count as a failure.
        """
        self.num_reading -= len(result.ok)
        if num_sound := int(np.count_nonzero(result.ok)):
            self.speed.learn(num_sound, result.seconds)
        if num_sound or (result.stale is not None and result.stale.any()):
            self._failed_reads = 0
            return
        self._failed_reads += 1
        if self._failed_reads >= _FAILING_AFTER_READS:
            self._next_try = now + _RETRY_AFTER_S

    def end_write(self, num_blocks: int, num_written: int, seconds: float) -> None:
        """Update the speed after a write. `num_written` of the `num_blocks` blocks were written."""
        self.num_writing -= num_blocks
        if num_written:
            latest, past = seconds / num_written, self.write_s_per_block
            self.write_s_per_block = latest if past == 0.0 else past + (1.0 - _WRITE_DECAY) * (latest - past)

    def read_s(self, num_blocks: Any) -> Any:
        """Predict the seconds that a read would take if it started now, behind the reads in flight.

        Returns 0 before the tier's first read. `num_blocks` is a number of blocks, or an array of numbers.
        """
        return self.speed.seconds_for(num_blocks + self.num_reading)

    def is_trial_due(self, now: float) -> bool:
        """Return True at most once in 10 s: a trial is then due.

        A trial is a read that runs although computing is expected to be faster. It measures the tier's speed,
        which may have risen.
        """
        if now < self._next_trial:
            return False
        self._next_trial = now + _RETRY_AFTER_S
        return True
