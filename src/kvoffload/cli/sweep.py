"""``kvoffload sweep``: replay traces through every combination of policies, rules and sizes."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import click

from kvoffload.cli.fields import argument, option, options_of
from kvoffload.cli.options import (
    FormatOptions,
    InstancesOptions,
    LoadOptions,
    ModelOptions,
    QuietOptions,
    ReadOptions,
    WorkOptions,
    typed_command,
    warn,
)
from kvoffload.cli.output import Lines, Terminal
from kvoffload.cli.sweep_progress import shown, stopping_cleanly
from kvoffload.cli.sweep_tables import tables, words
from kvoffload.core.plans import ON_COMPUTE, STORES
from kvoffload.errors import ConfigError, Problems
from kvoffload.pages.page import check_report, write_report
from kvoffload.pages.sweep import sweep_page
from kvoffload.replay.config import ReplayConfig
from kvoffload.sweep.grid import Grid, axis
from kvoffload.sweep.monotone import losses_of
from kvoffload.sweep.outputs import as_json
from kvoffload.sweep.sweep import Sweep
from kvoffload.tiers.spec import NO_TIERS
from kvoffload.traces.compressed import is_stream
from kvoffload.traces.sources import block_tokens_of


@dataclass(frozen=True, kw_only=True)
class SweepOptions(
    WorkOptions, InstancesOptions, LoadOptions, ModelOptions, ReadOptions, FormatOptions, QuietOptions
):
    traces: tuple[str, ...] = argument(metavar="TRACE...", nargs=-1, required=True)
    policies: str = option("lru,arc", "Eviction policies: names, or module:Class.", setting="policy")
    admissions: str = option("all", "Admission rules: all, reuse:N.", setting="admission")
    capacities: str = option(
        "1%,2%,5%,10%", "Capacities of RAM: 5000 (blocks), 5% (of the unique blocks), 4GiB.", setting="ram"
    )
    device_blocks: str = option(
        "0", "LRU device caches in front: 0 (none), capacities as above, or 0.5x of RAM."
    )
    stores: str = option(
        ON_COMPUTE, f"Moments at which blocks are offered to RAM: {', '.join(STORES)}.", setting="store"
    )
    tiers: str = option(
        NO_TIERS, "Tiers behind RAM: 10%, 10%,policy=hazard; + joins consecutive tiers.", setting="tiers",
        metavar="CAPACITY[,policy=NAME]",
    )  # fmt: skip
    shared_ram: bool = option(
        False, "Also replay with one RAM pool of N times the given size for all N engines of --instances."
    )
    timings: bool = option(False, "Add a column with the seconds of each replay.")

    def check(self) -> None:
        """Check everything before a trace is read. Raises `ConfigError`, all problems at once."""
        problems = Problems("sweep")
        for trace in dict.fromkeys(self.traces):
            if self.traces.count(trace) > 1:
                problems.add("traces", trace, "it is given twice")
            elif is_stream(Path(trace)):
                why = "allowed: files and names, because each process of a sweep reads its trace"
                problems.add("traces", trace, why)
        problems.check()
        with problems:
            if self.report is not None:
                check_report(self.report, force=self.force)
        with problems:
            self.grid()
        problems.check()

    def grid(self) -> Grid:
        """Return the combinations to replay. Raises `ConfigError` if a value is invalid."""
        return Grid(
            axis("policies", self.policies),
            axis("admissions", self.admissions),
            axis("capacities", self.capacities),
            axis("device-blocks", self.device_blocks),
            axis("stores", self.stores),
            self._block_bytes(),
            axis("tiers", self.tiers),
            ReplayConfig(
                1,
                decode_tokens_per_s=self.decode_tokens_per_s or 0.0,
                queue_requests=self.queue_requests,
                instances=self.instances,
                routing=self.routing,
            ),
            (False, True) if self.shared_ram else (False,),
        )

    def _block_bytes(self) -> int | None:
        """Return the bytes of a block; None if unknown.

        All traces must have the same number of tokens in a block.
        """
        if self.known_block_bytes(1) is None:
            return None
        first = block_tokens_of(self.traces[0], self.block_tokens)
        for trace in self.traces[1:]:
            tokens = block_tokens_of(trace, self.block_tokens)
            if tokens != first:
                why = (
                    f"its blocks have {tokens} tokens, the blocks of {self.traces[0]} {first}: use a sweep "
                    "for each block size, or capacities in blocks"
                )
                raise ConfigError("traces", trace, why)
        return self.known_block_bytes(first)


@click.command()
@options_of(SweepOptions)
def sweep(options: SweepOptions) -> None:
    """Replay every TRACE through every combination, and report which differences are significant.

    TRACE is a file (Mooncake JSONL, also .gz, .xz or .zst), or a built-in workload: chat, agent, rag. Values
    of an option are separated by commas. Only decisions are replayed, without bytes. An interrupted sweep
    with --output continues when the same command is run again. Exit code 1 if a row is better than the
    optimum, or if a replay failed.
    """
    run = Sweep(
        options.traces, options.grid(), work=options.work(), block_tokens=options.block_tokens,
        skip_bad_lines=options.skip_bad_lines, time_unit=options.time_unit, timings=options.timings,
    )  # fmt: skip
    with stopping_cleanly(run), shown(options.quiet) as on_progress:
        result = run.run(on_progress)
    if options.is_json:
        click.echo(as_json(result.rows), nl=False)
    else:
        console = Terminal()
        for section in (*tables(result.rows, console.width), *words(result.verdicts)):
            console.print(section)
        if losses := losses_of(result.rows):
            console.print(Lines([*losses, ""]))
    warn(result.warnings)
    if result.left_out:
        count = f"{result.left_out.total():,} combinations left out"
        click.echo(f"{count}: {'; '.join(result.left_out)}", err=True)
    for violation in result.violations:
        click.echo(f"kvoffload: better than the optimum: {violation}", err=True)
    if options.report is not None:
        write_report(options.report, sweep_page(result.rows, result.verdicts, typed_command()))
    if result.violations:
        sys.exit(1)
