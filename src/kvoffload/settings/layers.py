"""Where options come from, for everything that takes some: what was given, the environment, a file.

An option has one name everywhere: in ``kv_connector_extra_config``, as a keyword in Python, as an option of a
command, as ``KVOFFLOAD_NAME`` in the environment, and in a TOML file that ``config`` or ``KVOFFLOAD_CONFIG``
names. What is given wins over the environment, and that over the file. What an option means stands where it
is used.
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
"""Options of an engine that a replay and a sweep have too."""

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
"""Options that an engine takes from the environment and from a file. vLLM reads some others for itself, and
only in its flag."""

_ONE_MEANING = {"admission", "store_threshold", "max_tracker_size"}
"""Where one of these is given, the others are not taken from elsewhere."""


def gathered(
    given: Mapping[str, Any], names: Collection[str], other_names: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """`given`, and what environment and file say beside it.

    Args:
        names: the options that are asked for. A file may hold others, of what else reads it.
        other_names: further names of options in `given`.

    Raises: `ConfigError` for a file that cannot be read or has an option that nothing knows.
    """
    said = {name: value for name, value in given.items() if value is not None}
    path = said.get("config") or os.environ.get(f"{PREFIX}CONFIG")
    from_file = read_file(path) if path else {}
    environment = {name: text for name in names if (text := os.environ.get(PREFIX + name.upper()))}
    found: dict[str, Any] = {}
    for layer in (said, environment, from_file):
        meant = {(other_names or {}).get(name, name) for name in found}
        if meant & _ONE_MEANING:
            meant |= _ONE_MEANING
        found |= {
            name: value
            for name, value in layer.items()
            if (layer is said or name in names) and name not in meant
        }
    return found


def read_file(path: object) -> dict[str, Any]:
    """The options in a TOML file. Raises `ConfigError`."""
    if not isinstance(path, (str, Path)):
        raise ConfigError("config", path, "allowed: the path of a TOML file")
    try:
        found: dict[str, Any] = msgspec.toml.decode(Path(path).read_bytes(), type=dict[str, Any])
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
        for name, value in found.items()
        if name not in OF_ENGINES
    ]
    if problems:
        raise problems[0] if len(problems) == 1 else CombinedConfigError(str(path), problems)
    return found
