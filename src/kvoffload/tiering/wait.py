"""The wait of a request for blocks in tiers, and the limits of the wait."""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass
class TierWait:
    """The wait of one request for blocks in tiers.

    Attributes:
        records: for each tier, the record of the request that `SecondaryTier.begin_request` returned.
        wanted: single keys to promote or probe in the next step.
        given_up: keys that the request no longer waits for.
        came_from: maps the key of each block that was promoted for this request to the number of the block's
            tier, from 1.
        left_out: indices in `stack.lanes` of the tiers from which this request loads nothing.
        num_storing: number of the request's blocks that are being stored into RAM.
        may_wait_s: longest wait for blocks, in seconds.
        gave_up: True after the wait has exceeded `may_wait_s`, until `restart`.
        finished: True after `finish_request`.
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

    def restart(self) -> None:
        """Start a new wait with the full time limit."""
        self.gave_up = False
        self._last_asked = self._last_probed = -math.inf

    def keeps_waiting(self, now: float, deadline_s: float) -> bool:
        """Return True if the request has waited for blocks for at most `may_wait_s`.

        If more than `deadline_s` has passed since the last call, a new wait starts.
        """
        if now - self._last_asked > deadline_s:
            self._since = now
        self._last_asked = now
        self.gave_up = self.gave_up or now - self._since > self.may_wait_s
        return not self.gave_up

    def waits_for_probe(self, now: float, timeout_s: float, deadline_s: float) -> bool:
        """Return True if the request has waited for probes for at most `timeout_s` in all.

        If more than `deadline_s` has passed since the last call, a new wait starts.
        """
        if now - self._last_probed > deadline_s:
            self._probing_since = now
        self._last_probed = now
        return now - self._probing_since <= timeout_s

    def probed_for_s(self, now: float, timeout_s: float) -> float:
        """Return the time spent waiting for probes, at most `timeout_s`; 0 before the first probe."""
        return min(now - self._probing_since, timeout_s) if self._last_probed > -math.inf else 0.0
