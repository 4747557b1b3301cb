"""The number of cold blocks of a device cache that are offered to a victim tier after each step."""

from __future__ import annotations

_DECAY = 0.99
"""Decay of the largest step, per step that drops blocks: after 70 such steps half of it is left."""


class Window:
    """A window as large as an engine's largest recent step, in blocks that the step made the device drop.

    Args:
        smallest: lower limit of the size; blocks that a step of computation may take.
        largest: upper limit of the size, for example half of the device's blocks.

    Attributes:
        size: current number of blocks.
    """

    def __init__(self, smallest: int, largest: int) -> None:
        self.smallest, self.largest = smallest, largest
        self._recent = float(smallest)
        self.size = min(smallest, largest)

    def follow(self, num_dropped: int) -> None:
        """Adapt `size` to a step that made the device drop `num_dropped` blocks, 1 or more."""
        self._recent = max(self.smallest, _DECAY * self._recent, num_dropped)
        self.size = min(int(self._recent), self.largest)
