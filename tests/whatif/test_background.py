"""The thread of the shadows: tasks that exit, and a thread that cannot start."""

from __future__ import annotations

import sys
import threading

import pytest

from kvoffload.whatif.background import Background


def test_a_task_that_exits_is_reported_and_the_next_task_runs() -> None:
    background, seen = Background("exits"), list[int]()
    background.run(sys.exit)
    background.wait()
    assert not background.is_busy
    with pytest.raises(RuntimeError, match="SystemExit"):
        background.check()
    background.check()
    background.run(lambda: seen.append(1))
    background.wait()
    assert seen == [1]
    background.close()


def test_the_exception_of_a_task_stays_as_it_is() -> None:
    background = Background("raises")
    background.run(lambda: {}["a"])
    background.wait()
    with pytest.raises(KeyError):
        background.check()
    background.close()


def test_a_thread_that_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    background, seen = Background("late"), list[int]()

    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        with pytest.raises(RuntimeError, match="can't start"):
            background.run(lambda: seen.append(1))
    assert not background.is_busy
    background.close()
    background.run(lambda: seen.append(2))
    background.wait()
    assert seen == [2]
    background.close()
