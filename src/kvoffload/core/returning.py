"""Uses of blocks while the device holds them, recorded by a victim tier.

When the device loads a block, the policy forgets the block, and would treat it as new when the device drops
it. Therefore the tier remembers the keys of used blocks in two lists: keys used once, and keys used again. A
use of a block that is in the tier puts its key in the second list at once. When the device drops the block,
the policy receives the flag `reused`, which is True if the key was in the second list.
"""

from __future__ import annotations

import numpy as np

from kvoffload.structures.index import ABSENT, Index, find
from kvoffload.structures.jit import U64Matrix, inline
from kvoffload.structures.keylists import KeyLists, forget, forget_coldest, remember
from kvoffload.structures.lists import LIST, move_to_head

ONCE, AGAIN = 0, 1


def known_keys(index: Index, is_needed: bool) -> KeyLists:
    """Create the lists `ONCE` and `AGAIN`. Each list has room for one key per slot, or for none if not
    `is_needed`.

    A full list forgets its least recently used key. A block whose key was forgotten returns to the policy as
    new. Memory: 56 bytes and two keys per slot.
    """
    return KeyLists(2 * len(index.keys) if is_needed else 0, index.key_bytes, 2)


@inline
def note_use(known: KeyLists, batch: U64Matrix, row: int, h: np.uint64, again: bool) -> None:
    """Record a use of the block with key ``batch[row]`` and hash `h`.

    If `again` is True, the block counts as used again even if this is its first recorded use.

    Cost: one index probe, or two if another key must be forgotten.
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
def pop_use(known: KeyLists, batch: U64Matrix, row: int, h: np.uint64) -> bool:
    """Forget the key of a block that the device has dropped; return True if the block was used again."""
    lists = known.lists
    if lists.num_positions == 0:
        return False
    position = find(known.index, batch, row, h)
    if position == ABSENT:
        return False
    was_used_again = lists.links[position, LIST] == lists.num_positions + AGAIN
    forget(known, position)
    return was_used_again
