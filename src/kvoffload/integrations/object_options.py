"""Options that the plug-ins for SGLang and LMCache have in common. Imports no engine."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from kvoffload.errors import ConfigError, Problems
from kvoffload.settings.read import Duration, Size, read_options
from kvoffload.tiers.spec import Tiers


@dataclass(frozen=True, kw_only=True)
class ObjectOptions:
    """Options of an `ObjectStore`.

    Attributes:
        tiers: the tiers, from the fastest to the slowest.
        identity: a name that the user gives to the weights and to all settings that affect KV but that the
            plug-in cannot see.
        deadline: longest duration of a load, in seconds. A store may take five times as long
            (`STORE_DEADLINES`).
        staging: largest size of the staging memory between tiers and the engine's RAM, in bytes.
    """

    tiers: Tiers
    identity: str = ""
    deadline: Duration
    staging: Size


Options = TypeVar("Options", bound=ObjectOptions)


def read_object_options(
    kind: type[Options], given: Mapping[str, Any], where: str, also_known: Collection[str] = ()
) -> Options:
    """Read the options of a plug-in. Raises one `ConfigError` that reports all problems."""
    options = read_options(kind, given, where, also_known=also_known)
    if not options.tiers:
        raise ConfigError("tiers", [], 'allowed: a list such as ["disk:/nvme/kv:500GiB"]')
    problems = Problems(where)
    for tier in options.tiers:
        with problems:
            if not tier.keeps_blocks:
                raise ConfigError("tiers", str(tier), "allowed: a tier that stores bytes: disk, valkey, s3")
    problems.check()
    return options
