"""The number of cold device blocks that are offered to a victim tier after each step."""

from __future__ import annotations

_MARGIN = 1.5
"""Size of the window, relative to the largest number of blocks that the device recently dropped in a step."""
_DECAY = 0.999
"""Decay of the window for each step that drops blocks; 693 such steps halve the window.

The decay is slow, because steps that load a long prefix are rare but drop many blocks at once. A block that
is dropped without an offer cuts off the rest of its prefix (docs/performance.md has measurements).
"""


class Window:
    """The window's size: 1.5 times the largest number of blocks that the device dropped in one step.

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
        self._recent = max(self.smallest, _DECAY * self._recent, _MARGIN * num_dropped)
        self.size = min(int(self._recent), self.largest)
