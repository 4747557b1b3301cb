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

from kvoffload.config import nearest
from kvoffload.errors import ConfigError

PREFIX = "KVOFFLOAD_"

SHARED = ("admission", "policy", "ram", "store", "tiers")
"""Options of an engine that a replay and a sweep have too."""

_OF_ENGINES = (
    "block_size",
    "blocks_per_chunk",
    "max_tracker_size",
    "prompt_only",
    "recompute_tokens_per_s",
    "self_describing_kv_events",
    "store_threshold",
    "tier_deadline_s",
    "verify",
)


def gathered(
    given: Mapping[str, Any], names: Collection[str], other_names: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """`given`, and what environment and file say beside it.

    Args:
        names: the options that are asked for. A file may hold others, of what else reads it.
        other_names: further names of options in `given`.

    Raises: `ConfigError` for a file that cannot be read or has an option that nothing knows.
    """
    meant = {(other_names or {}).get(name, name) for name, value in given.items() if value is not None}
    path = given.get("config") or os.environ.get(f"{PREFIX}CONFIG")
    beside = read_file(Path(path)) if path else {}
    for name in names:
        if text := os.environ.get(PREFIX + name.upper()):
            beside[name] = text
    return {**{name: value for name, value in beside.items() if name in names and name not in meant}, **given}


def read_file(path: Path) -> dict[str, Any]:
    """The options in a TOML file. Raises `ConfigError`."""
    try:
        found: dict[str, Any] = msgspec.toml.decode(path.read_bytes(), type=dict[str, Any])
    except OSError as error:
        raise ConfigError("config", str(path), f"it cannot be read ({error.strerror})") from None
    except msgspec.MsgspecError as error:
        raise ConfigError("config", str(path), f"it is no TOML ({error})") from None
    known = (*SHARED, *_OF_ENGINES)
    for name, value in found.items():
        if name not in known:
            raise ConfigError(
                f"config {name}", value, f"there is no such option{nearest(name, known)}; "
                f"allowed: {', '.join(sorted(known))}"
            )  # fmt: skip
    return found
