"""Base class of tiers with a manager: offers of blocks, admission, quotas and the write budget.

RAM offers blocks without naming a request in two cases: if the device has dropped the blocks, and if the
blocks have waited for a busy tier. Such an offer may contain blocks of several requests. It does not count as
a use of the blocks, because uses are counted when requests finish.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from kvoffload.core.manager import OffloadingManager
from kvoffload.core.plans import StorePlan
from kvoffload.core.request import RequestContext
from kvoffload.core.tenants import MAX_TENANTS, Quota, TenantStats
from kvoffload.errors import ConfigError
from kvoffload.structures.keys import Keys
from kvoffload.tiers.contract import OwnerOf, SecondaryTier, TierStats
from kvoffload.tiers.write_budget import WriteBudget

MOST_QUOTAS = MAX_TENANTS - 2
"""Limit of a tier's quotas. Two more tenants are reserved: ``other``, and one for blocks of earlier runs."""


class Purse:
    """A tier's account of its write budget, which several tiers may share.

    Charges the budget for the tier's writes, and reports each offer of blocks to the tier's admission rule
    (`Admission.settle`).

    Args:
        manager: the tier's manager.
        unit_bytes: cost of a written block: its bytes on the medium, or 1 if the budget counts blocks.
        written_before: argument of `WriteBudget.add_tier`.
    """

    def __init__(
        self, budget: WriteBudget, manager: OffloadingManager, unit_bytes: int, written_before: dict[int, int]
    ) -> None:
        budget.add_tier(unit_bytes, written_before)
        self.budget, self._rule, self._unit_bytes = budget, manager.admission, unit_bytes
        self._settled_s = budget.now_s()
        # The rule must know of the budget before the first offer.
        self.pay(Keys.pack([], manager.key_bytes), 0)

    @property
    def room(self) -> int:
        """Number of blocks that may be written now."""
        return self.budget.left_bytes // self._unit_bytes

    def pay(self, offered: Keys, num_written: int) -> None:
        """Charge the budget for the written blocks of an offer, and report the offer to the admission rule.

        `offered` has only the blocks that the tier did not have.
        """
        if num_written:
            self.budget.spend(num_written * self._unit_bytes)
        if self._rule is not None:
            now = self.budget.now_s()
            # A clock that was set back earns nothing.
            earned = self.budget.earned_bytes_each(max(0.0, now - self._settled_s)) / self._unit_bytes
            self._settled_s = now
            self._rule.settle(offered, num_written, earned, self.budget.bytes_each / self._unit_bytes)


class ManagedTier(SecondaryTier):
    """Base class of tiers with an `OffloadingManager`, which decides the contents of the tier."""

    def __init__(self, manager: OffloadingManager) -> None:
        self._manager, self._counts = manager, TierStats()
        self._purse: Purse | None = None
        self._owner_of: OwnerOf | None = None  # None without quotas: no block has a tenant

    def missed(self, keys: Keys) -> None:
        if self._manager.admission is not None:
            self._manager.admission.missed(keys)

    def set_tenants(self, quotas: Mapping[str, Quota], owner_of: OwnerOf) -> None:
        if len(quotas) > MOST_QUOTAS:
            raise ConfigError("tenants", len(quotas), f"for a tier allowed: up to {MOST_QUOTAS}")
        self._manager.set_tenants(quotas)
        if self._owner_of is None and quotas:
            self._manager.disown()
            self._owner_of = owner_of

    def tenants(self) -> dict[str, TenantStats]:
        return self._manager.stats().tenants

    def stats(self) -> TierStats:
        counts, blocks = self._counts, self._manager.stats()
        return replace(
            counts,
            capacity=blocks.capacity,
            ready=blocks.ready,
            free=blocks.free,
            in_flight=blocks.writing + blocks.ready - blocks.evictable,
            evicted=blocks.evicted,
            refused=counts.refused + blocks.refused,
            dropped=counts.dropped + blocks.dropped,
            bytes_written=counts.written * self.block_bytes,
            bytes_read=counts.read * self.block_bytes,
        )

    def _owned(self, keys: Keys, request: RequestContext | None = None) -> RequestContext | None:
        """Set the tenant of a request to the tenant of these blocks; returns the request.

        If `request` is None, begins a request. Without quotas or keys, only returns `request`.
        """
        if self._owner_of is None or len(keys) == 0:
            return request
        request = self._manager.begin_request("") if request is None else request
        self._manager.set_tenant(request, self._owner_of(keys))
        return request

    def _prepare_offer(
        self, keys: Keys, request: RequestContext | None, room: int | None
    ) -> tuple[StorePlan | None, npt.NDArray[np.intp]]:
        """Plan a store of offered blocks; returns the plan and the rows of its blocks in `keys`.

        The plan is None if no block can be stored. Counts refused and dropped blocks, and pays for the blocks
        of the plan.

        Args:
            room: limit of the number of blocks, in addition to the write budget; None for no limit.
        """
        manager, rule = self._manager, self._manager.admission
        absent = np.flatnonzero(manager.slots_of(keys) < 0)
        rows, missing = np.arange(len(keys)), absent
        if rule is not None and request is None:
            # Each block separately, because a block behind a refused block may belong to another request.
            rows = missing = absent[rule.admit(keys.take(absent))] if len(absent) else absent
            self._counts.refused += len(absent) - len(missing)
        if self._purse is not None:
            room = self._purse.room if room is None else min(room, self._purse.room)
        if room is not None and len(missing) > room:
            self._counts.dropped += len(missing) - room
            rows = rows[rows < missing[room]]
        plan = None
        if room is None or min(len(missing), room):
            plan = self._plan(keys if len(rows) == len(keys) else keys.take(rows), request)
        count = 0 if plan is None else len(plan.keys)
        if self._purse is not None:
            self._purse.pay(keys.take(absent), count)
        return (plan, rows[plan.rows]) if plan is not None and count else (None, rows[:0])

    def _plan(self, keys: Keys, request: RequestContext | None) -> StorePlan | None:
        """Plan a store of blocks that the admission rule has admitted (`OffloadingManager.prepare_store`)."""
        owned = self._owned(keys, request)
        if request is not None or self._manager.admission is None:
            return self._manager.prepare_store(keys, owned)
        unasked = self._manager.begin_request("") if owned is None else owned
        unasked.add(keys)
        # The rule must not count the offer.
        unasked.observed = unasked.length
        return self._manager.prepare_store(keys, unasked, admitted=True)
