"""Kernels of loads: they pin and unpin blocks. In a victim tier, loaded blocks become duplicates.

Owns the pins. Does not know how bytes are copied, or whether a copy succeeds.
"""

from __future__ import annotations

from kvoffload.core.kernels.call_log import log_load
from kvoffload.core.kernels.counts import count_evictable, hold
from kvoffload.core.kernels.lookups import slot_of
from kvoffload.core.kernels.uses import report_used
from kvoffload.core.log import COMPLETE_LOAD, PIN, PREPARE_LOAD, UNPIN, put_end
from kvoffload.core.request import Path, add_batch
from kvoffload.core.returning import note_use
from kvoffload.core.slots import WRITING
from kvoffload.core.state import Cache, Pinned, note_move, tenant_of
from kvoffload.core.tenants import adopt, forget_places
from kvoffload.structures.batches import KeyBatch
from kvoffload.structures.index import ABSENT, hash_row
from kvoffload.structures.jit import inline, kernel


@inline
def _adopt_orphans(cache: Cache, path: Path, load: Pinned) -> None:
    """Make the request's tenant the owner of the load's orphans: blocks whose owner no longer exists."""
    tenants, tenant, num_adopted = cache.tenants, tenant_of(cache, path), 0
    for row in range(load.count):
        num_adopted += adopt(tenants, load.slots[row], tenant)
    if num_adopted > 0:
        forget_places(tenants, tenant)


@kernel
def pin(cache: Cache, path: Path, batch: KeyBatch, load: Pinned, is_load: bool) -> int:
    """Pin the blocks of a batch; return their number.

    If a block is not ready, pins nothing and returns ``~row`` of the first such block. Returns `FULL` or
    `WRONG` for a batch that cannot be added to the path.
    """
    result = count = add_batch(path, batch)
    ref_cnt, slots = cache.slots.ref_cnt, load.slots
    for row in range(count):
        slot = slot_of(cache, path, path.positions[row])
        if slot == ABSENT or ref_cnt[slot] == WRITING:
            result = ~row
            break
        slots[row] = slot
    has_tenants = cache.has_tenants != 0
    for row in range(result):
        cache.slots.num_evictable -= ref_cnt[slots[row]] == 0
        if has_tenants and ref_cnt[slots[row]] == 0:
            count_evictable(cache, slots[row], -1)
        ref_cnt[slots[row]] += 1
        hold(cache, slots[row], 1)
    load.count = max(0, result)
    if has_tenants and is_load and cache.tenants.orphans != 0:
        _adopt_orphans(cache, path, load)
    if cache.log.is_open and count >= 0:
        log_load(cache.log, path, PREPARE_LOAD if is_load else PIN, count, load, result)
    return result


@kernel
def unpin(cache: Cache, load: Pinned, is_load: bool) -> int:
    """Remove one pin from each block of a load; return how many slots of the whole cache are condemned.

    A condemned slot belongs to a forgotten block that a transfer still uses. If the result is not 0, the
    caller must free the load's condemned slots.
    """
    if cache.log.is_open:
        kind = COMPLETE_LOAD if is_load else UNPIN
        put_end(cache.log, kind, load.number, load.slots, load.count, 1)
    slots = cache.slots
    ref_cnt, has_tenants = slots.ref_cnt, cache.has_tenants != 0
    for row in range(load.count):
        ref_cnt[load.slots[row]] -= 1
        slots.num_evictable += ref_cnt[load.slots[row]] == 0
        if has_tenants and ref_cnt[load.slots[row]] == 0:
            count_evictable(cache, load.slots[row], 1)
        hold(cache, load.slots[row], -1)
    cache.loaded += load.count if is_load else 0
    return slots.num_condemned


@kernel
def loaded(cache: Cache, path: Path, load: Pinned) -> int:
    """Record that the device now holds the blocks of a load. Called only in a victim tier.

    Returns the number of blocks that the caller must remove from a policy in Python.
    """
    path.used.count = load.count
    for row in range(load.count):
        slot = load.slots[row]
        path.used.slots[row] = slot
        note_move(cache, slot)
        note_use(cache.known, cache.index.keys, slot, hash_row(cache.index.keys, slot), True)
    return report_used(cache, path)
