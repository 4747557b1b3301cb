"""A shadow LRU: the hits of plain LRU, estimated on a sample of the keys.

Owns a small LRU cache of keys. Does not know slots, nor what the estimate is used for.
"""

from __future__ import annotations

import numpy as np

from kvoffload.structures.index import ABSENT, find, hash_row
from kvoffload.structures.jit import (
    BoolArray,
    I32Matrix,
    I64Array,
    ReadU64Matrix,
    U64Array,
    U64Matrix,
    inline,
    kernel,
)
from kvoffload.structures.keylists import KeyLists, forget, forget_coldest, remember
from kvoffload.structures.keys import Keys
from kvoffload.structures.lists import LIST, move_to_head

SAMPLED_ONE_IN = 4
SMALL_CAPACITY = 1024
SAMPLED, OWN_HITS, SHADOW_HITS = 0, 1, 2


class ShadowLRU:
    """LRU over one key in four, with a quarter of the capacity; counts its own hits and those of its owner.

    A cache of less than `SMALL_CAPACITY` blocks is shadowed without sampling: a sample is too coarse if a
    request is not much smaller than the cache. Then only hits along the prefix count.

    Waldspurger et al., "Efficient MRC Construction with SHARDS", FAST 2015: a cache over a sample of keys,
    scaled down like the sample, hits as often as the whole cache would.

    Attributes:
        one_in: 4, or 1 without sampling.
        counts: shape ``(3,)``, int64: references sampled, and how many of them the owner and the shadow
            held. The owner resets it.
    """

    __slots__ = ("counts", "keys", "one_in")

    def __init__(self, capacity_blocks: int, key_bytes: int) -> None:
        self.one_in = SAMPLED_ONE_IN if capacity_blocks >= SMALL_CAPACITY else 1
        self.keys = KeyLists(max(1, capacity_blocks // self.one_in), key_bytes, 1)
        self.counts = np.zeros(3, np.int64)

    def observe(self, path: Keys, start: int, held: BoolArray, is_victim_tier: bool) -> None:
        """A request uses the blocks of `path` from `start` on; `held` are those that the owner has.

        LRU stores the blocks that it misses. In a victim tier a block that is hit leaves for the device.
        """
        index, links = self.keys.index, self.keys.lists.links
        _observe(
            path.words,
            start,
            held,
            is_victim_tier,
            self.one_in,
            index.table,
            index.keys,
            links,
            self.counts,
        )

    def store(self, keys: Keys) -> None:
        """The device drops these blocks; a victim tier with LRU stores them."""
        index = self.keys.index
        _store(keys.words, self.one_in, index.table, index.keys, self.keys.lists.links)

    def clear(self) -> None:
        """Forget every key and count. Cost: O(capacity)."""
        self.keys.clear()
        self.counts.fill(0)


@inline
def _take_in(
    batch: U64Matrix, start: int, one_in: int, table: U64Array, keys: U64Matrix, links: I32Matrix
) -> int:
    """Make the blocks of a batch from `start` on the most recent, the first most of all.

    Of a batch longer than the cache only the head is stored.
    """
    for row in range(min(batch.shape[0], start + one_in * keys.shape[0]) - 1, start - 1, -1):
        h = hash_row(batch, row)
        if (h >> np.uint64(8)) & np.uint64(one_in - 1):
            continue
        key = find(table, keys, batch, row, h)
        if key != ABSENT:
            move_to_head(links, keys.shape[0], key)
            continue
        if links[links.shape[0] - 1, LIST] == 0:
            forget_coldest(table, keys, links, keys.shape[0])
        remember(table, keys, links, keys.shape[0], batch, row, h)
    return batch.shape[0]


@kernel
def _observe(
    path: ReadU64Matrix,
    start: int,
    held: BoolArray,
    is_victim_tier: int,
    one_in: int,
    table: U64Array,
    keys: U64Matrix,
    links: I32Matrix,
    counts: I64Array,
) -> int:
    own_run = 0
    while own_run < held.shape[0] and held[own_run]:
        own_run += 1
    if one_in == 1:
        counts[OWN_HITS] += own_run
    shadow_hits, last_miss = 0, path.shape[0]
    for row in range(path.shape[0] - 1, start - 1, -1):
        h = hash_row(path, row)
        if (h >> np.uint64(8)) & np.uint64(one_in - 1):
            continue
        counts[SAMPLED] += 1
        if one_in > 1:
            counts[OWN_HITS] += held[row - start]
        key = find(table, keys, path, row, h)
        if key == ABSENT:
            last_miss = row
            continue
        shadow_hits += 1
        if is_victim_tier:
            forget(table, keys, links, key)
        else:
            move_to_head(links, keys.shape[0], key)
    counts[SHADOW_HITS] += last_miss - start if one_in == 1 else shadow_hits
    if not is_victim_tier and last_miss < path.shape[0]:
        _take_in(path, start, one_in, table, keys, links)
    return counts[SAMPLED]


@kernel
def _store(batch: ReadU64Matrix, one_in: int, table: U64Array, keys: U64Matrix, links: I32Matrix) -> int:
    return _take_in(batch, 0, one_in, table, keys, links)
