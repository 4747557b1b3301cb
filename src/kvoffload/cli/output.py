"""Output of commands: reports, output files, progress bars, terminal tables."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Literal

import click
from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table as RichTable
from rich.text import Text

from kvoffload.errors import ConfigError
from kvoffload.pages.page import Table
from kvoffload.settings.output_files import check_new, written
from kvoffload.text import NO_BREAK, unbroken

_WIDTH = 100
"""Characters per line of a report that is written to a file."""
_LIST_BELOW = 60
"""Width of a terminal below which a table that does not fit is shown as a list."""


class Terminal(Console):
    """Console of standard output. If the reader of a pipe has ended (``| head``), printing raises
    `BrokenPipeError`.

    Rich's own console would exit with code 1 instead, which in our commands means a failed check.
    """

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def show(json: bytes, table: RenderableType, *, is_json: bool, output: Path | None) -> None:
    """Print a report, or write it to the file of ``--output``."""
    if output is not None:
        write_output("output", output, json if is_json else plain_text(table))
    elif is_json:
        click.echo(json, nl=False)
    else:
        Terminal().print(table)


def plain_text(shown: RenderableType, width: int = _WIDTH) -> bytes:
    """Render a report for a file, without colours."""
    console = Console(width=width, no_color=True, record=True, force_terminal=False)
    with console.capture() as captured:
        console.print(shown)
    return captured.get().encode()


def confirm(question: str) -> None:
    """Ask the user before something is deleted, and return if the answer is yes.

    If the answer is no, prints that nothing was deleted, and exits with code 1.

    Raises: `click.Abort` after an interrupt. `ConfigError` if standard input has ended, as in a script.
    """
    try:
        is_confirmed = click.confirm(question)
    except click.Abort as error:
        if isinstance(error.__context__, EOFError):
            raise ConfigError("yes", None, "there is no answer on standard input; give --yes") from None
        raise
    if not is_confirmed:
        click.echo("nothing was deleted")
        sys.exit(1)


def check_output(field: str, path: Path, *, force: bool) -> None:
    """Raise `ConfigError` if the output file exists or cannot be written.

    Call this function before the work starts.

    With `force` an existing file is accepted; its content is kept until the output is written.
    """
    check_new(field, path, force=force)
    is_new = not path.exists()
    if is_new or path.is_file():
        with writable(field, path, "ab"):
            pass
    if is_new:
        path.resolve().unlink()  # deletes the file, not a symbolic link to it


@contextlib.contextmanager
def writable(field: str, path: Path, mode: Literal["wb", "ab"] = "wb") -> Iterator[BinaryIO]:
    """Yield the output file of option `field`, open for writing.

    Raises `ConfigError` if the file cannot be opened, or if a later write (for example on a full disk) or the
    close fails.
    """
    with written(field, path):
        raw = _OutputFile(field, path, mode)
    with io.BufferedWriter(raw) as file:
        yield file


class _OutputFile(io.FileIO):
    """An unbuffered file that raises its errors as `ConfigError` of the option `field`."""

    def __init__(self, field: str, path: Path, mode: Literal["wb", "ab"]) -> None:
        self._field, self._path = field, path
        super().__init__(path, mode)

    def write(self, data: Any, /) -> int:
        with written(self._field, self._path):
            return super().write(data)

    def close(self) -> None:
        with written(self._field, self._path):
            super().close()


def write_output(field: str, path: Path, content: bytes) -> None:
    """Write the output file of option `field`. Raises `ConfigError` if the file cannot be written."""
    with writable(field, path) as file:
        file.write(content)


@contextlib.contextmanager
def progress_bar(label: str, total: float, quiet: bool) -> Iterator[Callable[[float], None]]:
    """Show a progress bar if standard error is a terminal. Yields a function that reports the amount done."""
    console = Console(stderr=True)
    hidden = quiet or not console.is_terminal
    with Progress(*bar_columns(), console=console, transient=True, disable=hidden) as bar:
        task = bar.add_task(label, total=total)
        yield lambda done: bar.update(task, completed=done)


def bar_columns() -> tuple[ProgressColumn, ...]:
    """Return the columns of a progress bar: task, bar, share, time left."""
    percent = TextColumn("{task.percentage:>3.0f}%")
    return (TextColumn("{task.description}"), BarColumn(), percent, TimeRemainingColumn())


@contextlib.contextmanager
def tiers_silenced() -> Iterator[None]:
    """Hide log warnings about simulated tiers, because the report states the same facts."""
    log = logging.getLogger("kvoffload.tiering")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


_STYLES = {"good": "bold green", "bad": "bold red", "cannot": "dim"}


class Lines:
    """Sentences for the terminal, each on a new line. Lines wrap between words, but not between a number and
    its unit.
    """

    def __init__(self, lines: Iterable[str], style: str = "", indent: str = "  ") -> None:
        self._lines, self._style, self._indent = list(lines), style, indent

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wrapper = textwrap.TextWrapper(
            max(options.max_width, 2 * len(self._indent)), initial_indent=self._indent,
            subsequent_indent=self._indent, break_on_hyphens=False,
        )  # fmt: skip
        for line in self._lines:
            for wrapped in wrapper.wrap(unbroken(line)) or [""]:
                # Only the wrapper needs no-break spaces; in pipes and pasted text they would disturb.
                yield Text(wrapped.replace(NO_BREAK, " "), self._style)


class _TerminalTable:
    """A table. In a narrow terminal it is shown as a list of its rows."""

    def __init__(self, table: Table, width: int | None, pad_edge: bool) -> None:
        self._table, self._width, self._pad_edge = table, width, pad_edge

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = self._table
        if table.title:
            # Printed here, because rich would wrap its own title at the table's width.
            yield Text(table.title, "italic")
        if options.max_width < _LIST_BELOW and _natural_width(table) > options.max_width:
            yield from _as_list(table)
        else:
            yield _rich_table(table, self._width, self._pad_edge)


def terminal_table(table: Table, *, width: int | None = None, pad_edge: bool = True) -> RenderableType:
    """Render a table for the terminal. The last column takes the remaining width and may wrap.

    If the terminal has less than 60 characters per line, a table that does not fit becomes a list, so that no
    cell is cut off.
    """
    return _TerminalTable(table, width, pad_edge)


def _natural_width(table: Table) -> int:
    columns = zip(*([heading.removesuffix("#") for heading in table.headings], *table.rows), strict=True)
    return sum(2 + max(map(cell_len, column)) for column in columns)


def _as_list(table: Table) -> Iterator[RenderableType]:
    """Render each row as two lines: the first cell, and the other cells that are not empty."""
    labels = [heading.removesuffix("#") for heading in table.headings]
    for row, mark in zip(table.rows, table.marks or [""] * len(table.rows), strict=True):
        style = _STYLES.get(mark, "")
        named = [(label, cell) for label, cell in zip(labels, row, strict=True) if cell]
        # A number needs its heading, also as the first cell.
        needs_label = table.headings[0].endswith("#") or not row[0]
        # If the first cell is a mark, such as the star of a plan, the next cell stays beside it.
        count = 2 if not labels[0] and len(row[0]) == 1 else 1
        first = [f"{label} {cell}" if label and (needs_label or count == 2) else cell
                 for label, cell in named[:count]]  # fmt: skip
        cells = [f"{label}: {cell}" if label else cell for label, cell in named[count:]]
        yield Lines([" ".join(first)], style)
        yield Lines(["; ".join(cells)] if cells else [], style, "    ")
    yield Text()


def _rich_table(table: Table, width: int | None, pad_edge: bool) -> RichTable:
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
    return rich


def properties(title: str, rows: Iterable[tuple[str, object]]) -> Table:
    """Build a table of names and values without a header; empty values are left out."""
    return Table(title, ("", ""), [(name, str(value)) for name, value in rows if value])
