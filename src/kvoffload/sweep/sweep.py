"""Many replays at once: every combination of a grid on some traces, in parallel, resumable.

Owns the order of things: what is checked before any work, what is kept when the work is interrupted, and
that the result depends on neither the number of workers nor the interruptions. The grid is `sweep.grid`,
the replays `sweep.measuring`, the columns `sweep.table`, the workers `sweep.workers`.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from kvoffload.errors import ConfigError
from kvoffload.sweep.bootstrap import RESAMPLES, Resamples
from kvoffload.sweep.grid import Grid
from kvoffload.sweep.journal import SweepJournal, journal_path
from kvoffload.sweep.measuring import Measuring, OnProgress, Progress, swept, workers_of
from kvoffload.sweep.outputs import RowsFile
from kvoffload.sweep.table import Row, Runs, rows_of, violations
from kvoffload.sweep.task import TraceSource
from kvoffload.sweep.verdict import Verdict, verdicts_of


@dataclass(frozen=True)
class SweepResult:
    """What came of a sweep.

    Attributes:
        rows: one for each combination, in the order of the traces and axes.
        verdicts: what is to be said in words, one for each trace, sizes, store mode and tiers.
        left_out: for each combination that makes no sense, why; each reason with how often it was given.
        from_journal: combinations whose replay an earlier run had finished.
        violations: one line for each row above the optimum; anything but none is a bug.
    """

    rows: list[Row]
    verdicts: list[Verdict]
    left_out: Counter[str]
    from_journal: int
    violations: list[str]


class Sweep:
    """One sweep. Use once: construct, `run`. What is impossible is a `ConfigError` before any work.

    With an output, each finished replay is kept in a journal beside it, ``OUTPUT.journal``: a sweep with
    the same output that was interrupted, for any reason, continues where it stopped. A replay is known by
    everything that determines it: the trace's content, the configuration, version and code of this package,
    code of the policy. When the output is written, the journal is removed.

    Args:
        traces: files, or names of built-in workloads.
        grid: the axes.
        block_tokens, skip_bad_lines: as `load_trace` takes them.
        output: ``.csv``, ``.json`` or ``.parquet``; None keeps nothing.
        force: replace an output that exists.
        jobs: processes; None for one per CPU.
        scheduler: address of a Dask scheduler that does the work instead.
        seed, resamples: of the confidence intervals.
        timings: a column of seconds, which differ from run to run.

    Attributes:
        progress: how far it is; also when it was interrupted.
    """

    def __init__(
        self,
        traces: Sequence[str],
        grid: Grid,
        *,
        block_tokens: int | None = None,
        skip_bad_lines: bool = False,
        output: Path | None = None,
        force: bool = False,
        jobs: int | None = None,
        scheduler: str | None = None,
        seed: int = 0,
        resamples: int = RESAMPLES,
        timings: bool = False,
    ) -> None:
        if not traces:
            raise ConfigError("trace", "", "at least one")
        if jobs is not None and jobs < 1:
            raise ConfigError("jobs", jobs, "at least 1")
        if jobs is not None and scheduler is not None:
            raise ConfigError("jobs", jobs, "with a scheduler, the cluster decides")
        Resamples(np.zeros(1, np.int64), resamples, seed)
        self._sources = [TraceSource(trace, block_tokens, skip_bad_lines) for trace in dict.fromkeys(traces)]
        self._grid, self._timings = grid, timings
        self._jobs, self._scheduler = jobs, scheduler
        self._seed, self._resamples = seed, resamples
        self._output = RowsFile(output) if output is not None else None
        if output is not None and output.exists() and not force and not journal_path(output).exists():
            raise ConfigError("output", str(output), "a file that does not exist yet, or --force")
        self.progress = Progress(0, 0, 0, 0)

    @property
    def journal_path(self) -> Path | None:
        """Where finished replays are kept meanwhile."""
        return journal_path(self._output.path) if self._output else None

    def run(self, on_progress: OnProgress = lambda progress: None) -> SweepResult:
        """Do what is not done yet, write the output, and say what came of it.

        Raises: `ConfigError` for an output that cannot be written, a size that is no block of a trace, a
        scheduler that does not answer; `TraceError`; `SweepError` if a replay failed. What had been
        finished until then is kept.
        """
        with contextlib.ExitStack() as stack:
            journal = None
            if self._output is not None:
                journal = SweepJournal(self._output.path)
                stack.callback(journal.close)
            workers = workers_of(self._jobs, self._scheduler)
            stack.callback(workers.close)
            traces = [swept(source) for source in self._sources]
            points, left_out = [], Counter[str]()
            for number, trace in enumerate(traces):
                of_trace, reasons = self._grid.points(number, trace.unique_blocks)
                points += of_trace
                left_out.update(reasons)
            if not points:
                raise ConfigError("stores", ",".join(self._grid.stores), "; ".join(left_out))

            def told(progress: Progress) -> None:
                self.progress = progress
                on_progress(progress)

            measuring = Measuring(traces, workers, journal)
            measured = measuring.measure(points, told)
            runs = Runs(traces, points, measured, seed=self._seed, resamples=self._resamples)
            rows = rows_of(runs, block_bytes=self._grid.block_bytes, timings=self._timings)
            verdicts = verdicts_of(points, rows, runs.difference)
            for one in verdicts:
                rows[one.number] = msgspec.structs.replace(rows[one.number], verdict=one.line)
            if self._output is not None and journal is not None:
                self._output.write(rows)
                journal.remove()
        return SweepResult(rows, verdicts, left_out, measuring.from_journal, violations(rows))
