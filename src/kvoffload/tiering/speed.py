"""A model of the duration of a tier's reads, fitted to past reads."""

from __future__ import annotations

from typing import Any

_DECAY = 0.95
"""Factor by which each read multiplies the weight of earlier reads, so that about the last 20 reads count."""


class ReadSpeed:
    """A read's duration as a linear function of the number of blocks, fitted by least squares.

    The weight of a read decays exponentially with its age. As long as all reads have had the same size, the
    fixed part of a read's duration cannot be fitted, and is assumed to be 0.
    """

    def __init__(self) -> None:
        self._weight = self._blocks = self._seconds = self._blocks_squared = self._product = 0.0

    def learn(self, num_blocks: int, seconds: float) -> None:
        """Add a read to the model. Cost: O(1)."""
        self._weight = _DECAY * self._weight + 1.0
        self._blocks = _DECAY * self._blocks + num_blocks
        self._seconds = _DECAY * self._seconds + seconds
        self._blocks_squared = _DECAY * self._blocks_squared + num_blocks * num_blocks
        self._product = _DECAY * self._product + num_blocks * seconds

    def seconds_for(self, num_blocks: Any) -> Any:
        """Predict the seconds to read `num_blocks`, a number or an array; 0 before the first read."""
        if self._blocks == 0.0:
            return 0.0 * num_blocks
        spread = self._weight * self._blocks_squared - self._blocks * self._blocks
        slope = 0.0
        if spread > 1e-9 * self._weight * self._blocks_squared:
            slope = (self._weight * self._product - self._blocks * self._seconds) / spread
        fixed_s = (self._seconds - slope * self._blocks) / self._weight
        if slope <= 0.0 or fixed_s < 0.0:
            slope, fixed_s = self._seconds / self._blocks, 0.0
        return fixed_s + slope * num_blocks
