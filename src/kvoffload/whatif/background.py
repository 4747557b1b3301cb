"""A thread that runs one task at a time, so that shadows do not work on the scheduler's thread."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from typing import TypeAlias

Task: TypeAlias = Callable[[], None]
_CLOSE_S = 2.0


class Background:
    """Runs tasks in a daemon thread, which starts with the first task.

    Thread: only the owner's thread calls these methods.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._errors = list[Exception]()
        self._thread: threading.Thread | None = None

    @property
    def is_busy(self) -> bool:
        """True while a task runs."""
        return not self._idle.is_set()

    def run(self, task: Task) -> None:
        """Start a task. The previous task must have ended."""
        assert not self.is_busy
        if self._thread is None:
            # The thread ends when this object is garbage-collected. So the target is a function: a method
            # would keep this object alive.
            arguments = (self._tasks, self._idle, self._errors)
            thread = threading.Thread(target=_serve, args=arguments, name=self._name, daemon=True)
            thread.start()  # may raise: then `close` has no thread to join
            self._thread = thread
            # Also called at exit, because no kernel may run while Python frees the memory.
            weakref.finalize(self, _close, self._tasks, thread)
        self._idle.clear()
        self._tasks.put(task)

    def check(self) -> None:
        """If the last task has failed, raise its exception. Each exception is raised only once.

        A `SystemExit` is raised as a `RuntimeError`.
        """
        if self._errors:
            raise self._errors.pop()

    def wait(self) -> None:
        """Wait until no task runs."""
        self._idle.wait()

    def close(self) -> None:
        """End the thread after its current task, and wait up to 2 s for it. Do not call `run` afterwards."""
        if self._thread is not None:
            _close(self._tasks, self._thread)


def _serve(tasks: queue.SimpleQueue[Task | None], idle: threading.Event, errors: list[Exception]) -> None:
    while (task := tasks.get()) is not None:
        try:
            task()
        except BaseException as error:  # also an exit, which a policy of the user may raise
            errors.append(error if isinstance(error, Exception) else RuntimeError(repr(error)))
        finally:
            del task  # would keep its memory alive while the thread is idle
            idle.set()


def _close(tasks: queue.SimpleQueue[Task | None], thread: threading.Thread) -> None:
    tasks.put(None)
    if thread is not threading.current_thread():
        thread.join(_CLOSE_S)
