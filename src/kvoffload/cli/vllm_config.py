"""``kvoffload vllm-config``: the flag to paste behind ``vllm serve``."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

import click

from kvoffload.cli.options import CONFIG, configured
from kvoffload.core.plans import ON_DEVICE_EVICTION, STORES
from kvoffload.errors import ConfigError
from kvoffload.integrations.vllm.shared.options import VERIFY, VLLMS_NAMES, parse_options
from kvoffload.settings.layers import OF_ENGINES, gathered

_HOME = "kvoffload.integrations.vllm"
_LEAST_RAM_BYTES = 2**20
"""Less is a size without its unit."""


@click.command("vllm-config")
@configured(ram="ram", policy="policy", admission="admission", store="store", tiers="tiers")
@click.option("--ram", required=True, help="RAM for blocks, all workers together: 64GiB.")
@click.option("--policy", help="Which blocks leave: see `kvoffload policies`.  [default: lru]")
@click.option("--admission", help="Which blocks may enter: all, reuse:2, ...  [default: all]")
@click.option("--store", type=click.Choice(STORES), help="When blocks are stored.  [default: on-compute]")
@click.option("--verify", type=click.Choice(VERIFY), help="Which blocks are verified.  [default: tiers]")
@click.option("--tiers", "--tier", "tiers", multiple=True, metavar="disk:PATH:CAPACITY",
              help="A disk behind RAM; takes ,policy=NAME and ,admission=RULE. "
              "Or what machines share: valkey://HOST/NAMESPACE, s3://BUCKET/PREFIX.")  # fmt: skip
@click.option("--all-tokens", is_flag=True, help="Store what was generated, too; vLLM leaves it out.")
@click.option("--blocks-per-chunk", type=int, help="Engine blocks in one block of RAM.  [default: 1]")
@click.option("--connector", is_flag=True, help="Use KVOffloadConnector: prefixes are looked up at once.")
@click.option("--record", metavar="PATH.jsonl", help="Record what the engine is asked, as a trace.")
@click.option("--format", "form", type=click.Choice(["flag", "json"]), default="flag", show_default=True)
def vllm_config(
    ram: str,
    policy: str | None,
    admission: str | None,
    store: str | None,
    verify: str | None,
    tiers: tuple[str, ...],
    all_tokens: bool,
    blocks_per_chunk: int | None,
    connector: bool,
    record: str | None,
    form: str,
) -> None:
    """Print the flag that makes vLLM offload through kvoffload, checked and quoted for a shell.

    Storing on-device-eviction and a recording need the connector, and turn it on. On more than one
    machine RAM is what all workers of one engine use together, as in vLLM.
    """
    given = {
        "cpu_bytes_to_use": ram,
        "eviction_policy": policy,
        "admission": admission,
        "store": store,
        "verify": verify,
        "tiers": list(tiers) or None,
        "offload_prompt_only": False if all_tokens else None,
        "blocks_per_chunk": blocks_per_chunk,
        "record": record,
    }
    said = {name: value for name, value in given.items() if value is not None}
    # Also what only the file or the environment says: the flag has all of it.
    beside = gathered({**said, "config": click.get_current_context().meta[CONFIG]}, OF_ENGINES, VLLMS_NAMES)
    said |= {name: value for name, value in beside.items() if name != "config"}
    config = transfer_config(said, connector=connector)
    click.echo(json.dumps(config, indent=2) if form == "json" else as_flag(config))


def transfer_config(options: Mapping[str, Any], *, connector: bool) -> dict[str, Any]:
    """What ``--kv-transfer-config`` takes, for these options in vLLM's names. Raises `ConfigError`."""
    extra = {"spec_name": "KVOffloadSpec", "spec_module_path": _HOME, **options}
    if parse_options(extra).ram_bytes < _LEAST_RAM_BYTES:
        raise ConfigError("ram", options["cpu_bytes_to_use"], "allowed: a size such as 64GiB")
    flag: dict[str, Any] = {"kv_connector": "OffloadingConnector"}
    if connector or options.get("store") == ON_DEVICE_EVICTION or options.get("record") is not None:
        flag = {"kv_connector": "KVOffloadConnector", "kv_connector_module_path": f"{_HOME}.connector"}
    # vLLM's default ends a request whose blocks could not be loaded with an error.
    flag |= {"kv_role": "kv_both", "kv_load_failure_policy": "recompute", "kv_connector_extra_config": extra}
    return flag


def as_flag(config: Mapping[str, Any]) -> str:
    """The flag, quoted for a shell."""
    return f"--kv-transfer-config {shlex.quote(json.dumps(config, separators=(',', ':')))}"
