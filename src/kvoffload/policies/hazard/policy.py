"""The policy Hazard: evicts the block with the fewest expected hits per unit of time in its slot.

The class `Hazard` explains the idea. The modules `history` and `lifetimes` hold the statistics that the
policy learns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
import numpy as np

from kvoffload.core.policy import CompiledPolicy
from kvoffload.core.request import HASH, Path, Used
from kvoffload.core.state import (
    REFUSED,
    Cache,
    Entering,
    coldest_evictable,
    coldest_of,
    evictable,
    is_expected,
)
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
from kvoffload.policies.hazard.lifetimes import (
    ENTERING,
    Lifetimes,
    evaluate,
    let_age,
    live_after,
    live_on,
    stop,
)
from kvoffload.policies.hazard.path_runs import LENGTH, PathRuns, deepest_of_run, join, leave, new_run
from kvoffload.policies.hazard.shadow import compare, end_path, enter_shadow, shrink_to_capacity
from kvoffload.structures.index import ABSENT, MAX_POSITIONS, Index, find, hash_row
from kvoffload.structures.jit import F64Array, I32Array, I64Array, inline, kernel
from kvoffload.structures.lists import LIST, PREV, UNLISTED, Lists, move_to_head, push_head, unlink
from kvoffload.structures.structs import Struct

VICTIM_WRITE_COST = -0.2
_NO_REFUSAL = -2.0
"""Write cost that disables refusals: with a write cost below -1, every new block is accepted."""
_PROMISE, _PROMISE_OF_FEW_WRITES = 0.01, 0.02
TOLERATED, FORGIVEN = 0.4, 0.28
"""Limits of `ShadowLRU.lead` for the switch between policy and LRU, in multiples of ``promise * recent``.

When LRU's lead exceeds `TOLERATED`, LRU chooses the victims, until the lead has fallen to `FORGIVEN`. The two
limits differ so that switches are rare, because each switch costs hits.
"""
RECENT, RECENT_TURNS = 100_000, 4
"""Time in which `ShadowLRU.lead` decays to 1/e, so that old differences are forgotten.

The time is `RECENT` block references, or `RECENT_TURNS` times the capacity if that is more.
"""
CREDIT = 0.01
"""Keeps `ShadowLRU.lead` at ``-CREDIT * State.recent`` or above, so that old gains offset few new losses."""
VICTIM_TURNS = 4
"""In a victim tier, the policy evicts like LRU for at least ``VICTIM_TURNS * warm_up * capacity`` references.

The limit is needed because a victim tier receives blocks only when the device drops them.
"""
_NO_RUN = -1
_ORDER = -1
"""Value of `coldest_of`'s argument `key` for a search in `State.runs.order`."""


class State(Struct):
    """The state of a Hazard cache.

    Attributes:
        lists: an LRU list for each class.
        runs: all blocks in recency order, grouped by request.
        last: for each slot, the time of the last use of its block.
        cursors: for each class, the slot of its coldest evictable block (its *candidate*). If no block is
            evictable, the entry is the list's sentinel. Valid only within a call of `replace`.
        scores: worth of each candidate. Valid only within a call of `replace`.
        classes: for each slot, the class of its block at the time of the store.
        entered: for each slot filled in this call, the batch row of its block; ABSENT between calls.
        active: class numbers. The first `num_active` entries include every class that has blocks.
        is_active: 1 for each class among the first `num_active` entries of `active`.
        run, run_time: the newest run (group of one request's blocks) in `runs`, and the time at which its
            blocks were last used. A new block with the same time joins this run.
        threshold: a new block is accepted if its worth is at least `threshold` times the worth of the
            candidate that it would replace. A negative threshold accepts every block.
        write_cost, victim_write_cost: the value of `Hazard.write_cost` for a prefix that a request stores,
            and the value for blocks that a device drops into a victim tier.
        warm_up, promise: see `Hazard`.
        recent: number of references within which `ShadowLRU.lead` decays to 1/e.
        references: the clock of the policy: it counts the block references observed so far.
        now: value of the clock `references` when the last request began or ended.
        is_victim_tier: 1 if the last stored batch was not one prefix, because a device dropped its blocks.
        oldest_victim: the highest age of a block that LRU has recently evicted, in references since its last
            use.
        lru_decides: 1 while LRU chooses the victims to keep the loss of hits against LRU within `promise`.
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
    recent: float
    references: int
    now: int
    is_victim_tier: int
    oldest_victim: float
    lru_decides: int


class Hazard(CompiledPolicy):
    """Evicts the block with the fewest expected hits per unit of time in its slot.

    Refuses a new block that is worth less than the block that it would replace.

    1. Blocks are classified by the number and the gaps of their uses (`History`).
    2. For each class, the policy learns how likely a block of a given age is to be used again. It learns
       on-line from a sample of all requested keys, including keys of blocks that the cache does not hold
       (`Lifetimes`).
    3. From these probabilities follows each block's worth, a Gittins index: the highest rate of hits per unit
       of time that the block can reach if it stays.
    4. The blocks of a class form an LRU list. The coldest evictable block of the list is the candidate of the
       class.
    5. The candidate with the lowest worth is chosen. But the victim is the last resident block of the request
       that used the candidate last, because the preceding blocks are useful without it.
    6. A new block that is worth less than this candidate is refused, which saves its write. A block that a
       waiting request expects is not refused.

    Two guards limit the loss against LRU:

    - At first the policy evicts like LRU, because it has no evidence yet about blocks as old as LRU's
      victims. This warm-up ends when the policy has observed three times as many references as the age of
      LRU's victims; in a victim tier it lasts at least twelve times as many references as the cache has
      slots.
    - An exact simulation of LRU (`ShadowLRU`) counts LRU's lead: the blocks that LRU would have served, minus
      the blocks that the policy served. Old differences fade within about 100,000 references (or four times
      the capacity, if that is more). When the lead exceeds 0.4 of the loss that `promise` allows, LRU chooses
      the victims, until the lead has faded to 0.28 of this loss. The method is set duelling (Qureshi et al.,
      ISCA 2007), with the whole cache as the sample.

    Blocks that the engine's device serves are not looked up in this tier, so they count neither as hits nor
    as misses. If the engine reports the end of a request (`finished`), the ages of the request's blocks start
    again from 0, and the request's label becomes part of the class of these blocks.

    `write_cost` trades hits for writes: the worth of a new block must be at least ``1 + write_cost`` times
    the candidate's worth. The default is 0. In a victim tier the default is -0.2, because a write from the
    device to RAM is cheap.

    The unit of time is one block reference. Cost per block: three index probes. Cost per victim: a scan of
    the classes that have blocks (at most 50 without labels). Memory: 4 MB, 56 bytes per slot, and 72 bytes
    and the key for each key of history. The history has 65,536 keys, or twice the capacity if that is more.

    The attributes are parameters. Set them in a policy string such as ``hazard,write_cost=0.5`` or in a
    subclass, because only the constructor reads them.

    Attributes:
        write_cost: see above.
        history_capacity: number of keys of history. If it is less than twice the cache's capacity, twice the
            capacity is used.
        sample_capacity, half_life: see `Lifetimes`.
        warm_up: duration of the first guard, in multiples of the age at which LRU evicts blocks.
        promise: the second guard's goal: in a run of 100,000 references or more, the hit ratio should be at
            most this much below LRU's. The goal is mostly, but not always, reached (docs/decisions.md). 1
            disables the guard. The default is 0.01; with a `write_cost` above 0, which trades hits for
            writes, it is 0.02.
    """

    write_cost: Annotated[float, msgspec.Meta(ge=-1, le=1000)] | None = None
    history_capacity: Annotated[int, msgspec.Meta(ge=1, le=MAX_POSITIONS // 2)] = 1 << 16
    sample_capacity: Annotated[int, msgspec.Meta(ge=1, le=MAX_POSITIONS // 2)] = 1 << 15
    half_life: Annotated[int, msgspec.Meta(ge=1, le=2**40)] = 200_000
    warm_up: Annotated[int, msgspec.Meta(ge=1, le=2**40)] = 3
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
            victim_write_cost=VICTIM_WRITE_COST if self.write_cost is None else self.write_cost,
            warm_up=self.warm_up,
            promise=promised(self.promise, self.write_cost),
            recent=float(max(RECENT, RECENT_TURNS * capacity)),
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
        state.lists.clear()
        state.runs.clear()
        state.entered.fill(ABSENT)
        state.is_active.fill(0)
        state.num_active = 0
        self._start()

    def resized(self, usable_blocks: int) -> None:
        self.lifetimes.entering = ENTERING * usable_blocks
        self.history.shadow.capacity_blocks = usable_blocks
        _shrink_shadow(self.state.memory)

    @property
    def is_lru(self) -> bool:
        """True while the policy evicts like LRU, because of one of its two guards."""
        return _read_is_lru(self.state.memory)

    def stats(self) -> dict[str, float]:
        return {
            "is_lru": float(self.is_lru),
            "shadow_lead": self.history.shadow.lead,
            "history_keys": self.history.keys.lists.size(0),
            "references": self.state.references,
        }

    def ordered_lists(self) -> tuple[Lists, Sequence[int]]:
        return self.state.runs.order, (0,)


def promised(promise: float | None, write_cost: float | None) -> float:
    """Return `promise`; if it is None, return the default for this write cost (see `Hazard.promise`)."""
    if promise is not None:
        return promise
    return _PROMISE if write_cost is None or write_cost <= 0 else _PROMISE_OF_FEW_WRITES


# ---- observation of all traffic


@inline
def keep_promise(own: State, count: int) -> None:
    """Decay LRU's lead by the passage of `count` references, then update `lru_decides`."""
    shadow, recent = own.history.shadow, own.recent
    shadow.lead = max(shadow.lead * max(1.0 - count / recent, 0.0), -CREDIT * recent)
    if shadow.lead > TOLERATED * own.promise * recent:
        own.lru_decides = 1
    elif shadow.lead <= FORGIVEN * own.promise * recent:
        own.lru_decides = 0


@inline
def _list(own: State, block_class: int, slot: int) -> None:
    """Move the block in `slot` to the head of the LRU list of `block_class`; activate the class."""
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
    """Stop the aging of blocks that a waiting request expects, because their reuse needs no prediction.

    If the simulated LRU holds these blocks, they become its most recent blocks.
    """
    history, keys, shadow = own.history, path.index.keys[: path.length], own.history.shadow
    let_age(own.lifetimes, own.references)
    for row in range(path.num_expected - 1, path.foreseen - 1, -1):
        h = path.records[row, HASH]
        stop(own.lifetimes, keys, row, h, own.references)
        place = find(history.keys.index, keys, row, h)
        # An LRU cache with knowledge of the queue would spare the block about as long as after a use.
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
    keep_promise(own, path.length - start)


@Hazard.compiled
def finished(own: State, path: Path) -> None:
    """Record the end of a request: its blocks' ages restart, and its label becomes part of their classes."""
    if path.length == 0:
        return
    history, links, keys = own.history, own.lists.links, path.index.keys[: path.length]
    # If no other request was observed meanwhile, the request ends at the time of its beginning.
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
        known = max(known, VICTIM_TURNS * own.warm_up * own.last.shape[0])
    return own.oldest_victim == 0 or own.references < known or own.lru_decides != 0


@kernel
def _read_is_lru(own: State) -> bool:
    return _is_lru(own)


@kernel
def _shrink_shadow(own: State) -> None:
    shrink_to_capacity(own.history.shadow)


# ---- uses


@Hazard.compiled
def access(own: State, used: Used) -> None:
    links, last, slots, run = own.lists.links, own.last, used.slots, _NO_RUN
    for i in range(used.count - 1, -1, -1):
        slot = slots[i]
        leave(own.runs, slot)
        # A batch of a victim tier has blocks of several requests; each request gets its own run.
        if run == _NO_RUN or (own.is_victim_tier and last[slot] != last[slots[i + 1]]):
            run = new_run(own.runs)
        join(own.runs, run, slot)
        move_to_head(links, links[slot, LIST], slot)


@Hazard.compiled
def remove(own: State, used: Used) -> None:
    for i in range(used.count):
        unlink(own.lists.links, used.slots[i])
        leave(own.runs, used.slots[i])


# ---- victims


@inline
def _worth(own: State, block_class: int, last: int) -> float:
    lifetimes = own.lifetimes
    return at_age(lifetimes.worth, lifetimes.bounds, lifetimes.rows[block_class], max(own.now - last, 0))


@inline
def _propose(own: State, block_class: int, slot: int) -> None:
    """Make the block in `slot` the eviction candidate of its class, and compute its worth.

    If `slot` is the list's sentinel, the class has no candidate, and its score is infinite.
    """
    is_block = slot < own.lists.num_positions
    own.cursors[block_class] = slot
    own.scores[block_class] = _worth(own, block_class, own.last[slot]) if is_block else np.inf


@inline
def _find_candidate(own: State, cache: Cache, path: Path, block_class: int, slot: int) -> None:
    """Set a class's candidate to its coldest evictable block, searching from `slot` to the list's head."""
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
    """Return the class of the candidate with the lowest worth; ABSENT if there is no candidate.

    Among equal worths, the candidate with the earliest last use is chosen.
    """
    scores, cursors, last = own.scores, own.cursors, own.last
    lowest, score, time = ABSENT, np.inf, np.int64(0)
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
    """Return True if a new block is worth too little to replace the candidate of the class `lowest`."""
    worth, score, threshold = _worth(own, block_class, last), own.scores[lowest], own.threshold
    is_older = threshold >= 0.0 and worth == score and last < own.last[own.cursors[lowest]]
    return worth < score * threshold or is_older


@inline
def _take_victim(own: State, cache: Cache, path: Path, lowest: int) -> int:
    """Evict the last block of the candidate's run or, if that block is protected, the candidate itself."""
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


# ---- new blocks


@inline
def _assign(own: State, slot: int, block_class: int, last: int) -> None:
    own.classes[slot], own.last[slot] = block_class, last


@inline
def _insert(own: State, slot: int) -> None:
    """Add the new block in `slot` to the head of its class's LRU list and to a run.

    The block joins the newest run if it has the same time of last use; otherwise it begins a new run.
    """
    last = own.last[slot]
    if own.run == _NO_RUN or last != own.run_time or own.runs.runs[own.run, LENGTH] == 0:
        own.run, own.run_time = new_run(own.runs), last
    _list(own, own.classes[slot], slot)
    join(own.runs, own.run, slot)


@inline
def _insert_all(own: State, new: Entering, count: int) -> None:
    for i in range(count - 1, -1, -1):
        _insert(own, new.slots[i])


@inline
def _replace_as_lru(own: State, new: Entering, cache: Cache, path: Path) -> None:
    order, sentinel = own.runs.order.links, own.runs.order.num_positions
    oldest = order[sentinel, PREV]
    for step in range(new.count - new.num_given):
        i = new.num_given + step if new.one_prefix or new.admitted else new.count - 1 - step
        oldest = coldest_of(cache, path, order, oldest, sentinel, _ORDER)
        if oldest == sentinel:
            return
        slot, oldest = oldest, order[oldest, PREV]
        # The maximum decays within a few turnovers of the cache, so that the LRU phase ends.
        if path.is_quiet == 0:
            own.oldest_victim *= 1.0 - 1.0 / own.last.shape[0]
            own.oldest_victim = max(own.oldest_victim, np.float64(own.now - own.last[slot]))
        unlink(own.lists.links, slot)
        leave(own.runs, slot)
        block_class, last = classify(own.history, new.keys, i, own.now)
        _assign(own, slot, block_class, last)
        new.slots[i] = slot
    _insert_all(own, new, new.count)


@inline
def _replace_for_prefix(own: State, new: Entering, cache: Cache, path: Path) -> None:
    """Choose victims for the blocks of a prefix, head first.

    If a block is refused, all later blocks are refused, too.
    """
    _find_candidates(own, cache, path)
    for i in range(new.num_given, new.count):
        lowest = _lowest(own)
        if lowest == ABSENT:
            return
        block_class, last = classify(own.history, new.keys, i, own.now)
        if _is_refused(own, lowest, block_class, last) and not is_expected(cache, new, i):
            new.slots[i : new.count] = REFUSED
            _insert_all(own, new, i)
            return
        new.slots[i] = _take_victim(own, cache, path, lowest)
        _assign(own, new.slots[i], block_class, last)
    _insert_all(own, new, new.count)


@inline
def _replace_one_by_one(own: State, new: Entering, cache: Cache, path: Path) -> None:
    """Choose victims for the blocks that a device drops, tail first.

    Each new block enters the lists before the next block is processed. A block may therefore evict a block of
    the same batch that was processed before it and is farther from the root. The evicted block then counts as
    refused.
    """
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
        _insert(own, slot)
        if own.cursors[block_class] >= own.lists.num_positions:
            _propose(own, block_class, slot)
    _insert_all(own, new, new.num_given)
    for i in range(new.num_given, new.count):
        if slots[i] != REFUSED:
            entered[slots[i]] = ABSENT


@inline
def _insert_in_shadow(own: State, new: Entering) -> None:
    """Update the simulated LRU after the device has dropped blocks: the dropped blocks become its most recent
    blocks. The first block of `new` becomes the most recent of all."""
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
        _insert_in_shadow(own, new)
    for i in range(new.num_given):
        block_class, last = classify(own.history, new.keys, i, own.now)
        _assign(own, new.slots[i], block_class, last)
    if new.num_given == new.count:
        _insert_all(own, new, new.count)
    elif _is_lru(own):
        _replace_as_lru(own, new, cache, path)
    elif new.one_prefix or new.admitted:
        _replace_for_prefix(own, new, cache, path)
    else:
        _replace_one_by_one(own, new, cache, path)
