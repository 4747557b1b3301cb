"""Least recently used: the block that was used longest ago leaves first."""

from __future__ import annotations

from kvoffload.core.policy import EvictionPolicy
from kvoffload.core.protection import Protected, evictable
from kvoffload.core.slots import SlotArray
from kvoffload.structures.index import Index
from kvoffload.structures.jit import BoolArray, I32Array, I32Matrix, ReadI32Array, U64Array, U64Matrix, kernel
from kvoffload.structures.keys import Keys
from kvoffload.structures.lists import PREV, Lists, move_to_head, push_head, unlink, unlink_all


class LRU(EvictionPolicy):
    """One list, most recent first. The default, and the yardstick for every other policy.

    A store counts as a use; the head of the stored blocks is the most recent. When a request finishes, its
    whole path moves to the front, its head first of all (see `EvictionPolicy.access`).

    Cost per block: O(1), and O(skipped) for protected blocks at the cold end.
    """

    name = "lru"
    good_for = "caches that hold the live working set; the yardstick"
    paper = "Mattson et al., Evaluation techniques for storage hierarchies, IBM Systems Journal 9(2), 1970"

    def __init__(self, index: Index) -> None:
        super().__init__(index)
        self._order = Lists(self.capacity_blocks, 1)

    def access(self, slots: SlotArray, reused: BoolArray) -> None:
        _access(self._order.links, slots)

    def replace(self, keys: Keys, slots: SlotArray, num_free: int, protected: Protected) -> None:
        _replace(
            self._order.links,
            slots,
            num_free,
            protected.ref_cnt,
            protected.path_table,
            protected.path_keys,
            protected.index_keys,
        )

    def remove(self, slots: SlotArray) -> None:
        unlink_all(self._order.links, slots)

    def reset(self) -> None:
        self._order.clear()

    def order(self) -> list[int]:
        return self._order.members(0)[::-1]


@kernel
def _access(links: I32Matrix, slots: ReadI32Array) -> int:
    sentinel = links.shape[0] - 1
    for i in range(slots.shape[0] - 1, -1, -1):
        move_to_head(links, sentinel, slots[i])
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
    sentinel = links.shape[0] - 1
    candidate = links[sentinel, PREV]
    for i in range(num_free, slots.shape[0]):
        while candidate != sentinel and not evictable(ref_cnt, path_table, path_keys, index_keys, candidate):
            candidate = links[candidate, PREV]
        if candidate == sentinel:
            return i
        warmer = links[candidate, PREV]
        unlink(links, candidate)
        slots[i] = candidate
        candidate = warmer
    for i in range(slots.shape[0] - 1, -1, -1):
        push_head(links, sentinel, slots[i])
    return slots.shape[0]
