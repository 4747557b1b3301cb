"""How long a test waits for something that should happen at once."""

from __future__ import annotations

import contextlib
import subprocess
import threading
from collections.abc import Iterator

HANGS_S = 600.0
"""Seconds. Nothing takes as long, however busy a machine is: what has not happened until then never will."""


@contextlib.contextmanager
def killed_if_it_hangs(process: subprocess.Popen[str]) -> Iterator[None]:
    """Whoever reads from this process gets an end of file, at the latest after `HANGS_S`."""
    limit = threading.Timer(HANGS_S, process.kill)
    limit.start()
    try:
        yield
    finally:
        limit.cancel()
