"""GDSF: the block that is cheapest to lose leaves first, by frequency and cost to recompute, with aging.

Source: Cherkasova, "Improving WWW Proxies Performance with Greedy-Dual-Size-Frequency Caching Policy",
HP Laboratories technical report HPL-98-69R1, 1998; after Cao and Irani, "Cost-Aware WWW Proxy Caching
Algorithms", USITS 1997.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np

from kvoffload.core.policy import EvictionPolicy
from kvoffload.core.protection import Protected, evictable
from kvoffload.core.slots import SlotArray
from kvoffload.structures.heap import CLOCK, SIZE, Heap, push, sift_down, sift_up, take_out
from kvoffload.structures.index import Index, find, hash_row
from kvoffload.structures.jit import (
    BoolArray,
    F64Array,
    I32Array,
    I64Array,
    ReadBoolArray,
    ReadI32Array,
    ReadU64Matrix,
    U64Array,
    U64Matrix,
    kernel,
)
from kvoffload.structures.keys import Keys


class GDSF(EvictionPolicy):
    """A heap by H = L + frequency x cost / size, the least first; L is the H of the last victim.

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

    Cost per block: O(log n), and O(log n) for each protected block at the cold end. A block's life costs
    2.9 times as much as with LRU in a cache of 100,000 blocks, 3.6 times in one of a million. Memory: 40
    bytes a block.
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
        self._heap = Heap(self.capacity_blocks)
        self._frequency = np.full(self.capacity_blocks, 0.0, np.float64)
        self._cost = np.full(self.capacity_blocks, 0.0, np.float64)
        self._inflation = np.zeros(1, np.float64)

    def access(self, slots: SlotArray, reused: BoolArray) -> None:
        heap = self._heap
        _access(
            heap.heap,
            heap.place,
            heap.rank,
            heap.stamp,
            heap.state,
            self._frequency,
            self._cost,
            self._inflation,
            slots,
            reused,
        )

    def replace(self, keys: Keys, slots: SlotArray, num_free: int, protected: Protected) -> None:
        heap = self._heap
        _replace(
            keys.words,
            slots,
            num_free,
            heap.heap,
            heap.place,
            heap.rank,
            heap.stamp,
            heap.state,
            self._frequency,
            self._cost,
            self._inflation,
            self.block_attention_ratio,
            protected.ref_cnt,
            protected.path_table,
            protected.path_keys,
            protected.index_keys,
        )

    def remove(self, slots: SlotArray) -> None:
        heap = self._heap
        _remove(heap.heap, heap.place, heap.rank, heap.stamp, heap.state, slots)

    def reset(self) -> None:
        self._heap.clear()
        self._inflation[0] = 0.0

    def stats(self) -> dict[str, float]:
        return {"blocks": int(self._heap.state[SIZE]), "inflation": float(self._inflation[0])}

    def order(self) -> list[int]:
        return self._heap.members()

    def ranks(self) -> list[tuple[int, float, float]]:
        """Slot, frequency and H of every block, the least H first. Cost: O(n log n), for tests."""
        return [(s, float(self._frequency[s]), float(self._heap.rank[s])) for s in self._heap.members()]


@kernel
def _access(
    heap: I32Array,
    place: I32Array,
    rank: F64Array,
    stamp: I64Array,
    state: I64Array,
    frequency: F64Array,
    cost: F64Array,
    inflation: F64Array,
    slots: ReadI32Array,
    reused: ReadBoolArray,
) -> int:
    for i in range(slots.shape[0] - 1, -1, -1):
        slot = slots[i]
        frequency[slot] += 1.0 if reused[i] else 0.0
        rank[slot] = inflation[0] + frequency[slot] * cost[slot]
        state[CLOCK] += 1
        stamp[slot] = state[CLOCK]
        # Neither L nor a frequency decreases: a block only ever moves away from the cold end.
        sift_down(heap, place, rank, stamp, state[SIZE], place[slot])
    return slots.shape[0]


@kernel
def _remove(
    heap: I32Array, place: I32Array, rank: F64Array, stamp: I64Array, state: I64Array, slots: ReadI32Array
) -> int:
    for i in range(slots.shape[0]):
        take_out(heap, place, rank, stamp, state, slots[i])
    return slots.shape[0]


@kernel
def _replace(
    batch: ReadU64Matrix,
    slots: I32Array,
    num_free: int,
    heap: I32Array,
    place: I32Array,
    rank: F64Array,
    stamp: I64Array,
    state: I64Array,
    frequency: F64Array,
    cost: F64Array,
    inflation: F64Array,
    block_attention_ratio: float,
    ref_cnt: I32Array,
    path_table: U64Array,
    path_keys: U64Matrix,
    index_keys: U64Matrix,
) -> int:
    parked = 0
    for i in range(num_free, slots.shape[0]):
        while state[SIZE] > 0 and not evictable(ref_cnt, path_table, path_keys, index_keys, heap[0]):
            slot = heap[0]
            take_out(heap, place, rank, stamp, state, slot)
            heap[state[SIZE]] = slot
            parked += 1
        if state[SIZE] == 0:
            return i
        victim = heap[0]
        take_out(heap, place, rank, stamp, state, victim)
        # The victim's entry is between the heap and the parked entries: the last of those fills it.
        heap[state[SIZE]] = heap[state[SIZE] + parked]
        inflation[0] = max(inflation[0], rank[victim])
        slots[i] = victim
    for _ in range(parked):
        state[SIZE] += 1
        sift_up(heap, place, rank, stamp, state[SIZE] - 1)
    for i in range(slots.shape[0] - 1, -1, -1):
        slot = slots[i]
        depth = find(path_table, path_keys, batch, i, hash_row(batch, i))
        frequency[slot] = 1.0
        cost[slot] = 1.0 + depth * block_attention_ratio
        rank[slot] = inflation[0] + cost[slot]
        state[CLOCK] += 1
        stamp[slot] = state[CLOCK]
        push(heap, place, rank, stamp, state, slot)
    return slots.shape[0]
