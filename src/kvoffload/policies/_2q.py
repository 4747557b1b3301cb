"""2Q: a queue for new blocks, a memory of those that left it, and a list for those that returned.

Source: Johnson and Shasha, "2Q: A Low Overhead High Performance Buffer Management Replacement Algorithm",
VLDB 1994, the full version.
"""

from __future__ import annotations

import numpy as np

from kvoffload.core.ghosts import comes_back, leave_ghost, prefetch_exchange
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
    """A1in and Am; A1out.

    Attributes:
        arriving: whether a block of A1in has yet to get its final place there.
        max_a1in: Kin; A1in may be larger when it need not provide a victim.
        new_a1in: blocks of the batch at hand that will join A1in. They join after its last victim was chosen;
            until then they count here, and those for Am have their slots marked (`push_marked`).
        is_victim_tier: there a use is told of a block that returns, at once.
    """

    lists: Lists
    a1out: KeyLists
    arriving: BoolArray
    max_a1in: int
    new_a1in: int
    is_victim_tier: int


class TwoQ(CompiledPolicy):
    """New blocks wait in a FIFO; those asked for again join an LRU.

    The paper's full version: A1in, A1out and Am, for batches with pins.

    A new block enters A1in, first in, first out. A hit there does nothing: uses in quick succession count as
    one. While A1in holds more than Kin = 25 % of the blocks, its oldest leaves, and A1out
    remembers its key; otherwise the coldest of Am leaves, and is forgotten. A block that A1out remembers
    enters Am, a list by recency. A1out remembers Kout = 50 % as many keys as there are blocks.

    Where the paper is silent, because it knows neither batches, pins nor failures:

    - A batch is processed block by block: each finds the lists as the one before left them. Blocks of one
      batch never evict each other, and its head is the youngest.
    - A block gets its final place in A1in when the request that stored it finishes, so that a path that was
      stored in parts is lost from its tail, too. In Am a request's own store is no second access, but the
      block moves to the front with its path.
    - In a victim tier a block that returns used again joins Am: it was new when it came for the first time.
    - The key of a block that A1out remembers is removed from A1out before a victim leaves for it.
    - If the list that should provide the victim is empty or all its blocks are protected, the victim is
      taken from the other one; blocks that leave A1in are remembered, those that leave Am are not, in any
      case.
    - While slots are free no victim is needed, and A1in may grow beyond Kin, as in the paper.
    - A block whose store failed, or that was damaged, is not remembered: it did not leave as a victim.

    Cost per block: O(1), and O(skipped) for protected blocks at the cold ends. Memory: 13 bytes a block
    for the lists, and for each two blocks 28 bytes and a key for A1out.
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

    def order(self) -> list[int]:
        return self.state.lists.members(A1IN)[::-1] + self.state.lists.members(AM)[::-1]

    def lists(self) -> tuple[list[int], list[int], list[bytes]]:
        """Slots of A1in and Am, keys of A1out, each most recent first. Cost: O(blocks), for tests."""
        lists = self.state.lists
        return lists.members(A1IN), lists.members(AM), self.state.a1out.members(A1OUT)


@TwoQ.compiled
def access(own: State, used: Used) -> None:
    """A hit moves a block to the front of Am; in A1in only the end of the storing request moves it, and in a
    victim tier that it returns."""
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
    """Whether the next victim is to be one of A1in."""
    return own.lists.links[own.lists.num_positions + A1IN, LIST] + own.new_a1in > own.max_a1in


@inline
def _evict(own: State, cache: Cache, path: Path) -> int:
    """A block leaves, and is remembered if it was in A1in. Returns its slot; ABSENT if none may leave."""
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
        joins_am = comes_back(own.a1out, new, i)
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
