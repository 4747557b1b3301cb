"""Merges options from three sources: given values, environment variables, and a TOML file.

An option has the same name in ``kv_connector_extra_config``, in Python, on a command line and in the TOML
file; its environment variable is ``KVOFFLOAD_NAME``. The option ``config`` or the variable
``KVOFFLOAD_CONFIG`` gives the path of the file. Environment variables override the file, and options that are
given in any other way override both. Each option is documented where it is used.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import msgspec

from kvoffload.errors import ConfigError, Problems
from kvoffload.settings.paths import expanded
from kvoffload.settings.read import unknown_options

PREFIX = "KVOFFLOAD_"
_NEARLY = 0.8

SHARED = ("admission", "policy", "ram", "store", "tiers")
"""Options that engines, replays and sweeps have in common."""

OF_ENGINES = (
    *SHARED,
    "max_tracker_size",
    "prompt_only",
    "recompute_tokens_per_s",
    "record",
    "record_max_bytes",
    "store_threshold",
    "tenants",
    "tier_deadline_s",
    "verify",
    "what_if",
    "what_if_sample",
)
"""Options that the environment and the TOML file may set for an engine. Others must be given directly."""

_ONE_MEANING = {"admission", "store_threshold", "max_tracker_size"}
"""Options that together set the admission rule, so they must come from the same source.

If a source sets at least one of them, all of them are ignored in sources of lower priority.
"""


def gathered(
    given: Mapping[str, Any], names: Collection[str], other_names: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Merge options: `given` overrides environment variables, and these override the TOML file.

    Args:
        given: options that were given directly. An option whose value is None counts as not given.
        names: options that this caller accepts from the environment and the file. The file may also contain
            other options of `OF_ENGINES`, which are ignored.
        other_names: dict of aliases that `given` may use: alias -> option name.

    Raises: `ConfigError` if the file cannot be read or contains an unknown option, or if an environment
    variable looks like a misspelt option.
    """
    _check_environment()
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


def _check_environment() -> None:
    """Raise `ConfigError` for environment variables that look like misspelt options.

    Other unknown variables with the prefix ``KVOFFLOAD_`` are ignored.
    """
    known = {name.upper() for name in (*OF_ENGINES, "config")}
    names = (name.removeprefix(PREFIX) for name in os.environ if name.startswith(PREFIX))
    for name in names:
        near = difflib.get_close_matches(name, known, 1, cutoff=_NEARLY)
        if near and name not in known:
            raise ConfigError("environment", PREFIX + name, f"no option; did you mean {PREFIX}{near[0]}?")


def read_file(path: object) -> dict[str, Any]:
    """Read the options in a TOML file. Raises `ConfigError` if that fails or if an option is unknown."""
    if not isinstance(path, (str, Path)):
        raise ConfigError("config", path, "allowed: the path of a TOML file")
    try:
        options: dict[str, Any] = msgspec.toml.decode(
            Path(expanded("config", str(path))).read_bytes(), type=dict[str, Any]
        )
    except OSError as error:
        raise ConfigError("config", str(path), f"it cannot be read ({error.strerror})") from None
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ConfigError("config", str(path), f"it is not a TOML file ({error})") from None
    problems = Problems(str(path))
    problems.found += unknown_options(options, sorted(OF_ENGINES), "config ")
    problems.check()
    return options
