"""Owners of blocks (tenants), their quotas, and the room that the quotas leave for a store.

A tenant may use more than its minimum while other tenants do not need the slots. A store may evict blocks of
another tenant only if that tenant keeps its minimum, whichever victims the policy chooses. A tenant at its
maximum evicts its own blocks. Owns the counts per tenant. Does not know keys, policies or requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import index
from typing import SupportsIndex

import numpy as np

from kvoffload.core.slots import SlotArray
from kvoffload.errors import ConfigError
from kvoffload.structures.jit import F64Array, I16Array, I32Matrix, I64Array, I64Matrix, U32Array, inline
from kvoffload.structures.lists import LIST, PREV
from kvoffload.structures.structs import Struct

OTHER = "other"
"""Name of the tenant that owns the blocks of all requests without a configured tenant. Its number is 0."""
_NOBODY = ""
MAX_TENANTS = 63
"""Largest number of tenants, including `OTHER`, because a set of tenants is a bit mask of 63 bits."""
UNLIMITED = 1 << 40
ALL_TENANTS = (1 << MAX_TENANTS) - 1
LEARNT_PART, LEARNT_ALWAYS = 2.0, 1 / 64
"""Limits of `may_learn`, which decides whether a policy learns from a tenant above its minimum. The policy
may learn from this share of all offered blocks: `LEARNT_PART` times the tenant's share of the cache, plus
`LEARNT_ALWAYS`. Because of `LEARNT_ALWAYS`, it also learns from a tenant that has no blocks yet."""
UNSURE = -1
"""Result of `room_of_store` if the room depends on `Tenants.on_path`, which has not been counted yet. The
caller must count it and call `room_of_store` again."""

_STRIDE, _DEPTH, _ROWS = 64, 16, 256
_KEY, _MASK, _COUNT, _FIRST = 0, 1, 2, 3
_MIX_KEY, _MIX_GIVERS = np.uint64(0xD6E8FEB86659FD93), np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class Quota:
    """The quota of a tenant, in blocks.

    Attributes:
        min_blocks: blocks that no other tenant can evict.
        max_blocks: largest number of blocks that the tenant holds; None for no limit.
    """

    min_blocks: int = 0
    max_blocks: int | None = None

    def divided(self, parts: int) -> Quota:
        """Return the quota divided by `parts`, rounded down. The maximum stays at least 1 block."""
        low = self.min_blocks // parts
        return Quota(low, None if self.max_blocks is None else max(1, low, self.max_blocks // parts))


@dataclass(frozen=True, slots=True)
class TenantStats:
    """Counts of a tenant, in blocks.

    Attributes:
        min, max: the quota; `max` is None for no limit.
        held: blocks that the tenant owns, readable or in flight.
        loaded: blocks that requests of the tenant have loaded, including blocks of other owners.
        evicted: blocks of the tenant that were evicted by stores of any tenant or by a resize.
    """

    min: int
    max: int | None
    held: int
    loaded: int
    evicted: int

    def plus(self, *others: TenantStats) -> TenantStats:
        """Return the sum of these counts and the counts of `others`."""
        rows = (self, *others)
        return TenantStats(
            sum(row.min for row in rows),
            None if any(row.max is None for row in rows) else sum(row.max or 0 for row in rows),
            *(sum(getattr(row, name) for row in rows) for name in ("held", "loaded", "evicted")),
        )


class Tenants(Struct):
    """Owners of the blocks and counts per tenant. Memory: 6 bytes per slot, or none without tenants.

    Attributes:
        owner: int16: for each slot the tenant that owns its block.
        moves: uint32: for each slot the number of calls that may have moved its block in the policy's order.
        held: number of blocks that each tenant owns.
        evictable: number of blocks of each tenant that are ready and not pinned.
        min, max: quotas; `UNLIMITED` for no maximum.
        loaded, evicted: as in `TenantStats`.
        on_path: number of evictable blocks of each tenant that are on the path of the storing request, and
            therefore cannot be victims of this store.
        marks: for each list, places at which later searches for victims resume (`resume_search`).
        num_tenants: number of tenants that have an identifier; 0 while there are no quotas.
        orphans: bit mask of the tenants that no longer exist. Their blocks are evicted first.
        givers: bit mask of the tenants whose blocks the current store may evict.
        usable_free: number of free slots that the current store may use.
        is_owed: 1 if the current store evicts blocks of other tenants because its tenant is below its
            minimum.
        is_quiet: 1 if the policy should not learn from the current store (`may_learn`) and all victims belong
            to the storing tenant.
        num_offered: number of absent blocks that all stores have offered.
        credit: for each tenant, the number of offered blocks from which the policy may still learn
            (`may_learn`).
        credited: value of `num_offered` at the last update of each tenant's `credit`.
        stride: number of blocks that a search skips between two remembered places.
    """

    owner: I16Array
    moves: U32Array
    held: I64Array
    evictable: I64Array
    min: I64Array
    max: I64Array
    loaded: I64Array
    evicted: I64Array
    on_path: I64Array
    marks: I64Matrix
    num_tenants: int
    orphans: int
    givers: int
    usable_free: int
    is_owed: int
    is_quiet: int
    num_offered: int
    credit: F64Array
    credited: I64Array
    stride: int

    def __init__(self, capacity: int) -> None:
        counts = {
            name: np.full(MAX_TENANTS, 0, np.int64)
            for name in ("held", "evictable", "min", "max", "loaded", "evicted", "on_path", "credited")
        }
        super().__init__(
            owner=np.full(capacity, 0, np.int16),
            moves=np.full(capacity, 0, np.uint32),
            marks=np.full((_ROWS if capacity else 0, _FIRST + 2 * _DEPTH), 0, np.int64),
            stride=_STRIDE,
            credit=np.full(MAX_TENANTS, 0.0, np.float64),
            **counts,
        )

    def recount(self, filled: SlotArray, evictable: SlotArray) -> None:
        """Recount the blocks of each tenant. Also reset the state of searches (`marks`) and of `may_learn`.

        Cost: O(blocks).
        """
        self.held[:] = np.bincount(self.owner[filled], minlength=MAX_TENANTS)
        self.evictable[:] = np.bincount(self.owner[evictable], minlength=MAX_TENANTS)
        self.marks.fill(0)
        self.num_offered = 0
        self.credit.fill(0.0)
        self.credited.fill(0)


class TenantNumbers:
    """Names, quotas and numeric identifiers of a manager's tenants.

    A name keeps its identifier for the life of the manager, because requests in flight refer to it.
    """

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {OTHER: 0}
        self.quotas: dict[str, Quota] = {}

    def number(self, name: str) -> int:
        """Return the identifier of a tenant; 0 for a name without a quota."""
        return self._numbers[name] if name in self.quotas else 0

    def name(self, number: int) -> str:
        """Return the name of the tenant with this identifier; `OTHER` if the tenant has no quota."""
        name = [*self._numbers][number]
        return name if name in self.quotas else OTHER

    def nobody(self) -> int:
        """Return the identifier that marks a block without an owner. The first call assigns it."""
        return self._numbers.setdefault(_NOBODY, len(self._numbers))

    def set(self, quotas: Mapping[str, Quota], capacity: int) -> None:
        """Replace all quotas. Raises `ConfigError` for invalid quotas, and then changes nothing."""
        check_quotas(quotas, capacity)
        names = [*self._numbers, *(name for name in quotas if name not in self._numbers)]
        if len(names) > MAX_TENANTS:
            why = f"at most {MAX_TENANTS - 1} different names in the life of a manager"
            raise ConfigError("tenants", len(names) - 1, why)
        self._numbers = {name: number for number, name in enumerate(names)}
        self.quotas = {name: _plain(quota) for name, quota in quotas.items()}

    def write(self, tenants: Tenants) -> None:
        """Write the quotas to a manager's state. Tenants without a quota get no minimum and no maximum."""
        tenants.min.fill(0)
        tenants.max.fill(UNLIMITED)
        for name, quota in self.quotas.items():
            number = self._numbers[name]
            tenants.min[number] = quota.min_blocks
            tenants.max[number] = UNLIMITED if quota.max_blocks is None else min(quota.max_blocks, UNLIMITED)
        tenants.num_tenants = len(self._numbers)

    def stats(self, tenants: Tenants) -> dict[str, TenantStats]:
        """Return the counts of each tenant with a quota, and of `OTHER`.

        If a tenant's quota is removed, `OTHER` includes the blocks that the tenant still holds. But the
        tenant's past loads and evictions are no longer reported, so that no counter jumps when a quota is
        removed or returns.
        """
        counts = (tenants.held, tenants.loaded, tenants.evicted)
        stats = {}
        for name, quota in {**self.quotas, OTHER: self.quotas.get(OTHER, Quota())}.items():
            numbers = [int(count[self._numbers[name]]) for count in counts]
            stats[name] = TenantStats(quota.min_blocks, quota.max_blocks, *numbers)
        num_named = sum(tenant.held for name, tenant in stats.items() if name != OTHER)
        return stats | {OTHER: replace(stats[OTHER], held=int(tenants.held.sum()) - num_named)}


def check_quotas(quotas: Mapping[str, Quota], capacity: int) -> None:
    """Raise `ConfigError` for quotas that are invalid in a cache of `capacity` blocks."""
    for name, quota in quotas.items():
        if not isinstance(name, str) or not name:
            raise ConfigError("tenants", name, "a tenant needs a name")
        if not isinstance(quota, Quota):
            raise ConfigError(f"tenants.{name}", quota, "allowed: a Quota")
        low, high = quota.min_blocks, quota.max_blocks
        if not isinstance(low, SupportsIndex) or low < 0:
            raise ConfigError(f"tenants.{name}.min", low, "allowed: 0 or more blocks")
        if high is not None and (not isinstance(high, SupportsIndex) or high < max(low, 1)):
            raise ConfigError(f"tenants.{name}.max", high, f"allowed: {max(low, 1)} blocks or more")
    total = sum(quota.min_blocks for quota in quotas.values())
    if total > capacity:
        raise ConfigError("tenants", total, f"the minimums add up to more than the capacity of {capacity}")


def _plain(quota: Quota) -> Quota:
    """Convert the numbers of a quota, perhaps of numpy, to Python integers, for recordings and reports."""
    high = quota.max_blocks
    return Quota(index(quota.min_blocks), None if high is None else index(high))


# ---- the room of a store


@inline
def gives(tenants: Tenants, slot: int) -> bool:
    """Return True if the quotas allow the current store to evict the block in `slot`."""
    return (tenants.givers >> np.int64(tenants.owner[slot])) & 1 != 0


@inline
def num_evictable_of(tenants: Tenants) -> int:
    """Return the number of blocks that the quotas allow the current store to evict.

    Includes blocks on the storing request's path, although these cannot be victims.
    """
    count = np.int64(0)
    for owner in range(tenants.num_tenants):
        if (tenants.givers >> owner) & 1 != 0:
            count += tenants.evictable[owner]
    return count


@inline
def _find_givers(tenants: Tenants, owner: int, needed: int, with_own: bool) -> int:
    """Find the tenants whose blocks a store with `needed` victims may evict, and set `givers`.

    The storing tenant `owner` is a giver exactly if `with_own` is True. Any other tenant is a giver only if
    it keeps its minimum in the worst case: if the policy chooses all its victims among this tenant's blocks.

    Returns the number of evictable blocks of all givers together, without blocks on the path.
    """
    givers, count = np.int64(0), np.int64(0)
    for other in range(tenants.num_tenants):
        surplus = tenants.held[other] - tenants.min[other]
        is_giver = with_own if other == owner else min(needed, tenants.evictable[other]) <= surplus
        if is_giver:
            givers |= np.int64(1) << np.int64(other)
            count += tenants.evictable[other] - tenants.on_path[other]
    tenants.givers = givers
    return count


@inline
def _count_orphans(tenants: Tenants) -> int:
    """Count the evictable blocks of tenants that no longer exist, except blocks on the storing path."""
    count = np.int64(0)
    for other in range(tenants.num_tenants):
        if (tenants.orphans >> np.int64(other)) & 1 != 0:
            count += tenants.evictable[other] - tenants.on_path[other]
    return count


@inline
def largest_part(tenants: Tenants, owner: int, most: int) -> int:
    """Find the largest number of victims, up to `most`, that the quotas allow; set `givers` for it.

    Args:
        owner: the storing tenant, which may evict its own blocks even below its minimum; or `MAX_TENANTS` for
            no tenant.
    """
    low, high = np.int64(0), np.int64(most)
    while low < high:
        middle = (low + high + 1) // 2
        if _find_givers(tenants, owner, middle, True) >= middle:
            low = middle
        else:
            high = middle - 1
    _find_givers(tenants, owner, low, True)
    return low


@inline
def _room_of_own(tenants: Tenants, owner: int, wanted: int, num_free: int) -> int:
    """Compute the room for a store of tenant `owner` that may evict only this tenant's own blocks.

    Returns the number of blocks, at most `wanted`. Also sets `givers` and `usable_free` of `tenants`.
    """
    tenants.usable_free = min(num_free, max(np.int64(0), tenants.max[owner] - tenants.held[owner]))
    tenants.givers = np.int64(1) << np.int64(owner)
    own = tenants.evictable[owner] - tenants.on_path[owner]
    return min(wanted, tenants.usable_free + own)


@inline
def room_of_store(tenants: Tenants, owner: int, wanted: int, num_free: int, margin: int) -> int:
    """Return the number of new blocks of tenant `owner` for which there is room, at most `wanted`.

    Also sets `givers`, `usable_free` and `is_owed` of `tenants`. The victims come from the first of these
    sources that has enough blocks; if none has, the result is less than `wanted`:

    1. tenants that no longer exist
    2. other tenants above their minimum, if `owner` stays within its own minimum
    3. `owner`, whatever its minimum, and other tenants above their minimum

    If the store would exceed the maximum of `owner`, there are two ways: evict only blocks of `owner`, or
    grow to the maximum and evict blocks of other tenants, too. The function chooses the way with more room.

    Args:
        margin: 0 if the caller has counted `on_path`. Otherwise `on_path` must be 0 and `margin` an upper
            bound of its sum; then the result is `wanted` or `UNSURE`.

    Cost: O(tenants) or, if there is too little room, O(tenants × log wanted).
    """
    growth = max(np.int64(0), tenants.max[owner] - tenants.held[owner])
    tenants.usable_free, tenants.is_owed = num_free, 0
    needed = max(np.int64(0), wanted - num_free)
    if wanted <= growth:
        if needed == 0:
            tenants.givers = np.int64(ALL_TENANTS)
            return wanted
        num_orphans = _count_orphans(tenants)
        if num_orphans - margin >= needed:
            tenants.givers = tenants.orphans
            return wanted
        if margin > 0 and num_orphans >= needed:
            return UNSURE
        if tenants.held[owner] + wanted <= tenants.min[owner]:
            if _find_givers(tenants, owner, needed, False) - margin >= needed:
                tenants.is_owed = 1
                return wanted
            if margin > 0:
                return UNSURE
        if _find_givers(tenants, owner, needed, True) - margin >= needed:
            return wanted
        if margin > 0:
            return UNSURE
        return num_free + largest_part(tenants, owner, needed)
    own = _room_of_own(tenants, owner, wanted, num_free)
    if own - margin >= wanted:
        return own
    if margin > 0:
        return UNSURE
    part = min(growth, num_free)
    part += largest_part(tenants, owner, growth - part)
    if part > own:
        tenants.usable_free = num_free
        return part
    return _room_of_own(tenants, owner, wanted, num_free)


@inline
def adopt(tenants: Tenants, slot: int, owner: int) -> bool:
    """Make tenant `owner` the owner of the pinned block in `slot`, if its present owner no longer exists.

    Changes nothing if the present owner exists, or if tenant `owner` does not exist. If the result is True,
    the owner has changed, and the caller must call `forget_places`. Otherwise the block would not be found as
    a victim, if an earlier search has skipped it because of its old owner.
    """
    old = np.int64(tenants.owner[slot])
    if (tenants.orphans >> old) & 1 == 0 or (tenants.orphans >> np.int64(owner)) & 1 != 0:
        return False
    tenants.owner[slot] = owner
    tenants.held[old] -= 1
    tenants.held[owner] += 1
    return True


# ---- what policies learn


@inline
def evicts_only_own(tenants: Tenants, owner: int) -> bool:
    """Return True if the current store of tenant `owner` cannot evict blocks of other tenants."""
    for other in range(tenants.num_tenants):
        if other != owner and (tenants.givers >> other) & 1 != 0 and tenants.evictable[other] > 0:
            return False
    return True


@inline
def may_learn(tenants: Tenants, owner: int, num_missing: int, num_stored: int, capacity: int) -> bool:
    """Count a store; return True if the policy may learn from the store.

    A policy has one state for all tenants, such as ghosts and reuse statistics. A scan by one tenant must not
    replace this state. Therefore the policy learns from every store that evicts nothing or keeps its tenant
    within its minimum. From the other stores of a tenant it learns only in proportion to the tenant's part of
    the cache (`LEARNT_PART`, `LEARNT_ALWAYS`).

    Args:
        num_missing: number of absent blocks that the store offers.
        num_stored: number of these blocks that are stored.
        capacity: number of slots of the cache.
    """
    tenants.num_offered += num_missing
    held = tenants.held[owner]
    if num_stored <= tenants.usable_free or held + num_stored <= tenants.min[owner]:
        return True
    part = LEARNT_ALWAYS + LEARNT_PART * held / capacity
    earned = part * (tenants.num_offered - tenants.credited[owner])
    credit = min(tenants.credit[owner] + earned, np.float64(held + num_missing))
    may = credit >= num_missing
    tenants.credited[owner] = tenants.num_offered
    tenants.credit[owner] = credit - num_missing if may else credit
    return may


# ---- searches that skip many blocks


@inline
def forget_places(tenants: Tenants, owner: int) -> None:
    """Forget the places at which searches resume, if tenant `owner` has adopted blocks that they skipped.

    A tenant adopts blocks of *orphans*, tenants that no longer exist. If the givers of a search (the tenants
    whose blocks it may return) include `owner` but not all orphans, the search may have skipped a block that
    now belongs to `owner`; its places are forgotten. If the givers include all orphans, the search has
    skipped no block of an orphan, and its places stay valid.
    """
    for row in range(tenants.marks.shape[0]):
        givers = tenants.marks[row, _MASK]
        if (givers >> np.int64(owner)) & 1 != 0 and givers & tenants.orphans != tenants.orphans:
            tenants.marks[row, _COUNT] = 0


@inline
def _row_of(tenants: Tenants, key: int) -> int:
    mixed = np.uint64(key) * _MIX_KEY + np.uint64(tenants.givers) * _MIX_GIVERS
    return np.int64((mixed >> np.uint64(32)) % np.uint64(_ROWS))


@inline
def resume_search(tenants: Tenants, links: I32Matrix, key: int, sentinel: int) -> int:
    """Return the coldest block that a search for victims from the tail of a list must check.

    Earlier searches passed blocks that quotas protect, and recorded some of them with `remember_place`. No
    block of a giver (a tenant whose blocks the store may evict) is colder than a recorded block that has not
    moved since, because new blocks join the list at the head. So the search can resume after the last such
    block. Records are valid for one list and one set of givers.
    """
    marks, row = tenants.marks, _row_of(tenants, key)
    if marks[row, _KEY] == key and marks[row, _MASK] == tenants.givers:
        while marks[row, _COUNT] > 0:
            at = _FIRST + 2 * (marks[row, _COUNT] - 1)
            slot = marks[row, at]
            if links[slot, LIST] == sentinel and np.int64(tenants.moves[slot]) == marks[row, at + 1]:
                return np.int64(links[slot, PREV])
            marks[row, _COUNT] -= 1
    return np.int64(links[sentinel, PREV])


@inline
def remember_place(tenants: Tenants, key: int, slot: int) -> None:
    """Remember that no block of a giver is colder than the block in `slot`, for `resume_search`.

    If the stack of remembered slots is full, every second entry is dropped.
    """
    marks, row = tenants.marks, _row_of(tenants, key)
    if marks[row, _KEY] != key or marks[row, _MASK] != tenants.givers:
        marks[row, _KEY], marks[row, _MASK], marks[row, _COUNT] = key, tenants.givers, 0
    if marks[row, _COUNT] == _DEPTH:
        for kept in range(_DEPTH // 2):
            marks[row, _FIRST + 2 * kept] = marks[row, _FIRST + 4 * kept + 2]
            marks[row, _FIRST + 2 * kept + 1] = marks[row, _FIRST + 4 * kept + 3]
        marks[row, _COUNT] = _DEPTH // 2
    at = _FIRST + 2 * marks[row, _COUNT]
    marks[row, at], marks[row, at + 1] = slot, np.int64(tenants.moves[slot])
    marks[row, _COUNT] += 1
