"""2Q: a queue for new blocks, a memory of those that left it, and a list for those that returned.

Source: Johnson and Shasha, "2Q: A Low Overhead High Performance Buffer Management Replacement Algorithm",
VLDB 1994, the full version.
"""

from __future__ import annotations

import numpy as np

from kvoffload.core.policy import EvictionPolicy
from kvoffload.core.protection import Protected, coldest_evictable
from kvoffload.core.slots import SlotArray
from kvoffload.structures.index import ABSENT, Index, find, hash_row, home_bucket
from kvoffload.structures.jit import (
    BoolArray,
    I32Array,
    I32Matrix,
    ReadBoolArray,
    ReadI32Array,
    ReadU64Matrix,
    U64Array,
    U64Matrix,
    inline,
    kernel,
    prefetch,
)
from kvoffload.structures.keylists import KeyLists, forget, forget_coldest, remember
from kvoffload.structures.keys import Keys
from kvoffload.structures.lists import LIST, PREV, Lists, move_to_head, push_head, unlink, unlink_all

A1IN, AM = 0, 1
A1OUT = 0


class TwoQ(EvictionPolicy):
    """The paper's full version: A1in, A1out and Am, for batches with pins.

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
    - The key of a returning block is removed from A1out before a victim leaves for it.
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
        self._max_a1in = max(1, self.capacity_blocks // 4)
        self._lists = Lists(self.capacity_blocks, 2)
        self._a1out = KeyLists(max(1, self.capacity_blocks // 2), index.key_bytes, 1)
        self._arriving = np.full(self.capacity_blocks, False, np.bool_)

    def access(self, slots: SlotArray, reused: BoolArray) -> None:
        _access(self._lists.links, self._arriving, slots, reused)

    def replace(self, keys: Keys, slots: SlotArray, num_free: int, protected: Protected) -> None:
        _replace(
            keys.words,
            slots,
            num_free,
            self._lists.links,
            self._arriving,
            self._max_a1in,
            self._a1out.index.table,
            self._a1out.index.keys,
            self._a1out.lists.links,
            protected.ref_cnt,
            protected.path_table,
            protected.path_keys,
            protected.index_keys,
        )

    def remove(self, slots: SlotArray) -> None:
        unlink_all(self._lists.links, slots)

    def reset(self) -> None:
        self._lists.clear()
        self._a1out.clear()

    def stats(self) -> dict[str, float]:
        return {
            "a1in_blocks": self._lists.size(A1IN),
            "am_blocks": self._lists.size(AM),
            "a1out_keys": self._a1out.lists.size(A1OUT),
        }

    def order(self) -> list[int]:
        return self._lists.members(A1IN)[::-1] + self._lists.members(AM)[::-1]

    def lists(self) -> tuple[list[int], list[int], list[bytes]]:
        """Slots of A1in and Am, keys of A1out, each most recent first. Cost: O(blocks), for tests."""
        return self._lists.members(A1IN), self._lists.members(AM), self._a1out.members(A1OUT)


@kernel
def _access(links: I32Matrix, arriving: BoolArray, slots: ReadI32Array, reused: ReadBoolArray) -> int:
    am = links.shape[0] - 1
    for i in range(slots.shape[0] - 1, -1, -1):
        slot = slots[i]
        home = links[slot, LIST]
        if home == am:
            move_to_head(links, am, slot)
        elif arriving[slot] and not reused[i]:
            arriving[slot] = False
            move_to_head(links, home, slot)
    return slots.shape[0]


@inline
def _prefetch(
    batch: U64Matrix,
    num_evicted: int,
    links: I32Matrix,
    tail: int,
    index_keys: U64Matrix,
    ghost_table: U64Array,
) -> None:
    """Ask for the cache lines of a batch: blocks that are likely to leave, as the lists are now."""
    for i in range(batch.shape[0]):
        prefetch(ghost_table, home_bucket(ghost_table, hash_row(batch, i)))
    slot = links[tail, PREV]
    for _ in range(num_evicted):
        prefetch(index_keys, slot)
        slot = links[slot, PREV]
    slot = links[tail, PREV]
    for _ in range(num_evicted):
        if slot < index_keys.shape[0]:
            prefetch(ghost_table, home_bucket(ghost_table, hash_row(index_keys, slot)))
        slot = links[slot, PREV]


@kernel
def _replace(
    batch: ReadU64Matrix,
    slots: I32Array,
    num_free: int,
    links: I32Matrix,
    arriving: BoolArray,
    max_a1in: int,
    ghost_table: U64Array,
    ghost_keys: U64Matrix,
    ghost_links: I32Matrix,
    ref_cnt: I32Array,
    path_table: U64Array,
    path_keys: U64Matrix,
    index_keys: U64Matrix,
) -> int:
    a1in, am = links.shape[0] - 2, links.shape[0] - 1
    a1out, spare = ghost_links.shape[0] - 2, ghost_links.shape[0] - 1
    # New blocks join their lists after the last victim was chosen; until then they count here.
    new_a1in = 0
    likely = a1in if links[a1in, LIST] > max_a1in else am
    _prefetch(batch, slots.shape[0] - num_free, links, likely, index_keys, ghost_table)
    # Where the search for the next victim continues: blocks that were protected before still are.
    next_a1in, next_am = links[a1in, PREV], links[am, PREV]
    for i in range(slots.shape[0]):
        ghost = find(ghost_table, ghost_keys, batch, i, hash_row(batch, i))
        if ghost != ABSENT:
            forget(ghost_table, ghost_keys, ghost_links, ghost)
        if i >= num_free:
            from_a1in = links[a1in, LIST] + new_a1in > max_a1in
            victim = am
            for second_try in range(2):
                if from_a1in != (second_try == 1):
                    victim = coldest_evictable(
                        links, next_a1in, a1in, ref_cnt, path_table, path_keys, index_keys
                    )
                    next_a1in = victim
                else:
                    victim = coldest_evictable(links, next_am, am, ref_cnt, path_table, path_keys, index_keys)
                    next_am = victim
                if victim < a1in:
                    break
            if victim >= a1in:
                return i
            if links[victim, LIST] == a1in:
                next_a1in = links[victim, PREV]
                if ghost_links[spare, LIST] == 0:
                    forget_coldest(ghost_table, ghost_keys, ghost_links, a1out)
                key_hash = hash_row(index_keys, victim)
                remember(ghost_table, ghost_keys, ghost_links, a1out, index_keys, victim, key_hash)
            else:
                next_am = links[victim, PREV]
            unlink(links, victim)
            slots[i] = victim
        # The sign marks the list until the blocks can join it.
        if ghost != ABSENT:
            slots[i] = ~slots[i]
        else:
            new_a1in += 1
    for i in range(slots.shape[0] - 1, -1, -1):
        if slots[i] < 0:
            slots[i] = ~slots[i]
            push_head(links, am, slots[i])
        else:
            push_head(links, a1in, slots[i])
            arriving[slots[i]] = True
    return slots.shape[0]
