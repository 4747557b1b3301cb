"""A forked process that runs instruction by instruction (ptrace), and can be killed at any instruction."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import traceback
from collections.abc import Callable

import pytest

_CONT, _STEP, _SEIZE, _INTERRUPT = 7, 9, 0x4206, 0x4207
_ALL_CHILDREN = 0x40000000
"""``__WALL`` of waitpid: also traced children."""
_OWNER_BITS = 0x3FFFFFFF
_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_libc.ptrace.restype = ctypes.c_long


class Traced:
    """A process that calls `work` until it is killed.

    `work` gets a function that it calls when it is ready; the constructor waits for that call.
    """

    def __init__(self, work: Callable[[Callable[[], None]], None]) -> None:
        ready, child_end = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            _run(work, child_end)
        os.close(child_end)
        message = os.read(ready, 4096)
        os.close(ready)
        assert message == b"ready", message.decode()
        if _libc.ptrace(_SEIZE, self.pid, None, None):
            reason = os.strerror(ctypes.get_errno())
            self.kill()
            pytest.skip(f"this machine does not allow ptrace: {reason}")

    def interrupt(self) -> None:
        """Stop the process where it is."""
        self._do(_INTERRUPT)
        self._wait()

    def step(self) -> None:
        """Run one instruction of the stopped process, or a few if the kernel lets it run on."""
        try:
            self._do(_STEP)
        except ProcessLookupError:
            self._do(_INTERRUPT)
        self._wait()

    def resume(self) -> None:
        self._do(_CONT)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        while not os.WIFSIGNALED(os.waitpid(self.pid, _ALL_CHILDREN)[1]):
            pass

    def _do(self, request: int) -> None:
        if _libc.ptrace(request, self.pid, None, None):
            raise OSError(ctypes.get_errno(), f"ptrace {request}")

    def _wait(self) -> None:
        _, status = os.waitpid(self.pid, _ALL_CHILDREN)
        assert os.WIFSTOPPED(status), f"the process has ended: {status}"


def owner_of(mutex_address: int) -> int:
    """Return the thread that holds a robust mutex of the C library, or 0: the first word of the mutex."""
    return ctypes.c_int32.from_address(mutex_address).value & _OWNER_BITS


def _run(work: Callable[[Callable[[], None]], None], pipe: int) -> None:
    logging.getLogger("kvoffload.node").setLevel(logging.CRITICAL)
    try:
        work(lambda: os.close(pipe) if os.write(pipe, b"ready") else None)
    except BaseException:
        text = traceback.format_exc()
        os.write(2, text.encode())
        os.write(pipe, text.encode())
    finally:
        os._exit(1)
