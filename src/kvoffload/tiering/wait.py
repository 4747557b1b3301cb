"""What a tiered manager knows of a request beside its path: what it waits for, and for how long it may."""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass
class TierWait:
    """A request that tiers are asked for.

    Attributes:
        records: the record that each tier keeps of it.
        wanted: single keys that a tier has, and nobody has begun to read.
        given_up: keys that it does not wait for any more.
        came_from: the number of the tier, from 1, that blocks came up from while it waited for them.
        num_storing: blocks in flight to RAM.
        may_wait_s: how long it may wait for what it has asked for.
        gave_up: it waits for nothing any more.
    """

    records: list[object]
    wanted: list[bytes] = field(default_factory=list)
    given_up: set[bytes] = field(default_factory=set)
    came_from: dict[bytes, int] = field(default_factory=dict)
    num_storing: int = 0
    may_wait_s: float = math.inf
    gave_up: bool = False
    finished: bool = False
    _since: float = 0.0
    _last_asked: float = -math.inf

    def goes_on(self, now: float, deadline_s: float) -> bool:
        """Whether it waits on. After a pause of more than the deadline it is another wait."""
        if now - self._last_asked > deadline_s:
            self._since = now
        self._last_asked = now
        self.gave_up = self.gave_up or now - self._since > self.may_wait_s
        return not self.gave_up
