"""W-TinyLFU: a small LRU window, a large segmented LRU, and a duel of frequencies between the two.

Source: Einziger, Friedman and Manes, "TinyLFU: A Highly Efficient Cache Admission Policy", ACM
Transactions on Storage 13(4), 2017.
"""

from __future__ import annotations

import numpy as np

from kvoffload.core.policy import EvictionPolicy
from kvoffload.core.protection import Protected, coldest_evictable
from kvoffload.core.slots import SlotArray
from kvoffload.structures.index import Index, hash_row
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
from kvoffload.structures.keys import Keys
from kvoffload.structures.lists import LIST, PREV, Lists, move_to_head, push_head, unlink, unlink_all
from kvoffload.structures.sketch import FrequencySketch, add, estimate, line_of

WINDOW, PROBATION, PROTECTED = 0, 1, 2


class WTinyLFU(EvictionPolicy):
    """The paper's algorithm, with its 1 % window and its 80/20 main cache, for batches with pins.

    A new block enters the window. When the window is full its coldest block duels with the coldest of the
    main cache: the one that was seen less often recently leaves, or the one from the window if they are
    equal. A winner enters the main cache on probation; a block that is used again there is protected, and if
    there are too many protected blocks the coldest goes back on probation. Frequencies are those of a sketch
    that ages (`structures.sketch`): every use counts, and every store, which is the use that missed.

    Where the paper is silent, because it knows neither batches, pins nor failures:

    - A batch is processed block by block: each finds the lists and the sketch as the one before left
      them. Blocks of one batch never evict each other, and its head is the most recent.
    - A request may be longer than the window. Once no other block of the window may leave, a block of the
      main cache leaves without a duel; the window is then larger than its share. Later candidates still duel,
      and the loser leaves; but until the main cache has its share back, one winner for each new block enters
      it without a victim, and the next candidate duels in its place.
    - While the window is within its share (blocks of it were discarded), a block of the main cache leaves
      without a duel.
    - If every block of one part is protected, the victim is taken from the other. In the main cache that is
      the coldest block on probation that may leave, then the coldest protected one.
    - While slots are free no block leaves, and the coldest block of a window that is too large enters the
      main cache, if that has room, without a duel; once for every free slot, after the batch has entered.
    - A request's own store is no second use: when it finishes, the block moves to the front of the list
      that it is in, with the rest of its path, and the sketch counts nothing.
    - A miss counts in the sketch when the block is stored; a refused block changes nothing.

    Cost per block: O(1), and O(skipped) for protected blocks at the cold ends. Memory: 12 bytes a block
    for the lists and 8 for the sketch.
    """

    name = "wtinylfu"
    good_for = "few popular prefixes among much one-off traffic; far behind lru where sessions fit"
    paper = (
        "Einziger, Friedman and Manes, TinyLFU: A Highly Efficient Cache Admission Policy, "
        "ACM Transactions on Storage 13(4), 2017"
    )

    def __init__(self, index: Index) -> None:
        super().__init__(index)
        self._max_window = max(1, self.capacity_blocks // 100)
        self._max_protected = (self.capacity_blocks - self._max_window) * 4 // 5
        self._lists = Lists(self.capacity_blocks, 3)
        self._sketch = FrequencySketch(self.capacity_blocks)

    def access(self, slots: SlotArray, reused: BoolArray) -> None:
        _access(
            self._lists.links,
            self._max_protected,
            self._sketch.table,
            self._sketch.state,
            self.index.keys,
            slots,
            reused,
        )

    def replace(self, keys: Keys, slots: SlotArray, num_free: int, protected: Protected) -> None:
        _replace(
            keys.words,
            slots,
            num_free,
            self._lists.links,
            self._max_window,
            self._sketch.table,
            self._sketch.state,
            protected.ref_cnt,
            protected.path_table,
            protected.path_keys,
            protected.index_keys,
        )

    def remove(self, slots: SlotArray) -> None:
        unlink_all(self._lists.links, slots)

    def reset(self) -> None:
        self._lists.clear()
        self._sketch.clear()

    def stats(self) -> dict[str, float]:
        return {
            "window_blocks": self._lists.size(WINDOW),
            "probation_blocks": self._lists.size(PROBATION),
            "protected_blocks": self._lists.size(PROTECTED),
        }

    def order(self) -> list[int]:
        parts = (self._lists.members(part)[::-1] for part in (WINDOW, PROBATION, PROTECTED))
        return [slot for part in parts for slot in part]

    def lists(self) -> tuple[list[int], list[int], list[int]]:
        """Slots of window, probation and protected, each most recent first. Cost: O(blocks), for tests."""
        lists = self._lists
        return lists.members(WINDOW), lists.members(PROBATION), lists.members(PROTECTED)


@kernel
def _access(
    links: I32Matrix,
    max_protected: int,
    table: U64Array,
    state: I64Array,
    index_keys: U64Matrix,
    slots: ReadI32Array,
    reused: ReadBoolArray,
) -> int:
    probation, protected = links.shape[0] - 2, links.shape[0] - 1
    for i in range(slots.shape[0]):
        prefetch(links, slots[i])
        if reused[i]:
            prefetch(index_keys, slots[i])
    for i in range(slots.shape[0]):
        if reused[i]:
            prefetch(table, line_of(table, hash_row(index_keys, slots[i])))
    for i in range(slots.shape[0] - 1, -1, -1):
        slot = slots[i]
        home = links[slot, LIST]
        if reused[i]:
            add(table, state, hash_row(index_keys, slot))
            if home == probation:
                home = protected
        move_to_head(links, home, slot)
        if links[protected, LIST] > max_protected:
            move_to_head(links, probation, links[protected, PREV])
    return slots.shape[0]


@inline
def _seen(table: U64Array, index_keys: U64Matrix, slot: int) -> int:
    return estimate(table, hash_row(index_keys, slot))


@inline
def _prefetch(
    batch: U64Matrix,
    num_evicted: int,
    links: I32Matrix,
    window: int,
    probation: int,
    index_keys: U64Matrix,
    table: U64Array,
) -> None:
    """Ask for the cache lines of a batch: blocks that are likely to duel, as the lists are now."""
    for i in range(batch.shape[0]):
        prefetch(table, line_of(table, hash_row(batch, i)))
    from_window = min(num_evicted, np.int64(links[window, LIST]))
    from_main = min(num_evicted, np.int64(links[probation, LIST]))
    slot = links[window, PREV]
    for _ in range(from_window):
        prefetch(index_keys, slot)
        slot = links[slot, PREV]
    slot = links[probation, PREV]
    for _ in range(from_main):
        prefetch(index_keys, slot)
        slot = links[slot, PREV]
    slot = links[window, PREV]
    for _ in range(from_window):
        prefetch(table, line_of(table, hash_row(index_keys, slot)))
        slot = links[slot, PREV]


@kernel
def _replace(
    batch: ReadU64Matrix,
    slots: I32Array,
    num_free: int,
    links: I32Matrix,
    max_window: int,
    table: U64Array,
    state: I64Array,
    ref_cnt: I32Array,
    path_table: U64Array,
    path_keys: U64Matrix,
    index_keys: U64Matrix,
) -> int:
    c = index_keys.shape[0]
    window, probation, protected = c, c + 1, c + 2
    max_main = c - max_window
    _prefetch(batch, slots.shape[0] - num_free, links, window, probation, index_keys, table)
    # Where the searches for the next block that may leave continue: protected blocks stay protected.
    candidate, on_probation, kept = links[window, PREV], links[probation, PREV], links[protected, PREV]
    for i in range(slots.shape[0]):
        add(table, state, hash_row(batch, i))
        if i < num_free:
            continue
        may_grow = True
        while True:
            candidate = coldest_evictable(
                links, candidate, window, ref_cnt, path_table, path_keys, index_keys
            )
            on_probation = coldest_evictable(
                links, on_probation, probation, ref_cnt, path_table, path_keys, index_keys
            )
            defender = on_probation
            if defender == probation:
                kept = coldest_evictable(links, kept, protected, ref_cnt, path_table, path_keys, index_keys)
                defender = kept
            if candidate == window and defender == protected:
                return i
            # New blocks join the window after the last victim was chosen; until then they count here.
            too_large = links[window, LIST] + i + 1 > max_window
            victim = defender
            if defender == protected:
                victim = candidate
            elif candidate != window and too_large:
                if _seen(table, index_keys, candidate) <= _seen(table, index_keys, defender):
                    victim = candidate
                else:
                    has_room = links[probation, LIST] + links[protected, LIST] < max_main
                    grows = may_grow and has_room
                    may_grow = False
                    winner = candidate
                    candidate = links[candidate, PREV]
                    move_to_head(links, probation, winner)
                    if on_probation == probation:
                        on_probation = winner
                    if grows:
                        continue
            break
        warmer = links[victim, PREV]
        if victim == candidate:
            candidate = warmer
        elif victim == on_probation:
            on_probation = warmer
        else:
            kept = warmer
        unlink(links, victim)
        slots[i] = victim
    for i in range(slots.shape[0] - 1, -1, -1):
        push_head(links, window, slots[i])
    for _ in range(num_free):
        if links[window, LIST] <= max_window or links[probation, LIST] + links[protected, LIST] >= max_main:
            break
        move_to_head(links, probation, links[window, PREV])
    return slots.shape[0]
