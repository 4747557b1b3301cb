"""How long blocks of each class stay unused: a life table of sampled keys, and what it makes a block worth.

Owns the sample, the table and the worth computed from it. Does not know slots, nor what a class means.
"""

from __future__ import annotations

import math

import numpy as np

from kvoffload.policies.hazard.age_buckets import NUM_AGES, age_bounds, bucket_of_age
from kvoffload.structures.index import ABSENT, find
from kvoffload.structures.jit import F64Matrix, I32Array, I64Array, U64Matrix, inline, kernel
from kvoffload.structures.keylists import KeyLists, forget_coldest, remember
from kvoffload.structures.lists import LIST, PREV, move_to_head
from kvoffload.structures.structs import Struct

_PRIOR_WEIGHT = 50.0
"""Number of observed keys that weigh as much as the estimate of the larger group."""
_LABEL_PRIOR_WEIGHT = 500.0
"""The same for classes that differ in their label: what is told may be wrong, so it has to prove more."""


class Lifetimes(Struct):
    """The chance that a block of a class is used again, by the time since its last use.

    Ages fall into `NUM_AGES` buckets, two an octave. A sampled key counts as exposed in each bucket that its
    age reaches, and as reused in the bucket in which it is used; a future that is not yet known counts as
    neither (the actuarial life table; Kaplan and Meier, JASA 53, 1958). Old evidence fades with a half-life.
    The estimate of a class is shrunk towards that of the classes that differ in their label only, that
    towards all with its use count, and that towards all.

    `worth` is the Gittins index of a block at the start of an age: the maximum, over all times for which it
    may be kept, of expected hits / expected slot-time (Gittins, J. Royal Stat. Soc. B 41, 1979).

    A request is observed by `let_age`, and then `live_on` for each of its blocks, from the last to the first.

    Args:
        num_classes: number of classes; `group_size` neighbouring classes have one use count, and `num_labels`
            neighbours among them differ in their label only.
        capacity_blocks: of the cache; it determines how many keys are sampled.
        sample_capacity: keys in the sample.
        half_life: references after which evidence counts half; raised to four times the capacity if less.

    Attributes:
        sample: a list for each bucket of ages, ordered by the time of the last use.
        class_of, last: of each key in the sample: its class at its last use, and when that was.
        bounds: where the buckets begin, and where the last ends.
        reused, exposed: shape ``(num_classes, NUM_AGES)``, float64: the evidence.
        hazard, worth: the same shape: what follows from it, as of time `evaluated`.
        next_evaluation: the time from which on `evaluate` is due.

    Cost: for one key in `sampled_one_in` an index probe and a few writes; every 16,384 references O(classes
    * ages^2), 0.2 ms. Memory: 3 MB and 30,000 keys.
    """

    sample: KeyLists
    class_of: I32Array
    last: I64Array
    bounds: I64Array
    reused: F64Matrix
    exposed: F64Matrix
    hazard: F64Matrix
    worth: F64Matrix
    sampled_one_in: int
    group_size: int
    num_labels: int
    has_labels: int
    half_life: float
    half: float
    evaluated: int
    next_evaluation: int

    def __init__(
        self,
        num_classes: int,
        group_size: int,
        num_labels: int,
        capacity_blocks: int,
        key_bytes: int,
        sample_capacity: int,
        half_life: int,
    ) -> None:
        sampled_one_in = 4
        while sample_capacity * sampled_one_in < 3 * capacity_blocks:
            sampled_one_in *= 2
        shape = (num_classes, NUM_AGES)
        super().__init__(
            sample=KeyLists(sample_capacity, key_bytes, NUM_AGES),
            class_of=np.zeros(sample_capacity, np.int32),
            last=np.zeros(sample_capacity, np.int64),
            bounds=age_bounds(),
            reused=np.zeros(shape, np.float64),
            exposed=np.zeros(shape, np.float64),
            hazard=np.zeros(shape, np.float64),
            worth=np.zeros(shape, np.float64),
            sampled_one_in=sampled_one_in,
            group_size=group_size,
            num_labels=num_labels,
            half_life=max(half_life, 4 * capacity_blocks),
            half=0.5,
        )
        self.evaluate(0)

    def clear(self) -> None:
        """Forget all evidence."""
        self.sample.clear()
        self.reused.fill(0.0)
        self.exposed.fill(0.0)
        self.has_labels = 0
        self.evaluated = 0
        self.evaluate(0)

    def evaluate(self, now: int) -> None:
        """Let the evidence fade, and compute what follows from it."""
        _evaluate_now(self.memory, now)


@inline
def let_age(lifetimes: Lifetimes, now: int) -> None:
    """Move the keys that have become too old for their bucket to the next one."""
    links, class_of, last = lifetimes.sample.lists.links, lifetimes.class_of, lifetimes.last
    bounds, exposed, youngest = lifetimes.bounds, lifetimes.exposed, lifetimes.sample.lists.num_positions
    # Each list is a bucket of ages, ordered by time: keys that are too old for it are at its end.
    for age in range(NUM_AGES - 1):
        key = links[youngest + age, PREV]
        while key != youngest + age and last[key] + bounds[age + 1] <= now:
            move_to_head(links, youngest + age + 1, key)
            exposed[class_of[key], age + 1] += 1.0
            key = links[youngest + age, PREV]


@inline
def _forget_oldest(lifetimes: Lifetimes) -> None:
    links = lifetimes.sample.lists.links
    oldest = lifetimes.sample.lists.num_positions + NUM_AGES - 1
    while links[oldest, LIST] == 0:
        oldest -= 1
    forget_coldest(lifetimes.sample, oldest)


@inline
def live_on(
    lifetimes: Lifetimes, path: U64Matrix, row: int, h: np.uint64, block_class: int, now: int, asked: bool
) -> None:
    """The block ``path[row]``, whose hash is `h`, is used, and has this class now. If it was not `asked` for,
    because the device has it, its life so far ended without a hit, and without counting as one."""
    if h & np.uint64(lifetimes.sampled_one_in - 1):
        return
    sample, links, class_of = lifetimes.sample, lifetimes.sample.lists.links, lifetimes.class_of
    youngest = sample.lists.num_positions
    key = find(sample.index, path, row, h)
    if key == ABSENT:
        if links[youngest + NUM_AGES, LIST] == 0:
            _forget_oldest(lifetimes)
        key = remember(sample, youngest, path, row, h)
    else:
        age = bucket_of_age(lifetimes.bounds, now - lifetimes.last[key])
        lifetimes.reused[class_of[key], age] += asked
        move_to_head(links, youngest, key)
    class_of[key], lifetimes.last[key] = block_class, now
    lifetimes.exposed[block_class, 0] += 1.0


@inline
def live_again(
    lifetimes: Lifetimes, path: U64Matrix, row: int, h: np.uint64, block_class: int, now: int
) -> None:
    """The request that used the block ``path[row]`` has ended: its age is counted from now, in this class."""
    if h & np.uint64(lifetimes.sampled_one_in - 1):
        return
    links, youngest = lifetimes.sample.lists.links, lifetimes.sample.lists.num_positions
    key = find(lifetimes.sample.index, path, row, h)
    if key != ABSENT:
        # The time that the request ran is no evidence of who comes back after it.
        for age in range(links[key, LIST] - youngest + 1):
            exposed = lifetimes.exposed[lifetimes.class_of[key], age]
            lifetimes.exposed[lifetimes.class_of[key], age] = max(exposed - 1.0, 0.0)
        move_to_head(links, youngest, key)
        lifetimes.class_of[key], lifetimes.last[key] = block_class, now
        lifetimes.exposed[block_class, 0] += 1.0


@inline
def _estimate(lifetimes: Lifetimes, age: int) -> None:
    """The chance of a reuse in a bucket of ages, for each class: that of its parent, as far as it has no
    evidence of its own."""
    reused, exposed, hazard = lifetimes.reused, lifetimes.exposed, lifetimes.hazard
    num_classes, num_labels, group_size = reused.shape[0], lifetimes.num_labels, lifetimes.group_size
    all_reused, all_exposed = 0.5, 1.5
    for block_class in range(num_classes):
        all_reused += reused[block_class, age]
        all_exposed += exposed[block_class, age]
    for group in range(0, num_classes, group_size):
        group_reused, group_exposed = _PRIOR_WEIGHT * (all_reused / all_exposed), _PRIOR_WEIGHT
        for block_class in range(group, group + group_size):
            group_reused += reused[block_class, age]
            group_exposed += exposed[block_class, age]
        for parent in range(group, group + group_size, num_labels):
            some_reused, some_exposed = _PRIOR_WEIGHT * (group_reused / group_exposed), _PRIOR_WEIGHT
            for block_class in range(parent, parent + num_labels):
                some_reused += reused[block_class, age]
                some_exposed += exposed[block_class, age]
            likely = min(some_reused / some_exposed, 1.0)
            for block_class in range(parent, parent + num_labels):
                hazard[block_class, age] = likely
                if exposed[block_class, 0] > 0.0 and lifetimes.has_labels:
                    own = reused[block_class, age] + _LABEL_PRIOR_WEIGHT * likely
                    hazard[block_class, age] = min(
                        own / (exposed[block_class, age] + _LABEL_PRIOR_WEIGHT), 1.0
                    )


@inline
def _gittins_index(lifetimes: Lifetimes, block_class: int, age: int) -> float:
    """The best ratio of hits to slot-time, over all times to stop, for a block at the start of an age."""
    hazard, bounds = lifetimes.hazard, lifetimes.bounds
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
    return best_hits / best_time


@inline
def evaluate(lifetimes: Lifetimes, now: int) -> None:
    """Let the evidence fade, and compute what follows from it."""
    reused, exposed, worth = lifetimes.reused, lifetimes.exposed, lifetimes.worth
    # Not `0.5 **`: the compiler would make another function of it, with other last digits.
    faded = math.pow(lifetimes.half, (now - lifetimes.evaluated) / lifetimes.half_life)
    for block_class in range(reused.shape[0]):
        for age in range(NUM_AGES):
            reused[block_class, age] *= faded
            exposed[block_class, age] *= faded
    for age in range(NUM_AGES):
        _estimate(lifetimes, age)
    for block_class in range(worth.shape[0]):
        label = block_class % lifetimes.num_labels
        if label == 0 or exposed[block_class, 0] > 0.0:
            for age in range(NUM_AGES):
                worth[block_class, age] = _gittins_index(lifetimes, block_class, age)
        else:
            for age in range(NUM_AGES):
                worth[block_class, age] = worth[block_class - label, age]
    # At first each request changes the estimates much.
    lifetimes.evaluated = now
    lifetimes.next_evaluation = now + min(max(now // 8, 64), 16384)


@kernel
def _evaluate_now(lifetimes: Lifetimes, now: int) -> None:
    evaluate(lifetimes, now)
