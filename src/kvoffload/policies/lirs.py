"""LIRS: blocks whose last two uses are close together stay, the others pass through a short queue.

Source: Jiang and Zhang, "LIRS: An Efficient Low Inter-reference Recency Set Replacement Policy to Improve
Buffer Cache Performance", SIGMETRICS 2002.
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
    I64Array,
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

LIR, QUEUE = 0, 1
GONE = 0
NO_BOTTOM = 2**63 - 1


class LIRS(EvictionPolicy):
    """The paper's algorithm for batches with pins: stack S, queue Q, 99 % LIR blocks and 1 % HIR blocks.

    S holds keys by recency down to the coldest LIR block: LIR blocks, HIR blocks, and keys of HIR blocks
    that have left. A HIR block, resident or not, that is used while in S becomes LIR, and the coldest LIR
    block becomes HIR and the last in Q. A HIR block that is used while not in S stays HIR, and moves to the
    end of Q. The first of Q leaves; if it is in S, its key stays there.

    There is no stack to prune: every block and key has the time of its last use, and is in S if that is
    later than that of the coldest LIR block. The decisions are those of the stack (the naive twin has one),
    and no call pays for a long pruning.

    Where the paper is silent, because it knows neither batches, pins nor failures:

    - A batch is processed block by block: each finds S and Q as the one before left them.
      Blocks of one batch never evict each other, and its head is the most recent.
    - Q is short, so a long request soon finds all of Q protected. Then the coldest LIR block that may
      leave does, and is not remembered, since it was at the bottom of S. The new block is still HIR, and Q
      has more than its 1 % for a while: so a scan does not take over the LIR set. (To let it enter as LIR
      costs a third of all hits on a recorded chat, with 1,000 to 2,000 blocks.)
    - While the LIR set is not full, a block that gets a free slot is LIR, as in the paper, and so is a HIR
      block that is used again, in S or not: otherwise a lost LIR set would never grow again.
    - A request's own store is no second access: when it finishes, the block moves to the top of S, and to
      the end of Q if it is HIR, with the rest of its path.
    - At most `c` keys of blocks that have left are kept; those that left first are forgotten first, in S or
      not.
      (In the paper S has no bound.)
    - A block whose store failed, or that was damaged, is not remembered.

    A cache of one block has no LIR block: it behaves as LRU.

    Cost per block: O(1), and O(skipped) for protected blocks at the cold ends. Memory: 20 bytes a block,
    and 36 bytes and the key for each of `c` keys of blocks that have left.
    """

    name = "lirs"
    good_for = "agents and chat whose working set is several times the cache; behind lru where it fits"
    paper = (
        "Jiang and Zhang, LIRS: An Efficient Low Inter-reference Recency Set Replacement Policy to Improve "
        "Buffer Cache Performance, SIGMETRICS 2002"
    )

    def __init__(self, index: Index) -> None:
        super().__init__(index)
        self._max_lir = self.capacity_blocks - max(1, self.capacity_blocks // 100)
        self._lists = Lists(self.capacity_blocks, 2)
        self._gone = KeyLists(self.capacity_blocks, index.key_bytes, 1)
        self._used_at = np.full(self.capacity_blocks, 0, np.int64)
        self._gone_used_at = np.full(self.capacity_blocks, 0, np.int64)
        self._clock = np.zeros(1, np.int64)

    def access(self, slots: SlotArray, reused: BoolArray) -> None:
        _access(self._lists.links, self._used_at, self._clock, self._max_lir, slots, reused)

    def replace(self, keys: Keys, slots: SlotArray, num_free: int, protected: Protected) -> None:
        _replace(
            keys.words,
            slots,
            num_free,
            self._lists.links,
            self._used_at,
            self._clock,
            self._max_lir,
            self._gone.index.table,
            self._gone.index.keys,
            self._gone.lists.links,
            self._gone_used_at,
            protected.ref_cnt,
            protected.path_table,
            protected.path_keys,
            protected.index_keys,
        )

    def remove(self, slots: SlotArray) -> None:
        unlink_all(self._lists.links, slots)

    def reset(self) -> None:
        self._lists.clear()
        self._gone.clear()
        self._clock.fill(0)

    def stats(self) -> dict[str, float]:
        return {
            "lir_blocks": self._lists.size(LIR),
            "hir_blocks": self._lists.size(QUEUE),
            "gone_keys": self._gone.lists.size(GONE),
        }

    def order(self) -> list[int]:
        return self._lists.members(QUEUE)[::-1] + self._lists.members(LIR)[::-1]

    def lists(self) -> tuple[list[bytes], list[int], list[int], list[bytes]]:
        """Keys in S, slots of the LIR blocks and in Q, keys of blocks that have left; the latest first.

        Cost: O(blocks), for tests.
        """
        lir, queue = self._lists.members(LIR), self._lists.members(QUEUE)
        used_at = {self.index.key_at(slot): int(self._used_at[slot]) for slot in lir + queue}
        for position in self._gone.lists.members(GONE):
            used_at[self._gone.index.key_at(position)] = int(self._gone_used_at[position])
        bottom = int(self._used_at[lir[-1]]) if lir else NO_BOTTOM
        in_stack = sorted((key for key in used_at if used_at[key] >= bottom), key=lambda key: -used_at[key])
        return in_stack, lir, queue, self._gone.members(GONE)


@inline
def _bottom(links: I32Matrix, used_at: I64Array, lir: int) -> int:
    """Time of the coldest LIR block's last use: keys used later are in S. Never decreases."""
    coldest = links[lir, PREV]
    return np.int64(NO_BOTTOM) if coldest == lir else used_at[coldest]


@kernel
def _access(
    links: I32Matrix,
    used_at: I64Array,
    clock: I64Array,
    max_lir: int,
    slots: ReadI32Array,
    reused: ReadBoolArray,
) -> int:
    lir, queue = links.shape[0] - 2, links.shape[0] - 1
    for i in range(slots.shape[0] - 1, -1, -1):
        slot = slots[i]
        becomes_lir = reused[i] and (
            links[lir, LIST] < max_lir or used_at[slot] > _bottom(links, used_at, lir)
        )
        if links[slot, LIST] == lir or becomes_lir:
            move_to_head(links, lir, slot)
            if links[lir, LIST] > max_lir:
                move_to_head(links, queue, links[lir, PREV])
        else:
            move_to_head(links, queue, slot)
        clock[0] += 1
        used_at[slot] = clock[0]
    return slots.shape[0]


@inline
def _prefetch(
    batch: U64Matrix,
    num_evicted: int,
    links: I32Matrix,
    lir: int,
    queue: int,
    index_keys: U64Matrix,
    gone_table: U64Array,
) -> None:
    """Ask for the cache lines of a batch: those of Q leave, then the coldest LIR blocks."""
    for i in range(batch.shape[0]):
        prefetch(gone_table, home_bucket(gone_table, hash_row(batch, i)))
    from_queue = min(num_evicted, np.int64(links[queue, LIST]))
    slot = links[queue, PREV]
    for _ in range(from_queue):
        prefetch(index_keys, slot)
        slot = links[slot, PREV]
    slot = links[lir, PREV]
    for _ in range(min(num_evicted - from_queue, np.int64(links[lir, LIST]))):
        prefetch(index_keys, slot)
        slot = links[slot, PREV]
    slot = links[queue, PREV]
    for _ in range(from_queue):
        prefetch(gone_table, home_bucket(gone_table, hash_row(index_keys, slot)))
        slot = links[slot, PREV]


@kernel
def _replace(
    batch: ReadU64Matrix,
    slots: I32Array,
    num_free: int,
    links: I32Matrix,
    used_at: I64Array,
    clock: I64Array,
    max_lir: int,
    gone_table: U64Array,
    gone_keys: U64Matrix,
    gone_links: I32Matrix,
    gone_used_at: I64Array,
    ref_cnt: I32Array,
    path_table: U64Array,
    path_keys: U64Matrix,
    index_keys: U64Matrix,
) -> int:
    lir, queue = links.shape[0] - 2, links.shape[0] - 1
    gone, spare = gone_links.shape[0] - 2, gone_links.shape[0] - 1
    # New blocks join their lists after the last victim was chosen; until then they count here.
    new_lir = 0
    _prefetch(batch, slots.shape[0] - num_free, links, lir, queue, index_keys, gone_table)
    # Where the search for the next victim continues: blocks that were protected before still are.
    next_in_queue, next_lir = links[queue, PREV], links[lir, PREV]
    for i in range(slots.shape[0]):
        remembered = find(gone_table, gone_keys, batch, i, hash_row(batch, i))
        is_lir = i < num_free and links[lir, LIST] + new_lir < max_lir
        if remembered != ABSENT:
            is_lir = is_lir or gone_used_at[remembered] > _bottom(links, used_at, lir)
            forget(gone_table, gone_keys, gone_links, remembered)
        if i >= num_free:
            victim = coldest_evictable(
                links, next_in_queue, queue, ref_cnt, path_table, path_keys, index_keys
            )
            if victim != queue:
                next_in_queue = links[victim, PREV]
                if used_at[victim] > _bottom(links, used_at, lir):
                    if gone_links[spare, LIST] == 0:
                        forget_coldest(gone_table, gone_keys, gone_links, gone)
                    h = hash_row(index_keys, victim)
                    position = remember(gone_table, gone_keys, gone_links, gone, index_keys, victim, h)
                    gone_used_at[position] = used_at[victim]
            else:
                next_in_queue = queue
                victim = coldest_evictable(links, next_lir, lir, ref_cnt, path_table, path_keys, index_keys)
                next_lir = victim
                if victim == lir:
                    return i
                next_lir = links[victim, PREV]
            unlink(links, victim)
            slots[i] = victim
        # The sign marks the list until the blocks can join it.
        if is_lir:
            slots[i] = ~slots[i]
            new_lir += 1
            if links[lir, LIST] + new_lir > max_lir:
                coldest = links[lir, PREV]
                if next_lir == coldest:
                    next_lir = links[coldest, PREV]
                move_to_head(links, queue, coldest)
                if next_in_queue == queue:
                    next_in_queue = coldest
    for i in range(slots.shape[0] - 1, -1, -1):
        clock[0] += 1
        if slots[i] < 0:
            slots[i] = ~slots[i]
            push_head(links, lir, slots[i])
        else:
            push_head(links, queue, slots[i])
        used_at[slots[i]] = clock[0]
    return slots.shape[0]
