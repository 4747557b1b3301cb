"""The option ``tenants``: quotas in bytes.

Imports no vLLM, because the command line checks options on machines without vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, TypeAlias

from kvoffload.core.quotas import ALLOWED, read_quotas
from kvoffload.core.tenants import Quota
from kvoffload.settings.read import Size, convert


@dataclass(frozen=True)
class QuotaBytes:
    """The quota of a tenant in bytes of RAM; `max` None for no limit."""

    min: int = 0
    max: int | None = None


@dataclass(frozen=True)
class TenantOptions:
    """Quotas by name of the tenant."""

    quotas: Mapping[str, QuotaBytes] = field(default_factory=dict)

    def __str__(self) -> str:
        return ", ".join(self.quotas)

    @property
    def min_bytes(self) -> int:
        """Sum of the minimums."""
        return sum(quota.min for quota in self.quotas.values())

    def in_blocks(self, ram_bytes: int, capacity_blocks: int) -> dict[str, Quota]:
        """Return the quotas in blocks of a pool, rounded down. A maximum is at least one block."""

        def blocks(num_bytes: int) -> int:
            return num_bytes * capacity_blocks // ram_bytes

        return {
            name: Quota(
                blocks(quota.min),
                None if quota.max is None else max(1, blocks(quota.min), blocks(quota.max)),
            )
            for name, quota in self.quotas.items()
        }


class _TenantsParser:
    allowed = ALLOWED

    def parse(self, field: str, value: object) -> TenantOptions:
        if isinstance(value, TenantOptions):
            return value
        quotas = read_quotas(field, value, _bytes)
        return TenantOptions({name: QuotaBytes(*quota) for name, quota in quotas.items()})


Tenants: TypeAlias = Annotated[TenantOptions, _TenantsParser()]


def _bytes(option: str, value: object) -> int:
    size: int = convert(option, value, Size)
    return size
