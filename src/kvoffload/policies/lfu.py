"""LFU: evicts the block that the fewest requests have used.

Source of the rule: Aho, Denning and Ullman, "Principles of Optimal Page Replacement", Journal of the ACM
18(1), 1971. Source of the lists: Shah, Mitra and Matani, "An O(1) algorithm for implementing the LFU cache
eviction scheme", 2010.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec

from kvoffload.core.policy import CompiledPolicy
from kvoffload.core.request import Path, Used
from kvoffload.core.state import Cache, Entering, evict_coldest
from kvoffload.structures.index import Index
from kvoffload.structures.lists import LIST, Lists, move_to_head, push_all, unlink_all
from kvoffload.structures.structs import Struct


class State(Struct):
    """The state of an LFU cache: one list for each use count, from 1 to `max_count`."""

    by_count: Lists


class LFU(CompiledPolicy):
    """Evicts the least used block; the least recent block breaks ties.

    For each use count there is one list of blocks, most recent first. The victim is the last block of the
    list with the lowest count.

    If blocks were used at random, each with a constant probability, the best victim would be the block with
    the lowest probability (Aho, Denning and Ullman). The use count estimates this probability.

    Where the papers leave a choice:

    - Uses of a block are counted while it is resident. A block that returns after an eviction starts at 1
      again. Counts never decrease: a block that was popular once stays until all other blocks have higher
      counts.
    - Counts stop at `max_count`: blocks with `max_count` or more uses share one list in LRU order. The limit
      matters only if every evictable block has been used `max_count` times. The list in which a block is
      gives its count, so no counts are stored.
    - The store of a block counts as its first use. The end of the storing request does not count as a second
      use, but moves the request's blocks to the front of their lists, the first block last. So among blocks
      with equal counts, the first block of a path is evicted after the rest of the path.
    - Protected blocks are skipped; if a list has no evictable block, the next list is searched.

    Cost per block: O(1), and O(skipped) for protected blocks at the cold ends of the lists. A call skips at
    most `max_count` empty lists. Memory: 12 bytes a block.
    """

    name = "lfu"
    good_for = "a fixed set of shared prompts; it keeps conversations long after their end"
    paper = "Aho, Denning and Ullman, Principles of Optimal Page Replacement, Journal of the ACM 18(1), 1971"
    max_count: Annotated[int, msgspec.Meta(ge=1, le=2**20)] = 256

    def __init__(self, index: Index) -> None:
        super().__init__(index)
        self.state = State(by_count=Lists(self.capacity_blocks, self.max_count))

    def reset(self) -> None:
        self.state.by_count.clear()

    def stats(self) -> dict[str, float]:
        return {
            "used_once_blocks": self.state.by_count.size(0),
            "at_max_count_blocks": self.state.by_count.size(self.max_count - 1),
        }

    def ordered_lists(self) -> tuple[Lists, Sequence[int]]:
        return self.state.by_count, range(self.max_count)


@LFU.compiled
def access(own: State, used: Used) -> None:
    links = own.by_count.links
    highest = links.shape[0] - 1
    for i in range(used.count - 1, -1, -1):
        slot = used.slots[i]
        count = links[slot, LIST]
        move_to_head(links, min(count + 1, highest) if used.reused[i] else count, slot)


@LFU.compiled
def replace(own: State, new: Entering, cache: Cache, path: Path) -> None:
    links, lowest = own.by_count.links, own.by_count.num_positions
    if evict_coldest(cache, path, links, lowest, links.shape[0] - 1, new):
        push_all(links, lowest, new.slots, new.count)


@LFU.compiled
def remove(own: State, used: Used) -> None:
    unlink_all(own.by_count.links, used.slots, used.count)
