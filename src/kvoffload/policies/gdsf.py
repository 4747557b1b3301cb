"""GDSF: the block that is cheapest to lose leaves first, by frequency and cost to recompute, with aging.

Source: Cherkasova, "Improving WWW Proxies Performance with Greedy-Dual-Size-Frequency Caching Policy",
HP Laboratories technical report HPL-98-69R1, 1998; after Cao and Irani, "Cost-Aware WWW Proxy Caching
Algorithms", USITS 1997.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np

from kvoffload.core.policy import CompiledPolicy
from kvoffload.core.request import Path, Used
from kvoffload.core.state import Cache, Entering, evictable
from kvoffload.structures.heap import RANK, Heap, push, put_back, set_aside, take_out
from kvoffload.structures.index import Index, find, hash_row
from kvoffload.structures.jit import I32Matrix, inline, prefetch
from kvoffload.structures.structs import Struct

FREQUENCY, DEPTH = 0, 1


class State(Struct):
    """The heap, by H; what H is made of.

    Attributes:
        weights: shape ``(capacity, 2)``: frequency and depth of each block.
        inflation: L.
        block_attention_ratio: as the user set it.
    """

    heap: Heap
    weights: I32Matrix
    inflation: float
    block_attention_ratio: float


class GDSF(CompiledPolicy):
    """The least uses x cost / size leaves; what is old ages.

    A heap by H = L + frequency x cost / size, the least first; L is the H of the last victim.

    All blocks have size 1. The cost of a block is that of computing it again::

        cost(depth) = 1 + depth * block_attention_ratio

    The 1 is the part that does not depend on depth: the linear layers, 2 FLOPs for each parameter and token.
    The rest is attention over the `depth` blocks before it: 4 FLOPs for each token, layer, unit of model
    width and token of context. So the ratio is ``2 * tokens in a block * layers * width / parameters``:
    0.0005 for blocks of 16 tokens and a model of 8 billion parameters (32 layers of width 4,096). It grows
    with the block: a subclass for blocks of 512 tokens sets 0.017. Depth is the key's place on the path of
    the request that stored it, from 0; so give `begin_request` the whole path.

    This does not optimise the prefix-hit ratio. Blocks are judged one by one, and a deep block costs more
    than the head: of blocks that are used equally often, a path loses its head a little before its tail, and
    a tail without its head cannot be reached. With the small ratio the depth changes a block's time in the
    cache by a few percent, and the rest is LFU with aging. A frequency is forgotten when its block leaves.

    Where the paper is silent, because it knows neither batches, pins nor failures:

    - L rises with each block that leaves for a batch; the H of all its new blocks is computed with the last
      L. Blocks of one batch never evict each other.
    - Equal H: the block that was used longer ago leaves first. The head of a batch counts as used last.
    - A request's own store is no second access: when it finishes, the frequency of the block stays, and its
      H is computed again with the present L, which gives its place in the order.
    - Protected blocks are skipped. L never decreases: a block that was protected, with an H below that of
      the block that left instead, keeps its H.
    - While slots are free no block leaves, and L stays.
    - A block whose store failed, or that was damaged, does not raise L.

    Cost per block: O(log n) for n chains of blocks whose H follow each other (`structures.heap`), which are
    fewer than there are blocks where requests are long; and as much for each protected block at the cold end.
    A block's life costs 1.8 times as much as with LRU in a cache of 100,000 blocks, 1.9 times in one of a
    million, with requests of 64 to 4,096 blocks. Memory: 40 bytes a block.
    """

    name = "gdsf"
    good_for = "flat traffic of skewed popularity; at or below lru on prefixes, which lose their heads"
    paper = (
        "Cherkasova, Improving WWW Proxies Performance with Greedy-Dual-Size-Frequency Caching Policy, "
        "HP Laboratories HPL-98-69R1, 1998"
    )
    block_attention_ratio: Annotated[float, msgspec.Meta(ge=0)] = 0.0005
    """Attention over one block of context, by the linear work on a block."""

    def __init__(self, index: Index) -> None:
        super().__init__(index)
        self.state = State(
            heap=Heap(self.capacity_blocks),
            weights=np.full((self.capacity_blocks, 2), 0, np.int32),
            block_attention_ratio=self.block_attention_ratio,
        )

    def reset(self) -> None:
        self.state.heap.clear()
        self.state.inflation = 0.0

    def stats(self) -> dict[str, float]:
        return {"blocks": self.state.heap.size, "inflation": self.state.inflation}

    def order(self) -> list[int]:
        return self.state.heap.members()

    def ranks(self) -> list[tuple[int, float, float]]:
        """Slot, frequency and H of every block, the least H first. Cost: O(n log n), for tests."""
        heap, weights = self.state.heap, self.state.weights
        return [(s, float(weights[s, FREQUENCY]), float(heap.order[s, RANK])) for s in heap.members()]


@inline
def _enter(own: State, slot: int) -> None:
    """Put a block that is not in the heap where its frequency, its depth and the present L say."""
    cost = 1.0 + own.weights[slot, DEPTH] * own.block_attention_ratio
    push(own.heap, slot, own.inflation + own.weights[slot, FREQUENCY] * cost)


@GDSF.compiled
def access(own: State, used: Used) -> None:
    heap, weights = own.heap, own.weights
    for i in range(used.count):
        prefetch(weights, used.slots[i])
        prefetch(heap.links, used.slots[i])
        prefetch(heap.order, used.slots[i])
    for i in range(used.count - 1, -1, -1):
        slot = used.slots[i]
        weights[slot, FREQUENCY] += 1 if used.reused[i] else 0
        take_out(heap, slot)
        _enter(own, slot)


@GDSF.compiled
def remove(own: State, used: Used) -> None:
    for i in range(used.count):
        take_out(own.heap, used.slots[i])


@inline
def _take_least(own: State, cache: Cache) -> int:
    """Take the least block out of the heap, and ask for what the question whether it may leave needs."""
    slot = own.heap.firsts[0]
    prefetch(cache.slots.ref_cnt, slot)
    prefetch(cache.index.keys, slot)
    prefetch(own.weights, slot)
    take_out(own.heap, slot)
    return slot


@inline
def _name_victims(own: State, new: Entering, cache: Cache, path: Path) -> int:
    """Let the least blocks that may leave do so: L rises with them. Returns how many slots have a name."""
    heap, slots, named = own.heap, new.slots, new.num_given
    while named < new.count and heap.size > 0:
        stop = min(new.count, named + heap.size)
        for i in range(named, stop):
            slots[i] = _take_least(own, cache)
        for i in range(named, stop):
            slot = slots[i]
            if evictable(cache, path, slot):
                own.inflation = max(own.inflation, heap.order[slot, RANK])
                slots[named] = slot
                named += 1
            else:
                set_aside(heap, slot)
    put_back(heap)
    return named


@GDSF.compiled
def replace(own: State, new: Entering, cache: Cache, path: Path) -> None:
    if _name_victims(own, new, cache, path) < new.count:
        return
    for i in range(new.count - 1, -1, -1):
        slot = new.slots[i]
        own.weights[slot, FREQUENCY] = 1
        own.weights[slot, DEPTH] = find(path.index, new.keys, i, hash_row(new.keys, i))
        _enter(own, slot)
