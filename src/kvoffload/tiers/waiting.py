"""Waiting for a condition with a time limit."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], bool], timeout_s: float, poll_s: float = 0.001) -> bool:
    """Poll a condition every `poll_s` seconds until it is True; returns False on time-out."""
    until = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() >= until:
            return False
        time.sleep(poll_s)
    return True
