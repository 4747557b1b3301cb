"""The options in ``--hicache-storage-backend-extra-config``. Imports no SGLang."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

from kvoffload.integrations.object_options import ObjectOptions, read_object_options
from kvoffload.settings.read import Duration, OneOf, Size, parse_size
from kvoffload.tiers.spec import SizedTierOptions, TierOptions

WHERE = "hicache_storage_backend_extra_config"
OF_SGLANG = ("backend_name", "module_path", "class_name", "interface_v1", "file_storage_path")
"""Names of the options that SGLang itself reads or adds."""
AUTO, ALWAYS, NEVER = "auto", "always", "never"


@dataclass(frozen=True, kw_only=True)
class StorageOptions(ObjectOptions):
    """Options of `KVOffloadStorage`.

    Attributes:
        zero_copy: transfer between the tiers and SGLang's memory without staging memory: ``always``,
            ``never``, or ``auto``, which means only if all tiers are shared.
    """

    deadline: Duration = 2.0
    staging: Size = 256 << 20
    zero_copy: Annotated[str, OneOf((AUTO, ALWAYS, NEVER))] = AUTO

    @property
    def allows_zero_copy(self) -> bool | None:
        """The option `zero_copy` as `ObjectStore` takes it: True, False, or None for ``auto``."""
        return {ALWAYS: True, NEVER: False}.get(self.zero_copy)


def parse_options(extra_config: Mapping[str, Any] | None) -> StorageOptions:
    """Read the options. Raises one `ConfigError` that reports all problems."""
    return read_object_options(StorageOptions, extra_config or {}, WHERE, also_known=OF_SGLANG)


def divided(tier: TierOptions, num_ranks: int) -> TierOptions:
    """Return the options of a tier for one of `num_ranks` ranks, which share its capacity equally.

    The limit of daily writes is divided, too. The options of a tier without a capacity are returned
    unchanged.
    """
    if num_ranks == 1 or not isinstance(tier, SizedTierOptions):
        return tier
    changes: dict[str, Any] = {"capacity": str(parse_size("capacity", tier.capacity) // num_ranks)}
    if limit := getattr(tier, "max_write_bytes_per_day", None):
        changes["max_write_bytes_per_day"] = limit // num_ranks
    return replace(tier, **changes)
