"""``kvoffload trace fit``: a workload that is like a recording, and how much it is."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.table import Table

from kvoffload.cli.beside_optimum import beside_optimum
from kvoffload.cli.options import in_blocks, in_form, skipping_bad_lines
from kvoffload.traces.fitting import Fit
from kvoffload.traces.fitting import fit as fit_workload
from kvoffload.traces.likeness import comparable, resemblance
from kvoffload.traces.sessions import generate
from kvoffload.traces.sources import load_trace
from kvoffload.traces.workloads import BUILTIN, LogNormal, Workload


@click.command()
@click.argument("trace")
@click.option("--like", metavar=f"[{'|'.join(BUILTIN)}]",
              help="The built-in workload to begin with.  [default: the nearest]")  # fmt: skip
@in_blocks
@skipping_bad_lines
@in_form
def fit(trace: str, like: str | None, block_tokens: int | None, skip_bad_lines: bool, form: str) -> None:
    """Find parameters of a built-in workload that make it like TRACE, and say how far it is from it.

    What it prints is a command that generates the workload: it can be shared where the recording cannot, and
    grown beyond it with --sessions and --sessions-per-minute. A likeness has the errors that are shown, and
    others: no policy should be chosen by it alone (docs/workloads.md).
    """
    loaded = load_trace(trace, block_tokens=block_tokens, skip_bad_lines=skip_bad_lines)
    found = fit_workload(loaded, like or next(iter(resemblance(loaded))))
    rows = _hit_ratios(beside_optimum(comparable(loaded)), beside_optimum(generate(found.workload)))
    if form == "json":
        click.echo(json.dumps(_as_json(loaded.name, found, rows), indent=2))
        return
    console = Console()
    console.print(_features_table(loaded.name, found))
    console.print(_ratios_table(rows))
    console.print(_words(found, rows), soft_wrap=True, highlight=False)
    console.print(f"\n{command(found.workload)}", soft_wrap=True, highlight=False)


def command(workload: Workload) -> str:
    """What generates a workload that was fitted."""
    preset = BUILTIN[workload.name.removeprefix("like-")]
    given = []
    for field in fields(Workload):
        value = getattr(workload, field.name)
        if field.name != "name" and value != getattr(preset, field.name):
            values = value if isinstance(value, LogNormal) else (value,)
            given.append(f"--{field.name.replace('_', '-')} {' '.join(f'{one:.10g}' for one in values)}")
    return f"kvoffload trace generate {preset.name} {' '.join(given)} --output {workload.name}.jsonl.zst"


def _hit_ratios(recorded: list[dict[str, Any]], fitted: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {
            "capacity_percent": one["capacity_percent"],
            "lru_recorded": one["lru_prefix_hit_ratio"],
            "lru_fitted": other["lru_prefix_hit_ratio"],
            "optimum_recorded": one["prefix_hit_ratio"],
            "optimum_fitted": other["prefix_hit_ratio"],
        }
        for one, other in zip(recorded, fitted, strict=True)
    ]


def _as_json(name: str, found: Fit, rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "trace": name,
        "workload": asdict(found.workload),
        "command": command(found.workload),
        "distance": found.distance,
        "features": {
            name: {"recorded": value, "fitted": found.fitted[name]} for name, value in found.recorded.items()
        },
        "hit_ratios": rows,
    }


def _features_table(name: str, found: Fit) -> Table:
    table = Table(title=f"{name}, and {found.workload.name}", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("", no_wrap=True)
    for heading in ("recorded", "fitted", "times"):
        table.add_column(heading, justify="right")
    for feature, value in found.recorded.items():
        other = found.fitted[feature]
        table.add_row(feature, f"{value:,.4g}", f"{other:,.4g}", f"{other / value:.2f}")
    return table


def _ratios_table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="prefix-hit ratio", title_justify="left", box=box.SIMPLE_HEAD)
    for heading in ("capacity", "lru, recorded", "fitted", "optimum, recorded", "fitted"):
        table.add_column(heading, justify="right")
    for row in rows:
        percent, *ratios = row.values()
        table.add_row("no limit" if percent is None else f"{percent} %", *(f"{one:.4f}" for one in ratios))
    return table


def _words(found: Fit, rows: list[dict[str, Any]]) -> str:
    off = {
        name: max(rows, key=lambda row: abs(row[f"{name}_recorded"] - row[f"{name}_fitted"]))
        for name in ("lru", "optimum")
    }
    worst = max(found.recorded, key=lambda name: _times(found.recorded[name], found.fitted[name]))
    times = _times(found.recorded[worst], found.fitted[worst])
    points = {name: 100 * abs(row[f"{name}_recorded"] - row[f"{name}_fitted"]) for name, row in off.items()}
    return (
        f"  {found.workload.name}: {found.distance:.2f} times apart in the mean of {len(found.recorded)} "
        f"features, at most {times:.2f} ({worst}).\n"
        f"  LRU is at most {points['lru']:.1f} points off, the optimum {points['optimum']:.1f}."
    )


def _times(one: float, other: float) -> float:
    return max(one / other, other / one)
