"""Many replays at once: every combination of a grid on some traces, in parallel, resumable.

Owns the order of things: what is checked before any work, what is kept when the work is interrupted, and
that the result depends on neither the number of workers nor the interruptions. The grid is `sweep.grid`,
the replays `sweep.measuring`, the columns `sweep.table`, the workers `sweep.workers`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kvoffload.errors import ConfigError
from kvoffload.sweep.bootstrap import RESAMPLES
from kvoffload.sweep.grid import Grid
from kvoffload.sweep.measuring import Measuring, OnProgress, Progress, Work, swept
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
        self._work = Work(output, force, jobs, scheduler, seed, resamples)
        self._sources = [TraceSource(trace, block_tokens, skip_bad_lines) for trace in dict.fromkeys(traces)]
        self._grid, self._timings = grid, timings
        self.progress = Progress(0, 0, 0, 0)

    @property
    def journal_path(self) -> Path | None:
        """Where finished replays are kept meanwhile."""
        return self._work.journal_path

    def run(self, on_progress: OnProgress = lambda progress: None) -> SweepResult:
        """Do what is not done yet, write the output, and say what came of it.

        Raises: `ConfigError` for an output that cannot be written, a size that is no block of a trace, a
        scheduler that does not answer; `TraceError`; `SweepError` if a replay failed. What had been
        finished until then is kept.
        """
        work = self._work
        with work.begun() as (workers, journal):
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
            runs = Runs(traces, points, measured, seed=work.seed, resamples=work.resamples)
            rows = rows_of(runs, block_bytes=self._grid.block_bytes, timings=self._timings)
            verdicts = verdicts_of(points, rows, runs.difference)
            for one in verdicts:
                rows[one.number] = msgspec.structs.replace(rows[one.number], verdict=one.line)
            work.write(rows)
            if journal is not None:
                journal.remove()
        return SweepResult(rows, verdicts, left_out, measuring.from_journal, violations(rows))
