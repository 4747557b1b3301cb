"""Runs the replays of a sweep or plan, each only once, and reuses results from the journal.

Computes the cache keys of results, and reports the progress. Knows points and traces, but not the purpose for
which they are measured.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np

from kvoffload.errors import ConfigError, SweepError
from kvoffload.settings.output_files import check_new
from kvoffload.sweep.bootstrap import RESAMPLES, WINDOWS, Resamples, window_sums
from kvoffload.sweep.grid import Point
from kvoffload.sweep.journal import SweepJournal, journal_path
from kvoffload.sweep.outputs import RowsFile
from kvoffload.sweep.table import SweptTrace
from kvoffload.sweep.task import Failure, Measurement, Task, TraceSource, code_digests, identified, load
from kvoffload.sweep.workers import LocalWorkers, Workers

_FORMAT = 2
"""Format version of measurements in the journal. A measurement with another version is not reused."""
_TIER_WORK = 2
"""Estimate: each tier behind RAM adds this many times the duration of a replay with RAM alone."""


@dataclass(frozen=True)
class Progress:
    """Progress of a sweep or a plan.

    Attributes:
        rows_done: number of combinations that already have a result.
        rows: total number of combinations.
        refs_done: number of block references that this run has replayed so far.
        refs: number of block references that this run will replay in total.
        of: noun that messages use for the combinations: ``rows`` or ``timed replays``.
    """

    rows_done: int = 0
    rows: int = 0
    refs_done: int = 0
    refs: int = 0
    of: str = "rows"


OnProgress = Callable[[Progress], None]


def swept(source: TraceSource) -> SweptTrace:
    """Read a trace, and return the facts that a sweep needs about it.

    Raises: the errors of `load`, and `ConfigError` for an empty trace.
    """
    trace = load(source)
    trace.check_blocks(source.name_or_path)
    refs = window_sums(np.diff(trace.offsets), WINDOWS)
    return SweptTrace(
        identified(source), trace.name, trace.requests, trace.block_refs, trace.unique_blocks, refs,
        trace.share_outside_blocks, tuple(trace.warnings), trace.duration_s,
    )  # fmt: skip


@dataclass(frozen=True)
class Work:
    """Options of a sweep or plan: workers, output and confidence intervals.

    Attributes:
        output: path of the output file, which ends in ``.csv``, ``.json`` or ``.parquet``. None: no output
            file and no journal.
        force: True to replace an existing output file.
        jobs: number of local worker processes; None: one per CPU.
        scheduler: address of a Dask scheduler, whose workers then run the replays. None: local processes run
            them.
        seed, resamples: seed and number of the random draws for confidence intervals (`Resamples`).

    Raises: `ConfigError` if an option is not allowed, or if the output file exists and `force` is not set. An
    existing output file with a journal is accepted, because an interrupted command may continue.
    """

    output: Path | None = None
    force: bool = False
    jobs: int | None = None
    scheduler: str | None = None
    seed: int = 0
    resamples: int = RESAMPLES

    def __post_init__(self) -> None:
        if self.jobs is not None and self.jobs < 1:
            raise ConfigError("jobs", self.jobs, "allowed: 1 or more")
        if self.jobs is not None and self.scheduler is not None:
            raise ConfigError("jobs", self.jobs, "the scheduler's cluster sets the number: leave out jobs")
        Resamples(np.zeros(1, np.int64), self.resamples, self.seed)
        if self.output is not None:
            RowsFile(self.output)
            # An interrupted command may continue its output.
            check_new("output", self.output, force=self.force or journal_path(self.output).exists())

    @property
    def journal_path(self) -> Path | None:
        """Path of the journal; None if there is no output file."""
        return journal_path(self.output) if self.output else None

    @contextlib.contextmanager
    def begun(self) -> Iterator[tuple[Workers, SweepJournal | None]]:
        """Context manager that starts the workers and, if there is an output file, opens the journal.

        At the end the workers and the journal are closed. Raises: `ConfigError` if the journal cannot be
        written, or if the Dask scheduler does not answer.
        """
        with contextlib.ExitStack() as stack:
            journal = None
            if self.output is not None:
                journal = SweepJournal(self.output)
                stack.callback(journal.close)
            workers = self._workers()
            stack.callback(workers.close)
            yield workers, journal

    def write(self, rows: Sequence[msgspec.Struct]) -> None:
        if self.output is not None:
            RowsFile(self.output).write(rows)

    def _workers(self) -> Workers:
        if self.scheduler is None:
            return LocalWorkers(self.jobs or _available_cpus())
        from kvoffload.sweep.cluster import ClusterWorkers

        return ClusterWorkers(self.scheduler)


class Measuring:
    """Measures points (combinations of a sweep), and caches the results in memory and in the journal.

    Args:
        traces: the traces of the sweep or plan; `Point.trace` is an index in this list.
        journal: the journal. None: results are cached in memory only.

    Attributes:
        progress: progress of the last call of `measure`; readable also after the call was interrupted.
        from_journal: number of points whose measurement was read from the journal.
    """

    def __init__(
        self, traces: Sequence[SweptTrace], workers: Workers, journal: SweepJournal | None = None
    ) -> None:
        self._traces, self._workers, self._journal = traces, workers, journal
        self._known: dict[str, Measurement] = {}
        self.progress = Progress()
        self.from_journal = 0

    def measure(
        self, points: Sequence[Point], on_progress: OnProgress = lambda progress: None
    ) -> list[Measurement]:
        """Return the measurement of each point, in the order of `points`. Runs the replays without a result.

        Raises `SweepError` if a replay fails.
        """
        traces, known, keys = self._traces, self._known, [self._key(point) for point in points]
        if self._journal is not None:
            kept = self._journal.measurements
            self.from_journal += sum(key in kept and key not in known for key in keys)
            known |= {key: kept[key] for key in keys if key in kept}
        # Two sizes that are typed differently but are equal in blocks share one replay.
        todo = {key: number for number, key in reversed(list(enumerate(keys))) if key not in known}
        order = sorted(todo.values(), key=lambda number: (-self._estimated_work(points[number]), number))
        tasks = [self._task(number, points[number]) for number in order]
        rows_of_key = Counter(keys)
        done = sum(key in known for key in keys)
        self._report(Progress(done, len(points), 0, sum(task.block_refs for task in tasks)), on_progress)
        with contextlib.closing(self._workers.results(tasks)) as results:
            for task, outcome in results:
                key = keys[task.number]
                if isinstance(outcome, Failure):
                    where = f"{traces[points[task.number].trace].name}: {points[task.number]}"
                    raise SweepError(f"{where}: {outcome.reason}")
                known[key] = outcome
                if self._journal is not None:
                    self._journal.add(key, outcome)
                before = self.progress
                self._report(
                    replace(
                        before,
                        rows_done=before.rows_done + rows_of_key[key],
                        refs_done=before.refs_done + task.block_refs,
                    ),
                    on_progress,
                )
        return [known[key] for key in keys]

    def _task(self, number: int, point: Point) -> Task:
        trace = self._traces[point.trace]
        return Task(number, trace.source, point.config, trace.block_refs)

    def _estimated_work(self, point: Point) -> int:
        """Estimate the duration of a replay. The unit is the time for one block reference through RAM alone.

        The estimates serve to start the longest replays first, so that all workers end at about the same
        time.
        """
        return self._traces[point.trace].block_refs * (1 + _TIER_WORK * len(point.config.tiers))

    def _key(self, point: Point) -> str:
        """Return the cache key of a measurement: a hash of everything that the measurement depends on."""
        source, config = self._traces[point.trace].source, point.config
        parts = [_FORMAT, WINDOWS, source.digest, code_digests(config), config]
        return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()

    def _report(self, progress: Progress, on_progress: OnProgress) -> None:
        self.progress = progress
        on_progress(progress)


def _available_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
