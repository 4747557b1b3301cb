"""A shadow LRU: the hits of plain LRU, estimated on a sample of the keys.

Owns a small LRU cache of keys. Does not know slots, nor what the estimate is used for.
"""

from __future__ import annotations

import numpy as np

from kvoffload.structures.index import ABSENT, find, hash_row
from kvoffload.structures.jit import I64Array, U64Matrix, inline
from kvoffload.structures.keylists import KeyLists, forget, forget_coldest, remember
from kvoffload.structures.lists import LIST, move_to_head
from kvoffload.structures.structs import Struct

SAMPLED_ONE_IN = 4
SMALL_CAPACITY = 1024
SAMPLED, OWN_HITS, SHADOW_HITS = 0, 1, 2


class ShadowLRU(Struct):
    """LRU over one key in four, with a quarter of the capacity; counts its own hits and those of its owner.

    A cache of less than `SMALL_CAPACITY` blocks is shadowed without sampling: a sample is too coarse if a
    request is not much smaller than the cache. Then only hits along the prefix count.

    Waldspurger et al., "Efficient MRC Construction with SHARDS", FAST 2015: a cache over a sample of keys,
    scaled down like the sample, hits as often as the whole cache would.

    A request is observed by `compare` for each of its blocks, from the last to the first, then `end_path`.

    Attributes:
        keys: one list, most recent first.
        one_in: 4, or 1 without sampling.
        counts: shape ``(3,)``, int64: references sampled, and how many of them the owner and the shadow
            held. The owner resets it.
        own_run, shadow_run: how many blocks of the request at hand, from the one compared last on, the owner
            and the shadow hold without a gap; num_missed: how many sampled ones the shadow does not hold.
    """

    keys: KeyLists
    counts: I64Array
    one_in: int
    own_run: int
    shadow_run: int
    num_missed: int

    def __init__(self, capacity_blocks: int, key_bytes: int) -> None:
        one_in = SAMPLED_ONE_IN if capacity_blocks >= SMALL_CAPACITY else 1
        super().__init__(
            keys=KeyLists(max(1, capacity_blocks // one_in), key_bytes, 1),
            counts=np.zeros(3, np.int64),
            one_in=one_in,
        )

    def clear(self) -> None:
        """Forget every key and count. Cost: O(capacity)."""
        self.keys.clear()
        self.counts.fill(0)


@inline
def _is_sampled(shadow: ShadowLRU, h: np.uint64) -> bool:
    return (h >> np.uint64(8)) & np.uint64(shadow.one_in - 1) == 0


@inline
def take_in(shadow: ShadowLRU, batch: U64Matrix, start: int, stop: int) -> None:
    """Store the blocks of a batch from `start` to `stop`: they are the most recent, the first most of all.

    Of a batch longer than the cache only the head is stored.
    """
    keys, links, recent = shadow.keys, shadow.keys.lists.links, shadow.keys.lists.num_positions
    for row in range(min(stop, start + shadow.one_in * recent) - 1, start - 1, -1):
        h = hash_row(batch, row)
        if not _is_sampled(shadow, h):
            continue
        key = find(keys.index, batch, row, h)
        if key != ABSENT:
            move_to_head(links, recent, key)
            continue
        if links[recent + 1, LIST] == 0:
            forget_coldest(keys, recent)
        remember(keys, recent, batch, row, h)


@inline
def compare(
    shadow: ShadowLRU, path: U64Matrix, row: int, h: np.uint64, is_held: bool, is_victim_tier: int
) -> None:
    """A request uses the block ``path[row]``, whose hash is `h`; `is_held` says whether the owner has it.

    In a victim tier a block that is hit leaves for the device.
    """
    shadow.own_run = shadow.own_run + 1 if is_held else 0
    if not _is_sampled(shadow, h):
        return
    counts = shadow.counts
    key = find(shadow.keys.index, path, row, h)
    shadow.shadow_run = shadow.shadow_run + 1 if key != ABSENT else 0
    counts[SAMPLED] += 1
    if shadow.one_in > 1:
        counts[OWN_HITS] += is_held
        counts[SHADOW_HITS] += key != ABSENT
    if key == ABSENT:
        shadow.num_missed += 1
    elif is_victim_tier:
        forget(shadow.keys, key)
    else:
        move_to_head(shadow.keys.lists.links, shadow.keys.lists.num_positions, key)


@inline
def end_path(shadow: ShadowLRU, path: U64Matrix, start: int, is_victim_tier: int) -> None:
    """The blocks of `path` from `start` on were compared. LRU stores the blocks that it misses; a victim tier
    does so when the device drops them."""
    if shadow.one_in == 1:
        shadow.counts[OWN_HITS] += shadow.own_run
        shadow.counts[SHADOW_HITS] += shadow.shadow_run
    if shadow.num_missed > 0 and not is_victim_tier:
        take_in(shadow, path, start, path.shape[0])
    shadow.own_run = shadow.shadow_run = shadow.num_missed = 0
