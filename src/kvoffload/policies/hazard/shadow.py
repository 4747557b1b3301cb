"""A simulated LRU cache, which compares the hits of LRU with the hits of the policy Hazard.

The simulated cache is as large as the real one. It holds no keys: its list links positions of Hazard's key
history. Does not know the slots of the real cache.
"""

from __future__ import annotations

from kvoffload.structures.jit import inline
from kvoffload.structures.lists import LIST, PREV, UNLISTED, Lists, move_to_head, push_head, unlink
from kvoffload.structures.structs import Struct


class ShadowLRU(Struct):
    """An exact simulation of an LRU cache that receives the same requests as the policy.

    For each request, call `compare` for each of its blocks, from last to first, then `end_path`. The key
    history, whose positions the list links, must remember every key that LRU could hold.

    Args:
        num_keys: number of positions of the history.
        capacity_blocks: capacity of the cache.

    Attributes:
        blocks: the positions that LRU holds, most recent first.
        lead: prefix hits of LRU minus prefix hits of the policy. The policy lets old differences decay
            (`keep_promise`).
        own_run, lru_run: number of consecutive hits, of the policy and of LRU, that begin at the block
            compared last. Blocks that the device serves are not counted.

    Memory: 12 bytes per position of the history. Cost: one list operation for each block.
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
    """Remove the key at this position of the history from the simulated LRU, if present."""
    if shadow.blocks.links[position, LIST] != UNLISTED:
        unlink(shadow.blocks.links, position)


@inline
def enter_shadow(shadow: ShadowLRU, position: int) -> None:
    """Make the key at this position of the history the most recent key of the simulated LRU."""
    links, recent = shadow.blocks.links, shadow.blocks.num_positions
    if links[position, LIST] != UNLISTED:
        move_to_head(links, recent, position)
    else:
        push_head(links, recent, position)


@inline
def shrink_to_capacity(shadow: ShadowLRU) -> None:
    """Evict the simulated LRU's least recent keys until the others fit its capacity."""
    links, recent = shadow.blocks.links, shadow.blocks.num_positions
    while links[recent, LIST] > shadow.capacity_blocks:
        unlink(links, links[recent, PREV])


@inline
def compare(shadow: ShadowLRU, position: int, is_held: bool, asked: bool, is_victim_tier: int) -> None:
    """Record a use of a block whose key is at `position` of the history.

    The block becomes the most recent of the simulated LRU, even after a miss, because LRU stores missed
    blocks. In a victim tier the block leaves the simulated LRU instead, because it moves to the device.

    Args:
        is_held: True if the policy holds the block.
        asked: False if the device served the block, so that this tier was not looked up.
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
    """End a request: evict blocks above the capacity; add LRU's prefix hits minus the policy's to `lead`."""
    shrink_to_capacity(shadow)
    shadow.lead += shadow.lru_run - shadow.own_run
    shadow.own_run = shadow.lru_run = 0
