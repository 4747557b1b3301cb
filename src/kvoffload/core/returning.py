"""What a victim tier remembers of a block while no policy orders it: whether it was used again.

A policy forgets a block that the device holds as well, and the block would be as new when the device drops
it. So the tier itself remembers the keys that requests used, in two lists: of blocks used once, and of blocks
used again, by another request or as a hit from this tier. Decides nothing: the policy is told when a block
returns.
"""

from __future__ import annotations

import numpy as np

from kvoffload.structures.index import ABSENT, Index, find
from kvoffload.structures.jit import U64Matrix, inline
from kvoffload.structures.keylists import KeyLists, forget, forget_coldest, remember
from kvoffload.structures.lists import LIST, move_to_head

ONCE, AGAIN = 0, 1


def known_keys(index: Index, is_needed: bool) -> KeyLists:
    """Memory for as many keys in each list as the tier has slots; for none if it is not needed.

    A device with as many blocks as the tier needs no more. Of a larger one the keys used longest ago are
    forgotten, and their blocks return as new. Memory: 56 bytes a slot, and two keys.
    """
    return KeyLists(2 * len(index.keys) if is_needed else 0, index.key_bytes, 2)


@inline
def note_use(known: KeyLists, batch: U64Matrix, row: int, h: np.uint64, again: bool) -> None:
    """A request uses the block with the key ``batch[row]``: again if that is known, or if it was used before.

    Cost: one index probe; another to forget a key for a new one.
    """
    lists, links = known.lists, known.lists.links
    if lists.num_positions == 0:
        return
    position = find(known.index, batch, row, h)
    home = lists.num_positions + (AGAIN if again or position != ABSENT else ONCE)
    is_there = position != ABSENT and links[position, LIST] == home
    if not is_there and 2 * links[home, LIST] == lists.num_positions:
        forget_coldest(known, home)
    if position == ABSENT:
        remember(known, home, batch, row, h)
    else:
        move_to_head(links, home, position)


@inline
def take_out(known: KeyLists, batch: U64Matrix, row: int, h: np.uint64) -> bool:
    """A block returns, and the policy will know it: forget it here. Whether it was used again."""
    lists = known.lists
    if lists.num_positions == 0:
        return False
    position = find(known.index, batch, row, h)
    if position == ABSENT:
        return False
    was_used_again = lists.links[position, LIST] == lists.num_positions + AGAIN
    forget(known, position)
    return was_used_again
