"""ARC: a list for blocks used once, a list for blocks used again, and a balance learnt from regret.

Source: Megiddo and Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003, figure 4.
"""

from __future__ import annotations

import numpy as np

from kvoffload.core.policy import EvictionPolicy
from kvoffload.core.protection import Protected, coldest_evictable
from kvoffload.core.slots import SlotArray
from kvoffload.structures.index import ABSENT, Index, find, hash_row, home_bucket
from kvoffload.structures.jit import (
    BoolArray,
    F64Array,
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

T1, T2 = 0, 1
B1, B2 = 0, 1


class ARC(EvictionPolicy):
    """The paper's algorithm, with all four cases and its bounds, for batches with pins.

    T1 holds blocks used by one request, T2 by more; B1 and B2 remember the keys of blocks that left them. A
    miss that B1 remembers raises the target size `p` of T1, a miss that B2 remembers lowers it, and the block
    enters T2. At all times ``|T1| + |B1| <= c`` and ``|T1| + |T2| + |B1| + |B2| <= 2c``.

    Where the paper is silent, because it knows neither batches, pins nor failures:

    - A batch is processed block by block: each finds the lists and the target as the one before left them.
      Blocks of one batch never evict each other.
    - A request's own store is no second access: when it finishes, the block moves to the front of the
      list that it is in, with the rest of its path.
    - A miss counts when the block is stored. A refused block changes nothing, not even the target.
    - If every block of the list that REPLACE points to is protected, the victim is taken from the other
      list and becomes a ghost of the list that it was in.
    - While slots are free (at the start, after failures), no victim is needed: REPLACE is skipped, the rest
      of the case runs, so the target learns and the bounds hold.
    - A block whose store failed, or that was damaged, leaves no ghost: it was not chosen as a victim. While
      the slot of a damaged block is still pinned, the lists are shorter than the cache; still at most `c`
      ghosts are kept (the coldest of B2 is dropped, then the coldest of B1).

    Cost per block: O(1), and O(skipped) for protected blocks at the cold ends. Memory: 12 bytes a block
    for the lists, and 28 bytes and the key for each of `c` ghosts.
    """

    name = "arc"
    good_for = "chat under pressure, where some prefixes come back again and again"
    paper = "Megiddo and Modha, ARC: A Self-Tuning, Low Overhead Replacement Cache, FAST 2003"

    def __init__(self, index: Index) -> None:
        super().__init__(index)
        self._lists = Lists(self.capacity_blocks, 2)
        self._ghosts = KeyLists(self.capacity_blocks, index.key_bytes, 2)
        self._target = np.zeros(1, np.float64)

    def access(self, slots: SlotArray, reused: BoolArray) -> None:
        _access(self._lists.links, slots, reused)

    def replace(self, keys: Keys, slots: SlotArray, num_free: int, protected: Protected) -> None:
        _replace(
            keys.words,
            slots,
            num_free,
            self._lists.links,
            self._ghosts.index.table,
            self._ghosts.index.keys,
            self._ghosts.lists.links,
            self._target,
            protected.ref_cnt,
            protected.path_table,
            protected.path_keys,
            protected.index_keys,
        )

    def remove(self, slots: SlotArray) -> None:
        unlink_all(self._lists.links, slots)

    def reset(self) -> None:
        self._lists.clear()
        self._ghosts.clear()
        self._target[0] = 0.0

    def stats(self) -> dict[str, float]:
        return {
            "t1_blocks": self._lists.size(T1),
            "t2_blocks": self._lists.size(T2),
            "b1_keys": self._ghosts.lists.size(B1),
            "b2_keys": self._ghosts.lists.size(B2),
            "target_t1_blocks": float(self._target[0]),
        }

    def order(self) -> list[int]:
        return self._lists.members(T1)[::-1] + self._lists.members(T2)[::-1]

    def lists(self) -> tuple[list[int], list[int], list[bytes], list[bytes]]:
        """Slots of T1 and T2, keys of B1 and B2, each most recent first. Cost: O(blocks), for tests."""
        return (
            self._lists.members(T1),
            self._lists.members(T2),
            self._ghosts.members(B1),
            self._ghosts.members(B2),
        )


@kernel
def _access(links: I32Matrix, slots: ReadI32Array, reused: ReadBoolArray) -> int:
    """Case I: a hit makes the block the most recent of T2."""
    t2 = links.shape[0] - 1
    for i in range(slots.shape[0] - 1, -1, -1):
        move_to_head(links, t2 if reused[i] else links[slots[i], LIST], slots[i])
    return slots.shape[0]


@inline
def _prefetch(
    batch: U64Matrix,
    num_evicted: int,
    p: float,
    links: I32Matrix,
    index_keys: U64Matrix,
    ghost_table: U64Array,
    ghost_keys: U64Matrix,
    ghost_links: I32Matrix,
) -> None:
    """Ask for the cache lines of a batch: blocks and ghosts that are likely to leave, as the lists are now.

    A wrong guess (the balance may tip within the batch) costs time, never correctness.
    """
    c = index_keys.shape[0]
    t1, t2 = links.shape[0] - 2, links.shape[0] - 1
    b1, b2 = ghost_links.shape[0] - 3, ghost_links.shape[0] - 2
    tail = t1 if links[t1, LIST] > p else t2
    ghost_tail = b1 if links[t1, LIST] + ghost_links[b1, LIST] == c else b2
    for i in range(batch.shape[0]):
        prefetch(ghost_table, home_bucket(ghost_table, hash_row(batch, i)))
    slot, ghost = links[tail, PREV], ghost_links[ghost_tail, PREV]
    for _ in range(num_evicted):
        prefetch(index_keys, slot)
        prefetch(ghost_keys, ghost)
        slot, ghost = links[slot, PREV], ghost_links[ghost, PREV]
    slot, ghost = links[tail, PREV], ghost_links[ghost_tail, PREV]
    for _ in range(num_evicted):
        if slot < c:
            prefetch(ghost_table, home_bucket(ghost_table, hash_row(index_keys, slot)))
        if ghost < c:
            prefetch(ghost_table, home_bucket(ghost_table, hash_row(ghost_keys, ghost)))
        slot, ghost = links[slot, PREV], ghost_links[ghost, PREV]


@inline
def _find_victim(
    links: I32Matrix,
    from_t1: bool,
    next_t1: int,
    next_t2: int,
    ref_cnt: I32Array,
    path_table: U64Array,
    path_keys: U64Matrix,
    index_keys: U64Matrix,
) -> tuple[int, int, int, int]:
    """The coldest block of T1 or T2 that may leave, of the other list if all of the first are protected.

    Returns: the block, its list (the same, if there is none), and where the search goes on in T1 and T2.
    """
    t1, t2 = links.shape[0] - 2, links.shape[0] - 1
    victim, origin = t2, t2
    for second_try in range(2):
        origin = t1 if from_t1 != (second_try == 1) else t2
        cold = next_t1 if origin == t1 else next_t2
        victim = coldest_evictable(links, cold, origin, ref_cnt, path_table, path_keys, index_keys)
        if origin == t1:
            next_t1 = links[victim, PREV] if victim != t1 else victim
        else:
            next_t2 = links[victim, PREV] if victim != t2 else victim
        if victim != origin:
            break
    return victim, origin, next_t1, next_t2


@inline
def _remember_victim(
    victim: int,
    ghosts: int,
    ghost_table: U64Array,
    ghost_keys: U64Matrix,
    ghost_links: I32Matrix,
    index_keys: U64Matrix,
) -> None:
    """The key of a block that leaves joins B1 or B2; the coldest ghost makes room, if there is none."""
    b1, b2, spare = ghost_links.shape[0] - 3, ghost_links.shape[0] - 2, ghost_links.shape[0] - 1
    if ghost_links[spare, LIST] == 0:
        coldest = b2 if ghost_links[b2, LIST] > 0 else b1
        forget_coldest(ghost_table, ghost_keys, ghost_links, coldest)
    h = hash_row(index_keys, victim)
    remember(ghost_table, ghost_keys, ghost_links, ghosts, index_keys, victim, h)


@inline
def _join(links: I32Matrix, slots: I32Array, t1: int, t2: int) -> None:
    """New blocks join their lists, the first of the batch foremost; the sign of a slot tells the list."""
    for i in range(slots.shape[0] - 1, -1, -1):
        if slots[i] < 0:
            slots[i] = ~slots[i]
            push_head(links, t2, slots[i])
        else:
            push_head(links, t1, slots[i])


@kernel
def _replace(
    batch: ReadU64Matrix,
    slots: I32Array,
    num_free: int,
    links: I32Matrix,
    ghost_table: U64Array,
    ghost_keys: U64Matrix,
    ghost_links: I32Matrix,
    target: F64Array,
    ref_cnt: I32Array,
    path_table: U64Array,
    path_keys: U64Matrix,
    index_keys: U64Matrix,
) -> int:
    c = index_keys.shape[0]
    t1, t2 = links.shape[0] - 2, links.shape[0] - 1
    b1, b2 = ghost_links.shape[0] - 3, ghost_links.shape[0] - 2
    # New blocks join their lists after the last victim was chosen: a reused slot must not be taken for the
    # block that left it. Until then they count here.
    new_t1 = 0
    new_t2 = 0
    p = target[0]
    num_evicted = slots.shape[0] - num_free
    _prefetch(batch, num_evicted, p, links, index_keys, ghost_table, ghost_keys, ghost_links)
    # Where the search for the next victim continues: blocks that were protected before still are.
    next_t1, next_t2 = links[t1, PREV], links[t2, PREV]
    for i in range(slots.shape[0]):
        h = hash_row(batch, i)
        ghost = find(ghost_table, ghost_keys, batch, i, h)
        in_b1 = ghost != ABSENT and ghost_links[ghost, LIST] == b1
        in_b2 = ghost != ABSENT and ghost_links[ghost, LIST] == b2
        size_b1, size_b2 = ghost_links[b1, LIST], ghost_links[b2, LIST]
        size_t1 = links[t1, LIST] + new_t1
        size_t2 = links[t2, LIST] + new_t2
        keeps_ghost = True
        from_t1 = False
        if in_b1:  # Case II
            p = min(p + max(1.0, size_b2 / size_b1), float(c))
            forget(ghost_table, ghost_keys, ghost_links, ghost)
        elif in_b2:  # Case III
            p = max(p - max(1.0, size_b1 / size_b2), 0.0)
            forget(ghost_table, ghost_keys, ghost_links, ghost)
        elif size_t1 + size_b1 == c:  # Case IV, A
            if size_t1 < c:
                forget_coldest(ghost_table, ghost_keys, ghost_links, b1)
            else:
                keeps_ghost = False
        elif size_t1 + size_t2 + size_b1 + size_b2 == 2 * c:
            # Case IV, B. With a full cache the bound on ghosts below would do the same.
            forget_coldest(ghost_table, ghost_keys, ghost_links, b2)

        if i >= num_free:  # REPLACE
            from_t1 = size_t1 >= 1 and (size_t1 > p or (in_b2 and size_t1 == p))
            from_t1 = from_t1 or not keeps_ghost
            victim, origin, next_t1, next_t2 = _find_victim(
                links, from_t1, next_t1, next_t2, ref_cnt, path_table, path_keys, index_keys
            )
            if victim == origin:
                return i
            unlink(links, victim)
            if keeps_ghost:
                ghosts = b1 if origin == t1 else b2
                _remember_victim(victim, ghosts, ghost_table, ghost_keys, ghost_links, index_keys)
            slots[i] = victim
        # The sign marks the list until the blocks can join it.
        if in_b1 or in_b2:
            new_t2 += 1
            slots[i] = ~slots[i]
        else:
            new_t1 += 1
    _join(links, slots, t1, t2)
    target[0] = p
    return slots.shape[0]
