"""A lock in shared memory: a robust, process-shared mutex of the C library (Linux).

If a process dies while it owns the lock, `try_lock` returns `OWNER_DIED` to the next owner. An uncontended
`try_lock` makes no system call.
"""

from __future__ import annotations

import ctypes
import errno
import sys
import time
from typing import Any

from kvoffload.errors import ConfigError
from kvoffload.structures.jit import I64Array, kernel
from kvoffload.structures.structs import Struct, call_c

MUTEX_BYTES = 64
"""Bytes reserved for a ``pthread_mutex_t``, which takes 40 bytes on x86-64 and 48 on aarch64."""
ACQUIRED, OWNER_DIED, BUSY, NEWS = 0, errno.EOWNERDEAD, errno.EBUSY, -1
_CALLS_WITHOUT_NEWS = 16
_ROBUST = _SHARED = 1
_ERROR_CHECK = 2
"""Mutex type: if the owner locks the mutex again, the call fails instead of waiting forever."""
_SPINS = 200
"""Number of attempts to get a busy lock before the caller sleeps in a system call. The attempts take 5 us
together. Most calls of a manager hold the lock for less, so that few callers sleep."""


class Door(Struct):
    """The state of a mutex in one process, for compiled functions.

    Attributes:
        mutex: address of the mutex in this process.
        try_lock, unlock: addresses of the C library's functions in this process.
        news: a counter in shared memory, which grows with each change that all processes must read.
        seen: last value of `news` that this process has handled.
        num_calls: successful calls of `try_lock` since `NEWS` was last returned.
    """

    news: I64Array
    mutex: int
    try_lock: int
    unlock: int
    seen: int
    num_calls: int


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


class Mutex:
    """A mutex at a place in shared memory.

    Args:
        memory: `MUTEX_BYTES` bytes, aligned to 64.
        news: see `Door`.
        create: True to initialize the mutex; False if another process has initialized it.

    Attributes:
        door: the argument of `try_lock` and `unlock`.

    Thread: lock and unlock in the same thread. Cost: 0.06 us each without contention.
    """

    def __init__(self, memory: memoryview, news: I64Array, *, create: bool) -> None:
        check_platform()
        self._libc: Any = ctypes.CDLL(None)
        # Missing in glibc before 2.30 and in musl. A step of the system's clock then changes a wait's length.
        self._has_clock = hasattr(self._libc, "pthread_mutex_clocklock")
        self._memory = memory
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        if create:
            attributes = ctypes.create_string_buffer(64)
            self._check(self._libc.pthread_mutexattr_init(attributes))
            self._check(self._libc.pthread_mutexattr_setpshared(attributes, _SHARED))
            self._check(self._libc.pthread_mutexattr_setrobust(attributes, _ROBUST))
            self._check(self._libc.pthread_mutexattr_settype(attributes, _ERROR_CHECK))
            self._check(self._libc.pthread_mutex_init(ctypes.c_void_p(self._address), attributes))
        self._state = Door(
            news=news,
            mutex=self._address,
            try_lock=ctypes.cast(self._libc.pthread_mutex_trylock, ctypes.c_void_p).value,
            unlock=ctypes.cast(self._libc.pthread_mutex_unlock, ctypes.c_void_p).value,
            seen=-1,
        )
        self.door = self._state.memory

    def wait(self, timeout_s: float) -> int:
        """Wait for the lock, after `try_lock` has returned `BUSY`.

        Returns `ACQUIRED`, `BUSY` after a time-out, or `OWNER_DIED`: this thread has the lock, but the last
        owner died while it held the lock. The caller must then repair the state and call `repaired`.
        """
        return BUSY if timeout_s <= 0 else self._timed_lock(timeout_s)

    def holds(self) -> bool:
        """Acquire the lock if it is free. Return True if this thread has the lock, False if another has it.

        Call this method if a signal handler raised an exception during `try_lock` or `wait`, so that the
        result was lost. After True, call `needs_repair`.
        """
        return self._timed_lock(0.0) in (ACQUIRED, OWNER_DIED, errno.EDEADLK)

    def needs_repair(self) -> bool:
        """Return True if the last owner died while it held the lock, and mark the lock as consistent.

        The calling thread must hold the lock.
        """
        return not self._libc.pthread_mutex_consistent(ctypes.c_void_p(self._address))

    def _timed_lock(self, timeout_s: float) -> int:
        clock = time.CLOCK_MONOTONIC if self._has_clock else time.CLOCK_REALTIME
        until = time.clock_gettime(clock) + timeout_s
        spec = ctypes.byref(_Timespec(int(until), int(until % 1 * 1e9)))
        mutex, result = ctypes.c_void_p(self._address), 0
        if self._has_clock:
            result = self._libc.pthread_mutex_clocklock(mutex, clock, spec)
        else:
            result = self._libc.pthread_mutex_timedlock(mutex, spec)
        return BUSY if result == errno.ETIMEDOUT else result

    def heard(self) -> None:
        """Record that this process has handled all changes so far (`Door.news`)."""
        self._state.seen = int(self._state.news[0])

    def forget(self) -> None:
        """Make the next successful `try_lock` return `NEWS`."""
        self._state.seen = -1

    def repaired(self) -> None:
        """Mark the state as consistent after `OWNER_DIED`. The lock stays acquired."""
        self._check(self._libc.pthread_mutex_consistent(ctypes.c_void_p(self._address)))

    def _check(self, code: int) -> None:
        if code:
            raise OSError(code, f"pthread mutex: {errno.errorcode.get(code, code)}")


def check_platform() -> None:
    """Raise `ConfigError` unless this system has robust mutexes."""
    if sys.platform != "linux":
        raise ConfigError("shared", "node", f"a pool that processes share needs Linux, not {sys.platform}")


@kernel
def try_lock(door: Door) -> int:
    """Lock without waiting; return `ACQUIRED`, `OWNER_DIED`, `BUSY`, or `NEWS`.

    `NEWS` means that the lock is acquired and the caller must catch up, for one of two reasons: `Door.news`
    has changed, or this is the 16th successful call since the last `NEWS`.
    """
    result: int = call_c(door.try_lock, door.mutex)
    attempt = 0
    while result == BUSY and attempt < _SPINS:
        result = call_c(door.try_lock, door.mutex)
        attempt += 1
    if result == ACQUIRED:
        door.num_calls += 1
        if door.num_calls >= _CALLS_WITHOUT_NEWS or door.news[0] != door.seen:
            door.num_calls = 0
            result = NEWS
    return result


@kernel
def unlock(door: Door) -> int:
    """Release the lock. This thread must hold it."""
    result: int = call_c(door.unlock, door.mutex)
    return result
