"""Sources of options: given values, the environment, a file.

An option has one name everywhere: in ``kv_connector_extra_config``, as a keyword in Python, as an option of a
command, as ``KVOFFLOAD_NAME`` in the environment, and in a TOML file that ``config`` or ``KVOFFLOAD_CONFIG``
names. A given value overrides the environment, and the environment overrides the file. The meaning of an
option is documented where it is used.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import msgspec

from kvoffload.errors import CombinedConfigError, ConfigError
from kvoffload.settings.read import nearest

PREFIX = "KVOFFLOAD_"

SHARED = ("admission", "policy", "ram", "store", "tiers")
"""Options that engines, replays and sweeps share."""

OF_ENGINES = (
    *SHARED,
    "max_tracker_size",
    "prompt_only",
    "recompute_tokens_per_s",
    "record",
    "record_max_bytes",
    "store_threshold",
    "tier_deadline_s",
    "verify",
)
"""Options that an engine takes from the environment and from a file. vLLM reads others only from its flag."""

_ONE_MEANING = {"admission", "store_threshold", "max_tracker_size"}
"""Options for one rule: if one is given, the others are ignored in the lower layers."""


def gathered(
    given: Mapping[str, Any], names: Collection[str], other_names: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Merge `given` with the environment and the file.

    Args:
        names: options to take from environment and file. The file may hold others, for other readers.
        other_names: further names of options in `given`.

    Raises: `ConfigError` for a file that cannot be read or has an unknown option.
    """
    given = {name: value for name, value in given.items() if value is not None}
    path = given.get("config") or os.environ.get(f"{PREFIX}CONFIG")
    from_file = read_file(path) if path else {}
    environment = {name: text for name in names if (text := os.environ.get(PREFIX + name.upper()))}
    merged = dict(given)
    for layer in (environment, from_file):
        taken = {(other_names or {}).get(name, name) for name in merged}
        if taken & _ONE_MEANING:
            taken |= _ONE_MEANING
        merged |= {name: value for name, value in layer.items() if name in names and name not in taken}
    return merged


def read_file(path: object) -> dict[str, Any]:
    """Read the options of a TOML file. Raises `ConfigError`."""
    if not isinstance(path, (str, Path)):
        raise ConfigError("config", path, "allowed: the path of a TOML file")
    try:
        options: dict[str, Any] = msgspec.toml.decode(Path(path).read_bytes(), type=dict[str, Any])
    except OSError as error:
        raise ConfigError("config", str(path), f"it cannot be read ({error.strerror})") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError("config", str(path), f"it is no TOML ({error})") from None
    problems = [
        ConfigError(
            f"config {name}",
            value,
            f"there is no such option{nearest(name, OF_ENGINES)}; allowed: {', '.join(sorted(OF_ENGINES))}",
        )
        for name, value in options.items()
        if name not in OF_ENGINES
    ]
    if problems:
        raise problems[0] if len(problems) == 1 else CombinedConfigError(str(path), problems)
    return options
