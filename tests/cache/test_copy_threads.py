"""Threads that copy: a cancelled call ends no thread."""

from __future__ import annotations

import asyncio
import threading

import pytest

from kvoffload.cache.copy_threads import CopyThreads

HANGS_S = 30.0


def test_an_exception_is_raised_and_the_thread_continues() -> None:
    async def use() -> int:
        with pytest.raises(ZeroDivisionError):
            await threads.run(lambda: 1 // 0)
        return await asyncio.wait_for(threads.run(lambda: 7), HANGS_S)

    threads = CopyThreads(1)
    assert asyncio.run(use()) == 7
    threads.close()


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_cancelled_call_ends_no_thread(has_begun: bool) -> None:
    begun, may_end, calls = threading.Event(), threading.Event(), list[str]()

    def copy() -> None:
        begun.set()
        assert may_end.wait(HANGS_S)
        calls.append("copied")

    async def use() -> None:
        first = asyncio.ensure_future(threads.run(copy))
        second = asyncio.ensure_future(threads.run(lambda: calls.append("not cancelled in time")))
        await asyncio.to_thread(begun.wait, HANGS_S)
        cancelled = first if has_begun else second
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        may_end.set()
        await asyncio.wait_for(threads.run(lambda: calls.append("next")), HANGS_S)

    threads = CopyThreads(1)
    asyncio.run(use())
    threads.close()
    assert calls == (["copied", "not cancelled in time", "next"] if has_begun else ["copied", "next"])
