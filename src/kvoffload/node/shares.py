"""Shares of engines in a pool. Each engine counts as a tenant (`core.tenants`) and owns the blocks that it
stores.

Owns the mapping of engine numbers to tenants. Tenant 0 stands for all engines that cannot have a share.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import SupportsIndex

import numpy as np

from kvoffload.core.tenants import MAX_TENANTS, UNLIMITED, Tenants, TenantStats
from kvoffload.errors import ConfigError

MAX_OWNERS = MAX_TENANTS - 1
"""Limit of engines that can own blocks. Engines with numbers from `MAX_OWNERS` on own no blocks."""

KINDS = ("own", "others", "ended")
"""Keys of the dictionary that `shares_of` returns."""


def owner_of(number: int) -> int:
    """Return the tenant of an engine; 0 for an engine that cannot own blocks."""
    return number + 1 if number < MAX_OWNERS else 0


def take_share(tenants: Tenants, number: int, share: int, running: Iterable[int], capacity: int) -> None:
    """Set the share of the pool that an engine gets when it joins, in blocks.

    The engine becomes the owner of all blocks that already belong to its tenant. So a restarted engine, which
    usually gets its former number, owns the blocks that it stored before the restart.

    Args:
        running: numbers of the running engines.

    Raises: `ConfigError` if the shares of the running engines would exceed the capacity. No share has changed
    then.
    """
    taken = sum(int(tenants.min[owner_of(other)]) for other in running if other != number)
    available = max(0, capacity - taken) if number < MAX_OWNERS else 0
    if not isinstance(share, SupportsIndex) or not 0 <= share <= available:
        why = (
            f"the pool has {capacity:,} blocks, and the shares of its other engines are {taken:,}; "
            f"allowed: 0 to {available:,} blocks"
        )
        raise ConfigError("share", f"{share:,} blocks" if isinstance(share, int) else share, why)
    owner = owner_of(number)
    if owner:
        tenants.min[owner] = share
        tenants.loaded[owner] = tenants.evicted[owner] = 0


def update_owners(tenants: Tenants, numbers: Iterable[int]) -> None:
    """Record the numbers of the present engines. Blocks of all other engines are then evicted first."""
    owners = np.zeros(MAX_TENANTS, np.bool_)
    owners[[owner_of(number) for number in numbers]] = True
    owners[0] = False
    tenants.min[~owners] = 0
    tenants.max.fill(UNLIMITED)
    tenants.orphans = sum(1 << int(owner) for owner in np.flatnonzero(~owners))
    tenants.num_tenants = max(tenants.num_tenants, 1 + int(np.flatnonzero(owners).max(initial=0)))


def shares_of(tenants: Tenants, own: int) -> dict[str, TenantStats]:
    """Return the counts of one engine (``own``), of all other running engines, and of all ended engines.

    Only ``own`` has `loaded` and `evicted`. In the other two they are 0, because a sum over several engines
    would decrease when an engine ends.
    """
    kinds = np.full(MAX_TENANTS, 1)
    kinds[[bool(tenants.orphans >> owner & 1) for owner in range(MAX_TENANTS)]] = 2
    kinds[own] = 0 if own else 2
    low, held = (
        np.bincount(kinds, count, minlength=3).astype(np.int64).tolist()
        for count in (tenants.min, tenants.held)
    )
    stats = {KINDS[kind]: TenantStats(low[kind], None, held[kind], 0, 0) for kind in range(3)}
    if own:
        loaded, evicted = int(tenants.loaded[own]), int(tenants.evicted[own])
        stats["own"] = replace(stats["own"], loaded=loaded, evicted=evicted)
    return stats
