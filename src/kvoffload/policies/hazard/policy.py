"""Hazard: a block stays as long as its chance of being used again is worth its slot.

Our own policy. `Hazard` explains the idea; `history` and `lifetimes` are what it learns from.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np

from kvoffload.core.policy import CompiledPolicy
from kvoffload.core.request import HASH, Path, Used
from kvoffload.core.state import REFUSED, Cache, Entering, coldest_evictable, evictable, is_expected
from kvoffload.policies.hazard.age_buckets import at_age
from kvoffload.policies.hazard.history import (
    ENDED,
    NUM_CLASSES,
    NUM_GAP_CLASSES,
    NUM_KINDS,
    History,
    begin_path,
    class_at,
    classify,
    end_use,
    is_used_at,
    use_key,
)
from kvoffload.policies.hazard.lifetimes import Lifetimes, evaluate, let_age, live_after, live_on, stop
from kvoffload.policies.hazard.path_runs import LENGTH, PathRuns, deepest_of_run, join, leave, new_run
from kvoffload.policies.hazard.shadow import compare, end_path, enter_shadow, shrink_to_capacity
from kvoffload.structures.index import ABSENT, Index, find, hash_row
from kvoffload.structures.jit import F64Array, I32Array, I64Array, inline, kernel
from kvoffload.structures.lists import LIST, PREV, UNLISTED, Lists, move_to_head, push_head, unlink
from kvoffload.structures.structs import Struct

_VICTIM_WRITE_COST = -0.2
_NO_REFUSAL = -2.0
"""A write cost below -1: then every new block is worth enough."""
_PROMISE, _PROMISE_OF_FEW_WRITES = 0.003, 0.02
_TOLERATED, _FORGIVEN = 0.4, 0.28
"""Shares of the promise: by how much LRU may lead before it decides, because to become LRU again costs hits
too; and how little that has to be of all references until it decides no more."""
_SHORTEST_RUN = 100_000
"""References of the shortest run that the promise is about: over fewer a few requests decide, by chance."""
_CREDIT = 0.01
"""How much of an own lead counts, as a share of all references."""
_VICTIM_TURNS = 4
"""Times `warm_up`: a victim tier that is LRU again has what LRU has only when the device has dropped it."""
_NO_RUN = -1


class State(Struct):
    """What the policy has learnt, how it orders its blocks, and the batch at hand.

    Attributes:
        lists: an LRU list for each class; runs: all blocks in one order, by request.
        last: of each slot: when its block was used last; classes: the class that it entered with.
        cursors: of each class: the candidate, its coldest block that may leave, or the list's sentinel;
            scores: what that is worth. They are valid within one call of `replace`.
        active: the first `num_active` are the classes that have blocks, and perhaps others; is_active: of
            each class whether it is there.
        entered: of each slot: row of the batch whose block has just entered it; ABSENT between calls.
        run, run_time: the run that new blocks of the batch join if they were last used at that time.
        threshold: how many times the worth of the candidate a new block must be worth; below 0: none is
            refused.
        write_cost, victim_write_cost: that of blocks of a prefix, and of blocks that come one by one.
        warm_up, promise: as in `Hazard`.
        references: block references observed so far, the clock; now: its value when the last request began,
            or ended.
        is_victim_tier: 1 if the blocks of the last store came one by one.
        oldest_victim: the highest age at which LRU has evicted lately.
        lru_decides: 1 while the promise needs it.
    """

    history: History
    lifetimes: Lifetimes
    lists: Lists
    runs: PathRuns
    last: I64Array
    cursors: I32Array
    scores: F64Array
    classes: I32Array
    entered: I32Array
    active: I32Array
    is_active: I32Array
    num_active: int
    run: int
    run_time: int
    threshold: float
    write_cost: float
    victim_write_cost: float
    warm_up: float
    promise: float
    references: int
    now: int
    is_victim_tier: int
    oldest_victim: float
    lru_decides: int


class Hazard(CompiledPolicy):
    """The block least likely to be hit, for its time, leaves.

    Evict the block whose chance of a hit, per slot and time, is lowest; refuse a new block below that.

    Blocks fall into classes by how often and at what gaps they were used (`History`). The chance that a
    block of a class is used again, given its age, is learnt on-line from sampled keys of all traffic,
    resident or not (`Lifetimes`); from it follows each block's worth, a Gittins index. Each class is an LRU
    list, so its last block is its candidate. The candidate of lowest worth determines a request; of what is
    left of that request's path the *deepest* block leaves, since no block is useful without those before it.
    A new block that is worth less than the candidate is refused, which saves its write, unless a request that
    waits will ask for it.

    Two guards keep it from being much worse than LRU:

    - Until it has observed three times the age at which LRU evicts, it *is* LRU: it does not yet know the
      ages that matter. In a victim tier at least twelve times the capacity.
    - An exact shadow of LRU (`ShadowLRU`) counts what each request would have been served. Once that leads by
      half of the `promise`, LRU decides, until that lead is little beside the traffic that followed: so each
      attempt has to wait for as much traffic again. (Set duelling, Qureshi et al., ISCA 2007, with the whole
      cache as the sample.)

    Where a device serves the head of a request, this tier was not asked for it: that is no hit to hope for.
    Ages count from the end of a request, if the engine says when that is (`finished`), and its label is then
    part of the class of its blocks.

    `write_cost` trades hits for writes: a new block must be worth ``1 + write_cost`` times the block that
    leaves. By default 0, and -0.2 in a victim tier, where writes stay in the host.

    Time is counted in block references. Cost per block: three index probes, and a scan of the classes that
    have blocks (at most 50 without labels) for a victim. Memory: 56 bytes a slot, 72 bytes and the key for
    each of 65,536 keys of history (or twice the capacity, if that is more), and 4 MB.

    Its parameters are read when it is made.

    Attributes:
        write_cost: see above.
        history_capacity: keys of history, if that is more than twice the capacity.
        sample_capacity, half_life: as in `Lifetimes`.
        warm_up: it is LRU until this many times the age at which LRU evicts have passed.
        promise: by how much its hit ratio may be below LRU's, in a run of 100,000 references or more: an aim,
            mostly kept (docs/decisions.md); 1 switches the guard off. By default 0.003, and 0.02 with a
            `write_cost` above 0, which buys fewer writes with hits.
    """

    write_cost: Annotated[float, msgspec.Meta(ge=-1, le=1000)] | None = None
    history_capacity: Annotated[int, msgspec.Meta(ge=1)] = 1 << 16
    sample_capacity: Annotated[int, msgspec.Meta(ge=1)] = 1 << 15
    half_life: Annotated[int, msgspec.Meta(ge=1)] = 200_000
    warm_up: Annotated[int, msgspec.Meta(ge=1)] = 3
    promise: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None

    name = "hazard"
    good_for = "caches smaller than the live working set: more hits than LRU for a fraction of its writes"
    paper = "ours; the index is Gittins, J. Royal Stat. Soc. B 41, 1979"
    refuses = True

    def __init__(self, index: Index) -> None:
        super().__init__(index)
        capacity = self.capacity_blocks
        self.history = History(
            max(self.history_capacity, 2 * capacity), index.key_bytes, max(1, capacity // 4), capacity
        )
        self.lifetimes = Lifetimes(
            NUM_CLASSES,
            NUM_GAP_CLASSES * NUM_KINDS,
            NUM_KINDS,
            capacity,
            index.key_bytes,
            self.sample_capacity,
            self.half_life,
        )
        self.state = State(
            history=self.history,
            lifetimes=self.lifetimes,
            lists=Lists(capacity, NUM_CLASSES),
            runs=PathRuns(capacity),
            last=np.zeros(capacity, np.int64),
            cursors=np.zeros(NUM_CLASSES, np.int32),
            scores=np.zeros(NUM_CLASSES, np.float64),
            classes=np.zeros(capacity, np.int32),
            entered=np.full(capacity, ABSENT, np.int32),
            active=np.zeros(NUM_CLASSES, np.int32),
            is_active=np.zeros(NUM_CLASSES, np.int32),
            write_cost=0.0 if self.write_cost is None else self.write_cost,
            victim_write_cost=_VICTIM_WRITE_COST if self.write_cost is None else self.write_cost,
            warm_up=self.warm_up,
            promise=promised(self.promise, self.write_cost),
        )
        self._start()

    def _start(self) -> None:
        state = self.state
        state.references = state.now = state.is_victim_tier = 0
        state.lru_decides, state.oldest_victim = 0, 0.0

    def reset(self) -> None:
        state = self.state
        self.history.clear()
        self.lifetimes.clear()
        for part in (state.lists, state.runs):
            part.clear()
        state.entered.fill(ABSENT)
        state.is_active.fill(0)
        state.num_active = 0
        self._start()

    @property
    def is_lru(self) -> bool:
        """Whether LRU decides now."""
        return _asks_lru(self.state.memory)

    def stats(self) -> dict[str, float]:
        return {
            "is_lru": float(self.is_lru),
            "shadow_lead": self.history.shadow.lead,
            "history_keys": self.history.keys.lists.size(0),
            "references": self.state.references,
        }

    def order(self) -> list[int]:
        return self.state.runs.order.members(0)[::-1]


def promised(promise: float | None, write_cost: float | None) -> float:
    """What `Hazard.promise` is, given or not."""
    if promise is not None:
        return promise
    return _PROMISE if write_cost is None or write_cost <= 0 else _PROMISE_OF_FEW_WRITES


# ---- what all traffic teaches


@inline
def _keep_promise(own: State) -> None:
    """Let LRU decide once it would have served too much more, until that is little beside all traffic."""
    shadow, references = own.history.shadow, max(own.references, _SHORTEST_RUN)
    shadow.lead = max(shadow.lead, -_CREDIT * references)
    if shadow.lead > _TOLERATED * own.promise * references:
        own.lru_decides = 1
    elif shadow.lead <= _FORGIVEN * own.promise * references:
        own.lru_decides = 0


@inline
def _list(own: State, block_class: int, slot: int) -> None:
    """The block in `slot` is the most recent of its class."""
    links, sentinel = own.lists.links, own.lists.num_positions + block_class
    if own.is_active[block_class] == 0:
        own.is_active[block_class] = 1
        own.active[own.num_active] = block_class
        own.num_active += 1
        own.cursors[block_class], own.scores[block_class] = sentinel, np.inf
    if links[slot, LIST] == UNLISTED:
        push_head(links, sentinel, slot)
    else:
        move_to_head(links, sentinel, slot)


@Hazard.compiled
def expect(own: State, path: Path) -> None:
    """What is expected is settled: there is no more to learn of it until it is used."""
    history, keys, shadow = own.history, path.index.keys[: path.length], own.history.shadow
    let_age(own.lifetimes, own.references)
    for row in range(path.num_expected - 1, path.foreseen - 1, -1):
        h = path.records[row, HASH]
        stop(own.lifetimes, keys, row, h, own.references)
        place = find(history.keys.index, keys, row, h)
        # An LRU that knows the queue spares the block, for about as long as if it had been used.
        if place != ABSENT and shadow.blocks.links[place, LIST] != UNLISTED:
            enter_shadow(shadow, place)


@Hazard.compiled
def observe(own: State, path: Path) -> None:
    links, last, now, start = own.lists.links, own.last, own.references, path.observed
    history, keys = own.history, path.index.keys[: path.length]
    own.now = now
    let_age(own.lifetimes, now)
    begin_path(history, keys, start, path.label, now)
    own.lifetimes.has_labels |= path.label
    for row in range(path.length - 1, start - 1, -1):
        h, slot, asked = path.records[row, HASH], path.found[row], row >= path.on_device
        place = use_key(history, keys, row, h, now)
        block_class = class_at(history, place)
        live_on(own.lifetimes, keys, row, h, block_class, now, asked)
        is_held = slot >= 0 and links[slot, LIST] != UNLISTED
        if is_held:
            _list(own, block_class, slot)
            last[slot] = now
        if place != ABSENT:
            compare(history.shadow, place, is_held, asked, own.is_victim_tier)
    end_path(history.shadow)
    own.references += path.length - start
    if now >= own.lifetimes.next_evaluation:
        evaluate(own.lifetimes, now)
    _keep_promise(own)


@Hazard.compiled
def finished(own: State, path: Path) -> None:
    """Ages count from the end of a request, and from then on its label is known."""
    if path.length == 0:
        return
    history, links, keys = own.history, own.lists.links, path.index.keys[: path.length]
    # If nothing has happened since it began, its end is its beginning.
    is_at_once = own.now + path.length == own.references and is_used_at(
        history, keys, path.length - 1, own.now
    )
    if not is_at_once:
        own.now = own.references
    elif path.label == 0:
        return
    now = own.now
    label = path.label if path.label != 0 else ENDED
    own.lifetimes.has_labels = 1
    let_age(own.lifetimes, now)
    for row in range(path.length - 1, -1, -1):
        h, slot = path.records[row, HASH], path.found[row]
        place = end_use(history, keys, row, h, label, now)
        if place == ABSENT:
            continue
        block_class = class_at(history, place)
        live_after(own.lifetimes, keys, row, h, block_class, now)
        if slot >= 0 and links[slot, LIST] != UNLISTED:
            _list(own, block_class, slot)
            own.last[slot] = now
        if not own.is_victim_tier and history.shadow.blocks.links[place, LIST] != UNLISTED:
            enter_shadow(history.shadow, place)


@inline
def _is_lru(own: State) -> bool:
    known = own.warm_up * own.oldest_victim
    if own.is_victim_tier:
        known = max(known, _VICTIM_TURNS * own.warm_up * own.last.shape[0])
    return own.oldest_victim == 0 or own.references < known or own.lru_decides != 0


@kernel
def _asks_lru(own: State) -> bool:
    return _is_lru(own)


# ---- uses


@Hazard.compiled
def access(own: State, used: Used) -> None:
    links, last, slots, run = own.lists.links, own.last, used.slots, _NO_RUN
    for i in range(used.count - 1, -1, -1):
        slot = slots[i]
        leave(own.runs, slot)
        # In a victim tier blocks of several requests come in one batch: each request gets its own run.
        if run == _NO_RUN or (own.is_victim_tier and last[slot] != last[slots[i + 1]]):
            run = new_run(own.runs)
        join(own.runs, run, slot)
        move_to_head(links, links[slot, LIST], slot)


@Hazard.compiled
def remove(own: State, used: Used) -> None:
    for i in range(used.count):
        unlink(own.lists.links, used.slots[i])
        leave(own.runs, used.slots[i])


# ---- who leaves


@inline
def _worth(own: State, block_class: int, last: int) -> float:
    """What a block of this class is worth now, if it was used last then."""
    return at_age(own.lifetimes.worth, own.lifetimes.bounds, block_class, max(own.now - last, 0))


@inline
def _propose(own: State, block_class: int, slot: int) -> None:
    """This block is the candidate of its class; the list's sentinel, of infinite worth, means none."""
    is_block = slot < own.lists.num_positions
    own.cursors[block_class] = slot
    own.scores[block_class] = _worth(own, block_class, own.last[slot]) if is_block else np.inf


@inline
def _find_candidate(own: State, cache: Cache, path: Path, block_class: int, slot: int) -> None:
    """The candidate of a class is its coldest block that may leave, from `slot` on towards the head."""
    sentinel = own.lists.num_positions + block_class
    _propose(own, block_class, coldest_evictable(cache, path, own.lists.links, slot, sentinel))


@inline
def _find_candidates(own: State, cache: Cache, path: Path) -> None:
    links, capacity, active, i = own.lists.links, own.lists.num_positions, own.active, 0
    while i < own.num_active:
        block_class = active[i]
        if links[capacity + block_class, LIST] == 0:
            own.num_active -= 1
            active[i], own.is_active[block_class] = active[own.num_active], 0
        else:
            _find_candidate(own, cache, path, block_class, links[capacity + block_class, PREV])
            i += 1


@inline
def _lowest(own: State) -> int:
    """The class whose candidate is worth least, of equals the one that was used longest ago; ABSENT if no
    class has one."""
    scores, cursors, last, lowest, score, time = (
        own.scores,
        own.cursors,
        own.last,
        ABSENT,
        np.inf,
        np.int64(0),
    )
    for i in range(own.num_active):
        each = own.active[i]
        if scores[each] > score or cursors[each] >= last.shape[0]:
            continue
        used = last[cursors[each]]
        if scores[each] < score or used < time or (used == time and each < lowest):
            lowest, score, time = each, scores[each], used
    return np.int64(lowest)


@inline
def _is_refused(own: State, lowest: int, block_class: int, last: int) -> bool:
    """Whether a new block of this class, last used then, is worth too little for the candidate's slot."""
    worth, score, threshold = _worth(own, block_class, last), own.scores[lowest], own.threshold
    is_older = threshold >= 0.0 and worth == score and last < own.last[own.cursors[lowest]]
    return worth < score * threshold or is_older


@inline
def _take_victim(own: State, cache: Cache, path: Path, lowest: int) -> int:
    """Remove the last block of the run of the lowest candidate, or the candidate if that may not leave."""
    links, victim = own.lists.links, own.cursors[lowest]
    deepest = deepest_of_run(own.runs, victim)
    if evictable(cache, path, deepest):
        victim = deepest
    block_class, warmer = links[victim, LIST] - own.lists.num_positions, links[victim, PREV]
    unlink(links, victim)
    leave(own.runs, victim)
    if own.cursors[block_class] == victim:
        _find_candidate(own, cache, path, block_class, warmer)
    return victim


# ---- who enters


@inline
def _assign(own: State, slot: int, block_class: int, last: int) -> None:
    """The slot, which is in no list, is for a new block of this class, last used then."""
    own.classes[slot], own.last[slot] = block_class, last


@inline
def _enter(own: State, slot: int) -> None:
    """A new block joins lists and order at their heads. Neighbours that were last used together are a run."""
    last = own.last[slot]
    if own.run == _NO_RUN or last != own.run_time or own.runs.runs[own.run, LENGTH] == 0:
        own.run, own.run_time = new_run(own.runs), last
    _list(own, own.classes[slot], slot)
    join(own.runs, own.run, slot)


@inline
def _enter_all(own: State, new: Entering, count: int) -> None:
    """The first `count` blocks of the batch enter, the first of them foremost."""
    for i in range(count - 1, -1, -1):
        _enter(own, new.slots[i])


@inline
def _replace_as_lru(own: State, new: Entering, cache: Cache, path: Path) -> None:
    """The least recently used blocks leave."""
    order, sentinel = own.runs.order.links, own.runs.order.num_positions
    oldest = order[sentinel, PREV]
    for step in range(new.count - new.num_given):
        i = new.num_given + step if new.one_prefix or new.admitted else new.count - 1 - step
        oldest = coldest_evictable(cache, path, order, oldest, sentinel)
        if oldest == sentinel:
            return
        slot, oldest = oldest, order[oldest, PREV]
        # What was seen long ago is forgotten in a few turns of the cache: LRU may not lock itself in.
        own.oldest_victim *= 1.0 - 1.0 / own.last.shape[0]
        own.oldest_victim = max(own.oldest_victim, np.float64(own.now - own.last[slot]))
        unlink(own.lists.links, slot)
        leave(own.runs, slot)
        block_class, last = classify(own.history, new.keys, i, own.now)
        _assign(own, slot, block_class, last)
        new.slots[i] = slot
    _enter_all(own, new, new.count)


@inline
def _replace_for_prefix(own: State, new: Entering, cache: Cache, path: Path) -> None:
    """The blocks of a prefix ask for room from its head on; from the first that is refused on all are."""
    _find_candidates(own, cache, path)
    for i in range(new.num_given, new.count):
        lowest = _lowest(own)
        if lowest == ABSENT:
            return
        block_class, last = classify(own.history, new.keys, i, own.now)
        if _is_refused(own, lowest, block_class, last) and not is_expected(cache, new, i):
            new.slots[i : new.count] = REFUSED
            _enter_all(own, new, i)
            return
        new.slots[i] = _take_victim(own, cache, path, lowest)
        _assign(own, new.slots[i], block_class, last)
    _enter_all(own, new, new.count)


@inline
def _replace_one_by_one(own: State, new: Entering, cache: Cache, path: Path) -> None:
    """The blocks that a device drops ask for room from the tail on, and enter at once: each may leave again
    for one that is nearer to the root."""
    slots, entered = new.slots, own.entered
    _find_candidates(own, cache, path)
    for i in range(new.count - 1, new.num_given - 1, -1):
        lowest = _lowest(own)
        if lowest == ABSENT:
            return
        block_class, last = classify(own.history, new.keys, i, own.now)
        if _is_refused(own, lowest, block_class, last) and not is_expected(cache, new, i):
            slots[i] = REFUSED
            continue
        slot = _take_victim(own, cache, path, lowest)
        if entered[slot] != ABSENT:
            slots[entered[slot]] = REFUSED
        slots[i], entered[slot] = slot, i
        _assign(own, slot, block_class, last)
        _enter(own, slot)
        if own.cursors[block_class] >= own.lists.num_positions:
            _propose(own, block_class, slot)
    _enter_all(own, new, new.num_given)
    for i in range(new.num_given, new.count):
        if slots[i] != REFUSED:
            entered[slots[i]] = ABSENT


@inline
def _shadow_takes_in(own: State, new: Entering) -> None:
    """A victim tier's blocks come when the device drops them, and the first of a batch is the most recent."""
    history = own.history
    for row in range(new.count - 1, -1, -1):
        place = find(history.keys.index, new.keys, row, hash_row(new.keys, row))
        if place != ABSENT:
            enter_shadow(history.shadow, place)
    shrink_to_capacity(history.shadow)


@inline
def _threshold(own: State, new: Entering) -> float:
    if new.admitted:
        return 1.0 + _NO_REFUSAL
    return 1.0 + (own.write_cost if new.one_prefix else own.victim_write_cost)


@Hazard.compiled
def replace(own: State, new: Entering, cache: Cache, path: Path) -> None:
    own.is_victim_tier, own.run = not new.one_prefix, _NO_RUN
    own.threshold = _threshold(own, new)
    if own.is_victim_tier:
        _shadow_takes_in(own, new)
    for i in range(new.num_given):
        block_class, last = classify(own.history, new.keys, i, own.now)
        _assign(own, new.slots[i], block_class, last)
    if new.num_given == new.count:
        _enter_all(own, new, new.count)
    elif _is_lru(own):
        _replace_as_lru(own, new, cache, path)
    elif new.one_prefix or new.admitted:
        _replace_for_prefix(own, new, cache, path)
    else:
        _replace_one_by_one(own, new, cache, path)
