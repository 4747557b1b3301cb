"""Sweep: replays traces with all combinations of a grid. Replays run in parallel, and can be resumed.

The result is the same for any number of workers, and with or without an interruption. This module only
controls the sequence of steps: `sweep.grid` defines the grid, `sweep.measuring` runs the replays, and
`sweep.table` defines the columns of the result.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kvoffload.errors import ConfigError
from kvoffload.sweep.grid import Grid
from kvoffload.sweep.measuring import Measuring, OnProgress, Progress, Work, swept
from kvoffload.sweep.table import Row, Runs, rows_of, violations
from kvoffload.sweep.task import TraceSource
from kvoffload.sweep.verdict import Verdict, verdicts_of


@dataclass(frozen=True)
class SweepResult:
    """Result of a sweep.

    Attributes:
        rows: a row for each combination, in the order of the traces and axes.
        verdicts: a verdict for each scenario (`verdict.Verdict`).
        left_out: the combinations that were not replayed: reason -> number of combinations.
        from_journal: number of combinations whose replay had been finished by an earlier, interrupted run.
        violations: a line of text for each row that has more hits than an optimal or an unlimited cache. Such
            a row proves that kvoffload has a bug.
        warnings: descriptions of defects in the recordings that change the results.
    """

    rows: list[Row]
    verdicts: list[Verdict]
    left_out: Counter[str]
    from_journal: int
    violations: list[str]
    warnings: list[str]


class Sweep:
    """Replays traces with all combinations of a grid. Construct a sweep, then call `run` once.

    If the sweep has an output file, the results of finished replays are written to ``OUTPUT.journal``. After
    an interruption, a new sweep with the same output file reuses these results. A result is reused only if
    the content of the trace, the configuration, the code of this package and the code of the policies are
    unchanged. The journal is removed when the output file is complete.

    Args:
        traces: paths of files, or names of built-in workloads.
        grid: the axes of the sweep.
        work: options for workers, output file and confidence intervals.
        block_tokens, skip_bad_lines, time_unit: arguments of `load_trace`.
        timings: True to add a column with the CPU seconds of each replay's decisions (`TimedRow`).

    Attributes:
        progress: progress of the run; readable also after an interruption.

    Raises: `ConfigError` if options are invalid.
    """

    def __init__(
        self,
        traces: Sequence[str],
        grid: Grid,
        *,
        work: Work | None = None,
        block_tokens: int | None = None,
        skip_bad_lines: bool = False,
        time_unit: str | None = None,
        timings: bool = False,
    ) -> None:
        if not traces:
            raise ConfigError("trace", "", "allowed: one trace or more")
        self._work = work or Work()
        self._sources = [
            TraceSource(trace, block_tokens, skip_bad_lines, time_unit=time_unit)
            for trace in dict.fromkeys(traces)
        ]
        self._grid, self._timings = grid, timings
        self.progress = Progress()

    @property
    def journal_path(self) -> Path | None:
        """Path of the journal; None if the sweep has no output file."""
        return self._work.journal_path

    def run(self, on_progress: OnProgress = lambda progress: None) -> SweepResult:
        """Run the replays whose results are not in the journal, and write the output file.

        Raises:
            ConfigError: the output cannot be written, a size is smaller than one block of a trace, or the
                Dask scheduler does not answer.
            TraceError: a trace cannot be read.
            SweepError: a replay failed. The journal keeps the results of replays that were finished before.
        """
        work = self._work
        with work.begun() as (workers, journal):
            traces = [swept(source) for source in self._sources]
            points, left_out = [], Counter[str]()
            for number, trace in enumerate(traces):
                own, reasons = self._grid.points(number, trace.unique_blocks)
                points += own
                left_out.update(reasons)
            if not points:
                raise ConfigError("stores", ",".join(self._grid.stores), "; ".join(left_out))

            def report(progress: Progress) -> None:
                self.progress = progress
                on_progress(progress)

            measuring = Measuring(traces, workers, journal)
            measured = measuring.measure(points, report)
            runs = Runs(traces, points, measured, seed=work.seed, resamples=work.resamples)
            rows = rows_of(runs, block_bytes=self._grid.block_bytes, timings=self._timings)
            verdicts = verdicts_of(points, rows, runs.difference)
            for verdict in verdicts:
                best = rows[verdict.number]
                rows[verdict.number] = msgspec.structs.replace(best, verdict=verdict.line)
            work.write(rows)
            if journal is not None:
                journal.remove()
        warnings = [warning for trace in traces for warning in trace.warnings]
        return SweepResult(rows, verdicts, left_out, measuring.from_journal, violations(rows), warnings)
