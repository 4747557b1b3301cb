"""``kvoffload simulate``: a trace on a machine, with a clock: how long users wait, and what the GPU saves."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

import click
from rich.console import Console

from kvoffload.cli.options import configured, in_blocks, in_form, quietly, sized, skipping_bad_lines
from kvoffload.cli.replay import plain, progress_bar, write_output
from kvoffload.cli.simulate_table import table
from kvoffload.core.admission import create_admission
from kvoffload.core.plans import ON_COMPUTE, STORES
from kvoffload.core.policy import POLICIES
from kvoffload.errors import ConfigError, Problems
from kvoffload.model import kv_bytes as models
from kvoffload.replay.keys import KEY_BYTES
from kvoffload.replay.replay import ReplayConfig
from kvoffload.settings.read import parse_capacity
from kvoffload.simulate.classes import CLASSES, parse_class
from kvoffload.simulate.config import Timing
from kvoffload.simulate.machine import Machine, read_machine
from kvoffload.simulate.timed import replay_in_time
from kvoffload.sweep.grid import ANY_TRACE
from kvoffload.sweep.grid import device_blocks as device_cache
from kvoffload.tiers.spec import parse_tiers
from kvoffload.traces.sources import load_trace

DEFAULT_MACHINE = "h100-pcie5"


@click.command()
@click.argument("trace", default="chat")
@configured(policy="policy", admission="admission", store="store", ram="capacity", tiers="tiers")
@click.option("--machine", default=DEFAULT_MACHINE, show_default=True, metavar="FILE|CLASS[:PARAMETERS]",
              help="What `kvoffload calibrate` has written, or a class and the parameters of a model: "
              f"h100-pcie5:70B. Classes: {', '.join(CLASSES)}.")  # fmt: skip
@click.option("--policy", default="lru", show_default=True, help="A name, or module:Class.")
@click.option("--admission", default="all", show_default=True, help="all, reuse:N or tinylfu.")
@click.option("--capacity", default="5%", show_default=True,
              help="Of RAM: 5000 (blocks), 5% (of the unique), 64GiB.")  # fmt: skip
@click.option("--device-blocks", default="1x", show_default=True,
              help="KV blocks of the device: as above, or 0.5x of RAM.")  # fmt: skip
@click.option("--store", default=ON_COMPUTE, show_default=True, type=click.Choice(STORES),
              help="When a block is offered to RAM.")  # fmt: skip
@click.option("--tiers", "--tier", "tiers", multiple=True, metavar="simulated:CAPACITY",
              help="A disk behind RAM (disk:PATH:CAPACITY is not opened). May be repeated.")  # fmt: skip
@click.option("--load", default="1", show_default=True, metavar="X",
              help="Sessions begin this many times as densely as recorded: 2, 0.5, 2x.")  # fmt: skip
@click.option("--at-once", type=int, default=0, metavar="N",
              help="Clients keep N requests under way, whatever the recorded times.")  # fmt: skip
@click.option("--max-running", type=int, default=256, show_default=True, metavar="N",
              help="Requests that the engine runs at a time.")  # fmt: skip
@click.option("--step-tokens", type=int, default=8192, show_default=True, metavar="N",
              help="Tokens of prompts that it computes in a step.")  # fmt: skip
@sized
@in_blocks
@skipping_bad_lines
@in_form
@click.option("--output", type=click.Path(path_type=Path), help="Write the report to a file.")
@quietly
def simulate(
    trace: str,
    machine: str,
    policy: str,
    admission: str,
    capacity: str,
    device_blocks: str,
    store: str,
    tiers: tuple[str, ...],
    load: str,
    at_once: int,
    max_running: int,
    step_tokens: int,
    model: str | None,
    kv_cache_dtype: str,
    bytes_per_token: str | None,
    block_tokens: int | None,
    skip_bad_lines: bool,
    form: str,
    output: Path | None,
    quiet: bool,
) -> None:
    """Run TRACE in simulated time on a machine, with offloading and without.

    TRACE is as for `kvoffload replay`, and so are the manager, its policies and sizes. Here requests also
    wait, side by side, for the GPU, for copies and for disks. What moves has bytes: give --model or
    --bytes-per-token.
    """
    problems = Problems("simulate")
    with problems:
        POLICIES.find(policy)
    with problems:
        create_admission(admission, KEY_BYTES, 1)
    with problems:
        token_bytes = _token_bytes(model, bytes_per_token, kv_cache_dtype)
        # What can be known without the trace is said before it is read.
        timing = Timing(
            find_machine(machine), token_bytes, max_running, step_tokens, parse_load(load), at_once
        )
        parse_capacity("capacity", capacity, token_bytes, ANY_TRACE)
        device_cache(device_blocks, ANY_TRACE, token_bytes, ANY_TRACE)
    with problems:
        typed = [tier for text in tiers for tier in parse_tiers("tiers", text)]
    problems.check()
    loaded = load_trace(trace, block_tokens=block_tokens, skip_bad_lines=skip_bad_lines)
    if loaded.block_refs == 0:
        raise ConfigError(
            "trace", trace, f"it must have a request of at least one block ({loaded.block_tokens} tokens)"
        )
    size = token_bytes * loaded.block_tokens
    blocks = parse_capacity("capacity", capacity, size, loaded.unique_blocks)
    config = ReplayConfig(
        blocks,
        policy,
        admission,
        device_cache(device_blocks, blocks, size, loaded.unique_blocks),
        store,
        tuple(tier.in_blocks(size, loaded.unique_blocks) for tier in typed),
    )
    timing = Timing(timing.machine, size, max_running, step_tokens, timing.load, at_once)
    if output is not None:
        write_output("output", output, b"")  # A file that cannot be written is known before the work is done.
    with without_warnings(), progress_bar("simulate", 2 * loaded.requests, quiet) as progress:
        report = replay_in_time(loaded, config, timing, progress)
    if output is not None:
        write_output("output", output, report.to_json() if form == "json" else plain(table(report)))
    elif form == "json":
        click.echo(report.to_json(), nl=False)
    else:
        Console().print(table(report))


@contextlib.contextmanager
def without_warnings() -> Iterator[None]:
    """Let simulated tiers say nothing meanwhile: what production would warn of stands in the report."""
    log = logging.getLogger("kvoffload.tiering")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


def find_machine(text: str, gpus: int = 1) -> Machine:
    """The machine of a file as it stands, or of a class with so many GPUs. Raises `ConfigError`."""
    path = Path(text)
    return read_machine(path) if path.exists() or path.suffix == ".json" else parse_class(text, gpus)


def parse_load(text: str) -> float:
    """How much denser sessions begin: ``2``, ``0.5``, ``2x``. Raises `ConfigError`."""
    try:
        return float(text.strip().removesuffix("x"))
    except ValueError:
        raise ConfigError("load", text, "allowed: a number more than 0, such as 2, 0.5 or 2x") from None


def _token_bytes(model: str | None, token_bytes: str | None, dtype: str) -> int:
    """Bytes of a token's KV, which must be known."""
    found = models.block_bytes(model, token_bytes, 1, dtype)
    if found is None:
        raise ConfigError(
            "model", None, "what moves has bytes: give --model config.json, or --bytes-per-token 128KiB"
        )
    return found
