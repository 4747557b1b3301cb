"""2Q: a FIFO queue of new blocks, ghosts of blocks evicted from the queue, and an LRU list.

Source: Johnson and Shasha, "2Q: A Low Overhead High Performance Buffer Management Replacement Algorithm",
VLDB 1994, the full version.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvoffload.core.ghosts import leave_ghost, pop_ghost, prefetch_exchange
from kvoffload.core.policy import CompiledPolicy
from kvoffload.core.request import Path, Used
from kvoffload.core.state import Cache, Entering, victim_of_either
from kvoffload.structures.index import ABSENT, Index
from kvoffload.structures.jit import BoolArray, inline
from kvoffload.structures.keylists import KeyLists
from kvoffload.structures.lists import LIST, Lists, move_to_head, push_marked, rewind, take, unlink_all
from kvoffload.structures.structs import Struct

A1IN, AM = 0, 1
A1OUT = 0


class State(Struct):
    """The state of a 2Q cache.

    Attributes:
        lists: A1in and Am.
        a1out: ghosts.
        arriving: True for each block of A1in until its storing request finishes.
        max_a1in: Kin, in blocks. While slots are free and no victims are needed, A1in can be larger.
        new_a1in: number of blocks of the current batch that join A1in after all victims are chosen. Until
            then, slots of blocks for Am are marked (`push_marked`).
        is_victim_tier: 1 if `access` reports blocks that return from the device.
    """

    lists: Lists
    a1out: KeyLists
    arriving: BoolArray
    max_a1in: int
    new_a1in: int
    is_victim_tier: int


class TwoQ(CompiledPolicy):
    """New blocks enter a FIFO; returning blocks enter an LRU list.

    The paper's full version with A1in, A1out and Am, for batches with pins.

    A new block enters A1in, a FIFO. A hit in A1in does not move the block, so that uses in quick succession
    count as one. While A1in holds more than Kin = 25 % of the blocks, its oldest block is evicted, and A1out
    remembers the key. Otherwise the coldest block of Am is evicted and forgotten. A block whose key is in
    A1out enters Am, an LRU list. The capacity of A1out is Kout = 50 % of the cache's blocks.

    The paper does not cover batches (the blocks of one store), pins (blocks in use by a transfer) and
    failures. Our choices:

    - A batch is processed block by block, and each block changes the lists for the next. Blocks of one batch
      never evict each other, and the head of the batch is the youngest.
    - When the storing request finishes, its blocks move to the fronts of their lists, A1in or Am. So the tail
      of a path leaves first, even if the path was stored in parts. This move does not count as an access.
    - In a victim tier, a block that returns from the device moves from A1in to Am if it was used again.
    - If a new block's key is in A1out, the key is removed from A1out before a victim is chosen.
    - If the list that should provide the victim is empty or fully protected, the other list provides the
      victim. In this case, too, A1out remembers a victim only if it came from A1in.
    - While slots are free, no victim is needed. So A1in can grow beyond Kin, as in the paper.
    - A block whose store failed, or that was damaged, is not remembered, because it was not evicted.

    Cost per block: O(1), and O(skipped) for protected blocks at the cold ends. Memory: 13 bytes per block for
    the lists, and 28 bytes and a key per two blocks for A1out.
    """

    name = "2q"
    good_for = "working sets of several times the cache, a little less than lirs; behind lru where they fit"
    paper = (
        "Johnson and Shasha, 2Q: A Low Overhead High Performance Buffer Management Replacement Algorithm, "
        "VLDB 1994"
    )

    def __init__(self, index: Index) -> None:
        super().__init__(index)
        self.state = State(
            lists=Lists(self.capacity_blocks, 2),
            a1out=KeyLists(max(1, self.capacity_blocks // 2), index.key_bytes, 1),
            arriving=np.full(self.capacity_blocks, False, np.bool_),
            max_a1in=max(1, self.capacity_blocks // 4),
        )

    def reset(self) -> None:
        self.state.lists.clear()
        self.state.a1out.clear()

    def stats(self) -> dict[str, float]:
        return {
            "a1in_blocks": self.state.lists.size(A1IN),
            "am_blocks": self.state.lists.size(AM),
            "a1out_keys": self.state.a1out.lists.size(A1OUT),
        }

    def ordered_lists(self) -> tuple[Lists, Sequence[int]]:
        return self.state.lists, (A1IN, AM)


@TwoQ.compiled
def access(own: State, used: Used) -> None:
    """Move used blocks of Am to the front of Am.

    A used block of A1in stays in place. It moves to the front of A1in when the request that stored it ends.
    In a victim tier, it moves to Am when it returns from the device after another use.
    """
    links, arriving, am = own.lists.links, own.arriving, own.lists.num_positions + AM
    for i in range(used.count - 1, -1, -1):
        slot = used.slots[i]
        if links[slot, LIST] == am or (own.is_victim_tier and used.reused[i]):
            move_to_head(links, am, slot)
        elif arriving[slot] and not used.reused[i]:
            arriving[slot] = False
            move_to_head(links, links[slot, LIST], slot)


@TwoQ.compiled
def remove(own: State, used: Used) -> None:
    unlink_all(own.lists.links, used.slots, used.count)


@inline
def _a1in_provides(own: State) -> bool:
    return own.lists.links[own.lists.num_positions + A1IN, LIST] + own.new_a1in > own.max_a1in


@inline
def _evict(own: State, cache: Cache, path: Path) -> int:
    """Evict a block, and leave a ghost if the block was in A1in.

    Returns the slot, or ABSENT if no block is evictable.
    """
    links, c = own.lists.links, own.lists.num_positions
    victim = victim_of_either(cache, path, own.lists, A1IN if _a1in_provides(own) else AM)
    if victim != ABSENT:
        if links[victim, LIST] == c + A1IN:
            leave_ghost(own.a1out, own.a1out.lists.num_positions + A1OUT, cache, victim)
        take(own.lists, victim)
    return victim


@TwoQ.compiled
def replace(own: State, new: Entering, cache: Cache, path: Path) -> None:
    links, slots, c = own.lists.links, new.slots, own.lists.num_positions
    own.new_a1in, own.is_victim_tier = 0, not new.one_prefix
    prefetch_exchange(new, cache, own.lists, A1IN if _a1in_provides(own) else AM, own.a1out, A1OUT)
    rewind(own.lists)
    for i in range(new.count):
        joins_am = pop_ghost(own.a1out, new, i)
        if i >= new.num_given:
            slots[i] = _evict(own, cache, path)
            if slots[i] == ABSENT:
                return
        own.arriving[slots[i]] = True
        if joins_am:
            slots[i] = ~slots[i]
        else:
            own.new_a1in += 1
    push_marked(links, c + A1IN, c + AM, slots, new.count)
