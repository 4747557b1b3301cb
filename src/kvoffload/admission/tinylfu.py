"""TinyLFU admission: a block is admitted if a frequency sketch counted two recent references."""

from __future__ import annotations

import numpy as np

from kvoffload.core.admission import Admission
from kvoffload.errors import check_integer
from kvoffload.structures.index import MAX_POSITIONS, hash_row
from kvoffload.structures.jit import BoolArray, ReadU64Matrix, kernel
from kvoffload.structures.keys import Keys
from kvoffload.structures.sketch import FrequencySketch, add, estimate, prefetch_count

THRESHOLD = 2


class TinyLFUAdmission(Admission):
    """Admits a block that two requests have referred to recently.

    The request that stores the block counts as one of the two. "Recently" means within about the last ``10 *
    capacity_blocks`` references, because the sketch regularly halves its counts.

    The first `capacity_blocks` offered blocks are admitted without a check, because they fill free slots and
    evict no block.

    If keys collide in the sketch, a block can be admitted too early, but never too late. So `admit` may
    accept a block and refuse its parent. `leading` does not count this block.

    Cost: one CPU cache miss per key. Memory: 64 bits per block of the cache, and no keys.

    Differs from the paper, where a block enters if it is more frequent than its victim. This rule does not
    know the victim. The policy ``wtinylfu`` is the paper's algorithm.

    Source: Einziger, Friedman and Manes, "TinyLFU: A Highly Efficient Cache Admission Policy", ACM
    Transactions on Storage 13(4), 2017.
    """

    name = "tinylfu"
    good_for = "chat in a cache far too small: as many hits as the best policies for very few writes"
    paper = "Einziger et al., TinyLFU: A Highly Efficient Cache Admission Policy, ACM ToS 13(4), 2017"

    def __init__(self, capacity_blocks: int) -> None:
        self._capacity_blocks = check_integer("capacity_blocks", capacity_blocks, MAX_POSITIONS // 2)
        self._num_unseen = self._capacity_blocks
        self._sketch = FrequencySketch(self._capacity_blocks)

    @classmethod
    def for_cache(cls, key_bytes: int, capacity_blocks: int) -> TinyLFUAdmission:
        """Create the rule for one cache; keys may have any length."""
        return cls(capacity_blocks)

    def count(self, keys: Keys) -> None:
        _count(self._sketch.memory, keys.words)

    def admit(self, keys: Keys) -> BoolArray:
        allowed = np.empty(len(keys), np.bool_)
        _admit(self._sketch.memory, keys.words, self._num_unseen, allowed)
        self._num_unseen -= min(self._num_unseen, len(keys))
        return allowed

    def reset(self) -> None:
        self._sketch.clear()
        self._num_unseen = self._capacity_blocks


@kernel
def _count(sketch: FrequencySketch, batch: ReadU64Matrix) -> None:
    for row in range(batch.shape[0]):
        prefetch_count(sketch, hash_row(batch, row))
    for row in range(batch.shape[0]):
        add(sketch, hash_row(batch, row))


@kernel
def _admit(sketch: FrequencySketch, batch: ReadU64Matrix, num_unseen: int, allowed: BoolArray) -> None:
    for row in range(batch.shape[0]):
        allowed[row] = row < num_unseen or estimate(sketch, hash_row(batch, row)) >= THRESHOLD
