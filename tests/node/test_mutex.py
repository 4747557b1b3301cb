"""The lock in shared memory: waits, time-outs, and the clocks that measure them."""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvoffload.node.mutex import ACQUIRED, BUSY, MUTEX_BYTES, NEWS, Mutex, try_lock, unlock


@pytest.fixture
def mutex() -> Mutex:
    memory = memoryview(mmap.mmap(-1, mmap.PAGESIZE))
    return Mutex(memory[:MUTEX_BYTES], np.zeros(1, np.int64), create=True)


def in_a_thread(call: Callable[[], Any]) -> Any:
    """Return the result of a call in another thread."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(call()))
    thread.start()
    thread.join()
    return results[0]


@pytest.mark.parametrize("has_clock", [True, False], ids=["clocklock", "timedlock"])
def test_a_wait_ends_when_its_time_is_over(mutex: Mutex, has_clock: bool) -> None:
    mutex._has_clock = mutex._has_clock and has_clock
    assert try_lock(mutex.door) in (ACQUIRED, NEWS)
    started = time.monotonic()
    assert in_a_thread(lambda: mutex.wait(0.05)) == BUSY
    assert time.monotonic() - started >= 0.05
    unlock(mutex.door)
    assert mutex.wait(0.05) == ACQUIRED
    unlock(mutex.door)


def test_a_step_of_the_systems_clock_does_not_change_a_wait(
    mutex: Mutex, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not mutex._has_clock:
        pytest.skip("this C library has no pthread_mutex_clocklock")
    calls: list[tuple[int, float]] = []

    def clocklock(address: Any, clock: int, spec: Any) -> int:
        calls.append((clock, spec._obj.seconds + spec._obj.nanoseconds / 1e9))
        return ACQUIRED

    monkeypatch.setattr(mutex, "_libc", SimpleNamespace(pthread_mutex_clocklock=clocklock))
    before = time.monotonic()
    assert mutex.wait(3600.0) == ACQUIRED
    ((clock, until),) = calls
    assert clock == time.CLOCK_MONOTONIC
    assert before + 3600.0 <= until + 1e-6 <= time.monotonic() + 3600.1


def test_a_wait_without_patience_makes_no_system_call(mutex: Mutex, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutex, "_libc", ctypes.CDLL)  # has no function of the lock
    assert mutex.wait(0.0) == BUSY
