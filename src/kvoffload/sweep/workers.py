"""Who does the replays of a sweep: this process, or some beside it. `sweep.cluster` is a Dask cluster.

Does not know what the results are for.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Protocol

from kvoffload.errors import SweepError
from kvoffload.sweep.task import Failure, Measurement, Task, attempt

Results = Generator[tuple[Task, Measurement | Failure], None, None]


class Workers(Protocol):
    """Does tasks, in any order."""

    def results(self, tasks: Sequence[Task]) -> Results:
        """Each task with what came of it, as they are finished.

        Closing the generator early gives up the rest. Raises `SweepError` if the workers are lost.
        """
        ...

    def close(self) -> None:
        """Let the workers go."""
        ...


class LocalWorkers:
    """Up to `jobs` processes of this machine; with one job, or one task, this process itself.

    Processes are started afresh (``spawn``) and not forked: a fork copies the locks of the threads of
    numpy and numba in whatever state they are. Each one keeps the trace it read last, also from one call of
    `results` to the next. They end with this process, also when it is killed.
    """

    def __init__(self, jobs: int) -> None:
        self._jobs = jobs
        self._executor: ProcessPoolExecutor | None = None
        self._others: set[Any] = set()

    def results(self, tasks: Sequence[Task]) -> Results:
        """As `Workers.results`."""
        jobs = min(self._jobs, len(tasks))
        return self._here(tasks) if jobs <= 1 else self._beside(tasks)

    def close(self) -> None:
        """End the processes, which have nothing to do."""
        if self._executor is not None:
            self._executor.shutdown()
            self._executor = None

    def _here(self, tasks: Sequence[Task]) -> Results:
        for task in tasks:
            yield task, attempt(task)

    def _beside(self, tasks: Sequence[Task]) -> Results:
        if self._executor is None:
            self._others = set(multiprocessing.active_children())
            spawn = multiprocessing.get_context("spawn")
            self._executor = ProcessPoolExecutor(self._jobs, spawn, initializer=_begin)
        finished = False
        try:
            with _sigint_waits():
                futures = {self._executor.submit(attempt, task): task for task in tasks}
            for future in as_completed(futures):
                yield futures[future], future.result()
            finished = True
        except BrokenProcessPool:
            raise SweepError("a worker process ended unexpectedly; was there too little memory?") from None
        finally:
            if not finished:
                self._give_up()

    def _give_up(self) -> None:
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)
            self._executor = None
        # What is being replayed now may take minutes, and its result is not wanted any more.
        for process in set(multiprocessing.active_children()) - self._others:
            process.terminate()
            process.join()


@contextlib.contextmanager
def _sigint_waits() -> Iterator[None]:
    """Ctrl-C goes to every process of a terminal, and the parent alone decides what it means.

    A process started here is deaf to it from its first instruction: signal masks are inherited.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin() -> None:
    """Prepare a worker process: who starts the sweep ends it."""
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    # A worker that waits for tasks holds both ends of their queue: it would wait for ever.
    with contextlib.suppress(Exception):
        parent = multiprocessing.parent_process()
        if parent is not None:
            parent.join()
    os._exit(1)
