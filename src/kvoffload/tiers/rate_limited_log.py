"""A logger for failures of disks, networks and servers: at most one line of each kind in ten seconds.

A failing disk may fail thousands of times a second. The tiers' counters count every failure.
"""

from __future__ import annotations

import logging
import threading
import time

INTERVAL_S = 10.0


class RateLimitedLog:
    """A logger with a rate limit for each kind of line. Thread: any."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)
        self._lock = threading.Lock()
        self._last: dict[str, tuple[float, int]] = {}

    def warn(self, kind: str, message: str, *arguments: object) -> None:
        """Log a warning, unless a line of this `kind` was logged less than `INTERVAL_S` ago.

        Lines that are not logged are counted, and the next logged line of the kind reports their number.
        """
        self._log(logging.WARNING, kind, message, arguments)

    def error(self, kind: str, message: str, *arguments: object) -> None:
        """Log an error, under the same limit as `warn`."""
        self._log(logging.ERROR, kind, message, arguments)

    def _log(self, level: int, kind: str, message: str, arguments: tuple[object, ...]) -> None:
        now = time.monotonic()
        with self._lock:
            last, num_skipped = self._last.get(kind, (-INTERVAL_S, 0))
            if now - last < INTERVAL_S:
                self._last[kind] = last, num_skipped + 1
                return
            self._last[kind] = now, 0
        if num_skipped:
            message, arguments = message + " (and %d like it before)", (*arguments, num_skipped)
        self._logger.log(level, message, *arguments)
