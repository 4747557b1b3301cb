"""How long jobs of a tier take, learnt from past ones: to decide whether a read is worth the wait.

Knows neither blocks nor tiers.
"""

from __future__ import annotations

from typing import Any

_MEMORY = 0.95
"""The weight that the past keeps after each read: about the last 20 reads count."""


class ReadSpeed:
    """A straight line through the last reads, seconds over blocks: least squares that forgets exponentially.

    Reads of a single size do not determine the fixed cost of a read: then the line passes through the
    origin.
    """

    def __init__(self) -> None:
        self._weight = self._blocks = self._seconds = self._blocks_squared = self._product = 0.0

    def learn(self, num_blocks: int, seconds: float) -> None:
        """A read of `num_blocks` took `seconds`. Cost: O(1)."""
        self._weight = _MEMORY * self._weight + 1.0
        self._blocks = _MEMORY * self._blocks + num_blocks
        self._seconds = _MEMORY * self._seconds + seconds
        self._blocks_squared = _MEMORY * self._blocks_squared + num_blocks * num_blocks
        self._product = _MEMORY * self._product + num_blocks * seconds

    def seconds_for(self, num_blocks: Any) -> Any:
        """How long a read of `num_blocks`, a number or an array, will take; 0 while nothing is known."""
        if self._blocks == 0.0:
            return 0.0 * num_blocks
        spread = self._weight * self._blocks_squared - self._blocks * self._blocks
        slope = 0.0
        if spread > 1e-9 * self._weight * self._blocks_squared:
            slope = (self._weight * self._product - self._blocks * self._seconds) / spread
        before_the_first = (self._seconds - slope * self._blocks) / self._weight
        if slope <= 0.0 or before_the_first < 0.0:
            slope, before_the_first = self._seconds / self._blocks, 0.0
        return before_the_first + slope * num_blocks
