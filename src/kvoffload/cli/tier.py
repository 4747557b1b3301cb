"""``kvoffload tier``: health, speed and contents of a cache server that several machines share."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import click

from kvoffload.cli.fields import argument, option, options_of
from kvoffload.cli.options import FormatOptions, ModelOptions
from kvoffload.cli.output import Terminal, properties, terminal_table
from kvoffload.cli.text import difference_lines
from kvoffload.errors import ConfigError, KVOffloadError, UnavailableError
from kvoffload.pages.page import Table
from kvoffload.settings.read import Count, Positive, Size, convert
from kvoffload.text import duration, percent, size
from kvoffload.tiers.contract import SharedTier
from kvoffload.tiers.kinds.valkey import ValkeyOptions
from kvoffload.tiers.producer_text import summary
from kvoffload.tiers.shared.printable import printable
from kvoffload.tiers.shared.remote_errors import ServerError
from kvoffload.tiers.shared.speeds import Speeds, measure_speeds
from kvoffload.tiers.spec import TierOptions, TierOwner, parse_tier
from kvoffload.tiers.valkey.cluster_map import Address
from kvoffload.tiers.valkey.inspection import (
    NamespaceReport,
    ServerReport,
    check_single,
    inspect_namespace,
    inspect_server,
    nodes_of,
)
from kvoffload.tiers.valkey.resp import Connection
from kvoffload.tiers.valkey.url import ServerURL, parse_url

_TIMEOUT_S = 5.0
_LONG_TIMEOUT_S = 60.0
_KEY_BYTES = 36
_SIZES = "64KiB,512KiB,2MiB"


@dataclass(frozen=True, kw_only=True)
class ServerOptions(FormatOptions):
    url: str = argument()


@dataclass(frozen=True, kw_only=True)
class BenchOptions(ServerOptions, ModelOptions):
    block_bytes: str = option(_SIZES, "Sizes of blocks.", metavar="SIZE,...")
    rounds: Count = option(5, "Rounds of every measurement.")
    block_tokens: Count = option(16, "Tokens in a block; with --model or --bytes-per-token.")
    prefill_tokens_per_s: Positive | None = option(
        None, "Prefill speed of the model in tokens/s; adds the shortest prompt for which reading is faster."
    )

    def check(self) -> None:
        """Refuse a prefill speed if the bytes of a token are unknown. Raises `ConfigError`."""
        if self.prefill_tokens_per_s is not None and self.known_block_bytes(1) is None:
            why = "give --model or --bytes-per-token"
            raise ConfigError("prefill-tokens-per-s", self.prefill_tokens_per_s, why)

    def sizes(self) -> list[int]:
        """Return the block sizes to measure.

        These are the sizes of ``--block-bytes`` if the user gave it, otherwise the model's block size,
        otherwise the default sizes.
        """
        size = self.known_block_bytes(self.block_tokens)
        if self.block_bytes == _SIZES and size is not None:
            return [size]
        return [convert("block-bytes", text, Size) for text in self.block_bytes.split(",")]


@click.group()
def tier() -> None:
    """Check a shared cache server: health, contents, break-even.

    URL has the same form as in `--tier`: valkey://HOST:PORT/NAMESPACE or
    valkey+cluster://HOST:PORT,HOST:PORT/NAMESPACE. User and password are read from
    KVOFFLOAD_VALKEY_USERNAME and KVOFFLOAD_VALKEY_PASSWORD.
    """


@tier.command()
@options_of(ServerOptions)
def ping(options: ServerOptions) -> None:
    """Check that the server at URL can serve as a tier: round trip, version, access rights, memory and
    settings.

    Of a cluster, every master is checked. The exit code is 1 if a server refuses a command that a tier needs.
    """
    server, server_url = _server(options.url)
    with _in_one_line(server, server_url), ExitStack() as stack:
        connections, until = _connected(server, server_url, stack), time.monotonic() + _TIMEOUT_S
        reports = [
            inspect_server(connection, address, server_url.namespace, division, round(server.ttl or 0), until)
            for address, division, connection in connections
        ]
    if options.is_json:
        click.echo(json.dumps([asdict(report) for report in reports], indent=2))
    else:
        for report in reports:
            _print_server(report)
    if not all(report.is_fit for report in reports):
        sys.exit(1)


@tier.command()
@options_of(ServerOptions)
def inspect(options: ServerOptions) -> None:
    """List the blocks in URL's namespace by producer, that is, by model and settings. Reads at most 20,000
    keys of each server.

    Also shows how each producer differs from the first producer, for example `rope_theta: 10000 / 1000000`.

    The user needs the right to call SCAN, STRLEN, TTL and GETRANGE. A tier itself does not need this right.
    """
    server, server_url = _server(options.url)
    with _in_one_line(server, server_url), ExitStack() as stack:
        connections = [connection for _, _, connection in _connected(server, server_url, stack)]
        report = inspect_namespace(connections, server_url.namespace, time.monotonic() + _LONG_TIMEOUT_S)
    if options.is_json:
        click.echo(json.dumps(asdict(report), indent=2))
    else:
        _print_namespace(report)
    if report.refused:
        sys.exit(1)


@tier.command()
@options_of(BenchOptions)
def bench(options: BenchOptions) -> None:
    """Measure probes, verified reads and writes of the tier at URL, and compute the break-even for a model.

    Writes up to 64 MiB in each round. A server keeps these blocks for one minute; a bucket keeps them until
    its expiration rule deletes them. If a server is full, it evicts other blocks to make room for the written
    blocks.
    """
    tier = _shared(options.url)
    speeds = [_speeds(tier, num_bytes, options.rounds) for num_bytes in options.sizes()]
    token_bytes, verdict = options.known_block_bytes(1), None
    if token_bytes is not None and options.prefill_tokens_per_s is not None:
        verdict = _verdict(speeds[-1], token_bytes, options.prefill_tokens_per_s)
    if options.is_json:
        rows = [asdict(speed) for speed in speeds]
        click.echo(json.dumps({"speeds": rows, "verdict": verdict}, indent=2))
    else:
        _print_speeds(speeds, verdict)
    if any(speed.num_wrong for speed in speeds):
        sys.exit(1)


# ---- requests


def _shared(url: str) -> TierOptions:
    """Parse the URL of a shared tier. Raises `ConfigError` for an invalid URL or another kind of tier."""
    options = parse_tier("tier", url)
    if not options.schemes:
        why = "allowed: the URL of a server; for a disk use kvoffload disk inspect PATH"
        raise ConfigError("tier", url, why)
    return options


def _server(url: str) -> tuple[ValkeyOptions, ServerURL]:
    if ":" not in url:
        raise ConfigError(
            "url", url, "allowed: valkey://HOST:PORT/NAMESPACE, valkey+cluster://HOST:PORT,.../NAMESPACE"
        )
    options = _shared(url)
    if not isinstance(options, ValkeyOptions):
        raise ConfigError("tier", str(options), "allowed: valkey://; only bench takes other shared tiers")
    return options, parse_url(options.url)


def _connected(
    options: ValkeyOptions, server_url: ServerURL, stack: ExitStack
) -> list[tuple[Address, int | None, Connection]]:
    """Connect to each server; return (address, division, connection) for each.

    A cluster assigns several divisions of the blocks to a server; `division` is the first of them. Without a
    cluster it is None.
    """
    connect, until = options.connector(), time.monotonic() + _TIMEOUT_S
    nodes: dict[Address, int | None] = dict.fromkeys(server_url.nodes)
    if server_url.is_cluster:
        masters = nodes_of(server_url.nodes, connect, until)
        nodes = {address: divisions[0] for address, divisions in sorted(masters.items())}
    connections = []
    for address, division in nodes.items():
        connection = connect(address, until)
        stack.callback(connection.close)
        if not server_url.is_cluster:
            check_single(connection, server_url.namespace, until)
        connections.append((address, division, connection))
    return connections


@contextmanager
def _in_one_line(options: ValkeyOptions, server_url: ServerURL) -> Iterator[None]:
    """Convert errors of the server and the network to a `ConfigError` or `UnavailableError`, which the
    command prints on one line."""
    try:
        yield
    except ConfigError:
        raise
    except ServerError as error:
        raise ConfigError("tier", str(server_url), options.refusal(error) or str(error)) from None
    except (OSError, KVOffloadError) as error:
        if (refusal := options.refusal(error)) is not None:
            raise ConfigError("tier", str(server_url), refusal) from None
        raise UnavailableError(
            "tier", str(server_url), f"{type(error).__name__}: {printable(error)}"
        ) from None


def _speeds(options: TierOptions, block_bytes: int, rounds: int) -> Speeds:
    changed: dict[str, Any] = {"timeout": _LONG_TIMEOUT_S, "probe_timeout": _LONG_TIMEOUT_S, "ttl": 60.0,
                               "admission": "all"}  # fmt: skip
    changed = {name: value for name, value in changed.items() if hasattr(options, name)}
    tier = replace(options, **changed).open(TierOwner(block_bytes, _KEY_BYTES, "kvoffload tier bench"))
    assert isinstance(tier, SharedTier)
    try:
        return measure_speeds(tier, rounds, _LONG_TIMEOUT_S)
    except UnavailableError as error:
        why = error.allowed
        if why.endswith("blocks were lost"):
            why += "; if the server has evicted them, give it more memory, or give a smaller --block-bytes"
        raise UnavailableError("tier", options.place, why) from None
    finally:
        tier.close()


# ---- output


def _verdict(speeds: Speeds, token_bytes: int, tokens_per_s: float) -> dict[str, Any]:
    """Compare the time to read a prompt's blocks with the time to compute the prompt."""
    read = speeds.get_bytes_per_s / token_bytes
    break_even_bytes = speeds.worth_from_bytes(token_bytes * tokens_per_s)
    from_tokens = None if break_even_bytes is None else max(1, round(break_even_bytes / token_bytes))
    rates = f"the tier reads {read:,.0f} tokens/s, the model computes {tokens_per_s:,.0f}"
    needed = f"reading pays above {token_bytes * tokens_per_s / 1e9:.3g} GB/s"
    verdict = "Not worth it" if from_tokens is None else f"Worth it from {from_tokens:,} tokens on"
    text = f"{verdict}: {rates}; {needed}."
    return {"worth_it": from_tokens is not None, "from_tokens": from_tokens, "bytes_per_token": token_bytes,
            "needed_bytes_per_s": token_bytes * tokens_per_s, "text": text}  # fmt: skip


def _print_speeds(speeds: list[Speeds], verdict: dict[str, Any] | None) -> None:
    rows = [
        (
            size(speed.block_bytes),
            duration(speed.probe_s),
            duration(speed.first_s),
            f"{speed.get_bytes_per_s / 1e9:.2f} GB/s",
            f"{speed.put_bytes_per_s / 1e9:.2f} GB/s",
        )
        for speed in speeds
    ]
    headings = ("block#", "64 probes#", "read one#", "read#", "write#")
    Terminal().print(terminal_table(Table("", headings, rows)))
    wrong = sum(speed.num_wrong for speed in speeds)
    click.echo(f"{wrong:,} blocks were WRONG" if wrong else "Every block was verified.")
    if verdict is not None:
        click.echo(verdict["text"])


def _print_server(report: ServerReport) -> None:
    memory = None
    if report.used_bytes is not None and report.limit_bytes is not None:
        limit = f"of {size(report.limit_bytes)}" if report.limit_bytes else "without a limit"
        memory = f"{size(report.used_bytes)} {limit}"
    looked_up = (report.hits or 0) + (report.misses or 0)
    rows = {
        "server": report.version,
        "role": report.role and f"{report.role}, {report.num_replicas or 0} replicas",
        "round trip": duration(report.round_trip_s),
        "memory": memory,
        "eviction policy": report.eviction_policy,
        "saves to a disk": report.persistence,
        "keys": report.num_names is not None and f"{report.num_names:,}",
        "evicted": report.evicted is not None and f"{report.evicted:,}",
        "hits": looked_up and f"{percent((report.hits or 0) / looked_up)} of {looked_up:,}",
    }
    Terminal().print(terminal_table(properties(report.address, rows.items())))
    for line in report.refused:
        click.echo(f"  REFUSED  {line}")
    for line in report.warnings:
        click.echo(f"  warning  {line}")
    click.echo(f"  The server {'can' if report.is_fit else 'cannot'} be a tier.")


def _print_namespace(report: NamespaceReport) -> None:
    click.echo(f"{report.namespace}: {report.looked_at:,} of {report.num_names:,} keys read")
    if report.refused:
        click.echo(f"  REFUSED  {report.refused}")
    for producer in report.producers:
        block_bytes, first = producer.block_bytes, report.producers[0]
        differs = difference_lines(first.about, producer.about)
        rows = {
            "model": producer.about and summary(producer.about),
            "blocks": f"{producer.in_epoch:,}" + (f", {size(block_bytes)} each" if block_bytes else ""),
            "from before a reset": producer.older and f"{producer.older:,}",
            "time to live": producer.with_end is not None and ("yes" if producer.with_end else "no"),
            f"differs from {first.producer[:8]}": "\n".join(differs),
        }
        title = f"producer {producer.producer}"
        Terminal().print(terminal_table(properties(title, rows.items())))
