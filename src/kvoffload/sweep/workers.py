"""Workers of a sweep: this process, or worker processes. `sweep.cluster` has workers of a Dask cluster."""

from __future__ import annotations

import contextlib
import logging
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
    """Runs tasks, in any order."""

    def results(self, tasks: Sequence[Task]) -> Results:
        """Yield each task with its result, as tasks finish.

        If the generator is closed early, the remaining tasks are aborted. Raises `SweepError` if a worker
        ends unexpectedly.
        """
        ...

    def close(self) -> None:
        """Release the workers."""
        ...


class LocalWorkers:
    """Up to `jobs` worker processes. If `jobs` is 1 or there is a single task, tasks run in this process.

    Processes are spawned, because a fork would copy locks that threads of numpy and numba hold. Each process
    caches its last traces between calls of `results`. Worker processes end when this process ends, even if
    this process is killed.
    """

    def __init__(self, jobs: int) -> None:
        self._jobs = jobs
        self._executor: ProcessPoolExecutor | None = None
        self._earlier_children: set[Any] = set()

    def results(self, tasks: Sequence[Task]) -> Results:
        jobs = min(self._jobs, len(tasks))
        return self._run_here(tasks) if jobs <= 1 else self._run_in_processes(tasks)

    def close(self) -> None:
        """End the worker processes."""
        if self._executor is not None:
            self._executor.shutdown()
            self._executor = None

    def _run_here(self, tasks: Sequence[Task]) -> Results:
        for task in tasks:
            yield task, attempt(task)

    def _run_in_processes(self, tasks: Sequence[Task]) -> Results:
        if self._executor is None:
            self._earlier_children = set(multiprocessing.active_children())
            spawn = multiprocessing.get_context("spawn")
            self._executor = ProcessPoolExecutor(self._jobs, spawn, initializer=_begin_worker)
        finished = False
        try:
            with _sigint_waits():
                futures = {self._executor.submit(attempt, task): task for task in tasks}
            for future in as_completed(futures):
                yield futures[future], future.result()
            finished = True
        except BrokenProcessPool:
            raise SweepError(
                "a worker process ended unexpectedly; is there enough memory for --jobs processes?"
            ) from None
        finally:
            if not finished:
                self._abort()

    def _abort(self) -> None:
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)
            self._executor = None
        # Processes are terminated, because replays in progress may take minutes.
        for process in set(multiprocessing.active_children()) - self._earlier_children:
            process.terminate()
            process.join()


@contextlib.contextmanager
def _sigint_waits() -> Iterator[None]:
    """Block SIGINT in this context, so that the processes started in it inherit the block.

    Ctrl-C sends SIGINT to every process of a terminal, but only the parent process should handle the signal.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin_worker() -> None:
    """Let this worker process end with its parent, and suppress warnings that the parent already shows."""
    logging.getLogger("kvoffload.traces").setLevel(logging.ERROR)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    # Needed because an idle worker holds both ends of the task queue: its read does not fail when the parent
    # ends.
    with contextlib.suppress(Exception):
        parent = multiprocessing.parent_process()
        if parent is not None:
            parent.join()
    os._exit(1)
