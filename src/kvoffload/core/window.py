"""How many blocks at the cold end of a device cache a victim tier is offered after each step."""

from __future__ import annotations

_DECAY = 0.99
"""Decay of the largest step, per step that drops blocks: after 70 such steps half of it is left."""


class Window:
    """Follows the largest recent step of an engine, in blocks that the step made the device drop.

    Args:
        smallest: blocks that a step of computation may take; the window never falls below this number.
        largest: half of the device's blocks, for instance; the window never exceeds it.

    Attributes:
        size: blocks in the window now.
    """

    def __init__(self, smallest: int, largest: int) -> None:
        self.smallest, self.largest = smallest, largest
        self._recent = float(smallest)
        self.size = min(smallest, largest)

    def follow(self, num_dropped: int) -> None:
        """Adapt `size` to a step that made the device drop `num_dropped` blocks, 1 or more."""
        self._recent = max(self.smallest, _DECAY * self._recent, num_dropped)
        self.size = min(int(self._recent), self.largest)
