"""The first half of a store finds the missing blocks of an offer, and decides how many of them to store.

Owns the choice of the blocks to store. An admission rule or the policy may refuse some of them. Does not know
victims. Changes no block.
"""

from __future__ import annotations

import numpy as np

from kvoffload.core import miss_record
from kvoffload.core.kernels.lookups import prefetch_rows, slot_of
from kvoffload.core.kernels.misses import note_rows
from kvoffload.core.kernels.room import count_room, has_room_without_expected
from kvoffload.core.request import FLAGS, SCRATCH, Path, add_batch
from kvoffload.core.state import SPARES_EXPECTED, SPARES_TENANTS, Cache, Entering, tenant_of
from kvoffload.core.tenants import evicts_only_own, may_learn
from kvoffload.structures.batches import KeyBatch
from kvoffload.structures.index import ABSENT, copy_key
from kvoffload.structures.jit import inline

NO_ROOM = -1
"""Result of `prepare_store`: there is no room for any missing block."""


@inline
def collect_missing(cache: Cache, path: Path, count: int, new: Entering) -> int:
    """Write each absent key of a batch once to `new`, with its row; return the number of these keys."""
    records, positions, num_missing = path.records, path.positions, 0
    for row in range(count):
        prefetch_rows(cache.index, path, count, row)
        position = positions[row]
        if records[position, FLAGS] & np.uint64(SCRATCH):
            continue
        if slot_of(cache, path, position) == ABSENT:
            records[position, FLAGS] |= np.uint64(SCRATCH)
            copy_key(new.keys, num_missing, path.index.keys, position)
            new.rows[num_missing] = row
            num_missing += 1
    for i in range(num_missing):
        records[positions[new.rows[i]], FLAGS] &= ~np.uint64(SCRATCH)
    return num_missing


@inline
def is_owed(cache: Cache) -> bool:
    """Return True if the store evicts blocks of other tenants because the store's tenant is below its
    minimum.

    The policy must then accept all blocks.
    """
    return cache.spares & SPARES_TENANTS != 0 and cache.tenants.is_owed != 0


@inline
def is_cut(cache: Cache, path: Path, new: Entering, admitted: int) -> bool:
    """Return True if all missing blocks come after a block of the path that the policy has refused.

    The missing blocks are then useless, because no request can reach them without the refused block. Returns
    False if another request has stored the refused block since, or if the policy must accept all blocks.
    """
    if admitted != 0 or path.cut == 0 or new.num_missing == 0 or is_owed(cache):
        return False
    return path.positions[new.rows[0]] >= path.cut and slot_of(cache, path, path.cut - 1) == ABSENT


@inline
def offer_batch(
    cache: Cache, path: Path, batch: KeyBatch, new: Entering, no_store: bool, admitted: int
) -> int:
    """Collect a batch's missing blocks in `new`; return the number of blocks to store, or an error.

    Blocks for which there is no room are not stored. With `no_store` no block is stored.
    """
    count = add_batch(path, batch)
    return count if count < 0 else offer_rows(cache, path, count, new, no_store, admitted)


@inline
def offer_rows(cache: Cache, path: Path, count: int, new: Entering, no_store: bool, admitted: int) -> int:
    """Continue `offer_batch` after the `count` keys of the batch were added to the path."""
    new.num_offered = count
    new.num_missing = collect_missing(cache, path, count, new)
    if no_store:
        new.count = 0
        return 0
    new.count = count_room(cache, path, new.num_missing)
    if new.num_missing > 0 and new.count == 0:
        cache.dropped += new.num_missing
        note_rows(cache, path, new, 0, new.num_missing, miss_record.NO_ROOM)
        return NO_ROOM
    cache.spares = SPARES_TENANTS if cache.has_tenants else 0
    if cache.has_tenants and new.num_missing > 0:
        tenants, tenant = cache.tenants, tenant_of(cache, path)
        usable = cache.slots.capacity - cache.slots.num_unused
        learns = may_learn(tenants, tenant, new.num_missing, new.count, usable)
        tenants.is_quiet = not learns and evicts_only_own(tenants, tenant)
        path.is_quiet |= not learns
    if has_room_without_expected(cache, path, new.count):
        cache.spares |= SPARES_EXPECTED
    if is_cut(cache, path, new, admitted):
        new.count, new.num_refused = 0, new.num_missing
    return new.count
