"""Log lines about what the world does, not more than one of a kind in ten seconds.

A dying disk fails thousands of times a second; the counters have the number, the log has the fact.
"""

from __future__ import annotations

import logging
import threading
import time

INTERVAL_S = 10.0


class Notices:
    """A logger with a rate limit for each kind of line. Thread: any."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)
        self._lock = threading.Lock()
        self._last: dict[str, tuple[float, int]] = {}

    def warn(self, kind: str, message: str, *arguments: object) -> None:
        """Log a warning, unless one of this kind was logged a moment ago: then the next one counts it."""
        now = time.monotonic()
        with self._lock:
            last, unsaid = self._last.get(kind, (-INTERVAL_S, 0))
            if now - last < INTERVAL_S:
                self._last[kind] = last, unsaid + 1
                return
            self._last[kind] = now, 0
        self._logger.warning(message + (" (and %d like it before)" if unsaid else ""), *arguments,
                             *([unsaid] if unsaid else []))  # fmt: skip
