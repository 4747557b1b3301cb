"""``kvoffload replay``: run a trace through the offloading manager, with real bytes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import click
from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from kvoffload.cli.options import (
    configured,
    decoding,
    in_blocks,
    in_form,
    queueing,
    quietly,
    sized,
    skipping_bad_lines,
)
from kvoffload.cli.replay_table import table
from kvoffload.core.admission import create_admission
from kvoffload.core.plans import ON_COMPUTE, STORES
from kvoffload.core.policy import POLICIES
from kvoffload.errors import ConfigError, Problems
from kvoffload.model import kv_bytes as models
from kvoffload.replay.data import DataPlane
from kvoffload.replay.ends import check_decode_speed
from kvoffload.replay.faults import parse_injection
from kvoffload.replay.keys import KEY_BYTES
from kvoffload.replay.queue import check_queue
from kvoffload.replay.replay import Replay, ReplayConfig, slots_needed
from kvoffload.settings.read import parse_capacity, parse_size
from kvoffload.sweep.grid import ANY_TRACE
from kvoffload.sweep.grid import device_blocks as device_cache
from kvoffload.text import size as format_size
from kvoffload.tiers.memory import available_bytes
from kvoffload.tiers.spec import TierOptions, parse_tiers
from kvoffload.traces.sources import block_tokens_of, load_trace
from kvoffload.traces.trace import Trace


@click.command()
@click.argument("trace", default="chat")
@configured(policy="policy", admission="admission", store="store", ram="capacity", tiers="tiers")
@click.option(
    "--policy", default="lru", show_default=True, help="A name (a wrong one lists all), or module:Class."
)
@click.option("--admission", default="all", show_default=True, help="all, reuse:N or tinylfu.")
@click.option(
    "--capacity",
    default="5%",
    show_default=True,
    help="Of the tier: 5000 (blocks), 5% (of the unique), 4GiB.",
)
@click.option("--device-blocks", default="0", show_default=True,
              help="Of an LRU device cache in front: 0 (none), as above, or 0.5x of the tier.")  # fmt: skip
@click.option("--store", default=ON_COMPUTE, show_default=True, type=click.Choice(STORES),
              help="When a block is offered to the tier.")  # fmt: skip
@click.option("--tiers", "--tier", "tiers", multiple=True, metavar="disk:PATH:CAPACITY",
              help="A tier behind RAM; with --no-data simulated:CAPACITY. May be repeated. "
              "Options follow: ,policy=NAME,admission=RULE.")  # fmt: skip
@decoding
@queueing
@sized
@click.option("--block-bytes", default="64KiB", show_default=True,
              help="Moved and checked for each block, in place of its bytes; a multiple of 8.")  # fmt: skip
@click.option("--no-data", is_flag=True, help="Replay the decisions alone, without bytes.")
@click.option(
    "--inject", metavar="KIND:RATE", help="Damage stored blocks on purpose: bitflip:1e-4, swap, ..."
)
@click.option("--seed", default=0, show_default=True, help="Of --inject.")
@in_blocks
@skipping_bad_lines
@in_form
@click.option("--output", type=click.Path(path_type=Path), help="Write the report to a file.")
@click.option("--decisions", type=click.Path(path_type=Path), help="Write every decision to a file.")
@quietly
def replay(
    trace: str,
    policy: str,
    admission: str,
    capacity: str,
    device_blocks: str,
    store: str,
    tiers: tuple[str, ...],
    decode_tokens_per_s: float,
    queue_requests: int,
    model: str | None,
    kv_cache_dtype: str,
    bytes_per_token: str | None,
    block_bytes: str,
    no_data: bool,
    inject: str | None,
    seed: int,
    block_tokens: int | None,
    skip_bad_lines: bool,
    form: str,
    output: Path | None,
    decisions: Path | None,
    quiet: bool,
) -> None:
    """Run TRACE through the offloading manager and say what it saved.

    TRACE is a file (Mooncake JSONL, also .gz, .xz or .zst), or a built-in workload: chat, agent, rag.
    Blocks are stored, evicted, loaded and verified for real: their contents follow from their keys, so a
    wrong byte is always found. Exit code 1 if one was served.
    """
    # What can be known without the trace is said all at once, before it is read.
    problems = Problems("replay")
    size = _block_bytes(problems, trace, block_tokens, model, bytes_per_token, kv_cache_dtype)
    with problems:
        moved_bytes = _moved_bytes(block_bytes)
    injection = None
    with problems:
        injection = parse_injection(inject, seed) if inject else None
        if injection is not None and no_data:
            raise ConfigError("inject", inject, "it needs bytes to damage: leave out --no-data")
    with problems:
        POLICIES.find(policy)
    with problems:
        create_admission(admission, KEY_BYTES, 1)
    with problems:
        parse_capacity("capacity", capacity, size, ANY_TRACE)
    with problems:
        device_cache(device_blocks, ANY_TRACE, size, ANY_TRACE)
    with problems:
        typed = [tier for text in tiers for tier in parse_tiers("tiers", text)]
    _check_assumptions(problems, decode_tokens_per_s, queue_requests)
    problems.check()
    loaded = load_trace(trace, block_tokens=block_tokens, skip_bad_lines=skip_bad_lines)
    if loaded.block_refs == 0:
        raise ConfigError(
            "trace", trace, f"it must have a request of at least one block ({loaded.block_tokens} tokens)"
        )
    size = models.block_bytes(model, bytes_per_token, loaded.block_tokens, kv_cache_dtype)
    blocks = parse_capacity("capacity", capacity, size, loaded.unique_blocks)
    behind = tuple(tier.in_blocks(size, loaded.unique_blocks) for tier in typed)
    if not no_data:
        _say_what_stays(behind, moved_bytes)
    on_device = device_cache(device_blocks, blocks, size, loaded.unique_blocks)
    config = ReplayConfig(
        blocks, policy, admission, on_device, store, behind, decode_tokens_per_s, queue_requests
    )
    if output is not None:
        write_output("output", output, b"")  # A file that cannot be written is known before the work is done.
    with contextlib.ExitStack() as stack:
        log = stack.enter_context(_writable("decisions", decisions)) if decisions else None
        data = None
        if not no_data:
            data = DataPlane(_slots_that_fit(loaded, capacity, blocks, moved_bytes), moved_bytes, injection)
            stack.callback(data.close)
        run = Replay(loaded, config, data, log)
        with progress_bar("replay", loaded.requests, quiet) as progress:
            report = run.run(progress)
    if output is not None:
        write_output("output", output, report.to_json() if form == "json" else plain(table(report)))
    elif form == "json":
        click.echo(report.to_json(), nl=False)
    else:
        Console().print(table(report))
    if injection is not None and form == "terminal":
        click.echo(f"  Damage: {injection.kind}, seed {injection.seed}", err=True)
    if report.mismatches_served:
        raise SystemExit(1)


def _say_what_stays(tiers: Iterable[TierOptions], moved_bytes: int) -> None:
    """Before a disk is filled: how much it will hold, and that it stays."""
    for tier in tiers:
        for path in getattr(tier, "path", ()):
            click.echo(
                f"kvoffload: {path} takes up to {format_size(tier.num_blocks * moved_bytes)} and stays; "
                f"to be rid of it: kvoffload disk rm {path}",
                err=True,
            )


def _block_bytes(
    problems: Problems, trace: str, block_tokens: int | None, model: str | None, token: str | None, dtype: str
) -> int | None:
    """Bytes of a block of the trace, before it is read."""
    tokens = 1
    with problems:
        tokens = block_tokens_of(trace, block_tokens)
    with problems:
        return models.block_bytes(model, token, tokens, dtype)
    return None


def _moved_bytes(text: str) -> int:
    size = parse_size("block-bytes", text)
    if size < 8 or size % 8:
        raise ConfigError("block-bytes", text, "allowed: a multiple of 8 bytes")
    return size


def _check_assumptions(problems: Problems, decode_tokens_per_s: float, queue_requests: int) -> None:
    with problems:
        check_decode_speed(decode_tokens_per_s)
    with problems:
        check_queue(queue_requests)


def _slots_that_fit(trace: Trace, capacity: str, blocks: int, block_bytes: int) -> int:
    slots, available = slots_needed(trace, blocks), available_bytes()
    if slots * block_bytes > available:
        raise ConfigError(
            "capacity",
            capacity,
            f"{slots:,} blocks of {format_size(block_bytes)} are {format_size(slots * block_bytes)}, and "
            f"this machine can give {format_size(available)}; take less, smaller --block-bytes, or --no-data",
        )
    return slots


def plain(shown: RenderableType) -> bytes:
    """What a terminal would show, as text for a file."""
    console = Console(width=100, no_color=True, file=None, record=True, quiet=False, force_terminal=False)
    with console.capture() as captured:
        console.print(shown)
    return captured.get().encode()


@contextlib.contextmanager
def _writable(field: str, path: Path) -> Iterator[BinaryIO]:
    """The file that an option names; what goes wrong with it, a full disk too, names the option."""
    try:
        with path.open("wb") as file:
            yield file
    except OSError as error:
        raise ConfigError(field, str(path), f"a file that can be written ({error.strerror})") from None


def write_output(field: str, path: Path, content: bytes) -> None:
    """Write a whole file that an option names."""
    with _writable(field, path) as file:
        file.write(content)


@contextlib.contextmanager
def progress_bar(what: str, total: int, quiet: bool) -> Iterator[Callable[[int], None]]:
    """A bar on standard error while a trace is run; what to call with the number of requests done."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"),
               TimeRemainingColumn())  # fmt: skip
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.update(task, completed=done)
