"""Offers of blocks to a tier: admission, quotas and the write budget.

RAM offers blocks without a request in two cases: when the device has dropped the blocks, and when the blocks
have waited for a busy tier. One offer may then contain blocks of several requests. These offers do not count
as uses, because uses are counted when requests finish.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from kvoffload.core.manager import OffloadingManager
from kvoffload.core.plans import StorePlan
from kvoffload.core.request import RequestContext
from kvoffload.core.tenants import MAX_TENANTS, Quota, TenantStats
from kvoffload.errors import ConfigError
from kvoffload.structures.keys import Keys
from kvoffload.tiers.contract import OwnerOf, SecondaryTier
from kvoffload.tiers.write_budget import WriteBudget

Rows = npt.NDArray[np.intp]
MOST_QUOTAS = MAX_TENANTS - 2
"""Limit of a tier's quotas. Two tenants are reserved: ``other``, and the owner of earlier runs' blocks."""


def admitted_rows(manager: OffloadingManager, keys: Keys, request: RequestContext | None) -> tuple[Rows, int]:
    """Return the rows of `keys` that `prepare_offer` may store, and the number of blocks refused here.

    With a request, or without an admission rule, returns all rows. Otherwise the rule judges each missing
    block separately, because a block behind a refused block may belong to another request.
    """
    rule = manager.admission
    if rule is None or request is not None:
        return np.arange(len(keys)), 0
    missing = np.flatnonzero(manager.slots_of(keys) < 0)
    admitted = missing[rule.admit(keys.take(missing))] if len(missing) else missing
    return admitted, len(missing) - len(admitted)


class Purse:
    """A tier's share of a write budget. Reports each offer to the tier's admission rule (`Admission.settle`).

    Args:
        manager: the tier's manager.
        unit_bytes: cost of a written block: its bytes on the medium, or 1 if the budget counts blocks.
    """

    def __init__(self, budget: WriteBudget, manager: OffloadingManager, unit_bytes: int) -> None:
        self._budget, self._rule, self._unit_bytes = budget, manager.admission, unit_bytes
        self._settled_s = budget.now_s()
        # The rule must know of the budget before the first offer.
        self.pay(Keys.pack([], manager.key_bytes), 0)

    @property
    def room(self) -> int:
        """Number of blocks that may be written now."""
        return self._budget.left_bytes // self._unit_bytes

    def pay(self, offered: Keys, num_written: int) -> None:
        """Charge the budget for the written blocks of an offer, and report the offer to the admission rule.

        `offered`: the blocks of the offer that were absent.
        """
        if num_written:
            self._budget.spend(num_written * self._unit_bytes)
        if self._rule is not None:
            now = self._budget.now_s()
            # A clock that was set back earns nothing.
            earned = self._budget.earned_bytes_each(max(0.0, now - self._settled_s)) / self._unit_bytes
            self._settled_s = now
            self._rule.settle(offered, num_written, earned, self._budget.bytes_each / self._unit_bytes)


class Owners:
    """The quotas of a tier, and the tenants of its blocks. Without quotas no block has a tenant.

    Args:
        manager: the tier's manager.
    """

    def __init__(self, manager: OffloadingManager) -> None:
        self._manager = manager
        self._owner_of: OwnerOf | None = None

    def set(self, quotas: Mapping[str, Quota], owner_of: OwnerOf) -> None:
        """Replace the quotas, as `SecondaryTier.set_tenants`. Raises: `ConfigError`."""
        if len(quotas) > MOST_QUOTAS:
            raise ConfigError("tenants", len(quotas), f"for a tier allowed: up to {MOST_QUOTAS}")
        self._manager.set_tenants(quotas)
        if self._owner_of is None and quotas:
            self._manager.disown()
            self._owner_of = owner_of

    def request_for(self, keys: Keys, request: RequestContext | None = None) -> RequestContext | None:
        """Set the tenant of `request` to the tenant of these blocks. Returns the request.

        If `request` is None, creates a request. Without quotas, returns `request` unchanged.
        """
        if self._owner_of is None or len(keys) == 0:
            return request
        request = self._manager.begin_request("") if request is None else request
        self._manager.set_tenant(request, self._owner_of(keys))
        return request


class ManagedTier(SecondaryTier):
    """Base class of tiers with an `OffloadingManager`, which decides the contents of the tier."""

    _manager: OffloadingManager
    _owners: Owners

    def missed(self, keys: Keys) -> None:
        if self._manager.admission is not None:
            self._manager.admission.missed(keys)

    def set_tenants(self, quotas: Mapping[str, Quota], owner_of: OwnerOf) -> None:
        self._owners.set(quotas, owner_of)

    def tenants(self) -> dict[str, TenantStats]:
        return self._manager.stats().tenants


def prepare_offer(
    manager: OffloadingManager, keys: Keys, request: RequestContext | None, owners: Owners
) -> StorePlan | None:
    """Plan a store of blocks that `admitted_rows` has selected, as `OffloadingManager.prepare_store`."""
    owned = owners.request_for(keys, request)
    if request is not None or manager.admission is None:
        return manager.prepare_store(keys, owned)
    unasked = manager.begin_request("") if owned is None else owned
    unasked.add(keys)
    # The rule must not count the offer.
    unasked.observed = unasked.length
    return manager.prepare_store(keys, unasked, admitted=True)
