"""What a tiered manager knows of a request besides its path: what it waits for, and for how long it may."""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass
class TierWait:
    """The wait of one request for blocks in tiers.

    Attributes:
        records: the record that each tier keeps of the request.
        wanted: single keys that a tier has and whose promotion has not begun.
        given_up: keys that it no longer waits for.
        came_from: for blocks promoted while it waited for them: the number of their tier, from 1.
        left_out: the tiers from which it gets nothing, by their place in the stack.
        num_storing: its blocks in flight to RAM.
        may_wait_s: how long it may wait for the blocks that it has asked for.
        gave_up: it no longer waits for anything.
    """

    records: list[object]
    wanted: list[bytes] = field(default_factory=list)
    given_up: set[bytes] = field(default_factory=set)
    came_from: dict[bytes, int] = field(default_factory=dict)
    left_out: set[int] = field(default_factory=set)
    num_storing: int = 0
    may_wait_s: float = math.inf
    gave_up: bool = False
    finished: bool = False
    _since: float = 0.0
    _last_asked: float = -math.inf
    _probing_since: float = 0.0
    _last_probed: float = -math.inf

    def keeps_waiting(self, now: float, deadline_s: float) -> bool:
        """Whether it keeps waiting. After a pause longer than the deadline a new wait begins."""
        if now - self._last_asked > deadline_s:
            self._since = now
        self._last_asked = now
        self.gave_up = self.gave_up or now - self._since > self.may_wait_s
        return not self.gave_up

    def waits_for_probe(self, now: float, timeout_s: float, deadline_s: float) -> bool:
        """Whether it waits for tiers to say what they have: no longer than this, however many are asked and
        how often. After a pause longer than the deadline a new wait begins."""
        if now - self._last_probed > deadline_s:
            self._probing_since = now
        self._last_probed = now
        return now - self._probing_since <= timeout_s

    def probed_for_s(self, now: float, timeout_s: float) -> float:
        """How long it has waited for that, if it has, and no longer than it may."""
        return min(now - self._probing_since, timeout_s) if self._last_probed > -math.inf else 0.0
