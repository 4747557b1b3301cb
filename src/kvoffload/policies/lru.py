"""LRU: evicts the least recently used block."""

from __future__ import annotations

from collections.abc import Sequence

from kvoffload.core.policy import CompiledPolicy
from kvoffload.core.request import Path, Used
from kvoffload.core.state import Cache, Entering, evict_coldest
from kvoffload.structures.index import Index
from kvoffload.structures.lists import Lists, move_to_head, push_all, unlink_all
from kvoffload.structures.structs import Struct


class State(Struct):
    """The state of an LRU cache: one list, most recent first."""

    order: Lists


class LRU(CompiledPolicy):
    """Evicts the least recently used block.

    This is the default policy, and the baseline for all others. It keeps one list of blocks, most recent
    first.

    A store counts as a use: the stored blocks enter at the front of the list, and the first of them becomes
    the most recent. When a request finishes, all its blocks move to the front, and again its first block
    becomes the most recent (see `EvictionPolicy.access`).

    Cost per block: O(1), and O(skipped) for protected blocks at the cold end of the list.
    """

    name = "lru"
    counts_uses = False
    good_for = "caches that hold the live working set; the baseline"
    paper = "Mattson et al., Evaluation techniques for storage hierarchies, IBM Systems Journal 9(2), 1970"

    def __init__(self, index: Index) -> None:
        super().__init__(index)
        self.state = State(order=Lists(self.capacity_blocks, 1))

    def reset(self) -> None:
        self.state.order.clear()

    def ordered_lists(self) -> tuple[Lists, Sequence[int]]:
        return self.state.order, (0,)


@LRU.compiled
def access(own: State, used: Used) -> None:
    links, sentinel = own.order.links, own.order.num_positions
    for i in range(used.count - 1, -1, -1):
        move_to_head(links, sentinel, used.slots[i])


@LRU.compiled
def replace(own: State, new: Entering, cache: Cache, path: Path) -> None:
    links, sentinel = own.order.links, own.order.num_positions
    if evict_coldest(cache, path, links, sentinel, sentinel, new):
        push_all(links, sentinel, new.slots, new.count)


@LRU.compiled
def remove(own: State, used: Used) -> None:
    unlink_all(own.order.links, used.slots, used.count)
