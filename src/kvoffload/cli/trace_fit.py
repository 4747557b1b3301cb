"""``kvoffload trace fit``: fit a workload to a recording, and report the differences."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any

import click

from kvoffload.cli.beside_optimum import beside_optimum
from kvoffload.cli.fields import argument, option, options_of
from kvoffload.cli.options import FormatOptions, ReadOptions
from kvoffload.cli.output import Terminal, terminal_table
from kvoffload.pages.page import Table
from kvoffload.traces.fitting import Fit
from kvoffload.traces.fitting import fit as fit_workload
from kvoffload.traces.likeness import comparable, resemblance
from kvoffload.traces.sessions import generate
from kvoffload.traces.workloads import BUILTIN, LogNormal, Workload


@dataclass(frozen=True, kw_only=True)
class FitOptions(ReadOptions, FormatOptions):
    trace: str = argument()
    like: str | None = option(
        None, "Built-in workload to start from.  [default: the nearest]", metavar=f"[{'|'.join(BUILTIN)}]"
    )


@click.command()
@options_of(FitOptions)
def fit(options: FitOptions) -> None:
    """Fit the parameters of a built-in workload to TRACE, and report the differences.

    Prints a command that generates the fitted workload. You can share this command if you cannot share the
    recording. To scale the workload, change --sessions and --sessions-per-minute. The workload also differs
    from TRACE in ways that the report does not measure, so do not choose a policy by the workload alone
    (docs/workloads.md).
    """
    loaded = options.read(options.trace)
    result = fit_workload(loaded, options.like or next(iter(resemblance(loaded))))
    rows = _hit_ratios(beside_optimum(comparable(loaded)), beside_optimum(generate(result.workload)))
    if options.is_json:
        click.echo(json.dumps(_as_json(loaded.name, result, rows), indent=2))
        return
    console = Terminal()
    console.print(terminal_table(_features_table(loaded.name, result)))
    console.print(terminal_table(_ratios_table(rows)))
    console.print(_words(result, rows), soft_wrap=True, highlight=False)
    console.print(f"\n{command(result.workload)}", soft_wrap=True, highlight=False)


def command(workload: Workload) -> str:
    """Return the command that generates a fitted workload."""
    preset = BUILTIN[workload.name.removeprefix("like-")]
    flags = []
    for field in fields(Workload):
        value = getattr(workload, field.name)
        if field.name != "name" and value != getattr(preset, field.name):
            values = value if isinstance(value, LogNormal) else (value,)
            flags.append(
                f"--{field.name.replace('_', '-')} {' '.join(f'{number:.10g}' for number in values)}"
            )
    return f"kvoffload trace generate {preset.name} {' '.join(flags)} --output {workload.name}.jsonl.zst"


def _hit_ratios(recorded: list[dict[str, Any]], fitted: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {
            "capacity_percent": row["capacity_percent"],
            "lru_recorded": row["lru_prefix_hit_ratio"],
            "lru_fitted": fitted_row["lru_prefix_hit_ratio"],
            "optimum_recorded": row["prefix_hit_ratio"],
            "optimum_fitted": fitted_row["prefix_hit_ratio"],
        }
        for row, fitted_row in zip(recorded, fitted, strict=True)
    ]


def _as_json(name: str, result: Fit, rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "trace": name,
        "workload": asdict(result.workload),
        "command": command(result.workload),
        "distance": result.distance,
        "features": {
            name: {"recorded": value, "fitted": result.fitted[name]}
            for name, value in result.recorded.items()
        },
        "hit_ratios": rows,
    }


def _features_table(name: str, result: Fit) -> Table:
    rows = []
    for feature, value in result.recorded.items():
        fitted = result.fitted[feature]
        rows.append((feature, f"{value:,.4g}", f"{fitted:,.4g}", f"{fitted / value:.2f}"))
    return Table(f"{name}, and {result.workload.name}", ("", "recorded#", "fitted#", "times#"), rows)


def _ratios_table(ratios: list[dict[str, Any]]) -> Table:
    headings = ("capacity#", "lru, recorded#", "fitted#", "optimum, recorded#", "fitted#")
    rows = []
    for row in ratios:
        share, *hits = row.values()
        rows.append(("no limit" if share is None else f"{share}%", *(f"{hit:.4f}" for hit in hits)))
    return Table("prefix-hit ratio", headings, rows)


def _words(result: Fit, rows: list[dict[str, Any]]) -> str:
    off = {
        name: max(rows, key=lambda row: abs(row[f"{name}_recorded"] - row[f"{name}_fitted"]))
        for name in ("lru", "optimum")
    }
    worst = max(result.recorded, key=lambda name: _times(result.recorded[name], result.fitted[name]))
    times = _times(result.recorded[worst], result.fitted[worst])
    points = {name: 100 * abs(row[f"{name}_recorded"] - row[f"{name}_fitted"]) for name, row in off.items()}
    return (
        f"  {result.workload.name}: {result.distance:.2f} times apart in the mean of {len(result.recorded)} "
        f"features, at most {times:.2f} ({worst}).\n"
        f"  LRU is at most {points['lru']:.1f} points off, the optimum {points['optimum']:.1f}."
    )


def _times(recorded: float, fitted: float) -> float:
    return max(recorded / fitted, fitted / recorded)
