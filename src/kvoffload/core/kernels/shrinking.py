"""Kernels that remove slots from use. The policy chooses blocks, which are evicted without replacement.

Owns the offer of fictitious blocks, which makes the policy choose victims. Does not know the wanted number of
slots.
"""

from __future__ import annotations

import numpy as np

from kvoffload.core.kernels.blocks import evict_blocks
from kvoffload.core.kernels.counts import count_eviction
from kvoffload.core.kernels.offers import collect_missing
from kvoffload.core.kernels.room import has_room_without_expected
from kvoffload.core.kernels.victims import check_victims
from kvoffload.core.request import Path, add_batch
from kvoffload.core.slots import retire_slot
from kvoffload.core.state import SPARES_EXPECTED, SPARES_TENANTS, Cache, Entering
from kvoffload.core.tenants import MAX_TENANTS, largest_part
from kvoffload.structures.batches import KeyBatch
from kvoffload.structures.jit import inline
from kvoffload.structures.structs import call_2


@inline
def offer_shrink(cache: Cache, path: Path, batch: KeyBatch, new: Entering) -> int:
    """Prepare to evict one block for each key of the batch; return how many blocks may leave, or an error.

    Call this only if no slot is free. The policy names victims only for new blocks. So the policy receives
    the keys of the batch as new blocks, and `shrink` removes these blocks at once. The policy's `observe` is
    not called. Quotas protect the minimum of each tenant.
    """
    count = add_batch(path, batch)
    if count < 0:
        return count
    new.num_offered = count
    new.num_missing = collect_missing(cache, path, count, new)
    new.count = min(new.num_missing, cache.slots.num_evictable)
    cache.spares = 0
    if cache.has_tenants:
        tenants = cache.tenants
        for owner in range(tenants.num_tenants):
            tenants.on_path[owner] = 0
        tenants.usable_free = tenants.is_owed = tenants.is_quiet = 0
        new.count = largest_part(tenants, MAX_TENANTS, new.count)
        cache.spares = SPARES_TENANTS
    if has_room_without_expected(cache, path, new.count):
        cache.spares |= SPARES_EXPECTED
    new.num_dropped = new.num_refused = 0
    new.one_prefix, new.admitted = not cache.follows_device, 1
    return new.count


@inline
def shrink(cache: Cache, path: Path, new: Entering) -> int:
    """Evict the blocks that the policy has chosen, and mark their slots as unused.

    Returns the number of evicted blocks, or ``FIRST_WRONG - row``.
    """
    error = check_victims(cache, path, new)
    if error < 0:
        return error
    evict_blocks(cache, new)
    used = path.used
    used.count = new.count
    for i in range(new.count):
        slot = new.slots[i]
        used.slots[i] = slot
        if cache.has_tenants:
            count_eviction(cache.tenants, slot)
            cache.tenants.moves[slot] += np.uint32(1)
        retire_slot(cache.slots, slot)
    cache.slots.num_evictable -= new.count
    cache.evicted += new.count
    if new.count > 0 and cache.remove != 0:
        call_2(cache.remove, cache.policy, used)
    return new.count
