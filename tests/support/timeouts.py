"""The time-out of tests for events that should occur at once."""

from __future__ import annotations

import contextlib
import subprocess
import threading
from collections.abc import Iterator

HANGS_S = 600.0
"""Seconds; long enough for a busy machine."""


@contextlib.contextmanager
def killed_if_it_hangs(process: subprocess.Popen[str]) -> Iterator[None]:
    """Kill the process after `HANGS_S`, so that reads from its pipes end."""
    limit = threading.Timer(HANGS_S, process.kill)
    limit.start()
    try:
        yield
    finally:
        limit.cancel()
