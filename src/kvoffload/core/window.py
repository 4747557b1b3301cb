"""The number of cold device blocks that are offered to a victim tier after each step."""

from __future__ import annotations

_DECAY = 0.99
"""Decay of the window for each step that drops blocks; 69 such steps halve the window."""


class Window:
    """The window's size: the largest number of blocks that the device dropped in one step.

    The size decays with each step that drops blocks.

    Args:
        smallest: lower limit of the size: the blocks that one step may allocate.
        largest: upper limit of the size, for example half of the device's blocks.

    Attributes:
        size: current number of blocks.
    """

    def __init__(self, smallest: int, largest: int) -> None:
        self.smallest, self.largest = smallest, largest
        self._recent = float(smallest)
        self.size = min(smallest, largest)

    def adapt(self, num_dropped: int) -> None:
        """Adapt `size` to a step that made the device drop `num_dropped` blocks, 1 or more."""
        self._recent = max(self.smallest, _DECAY * self._recent, num_dropped)
        self.size = min(int(self._recent), self.largest)
