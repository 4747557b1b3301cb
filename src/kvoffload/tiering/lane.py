"""What a tiered manager knows of each tier behind RAM: its jobs, how fast it reads, whether it answers.

Decides nothing: `manager` decides what to do about a slow tier.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvoffload.core.plans import LoadPlan, StorePlan
from kvoffload.tiering.speed import ReadSpeed
from kvoffload.tiers.base import SecondaryTier

_STALLED_AFTER_DEADLINES = 4
_FAILING_AFTER_READS = 3
_PROBE_EVERY_S = 10.0


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


@dataclass
class Job:
    """A read or write that a tier has not finished: its plan, and when it was submitted."""

    plan: LoadPlan | StorePlan
    since: float


class TierLane:
    """A tier behind RAM, the jobs that it has not finished, and how fast it reads.

    Attributes:
        num_reading, num_writing: blocks that are being read, and written.
        waiting: blocks of RAM that are offered when the tier has written others, in that order.
        num_refused: blocks of jobs that the tier did not begin, because it raised an exception.
    """

    def __init__(self, tier: SecondaryTier) -> None:
        self.tier = tier
        self.jobs: dict[int, Job] = {}
        self.speed = ReadSpeed()
        self._next_probe = 0.0
        self.num_reading = self.num_writing = self.num_refused = 0
        self._failed_reads, self._next_try = 0, 0.0
        self.waiting: dict[bytes, None] = {}

    def is_stalled(self, now: float, deadline_s: float) -> bool:
        """Whether its oldest job is so late that it gets no more jobs."""
        if not self.jobs:
            return False
        oldest = next(iter(self.jobs.values()))
        return now - oldest.since > _STALLED_AFTER_DEADLINES * deadline_s

    def has_read(self, num_blocks: int, num_sound: int, seconds: float, now: float) -> None:
        """A read of `num_blocks` has ended, and `num_sound` of them arrived. What did not arrive says nothing
        about speed: a tier that fails at once is not a fast one."""
        self.num_reading -= num_blocks
        if num_sound:
            self.speed.learn(num_sound, seconds)
            self._failed_reads = 0
            return
        self._failed_reads += 1
        if self._failed_reads >= _FAILING_AFTER_READS:
            self._next_try = now + _PROBE_EVERY_S

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
