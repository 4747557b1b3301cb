"""The option ``tenants``: quotas of RAM and of tiers in bytes.

Imports no vLLM, because the command line checks options on machines without vLLM.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, TypeAlias

from kvoffload.core.quotas import ALLOWED, Quotas, read_quotas
from kvoffload.core.tenants import MAX_TENANTS, Quota
from kvoffload.errors import ConfigError
from kvoffload.settings.read import Size, convert, parse_size
from kvoffload.tiers.spec import SizedTierOptions, TierOptions, names_of

if TYPE_CHECKING:
    from kvoffload.tiering.tiered_manager import AnyManager


class TenantOptions(Quotas):
    """Quotas in bytes."""

    def __str__(self) -> str:
        return ", ".join(self.ram)

    @property
    def min_bytes(self) -> int:
        """Bytes of RAM that the minimum quotas of all tenants add up to."""
        return sum(low for low, _ in self.ram.values())

    def in_blocks(self, ram_bytes: int, capacity_blocks: int) -> dict[str, Quota]:
        """Convert the quotas of RAM to blocks. Rounds down, but keeps a maximum at one block or more."""
        return _in_blocks(self.ram, ram_bytes, capacity_blocks)

    def wrong_tiers(self, tiers: Sequence[TierOptions]) -> Iterator[ConfigError]:
        """Yield an error for each wrong quota of a tier.

        A quota is wrong if its tier is unknown or has no capacity. The quotas of one tier are wrong if there
        are too many, or if the minimums exceed the tier's capacity.
        """
        known = dict(zip(names_of(tiers), tiers, strict=True))
        for name, quotas in self.tiers.items():
            tier = known.get(name)
            if not isinstance(tier, SizedTierOptions):
                sized = [name for name, tier in known.items() if isinstance(tier, SizedTierOptions)]
                yield ConfigError(
                    "tenants", f"tiers.{name}", f"allowed as tiers: {', '.join(sized) or 'none'}"
                )
            elif len(quotas) > MAX_TENANTS - 2:
                yield ConfigError(
                    "tenants", len(quotas), f"in a tier allowed: up to {MAX_TENANTS - 2} tenants"
                )
            elif sum(low for low, _ in quotas.values()) > (size := parse_size("capacity", tier.capacity)):
                yield ConfigError(
                    "tenants", f"tiers.{name}", f"the minimums exceed its capacity of {size} bytes"
                )

    def set_tiers(self, manager: AnyManager, tiers: Sequence[TierOptions]) -> None:
        """Replace the quotas of all open tiers. Raises `ConfigError`.

        Call this after the quotas of RAM were set.
        """
        from kvoffload.tiering.tiered_manager import TieredManager  # commands read options without numba

        if not isinstance(manager, TieredManager):
            return
        known = dict(zip(names_of(tiers), tiers, strict=True))
        for name, stats in zip(manager.tier_names, manager.tier_stats(), strict=True):
            tier = known.get(name)
            if isinstance(tier, SizedTierOptions):
                size = parse_size("capacity", tier.capacity)
                manager.set_tier_tenants(name, _in_blocks(self.tiers.get(name, {}), size, stats.capacity))


def _in_blocks(
    quotas: Mapping[str, tuple[int, int | None]], capacity_bytes: int, capacity_blocks: int
) -> dict[str, Quota]:
    def blocks(num_bytes: int) -> int:
        return num_bytes * capacity_blocks // capacity_bytes

    return {
        name: Quota(blocks(low), None if high is None else max(1, blocks(low), blocks(high)))
        for name, (low, high) in quotas.items()
    }


class _TenantsParser:
    allowed = ALLOWED

    def parse(self, field: str, value: object) -> TenantOptions:
        if isinstance(value, TenantOptions):
            return value
        return TenantOptions(*read_quotas(field, value, _bytes))


Tenants: TypeAlias = Annotated[TenantOptions, _TenantsParser()]


def _bytes(option: str, value: object) -> int:
    size: int = convert(option, value, Size)
    return size
