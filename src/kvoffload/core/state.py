"""Structs that the manager's kernels use: the state of a cache, and the blocks of one store or load.

The module also owns the tests and searches for evictable blocks, from which a policy chooses victims.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from kvoffload.core.expected import Expected, most_expected
from kvoffload.core.log import Log
from kvoffload.core.miss_record import MissRecord
from kvoffload.core.request import Path
from kvoffload.core.slots import SlotArray, Slots
from kvoffload.core.tenants import Tenants, gives, remember_place, resume_search
from kvoffload.structures.index import ABSENT, Index, find, hash_row
from kvoffload.structures.jit import I32Array, I32Matrix, U64Matrix, inline
from kvoffload.structures.keylists import KeyLists
from kvoffload.structures.keys import Keys, words_per_key
from kvoffload.structures.lists import PREV, Lists, unlink
from kvoffload.structures.structs import Struct

REFUSED = -1
"""Value that `EvictionPolicy.replace` writes in place of a victim, to refuse the new block."""
SPARES_EXPECTED, SPARES_TENANTS = 1, 2
"""Bits of the mask `Cache.spares`, where they are explained."""


class Cache(Struct):
    """The state of a manager, for kernels.

    Attributes:
        index: maps keys to slots.
        slots: the state of each slot.
        duplicates: slots whose block the device also holds, in one list; empty unless `follows_device`.
        known: keys of used blocks that the device holds (`returning`). Has no room unless `follows_device` is
            set and the policy needs the keys.
        expected: keys that waiting requests expect. Has no room until the first request waits (`make_queue`).
        misses: for absent blocks, the last event of each. Has no room unless the manager explains misses.
        tenants: owners and quotas. Has no room until the manager has quotas.
        has_tenants: 1 if the manager has quotas.
        member: identifier of this engine's tenant, if each engine of a shared pool is a tenant; otherwise 0.
        spares: bit mask: the blocks that the current store must not evict. `SPARES_EXPECTED`: expected
            blocks, because enough other blocks are evictable. `SPARES_TENANTS`: blocks that quotas protect.
        policy: address of the policy's state.
        expect, observe, finished, access, replace, remove: addresses of the policy's compiled functions. An
            address is 0 if the policy has no such compiled function, or has the method in Python.
        follows_device: 1 in a victim tier.
        holds: int32: for each slot the number of pins of this process, or `WRITING` while this process writes
            the slot. Empty unless several processes share the slots.
        log: the recording of calls (`log.Log`); closed if calls are not recorded.
        stored, ...: as in `ManagerStats`.
    """

    index: Index
    slots: Slots
    duplicates: Lists
    known: KeyLists
    expected: Expected
    misses: MissRecord
    tenants: Tenants
    has_tenants: int
    member: int
    spares: int
    policy: int
    expect: int
    observe: int
    finished: int
    access: int
    replace: int
    remove: int
    follows_device: int
    holds: I32Array
    log: Log
    stored: int
    store_failed: int
    loaded: int
    evicted: int
    refused: int
    dropped: int
    kept: int
    discarded: int

    def make_queue(self) -> Expected:
        """Return `expected`; the first call allocates room for the keys of waiting requests."""
        if self.expected.keys.lists.num_positions == 0:
            self.exchange("expected", Expected(most_expected(self.slots.capacity), self.index.key_bytes))
        expected: Expected = self.expected
        return expected


class Entering(Struct):
    """The blocks of one store: the memory of a `StorePlan`, and the argument of a policy's `replace`.

    Attributes:
        keys: keys of the missing blocks, in the order of the offer.
        rows: position of each missing block in the offered batch.
        slots: slots for the first `count` missing blocks. ``slots[:num_free]`` are free slots;
            ``slots[num_free:num_given]`` hold duplicates. The policy writes the victims' slots to the rest.
        evicted: keys of the evicted duplicates and victims.
        count: number of blocks to store.
        num_offered, num_missing: number of offered blocks, and number of absent offered blocks.
        num_dropped, num_refused: as in `StorePlan`.
        one_prefix: 1 if the blocks follow one another in the prefix of one request.
        admitted: 1 if the policy must accept all blocks.
        number: identifier of the plan in the recording of calls; negative for a part of a split plan; 0 if
            calls are not recorded.
    """

    keys: U64Matrix
    rows: I32Array
    slots: I32Array
    evicted: U64Matrix
    count: int
    num_free: int
    num_given: int
    num_offered: int
    num_missing: int
    num_dropped: int
    num_refused: int
    one_prefix: int
    admitted: int
    number: int


class Pinned(Struct):
    """The pinned blocks of one load. Their slots are the first `count` entries of `slots`.

    `number` has the same meaning as `Entering.number`.
    """

    slots: I32Array
    count: int
    number: int


def blank_store(num_blocks: int, key_bytes: int) -> Any:
    """Allocate the memory of an `Entering` with room for `num_blocks` blocks or more."""
    return bytearray(_blank_store((num_blocks - 1).bit_length(), key_bytes))


def entering(keys: Keys, slots: SlotArray, num_given: int) -> Entering:
    """Create an `Entering` for these keys. The first `num_given` keys already have slots in `slots`."""
    count = len(slots)
    new = Entering.over(blank_store(count, keys.key_bytes))
    new.keys[:count], new.slots[:count] = keys.words, slots
    new.count, new.num_given = count, num_given
    return new


def blank_load(num_blocks: int) -> Any:
    """Allocate the memory of a `Pinned` with room for `num_blocks` blocks or more."""
    return bytearray(_blank_load((num_blocks - 1).bit_length()))


@lru_cache(maxsize=64)
def _blank_store(bits: int, key_bytes: int) -> bytes:
    room, num_words = 1 << bits, words_per_key(key_bytes)
    return Entering.blank(keys=(room, num_words), rows=room, slots=room, evicted=(room, num_words))


@lru_cache(maxsize=64)
def _blank_load(bits: int) -> bytes:
    return Pinned.blank(slots=1 << bits)


@inline
def can_leave(cache: Cache, path: Path, slot: int) -> bool:
    """Return True if the block in `slot` is ready, not pinned, and not on the storing request's path."""
    if cache.slots.ref_cnt[slot] != 0:
        return False
    keys = cache.index.keys
    return find(path.index, keys, slot, hash_row(keys, slot)) == ABSENT


@inline
def tenant_of(cache: Cache, path: Path) -> int:
    """Return the tenant of a request."""
    return cache.member if cache.member != 0 else path.tenant


@inline
def may_give(cache: Cache, slot: int) -> bool:
    """Return True if the quotas allow the current store to evict the block in `slot`."""
    return cache.spares & SPARES_TENANTS == 0 or gives(cache.tenants, slot)


@inline
def is_quiet(cache: Cache) -> bool:
    """Return True if the policy should neither adapt to the current store nor keep ghosts of its victims."""
    return cache.spares & SPARES_TENANTS != 0 and cache.tenants.is_quiet != 0


@inline
def evictable(cache: Cache, path: Path, slot: int) -> bool:
    """Return True if the store may evict the block in `slot`, within the limits of ``cache.spares``."""
    if not may_give(cache, slot) or not can_leave(cache, path, slot):
        return False
    keys = cache.index.keys
    return (
        cache.spares & SPARES_EXPECTED == 0
        or find(cache.expected.keys.index, keys, slot, hash_row(keys, slot)) == ABSENT
    )


@inline
def is_expected(cache: Cache, new: Entering, row: int) -> bool:
    """Return True if a waiting request expects this new block. A policy should not refuse expected blocks."""
    return find(cache.expected.keys.index, new.keys, row, hash_row(new.keys, row)) != ABSENT


@inline
def note_move(cache: Cache, slot: int) -> None:
    """Record that a block may move in the policy's list. Later searches then do not resume at this block."""
    if cache.has_tenants:
        cache.tenants.moves[slot] += np.uint32(1)


@inline
def coldest_evictable(cache: Cache, path: Path, links: I32Matrix, slot: int, sentinel: int) -> int:
    """Search a list from `slot` towards the head; return the first evictable block, or the sentinel.

    With quotas, a search from the tail starts after the blocks that earlier searches skipped
    (`resume_search`). This is correct only while these blocks do not move. So if the function `replace` of a
    compiled policy moves a block to the head of a list, it must call `note_move`.
    """
    return coldest_of(cache, path, links, slot, sentinel, sentinel)


@inline
def coldest_of(cache: Cache, path: Path, links: I32Matrix, slot: int, sentinel: int, key: int) -> int:
    """Search like `coldest_evictable`, in a list that `key` identifies among all lists of the policy."""
    if cache.spares & SPARES_TENANTS != 0:
        return _coldest_of_givers(cache, path, links, slot, sentinel, key)
    while slot != sentinel and not evictable(cache, path, slot):
        slot = links[slot, PREV]
    return slot


@inline
def _coldest_of_givers(cache: Cache, path: Path, links: I32Matrix, slot: int, sentinel: int, key: int) -> int:
    """Search like `coldest_of`, if quotas limit the current store.

    Cost: amortized O(1) for each block that the quotas protect.
    """
    tenants, num_skipped = cache.tenants, 0
    is_first = slot == links[sentinel, PREV]
    if is_first:
        slot = resume_search(tenants, links, key, sentinel)
    while slot != sentinel and not evictable(cache, path, slot):
        if gives(tenants, slot):
            is_first = False
        num_skipped += 1
        if is_first and num_skipped % tenants.stride == 0:
            remember_place(tenants, key, slot)
        slot = links[slot, PREV]
    return slot


@inline
def evict_coldest(cache: Cache, path: Path, links: I32Matrix, first: int, last: int, new: Entering) -> bool:
    """Remove the coldest evictable blocks from lists, and write them to `new` as the victims of a store.

    Searches the lists with the sentinels `first` to `last`, one after another. Returns False if there are too
    few evictable blocks.
    """
    sentinel = first
    slot = links[sentinel, PREV]
    for i in range(new.num_given, new.count):
        slot = coldest_evictable(cache, path, links, slot, sentinel)
        while slot == sentinel:
            if sentinel == last:
                return False
            sentinel += 1
            slot = coldest_evictable(cache, path, links, links[sentinel, PREV], sentinel)
        new.slots[i] = slot
        slot = links[slot, PREV]
        unlink(links, new.slots[i])
    return True


@inline
def next_victim(cache: Cache, path: Path, lists: Lists, number: int) -> int:
    """Return the next evictable block of list `number`, coldest first; ABSENT if there is none.

    Call `rewind` once before the first victim of a store. Each call continues where the previous call
    ended, so a skipped block is not tried again in this store.
    """
    sentinel = lists.num_positions + number
    slot = coldest_evictable(cache, path, lists.links, lists.cursors[number], sentinel)
    lists.cursors[number] = slot
    return np.int64(ABSENT) if slot == sentinel else slot


@inline
def victim_of_either(cache: Cache, path: Path, lists: Lists, number: int) -> int:
    """Return `next_victim` of list `number` or, if there is none, of list ``1 - number``."""
    victim = next_victim(cache, path, lists, number)
    if victim == ABSENT:
        victim = next_victim(cache, path, lists, 1 - number)
    return victim
