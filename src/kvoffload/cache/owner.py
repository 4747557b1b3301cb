"""The one thread that owns the manager, and calls into it from threads and from `asyncio`.

The thread runs an event loop, and a job is a coroutine on it. Does not know what jobs do.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from kvoffload.errors import MisuseError

T = TypeVar("T")


class Limit:
    """The time limit of a job. A caller that gives up stops the wait earlier.

    Thread: any.
    """

    def __init__(self, timeout_s: float) -> None:
        self._until = time.monotonic() + timeout_s

    def stop(self) -> None:
        """Let the job wait no longer."""
        self._until = 0.0

    def left_s(self) -> float:
        """Return the seconds that are left, or 0."""
        return max(0.0, self._until - time.monotonic())


class Owner:
    """A thread with an event loop.

    A caller that is interrupted or cancelled stops the limit of its job and waits for the job's end, because
    a copy that is under way uses the caller's tensors.

    Thread: any, except the owner's own.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="kvoffload-owner", daemon=True)
        self._lock = threading.Lock()
        self._limits: set[Limit] = set()
        self._is_closed = False
        self._thread.start()

    @property
    def is_closed(self) -> bool:
        """True after `close`."""
        return self._is_closed

    def start(self, job: Coroutine[Any, Any, T], limit: Limit) -> Future[T]:
        """Begin a job. Raises `MisuseError` after `close`."""
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
        future = self.start(job, limit)
        try:
            return future.result()
        except BaseException:
            limit.stop()
            wait([future])
            raise

    async def run_async(self, job: Coroutine[Any, Any, T], limit: Limit) -> T:
        """Run a job and return its result, in a coroutine of another event loop."""
        future = asyncio.wrap_future(self.start(job, limit))
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            limit.stop()
            await asyncio.wait([future])
            raise

    def close(self, last: Coroutine[Any, Any, None]) -> None:
        """Refuse new jobs, stop the limits of running jobs, run the last job, and end the thread.

        A second call does nothing.
        """
        with self._lock:
            if self._is_closed:
                last.close()
                return
            self._is_closed = True
            for limit in [*self._limits]:
                limit.stop()
            ended = asyncio.run_coroutine_threadsafe(last, self._loop)
        try:
            ended.result()
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
