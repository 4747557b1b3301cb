"""Counts of blocks: the pins and the writes of this process, and the blocks of each tenant.

Owns the updates of these counts. Does not know why a block changes.
"""

from __future__ import annotations

import numpy as np

from kvoffload.core.request import Path
from kvoffload.core.state import Cache, Entering, tenant_of
from kvoffload.core.tenants import Tenants
from kvoffload.structures.jit import inline


@inline
def hold(cache: Cache, slot: int, change: int) -> None:
    """Add `change` to the number of pins and writes that this process has on a slot.

    These numbers exist only if several processes share the slots. Otherwise this does nothing.
    """
    if cache.holds.shape[0] != 0:
        cache.holds[slot] += np.int32(change)


@inline
def count_evictable(cache: Cache, slot: int, change: int) -> None:
    """Add `change` to the number of evictable blocks of the tenant that owns the block in `slot`.

    Condemned blocks are skipped, because they have no owner.
    """
    if not cache.slots.condemned[slot]:
        cache.tenants.evictable[cache.tenants.owner[slot]] += change


@inline
def disown(cache: Cache, slot: int) -> None:
    """Subtract a forgotten block from the counts of the block's owner."""
    if cache.has_tenants:
        tenants = cache.tenants
        tenants.held[tenants.owner[slot]] -= 1
        tenants.evictable[tenants.owner[slot]] -= cache.slots.ref_cnt[slot] == 0
        tenants.moves[slot] += np.uint32(1)


@inline
def count_eviction(tenants: Tenants, slot: int) -> None:
    """Subtract a victim from the counts of the block's owner."""
    owner = tenants.owner[slot]
    tenants.held[owner] -= 1
    tenants.evictable[owner] -= 1
    tenants.evicted[owner] += 1


@inline
def change_owners(cache: Cache, path: Path, new: Entering) -> None:
    """Make the request's tenant the owner of a plan's slots. Subtract each victim from the counts of its old
    owner.
    """
    tenants, tenant = cache.tenants, tenant_of(cache, path)
    for i in range(new.count):
        slot = new.slots[i]
        if i >= new.num_free:
            count_eviction(tenants, slot)
        tenants.owner[slot] = tenant
        tenants.moves[slot] += np.uint32(1)
    tenants.held[tenant] += new.count
