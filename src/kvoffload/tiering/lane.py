"""What a tiered manager knows of each tier behind RAM: its jobs, how fast it reads, whether it answers.

Decides nothing: `manager` decides what to do about a slow tier.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvoffload.core.plans import LoadPlan, StorePlan
from kvoffload.tiering.speed import ReadSpeed
from kvoffload.tiers.base import SecondaryTier

_STALLED_AFTER_DEADLINES = 4
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
        num_writing: blocks that are being written.
        waiting: blocks of RAM that are offered when the tier has written others, in that order.
        num_refused: blocks of jobs that the tier did not begin, because it raised an exception.
    """

    def __init__(self, tier: SecondaryTier) -> None:
        self.tier = tier
        self.jobs: dict[int, Job] = {}
        self.speed = ReadSpeed()
        self._next_probe = 0.0
        self.num_writing = self.num_refused = 0
        self.waiting: dict[bytes, None] = {}

    def is_stalled(self, now: float, deadline_s: float) -> bool:
        """Whether its oldest job is so late that it gets no more jobs."""
        if not self.jobs:
            return False
        oldest = next(iter(self.jobs.values()))
        return now - oldest.since > _STALLED_AFTER_DEADLINES * deadline_s

    def is_worth(self, num_blocks: int, compute_s: float, now: float) -> bool:
        """Whether reading this many blocks takes no longer than computing them, or a probe is due."""
        if self.speed.seconds_for(num_blocks) <= compute_s:
            return True
        if now < self._next_probe:
            return False
        self._next_probe = now + _PROBE_EVERY_S
        return True
