"""Least frequently used: the block that the fewest requests have used leaves first.

Source of the rule: Aho, Denning and Ullman, "Principles of Optimal Page Replacement", Journal of the ACM
18(1), 1971. Source of the lists: Shah, Mitra and Matani, "An O(1) algorithm for implementing the LFU cache
eviction scheme", 2010.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from kvoffload.core.policy import EvictionPolicy
from kvoffload.core.protection import Protected, evictable
from kvoffload.core.slots import SlotArray
from kvoffload.structures.index import Index
from kvoffload.structures.jit import (
    BoolArray,
    I32Array,
    I32Matrix,
    ReadBoolArray,
    ReadI32Array,
    U64Array,
    U64Matrix,
    kernel,
)
from kvoffload.structures.keys import Keys
from kvoffload.structures.lists import LIST, PREV, Lists, move_to_head, push_head, unlink, unlink_all


class LFU(EvictionPolicy):
    """A list for each number of uses, most recent first; the victim is the last of the lowest one.

    If requests drew their blocks independently of each other and always with the same probabilities, the
    best victim would be the least probable block (Aho, Denning and Ullman); its count estimates that.

    Where the papers leave a choice:

    - A block is counted while it is here. A block that returns after an eviction starts at 1 again. No count
      ever becomes smaller: a block that was popular once stays until all others have higher counts.
    - Counts stop at `max_count`: blocks that reach it share one list, the least recently used first. That
      matters only if every block that may leave has been used that often; and because the list of a block
      is its count, no counts are stored.
    - A request's own store is its first use, and not a second one when it finishes: the block moves to the
      front of the list that it is in. Of equal counts the least recent leaves, the head of a path last.
    - Protected blocks are skipped, then the lists of higher counts are searched.

    Cost per block: O(1), and O(skipped) for protected blocks at the cold ends; per call at most
    `max_count` empty lists are skipped. Memory: 12 bytes a block.
    """

    name = "lfu"
    good_for = "a fixed set of shared prompts; conversations, which end, it keeps long after"
    paper = "Aho, Denning and Ullman, Principles of Optimal Page Replacement, Journal of the ACM 18(1), 1971"
    max_count: Annotated[int, msgspec.Meta(ge=1)] = 256

    def __init__(self, index: Index) -> None:
        super().__init__(index)
        self._by_count = Lists(self.capacity_blocks, self.max_count)

    def access(self, slots: SlotArray, reused: BoolArray) -> None:
        _access(self._by_count.links, slots, reused)

    def replace(self, keys: Keys, slots: SlotArray, num_free: int, protected: Protected) -> None:
        _replace(
            self._by_count.links,
            slots,
            num_free,
            protected.ref_cnt,
            protected.path_table,
            protected.path_keys,
            protected.index_keys,
        )

    def remove(self, slots: SlotArray) -> None:
        unlink_all(self._by_count.links, slots)

    def reset(self) -> None:
        self._by_count.clear()

    def stats(self) -> dict[str, float]:
        return {
            "used_once_blocks": self._by_count.size(0),
            "at_max_count_blocks": self._by_count.size(self.max_count - 1),
        }

    def order(self) -> list[int]:
        lists = range(self.max_count)
        return [slot for number in lists for slot in reversed(self._by_count.members(number))]


@kernel
def _access(links: I32Matrix, slots: ReadI32Array, reused: ReadBoolArray) -> int:
    highest = links.shape[0] - 1
    for i in range(slots.shape[0] - 1, -1, -1):
        count = links[slots[i], LIST]
        move_to_head(links, min(count + 1, highest) if reused[i] else count, slots[i])
    return slots.shape[0]


@kernel
def _replace(
    links: I32Matrix,
    slots: I32Array,
    num_free: int,
    ref_cnt: I32Array,
    path_table: U64Array,
    path_keys: U64Matrix,
    index_keys: U64Matrix,
) -> int:
    lowest = index_keys.shape[0]
    count = lowest
    candidate = links[count, PREV]
    for i in range(num_free, slots.shape[0]):
        while True:
            if candidate == count:  # the sentinel: the list is done
                count += 1
                if count == links.shape[0]:
                    return i
                candidate = links[count, PREV]
            elif evictable(ref_cnt, path_table, path_keys, index_keys, candidate):
                break
            else:
                candidate = links[candidate, PREV]
        warmer = links[candidate, PREV]
        unlink(links, candidate)
        slots[i] = candidate
        candidate = warmer
    for i in range(slots.shape[0] - 1, -1, -1):
        push_head(links, lowest, slots[i])
    return slots.shape[0]
