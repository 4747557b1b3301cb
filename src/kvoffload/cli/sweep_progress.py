"""Progress of a sweep on standard error: a bar on a terminal, occasional lines in a log."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import click
from rich.console import Console
from rich.progress import Progress as ProgressBar

from kvoffload.cli.output import bar_columns
from kvoffload.errors import SweepError
from kvoffload.sweep.measuring import Progress
from kvoffload.text import duration, percent

_REMEMBERED_S = 600
_SECONDS_BETWEEN_LINES = 30


class Resumable(Protocol):
    """A run that continues from a journal after an interruption."""

    @property
    def progress(self) -> Progress: ...
    @property
    def journal_path(self) -> Path | None: ...


class _Terminated(KeyboardInterrupt):
    """Raised when the process receives SIGTERM, which ends a run in the same way as Ctrl-C."""


@contextlib.contextmanager
def stopping_cleanly(run: Resumable) -> Iterator[None]:
    """End the process cleanly if the run is interrupted: report how many rows are kept, and exit.

    The exit code is 130 after Ctrl-C, 143 after SIGTERM, and 1 after a `SweepError`."""
    with _sigterm_raises() as was_terminated:
        try:
            yield
            return
        except (KeyboardInterrupt, SweepError) as stop:
            reason, code = str(stop), 1
            if was_terminated():
                # A signal to the whole process group also ends the workers, so a `SweepError` may come first.
                reason, code = "terminated", 128 + signal.SIGTERM
            elif isinstance(stop, KeyboardInterrupt):
                reason, code = "interrupted", 128 + signal.SIGINT
    click.echo(f"kvoffload: {reason}{_kept(run.progress, run.journal_path)}", err=True)
    sys.exit(code)


@contextlib.contextmanager
def _sigterm_raises() -> Iterator[Callable[[], bool]]:
    """Raise `_Terminated` at SIGTERM, so that workers and files are closed.

    Does nothing outside the main thread.
    """
    terminated = False

    def stop(number: int, frame: object) -> None:
        nonlocal terminated
        terminated = True
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second signal must not interrupt the closing
        raise _Terminated

    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield lambda: terminated
    finally:
        signal.signal(signal.SIGTERM, before)


def _kept(done: Progress, journal: Path | None) -> str:
    if journal is None:
        return "; without --output nothing is kept"
    kept = f"{done.rows_done:,} of {done.rows:,} rows are kept in {journal}"
    return f"; {kept}: run the same command again to go on"


@contextlib.contextmanager
def shown(
    quiet: bool, console: Console | None = None, clock_s: Callable[[], float] = time.monotonic
) -> Iterator[Callable[[Progress], None]]:
    """Yield a callback that shows the progress of a sweep.

    The first call of the callback also reports how many rows an earlier run has done.
    """
    console = console or Console(stderr=True)
    if quiet:
        yield lambda now: None
    elif console.is_terminal:
        with _bar(console) as update:
            yield _resuming_first(console, update)
    else:
        yield _resuming_first(console, Lines(console, clock_s).update)


class Lines:
    """Progress lines for a log: at most one for each tenth of the work, at least 30 seconds apart.

    The work is measured in block references, not in rows, because a row of a long trace takes longer than a
    row of a short trace.
    """

    def __init__(self, console: Console, clock_s: Callable[[], float]) -> None:
        self._console, self._clock_s = console, clock_s
        self._began_s = self._last_s = 0.0
        self._refs_at_begin = self._last_tenth = 0
        self._of = ""

    def update(self, now: Progress) -> None:
        """Print a line if it is due. Print nothing when all rows are done, because the results follow."""
        if now.refs_done == 0 or now.of != self._of:
            # Replays begin, or replays of another kind: restart the estimate of the remaining time.
            self._began_s = self._last_s = self._clock_s()
            self._of, self._refs_at_begin, self._last_tenth = now.of, now.refs_done, 0
        if now.rows_done == now.rows:
            return
        time_s, tenth = self._clock_s(), 10 * now.refs_done // now.refs
        if time_s < self._last_s + _SECONDS_BETWEEN_LINES or tenth == self._last_tenth:
            return
        self._last_s, self._last_tenth = time_s, tenth
        share, done = percent(now.refs_done / now.refs, 0), now.refs_done - self._refs_at_begin
        remaining = duration((time_s - self._began_s) * (now.refs - now.refs_done) / done)
        _print(self._console, f"{now.rows_done:,} of {now.rows:,} {now.of}, {share}, about {remaining} left")


def _resuming_first(console: Console, update: Callable[[Progress], None]) -> Callable[[Progress], None]:
    """Wrap `update`: before its first call, print a line if an earlier run has done rows already."""
    calls = 0

    def print_and_update(now: Progress) -> None:
        nonlocal calls
        if calls == 0 and now.rows_done:
            _print(console, f"resuming, {now.rows_done:,} of {now.rows:,} done")
        calls += 1
        update(now)

    return print_and_update


@contextlib.contextmanager
def _bar(console: Console) -> Iterator[Callable[[Progress], None]]:
    """Yield a callback that updates a progress bar on the terminal. The bar measures block references."""
    with ProgressBar(
        *bar_columns(), console=console, transient=True, speed_estimate_period=_REMEMBERED_S
    ) as bar:
        task = bar.add_task("reading", total=None)
        yield lambda now: bar.update(
            task,
            description=f"{now.rows_done:,} of {now.rows:,} {now.of}",
            completed=now.refs_done,
            total=now.refs,
        )


def _print(console: Console, text: str) -> None:
    console.print(f"kvoffload: {text}", markup=False, highlight=False, soft_wrap=True)
