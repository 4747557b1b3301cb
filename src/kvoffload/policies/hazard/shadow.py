"""A simulated LRU cache of the same size, which counts the blocks that LRU would have served.

Owns a list over the positions of a key history. Does not know slots.
"""

from __future__ import annotations

from kvoffload.structures.jit import inline
from kvoffload.structures.lists import LIST, PREV, UNLISTED, Lists, move_to_head, push_head, unlink
from kvoffload.structures.structs import Struct


class ShadowLRU(Struct):
    """An exact simulation of LRU beside a policy. The history must have every key that LRU could hold.

    For each request, the served blocks are counted: they begin after the blocks that the device serves, and
    end before the first missing block. Call `compare` for each block of the request, from last to first, then
    `end_path`.

    Args:
        num_keys: positions of the history.
        capacity_blocks: capacity of the cache.

    Attributes:
        blocks: the positions that LRU holds, most recent first.
        lead: blocks served by LRU minus blocks served by the policy. The policy that owns the simulation also
            writes the lead, to let it decay.
        own_run, lru_run: numbers of consecutive blocks that the policy holds and that LRU holds. Both are
            counted from the block that was compared last, towards the end of the request.

    Memory: 12 bytes per position of the history. Cost: a move in a list for each block.
    """

    blocks: Lists
    capacity_blocks: int
    lead: float
    own_run: int
    lru_run: int

    def __init__(self, num_keys: int, capacity_blocks: int) -> None:
        super().__init__(blocks=Lists(num_keys, 1), capacity_blocks=capacity_blocks)

    def clear(self) -> None:
        """Forget all blocks, and set the counts to 0. Cost: O(keys of the history)."""
        self.blocks.clear()
        self.lead = 0.0
        self.own_run = self.lru_run = 0


@inline
def leave_shadow(shadow: ShadowLRU, position: int) -> None:
    """Remove this key from the simulated LRU, if present."""
    if shadow.blocks.links[position, LIST] != UNLISTED:
        unlink(shadow.blocks.links, position)


@inline
def enter_shadow(shadow: ShadowLRU, position: int) -> None:
    """Make this key the most recent of the simulated LRU."""
    links, recent = shadow.blocks.links, shadow.blocks.num_positions
    if links[position, LIST] != UNLISTED:
        move_to_head(links, recent, position)
    else:
        push_head(links, recent, position)


@inline
def shrink_to_capacity(shadow: ShadowLRU) -> None:
    """Evict the least recent blocks above the capacity."""
    links, recent = shadow.blocks.links, shadow.blocks.num_positions
    while links[recent, LIST] > shadow.capacity_blocks:
        unlink(links, links[recent, PREV])


@inline
def compare(shadow: ShadowLRU, position: int, is_held: bool, asked: bool, is_victim_tier: int) -> None:
    """Record a use of the key at `position`.

    The block becomes the most recent of the simulated LRU, even after a miss, because LRU stores missed
    blocks. In a victim tier the block leaves the simulated LRU instead, because the block moves to the
    device.

    Args:
        is_held: True if the policy holds the block.
        asked: False if the device served the block. The use then counts neither for the policy nor for LRU.
        is_victim_tier: 1 for a victim tier, otherwise 0.
    """
    if asked:
        is_in_lru = shadow.blocks.links[position, LIST] != UNLISTED
        shadow.own_run = shadow.own_run + 1 if is_held else 0
        shadow.lru_run = shadow.lru_run + 1 if is_in_lru else 0
    if is_victim_tier:
        leave_shadow(shadow, position)
    else:
        enter_shadow(shadow, position)


@inline
def end_path(shadow: ShadowLRU) -> None:
    """Finish the comparison of a request."""
    shrink_to_capacity(shadow)
    shadow.lead += shadow.lru_run - shadow.own_run
    shadow.own_run = shadow.lru_run = 0
