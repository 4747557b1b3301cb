"""The option ``tenants``: quotas in bytes.

Imports no vLLM, because the command line checks options on machines without vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeAlias

import msgspec

from kvoffload.core.plans import ON_DEVICE_EVICTION
from kvoffload.core.tenants import MAX_TENANTS, Quota
from kvoffload.errors import ConfigError
from kvoffload.settings.read import Size, convert

_NAMES = ("min", "max")


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
    allowed = '{"a": {"min": "10GiB", "max": "40GiB"}, ...}'

    def parse(self, field: str, value: object) -> TenantOptions:
        if isinstance(value, TenantOptions):
            return value
        if isinstance(value, str):
            try:
                value = msgspec.json.decode(value)
            except msgspec.DecodeError:
                raise ConfigError(field, value, f"allowed: {self.allowed}") from None
        return TenantOptions(_quotas(field, value))


ONE_OWNER = (
    f"with store {ON_DEVICE_EVICTION} there are no quotas, because dropped blocks belong to no request"
)

Tenants: TypeAlias = Annotated[TenantOptions, _TenantsParser()]


def _quotas(field: str, given: object) -> dict[str, QuotaBytes]:
    """Check quotas that a user has written. Raises `ConfigError`."""
    if not isinstance(given, Mapping):
        raise ConfigError(field, given, f"allowed: {_TenantsParser.allowed}")
    if len(given) >= MAX_TENANTS:
        raise ConfigError(field, len(given), f"allowed: up to {MAX_TENANTS - 1} tenants")
    if "" in given:
        raise ConfigError(field, "", "a tenant needs a name")
    return {str(name): _quota(f"{field}.{name}", quota) for name, quota in given.items()}


def _quota(field: str, given: object) -> QuotaBytes:
    if not isinstance(given, Mapping):
        raise ConfigError(field, given, 'allowed: {"min": "10GiB", "max": "40GiB"}, both optional')
    for name in given:
        if name not in _NAMES:
            raise ConfigError(f"{field}.{name}", given[name], "no such option; allowed: min, max")
    low, high = (_bytes(f"{field}.{name}", given.get(name)) for name in _NAMES)
    if high is not None and high < max(low or 0, 1):
        raise ConfigError(f"{field}.max", given["max"], "allowed: at least the minimum, and more than 0")
    return QuotaBytes(low or 0, high)


def _bytes(field: str, value: Any) -> int | None:
    if value is None or value in (0, "0"):
        return None if value is None else 0
    return convert(field, value, Size)
