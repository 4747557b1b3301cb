"""What a tiered manager knows of each tier behind RAM: its jobs, how fast it is, whether it answers.

Decides nothing: `manager` decides what to do about a slow tier.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvoffload.core.plans import LoadPlan, StorePlan
from kvoffload.structures.keys import Keys
from kvoffload.tiering.speed import ReadSpeed
from kvoffload.tiers.contract import NO_JOB, Mask, SecondaryTier
from kvoffload.tiers.guarded import GuardedTier

_STALLED_AFTER_DEADLINES = 4
_FAILING_AFTER_READS = 3
_PROBE_EVERY_S = 10.0
_MEMORY_OF_WRITES = 0.9
"""The weight that the past keeps after each write: about the last ten count."""


@dataclass
class TieringCounts:
    """What happened between RAM and the tiers behind it. In blocks, except where a line says otherwise."""

    promoted: int = 0
    lost: int = 0
    """Not promoted: they could not be read, or were not what was stored."""
    no_room: int = 0
    """Found in a tier, but RAM had no room for them."""
    not_worth: int = 0
    """Found in a tier, but expected to take longer to read than to compute."""
    not_offered: int = 0
    """Left RAM before a tier could take them: it writes slower than blocks come, or did not answer."""
    read_ahead: int = 0
    """Read for requests that waited in the engine's queue."""
    gave_up: int = 0
    """Requests that waited as long as they may."""
    stale: int = 0
    """Believed to be in a tier that machines share, and no longer there."""


@dataclass
class Job:
    """A write (a `LoadPlan`: its blocks are pinned), a read or a probe that a tier has not finished, and when
    it was submitted."""

    plan: LoadPlan | StorePlan | Keys
    since: float


class TierLane:
    """A tier behind RAM, the jobs that it has not finished, and how fast it reads and writes.

    Attributes:
        tier: the tier, guarded: none of its calls raises.
        num_reading, num_writing: blocks that are being read, and written.
        write_seconds: how long writing a block has taken of late, waiting in the tier's queue included; 0
            while it has written nothing.
        probing: blocks that the tier is being asked for.
        waiting: blocks of RAM that are offered when the tier has written others, in that order.
    """

    def __init__(self, tier: SecondaryTier, clock: Callable[[], float]) -> None:
        self.tier = GuardedTier(tier, clock)
        self.jobs: dict[int, Job] = {}
        self.speed = ReadSpeed()
        self._next_probe = 0.0
        self.num_reading = self.num_writing = 0
        self.write_seconds = 0.0
        self._failed_reads, self._next_try = 0, 0.0
        self.waiting: dict[bytes, None] = {}
        self.probing: set[bytes] = set()

    def probe(self, keys: Keys, now: float) -> None:
        """Ask for those of these blocks that it is not being asked for."""
        new = np.array([key not in self.probing for key in keys], np.bool_)
        if not new.any():
            return
        asked = keys.take(new)
        job = self.tier.submit_probe(asked)
        if job != NO_JOB:
            self.jobs[job] = Job(asked, now)
            self.probing.update(asked)

    def is_stalled(self, now: float, deadline_s: float) -> bool:
        """Whether its oldest job is so late that it gets no more jobs."""
        if not self.jobs:
            return False
        oldest = next(iter(self.jobs.values()))
        return now - oldest.since > _STALLED_AFTER_DEADLINES * deadline_s

    def has_read(self, ok: Mask, stale: Mask | None, seconds: float, now: float) -> None:
        """A read has ended. What did not arrive says nothing about speed: a tier that fails at once is not a
        fast one. Nor has it failed if it answered that the blocks had left."""
        self.num_reading -= len(ok)
        if num_sound := int(np.count_nonzero(ok)):
            self.speed.learn(num_sound, seconds)
        if num_sound or (stale is not None and stale.any()):
            self._failed_reads = 0
            return
        self._failed_reads += 1
        if self._failed_reads >= _FAILING_AFTER_READS:
            self._next_try = now + _PROBE_EVERY_S

    def has_written(self, num_blocks: int, num_sound: int, seconds: float) -> None:
        """A write of `num_blocks` has ended, and `num_sound` of them are written."""
        self.num_writing -= num_blocks
        if num_sound:
            one, past = seconds / num_sound, self.write_seconds
            self.write_seconds = one if past == 0.0 else past + (1.0 - _MEMORY_OF_WRITES) * (one - past)

    def is_failing(self, now: float) -> bool:
        """Whether its last reads brought nothing, and it is too early to try again."""
        return now < self._next_try

    def seconds_for(self, num_blocks: Any) -> Any:
        """How long a read of so many more blocks will take, those before it in the queue included: a number,
        or an array for an array of numbers."""
        return self.speed.seconds_for(num_blocks + self.num_reading)

    def is_probe_due(self, now: float) -> bool:
        """Whether it is time for a read that is not expected to be worth it; then the next is in 10 s."""
        if now < self._next_probe:
            return False
        self._next_probe = now + _PROBE_EVERY_S
        return True
