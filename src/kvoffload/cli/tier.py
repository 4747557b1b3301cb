"""``kvoffload tier``: whether a server that machines share is well, how fast it is, and what is in it."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvoffload.cli.options import in_form, sized
from kvoffload.cli.text import difference_lines
from kvoffload.errors import ConfigError, KVOffloadError, UnavailableError
from kvoffload.model import kv_bytes as models
from kvoffload.settings.read import parse_size
from kvoffload.text import duration, percent, size
from kvoffload.tiers.contract import SharedTier
from kvoffload.tiers.kinds.valkey import ValkeyOptions
from kvoffload.tiers.producer_text import summary
from kvoffload.tiers.shared.errors import ServerError
from kvoffload.tiers.shared.printable import printable
from kvoffload.tiers.shared.speeds import Speeds, measure_speeds
from kvoffload.tiers.spec import TierOptions, TierOwner, parse_tier
from kvoffload.tiers.valkey.cluster_map import Address
from kvoffload.tiers.valkey.inspection import (
    NamespaceReport,
    ServerReport,
    look_at,
    look_into,
    nodes_of,
)
from kvoffload.tiers.valkey.resp import Connection
from kvoffload.tiers.valkey.url import ServerURL, parse_url

_PATIENCE_S = 5.0
_SLOW_S = 60.0
_KEY_BYTES = 36
_SIZES = "64KiB,512KiB,2MiB"
_url = click.argument("url")


@click.group()
def tier() -> None:
    """Ask a server that machines share: is it well, what is in it, is it worth it?

    URL is as `--tier` has it: valkey://HOST:PORT/NAMESPACE, valkey+cluster://HOST:PORT,HOST:PORT/NAMESPACE.
    User and password stand in KVOFFLOAD_VALKEY_USERNAME and KVOFFLOAD_VALKEY_PASSWORD.
    """


@tier.command()
@_url
@in_form
def ping(url: str, form: str) -> None:
    """Say whether URL can be a tier: round trip, version, rights, memory, and settings that do not suit it.

    Of a cluster each master. Exit code 1 if something that a tier needs is refused.
    """
    options, place = _server(url)
    with _in_one_line(place), ExitStack() as stack:
        connections, until = _connected(options, place, stack), time.monotonic() + _PATIENCE_S
        reports = [
            look_at(connection, address, place.namespace, division, round(options.ttl or 0), until)
            for address, division, connection in connections
        ]
    if form == "json":
        click.echo(json.dumps([asdict(report) for report in reports], indent=2))
    else:
        for report in reports:
            _print_server(report)
    if not all(report.is_fit for report in reports):
        sys.exit(1)


@tier.command()
@_url
@in_form
def inspect(url: str, form: str) -> None:
    """Say what is in the namespace of URL, model by model, from at most 20,000 names of each server.

    Of several producers also how each differs from the first, as in `rope_theta: 10000 / 1000000`.

    Needs the right to SCAN, STRLEN, TTL and GETRANGE, which a tier does not.
    """
    options, place = _server(url)
    with _in_one_line(place), ExitStack() as stack:
        connections = [connection for _, _, connection in _connected(options, place, stack)]
        report = look_into(connections, place.namespace, time.monotonic() + _SLOW_S)
    if form == "json":
        click.echo(json.dumps(asdict(report), indent=2))
    else:
        _print_namespace(report)
    if report.refused:
        sys.exit(1)


@tier.command()
@_url
@click.option("--block-bytes", metavar="SIZE,...", help=f"Blocks of these sizes.  [default: {_SIZES}]")
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True)
@sized
@click.option("--block-tokens", type=click.IntRange(min=1), default=16, show_default=True,
              help="Tokens in a block; with --model or --bytes-per-token.")  # fmt: skip
@click.option("--prefill-tokens-per-s", type=click.FloatRange(min=0, min_open=True), metavar="X",
              help="How fast the model computes: is a read worth it, and from where on?")  # fmt: skip
@in_form
def bench(
    url: str,
    *,
    block_bytes: str | None,
    rounds: int,
    model: str | None,
    kv_cache_dtype: str,
    bytes_per_token: str | None,
    block_tokens: int,
    prefill_tokens_per_s: float | None,
    form: str,
) -> None:
    """Measure probes, verified reads and writes through URL, and say whether that is worth it for a model.

    It writes up to 64 MiB, which a full server makes room for, and which it forgets after a minute.
    """
    token_bytes = models.block_bytes(model, bytes_per_token, 1, kv_cache_dtype)
    if prefill_tokens_per_s is not None and token_bytes is None:
        raise ConfigError("prefill-tokens-per-s", prefill_tokens_per_s, "give --model or --bytes-per-token")
    if block_bytes is None and token_bytes is not None:
        sizes = [token_bytes * block_tokens]
    else:
        sizes = [parse_size("block-bytes", text) for text in (block_bytes or _SIZES).split(",")]
    options = _shared(url)
    found = [_speeds(options, num_bytes, rounds) for num_bytes in sizes]
    verdict = None
    if token_bytes is not None and prefill_tokens_per_s is not None:
        verdict = _verdict(found[-1], token_bytes, prefill_tokens_per_s)
    if form == "json":
        click.echo(json.dumps({"speeds": [asdict(one) for one in found], "verdict": verdict}, indent=2))
    else:
        _print_speeds(found, verdict)
    if any(one.num_wrong for one in found):
        sys.exit(1)


# ---- asking


def _shared(url: str) -> TierOptions:
    """The options of a tier that machines share. Raises `ConfigError`."""
    options = parse_tier("tier", url)
    if not options.schemes:
        why = "this is for servers, by URL; what is in a disk says kvoffload disk inspect PATH"
        raise ConfigError("tier", url, why)
    return options


def _server(url: str) -> tuple[ValkeyOptions, ServerURL]:
    options = _shared(url)
    if not isinstance(options, ValkeyOptions):
        raise ConfigError("tier", str(options), "this is for valkey://; bench is for all that machines share")
    return options, parse_url(options.url)


def _connected(
    options: ValkeyOptions, place: ServerURL, stack: ExitStack
) -> list[tuple[Address, int | None, Connection]]:
    """A connection to each server, with one of its divisions in a cluster."""
    connect, until = options.connector(), time.monotonic() + _PATIENCE_S
    nodes: dict[Address, int | None] = dict.fromkeys(place.nodes)
    if place.is_cluster:
        found = nodes_of(place.nodes, connect, until)
        nodes = {address: divisions[0] for address, divisions in sorted(found.items())}
    connections = []
    for address, division in nodes.items():
        connection = connect(address, until)
        stack.callback(connection.close)
        connections.append((address, division, connection))
    return connections


@contextmanager
def _in_one_line(place: ServerURL) -> Iterator[None]:
    """What a server or the network says, as an error of the user's."""
    try:
        yield
    except ConfigError:
        raise
    except ServerError as error:
        raise ConfigError("tier", str(place), str(error)) from None
    except (OSError, KVOffloadError) as error:
        raise UnavailableError("tier", str(place), f"{type(error).__name__}: {printable(error)}") from None


def _speeds(options: TierOptions, block_bytes: int, rounds: int) -> Speeds:
    patient: dict[str, Any] = {"timeout": _SLOW_S, "probe_timeout": _SLOW_S, "ttl": 60.0, "admission": "all"}
    opened = replace(options, **{name: value for name, value in patient.items() if hasattr(options, name)})
    used = opened.open(TierOwner(block_bytes, _KEY_BYTES, "kvoffload tier bench"))
    assert isinstance(used, SharedTier)
    try:
        return measure_speeds(used, rounds, _SLOW_S)
    finally:
        used.close()


# ---- saying


def _verdict(speeds: Speeds, token_bytes: int, tokens_per_s: float) -> dict[str, Any]:
    """Whether reading is worth it, beside computing."""
    read = speeds.get_bytes_per_s / token_bytes
    enough = speeds.worth_from_bytes(token_bytes * tokens_per_s)
    from_tokens = None if enough is None else max(1, round(enough / token_bytes))
    rates = f"it brings {read:,.0f} tokens/s, and the model computes {tokens_per_s:,.0f}"
    needed = f"{token_bytes * tokens_per_s / 1e9:.3g} GB/s"
    text = (
        f"Not worth it: {rates}; it would have to read {needed}." if from_tokens is None else
        f"Worth it from {from_tokens:,} tokens on: {rates}; it has to read {needed}."
    )  # fmt: skip
    return {"worth_it": from_tokens is not None, "from_tokens": from_tokens, "bytes_per_token": token_bytes,
            "needed_bytes_per_s": token_bytes * tokens_per_s, "text": text}  # fmt: skip


def _print_speeds(found: list[Speeds], verdict: dict[str, Any] | None) -> None:
    table = Table(box=box.SIMPLE_HEAD)
    for column in ("block", "64 probes", "read one", "read", "write"):
        table.add_column(column, justify="right")
    for one in found:
        table.add_row(
            size(one.block_bytes),
            duration(one.probe_s),
            duration(one.first_s),
            f"{one.get_bytes_per_s / 1e9:.2f} GB/s",
            f"{one.put_bytes_per_s / 1e9:.2f} GB/s",
        )
    Console().print(table)
    wrong = sum(one.num_wrong for one in found)
    click.echo(f"{wrong:,} blocks were WRONG" if wrong else "Every block was verified.")
    if verdict is not None:
        click.echo(verdict["text"])


def _print_server(report: ServerReport) -> None:
    memory = None
    if report.used_bytes is not None and report.limit_bytes is not None:
        limit = size(report.limit_bytes) if report.limit_bytes else "any"
        memory = f"{size(report.used_bytes)} of {limit}"
    looked_up = (report.hits or 0) + (report.misses or 0)
    rows = {
        "server": report.version,
        "role": report.role and f"{report.role}, {report.num_replicas or 0} replicas",
        "round trip": duration(report.round_trip_s),
        "memory": memory,
        "when it is full": report.eviction_policy,
        "saves to a disk": report.persistence,
        "names": report.num_names is not None and f"{report.num_names:,}",
        "evicted": report.evicted is not None and f"{report.evicted:,}",
        "hits": looked_up and f"{percent((report.hits or 0) / looked_up)} of {looked_up:,}",
    }
    _print_rows(report.address, rows)
    for line in report.refused:
        click.echo(f"  REFUSED  {line}")
    for line in report.warnings:
        click.echo(f"  warning  {line}")
    click.echo("  It can be a tier." if report.is_fit else "  It cannot be a tier.")


def _print_namespace(report: NamespaceReport) -> None:
    click.echo(f"{report.namespace}: {report.looked_at:,} of {report.num_names:,} names looked at")
    if report.refused:
        click.echo(f"  REFUSED  {report.refused}")
    for producer in report.producers:
        block_bytes, first = producer.block_bytes, report.producers[0]
        differs = difference_lines(first.about, producer.about)
        rows = {
            "model": producer.about and summary(producer.about),
            "blocks": f"{producer.in_epoch:,}" + (f", {size(block_bytes)} each" if block_bytes else ""),
            "from before a reset": producer.older and f"{producer.older:,}",
            "forgotten by time": producer.with_end is not None and ("yes" if producer.with_end else "no"),
            f"differs from {first.producer[:8]}": "\n".join(differs),
        }
        _print_rows(f"producer {producer.producer}", rows)


def _print_rows(title: str, rows: dict[str, Any]) -> None:
    # As `Text`, since what a server says may look like rich's markup.
    table = Table(title=Text(title), title_justify="left", box=box.SIMPLE_HEAD, show_header=False)
    for name, value in rows.items():
        if value:
            table.add_row(Text(name), Text(str(value)))
    Console().print(table)
