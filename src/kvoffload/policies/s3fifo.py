"""S3-FIFO: three static queues: of new blocks, of blocks that have proven useful, of keys that have left.

Source: Yang, Zhang, Qiu, Yue and Rashmi, "FIFO queues are all you need for cache eviction", SOSP 2023,
algorithm 1.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np

from kvoffload.core.policy import EvictionPolicy
from kvoffload.core.protection import Protected, evictable
from kvoffload.core.slots import SlotArray
from kvoffload.structures.index import ABSENT, Index, find, hash_row, home_bucket
from kvoffload.structures.jit import (
    BoolArray,
    I32Array,
    I32Matrix,
    ReadBoolArray,
    ReadI32Array,
    ReadU64Matrix,
    U8Array,
    U64Array,
    U64Matrix,
    inline,
    kernel,
    prefetch,
)
from kvoffload.structures.keylists import KeyLists, forget, forget_coldest, remember
from kvoffload.structures.keys import Keys
from kvoffload.structures.lists import LIST, PREV, Lists, move_to_head, push_head, unlink, unlink_all

SMALL, MAIN = 0, 1
MAX_COUNT = 3
"""Limit of a block's count of uses since it entered or was last spared: two bits in the paper."""


class S3FIFO(EvictionPolicy):
    """The paper's algorithm, for batches with pins, and with a limit to the search in one call.

    A new block joins the small queue S, or the main queue M if the ghost queue G remembers its key. The
    victim is taken from S if S has its share of the slots, else from M. At the cold end of S, a block with
    two uses or more moves to M and the search continues; any other block leaves, and G remembers its key. At
    the cold end of M, a block with uses moves back to the head with one use less; any other block leaves for
    good.

    Where the paper leaves a choice:

    - The share of S is `small_share`, rounded down and at least one block; G remembers as many keys as M has
      blocks, at least one.
    - While slots are free, S takes no more new blocks than its share and M takes the others: the queues have
      their sizes from the start, as in the authors' simulator. The paper's algorithm sends every new block to
      S, from which all victims are then taken until M has grown. On a chat trace, as a flat stream, that hits
      0.285 instead of 0.242 with 20,000 blocks, and 0.139 instead of 0.151 with 5,000.
    - One victim at a time: if a block that moves makes M larger than its share, the paper also takes one
      block from M; here this victim still comes from S, and the next one from M, since S is then short.
    - A batch is processed block by block as far as counts and ghosts are concerned. The blocks join their
      queues together, after the last victim, the head of the prefix last, so that it outlives its tail.
    - A request's own store is no use of the block, and a finished path does not change the order.
    - Protected blocks are skipped, and keep their place and count. If all blocks of one queue are protected,
      the victim is taken from the other; from M it leaves no ghost.
    - A block whose store failed, or that was damaged, leaves no ghost: it was not chosen as a victim.
    - A call spares at most `patience` used blocks; then the next one that may leave does, used or not.
      Without this limit a call could go round M three times, a fifth of a second for a million blocks. It
      changes one of 18 replays of recorded traces, from a prefix-hit ratio of 0.8217 to 0.8213.

    Cost per block: O(1) on average, since each spared block was used before; at most O(patience) in a
    call; and O(skipped) for protected blocks at the cold ends. Memory: 13 bytes a block, and 28 bytes and
    the key for each of at most nine ghosts to ten blocks.
    """

    name = "s3fifo"
    good_for = "caches much smaller than what is live: chat or agents under pressure; with room LRU is better"
    paper = "Yang, Zhang, Qiu, Yue and Rashmi, FIFO queues are all you need for cache eviction, SOSP 2023"
    small_share: Annotated[float, msgspec.Meta(gt=0, lt=1)] = 0.1
    patience: Annotated[int, msgspec.Meta(ge=0)] = 8_192

    def __init__(self, index: Index) -> None:
        super().__init__(index)
        self._queues = Lists(self.capacity_blocks, 2)
        self._counts = np.full(self.capacity_blocks, 0, np.uint8)
        self._small_blocks = max(1, int(self.small_share * self.capacity_blocks))
        self._ghosts = KeyLists(max(1, self.capacity_blocks - self._small_blocks), index.key_bytes, 1)

    def access(self, slots: SlotArray, reused: BoolArray) -> None:
        _access(self._counts, slots, reused)

    def replace(self, keys: Keys, slots: SlotArray, num_free: int, protected: Protected) -> None:
        _replace(
            keys.words,
            slots,
            num_free,
            self._small_blocks,
            self.patience,
            self._queues.links,
            self._counts,
            self._ghosts.index.table,
            self._ghosts.index.keys,
            self._ghosts.lists.links,
            protected.ref_cnt,
            protected.path_table,
            protected.path_keys,
            protected.index_keys,
        )

    def remove(self, slots: SlotArray) -> None:
        unlink_all(self._queues.links, slots)

    def reset(self) -> None:
        self._queues.clear()
        self._ghosts.clear()

    def stats(self) -> dict[str, float]:
        return {
            "small_blocks": self._queues.size(SMALL),
            "main_blocks": self._queues.size(MAIN),
            "ghost_keys": self._ghosts.lists.size(0),
        }

    def order(self) -> list[int]:
        return self._queues.members(SMALL)[::-1] + self._queues.members(MAIN)[::-1]

    def queues(self) -> tuple[list[int], list[int], list[bytes], dict[int, int]]:
        """Slots of S and M, keys of G, each the newest first; counts by slot. Cost: O(blocks), for tests."""
        small, main = self._queues.members(SMALL), self._queues.members(MAIN)
        counts = {slot: int(self._counts[slot]) for slot in small + main}
        return small, main, self._ghosts.members(0), counts


@kernel
def _access(counts: U8Array, slots: ReadI32Array, reused: ReadBoolArray) -> int:
    for i in range(slots.shape[0]):
        if reused[i] and counts[slots[i]] < MAX_COUNT:
            counts[slots[i]] += 1
    return slots.shape[0]


@inline
def _prefetch(
    batch: U64Matrix,
    num_evicted: int,
    links: I32Matrix,
    tail: int,
    index_keys: U64Matrix,
    ghost_table: U64Array,
    ghost_keys: U64Array,
    ghost_links: I32Array,
    ghost_tail: int,
) -> None:
    """Ask for the cache lines of a batch: blocks and ghosts that are likely to leave, as the lists are now.

    A wrong guess (many blocks are spared) costs time, never correctness.
    """
    c, num_ghosts = index_keys.shape[0], ghost_keys.shape[0]
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
        if ghost < num_ghosts:
            prefetch(ghost_table, home_bucket(ghost_table, hash_row(ghost_keys, ghost)))
        slot, ghost = links[slot, PREV], ghost_links[ghost, PREV]


@kernel
def _replace(
    batch: ReadU64Matrix,
    slots: I32Array,
    num_free: int,
    small_blocks: int,
    patience: int,
    links: I32Matrix,
    counts: U8Array,
    ghost_table: U64Array,
    ghost_keys: U64Matrix,
    ghost_links: I32Matrix,
    ref_cnt: I32Array,
    path_table: U64Array,
    path_keys: U64Matrix,
    index_keys: U64Matrix,
) -> int:
    small, main = links.shape[0] - 2, links.shape[0] - 1
    ghosts, spare = ghost_links.shape[0] - 2, ghost_links.shape[0] - 1
    tail = small if links[small, LIST] >= small_blocks else main
    num_evicted = slots.shape[0] - num_free
    _prefetch(batch, num_evicted, links, tail, index_keys, ghost_table, ghost_keys, ghost_links, ghosts)
    # New blocks join their queues after the last victim was chosen; until then they count here.
    new_small = 0
    # The search continues after the last protected block, which stays protected, or at the cold end.
    passed_small, passed_main = small, main
    for i in range(slots.shape[0]):
        ghost = find(ghost_table, ghost_keys, batch, i, hash_row(batch, i))
        if ghost != ABSENT:
            forget(ghost_table, ghost_keys, ghost_links, ghost)
        from_small = links[small, LIST] + new_small >= small_blocks
        joins_main = ghost != ABSENT or (i < num_free and from_small)
        while i >= num_free:
            cold_small, cold_main = links[passed_small, PREV], links[passed_main, PREV]
            if cold_small == small and cold_main == main:
                return i
            from_small = cold_small != small and (from_small or cold_main == main)
            cold = cold_small if from_small else cold_main
            if not evictable(ref_cnt, path_table, path_keys, index_keys, cold):
                if from_small:
                    passed_small = cold
                else:
                    passed_main = cold
            elif patience > 0 and counts[cold] > (1 if from_small else 0):
                counts[cold] = 0 if from_small else counts[cold] - 1
                move_to_head(links, main, cold)
                patience -= 1
            else:
                unlink(links, cold)
                slots[i] = cold
                if from_small:
                    if ghost_links[spare, LIST] == 0:
                        forget_coldest(ghost_table, ghost_keys, ghost_links, ghosts)
                    key_hash = hash_row(index_keys, cold)
                    remember(ghost_table, ghost_keys, ghost_links, ghosts, index_keys, cold, key_hash)
                break
        # The sign marks the queue until the blocks can join it.
        if joins_main:
            slots[i] = ~slots[i]
        else:
            new_small += 1
    for i in range(slots.shape[0] - 1, -1, -1):
        joins_main = slots[i] < 0
        if joins_main:
            slots[i] = ~slots[i]
        counts[slots[i]] = 0
        push_head(links, main if joins_main else small, slots[i])
    return slots.shape[0]
