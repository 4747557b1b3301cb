"""``kvoffload vllm-config``: print the flag for ``vllm serve``."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import click
from click.core import ParameterSource

from kvoffload.cli.fields import CONFIG, option, options_of
from kvoffload.cli.options import Store, warn, warn_of_small_tiers
from kvoffload.core.plans import ON_DEVICE_EVICTION
from kvoffload.errors import CombinedConfigError, ConfigError
from kvoffload.integrations.vllm.shared.options import VERIFY, VLLMS_NAMES, parse_options
from kvoffload.settings.layers import OF_ENGINES, PREFIX, gathered
from kvoffload.settings.read import OneOf, Positive, parse_size
from kvoffload.text import size
from kvoffload.tiers.spec import SizedTierOptions

_HOME = "kvoffload.integrations.vllm"
_OPTIONS = {"cpu_bytes_to_use": "ram", "eviction_policy": "policy", "offload_prompt_only": "all_tokens"}
"""Mapping: vLLM's name of an option -> our name."""
_PRINTED = {"ram": "cpu_bytes_to_use", "policy": "eviction_policy"}
"""Mapping: our name of an option -> the name in the printed flag."""
_FLAGS = {"tiers": "tier"}
_LEAST_RAM_BYTES = 2**20
"""Smallest accepted size of RAM. If the number is smaller, the user probably forgot the unit."""
_MOST_RAM_BYTES = 64 * 2**40
"""Largest size of RAM that is accepted without a warning."""


@dataclass(frozen=True, kw_only=True)
class VLLMConfigOptions:
    ram: str = option(help="RAM for blocks, of all workers together: 64GiB.", setting="ram")
    policy: str | None = option(
        None, "Eviction policy: see `kvoffload policies`.  [default: lru]", setting="policy"
    )
    admission: str | None = option(
        None, "Admission rule: all, reuse:2, ...  [default: all]", setting="admission"
    )
    store: Store | None = option(
        None, "Moment at which blocks are stored.  [default: on-compute]", setting="store"
    )
    verify: Annotated[str, OneOf(VERIFY)] | None = option(
        None,
        "always: verify blocks of RAM and tiers; tiers or never: only of tiers.  "
        "[default: tiers; with shared RAM always]",
    )
    tiers: tuple[str, ...] = option(
        (),
        "Tier behind RAM: a disk, with ,policy=NAME and ,admission=RULE, or a shared server: "
        "valkey://HOST/NAMESPACE, s3://BUCKET/PREFIX. May be repeated.",
        "--tiers",
        "--tier",
        setting="tiers",
        metavar="disk:PATH:CAPACITY",
    )
    all_tokens: bool = option(False, "Also store generated tokens; by default vLLM stores prompts only.")
    blocks_per_chunk: int | None = option(None, "Engine blocks per block of RAM.  [default: 1]")
    connector: bool = option(False, "Use KVOffloadConnector, which looks up whole prefixes at once.")
    tier_deadline_s: Positive | None = option(
        None, "Longest wait of a request for tiers, in seconds.  [default: 2]"
    )
    recompute_tokens_per_s: Positive | None = option(
        None, "Prefill speed of the engine in tokens/s: slower reads of tiers do not start."
    )
    audit: str | None = option(
        None,
        "Compute some requests although RAM has their blocks, and compare both.",
        metavar="share=0.001,first=64",
    )
    record: str | None = option(
        None,
        "Record the engine's requests as a trace; with ,calls also the calls of the manager.",
        metavar="PATH.jsonl[,calls]",
    )
    record_max_bytes: str | None = option(
        None,
        "Size at which the trace ends. Of the calls, the newest are kept.  [default: 1GiB]",
        metavar="SIZE",
    )
    live_settings: str | None = option(
        None,
        "JSON file with options that the running engine takes: policy, ram, tenants.",
        metavar="PATH",
    )
    tenants: str | None = option(
        None, 'Quotas of tenants: {"a": {"min": "10GiB", "max": "40GiB"}}.', metavar="JSON"
    )
    what_if: tuple[str, ...] = option(
        (),
        "Estimate the hit ratio of another setting of RAM while serving: policy=hazard, capacity=2, ... "
        "May be repeated.",
        metavar="SETTING",
    )
    what_if_sample: int | None = option(None, "Sample one block in N for --what-if.")
    form: Annotated[str, OneOf(("flag", "json"))] = option("flag", None, "--format")


@click.command("vllm-config")
@options_of(VLLMConfigOptions)
def vllm_config(options: VLLMConfigOptions) -> None:
    """Print the flag that makes vLLM offload through kvoffload. The flag is checked and quoted for a shell.

    `--store on-device-eviction` and `--record` need `--connector`, so they turn on `--connector`. As in vLLM,
    RAM is the total of all workers of one engine, on all machines.
    """
    typed = vars(options) | {
        "tiers": list(options.tiers) or None,
        "all_tokens": False if options.all_tokens else None,  # the opposite of `offload_prompt_only`
        "what_if": ";".join(options.what_if) or None,
    }
    printed = _PRINTED | {"all_tokens": "offload_prompt_only"}
    given = {
        printed.get(name, name): value
        for name, value in typed.items()
        if value is not None and name not in ("connector", "form") and not _is_default(name)
    }
    # Options that are set only in the file or the environment are added to the flag.
    merged = gathered({**given, "config": click.get_current_context().meta[CONFIG]}, OF_ENGINES, VLLMS_NAMES)
    given |= {_PRINTED.get(name, name): value for name, value in merged.items() if name != "config"}
    try:
        config = transfer_config(given, connector=options.connector)
    except CombinedConfigError as several:
        problems = [_as_typed(problem) for problem in several.problems]
        raise (problems[0] if len(problems) == 1 else CombinedConfigError("vllm-config", problems)) from None
    except ConfigError as problem:
        raise _as_typed(problem) from None
    _warn_of_sizes(config["kv_connector_extra_config"])
    click.echo(json.dumps(config, indent=2) if options.form == "json" else as_flag(config))


def _warn_of_sizes(given: Mapping[str, Any]) -> None:
    """Warn of sizes that are valid but probably have a wrong unit."""
    options = parse_options(given)
    typed = size(options.ram_bytes)
    if options.ram_bytes > _MOST_RAM_BYTES:
        warn([f"ram: {typed} is more than {size(_MOST_RAM_BYTES)}, and hosts have less: is the unit right?"])
    sizes = {
        str(tier): parse_size("tiers", tier.capacity)
        for tier in options.tiers
        if isinstance(tier, SizedTierOptions) and tier.capacity.strip()[-1:].isalpha()
    }
    warn_of_small_tiers(typed, options.ram_bytes, sizes)


def _is_default(name: str) -> bool:
    """Return True if the option's value comes from the ``--config`` file or the environment.

    The result is False for ``tiers``, because the printed flag must contain the texts into which the command
    has converted the tiers.
    """
    source = click.get_current_context().get_parameter_source(name)
    return source is ParameterSource.DEFAULT_MAP and name != "tiers"


def _as_typed(problem: ConfigError) -> ConfigError:
    """Replace the option's name in an error by the name of the source of the value: flag, environment
    variable or file."""
    name, subfield = re.fullmatch(r"(\w*)(.*)", problem.field, re.DOTALL).groups()  # type: ignore[union-attr]
    name = _OPTIONS.get(name, name)
    as_text = " " + subfield[1:] if subfield.startswith(".") else subfield  # --audit share=2
    context, variable = click.get_current_context(), PREFIX + name.upper()
    if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
        return ConfigError(
            f"--{_FLAGS.get(name, name).replace('_', '-')}{as_text}", problem.value, problem.allowed
        )
    if os.environ.get(variable):
        name, subfield = variable, as_text
    elif name in OF_ENGINES and (path := context.meta[CONFIG] or os.environ.get(f"{PREFIX}CONFIG")):
        name = f"{path}: {name}"
    return ConfigError(name + subfield, problem.value, problem.allowed)


def transfer_config(options: Mapping[str, Any], *, connector: bool) -> dict[str, Any]:
    """Build the value of ``--kv-transfer-config`` from options in vLLM's names. Raises `ConfigError` for
    invalid options.
    """
    extra = {"spec_name": "KVOffloadSpec", "spec_module_path": _HOME, **options}
    if parse_options(extra).ram_bytes < _LEAST_RAM_BYTES:
        raise ConfigError("ram", options["cpu_bytes_to_use"], "allowed: a size such as 64GiB")
    flag: dict[str, Any] = {"kv_connector": "OffloadingConnector"}
    if connector or options.get("store") == ON_DEVICE_EVICTION or options.get("record") is not None:
        flag = {"kv_connector": "KVOffloadConnector", "kv_connector_module_path": f"{_HOME}.connector"}
    # Set, because by default vLLM fails a request whose blocks could not be loaded.
    flag |= {"kv_role": "kv_both", "kv_load_failure_policy": "recompute", "kv_connector_extra_config": extra}
    return flag


def as_flag(config: Mapping[str, Any]) -> str:
    """Format the flag, quoted for a shell."""
    return f"--kv-transfer-config {shlex.quote(json.dumps(config, separators=(',', ':')))}"
