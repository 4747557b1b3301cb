"""Stops a process and waits until all its threads have stopped: ``kill`` returns earlier."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from support.timeouts import HANGS_S


def stop(pid: int) -> None:
    """Send SIGSTOP, and wait until every thread of the process has stopped."""
    os.kill(pid, signal.SIGSTOP)
    until = time.monotonic() + HANGS_S
    while any(state not in "TtZX" for state in _states(pid)):
        assert time.monotonic() < until, f"process {pid} does not stop"
        time.sleep(0.001)


def _states(pid: int) -> list[str]:
    states = []
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        with suppress(OSError):
            states.append(stat.read_text().rpartition(")")[2].split()[0])
    return states
