"""The thread that owns the manager. Other threads and `asyncio` programs run jobs on this thread.

The thread runs an event loop; a job is a coroutine on this loop. Does not know what jobs do.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from kvoffload.errors import MisuseError

T = TypeVar("T")


class Limit:
    """The time limit of a job. A caller can end the job's wait earlier with `stop`.

    Thread: any.
    """

    def __init__(self, timeout_s: float) -> None:
        self._until = time.monotonic() + timeout_s

    def stop(self) -> None:
        """Set the remaining time to 0."""
        self._until = 0.0

    def left_s(self) -> float:
        """Return the seconds that are left, or 0."""
        return max(0.0, self._until - time.monotonic())


@dataclass(frozen=True)
class _Call(Generic[T]):
    """A job that a caller passes to the owner.

    Attributes:
        on_end: called with the job's task, in the owner's thread.
        claim: called in the owner's thread before the job begins. If it returns False, the job does not run.
    """

    job: Coroutine[Any, Any, T]
    limit: Limit
    on_end: Callable[[asyncio.Task[T]], None]
    claim: Callable[[], bool] = lambda: True


class Owner:
    """A thread with an event loop.

    If a caller is cancelled or interrupted, its job stops waiting for tiers. The call returns only after the
    job has ended, even after a second cancellation, because the job may still copy the caller's tensors.

    Thread: any, except the owner's own. A signal handler may call `close` while the interrupted thread is in
    a call. In a forked child, calls raise `MisuseError`.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="kvoffload-owner", daemon=True)
        self._lock = threading.RLock()
        self._first_close = threading.Lock()
        self._limits: set[Limit] = set()
        self._is_closed = False
        self._pid = os.getpid()
        self._thread.start()

    @property
    def is_closed(self) -> bool:
        """True after `close`, and in a forked child."""
        return self._is_closed or self._is_elsewhere

    def run(self, job: Coroutine[Any, Any, T], limit: Limit) -> T:
        """Run a job and return its result. Raises `MisuseError` after `close`, and in a forked child."""
        ended = _Ended[T]()
        try:
            self._start(_Call(job, limit, ended.put, ended.claim))
            ended.wait()
        except BaseException:
            if ended.claim():  # the job has not begun, and will not
                job.close()
            else:
                ended.wait_after_interrupt(limit.stop)
            raise
        return ended.result()

    async def run_async(self, job: Coroutine[Any, Any, T], limit: Limit) -> T:
        """Run a job for a coroutine of another event loop; return the job's result. Raises as `run`."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[asyncio.Task[T]] = loop.create_future()

        def end(task: asyncio.Task[T]) -> None:
            with suppress(RuntimeError):  # the caller's loop is closed
                loop.call_soon_threadsafe(ended.set_result, task)

        self._start(_Call(job, limit, end))
        try:
            await asyncio.shield(ended)
        except asyncio.CancelledError:
            limit.stop()
            while not ended.done():  # anyio cancels repeatedly
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([ended])
            raise
        return ended.result().result()

    def close(self, last: Coroutine[Any, Any, None], limit: Limit) -> None:
        """Refuse new jobs, end the waits of running jobs, run one more job, `last`, and end the thread.

        An interrupt of the calling thread also ends the waits of `last`. A second call, or a call in a forked
        child, does nothing.
        """
        if self._is_elsewhere or not self._first_close.acquire(blocking=False):
            last.close()
            return
        ended = _Ended[None]()
        with self._lock:
            self._is_closed = True
            for running in [*self._limits]:
                running.stop()
            self._loop.call_soon_threadsafe(self._begin, _Call(last, limit, ended.put))
        try:
            try:
                ended.wait()
            except BaseException:
                ended.wait_after_interrupt(limit.stop)
                raise
            ended.result()
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    # ---- private

    def _start(self, call: _Call[Any]) -> None:
        """Begin a job. Raises `MisuseError` after `close`, and in a forked child."""
        job = call.job
        if self._is_elsewhere:  # before the lock, which a thread of the parent may have held at the fork
            job.close()
            raise MisuseError("this cache was opened in another process")
        with self._lock:
            if not self._is_closed:
                self._limits.add(call.limit)
                with suppress(RuntimeError):  # a signal handler has closed the loop
                    self._loop.call_soon_threadsafe(self._begin, call)
            # A signal handler that has closed the cache since the lock was taken has also ended all jobs.
            if self._is_closed and inspect.getcoroutinestate(job) == inspect.CORO_CREATED:
                job.close()
                raise MisuseError("this cache is closed")

    def _begin(self, call: _Call[Any]) -> None:
        def end(task: asyncio.Task[Any]) -> None:
            self._limits.discard(call.limit)
            task.exception()  # else asyncio logs the exception of an interrupted call
            call.on_end(task)

        if call.claim():
            self._loop.create_task(call.job).add_done_callback(end)
        else:
            self._limits.discard(call.limit)

    @property
    def _is_elsewhere(self) -> bool:
        return os.getpid() != self._pid


class _Ended(Generic[T]):
    """Notifies a waiting thread of the end of its job.

    Differs from a `Future`: `put` needs no lock that a waiting thread holds. So a signal handler that
    interrupts a waiting thread may run another job and wait for that job.
    """

    def __init__(self) -> None:
        self._tasks: list[asyncio.Task[T]] = []
        self._wake: SimpleQueue[None] = SimpleQueue()
        self._first_claim = threading.Lock()

    def put(self, task: asyncio.Task[T]) -> None:
        """Report the end. Thread: the owner's."""
        self._tasks.append(task)
        self._wake.put(None)

    def claim(self) -> bool:
        """Return True to the first caller only.

        The owner calls `claim` before it begins the job, and an interrupted caller before it drops the job.
        Only the one that gets True goes on. So a job is either run or dropped.
        """
        return self._first_claim.acquire(blocking=False)

    def wait(self) -> None:
        """Wait for the job."""
        self._wake.get()

    def wait_after_interrupt(self, stop: Callable[[], None]) -> None:
        """Call `stop`, and wait for the job, even if the thread is interrupted again."""
        while not self._tasks:
            with suppress(BaseException):
                stop()
                self._wake.get()

    def result(self) -> T:
        """Return the result of the job, which has ended."""
        return self._tasks[0].result()
