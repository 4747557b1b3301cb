"""``kvoffload disk``: inspect, verify, compact and delete the slabs of a disk tier."""

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

from kvoffload.cli.fields import argument, option, options_of
from kvoffload.cli.options import FormatOptions
from kvoffload.cli.output import Terminal, confirm, properties, terminal_table
from kvoffload.cli.text import difference_lines
from kvoffload.errors import ConfigError, UnavailableError
from kvoffload.pages.page import Table
from kvoffload.text import counted, duration, percent, size
from kvoffload.tiers.disk.inspection import Problem, SlabReport, find_slabs, opened
from kvoffload.tiers.disk.inspection import compact as compact_slab
from kvoffload.tiers.disk.inspection import delete as delete_slabs
from kvoffload.tiers.disk.inspection import inspect as inspect_slabs
from kvoffload.tiers.disk.inspection import verify as verify_slab
from kvoffload.tiers.producer_text import summary


@dataclass(frozen=True, kw_only=True)
class PathOptions:
    """Argument for a slab, or a directory with slabs."""

    path: Path = argument()


@dataclass(frozen=True, kw_only=True)
class ReportOptions(PathOptions, FormatOptions):
    """Options of commands that report on slabs."""


@dataclass(frozen=True, kw_only=True)
class DeleteOptions(PathOptions):
    yes: bool = option(False, "Do not ask.")


@click.group()
def disk() -> None:
    """Inspect, verify, compact or delete the directory of a disk tier."""


@disk.command()
@options_of(ReportOptions)
def inspect(options: ReportOptions) -> None:
    """List the blocks of PATH, a slab or a directory with slabs: counts, sizes and ages by model.

    The slab used last comes first.

    If models or settings of slabs differ, the list shows how each slab differs from the slab used last, for
    example `rope_theta: 10000 / 1000000`. The first value belongs to the slab used last. `--format json`
    shows all fields.

    Reads only the journal. PATH may be open in another process, but then recent changes may be missing.
    """
    reports = inspect_slabs(options.path)
    if options.is_json:
        click.echo(json.dumps([asdict(report) for report in reports], indent=2))
        return
    console = Terminal()
    for report in reports:
        console.print(terminal_table(_table(report, reports[0])))


@disk.command()
@options_of(ReportOptions)
def verify(options: ReportOptions) -> None:
    """Read and verify every block of PATH, a slab or a directory with slabs.

    Lists the damaged blocks; the exit code is 1 if there are any. An engine treats a damaged block as a miss,
    so it never causes a wrong answer. PATH must not be open in another process, but may be mounted read-only.
    """
    results = [_verified(slab) for slab in find_slabs(options.path)]
    if options.is_json:
        click.echo(json.dumps([result.as_json() for result in results], indent=2))
    else:
        for result in results:
            result.print()
    if not all(result.is_sound for result in results):
        sys.exit(1)


@disk.command()
@options_of(PathOptions)
def compact(options: PathOptions) -> None:
    """Write a fresh checkpoint into each slab of PATH, and empty the log of the slab.

    Damaged entries of the journal are dropped. PATH must not be open in another process.
    """
    has_skipped = False
    for path in find_slabs(options.path):
        before = path.stat()
        try:
            with opened(path) as (slab, recovered):
                compact_slab(slab, recovered)
        except UnavailableError:
            raise
        except OSError as error:
            raise UnavailableError("path", str(path), f"it cannot be written ({error.strerror})") from None
        except ConfigError as error:
            click.echo(f"{path}: skipped: {error.allowed}")
            has_skipped = True
            continue
        # Compacting does not count as use. The slab keeps its time of last use, because users delete slabs by
        # this time.
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        click.echo(f"{path}: checkpoint of {len(recovered.contents):,} blocks written, the log is empty")
    if has_skipped:
        sys.exit(1)


@disk.command()
@options_of(DeleteOptions)
def rm(options: DeleteOptions) -> None:
    """Delete PATH, a slab or a directory with slabs, with all its blocks.

    PATH must not be open in another process. Asks before it deletes; if you answer no, the exit code is 1.
    """
    slabs = find_slabs(options.path)
    file_bytes = size(sum(slab.stat().st_size for slab in slabs))
    summary_line = f"{counted(len(slabs), 'slab')} of {file_bytes} in {slabs[0].parent}"
    if not options.yes:
        confirm(f"Delete {summary_line}?")
    delete_slabs(slabs)
    click.echo(f"{summary_line}: deleted")


@dataclass(frozen=True)
class _Verified:
    """Result of verifying one slab. If the slab cannot be used, `why` is the reason."""

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
            click.echo(f"{self.journal_damage} parts of the journal cannot be read, and are ignored")
        sound = self.num_blocks - len(self.problems)
        click.echo(
            f"{self.slab}: {self.why}" if self.why else
            f"{self.slab}: {sound:,} of {self.num_blocks:,} blocks are sound"
        )  # fmt: skip


def _verified(path: Path) -> _Verified:
    try:
        with opened(path, read_only=True) as (slab, recovered):
            problems = verify_slab(slab, recovered, _progress("blocks"))
            return _Verified(path, len(recovered.contents), problems, recovered.damaged)
    except UnavailableError:
        raise
    except ConfigError as error:
        return _Verified(path, why=f"cannot be used: {error.allowed}")


def _progress(label: str) -> Callable[[int, int], None]:
    """Return a callback that shows progress on a terminal, a few times a second."""
    last = 0.0

    def report(done: int, total: int) -> None:
        nonlocal last
        if sys.stderr.isatty() and (time.monotonic() - last > 0.2 or done == total):
            last = time.monotonic()
            click.echo(f"\r{done:,} of {total:,} {label}", err=True, nl=done == total)

    return report


def _table(report: SlabReport, newest: SlabReport) -> Table:
    differences = "\n".join(difference_lines(newest.fingerprint, report.fingerprint))
    return properties(report.name, [*_rows(report), (f"differs from {newest.name}", differences)])


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
