"""Output of commands: reports, output files, progress bars, terminal tables."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import click
from rich import box
from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table as RichTable
from rich.text import Text

from kvoffload.errors import ConfigError
from kvoffload.pages.page import Table

_WIDTH = 100
"""Characters per line in a file."""


def show(json: bytes, table: RenderableType, *, is_json: bool, output: Path | None) -> None:
    """Print a report, or write it to the file of ``--output``."""
    if output is not None:
        write_output("output", output, json if is_json else plain_text(table))
    elif is_json:
        click.echo(json, nl=False)
    else:
        Console().print(table)


def plain_text(shown: RenderableType) -> bytes:
    """Render a report for a file, without colours."""
    console = Console(width=_WIDTH, no_color=True, record=True, force_terminal=False)
    with console.capture() as captured:
        console.print(shown)
    return captured.get().encode()


@contextlib.contextmanager
def writable(field: str, path: Path) -> Iterator[BinaryIO]:
    """Open the output file of option `field`. Raises `ConfigError` on any failure, also on a full disk."""
    try:
        with path.open("wb") as file:
            yield file
    except OSError as error:
        raise ConfigError(field, str(path), f"the file cannot be written ({error.strerror})") from None


def write_output(field: str, path: Path, content: bytes) -> None:
    """Write the output file of option `field`. Raises `ConfigError`."""
    with writable(field, path) as file:
        file.write(content)


def check_new(field: str, path: Path, *, force: bool) -> None:
    """Raise `ConfigError` if the file exists, unless `force` is set."""
    if path.exists() and not force:
        raise ConfigError(field, str(path), "the file exists; --force replaces it")


@contextlib.contextmanager
def progress_bar(what: str, total: float, quiet: bool) -> Iterator[Callable[[float], None]]:
    """Show a progress bar, if standard error is a terminal. Yields a function that takes the amount done."""
    console = Console(stderr=True)
    hidden = quiet or not console.is_terminal
    with Progress(*bar_columns(), console=console, transient=True, disable=hidden) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.update(task, completed=done)


def bar_columns() -> tuple[ProgressColumn, ...]:
    """Return the columns of a progress bar: task, bar, share, time left."""
    percent = TextColumn("{task.percentage:>3.0f}%")
    return (TextColumn("{task.description}"), BarColumn(), percent, TimeRemainingColumn())


@contextlib.contextmanager
def tiers_silenced() -> Iterator[None]:
    """Hide warnings of simulated tiers, because the report has the same facts."""
    log = logging.getLogger("kvoffload.tiering")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


_STYLES = {"good": "bold green", "bad": "bold red", "cannot": "dim"}


def terminal_table(table: Table, *, width: int | None = None, pad_edge: bool = True) -> RenderableType:
    """Render a table for the terminal; the last column takes the remaining width and may fold."""
    rich = RichTable(box=box.SIMPLE_HEAD, show_header=any(table.headings), width=width, pad_edge=pad_edge)
    last = len(table.headings) - 1
    for position, heading in enumerate(table.headings):
        is_number = heading.endswith("#")
        rich.add_column(
            heading.removesuffix("#"), justify="right" if is_number else "left",
            no_wrap=is_number or position < last, overflow="fold",
        )  # fmt: skip
    for row, mark in zip(table.rows, table.marks or [""] * len(table.rows), strict=True):
        # `Text`, because a cell may look like rich's markup.
        rich.add_row(*map(Text, row), style=_STYLES.get(mark, ""))
    # Not rich's own title, which is folded at the table's width.
    return Group(Text(table.title, "italic"), rich) if table.title else rich


def properties(title: str, rows: Iterable[tuple[str, object]]) -> Table:
    """Build a table of names and values without a header; empty values are left out."""
    return Table(title, ("", ""), [(name, str(value)) for name, value in rows if value])
