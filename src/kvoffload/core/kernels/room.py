"""Functions that count the room of a store, that is, the new blocks that fit into free slots and into the
slots of evictable blocks.

The room depends on the tenants' quotas. Also tests if a store can leave all expected blocks in the cache.
Does not know offers, and chooses no victim.
"""

from __future__ import annotations

from kvoffload.core.duplicates import is_duplicate
from kvoffload.core.expected import num_expected
from kvoffload.core.kernels.lookups import slot_of
from kvoffload.core.request import Path
from kvoffload.core.state import Cache, can_leave, may_give, tenant_of
from kvoffload.core.tenants import UNSURE, num_evictable_of, room_of_store
from kvoffload.structures.index import ABSENT, find, hash_row
from kvoffload.structures.jit import inline
from kvoffload.structures.lists import PREV


@inline
def _count_on_path(cache: Cache, path: Path) -> None:
    """Count each owner's evictable blocks on the path, which the store must not evict."""
    tenants, ref_cnt = cache.tenants, cache.slots.ref_cnt
    for position in range(path.length):
        slot = slot_of(cache, path, position)
        if slot != ABSENT and ref_cnt[slot] == 0:
            tenants.on_path[tenants.owner[slot]] += 1


@inline
def _room_of_tenant(cache: Cache, path: Path, wanted: int) -> int:
    """Return how many of `wanted` new blocks fit under the quotas. Also sets ``tenants.givers``."""
    tenants, num_free = cache.tenants, cache.slots.num_free
    for owner in range(tenants.num_tenants):
        tenants.on_path[owner] = 0
    tenant = tenant_of(cache, path)
    room = room_of_store(tenants, tenant, wanted, num_free, path.length)
    if room == UNSURE:
        _count_on_path(cache, path)
        room = room_of_store(tenants, tenant, wanted, num_free, 0)
    return room


@inline
def count_room(cache: Cache, path: Path, wanted: int) -> int:
    """Return how many of `wanted` new blocks fit into free slots and slots of evictable blocks."""
    if cache.has_tenants:
        return _room_of_tenant(cache, path, wanted)
    num_free, possible = cache.slots.num_free, cache.slots.num_evictable
    short = wanted - num_free
    if short > max(0, possible - path.length):
        for position in range(path.length):
            slot = slot_of(cache, path, position)
            possible -= slot != ABSENT and cache.slots.ref_cnt[slot] == 0
    return wanted if short <= possible else num_free + possible


@inline
def has_room_without_expected(cache: Cache, path: Path, wanted: int) -> bool:
    """Return True if a store of `wanted` blocks need not evict any expected block.

    The store must then spare the expected blocks. Returns False if no block is expected. Cost: O(1) if there
    is ample room, otherwise O(expected keys).
    """
    keys = cache.expected.keys
    if num_expected(cache.expected) == 0:
        return False
    possible = cache.slots.num_evictable + cache.slots.num_free - wanted
    if cache.has_tenants:
        possible = num_evictable_of(cache.tenants) + cache.tenants.usable_free - wanted
    if num_expected(cache.expected) + path.length <= possible:
        return True
    for position in range(path.length):
        slot = slot_of(cache, path, position)
        possible -= slot != ABSENT and cache.slots.ref_cnt[slot] == 0 and may_give(cache, slot)
    links, batch = keys.lists.links, keys.index.keys
    position = links[keys.lists.num_positions, PREV]
    while position != keys.lists.num_positions and possible >= 0:
        h = hash_row(batch, position)
        slot = find(cache.index, batch, position, h)
        may_leave = slot != ABSENT and can_leave(cache, path, slot) and may_give(cache, slot)
        possible -= may_leave and not is_duplicate(cache, slot)
        position = links[position, PREV]
    return possible >= 0
