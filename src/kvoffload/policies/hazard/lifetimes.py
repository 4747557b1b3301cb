"""Life tables: for each class of keys, the distribution of the time to the next use, and a block's worth.

Owns the sampled keys, the tables and the worth. Does not know slots, or the meaning of a class (`history`).
"""

from __future__ import annotations

import math

import numpy as np

from kvoffload.policies.hazard.age_buckets import NUM_AGES, age_bounds, bucket_of_age
from kvoffload.structures.index import ABSENT, find
from kvoffload.structures.jit import F64Matrix, I32Array, I64Array, U64Matrix, inline, kernel
from kvoffload.structures.keylists import KeyLists, forget, forget_coldest, remember
from kvoffload.structures.lists import LIST, PREV, move_to_head
from kvoffload.structures.structs import Struct

PRIOR_WEIGHT = 50.0
"""Weight of a parent group's estimate in the estimates of its subgroups, as a number of observed keys."""
LABEL_PRIOR_WEIGHT = 500.0
"""The same as `PRIOR_WEIGHT`, for the group of classes that differ only in their label: weight of the
group's estimate in the estimate of each of these classes. Larger than `PRIOR_WEIGHT`, because labels may
be wrong."""
ENTERING = 0.05
"""Cost of an insertion, expressed as a time during which the slot has no hits. The time is counted in
block references, as a multiple of the cache's capacity. Without this cost, blocks with a high worth for a
very short time would evict each other."""
_ALL, _GROUP, _PARENT = 0, 2, 4
"""First row of each pair of rows in `Lifetimes.sums`."""


class Lives(Struct):
    """The lives of sampled keys that have not ended.

    A life begins at a use of a key, or at the end of a request that used the key. The life ends at the next
    use.

    Attributes:
        keys: one list of lives for each age bucket, ordered by start time. The last list holds the stopped
            lives. These lives no longer age, because a waiting request expects their keys.
        class_of: class of each life.
        began: start time of each life.
        stopped: age bucket in which each stopped life was stopped.
    """

    keys: KeyLists
    class_of: I32Array
    began: I64Array
    stopped: I32Array

    def __init__(self, capacity: int, key_bytes: int) -> None:
        super().__init__(
            keys=KeyLists(capacity, key_bytes, NUM_AGES + 1),
            class_of=np.zeros(capacity, np.int32),
            began=np.zeros(capacity, np.int64),
            stopped=np.zeros(capacity, np.int32),
        )


class Lifetimes(Struct):
    """The chance that a block is used again, by class and age.

    A block has up to two lives (`Lives`), each with the block's class at that time. One began at the last
    use, the other at the end of the request that used the block. The second life, if there is one, determines
    the block's worth; while the request still runs, there is only the first.

    If a waiting request expects the block, its lives are stopped: they no longer age, because the reuse needs
    no prediction. When the request is served, the reuse counts at the age at which the life was stopped.

    Ages fall into `NUM_AGES` buckets, two an octave. A life counts as exposed in each bucket that its age
    reaches, and as reused in the bucket in which the block is used again. Open lives count as exposed only
    (the actuarial life table; Kaplan and Meier, JASA 53, 1958). Old evidence decays with a half-life.

    Classes with little evidence would have inaccurate estimates. So estimates are shrunk in three steps:

    1. a class towards the classes that differ only in their label
    2. these classes towards all classes with the same use count
    3. the classes with one use count towards all classes

    `worth` is the Gittins index of a block at the start of an age bucket: the maximum, over all holding
    times, of expected hits / expected slot-time (Gittins, J. Royal Stat. Soc. B 41, 1979).

    When a request starts to wait, call `let_age`, then `stop` for each expected block. When the request is
    served, call `let_age`, then `live_on` for each of its blocks, from last to first. When the request ends,
    call `let_age`, then `live_after` for each of its blocks.

    Args:
        num_classes: number of classes.
        group_size: number of consecutive classes with one use count.
        num_labels: number of consecutive classes that differ only in their label.
        capacity_blocks: capacity of the cache; determines the sampling rate.
        sample_capacity: keys in the sample.
        half_life: number of references after which evidence counts only half; at least four times the
            capacity.

    Attributes:
        begun: lives since the last use.
        ended: lives since the end of a request.
        bounds: start of each age bucket, and end of the last.
        reused, exposed: shape ``(num_classes, NUM_AGES)``, float64: the evidence.
        is_known: 1 for each class that has had evidence.
        hazard: same shape as `reused`: the estimates at time `evaluated`, for each known class and for each
            class without a label.
        worth: same shape: the worth at time `evaluated`. Classes with equal worth share a row.
        rows: row in `worth` of each class.
        next_evaluation: time of the next `evaluate`.
        sums: scratch memory of `evaluate`: a row of reuses and a row of exposures for each of three groups:
            all classes, the classes with one use count, the classes that differ only in their label.

    Cost: an index probe and a few writes for each sampled key; one key in `sampled_one_in` is sampled. In
    addition, O(known classes * ages^2) every 16,384 references, which takes 10 to 100 us. Memory: 3 MB and
    60,000 keys.
    """

    begun: Lives
    ended: Lives
    bounds: I64Array
    reused: F64Matrix
    exposed: F64Matrix
    is_known: I32Array
    hazard: F64Matrix
    worth: F64Matrix
    rows: I32Array
    sampled_one_in: int
    group_size: int
    num_labels: int
    entering: float
    has_labels: int
    half_life: float
    half: float
    evaluated: int
    next_evaluation: int
    sums: F64Matrix

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
            begun=Lives(sample_capacity, key_bytes),
            ended=Lives(sample_capacity, key_bytes),
            bounds=age_bounds(),
            reused=np.zeros(shape, np.float64),
            exposed=np.zeros(shape, np.float64),
            is_known=np.zeros(num_classes, np.int32),
            hazard=np.zeros(shape, np.float64),
            worth=np.zeros(shape, np.float64),
            rows=np.zeros(num_classes, np.int32),
            sums=np.zeros((6, NUM_AGES), np.float64),
            sampled_one_in=sampled_one_in,
            group_size=group_size,
            num_labels=num_labels,
            entering=ENTERING * capacity_blocks,
            half_life=max(half_life, 4 * capacity_blocks),
            half=0.5,
        )
        self.evaluate(0)

    def clear(self) -> None:
        """Forget all evidence."""
        self.begun.keys.clear()
        self.ended.keys.clear()
        self.reused.fill(0.0)
        self.exposed.fill(0.0)
        self.is_known.fill(0)
        self.has_labels = 0
        self.evaluated = 0
        self.evaluate(0)

    def evaluate(self, now: int) -> None:
        """Decay the evidence and recompute the estimates."""
        _evaluate_now(self.memory, now)


@inline
def _age(lifetimes: Lifetimes, lives: Lives, now: int) -> None:
    links, class_of, began = lives.keys.lists.links, lives.class_of, lives.began
    bounds, exposed, youngest = lifetimes.bounds, lifetimes.exposed, lives.keys.lists.num_positions
    # Each list is an age bucket, ordered by time, so keys that are too old for the bucket are at the tail.
    for age in range(NUM_AGES - 1):
        key = links[youngest + age, PREV]
        while key != youngest + age and began[key] + bounds[age + 1] <= now:
            move_to_head(links, youngest + age + 1, key)
            exposed[class_of[key], age + 1] += 1.0
            key = links[youngest + age, PREV]


@inline
def let_age(lifetimes: Lifetimes, now: int) -> None:
    """Move each life that has become too old for its age bucket to the next bucket."""
    _age(lifetimes, lifetimes.begun, now)
    _age(lifetimes, lifetimes.ended, now)


@inline
def _forget_oldest(lives: Lives) -> None:
    links, youngest = lives.keys.lists.links, lives.keys.lists.num_positions
    oldest = youngest + NUM_AGES - 1
    while links[oldest, LIST] == 0 and oldest > youngest:
        oldest -= 1
    forget_coldest(lives.keys, oldest if links[oldest, LIST] != 0 else youngest + NUM_AGES)


@inline
def _end(lifetimes: Lifetimes, lives: Lives, key: int, now: int, is_hit: bool) -> None:
    """End a life, because its key is used. The life counts as reused only if `is_hit` is True."""
    age = bucket_of_age(lifetimes.bounds, now - lives.began[key])
    if lives.keys.lists.links[key, LIST] == lives.keys.lists.num_positions + NUM_AGES:
        age = lives.stopped[key]
    lifetimes.reused[lives.class_of[key], age] += is_hit


@inline
def _stop(lifetimes: Lifetimes, lives: Lives, path: U64Matrix, row: int, h: np.uint64, now: int) -> None:
    links, waiting = lives.keys.lists.links, lives.keys.lists.num_positions + NUM_AGES
    key = find(lives.keys.index, path, row, h)
    if key != ABSENT and links[key, LIST] != waiting:
        lives.stopped[key] = bucket_of_age(lifetimes.bounds, now - lives.began[key])
        move_to_head(links, waiting, key)


@inline
def _begin(
    lifetimes: Lifetimes, lives: Lives, path: U64Matrix, row: int, h: np.uint64, key: int, block_class: int
) -> int:
    """Begin a life in this class; return its position."""
    links, youngest = lives.keys.lists.links, lives.keys.lists.num_positions
    if key == ABSENT:
        if links[links.shape[0] - 1, LIST] == 0:
            _forget_oldest(lives)
        key = remember(lives.keys, youngest, path, row, h)
    else:
        move_to_head(links, youngest, key)
    lives.class_of[key] = block_class
    lifetimes.is_known[block_class] = 1
    lifetimes.exposed[block_class, 0] += 1.0
    return np.int64(key)


@inline
def live_on(
    lifetimes: Lifetimes, path: U64Matrix, row: int, h: np.uint64, block_class: int, now: int, asked: bool
) -> None:
    """Record a use of the block ``path[row]`` with hash `h`, and begin a life in its new class.

    `asked` is False if the device served the block. The previous life then ends without counting as reused.
    """
    if h & np.uint64(lifetimes.sampled_one_in - 1):
        return
    begun, ended = lifetimes.begun, lifetimes.ended
    key = find(begun.keys.index, path, row, h)
    if key != ABSENT:
        _end(lifetimes, begun, key, now, asked)
    begun.began[_begin(lifetimes, begun, path, row, h, key, block_class)] = now
    links = ended.keys.lists.links
    if links[links.shape[0] - 1, LIST] < ended.keys.lists.num_positions:
        key = find(ended.keys.index, path, row, h)
        if key != ABSENT:
            _end(lifetimes, ended, key, now, asked)
            forget(ended.keys, key)


@inline
def live_after(
    lifetimes: Lifetimes, path: U64Matrix, row: int, h: np.uint64, block_class: int, now: int
) -> None:
    """Begin a life at the end of the request that used ``path[row]``. `block_class` includes the label."""
    if h & np.uint64(lifetimes.sampled_one_in - 1):
        return
    ended = lifetimes.ended
    key = find(ended.keys.index, path, row, h)
    ended.began[_begin(lifetimes, ended, path, row, h, key, block_class)] = now


@inline
def stop(lifetimes: Lifetimes, path: U64Matrix, row: int, h: np.uint64, now: int) -> None:
    """Stop the lives of ``path[row]`` in `begun` and `ended`, because a waiting request expects the block."""
    if h & np.uint64(lifetimes.sampled_one_in - 1):
        return
    _stop(lifetimes, lifetimes.begun, path, row, h, now)
    _stop(lifetimes, lifetimes.ended, path, row, h, now)


@inline
def _add_evidence(lifetimes: Lifetimes, row: int, start: int, stop: int) -> None:
    """Add the evidence of the classes `start` to ``stop - 1`` to two rows of `sums`.

    The reuses are added to row `row`, the exposures to row ``row + 1``.
    """
    reused, exposed, sums = lifetimes.reused, lifetimes.exposed, lifetimes.sums
    for block_class in range(start, stop):
        if lifetimes.is_known[block_class]:
            for age in range(NUM_AGES):
                sums[row, age] += reused[block_class, age]
                sums[row + 1, age] += exposed[block_class, age]


@inline
def _begin_sums(lifetimes: Lifetimes, row: int, prior: int) -> None:
    """Initialize `row`: `PRIOR_WEIGHT` exposures, and reuses in proportion to the reuses of row `prior`."""
    sums = lifetimes.sums
    for age in range(NUM_AGES):
        sums[row, age] = PRIOR_WEIGHT * (sums[prior, age] / sums[prior + 1, age])
        sums[row + 1, age] = PRIOR_WEIGHT


@inline
def _set_hazard(lifetimes: Lifetimes, block_class: int) -> None:
    """Set the estimates of a class, shrunk towards the estimates of its parent group."""
    reused, exposed, hazard, sums = lifetimes.reused, lifetimes.exposed, lifetimes.hazard, lifetimes.sums
    if exposed[block_class, 0] > 0.0 and lifetimes.has_labels:
        for age in range(NUM_AGES):
            own = reused[block_class, age] + LABEL_PRIOR_WEIGHT * sums[_PARENT, age]
            hazard[block_class, age] = min(own / (exposed[block_class, age] + LABEL_PRIOR_WEIGHT), 1.0)
    else:
        for age in range(NUM_AGES):
            hazard[block_class, age] = sums[_PARENT, age]


@inline
def _estimate(lifetimes: Lifetimes) -> None:
    """Estimate the chance of a reuse for each class and age. Skips labelled classes without evidence."""
    sums, num_labels, group_size = lifetimes.sums, lifetimes.num_labels, lifetimes.group_size
    num_classes = lifetimes.reused.shape[0]
    for age in range(NUM_AGES):
        sums[_ALL, age], sums[_ALL + 1, age] = 0.5, 1.5
    _add_evidence(lifetimes, _ALL, 0, num_classes)
    for group in range(0, num_classes, group_size):
        _begin_sums(lifetimes, _GROUP, _ALL)
        _add_evidence(lifetimes, _GROUP, group, group + group_size)
        for parent in range(group, group + group_size, num_labels):
            _begin_sums(lifetimes, _PARENT, _GROUP)
            _add_evidence(lifetimes, _PARENT, parent, parent + num_labels)
            for age in range(NUM_AGES):
                sums[_PARENT, age] = min(sums[_PARENT, age] / sums[_PARENT + 1, age], 1.0)
            for block_class in range(parent, parent + num_labels):
                if block_class == parent or lifetimes.is_known[block_class]:
                    _set_hazard(lifetimes, block_class)


@inline
def _gittins_index(lifetimes: Lifetimes, block_class: int, age: int) -> float:
    """Return the maximum, over all holding times, of expected hits / expected slot-time.

    Holding times begin at the start of the age bucket `age`. The slot-time includes `ENTERING`.
    """
    hazard, bounds = lifetimes.hazard, lifetimes.bounds
    alive, hits, slot_time = 1.0, 0.0, lifetimes.entering
    best_hits, best_time = 0.0, 1.0
    for until in range(age, NUM_AGES):
        reuse = hazard[block_class, until]
        hits += alive * reuse
        slot_time += alive * (1.0 - 0.5 * reuse) * (bounds[until + 1] - bounds[until])
        alive *= 1.0 - reuse
        if hits * best_time > best_hits * slot_time:
            best_hits, best_time = hits, slot_time
        # A longer holding time has at most `alive` more hits. The factor exceeds all rounding errors.
        elif (hits + alive) * best_time * 1.000001 < best_hits * slot_time:
            break
        if alive < 1e-6:
            break
    return best_hits / best_time


@inline
def _has_equal_hazard(lifetimes: Lifetimes, one: int, other: int) -> bool:
    hazard = lifetimes.hazard
    for age in range(NUM_AGES):  # noqa: SIM110  (a generator is not a loop to numba)
        if hazard[one, age] != hazard[other, age]:
            return False
    return True


@inline
def _set_worth(lifetimes: Lifetimes) -> None:
    """Compute the worth of all classes. Neighbouring classes with equal estimates share one row.

    A class with a label but no evidence shares the row of the class that differs only in having no label.
    """
    exposed, worth, rows = lifetimes.exposed, lifetimes.worth, lifetimes.rows
    num_labels, computed = lifetimes.num_labels, 0
    for block_class in range(worth.shape[0]):
        label = block_class % num_labels
        if label > 0 and not exposed[block_class, 0] > 0.0:
            rows[block_class] = rows[block_class - label]
        elif block_class > 0 and _has_equal_hazard(lifetimes, block_class, computed):
            rows[block_class] = computed
        else:
            computed = rows[block_class] = block_class
            for age in range(NUM_AGES):
                worth[block_class, age] = _gittins_index(lifetimes, block_class, age)


@inline
def evaluate(lifetimes: Lifetimes, now: int) -> None:
    """Decay the evidence and recompute the estimates."""
    reused, exposed = lifetimes.reused, lifetimes.exposed
    # Not `0.5 **`: the compiler would choose another function, with other last digits.
    faded = math.pow(lifetimes.half, (now - lifetimes.evaluated) / lifetimes.half_life)
    for block_class in range(reused.shape[0]):
        if lifetimes.is_known[block_class]:
            for age in range(NUM_AGES):
                reused[block_class, age] *= faded
                exposed[block_class, age] *= faded
    _estimate(lifetimes)
    _set_worth(lifetimes)
    # At first evaluations are more frequent, because each request changes the estimates much.
    lifetimes.evaluated = now
    lifetimes.next_evaluation = now + min(max(now // 8, 64), 16384)


@kernel
def _evaluate_now(lifetimes: Lifetimes, now: int) -> None:
    evaluate(lifetimes, now)
