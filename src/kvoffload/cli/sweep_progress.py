"""How far a sweep is, on stderr: a bar on a terminal, now and then a line in a file or a log."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as ProgressBar

from kvoffload.sweep.measuring import Progress
from kvoffload.text import duration, percent

_REMEMBERED_S = 600
_SECONDS_BETWEEN_LINES = 30


@contextlib.contextmanager
def shown(
    quiet: bool, console: Console | None = None, clock_s: Callable[[], float] = time.monotonic
) -> Iterator[Callable[[Progress], None]]:
    """What a sweep is to call as it goes on. First of all it says what an earlier run has done."""
    console = console or Console(stderr=True)
    if quiet:
        yield lambda now: None
    elif console.is_terminal:
        with _bar(console) as update:
            yield _resuming_first(console, update)
    else:
        yield _resuming_first(console, Lines(console, clock_s).update)


class Lines:
    """Progress where there is no terminal: a line for each tenth at most, and no two within 30 seconds.

    The share is one of block references, not rows: a row of a long trace takes longer.
    """

    def __init__(self, console: Console, clock_s: Callable[[], float]) -> None:
        self._console, self._clock_s = console, clock_s
        self._began_s = self._last_s = 0.0
        self._begun_with = self._last_tenth = 0
        self._of = ""

    def update(self, now: Progress) -> None:
        """Print a line if it is time for one; none when all is done, which the results say."""
        if now.refs_done == 0 or now.of != self._of:
            # The traces have been read, or replays of another kind begin: what is left is to be told from
            # them alone.
            self._began_s = self._last_s = self._clock_s()
            self._of, self._begun_with, self._last_tenth = now.of, now.refs_done, 0
        if now.rows_done == now.rows:
            return
        time_s, tenth = self._clock_s(), 10 * now.refs_done // now.refs
        if time_s < self._last_s + _SECONDS_BETWEEN_LINES or tenth == self._last_tenth:
            return
        self._last_s, self._last_tenth = time_s, tenth
        share, done = percent(now.refs_done / now.refs, 0), now.refs_done - self._begun_with
        left = duration((time_s - self._began_s) * (now.refs - now.refs_done) / done)
        _say(
            self._console,
            f"{now.rows_done:,} of {now.rows:,} {now.of}, {share}, about {left} left",
        )


def _resuming_first(console: Console, update: Callable[[Progress], None]) -> Callable[[Progress], None]:
    """`update`, and before its first call a line if a journal has been found."""
    calls = 0

    def say_and_update(now: Progress) -> None:
        nonlocal calls
        if calls == 0 and now.rows_done:
            _say(console, f"resuming, {now.rows_done:,} of {now.rows:,} done")
        calls += 1
        update(now)

    return say_and_update


@contextlib.contextmanager
def _bar(console: Console) -> Iterator[Callable[[Progress], None]]:
    """A bar over block references, as `Lines`."""
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"),
               TimeRemainingColumn())  # fmt: skip
    with ProgressBar(*columns, console=console, transient=True, speed_estimate_period=_REMEMBERED_S) as bar:
        task = bar.add_task("reading", total=None)
        yield lambda now: bar.update(
            task,
            description=f"{now.rows_done:,} of {now.rows:,} {now.of}",
            completed=now.refs_done,
            total=now.refs,
        )


def how_to_go_on(done: Progress, journal: Path | None) -> str:
    """What is said of work that was interrupted."""
    if journal is None:
        return "; without --output nothing is kept"
    kept = f"{done.rows_done:,} of {done.rows:,} rows are kept in {journal}"
    return f"; {kept}: run the same command again to go on"


def _say(console: Console, text: str) -> None:
    console.print(f"kvoffload: {text}", markup=False, highlight=False, soft_wrap=True)
