"""Hazard: a block stays as long as its chance of being used again is worth its slot.

Our own policy. `Hazard` explains the idea; `history` and `lifetimes` are what it learns from.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np

from kvoffload.core.policy import REFUSED, EvictionPolicy
from kvoffload.core.protection import Protected, coldest_evictable, evictable
from kvoffload.core.slots import SlotArray
from kvoffload.policies.hazard.age_buckets import at_age
from kvoffload.policies.hazard.history import NUM_CLASSES, NUM_GAP_CLASSES, History
from kvoffload.policies.hazard.lifetimes import Lifetimes
from kvoffload.policies.hazard.path_runs import LENGTH, PathRuns, deepest_of_run, join, leave, new_run
from kvoffload.policies.hazard.shadow import ShadowLRU
from kvoffload.structures.index import ABSENT, Index
from kvoffload.structures.jit import (
    BoolArray,
    F64Array,
    F64Matrix,
    I32Array,
    I32Matrix,
    I64Array,
    ReadI32Array,
    U64Array,
    U64Matrix,
    inline,
    kernel,
)
from kvoffload.structures.keys import Keys
from kvoffload.structures.lists import LIST, PREV, UNLISTED, Lists, move_to_head, push_head, unlink

_VICTIM_WRITE_COST = -0.2
_NO_REFUSAL = -2.0
"""A write cost below -1: then every new block is worth enough."""
_TOLERATED_LEAD = 0.005
_MAX_LRU_WINDOWS = 16


class Hazard(EvictionPolicy):
    """Evict the block whose chance of a hit, per slot and time, is lowest; refuse a new block below that.

    Blocks fall into 50 classes by how often and at what gaps they were used (`History`). The chance that a
    block of a class is used again, given its age, is learnt on-line from sampled keys of all traffic,
    resident or not (`Lifetimes`); from it follows each block's worth, a Gittins index. Each class is an LRU
    list, so its last block is its candidate. The candidate of lowest worth determines a request; of what is
    left of that request's path the *deepest* block leaves, since no block is useful without those before it.
    A new block that is worth less than the candidate is refused, which saves its write.

    Two guards keep it from being much worse than LRU:

    - Until it has observed three times the age at which LRU evicts, it *is* LRU: it does not yet know the
      ages that matter.
    - A shadow LRU (`ShadowLRU`) runs beside it. If the shadow hits 0.5 points more, LRU decides for a while,
      and for longer each time (set duelling: Qureshi et al., ISCA 2007).

    `write_cost` trades hits for writes: a new block must be worth ``1 + write_cost`` times the block that
    leaves. By default 0, and -0.2 in a victim tier, where writes stay in the host.

    Time is counted in block references. Cost per block: three index probes and a scan of 50 classes for a
    victim. Memory: 44 bytes a slot, 52 bytes and the key for each of 65,536 keys of history (or twice the
    capacity, if that is more), and 3 MB.

    Attributes:
        write_cost: see above.
        history_capacity: keys of history, if that is more than twice the capacity.
        sample_capacity, half_life: as in `Lifetimes`.
        duel_window: references between two decisions of the duel; limited to at most twenty times and at
            least once the capacity.
        warm_up: it is LRU until this many times the age at which LRU evicts have passed.
    """

    write_cost: Annotated[float, msgspec.Meta(ge=-1, le=1000)] | None = None
    history_capacity: Annotated[int, msgspec.Meta(ge=1)] = 1 << 16
    sample_capacity: Annotated[int, msgspec.Meta(ge=1)] = 1 << 15
    half_life: Annotated[int, msgspec.Meta(ge=1)] = 200_000
    duel_window: Annotated[int, msgspec.Meta(ge=1)] = 20_000
    warm_up: Annotated[int, msgspec.Meta(ge=1)] = 3

    name = "hazard"
    good_for = "caches smaller than the live working set: more hits than LRU for a fraction of its writes"
    paper = "ours; the index is Gittins, J. Royal Stat. Soc. B 41, 1979"
    refuses = True

    def __init__(self, index: Index) -> None:
        super().__init__(index)
        capacity = self.capacity_blocks
        self.history = History(
            max(self.history_capacity, 2 * capacity), index.key_bytes, max(1, capacity // 4)
        )
        self.lifetimes = Lifetimes(
            NUM_CLASSES, NUM_GAP_CLASSES, capacity, index.key_bytes, self.sample_capacity, self.half_life
        )
        self._lists = Lists(capacity, NUM_CLASSES)
        self._last = np.zeros(capacity, np.int64)
        self._runs = PathRuns(capacity)
        self._shadow = ShadowLRU(capacity, index.key_bytes)
        self._oldest_victim = np.zeros(1, np.int64)
        self._cursors = np.zeros(NUM_CLASSES, np.int32)
        # Row of the batch whose block has just entered a slot; ABSENT between calls.
        self._entered = np.full(capacity, ABSENT, np.int32)
        self._scores = np.zeros(NUM_CLASSES, np.float64)
        self._start()

    def _start(self) -> None:
        self._now = self._references = 0
        self._is_victim_tier = False
        self._lead, self._lru_windows, self._next_lru_windows = 0.0, 0, 1
        self._next_duel = 0

    def observe(self, path: Keys, slots: SlotArray, start: int) -> None:
        now = self._now = self._references
        count = len(slots)
        places, classes = np.empty(count, np.int32), np.empty(count, np.int32)
        self.history.observe(path, start, now, places, classes)
        self.lifetimes.observe(path, start, now, classes)
        held = np.empty(count, np.bool_)
        _reclassify(slots, classes, now, self._lists.links, self._last, held)
        self._shadow.observe(path, start, held, self._is_victim_tier)
        self._references += count
        if self._references >= self._next_duel:
            self._end_duel_window()

    def access(self, slots: SlotArray, reused: BoolArray) -> None:
        # In a victim tier blocks of several requests come in one batch: each request gets its own run.
        _access(
            self._lists.links,
            self._last,
            self._runs.order.links,
            self._runs.runs,
            self._is_victim_tier,
            slots,
        )

    def replace(self, keys: Keys, slots: SlotArray, num_free: int, protected: Protected) -> None:
        count = len(slots)
        self._is_victim_tier = not protected.one_prefix
        classes, last = np.empty(count, np.int32), np.empty(count, np.int64)
        self.history.classify(keys, self._now, classes, last)
        write_cost = self.write_cost
        if write_cost is None:
            write_cost = 0.0 if protected.one_prefix else _VICTIM_WRITE_COST
        if protected.admitted:
            write_cost = _NO_REFUSAL
        if self._is_victim_tier:
            self._shadow.store(keys)
        _replace(
            slots,
            num_free,
            self._now,
            classes,
            last,
            self._lists.links,
            self._last,
            self._runs.order.links,
            self._runs.runs,
            self.lifetimes.worth,
            self.lifetimes.bounds,
            self._cursors,
            self._entered,
            self._scores,
            self._oldest_victim,
            1.0 + write_cost,
            self.is_lru,
            protected.one_prefix or protected.admitted,
            protected.ref_cnt,
            protected.path_table,
            protected.path_keys,
            protected.index_keys,
        )

    def remove(self, slots: SlotArray) -> None:
        _remove(self._lists.links, self._runs.order.links, self._runs.runs, slots)

    def reset(self) -> None:
        self.history.clear()
        self.lifetimes.clear()
        for part in (self._lists, self._runs, self._shadow):
            part.clear()
        self._oldest_victim.fill(0)
        self._start()

    @property
    def is_lru(self) -> bool:
        """Whether LRU decides now."""
        oldest = int(self._oldest_victim[0])
        return oldest == 0 or self._references < self.warm_up * oldest or self._lru_windows > 0

    def stats(self) -> dict[str, float]:
        return {
            "is_lru": float(self.is_lru),
            "shadow_lead": self._lead,
            "history_keys": self.history.keys.lists.size(0),
            "references": self._references,
        }

    def order(self) -> list[int]:
        return self._runs.order.members(0)[::-1]

    def _end_duel_window(self) -> None:
        """End a window of the duel: decide whether LRU decides in the next ones."""
        sampled, own, shadow = self._shadow.counts.tolist()
        self._lead = 0.5 * self._lead + 0.5 * (shadow - own) / max(1, sampled)
        self._shadow.counts.fill(0)
        window = max(min(self.duel_window, 20 * self.capacity_blocks), self.capacity_blocks)
        self._next_duel = self._references + window
        if self._lru_windows > 0:
            self._lru_windows -= 1
            self._lead = 0.0
        elif self._lead > _TOLERATED_LEAD:
            self._lru_windows = self._next_lru_windows
            self._next_lru_windows = min(2 * self._next_lru_windows, _MAX_LRU_WINDOWS)
        elif self._lead < 0 and self._next_lru_windows > 1:
            self._next_lru_windows -= 1


@kernel
def _access(
    links: I32Matrix, last: I64Array, order: I32Matrix, runs: I32Matrix, by_time: int, slots: ReadI32Array
) -> int:
    run = -1
    for i in range(slots.shape[0] - 1, -1, -1):
        leave(order, runs, slots[i])
        if run < 0 or (by_time and last[slots[i]] != last[slots[i + 1]]):
            run = new_run(runs)
        join(order, runs, run, slots[i])
        move_to_head(links, links[slots[i], LIST], slots[i])
    return slots.shape[0]


@kernel
def _remove(links: I32Matrix, order: I32Matrix, runs: I32Matrix, slots: ReadI32Array) -> int:
    for i in range(slots.shape[0]):
        unlink(links, slots[i])
        leave(order, runs, slots[i])
    return slots.shape[0]


@kernel
def _reclassify(
    slots: ReadI32Array, classes: I32Array, now: int, links: I32Matrix, last: I64Array, held: BoolArray
) -> int:
    """Move a request's blocks to the lists of their classes; `held` are the blocks that are in a list."""
    for i in range(slots.shape[0] - 1, -1, -1):
        slot = slots[i]
        held[i] = slot >= 0 and links[slot, LIST] != UNLISTED
        if held[i]:
            unlink(links, slot)
            push_head(links, last.shape[0] + classes[i], slot)
            last[slot] = now
    return slots.shape[0]


@inline
def _score(slot: int, block_class: int, now: int, last: I64Array, worth: F64Array, bounds: I64Array) -> float:
    """The worth of a candidate now; infinite if there is none."""
    if slot >= last.shape[0]:
        return np.inf
    return at_age(worth, bounds, block_class, now - last[slot])


@inline
def _replace_as_lru(
    slots: I32Array,
    num_free: int,
    now: int,
    links: I32Matrix,
    last: I64Array,
    order: I32Matrix,
    runs: I32Matrix,
    oldest_victim: I64Array,
    one_prefix: int,
    ref_cnt: I32Array,
    path_table: U64Array,
    path_keys: U64Matrix,
    index_keys: U64Matrix,
) -> int:
    """The least recently used blocks leave; how many slots are filled."""
    c = last.shape[0]
    oldest = order[order.shape[0] - 1, PREV]
    for step in range(num_free, slots.shape[0]):
        i = step if one_prefix else slots.shape[0] - 1 - (step - num_free)
        oldest = coldest_evictable(order, oldest, c, ref_cnt, path_table, path_keys, index_keys)
        if oldest >= c:
            return step
        slots[i] = oldest
        oldest_victim[0] = max(oldest_victim[0], now - last[oldest])
        oldest = order[oldest, PREV]
        unlink(links, slots[i])
        leave(order, runs, slots[i])
    return slots.shape[0]


@inline
def _lowest(scores: F64Array, cursors: I32Array, last: I64Array) -> int:
    """The class whose candidate is worth least, of equals the one that was used longest ago."""
    lowest = 0
    for each in range(1, NUM_CLASSES):
        if scores[each] < scores[lowest] or (
            scores[each] == scores[lowest]
            and cursors[each] < last.shape[0]
            and last[cursors[each]] < last[cursors[lowest]]
        ):
            lowest = each
    return lowest


@inline
def _join_all(
    slots: I32Array,
    count: int,
    run: int,
    run_time: int,
    classes: I32Array,
    last_used: I64Array,
    links: I32Matrix,
    last: I64Array,
    order: I32Matrix,
    runs: I32Matrix,
) -> None:
    """The first `count` blocks of the batch join lists and order, the first of them foremost."""
    for i in range(count - 1, -1, -1):
        slot = slots[i]
        if run < 0 or last_used[i] != run_time:
            run, run_time = new_run(runs), last_used[i]
        last[slot] = last_used[i]
        push_head(links, last.shape[0] + classes[i], slot)
        join(order, runs, run, slot)


@inline
def _clear_entered(entered: I32Array, slots: I32Array, num_free: int) -> None:
    """Leave `entered` as it was between calls."""
    for i in range(num_free, slots.shape[0]):
        if slots[i] != REFUSED:
            entered[slots[i]] = ABSENT


@inline
def _deepest_evictable(
    runs: I32Matrix,
    victim: int,
    ref_cnt: I32Array,
    path_table: U64Array,
    path_keys: U64Matrix,
    index_keys: U64Matrix,
) -> int:
    """The last block of a victim's run, if that may leave; otherwise the victim itself."""
    deepest = deepest_of_run(runs, victim)
    return deepest if evictable(ref_cnt, path_table, path_keys, index_keys, deepest) else victim


@kernel
def _replace(
    slots: I32Array,
    num_free: int,
    now: int,
    classes: I32Array,
    last_used: I64Array,
    links: I32Matrix,
    last: I64Array,
    order: I32Matrix,
    runs: I32Matrix,
    worth: F64Matrix,
    bounds: I64Array,
    cursors: I32Array,
    entered: I32Array,
    scores: F64Array,
    oldest_victim: I64Array,
    threshold: float,
    is_lru: int,
    one_prefix: int,
    ref_cnt: I32Array,
    path_table: U64Array,
    path_keys: U64Matrix,
    index_keys: U64Matrix,
) -> int:
    capacity, count = last.shape[0], slots.shape[0]
    run, run_time = -1, -1
    if is_lru:
        filled = _replace_as_lru(
            slots, num_free, now, links, last, order, runs, oldest_victim, one_prefix,
            ref_cnt, path_table, path_keys, index_keys,
        )  # fmt: skip
        if filled == count:
            _join_all(slots, count, run, run_time, classes, last_used, links, last, order, runs)
        return filled
    for block_class in range(NUM_CLASSES if num_free < count else 0):
        cold = links[capacity + block_class, PREV]
        cursors[block_class] = coldest_evictable(
            links, cold, capacity + block_class, ref_cnt, path_table, path_keys, index_keys
        )
        scores[block_class] = _score(cursors[block_class], block_class, now, last, worth, bounds)
    for step in range(num_free, count):
        # The blocks of a prefix enter from its head on. Blocks that a device drops enter from the tail on: a
        # block may leave again for one that is nearer to the root.
        i = step if one_prefix else count - 1 - (step - num_free)
        lowest = _lowest(scores, cursors, last)
        victim = cursors[lowest]
        if victim >= capacity:
            return i
        own_worth = at_age(worth, bounds, classes[i], now - last_used[i])
        is_older = threshold >= 0.0 and own_worth == scores[lowest] and last_used[i] < last[victim]
        if own_worth < scores[lowest] * threshold or is_older:
            slots[i] = REFUSED
            if one_prefix:
                slots[i:] = REFUSED
                count = i
                break
            continue
        victim = _deepest_evictable(runs, victim, ref_cnt, path_table, path_keys, index_keys)
        block_class = links[victim, LIST] - capacity
        warmer = links[victim, PREV]
        unlink(links, victim)
        leave(order, runs, victim)
        if cursors[block_class] == victim:
            cursors[block_class] = coldest_evictable(
                links, warmer, capacity + block_class, ref_cnt, path_table, path_keys, index_keys
            )
            scores[block_class] = _score(cursors[block_class], block_class, now, last, worth, bounds)
        slots[i] = victim
        if one_prefix:
            continue
        if entered[victim] != ABSENT:
            slots[entered[victim]] = REFUSED
        entered[victim] = i
        if run < 0 or last_used[i] != run_time or runs[run, LENGTH] == 0:
            run, run_time = new_run(runs), last_used[i]
        last[victim] = last_used[i]
        push_head(links, capacity + classes[i], victim)
        join(order, runs, run, victim)
        if cursors[classes[i]] >= capacity:
            cursors[classes[i]], scores[classes[i]] = victim, own_worth
    first_left = count if one_prefix else num_free
    _join_all(slots, first_left, run, run_time, classes, last_used, links, last, order, runs)
    _clear_entered(entered, slots, num_free)
    return count
