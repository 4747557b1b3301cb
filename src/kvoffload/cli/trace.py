"""``kvoffload trace``: generate, convert, fit and describe traces."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_type_hints

import click

from kvoffload.cli.beside_optimum import beside_optimum
from kvoffload.cli.fields import PathType, argument, options_of
from kvoffload.cli.options import FormatOptions, QuietOptions, ReadOptions, warn
from kvoffload.cli.output import Terminal, check_output, progress_bar, terminal_table
from kvoffload.cli.trace_convert import convert
from kvoffload.cli.trace_fit import fit
from kvoffload.errors import ConfigError
from kvoffload.pages.page import Table
from kvoffload.text import outside_blocks, percent
from kvoffload.traces.formats.mooncake import write_trace
from kvoffload.traces.likeness import features, resemblance
from kvoffload.traces.sessions import generate as generate_trace
from kvoffload.traces.statistics import Percentiles, TraceStatistics, describe
from kvoffload.traces.trace import MILLISECONDS, Trace
from kvoffload.traces.working_set import Period, working_set
from kvoffload.traces.workloads import BUILTIN, LogNormal, Workload, builtin


def _workload_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add an option for each parameter of `Workload`; the docstring of `Workload` is the help."""
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
    """Generate, convert, fit and describe traces."""


trace.add_command(convert)
trace.add_command(fit)


@trace.command()
@click.argument("name", metavar=f"[{'|'.join(BUILTIN)}]")
@click.option("--output", type=PathType(), required=True, help="JSONL; .gz, .xz, .zst compress.")
@click.option("--force", is_flag=True, help="Replace an existing file.")
@_workload_options
def generate(name: str, output: Path, force: bool, **parameters: Any) -> None:
    """Write a built-in workload as a trace file.

    Options replace parameters of the workload (docs/workloads.md).
    """
    given = {
        key: LogNormal(*value) if isinstance(value, tuple) else value
        for key, value in parameters.items()
        if value is not None
    }
    workload = builtin(name, **given)
    check_output("output", output, force=force)
    generated = generate_trace(workload)
    try:
        write_trace(generated, output)
    except OSError as error:
        raise ConfigError("output", str(output), f"the file cannot be written ({error.strerror})") from None
    click.echo(
        f"{output}: {generated.requests:,} requests, {generated.block_refs:,} block references, "
        f"{generated.unique_blocks:,} unique blocks",
        err=not output.is_file(),  # standard output may be the trace
    )


@dataclass(frozen=True, kw_only=True)
class InfoOptions(ReadOptions, FormatOptions, QuietOptions):
    trace: str = argument()


@trace.command()
@options_of(InfoOptions)
def info(options: InfoOptions) -> None:
    """Describe TRACE, a file or a built-in name, and the optimum on it."""
    with progress_bar("read", 1.0, options.quiet) as progress:
        loaded = options.read(options.trace, progress)
    warn(loaded.warnings)
    statistics, best, periods = describe(loaded), beside_optimum(loaded), working_set(loaded)
    like = resemblance(loaded)
    if options.is_json:
        sections = {
            "assumed": loaded.assumed,
            "time_unit": loaded.time_unit or MILLISECONDS,
            "time_unit_is_assumed": not loaded.time_unit,
            "working_set": [period._asdict() for period in periods],
            "resembles": like,
        }
        click.echo(json.dumps(_as_json(loaded.name, statistics, best) | sections, indent=2))
    else:
        console = Terminal()
        console.print(terminal_table(_totals_table(loaded, statistics)))
        console.print(terminal_table(_distributions_table(statistics)))
        console.print(terminal_table(_working_set_table(periods)))
        console.print(terminal_table(_best_table(best)))
        console.print(_words(statistics, best, like), soft_wrap=True, highlight=False)


def _as_json(name: str, statistics: TraceStatistics, best: list[dict[str, Any]]) -> dict[str, Any]:
    distributions = {
        field: value._asdict() if isinstance(value, Percentiles) else value
        for field, value in vars(statistics).items()
    }
    return {"trace": name, **distributions, "optimum": best}


def _totals_table(trace: Trace, statistics: TraceStatistics) -> Table:
    totals = [
        (field.replace("_", " "), _number(value))
        for field, value in vars(statistics).items()
        if not isinstance(value, Percentiles) and value is not None
    ]
    totals.append(("time unit", trace.time_unit or f"{MILLISECONDS} (assumed)"))
    return Table(f"trace {trace.name}", ("", "#"), totals)


def _distributions_table(statistics: TraceStatistics) -> Table:
    rows = [
        (field.replace("_", " "), *map(_number, value))
        for field, value in vars(statistics).items()
        if isinstance(value, Percentiles)
    ]
    return Table("", ("", *(f"{name}#" for name in Percentiles._fields)), rows)


def _number(value: float) -> str:
    # Shares need more digits than times and counts.
    digits = 4 if 0 < value < 1 else 1
    return f"{value:,.{digits}f}" if isinstance(value, float) else f"{value:,}"


def _working_set_table(periods: list[Period]) -> Table:
    headings = ("from, min#", "requests#", "references#", "different blocks#", "new#", "ceiling#")
    rows = []
    for period in periods:
        counts = (period.requests, period.block_refs, period.different_blocks, period.new_blocks)
        minutes = f"{period.start_s / 60:,.1f}"
        rows.append((minutes, *(f"{count:,}" for count in counts), f"{period.ceiling:.4f}"))
    return Table("working set: different blocks in use, by period", headings, rows)


def _words(statistics: TraceStatistics, best: list[dict[str, Any]], like: dict[str, float]) -> str:
    widest = max(best, key=lambda row: row["prefix_hit_ratio"] - row["lru_prefix_hit_ratio"])
    gap = widest["prefix_hit_ratio"] - widest["lru_prefix_hit_ratio"]
    (nearest, factor), *further = like.items()
    sentences = [
        f"No cache saves more than {percent(statistics.ceiling)} of the prefill: "
        f"{percent(statistics.repeated_in_session)} is repeated within a session, "
        f"{percent(statistics.shared_by_sessions)} comes from other sessions.",
        f"LRU is at most {100 * gap:.1f} points below the optimum, at "
        f"{widest['capacity_percent']}% of the blocks."
        if gap > 0
        else "LRU equals the optimum at every size above: the policy makes no difference.",
        _sessions(statistics),
        *outside_blocks(statistics.share_outside_blocks),
        f"The most similar built-in workload is {nearest}: {len(features(statistics))} features (lengths, "
        f"pauses, reuse) differ by a factor of {factor:.1f} in the mean, and 1.0 is equal "
        f"({', '.join(f'{name} {far:.1f}' for name, far in further)}).",
    ]
    return "\n".join(f"  {sentence}" for sentence in sentences)


def _sessions(statistics: TraceStatistics) -> str:
    """Describe how sessions were found. If they were inferred, also give the share
    of the requests for which this was unambiguous.
    """
    if statistics.unambiguous_share is None:
        return "Sessions are named by the recording."
    share = percent(statistics.unambiguous_share)
    inferred = f"inferred from shared prefixes, unambiguously for {share} of"
    if not statistics.named_share:
        return f"Sessions are {inferred} the requests."
    named = percent(statistics.named_share)
    return f"The recording names the session of {named} of the requests; the rest is {inferred} them."


def _best_table(best: list[dict[str, Any]]) -> Table:
    rows = [
        (
            "no limit" if row["capacity_percent"] is None else f"{row['capacity_percent']}%",
            "" if row["capacity_blocks"] is None else f"{row['capacity_blocks']:,}",
            f"{row['prefix_hit_ratio']:.4f}",
            f"{row['lru_prefix_hit_ratio']:.4f}",
            f"{row['blocks_written']:,}",
        )
        for row in best
    ]
    headings = ("capacity#", "blocks#", "optimum#", "lru#", "written by the optimum#")
    return Table("prefix-hit ratio: the optimum, and LRU", headings, rows)
