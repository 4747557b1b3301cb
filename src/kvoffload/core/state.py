"""What the control plane's kernels see: the state of a cache, and the blocks of one store or load.

Owns how that lies in memory, and what may leave a cache. Decides nothing.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from kvoffload.core.expected import Expected, most_expected
from kvoffload.core.request import Path
from kvoffload.core.slots import SlotArray, Slots
from kvoffload.structures.index import ABSENT, Index, find, hash_row
from kvoffload.structures.jit import I32Array, I32Matrix, U64Matrix, inline
from kvoffload.structures.keylists import KeyLists
from kvoffload.structures.keys import Keys, words_per_key
from kvoffload.structures.lists import PREV, Lists
from kvoffload.structures.structs import Struct

REFUSED = -1
"""What `EvictionPolicy.replace` writes in place of a victim: the new block does not enter."""


class Cache(Struct):
    """A manager in kernels.

    Attributes:
        index: key -> slot; slots: the state of each.
        duplicates: one list of the slots whose block the device holds as well; only if `follows_device`.
        known: keys that requests used, of blocks that the policy does not order (`returning`). Of no keys if
            the policy is not told of them, and if not `follows_device`.
        expected: what waiting requests will ask for: of no keys before the first waits (`make_queue`);
            spares: 1 while the store at hand has room without that.
        policy: address of the policy's state; expect, observe, finished, access, replace, remove: of its
            functions. 0 if the manager calls the policy in Python.
        follows_device: 1 in a victim tier.
        stored, ...: as in `ManagerStats`.
    """

    index: Index
    slots: Slots
    duplicates: Lists
    known: KeyLists
    expected: Expected
    spares: int
    policy: int
    expect: int
    observe: int
    finished: int
    access: int
    replace: int
    remove: int
    follows_device: int
    stored: int
    store_failed: int
    loaded: int
    evicted: int
    refused: int
    dropped: int
    kept: int
    discarded: int

    def make_queue(self) -> Expected:
        """Room for what waiting requests will ask for: of a cache that had none."""
        room = Expected(most_expected(self.slots.capacity), self.index.key_bytes)
        self.exchange("expected", room)
        return room


class Entering(Struct):
    """The blocks of one store: what a plan keeps, and what a policy's `replace` is about.

    Attributes:
        keys: of the missing blocks, in the order of the offer; rows: theirs in the offered batch.
        slots: where the first `count` of them go; the first `num_given` are given, and of these the first
            `num_free` are free and the others those of duplicates. The rest is for the policy to fill with
            its victims.
        evicted: the keys of the blocks that have left: of duplicates and victims.
        count: how many are stored; num_offered, num_missing: how many were offered, and not here.
        num_dropped, num_refused: as in `StorePlan`.
        one_prefix: 1 if the blocks follow one another in one request.
        admitted: 1 if the policy may refuse none.
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


class Pinned(Struct):
    """The blocks of one load: `count` slots."""

    slots: I32Array
    count: int


def blank_store(num_blocks: int, key_bytes: int) -> Any:
    """Memory for an `Entering` of so many blocks, or more."""
    return bytearray(_blank_store((num_blocks - 1).bit_length(), key_bytes))


def entering(keys: Keys, slots: SlotArray, num_given: int) -> Entering:
    """Some blocks, of which the first `num_given` have their slots."""
    count = len(slots)
    new = Entering.over(blank_store(count, keys.key_bytes))
    new.keys[:count], new.slots[:count] = keys.words, slots
    new.count, new.num_given = count, num_given
    return new


def blank_load(num_blocks: int) -> Any:
    """Memory for a `Pinned` of so many blocks, or more."""
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
    """Whether the block in `slot` is ready, not pinned, and not on the storing request's path."""
    if cache.slots.ref_cnt[slot] != 0:
        return False
    keys = cache.index.keys
    return find(path.index, keys, slot, hash_row(keys, slot)) == ABSENT


@inline
def evictable(cache: Cache, path: Path, slot: int) -> bool:
    """Whether the block in `slot` may leave now: it can, and it is not expected, if there is room without
    those that are."""
    if not can_leave(cache, path, slot):
        return False
    keys = cache.index.keys
    return cache.spares == 0 or find(cache.expected.keys.index, keys, slot, hash_row(keys, slot)) == ABSENT


@inline
def is_expected(cache: Cache, new: Entering, row: int) -> bool:
    """Whether a request that waits will ask for this new block: then no policy should refuse it."""
    return find(cache.expected.keys.index, new.keys, row, hash_row(new.keys, row)) != ABSENT


@inline
def coldest_evictable(cache: Cache, path: Path, links: I32Matrix, slot: int, sentinel: int) -> int:
    """The coldest block of a list, from `slot` towards its head, that may leave; the sentinel if none may."""
    while slot != sentinel and not evictable(cache, path, slot):
        slot = links[slot, PREV]
    return slot


@inline
def next_victim(cache: Cache, path: Path, lists: Lists, number: int) -> int:
    """The coldest block of a list that may leave, or ABSENT: the list's search passes those that may not.

    What was protected before still is, so the blocks of one store search with one `rewind`.
    """
    sentinel = lists.num_positions + number
    slot = coldest_evictable(cache, path, lists.links, lists.cursors[number], sentinel)
    lists.cursors[number] = slot
    return np.int64(ABSENT) if slot == sentinel else slot


@inline
def victim_of_either(cache: Cache, path: Path, lists: Lists, number: int) -> int:
    """`next_victim` of one of two lists; of the other if all blocks of the first are protected."""
    victim = next_victim(cache, path, lists, number)
    if victim == ABSENT:
        victim = next_victim(cache, path, lists, 1 - number)
    return victim
