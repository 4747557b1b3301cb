"""How long blocks of each class stay unused: a life table of sampled keys, and what it makes a block worth.

Owns the sample, the table and the worth computed from it. Does not know slots, nor what a class means.
"""

from __future__ import annotations

import math

import numpy as np

from kvoffload.policies.hazard.age_buckets import NUM_AGES, age_bounds, bucket_of_age
from kvoffload.structures.index import ABSENT, find, hash_row
from kvoffload.structures.jit import (
    F64Matrix,
    I32Array,
    I32Matrix,
    I64Array,
    ReadU64Matrix,
    U64Array,
    U64Matrix,
    kernel,
)
from kvoffload.structures.keylists import KeyLists, forget_coldest, remember
from kvoffload.structures.keys import Keys
from kvoffload.structures.lists import LIST, PREV, move_to_head

_PRIOR_WEIGHT = 50.0
"""Number of observed keys that weigh as much as the estimate of the larger group."""


class Lifetimes:
    """The chance that a block of a class is used again, by the time since its last use.

    Ages fall into `NUM_AGES` buckets, two an octave. A sampled key counts as exposed in each bucket that its
    age reaches, and as reused in the bucket in which it is used; a future that is not yet known counts as
    neither (the actuarial life table; Kaplan and Meier, JASA 53, 1958). Old evidence fades with a half-life.
    The estimate of a class is shrunk towards that of all classes with its use count, and that towards all.

    `worth` is the Gittins index of a block at the start of an age: the maximum, over all times for which it
    may be kept, of expected hits / expected slot-time (Gittins, J. Royal Stat. Soc. B 41, 1979).

    Args:
        num_classes: number of classes; `group_size` neighbouring classes have one use count.
        capacity_blocks: of the cache; it determines how many keys are sampled.
        sample_capacity: keys in the sample.
        half_life: references after which evidence counts half; raised to four times the capacity if less.

    Cost: for one key in `sampled_one_in` an index probe and a few writes; every 16,384 references O(classes
    * ages^2), 0.2 ms. Memory: 3 MB and 30,000 keys.
    """

    def __init__(
        self,
        num_classes: int,
        group_size: int,
        capacity_blocks: int,
        key_bytes: int,
        sample_capacity: int,
        half_life: int,
    ) -> None:
        self.sampled_one_in = 4
        while sample_capacity * self.sampled_one_in < 3 * capacity_blocks:
            self.sampled_one_in *= 2
        self.half_life = max(half_life, 4 * capacity_blocks)
        self.group_size = group_size
        self.sample = KeyLists(sample_capacity, key_bytes, NUM_AGES)
        self.bounds = age_bounds()
        self._class_of = np.zeros(sample_capacity, np.int32)
        self._last = np.zeros(sample_capacity, np.int64)
        shape = (num_classes, NUM_AGES)
        self.reused, self.exposed = np.zeros(shape, np.float64), np.zeros(shape, np.float64)
        self.worth = np.zeros(shape, np.float64)
        self._hazard = np.zeros(shape, np.float64)
        self._evaluated = self._next = 0
        self._evaluate(0)

    def observe(self, path: Keys, start: int, now: int, classes: I32Array) -> None:
        """The blocks of `path` from `start` on are used at time `now` and have these classes now."""
        index, links = self.sample.index, self.sample.lists.links
        _observe(
            path.words,
            start,
            now,
            self.sampled_one_in,
            index.table,
            index.keys,
            links,
            self._class_of,
            self._last,
            classes,
            self.bounds,
            self.reused,
            self.exposed,
        )
        if now >= self._next:
            self._evaluate(now)

    def clear(self) -> None:
        """Forget all evidence."""
        self.sample.clear()
        self.reused.fill(0.0)
        self.exposed.fill(0.0)
        self._evaluated = 0
        self._evaluate(0)

    def _evaluate(self, now: int) -> None:
        faded = math.pow(0.5, (now - self._evaluated) / self.half_life)
        self.reused *= faded
        self.exposed *= faded
        _evaluate(self.reused, self.exposed, self.group_size, self.bounds, self._hazard, self.worth)
        # At first each request changes the estimates much.
        self._evaluated, self._next = now, now + min(max(now // 8, 64), 16384)


@kernel
def _observe(
    path: ReadU64Matrix,
    start: int,
    now: int,
    one_in: int,
    table: U64Array,
    keys: U64Matrix,
    links: I32Matrix,
    class_of: I32Array,
    last: I64Array,
    classes: I32Array,
    bounds: I64Array,
    reused: F64Matrix,
    exposed: F64Matrix,
) -> int:
    youngest, spare = keys.shape[0], links.shape[0] - 1
    # Each list is a bucket of ages, ordered by time: keys that are too old for it are at its end.
    for age in range(NUM_AGES - 1):
        key = links[youngest + age, PREV]
        while key != youngest + age and last[key] + bounds[age + 1] <= now:
            move_to_head(links, youngest + age + 1, key)
            exposed[class_of[key], age + 1] += 1.0
            key = links[youngest + age, PREV]
    mask = np.uint64(one_in - 1)
    sampled = 0
    for row in range(path.shape[0] - 1, start - 1, -1):
        h = hash_row(path, row)
        if h & mask:
            continue
        sampled += 1
        key = find(table, keys, path, row, h)
        if key == ABSENT:
            if links[spare, LIST] == 0:
                oldest = youngest + NUM_AGES - 1
                while links[oldest, LIST] == 0:
                    oldest -= 1
                forget_coldest(table, keys, links, oldest)
            key = remember(table, keys, links, youngest, path, row, h)
        else:
            reused[class_of[key], bucket_of_age(bounds, now - last[key])] += 1.0
            move_to_head(links, youngest, key)
        class_of[key], last[key] = classes[row - start], now
        exposed[class_of[key], 0] += 1.0
    return sampled


@kernel
def _evaluate(
    reused: F64Matrix,
    exposed: F64Matrix,
    group_size: int,
    bounds: I64Array,
    hazard: F64Matrix,
    worth: F64Matrix,
) -> int:
    num_classes = reused.shape[0]
    for age in range(NUM_AGES):
        all_reused, all_exposed = 0.5, 1.5
        for block_class in range(num_classes):
            all_reused += reused[block_class, age]
            all_exposed += exposed[block_class, age]
        for group in range(0, num_classes, group_size):
            group_reused = _PRIOR_WEIGHT * (all_reused / all_exposed)
            group_exposed = _PRIOR_WEIGHT
            for block_class in range(group, group + group_size):
                group_reused += reused[block_class, age]
                group_exposed += exposed[block_class, age]
            for block_class in range(group, group + group_size):
                likely = reused[block_class, age] + _PRIOR_WEIGHT * (group_reused / group_exposed)
                hazard[block_class, age] = min(likely / (exposed[block_class, age] + _PRIOR_WEIGHT), 1.0)
    for block_class in range(num_classes):
        for age in range(NUM_AGES):
            alive, hits, slot_time = 1.0, 0.0, 0.0
            best_hits, best_time = 0.0, 1.0
            for until in range(age, NUM_AGES):
                reuse = hazard[block_class, until]
                hits += alive * reuse
                slot_time += alive * (1.0 - 0.5 * reuse) * (bounds[until + 1] - bounds[until])
                alive *= 1.0 - reuse
                if hits * best_time > best_hits * slot_time:
                    best_hits, best_time = hits, slot_time
                if alive < 1e-6:
                    break
            worth[block_class, age] = best_hits / best_time
    return num_classes
