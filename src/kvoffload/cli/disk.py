"""``kvoffload disk``: what is in the directory of a disk tier, whether it is sound, how to be rid of it."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvoffload.cli.options import in_form
from kvoffload.cli.text import difference_lines
from kvoffload.errors import ConfigError, UnavailableError
from kvoffload.text import duration, percent, size
from kvoffload.tiers.disk.inspection import Problem, SlabReport, find_slabs, opened
from kvoffload.tiers.disk.inspection import compact as compact_slab
from kvoffload.tiers.disk.inspection import delete as delete_slabs
from kvoffload.tiers.disk.inspection import inspect as inspect_slabs
from kvoffload.tiers.disk.inspection import verify as verify_slab
from kvoffload.tiers.producer_text import summary

_path = click.argument("path", type=click.Path(path_type=Path))


@click.group()
def disk() -> None:
    """Look into the directory of a disk tier, or delete it."""


@disk.command()
@_path
@in_form
def inspect(path: Path, form: str) -> None:
    """Say what is in PATH, a directory or a slab in it: blocks, sizes and ages by model, last used first.

    Of slabs of several producers also how each differs from the one used last, as in
    `rope_theta: 10000 / 1000000`: its value first. Their whole texts are in `--format json`.

    Reads the journal only, and works while a process has it open; then it may be a moment behind.
    """
    reports = inspect_slabs(path)
    if form == "json":
        click.echo(json.dumps([asdict(report) for report in reports], indent=2))
        return
    console = Console()
    for report in reports:
        console.print(_table(report, reports[0]))


@disk.command()
@_path
@in_form
def verify(path: Path, form: str) -> None:
    """Read every block in PATH, a directory or a slab in it, and check it.

    Exit code 0: all are sound; 1: a list of those that are not. A block on the list would be a miss, and is
    no danger. Not while a process has PATH open.
    """
    results = [_verified(slab) for slab in find_slabs(path)]
    if form == "json":
        click.echo(json.dumps([result.as_json() for result in results], indent=2))
    else:
        for result in results:
            result.print()
    if not all(result.is_sound for result in results):
        sys.exit(1)


@disk.command()
@_path
def compact(path: Path) -> None:
    """Write a fresh checkpoint into each slab of PATH and empty its log.

    What was damaged in the journal, or cannot be read, is gone then. Not while a process has PATH open.
    """
    left_alone = False
    for place in find_slabs(path):
        used = place.stat()
        try:
            with opened(place) as (slab, found):
                compact_slab(slab, found)
        except UnavailableError:
            raise
        except OSError as error:
            raise UnavailableError("path", str(place), f"it cannot be written ({error.strerror})") from None
        except ConfigError as error:
            click.echo(f"{place}: left alone: {error.allowed}")
            left_alone = True
            continue
        # Nobody has used it: it does not stay longer than others for this.
        os.utime(place, ns=(used.st_atime_ns, used.st_mtime_ns))
        click.echo(f"{place}: checkpoint of {len(found.contents):,} blocks written, the log is empty")
    if left_alone:
        sys.exit(1)


@disk.command()
@_path
@click.option("--yes", is_flag=True, help="Do not ask.")
def rm(path: Path, yes: bool) -> None:
    """Delete PATH, a slab or all slabs of a directory, with every block in it.

    Not while a process has PATH open.
    """
    slabs = find_slabs(path)
    file_bytes = size(sum(slab.stat().st_size for slab in slabs))
    what = f"{len(slabs):,} slab{'s' * (len(slabs) > 1)} of {file_bytes} in {slabs[0].parent}"
    if not yes:
        click.confirm(f"Delete {what}?", abort=True)
    delete_slabs(slabs)
    click.echo(f"{what}: deleted")


@dataclass(frozen=True)
class _Verified:
    """What was found out about the blocks of one slab; `why` if it cannot be used at all."""

    slab: Path
    num_blocks: int = 0
    problems: Sequence[Problem] = ()
    journal_damage: int = 0
    why: str = ""

    @property
    def is_sound(self) -> bool:
        return not (self.problems or self.journal_damage or self.why)

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.slab.name,
            "problem": self.why,
            "blocks": self.num_blocks,
            "problems": [problem._asdict() for problem in self.problems],
            "journal_damage": self.journal_damage,
        }

    def print(self) -> None:
        for problem in self.problems:
            click.echo(f"slot {problem.slot}: block {problem.key} {problem.why}")
        if self.journal_damage:
            click.echo(
                f"{self.journal_damage} parts of the journal cannot be read: what they said is forgotten"
            )
        sound = self.num_blocks - len(self.problems)
        click.echo(
            f"{self.slab}: {self.why}" if self.why else
            f"{self.slab}: {sound:,} of {self.num_blocks:,} blocks are sound"
        )  # fmt: skip


def _verified(path: Path) -> _Verified:
    try:
        with opened(path) as (slab, found):
            problems = verify_slab(slab, found, _progress("blocks"))
            return _Verified(path, len(found.contents), problems, found.damaged)
    except UnavailableError:
        raise
    except ConfigError as error:
        return _Verified(path, why=f"cannot be used: {error.allowed}")


def _progress(what: str) -> Callable[[int, int], None]:
    """A line on a terminal's error output, renewed some times a second."""
    last = 0.0

    def report(done: int, total: int) -> None:
        nonlocal last
        if sys.stderr.isatty() and (time.monotonic() - last > 0.2 or done == total):
            last = time.monotonic()
            click.echo(f"\r{done:,} of {total:,} {what}", err=True, nl=done == total)

    return report


def _table(report: SlabReport, newest: SlabReport) -> Table:
    table = Table(title=report.name, title_justify="left", box=box.SIMPLE_HEAD, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column()
    for name, value in _rows(report):
        table.add_row(name, escape(str(value)))
    if lines := difference_lines(newest.fingerprint, report.fingerprint):
        table.add_row(f"differs from {newest.name}", escape("\n".join(lines)))
    return table


def _rows(report: SlabReport) -> list[tuple[str, Any]]:
    if report.problem:
        return [("cannot be used", report.problem), ("size", size(report.file_bytes))]
    held = report.num_blocks * report.block_bytes
    each = size(report.block_bytes)
    rows = [
        ("model", summary(report.fingerprint)),
        ("made", _ago(report.created_at_s)),
        ("blocks", f"{report.num_blocks:,} of {report.capacity_blocks:,}, {each} each"),
        ("bytes", f"{size(held)} in a slab of {size(report.file_bytes)}"),
    ]
    if report.written_at_s:
        oldest, median, newest = map(_ago, report.written_at_s)
        rows.append(("written", f"oldest {oldest}, median {median}, newest {newest}"))
    rows.append(("journal", f"epoch {report.epoch}, log {percent(report.log_used, 0)} full"))
    if report.journal_damage:
        rows.append(("journal damage", f"{report.journal_damage} parts cannot be read"))
    if report.owner:
        rows.append(("open", f"by process {report.owner}"))
    return rows


def _ago(moment_s: int) -> str:
    return f"{duration(max(0, int(time.time()) - moment_s))} ago"
