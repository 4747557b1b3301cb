"""Kernels that change the state of blocks: evict, insert, make ready, abandon, discard.

Owns index, slots and counters during these changes. Decides nothing, and checks no victim.
"""

from __future__ import annotations

import numpy as np

from kvoffload.core import miss_record
from kvoffload.core.duplicates import is_duplicate
from kvoffload.core.kernels.counts import change_owners, count_evictable, disown, hold
from kvoffload.core.kernels.lookups import record_slot
from kvoffload.core.log import COMPLETE_STORE, put_end
from kvoffload.core.miss_record import note, prefetch_set
from kvoffload.core.request import ACCESSED, FLAGS, HASH, Path
from kvoffload.core.slots import WRITING, give_back
from kvoffload.core.state import Cache, Entering
from kvoffload.structures.index import ABSENT, copy_key, find, hash_row, home_bucket, insert, remove_hashed
from kvoffload.structures.jit import I32Array, ReadU64Matrix, inline, kernel, prefetch
from kvoffload.structures.lists import unlink


@inline
def evict_blocks(cache: Cache, new: Entering) -> None:
    """Remove the victims in the slots of a plan; write their keys to ``new.evicted``."""
    index = cache.index
    for i in range(new.num_free, new.count):
        h = hash_row(index.keys, new.slots[i])
        prefetch(index.table, home_bucket(index.table, h))
        prefetch_set(cache.misses, h)
    for i in range(new.num_free, new.count):
        slot = new.slots[i]
        copy_key(new.evicted, i - new.num_free, index.keys, slot)
        if is_duplicate(cache, slot):
            unlink(cache.duplicates.links, slot)
        h = hash_row(index.keys, slot)
        note(cache.misses, h, miss_record.EVICTED)
        remove_hashed(index, slot, h)
        cache.slots.version[slot] += np.uint32(1)


@inline
def insert_blocks(cache: Cache, path: Path, new: Entering) -> None:
    """Evict the victims of a plan and insert the new blocks into its slots. The new blocks are in flight."""
    index, slots, records, positions = cache.index, cache.slots, path.records, path.positions
    for i in range(new.count):
        prefetch(index.keys, new.slots[i])
        prefetch(index.table, home_bucket(index.table, records[positions[new.rows[i]], HASH]))
    evict_blocks(cache, new)
    if cache.has_tenants:
        change_owners(cache, path, new)
    for i in range(new.count):
        slot, position = new.slots[i], positions[new.rows[i]]
        insert(index, path.index.keys, position, records[position, HASH], slot)
        slots.ref_cnt[slot] = WRITING
        hold(cache, slot, WRITING)
        record_slot(slots.version, records, position, slot)
        # The store counts as the request's access: `finish_request` must not count a second one.
        records[position, FLAGS] |= np.uint64(ACCESSED)
    num_evicted = new.count - new.num_free
    slots.num_free -= new.num_free
    slots.num_evictable -= num_evicted
    slots.num_writing += new.count
    cache.evicted += num_evicted
    cache.dropped += new.num_dropped
    cache.refused += new.num_refused


@kernel
def become_ready(cache: Cache, new: Entering) -> None:
    """Make the blocks of a plan readable."""
    if cache.log.is_open:
        put_end(cache.log, COMPLETE_STORE, new.number, new.slots, new.count, 1)
    make_ready(cache, new)


@inline
def make_ready(cache: Cache, new: Entering) -> None:
    """Make the blocks of a plan readable, without a record in the log."""
    slots = cache.slots
    for i in range(new.count):
        slots.ref_cnt[new.slots[i]] = 0
        hold(cache, new.slots[i], -WRITING)
    if cache.has_tenants:
        for i in range(new.count):
            count_evictable(cache, new.slots[i], 1)
    slots.num_writing -= new.count
    slots.num_evictable += new.count
    cache.stored += new.count


@kernel
def abandon(cache: Cache, new: Entering) -> None:
    """Forget the in-flight blocks of a failed store."""
    if cache.log.is_open:
        put_end(cache.log, COMPLETE_STORE, new.number, new.slots, new.count, 0)
    for i in range(new.count):
        h = hash_row(cache.index.keys, new.slots[i])
        note(cache.misses, h, miss_record.FAILED_STORE)
        remove_hashed(cache.index, new.slots[i], h)
        cache.slots.version[new.slots[i]] += np.uint32(1)
        disown(cache, new.slots[i])
        give_back(cache.slots, new.slots[i])
        hold(cache, new.slots[i], -WRITING)
    cache.slots.num_writing -= new.count
    cache.store_failed += new.count


@kernel
def discard(cache: Cache, batch: ReadU64Matrix, slots: I32Array) -> int:
    """Remove the ready blocks of a batch from the index; write their slots to `slots`; return their number.

    On input, ``slots[row]`` may be a slot. Then the block is removed only if it is still in this slot. With
    ABSENT the block is removed whatever its slot.
    """
    num_removed = 0
    for row in range(batch.shape[0]):
        h = hash_row(batch, row)
        slot = find(cache.index, batch, row, h)
        wanted = slots[row] < 0 or slots[row] == slot
        if slot != ABSENT and cache.slots.ref_cnt[slot] >= 0 and wanted:
            note(cache.misses, h, miss_record.DAMAGED)
            remove_hashed(cache.index, slot, h)
            cache.slots.version[slot] += np.uint32(1)
            disown(cache, slot)
            slots[num_removed] = slot
            num_removed += 1
    cache.discarded += num_removed
    return num_removed
