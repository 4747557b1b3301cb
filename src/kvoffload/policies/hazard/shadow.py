"""What plain LRU would hold in the same slots, and how many more or fewer blocks it would have served.

Owns one list over the positions of a history of keys. Does not know slots, nor what the count is used for.
"""

from __future__ import annotations

from kvoffload.structures.jit import inline
from kvoffload.structures.lists import LIST, PREV, UNLISTED, Lists, move_to_head, push_head, unlink
from kvoffload.structures.structs import Struct


class ShadowLRU(Struct):
    """LRU beside a policy, as large as its cache: exact, because a history knows every key that LRU could
    hold. It counts what a request is served: the leading run of its blocks behind those of the device.

    A request is observed by `compare` for each of its blocks, from the last to the first, then `end_path`.

    Args:
        num_keys: positions of the history. capacity_blocks: of the cache.

    Attributes:
        blocks: the positions that LRU holds, most recent first.
        lead: blocks that LRU has served more than the owner, so far; the owner may set it.
        own_run, lru_run: how many blocks of the request at hand, from the one compared last on, the owner
            and LRU hold without a gap.

    Memory: 12 bytes a position of the history. Cost: a move in a list for each block.
    """

    blocks: Lists
    capacity_blocks: int
    lead: float
    own_run: int
    lru_run: int

    def __init__(self, num_keys: int, capacity_blocks: int) -> None:
        super().__init__(blocks=Lists(num_keys, 1), capacity_blocks=capacity_blocks)

    def clear(self) -> None:
        """Forget every block and count. Cost: O(keys of the history)."""
        self.blocks.clear()
        self.lead = 0.0
        self.own_run = self.lru_run = 0


@inline
def leave_shadow(shadow: ShadowLRU, position: int) -> None:
    """LRU does not hold this key any more, if it did."""
    if shadow.blocks.links[position, LIST] != UNLISTED:
        unlink(shadow.blocks.links, position)


@inline
def enter_shadow(shadow: ShadowLRU, position: int) -> None:
    """This key is the most recent that LRU holds."""
    links, recent = shadow.blocks.links, shadow.blocks.num_positions
    if links[position, LIST] != UNLISTED:
        move_to_head(links, recent, position)
    else:
        push_head(links, recent, position)


@inline
def shrink_to_capacity(shadow: ShadowLRU) -> None:
    """The least recent blocks leave, as many as are too many."""
    links, recent = shadow.blocks.links, shadow.blocks.num_positions
    while links[recent, LIST] > shadow.capacity_blocks:
        unlink(links, links[recent, PREV])


@inline
def compare(shadow: ShadowLRU, position: int, is_held: bool, asked: bool, is_victim_tier: int) -> None:
    """A request uses the key at `position`, and the owner has its block or not. Whether it was `asked` for:
    otherwise the device had it.

    LRU stores what it misses. A victim tier's blocks leave for the device, and come when that drops them.
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
    """The blocks of a request were compared."""
    shrink_to_capacity(shadow)
    shadow.lead += shadow.lru_run - shadow.own_run
    shadow.own_run = shadow.lru_run = 0
