"""``kvoffload pool``: list, inspect and remove the RAM pools that engines of this machine share."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from kvoffload.cli.fields import argument, option, options_of
from kvoffload.cli.options import FormatOptions
from kvoffload.cli.output import Terminal, confirm, properties, terminal_table
from kvoffload.errors import ConfigError
from kvoffload.node.pool_directory import SHARED_MEMORY, STATE, PoolStatus, find, pools
from kvoffload.node.pool_directory import remove as remove_pool
from kvoffload.node.state import read_counts
from kvoffload.pages.page import Table
from kvoffload.text import duration, size


@dataclass(frozen=True, kw_only=True)
class ListOptions(FormatOptions):
    """Options of the list: its format, and the directory of the pools."""

    root: Path = option(SHARED_MEMORY, "Directory of the pools.")


@dataclass(frozen=True, kw_only=True)
class NameOptions(ListOptions):
    """Options of a pool's report: name of the pool, format, directory of the pools."""

    name: str = argument()


@dataclass(frozen=True, kw_only=True)
class RemoveOptions:
    """Options to remove a pool: its name, its directory, and a switch to skip the question."""

    name: str = argument()
    yes: bool = option(False, "Do not ask.")
    root: Path = option(SHARED_MEMORY, "Directory of the pools.")


@click.group()
def pool() -> None:
    """List, inspect or remove the RAM pools that engines of this machine share.

    Shows the pools of this user. NAME is the name that `kvoffload pool ls` prints.
    """


@pool.command()
@options_of(ListOptions)
def ls(options: ListOptions) -> None:
    """List the pools: memory, blocks, engines, time since the last use."""
    reports = [_report(status) for status in pools(_checked(options.root))]
    if options.is_json:
        click.echo(json.dumps(reports, indent=2))
    elif reports:
        headings = ("name", "memory#", "blocks#", "engines#", "idle#", "removed after")
        Terminal().print(terminal_table(Table("", headings, [_row(report) for report in reports])))
        for report in reports:
            if report["problem"]:
                click.echo(f"{report['name']} cannot be used: {report['problem']}")
    else:
        click.echo(f"there is no pool in {options.root}")


@pool.command()
@options_of(NameOptions)
def inspect(options: NameOptions) -> None:
    """Show the pool NAME: memory, blocks, counts, engines, and the settings that are equal in all its
    engines."""
    report = _report(find(options.name, _checked(options.root)))
    if options.is_json:
        click.echo(json.dumps(report, indent=2))
    else:
        Terminal().print(terminal_table(properties(report["name"], _properties(report))))


@pool.command()
@options_of(RemoveOptions)
def rm(options: RemoveOptions) -> None:
    """Remove the pool NAME, with every block in it. Stop all engines of the pool first.

    Asks before it removes the pool; if you answer no, the exit code is 1.
    """
    status = find(options.name, _checked(options.root))
    if not options.yes:
        confirm(f"Remove the pool {status.name} of {size(status.num_bytes)}?")
    click.echo(f"pool {status.name} of {size(remove_pool(status.name, options.root))}: removed")


def _checked(root: Path) -> Path:
    if not root.is_dir():
        raise ConfigError("root", str(root), "it is not a directory")
    return root


def _report(status: PoolStatus) -> dict[str, Any]:
    counts = read_counts(status.path / STATE)
    return {
        "name": status.name,
        "path": str(status.path),
        "bytes": status.num_bytes,
        "blocks": counts.pop("blocks", None),
        "capacity_blocks": counts.pop("capacity", None),
        "pids": status.pids,
        "is_used": status.is_used,
        "idle_s": status.idle_s,
        "keep_s": status.keep_s,
        "counts": counts,
        "facts": status.facts,
        "problem": status.problem,
    }


def _blocks(report: dict[str, Any]) -> str:
    if report["blocks"] is None:
        return ""
    return f"{report['blocks']:,} of {report['capacity_blocks']:,}"


def _row(report: dict[str, Any]) -> tuple[str, ...]:
    idle = "" if report["is_used"] else duration(report["idle_s"])
    memory, engines = size(report["bytes"]), f"{len(report['pids'])}"
    return report["name"], memory, _blocks(report), engines, idle, duration(report["keep_s"])


def _properties(report: dict[str, Any]) -> list[tuple[str, Any]]:
    counts = report["counts"]
    loaded, stored = counts.get("loaded", 0), counts.get("stored", 0)
    return [
        ("cannot be used", report["problem"]),
        ("directory", report["path"]),
        ("memory", size(report["bytes"])),
        ("blocks", _blocks(report)),
        ("loaded", f"{loaded:,} blocks" if counts else ""),
        ("stored", f"{stored:,} blocks, {counts.get('evicted', 0):,} evicted" if counts else ""),
        ("engines", ", ".join(f"process {pid}" for pid in report["pids"]) or "none"),
        ("idle", "" if report["is_used"] else duration(report["idle_s"])),
        ("removed", f"{duration(report['keep_s'])} after the last use"),
        *((f"of its engines: {name}", value) for name, value in report["facts"].items()),
    ]
