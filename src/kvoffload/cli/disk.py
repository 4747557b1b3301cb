"""``kvoffload disk``: what is in the directory of a disk tier, whether it is sound, and a shorter journal."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.table import Table

from kvoffload.errors import ConfigError
from kvoffload.tiers.disk.inspection import Problem, SlabReport, opened
from kvoffload.tiers.disk.inspection import compact as compact_slab
from kvoffload.tiers.disk.inspection import inspect as inspect_directory
from kvoffload.tiers.disk.inspection import verify as verify_slab

_path = click.argument("path", type=click.Path(path_type=Path))
_format = click.option(
    "--format", "form", type=click.Choice(["terminal", "json"]), default="terminal", show_default=True
)


@click.group()
def disk() -> None:
    """Look into the directory of a disk tier."""


@disk.command()
@_path
@_format
def inspect(path: Path, form: str) -> None:
    """Say what is in PATH: blocks, sizes and ages by model, also of slabs that were set aside.

    Reads the journal only, and works while a process has it open; then it may be a moment behind.
    """
    reports = inspect_directory(path)
    if form == "json":
        click.echo(json.dumps([asdict(report) for report in reports], indent=2))
        return
    console = Console()
    for report in reports:
        console.print(_table(report))


@disk.command()
@_path
@_format
def verify(path: Path, form: str) -> None:
    """Read every block in PATH and check it. Exit code 0: all are sound; 1: a list of those that are not.

    A block on the list would be a miss, and is no danger. Not while a process has PATH open.
    """
    with opened(path) as (slab, found):
        problems = verify_slab(slab, found, _progress("blocks"))
        count, damage = len(found.contents), found.damaged
    if form == "json":
        listed = [problem._asdict() for problem in problems]
        click.echo(json.dumps({"blocks": count, "problems": listed, "journal_damage": damage}, indent=2))
    else:
        _print_problems(path, count, problems, damage)
    if problems or damage:
        sys.exit(1)


@disk.command()
@_path
def compact(path: Path) -> None:
    """Write a fresh checkpoint in PATH and empty the log: what was damaged in the journal is gone.

    Not while a process has PATH open.
    """
    with opened(path) as (slab, found):
        try:
            compact_slab(slab, found)
        except OSError as error:
            raise ConfigError("path", str(path), f"a slab that can be written ({error.strerror})") from None
        click.echo(f"{path}: checkpoint of {len(found.contents):,} blocks written, the log is empty")


def _print_problems(path: Path, count: int, problems: list[Problem], damage: int) -> None:
    for problem in problems:
        click.echo(f"slot {problem.slot}: block {problem.key} {problem.why}")
    if damage:
        click.echo(f"{damage} parts of the journal cannot be read: what they said is forgotten")
    sound = count - len(problems)
    click.echo(f"{path}: {sound:,} of {count:,} blocks are sound")


def _progress(what: str) -> Callable[[int, int], None]:
    """A line on a terminal's error output, renewed some times a second."""
    last = 0.0

    def report(done: int, total: int) -> None:
        nonlocal last
        if sys.stderr.isatty() and (time.monotonic() - last > 0.2 or done == total):
            last = time.monotonic()
            click.echo(f"\r{done:,} of {total:,} {what}", err=True, nl=done == total)

    return report


def _table(report: SlabReport) -> Table:
    table = Table(title=report.name, title_justify="left", box=box.SIMPLE_HEAD, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column()
    for name, value in _rows(report):
        table.add_row(name, str(value))
    return table


def _rows(report: SlabReport) -> list[tuple[str, Any]]:
    if report.problem:
        return [("cannot be used", report.problem), ("size", _size(report.file_bytes))]
    held = report.num_blocks * report.block_bytes
    rows = [
        ("model", report.fingerprint),
        ("made", _ago(report.created_at_s)),
        ("blocks", f"{report.num_blocks:,} of {report.capacity_blocks:,}, {_size(report.block_bytes)} each"),
        ("bytes", f"{_size(held)} in a slab of {_size(report.file_bytes)}"),
    ]
    if report.written_at_s:
        oldest, median, newest = map(_ago, report.written_at_s)
        rows.append(("written", f"oldest {oldest}, median {median}, newest {newest}"))
    rows.append(("journal", f"epoch {report.epoch}, log {report.log_used:.0%} full"))
    if report.journal_damage:
        rows.append(("journal damage", f"{report.journal_damage} parts cannot be read"))
    if report.owner:
        rows.append(("open", f"by process {report.owner}"))
    return rows


def _size(num_bytes: int) -> str:
    value, units = float(num_bytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.4g} {units[0]}"


def _ago(moment_s: int) -> str:
    seconds = max(0, int(time.time()) - moment_s)
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds // size} {unit} ago"
    return f"{seconds} s ago"
