"""``kvoffload trace``: make traces, and say what a trace is like."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import click
from rich import box
from rich.console import Console
from rich.table import Table

from kvoffload.cli.beside_optimum import beside_optimum
from kvoffload.cli.options import in_blocks, in_form, skipping_bad_lines
from kvoffload.cli.trace_convert import convert
from kvoffload.cli.trace_fit import fit
from kvoffload.errors import ConfigError
from kvoffload.text import percent
from kvoffload.traces.formats.mooncake import write_trace
from kvoffload.traces.likeness import features, resemblance
from kvoffload.traces.sessions import generate as generate_trace
from kvoffload.traces.sources import load_trace
from kvoffload.traces.statistics import Percentiles, TraceStatistics, describe
from kvoffload.traces.working_set import Period, working_set
from kvoffload.traces.workloads import BUILTIN, LogNormal, Workload, builtin


def _workload_options(command: Callable[..., None]) -> Callable[..., None]:
    """One option per parameter of `Workload`, explained by its docstring."""
    types = get_type_hints(Workload)
    described = re.findall(r"^    (\w+): ((?:.+\n?)(?:^ {8}.+\n?)*)", inspect.getdoc(Workload) or "", re.M)
    help_of = {name: " ".join(text.split()) for name, text in described}
    for field in reversed(fields(Workload)):
        if field.name != "name":
            pair = types[field.name] is LogNormal
            command = click.option(
                f"--{field.name.replace('_', '-')}",
                type=(float, float) if pair else types[field.name],
                metavar="MEDIAN SIGMA" if pair else None,
                help=help_of.get(field.name),
            )(command)
    return command


@click.group()
def trace() -> None:
    """Make traces, and say what a trace is like."""


trace.add_command(convert)
trace.add_command(fit)


@trace.command()
@click.argument("name", metavar=f"[{'|'.join(BUILTIN)}]")
@click.option(
    "--output", type=click.Path(path_type=Path), required=True, help="JSONL; .gz, .xz, .zst compress."
)
@click.option("--force", is_flag=True, help="Replace an existing file.")
@_workload_options
def generate(name: str, output: Path, force: bool, **parameters: Any) -> None:
    """Write a built-in workload as a trace file.

    Options replace parameters of the built-in one; what they mean and what they are stands in
    docs/workloads.md.
    """
    given = {
        key: LogNormal(*value) if isinstance(value, tuple) else value
        for key, value in parameters.items()
        if value is not None
    }
    workload = builtin(name, **given)
    if output.exists() and not force:
        raise ConfigError("output", str(output), "a file that does not exist yet, or --force")
    made = generate_trace(workload)
    try:
        write_trace(made, output)
    except OSError as error:
        raise ConfigError("output", str(output), f"a writable file ({error.strerror})") from None
    click.echo(
        f"{output}: {made.requests:,} requests, {made.block_refs:,} block references, "
        f"{made.unique_blocks:,} unique blocks"
    )


@trace.command()
@click.argument("trace_", metavar="TRACE")
@in_blocks
@skipping_bad_lines
@in_form
def info(trace_: str, block_tokens: int | None, skip_bad_lines: bool, form: str) -> None:
    """Say what TRACE, a file or a built-in name, is like, and what the best policy would reach on it."""
    loaded = load_trace(trace_, block_tokens=block_tokens, skip_bad_lines=skip_bad_lines)
    statistics, best, periods = describe(loaded), beside_optimum(loaded), working_set(loaded)
    like = resemblance(loaded)
    if form == "json":
        more = {"working_set": [period._asdict() for period in periods], "resembles": like}
        click.echo(json.dumps(_as_json(loaded.name, statistics, best) | more, indent=2))
    else:
        console = Console()
        console.print(_totals_table(loaded.name, statistics))
        console.print(_distributions_table(statistics))
        console.print(_working_set_table(periods))
        console.print(_best_table(best))
        console.print(_words(statistics, best, like), soft_wrap=True, highlight=False)


def _as_json(name: str, statistics: TraceStatistics, best: list[dict[str, Any]]) -> dict[str, Any]:
    distributions = {
        field: value._asdict() if isinstance(value, Percentiles) else value
        for field, value in vars(statistics).items()
    }
    return {"trace": name, **distributions, "optimum": best}


def _totals_table(name: str, statistics: TraceStatistics) -> Table:
    table = Table(title=f"trace {name}", title_justify="left", box=box.SIMPLE_HEAD, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    for field, value in vars(statistics).items():
        if not isinstance(value, Percentiles):
            table.add_row(field.replace("_", " "), _number(value))
    return table


def _distributions_table(statistics: TraceStatistics) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("", no_wrap=True)
    for heading in Percentiles._fields:
        table.add_column(heading, justify="right", no_wrap=True)
    for field, value in vars(statistics).items():
        if isinstance(value, Percentiles):
            table.add_row(field.replace("_", " "), *map(_number, value))
    return table


def _number(value: float) -> str:
    # Shares need more digits than times and counts.
    digits = 4 if 0 < value < 1 else 1
    return f"{value:,.{digits}f}" if isinstance(value, float) else f"{value:,}"


def _working_set_table(periods: list[Period]) -> Table:
    title = "working set: different blocks in use, in parts of the time"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for heading in ("from, min", "requests", "references", "different blocks", "new", "ceiling"):
        table.add_column(heading, justify="right")
    for period in periods:
        counts = (period.requests, period.block_refs, period.different_blocks, period.new_blocks)
        table.add_row(
            f"{period.start_s / 60:,.1f}", *(f"{count:,}" for count in counts), f"{period.ceiling:.4f}"
        )
    return table


def _words(statistics: TraceStatistics, best: list[dict[str, Any]], like: dict[str, float]) -> str:
    """What the tables say."""
    widest = max(best, key=lambda row: row["prefix_hit_ratio"] - row["lru_prefix_hit_ratio"])
    gap = widest["prefix_hit_ratio"] - widest["lru_prefix_hit_ratio"]
    (nearest, factor), *others = like.items()
    said = [
        f"No cache saves more than {percent(statistics.ceiling)} of the prefill: "
        f"{percent(statistics.repeated_in_session)} is repeated within a session, "
        f"{percent(statistics.shared_by_sessions)} comes from other sessions.",
        f"LRU is {100 * gap:.1f} points below the optimum where it is furthest, at "
        f"{widest['capacity_percent']} % of the blocks."
        if gap > 0
        else "LRU is as good as the optimum at every size above: policies do not matter here.",
        f"It is most like {nearest}: {factor:.1f} times apart in the mean of {len(features(statistics))} "
        f"features ({', '.join(f'{name} {far:.1f}' for name, far in others)}).",
    ]
    return "\n".join(f"  {one}" for one in said)


def _best_table(best: list[dict[str, Any]]) -> Table:
    title = "prefix-hit ratio: the best that any policy could reach, and LRU"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for heading in ("capacity", "blocks", "optimum", "lru", "written by the optimum"):
        table.add_column(heading, justify="right")
    for row in best:
        limited = row["capacity_percent"] is not None
        table.add_row(
            f"{row['capacity_percent']} %" if limited else "no limit",
            f"{row['capacity_blocks']:,}" if limited else "",
            f"{row['prefix_hit_ratio']:.4f}",
            f"{row['lru_prefix_hit_ratio']:.4f}",
            f"{row['blocks_written']:,}",
        )
    return table
