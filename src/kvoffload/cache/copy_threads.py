"""Threads that copy and verify the bytes of blocks. The module does not know jobs or blocks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


class CopyThreads:
    """Daemon threads that run calls in order of arrival, until `close`.

    A `ThreadPoolExecutor` would refuse calls once the main thread of the process has ended. But other threads
    of the engine and functions of `atexit` may use the cache even then.

    Thread: the owner's.
    """

    def __init__(self, num_threads: int) -> None:
        self._calls: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"kvoffload-copy-{number}", daemon=True)
            for number in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    async def run(self, call: Callable[[], T]) -> T:
        """Run a call in one of the threads; return its result, or raise its exception."""
        future: Future[T] = Future()
        self._calls.put((call, future))
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Wait for the calls that were passed to `run`, and end the threads."""
        for _ in self._threads:
            self._calls.put(None)
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while (given := self._calls.get()) is not None:
            call, future = given
            if not future.set_running_or_notify_cancel():
                continue  # the caller was cancelled before the call began
            try:
                result = call()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)
            del given, call, future  # an idle thread keeps no tensors
