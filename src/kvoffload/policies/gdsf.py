"""GDSF: evicts the block whose frequency times recomputation cost is lowest, with aging.

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
    """The state of a GDSF cache.

    Attributes:
        heap: all blocks, ordered by H.
        weights: shape ``(capacity, 2)``: frequency and depth of each block.
        inflation: L.
        block_attention_ratio: as in `GDSF`.
    """

    heap: Heap
    weights: I32Matrix
    inflation: float
    block_attention_ratio: float


class GDSF(CompiledPolicy):
    """Evicts the block whose frequency x cost / size is lowest, with aging.

    Each block has a priority H = L + frequency x cost / size, and the block with the lowest H is evicted. L
    is the H of the last victim. L never decreases, so that a block that was popular long ago is evicted in
    the end.

    All blocks have size 1. The cost of a block is the cost of its recomputation::

        cost(depth) = 1 + depth * block_attention_ratio

    The first term is the cost of the linear layers: 2 FLOPs for each parameter and token. The second term is
    the cost of attention over the `depth` preceding blocks: 4 FLOPs for each token, layer, unit of model
    width and token of context. So the ratio is ``2 * tokens in a block * layers * width / parameters``. For a
    model of 8 billion parameters (32 layers of width 4,096), it is 0.0005 with blocks of 16 tokens, and 0.017
    with blocks of 512 tokens. Depth is the position of the key on the path of the storing request, counted
    from 0. So the engine must pass the whole path to `begin_request`.

    GDSF does not optimise the prefix-hit ratio. A deep block costs more than the head of its path. So if all
    blocks of a path are equally frequent, the head is evicted a little before the tail, which then cannot be
    used. The effect is small: depth changes a block's time in the cache by only a few percent. Otherwise GDSF
    behaves like LFU with aging. The frequency of an evicted block is forgotten.

    The paper does not cover batches (the blocks of one store), pins (blocks in use by a transfer) and
    failures. Our choices:

    - L rises with each victim of a batch; the H of all new blocks is computed with the last L. Blocks of one
      batch never evict each other.
    - If blocks have equal H, the least recently used block is evicted first. In a batch, the head counts as
      the most recently used block.
    - The end of the storing request does not count as a second access: the frequency of the block stays the
      same, but its H is computed again with the current L.
    - Protected blocks are skipped and keep their H. L never decreases.
    - While slots are free there are no victims, and L does not change.
    - A block whose store failed, or that was damaged, does not raise L.

    Cost per block: O(log n), and O(log n) for each protected block at the cold end. n is the number of chains
    of blocks with consecutive H (`structures.heap`); long requests have few chains. CPU time over a block's
    life, with requests of 64 to 4,096 blocks: 1.8 times LRU's in a cache of 100,000 blocks, 1.9 times in a
    cache of a million blocks. Memory: 40 bytes per block.
    """

    name = "gdsf"
    good_for = "flat traffic of skewed popularity; at or below lru on prefixes, which lose their heads"
    paper = (
        "Cherkasova, Improving WWW Proxies Performance with Greedy-Dual-Size-Frequency Caching Policy, "
        "HP Laboratories HPL-98-69R1, 1998"
    )
    block_attention_ratio: Annotated[float, msgspec.Meta(ge=0)] = 0.0005
    """Cost of attention over one block of context, as a multiple of the cost of the linear layers."""

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

    def ordered_heap(self) -> Heap:
        return self.state.heap


@inline
def _push(own: State, slot: int) -> None:
    """Push a block with priority H, computed from its frequency, its depth and the current L."""
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
        _push(own, slot)


@GDSF.compiled
def remove(own: State, used: Used) -> None:
    for i in range(used.count):
        take_out(own.heap, used.slots[i])


@inline
def _take_least(own: State, cache: Cache) -> int:
    """Pop the block with the smallest H, and prefetch the data that `evictable` will read."""
    slot = own.heap.firsts[0]
    prefetch(cache.slots.ref_cnt, slot)
    prefetch(cache.index.keys, slot)
    prefetch(own.weights, slot)
    take_out(own.heap, slot)
    return slot


@inline
def _name_victims(own: State, new: Entering, cache: Cache, path: Path) -> int:
    """Evict the evictable blocks with the smallest H, and raise L to the largest H among these victims.

    Returns the number of new blocks that have a slot: ``new.count``, or less if too few are evictable.
    """
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
        _push(own, slot)
