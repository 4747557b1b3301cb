"""The options in ``--hicache-storage-backend-extra-config``. Imports no SGLang."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

from kvoffload.errors import ConfigError
from kvoffload.settings.read import Duration, OneOf, Size, parse_size, read_options
from kvoffload.tiers.spec import SizedTierOptions, TierOptions, Tiers

WHERE = "hicache_storage_backend_extra_config"
OF_SGLANG = ("backend_name", "module_path", "class_name", "interface_v1", "file_storage_path")
"""Options that SGLang reads or adds."""
AUTO, ALWAYS, NEVER = "auto", "always", "never"


@dataclass(frozen=True, kw_only=True)
class StorageOptions:
    """Options of `KVOffloadStorage`.

    Attributes:
        tiers: from the fastest to the slowest.
        identity: a name for the weights and for the settings that affect KV but are not SGLang's arguments.
        deadline: longest time to read a batch, in seconds. A write may take five times as long.
        staging: limit of the staging memory between tiers and SGLang's host pool, in bytes.
        zero_copy: transfers of pages without staging: ``always``, ``never``, or ``auto``, which means only if
            all tiers are shared.
    """

    tiers: Tiers
    identity: str = ""
    deadline: Duration = 2.0
    staging: Size = 256 << 20
    zero_copy: Annotated[str, OneOf((AUTO, ALWAYS, NEVER))] = AUTO

    @property
    def allows_zero_copy(self) -> bool | None:
        """The option `zero_copy` as an argument of `ObjectStore`. None: ``auto``."""
        return {ALWAYS: True, NEVER: False}.get(self.zero_copy)


def parse_options(extra_config: Mapping[str, Any] | None) -> StorageOptions:
    """Read the options. Raises `ConfigError` with every problem."""
    options = read_options(StorageOptions, extra_config or {}, WHERE, also_known=OF_SGLANG)
    if not options.tiers:
        raise ConfigError("tiers", list(options.tiers), 'allowed: a list such as ["disk:/nvme/kv:500GiB"]')
    for tier in options.tiers:
        if not tier.keeps_blocks:
            raise ConfigError("tiers", str(tier), "allowed: a tier that stores bytes: disk, valkey, s3")
    return options


def divided(tier: TierOptions, num_ranks: int) -> TierOptions:
    """Return the options of a tier for one rank: an equal share of the capacity and of the daily writes.

    The options of a tier without a capacity are returned unchanged.
    """
    if num_ranks == 1 or not isinstance(tier, SizedTierOptions):
        return tier
    changes: dict[str, Any] = {"capacity": str(parse_size("capacity", tier.capacity) // num_ranks)}
    if limit := getattr(tier, "max_write_bytes_per_day", None):
        changes["max_write_bytes_per_day"] = limit // num_ranks
    return replace(tier, **changes)
