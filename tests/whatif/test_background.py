"""The thread of the shadows: tasks that exit or raise, and a thread that cannot start."""

from __future__ import annotations

import sys
import threading

import pytest

from kvoffload.whatif.background import Background


def test_a_task_that_exits_is_reported_and_the_next_task_runs() -> None:
    background, done = Background("exits"), list[int]()
    background.run(sys.exit)
    background.wait()
    assert not background.is_busy
    with pytest.raises(RuntimeError, match="SystemExit"):
        background.check()
    background.check()
    background.run(lambda: done.append(1))
    background.wait()
    assert done == [1]
    background.close()


def test_the_exception_of_a_task_is_raised_unchanged() -> None:
    background = Background("raises")
    background.run(lambda: {}["a"])
    background.wait()
    with pytest.raises(KeyError):
        background.check()
    background.close()


def test_a_thread_that_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    background, done = Background("late"), list[int]()

    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        with pytest.raises(RuntimeError, match="can't start"):
            background.run(lambda: done.append(1))
    assert not background.is_busy
    background.close()
    background.run(lambda: done.append(2))
    background.wait()
    assert done == [2]
    background.close()
