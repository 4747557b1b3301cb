"""Does the replays of points, each once: those that a journal has are not done again.

Owns what a measurement is known by, and how far the work is. Knows points and traces; not why these.
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
from kvoffload.sweep.bootstrap import WINDOWS, Resamples, window_sums
from kvoffload.sweep.grid import Point
from kvoffload.sweep.journal import SweepJournal, journal_path
from kvoffload.sweep.outputs import RowsFile
from kvoffload.sweep.table import SweptTrace
from kvoffload.sweep.task import Failure, Measurement, Task, TraceSource, code_digest, identified, load
from kvoffload.sweep.workers import LocalWorkers, Workers

_FORMAT = 1
"""Of a line in the journal."""
_TIER_WORK = 2
"""What a tier behind RAM costs a replay, over RAM's own."""


@dataclass(frozen=True)
class Progress:
    """How far a sweep is.

    Attributes:
        rows_done, rows: combinations with a result, and all of them.
        refs_done, refs: block references replayed by this run, and those it has to replay.
        of: what the rows are: in a plan also timed replays.
    """

    rows_done: int
    rows: int
    refs_done: int
    refs: int
    of: str = "rows"


OnProgress = Callable[[Progress], None]


def swept(source: TraceSource) -> SweptTrace:
    """What is to be known of a trace before it is replayed. Raises as `load`, and `ConfigError`."""
    trace = load(source)
    if trace.block_refs == 0:
        raise ConfigError(
            "trace", source.name_or_path,
            f"it must have a request of at least one block ({trace.block_tokens} tokens)",
        )  # fmt: skip
    refs = window_sums(np.diff(trace.offsets), WINDOWS)
    return SweptTrace(
        identified(source), trace.name, trace.requests, trace.block_refs, trace.unique_blocks, refs
    )


class Work:
    """How replays are done: by whom, and what is kept. What is impossible is a `ConfigError` at construction.

    Args:
        output: ``.csv``, ``.json`` or ``.parquet``; None keeps nothing.
        force: replace an output that exists.
        jobs: processes; None for one per CPU.
        scheduler: address of a Dask scheduler that does the work instead.
        seed, resamples: of the confidence intervals.
    """

    def __init__(
        self,
        output: Path | None,
        force: bool,
        jobs: int | None,
        scheduler: str | None,
        seed: int,
        resamples: int,
    ) -> None:
        if jobs is not None and jobs < 1:
            raise ConfigError("jobs", jobs, "at least 1")
        if jobs is not None and scheduler is not None:
            raise ConfigError("jobs", jobs, "with a scheduler, the cluster decides")
        Resamples(np.zeros(1, np.int64), resamples, seed)
        self._jobs, self._scheduler = jobs, scheduler
        self.seed, self.resamples = seed, resamples
        self._output = RowsFile(output) if output is not None else None
        if output is not None and output.exists() and not force and not journal_path(output).exists():
            raise ConfigError("output", str(output), "a file that does not exist yet, or --force")

    @property
    def journal_path(self) -> Path | None:
        """Where finished replays are kept."""
        return journal_path(self._output.path) if self._output else None

    @contextlib.contextmanager
    def begun(self) -> Iterator[tuple[Workers, SweepJournal | None]]:
        """The workers, and the journal if something is kept. Raises `ConfigError` for an output that cannot
        be written, a scheduler that does not answer."""
        with contextlib.ExitStack() as stack:
            journal = None
            if self._output is not None:
                journal = SweepJournal(self._output.path)
                stack.callback(journal.close)
            workers = self._workers()
            stack.callback(workers.close)
            yield workers, journal

    def write(self, rows: Sequence[msgspec.Struct]) -> None:
        """Write the output, if there is to be one."""
        if self._output is not None:
            self._output.write(rows)

    def _workers(self) -> Workers:
        if self._scheduler is None:
            return LocalWorkers(self._jobs or _available_cpus())
        from kvoffload.sweep.cluster import ClusterWorkers

        return ClusterWorkers(self._scheduler)


class Measuring:
    """Measures points of some traces; what was measured once is remembered, and kept in the journal.

    Args:
        traces: what the points' numbers mean.
        journal: None keeps nothing.

    Attributes:
        progress: of the last call of `measure`; also when it was interrupted.
        from_journal: points whose replay the journal had.
    """

    def __init__(
        self, traces: Sequence[SweptTrace], workers: Workers, journal: SweepJournal | None = None
    ) -> None:
        self._traces, self._workers, self._journal = traces, workers, journal
        self._known: dict[str, Measurement] = {}
        self.progress = Progress(0, 0, 0, 0)
        self.from_journal = 0

    def measure(
        self, points: Sequence[Point], on_progress: OnProgress = lambda progress: None
    ) -> list[Measurement]:
        """A measurement for each point. Raises `SweepError` if a replay fails."""
        traces, known, keys = self._traces, self._known, [self._key(point) for point in points]
        if self._journal is not None:
            found = self._journal.found
            self.from_journal += sum(key in found and key not in known for key in keys)
            known |= {key: found[key] for key in keys if key in found}
        # Two sizes that are typed differently may be the same number of blocks: one replay.
        todo = {key: number for number, key in reversed(list(enumerate(keys))) if key not in known}
        tasks = [
            Task(
                number, traces[points[number].trace].source, points[number].config(),
                traces[points[number].trace].block_refs,
            )
            for number in sorted(todo.values(), key=lambda number: (-self._work(points[number]), number))
        ]  # fmt: skip
        rows_of_key = Counter(keys)
        done = sum(key in known for key in keys)
        self._tell(Progress(done, len(points), 0, sum(task.block_refs for task in tasks)), on_progress)
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
                self._tell(
                    replace(
                        before,
                        rows_done=before.rows_done + rows_of_key[key],
                        refs_done=before.refs_done + task.block_refs,
                    ),
                    on_progress,
                )
        return [known[key] for key in keys]

    def _work(self, point: Point) -> int:
        """What comes first, so that no worker is left with much at the end: in references, roughly."""
        return self._traces[point.trace].block_refs * (1 + _TIER_WORK * len(point.tier_options))

    def _key(self, point: Point) -> str:
        """What a measurement is known by: all that it depends on."""
        parts = [_FORMAT, WINDOWS, self._traces[point.trace].source.digest, code_digest(point.policy),
                 point.policy, point.admission, point.store, point.capacity_blocks, point.device_blocks,
                 point.decode_tokens_per_s, point.queue_requests, point.instances, point.routing,
                 [(tier.num_blocks, tier.policy, tier.admission, code_digest(tier.policy))
                  for tier in point.tier_options]]  # fmt: skip
        return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()

    def _tell(self, progress: Progress, on_progress: OnProgress) -> None:
        self.progress = progress
        on_progress(progress)


def _available_cpus() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
