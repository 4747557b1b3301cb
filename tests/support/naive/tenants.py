"""The room of a store under quotas, by trying every number of victims."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import NamedTuple

from kvoffload.core.tenants import Quota


class Blocks(NamedTuple):
    """The blocks of a tenant: held, evictable, and evictable outside the path of the store."""

    held: int = 0
    evictable: int = 0
    free_to_go: int = 0


class Room(NamedTuple):
    """The room of a store, the tenants whose blocks it may evict, and the free slots that it may use."""

    room: int
    givers: frozenset[str]
    usable_free: int


def room_of_store(
    tenants: Mapping[str, Blocks],
    quotas: Mapping[str, Quota],
    tenant: str,
    wanted: int,
    num_free: int,
    orphans: Set[str] = frozenset(),
) -> Room:
    """Return the room of `wanted` blocks of a tenant. `tenants` has all tenants, `quotas` some of them.

    `orphans`: the tenants that no longer exist.
    """
    quota = quotas.get(tenant, Quota())
    held = tenants[tenant].held
    most = held + wanted if quota.max_blocks is None else quota.max_blocks
    growth = max(0, most - held)
    allowed = min(wanted, growth)
    if num_free < wanted <= growth and can_give(tenants, orphans) >= wanted - num_free:
        return Room(wanted, frozenset(orphans), num_free)
    if held + wanted <= quota.min_blocks and wanted > num_free:
        lenders = givers_for(tenants, quotas, wanted - num_free) - {tenant}
        if can_give(tenants, lenders) >= wanted - num_free:
            return Room(wanted, lenders, num_free)
    grown = largest(tenants, quotas, tenant, allowed, num_free)
    if wanted <= growth:
        return grown
    usable = min(num_free, growth)
    own = Room(min(wanted, usable + tenants[tenant].free_to_go), frozenset([tenant]), usable)
    return grown if grown.room > own.room else own


def largest(
    tenants: Mapping[str, Blocks], quotas: Mapping[str, Quota], tenant: str, most: int, num_free: int
) -> Room:
    """Return the largest store, up to `most` blocks, whose victims the tenants can give."""
    for room in range(most, -1, -1):
        needed = max(0, room - num_free)
        givers = givers_for(tenants, quotas, needed) | {tenant}
        if can_give(tenants, givers) >= needed:
            return Room(room, givers, num_free)
    raise AssertionError("an empty store always has room")


def givers_for(tenants: Mapping[str, Blocks], quotas: Mapping[str, Quota], needed: int) -> frozenset[str]:
    """Return the tenants that keep their minimum whichever blocks the store evicts."""
    return frozenset(
        name
        for name, blocks in tenants.items()
        if blocks.held - min(needed, blocks.evictable) >= quotas.get(name, Quota()).min_blocks
    )


def can_give(tenants: Mapping[str, Blocks], givers: Set[str]) -> int:
    return sum(tenants[name].free_to_go for name in givers)
