"""Quotas as users write them: ``{"a": {"min": "10GiB", "tiers": {"disk": {"max": "1TiB"}}}}``.

This module does not know how to parse a size such as ``10GiB``: the caller passes a function for that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import msgspec

from kvoffload.core.plans import ON_DEVICE_EVICTION
from kvoffload.core.tenants import MAX_TENANTS
from kvoffload.errors import ConfigError

ALLOWED = '{"a": {"min": "10GiB", "max": "40GiB"}, ...}'
ONE_OWNER = (
    f"with store {ON_DEVICE_EVICTION} there are no quotas, because dropped blocks belong to no request"
)
_NAMES, _TIERS = ("min", "max"), "tiers"

ReadSize = Callable[[str, object], int]
"""Function that parses a size. Its arguments are the name and the value of an option; it raises
`ConfigError` for an invalid value."""


class Quotas(NamedTuple):
    """Quotas of each tenant as pairs (minimum, maximum). The maximum is None if there is no limit.

    Attributes:
        ram: mapping from each tenant to its quota of RAM.
        tiers: for each tier behind RAM, by name, a mapping from tenants to their quotas of this tier.
    """

    ram: dict[str, tuple[int, int | None]]
    tiers: dict[str, dict[str, tuple[int, int | None]]]


def read_quotas(option: str, given: object, read_size: ReadSize) -> Quotas:
    """Read the quotas of all tenants from `given`, a mapping or its JSON text. Raises `ConfigError`."""
    if isinstance(given, str):
        try:
            given = msgspec.json.decode(given)
        except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
            raise ConfigError(option, given, f"allowed: {ALLOWED}") from None
    if not isinstance(given, Mapping):
        raise ConfigError(option, given, f"allowed: {ALLOWED}")
    if len(given) >= MAX_TENANTS:
        raise ConfigError(option, len(given), f"allowed: up to {MAX_TENANTS - 1} tenants")
    if "" in given:
        raise ConfigError(option, "", "a tenant needs a name")
    quotas = Quotas({}, {})
    for name, quota in given.items():
        own, tiers = f"{option}.{name}", {}
        if isinstance(quota, Mapping) and _TIERS in quota:
            quota, tiers = {key: value for key, value in quota.items() if key != _TIERS}, quota[_TIERS]
        quotas.ram[str(name)] = _quota(own, quota, read_size)
        if not isinstance(tiers, Mapping):
            raise ConfigError(f"{own}.{_TIERS}", tiers, 'allowed: {"disk": {"min": "1TiB"}}')
        for tier, of_tier in tiers.items():
            of_all = quotas.tiers.setdefault(str(tier), {})
            of_all[str(name)] = _quota(f"{own}.{_TIERS}.{tier}", of_tier, read_size)
    return quotas


def _quota(option: str, given: object, read_size: ReadSize) -> tuple[int, int | None]:
    if not isinstance(given, Mapping):
        raise ConfigError(option, given, 'allowed: {"min": "10GiB", "max": "40GiB"}, both optional')
    for name in given:
        if name not in _NAMES:
            raise ConfigError(f"{option}.{name}", given[name], "no such option; allowed: min, max")
    low, high = (_size(f"{option}.{name}", given.get(name), read_size) for name in _NAMES)
    if high is not None and high < max(low or 0, 1):
        raise ConfigError(f"{option}.max", given["max"], "allowed: at least the minimum, and more than 0")
    return low or 0, high


def _size(option: str, value: object, read_size: ReadSize) -> int | None:
    if value is None or value in (0, "0"):
        return None if value is None else 0
    return read_size(option, value)
