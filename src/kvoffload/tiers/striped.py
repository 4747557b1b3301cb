"""Several tiers of one machine as one tier. Each key belongs to one tier, and the tiers work in parallel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from kvoffload.core.tenants import Quota, TenantStats
from kvoffload.errors import ConfigError
from kvoffload.structures.keys import Keys
from kvoffload.tiers.contract import GroupedTier, OwnerOf, SecondaryTier, SharedTier, check_tiers
from kvoffload.tiers.divided import DividedTier
from kvoffload.tiers.guarded import GuardedTier


class StripedTier(DividedTier[GuardedTier]):
    """Several tiers that distribute the keys among themselves: disks, simulated tiers, or your own tiers.

    A key has a pseudorandom weight for each tier, and belongs to the tier with the highest weight (Thaler and
    Ravishankar, "Using name-based mappings to increase hit rates", IEEE/ACM Transactions on Networking 6(1),
    1998). The weights depend on the tiers' identities, not on the order of the tiers. A new tier takes an
    equal share of the keys from each old tier, and no key moves between old tiers. Each tier receives its
    keys in prefix order.

    If a tier fails or raises (see `GuardedTier`), only the blocks of this tier are misses. But while a tier
    hangs, jobs that contain its blocks do not end, and a `TieredManager` reads nothing from the whole stripe.

    Args:
        tiers: tiers of one block size. The stripe owns the tiers and closes them in `close`.

    Attributes:
        identity: identity of the first tier.
        stored_bytes: the largest `stored_bytes` of the tiers.

    Thread: one, the thread that calls the tiers. Cost: with four tiers 50 ns a key, for the key's digest and
    four weights.
    Raises: `ConfigError` if `tiers` is empty, if the tiers differ in `block_bytes`, if two tiers have equal
        identities, or if a tier is shared by machines.
    """

    def __init__(self, tiers: Sequence[SecondaryTier]) -> None:
        super().__init__()
        check_tiers(tiers)
        identities = [tier.identity for tier in tiers]
        sizes = [tier.block_bytes for tier in tiers]
        if not tiers:
            raise ConfigError("tiers", [], "allowed: one tier or more")
        if len({*sizes}) > 1:
            raise ConfigError("tiers", f"blocks of {sizes} bytes", "allowed: blocks of one size")
        if len({*identities}) < len(identities):
            raise ConfigError("tiers", f"identities {identities}", "allowed: each tier once")
        if shared := [tier.name for tier in tiers if isinstance(tier, (SharedTier, GroupedTier))]:
            raise ConfigError("tiers", shared, "allowed: tiers that no other machine shares; use a cluster")
        self._tiers = [GuardedTier(tier) for tier in tiers]
        self._numbered, self._quotas = dict(enumerate(self._tiers)), dict[str, Quota]()
        self._identities = np.array(identities, np.uint64)
        self.name = "+".join(dict.fromkeys(tier.name for tier in tiers))
        self.identity, self.block_bytes = identities[0], sizes[0]
        self.stored_bytes = max(tier.stored_bytes for tier in tiers)

    def set_tenants(self, quotas: Mapping[str, Quota], owner_of: OwnerOf) -> None:
        """Divide each quota equally among the tiers. If a tier refuses, the old quotas stay in all tiers."""
        parts = {name: quota.divided(len(self._tiers)) for name, quota in quotas.items()}
        for number, tier in enumerate(self._tiers):
            try:
                tier.set_tenants(parts, owner_of)
            except ConfigError:
                for changed in self._tiers[:number]:
                    changed.set_tenants(self._quotas, owner_of)
                raise
        self._quotas = parts

    def tenants(self) -> dict[str, TenantStats]:
        """Return, for each tenant, the sum of the tiers' counts."""
        counts: dict[str, list[TenantStats]] = {}
        for tier in self._tiers:
            for name, counted in tier.tenants().items():
                counts.setdefault(name, []).append(counted)
        return {name: first.plus(*others) for name, (first, *others) in counts.items()}

    def members(self) -> Mapping[int, GuardedTier]:
        return self._numbered

    def shares(self, keys: Keys) -> list[tuple[int, GuardedTier, npt.NDArray[np.int64]]]:
        homes = self.homes(keys)
        numbers = np.unique(homes).tolist()
        return [(number, self._tiers[number], np.flatnonzero(homes == number)) for number in numbers]

    def homes(self, keys: Keys) -> npt.NDArray[np.intp]:
        """Return, for each key, the index of the tier that has the highest weight for this key.

        The formula of the weights must never change. Otherwise keys would belong to other tiers than before,
        and the blocks that are already on disks would not be found.
        """
        weights = keys.digests[:, None] ^ self._identities
        weights *= np.uint64(0x9E3779B97F4A7C15)
        weights ^= weights >> np.uint64(32)
        weights *= np.uint64(0xD6E8FEB86659FD93)
        homes: npt.NDArray[np.intp] = np.argmax(weights, axis=1)
        return homes
