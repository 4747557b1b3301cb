"""The thread that owns the manager. Other threads and `asyncio` programs run jobs on this thread.

The thread runs an event loop; a job is a coroutine on this loop. Does not know what jobs do.
"""

from __future__ import annotations

import asyncio
import math
import os
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, wait
from contextlib import suppress
from numbers import Real
from typing import Any, TypeVar

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


def seconds_of(value: object) -> float:
    """Convert a number of Python or numpy to a float. Other values give NaN."""
    return float(value) if isinstance(value, Real) else math.nan


class Owner:
    """A thread with an event loop.

    If a caller is cancelled or interrupted, the job stops waiting for tiers. The call returns only after the
    job has ended, even if the caller is cancelled again, because a running copy uses the caller's tensors.

    Thread: any, except the owner's own. In a forked child, which has no such thread, calls raise
    `MisuseError`.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="kvoffload-owner", daemon=True)
        self._lock = threading.Lock()
        self._limits: set[Limit] = set()
        self._is_closed = False
        self._pid = os.getpid()
        self._thread.start()

    @property
    def is_closed(self) -> bool:
        """True after `close`, and in a forked child."""
        return self._is_closed or self._is_elsewhere

    def start(self, job: Coroutine[Any, Any, T], limit: Limit) -> Future[T]:
        """Begin a job. Raises `MisuseError` after `close`, and in a forked child."""
        if self._is_elsewhere:  # before the lock, which a thread of the parent may have held at the fork
            job.close()
            raise MisuseError("this cache was opened in another process")
        with self._lock:
            if self._is_closed:
                job.close()
                raise MisuseError("this cache is closed")
            self._limits.add(limit)
            future = asyncio.run_coroutine_threadsafe(job, self._loop)
        future.add_done_callback(lambda _: self._limits.discard(limit))
        return future

    def run(self, job: Coroutine[Any, Any, T], limit: Limit) -> T:
        """Run a job and return its result."""
        return _result_of(self.start(job, limit), limit.stop)

    async def run_async(self, job: Coroutine[Any, Any, T], limit: Limit) -> T:
        """Run a job and return its result, in a coroutine of another event loop."""
        future = asyncio.wrap_future(self.start(job, limit))
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            limit.stop()
            while not future.done():  # anyio cancels repeatedly
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([future])
            raise

    def close(self, last: Coroutine[Any, Any, None], limit: Limit) -> None:
        """Refuse new jobs, end the waits of running jobs, run the job `last`, and end the thread.

        An interrupt ends the waits of `last`. A second call, or a call in a forked child, does nothing.
        """
        if self._is_elsewhere:
            last.close()
            return
        with self._lock:
            if self._is_closed:
                last.close()
                return
            self._is_closed = True
            for running in [*self._limits]:
                running.stop()
            ended = asyncio.run_coroutine_threadsafe(last, self._loop)
        try:
            _result_of(ended, limit.stop)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    @property
    def _is_elsewhere(self) -> bool:
        return os.getpid() != self._pid


def _result_of(future: Future[T], stop: Callable[[], None]) -> T:
    """Wait for a job and return its result. After an interrupt, call `stop`, wait for the job, then raise."""
    try:
        return future.result()
    except BaseException:
        while not future.done():
            with suppress(BaseException):  # a further interrupt
                stop()
                wait([future])
        raise
