"""FIFO: evicts blocks in the order of their stores, regardless of their uses."""

from __future__ import annotations

from collections.abc import Sequence

from kvoffload.core.policy import CompiledPolicy
from kvoffload.core.request import Path, Used
from kvoffload.core.state import Cache, Entering, evict_coldest
from kvoffload.structures.index import Index
from kvoffload.structures.lists import Lists, push_head, unlink_all
from kvoffload.structures.structs import Struct


class State(Struct):
    """The state of a FIFO cache: one list, newest first."""

    queue: Lists


class FIFO(CompiledPolicy):
    """Evicts the block stored first.

    The simplest baseline. The original algorithm handles single pages. Our choices for batches (the blocks of
    one store):

    - The blocks of a batch join the queue in prefix order, so a prefix loses its head before its tail. With
      this order, the hits equal the golden numbers of our tests. The reverse order, as in LRU, would raise
      the prefix-hit ratio by up to 0.0023 on a chat trace.
    - Accesses and finished requests do not change the order.
    - A protected block is skipped and keeps its place, so it leaves as soon as it is evictable.

    Cost per block: O(1), and O(skipped) for protected blocks at the cold end. Memory: 12 bytes a block.
    """

    name = "fifo"
    counts_uses = False
    good_for = "no workload in particular: a baseline that shows the value of recency"
    paper = (
        "Belady, A study of replacement algorithms for a virtual-storage computer, "
        "IBM Systems Journal 5(2), 1966"
    )

    def __init__(self, index: Index) -> None:
        super().__init__(index)
        self.state = State(queue=Lists(self.capacity_blocks, 1))

    def reset(self) -> None:
        self.state.queue.clear()

    def stats(self) -> dict[str, float]:
        return {"queued_blocks": self.state.queue.size(0)}

    def ordered_lists(self) -> tuple[Lists, Sequence[int]]:
        return self.state.queue, (0,)


@FIFO.compiled
def access(own: State, used: Used) -> None:
    """Do nothing: a hit does not change the order."""


@FIFO.compiled
def replace(own: State, new: Entering, cache: Cache, path: Path) -> None:
    links, sentinel = own.queue.links, own.queue.num_positions
    if evict_coldest(cache, path, links, sentinel, sentinel, new):
        for i in range(new.count):
            push_head(links, sentinel, new.slots[i])


@FIFO.compiled
def remove(own: State, used: Used) -> None:
    unlink_all(own.queue.links, used.slots, used.count)
