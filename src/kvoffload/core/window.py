"""Size of the window: the number of cold device blocks that the engine offers to a victim tier per step."""

from __future__ import annotations

_MARGIN = 1.5
"""Size of the window, as a multiple of the largest number of blocks that the device recently dropped in a
step."""
_DECAY = 0.999
"""In each step in which the device drops blocks, the window's size is multiplied by this factor. After 693
such steps the window is half as large.

The decay is slow, because a step that loads a long prefix is rare but makes the device drop many blocks at
once. If the window were too small then, blocks would be dropped without an offer, and without a dropped
block the rest of its prefix is useless in the tier (docs/performance.md has measurements).
"""


class Window:
    """Computes the size of the window: how many cold device blocks the engine offers to a victim tier.

    The window should contain the blocks that the device drops in the next step. So its size is 1.5 times the
    largest number of blocks that the device recently dropped in one step. The size decays slowly.

    Args:
        smallest: lower limit of the size: the number of blocks that one step may allocate.
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
