"""A thread that writes the records of a manager's calls to files. A recording with a gap would be useless. So
the first error ends the recording, with one line in the log.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread
from typing import Any

from kvoffload.calls.cut import CutProcess
from kvoffload.calls.file_format import CLOSED, End, Header
from kvoffload.calls.parts import Create, Parts, StartCut, create_file
from kvoffload.core.log import Log
from kvoffload.errors import MisuseError

POLL_S, FLUSH_S, CLOSING_S = 0.05, 1.0, 5.0
"""Times in seconds. `POLL_S`: pause of the thread before it checks the ring again. `FLUSH_S`: longest time
until a call is written. `CLOSING_S`: longest wait of `close`."""
FRAME_WORDS = 1 << 18
"""Number of words in the largest frame, 1 MiB before compression. The thread writes a full frame at once,
without waiting for `FLUSH_S`."""
_TOO_SLOW = "the writer did not keep up, and a gap would make the recording useless"
logger = logging.getLogger("kvoffload.calls")


class CallRecorder:
    """A recording of one manager: files with the newest calls, which together have at most `max_bytes`.

    The manager's kernels append records to a ring (`Log`). The recorder's thread compresses and writes these
    records, at least once a second. If the ring is full or a write fails, the recording ends with a warning
    in the log. The calls that were written before the end can be replayed.

    When a file reaches a quarter of `max_bytes`, the recording continues in another file. When all files
    together reach `max_bytes`, the oldest file is removed (`Parts`). With a policy or admission rule of
    another package there is only one file, and the recording ends at `max_bytes`.

    Attributes:
        path: the first file: the requested path or, if that file exists, the next free ``NAME-2.calls``.
        ended: reason of the end; None during the recording.

    Memory: the ring, and about 20 MiB for the compression. Thread: `begin` and `close` run on the manager's
    thread. Only `close` waits for the file, for up to 5 seconds.

    Raises: `OSError` if the file cannot be created. Later errors of the file only end the recording.
    """

    def __init__(
        self,
        path: Path,
        max_bytes: int,
        create: Create = create_file,
        start_cut: StartCut = CutProcess,
    ) -> None:
        self._parts = Parts(path, max_bytes, create, start_cut)
        self.path = self._parts.path
        self._log: Log | None = None
        self._last_write_s = time.monotonic()
        self._closing, self._counters = Event(), dict[str, Any]()
        self._thread = Thread(target=self._run, name="kvoffload-calls", daemon=True)
        self._thread.start()

    @property
    def ended(self) -> str | None:
        return self._parts.ended

    def begin(self, log: Log, header: Callable[[], Header]) -> None:
        """Start the recording of a manager.

        A second `begin` replaces the first manager by another manager. Raises `MisuseError` if calls of the
        first manager are recorded already.

        Args:
            header: function that returns the file header, which describes the manager. The recorder's thread
                calls it before it writes the first call.
        """
        if self._log is not None and self._log.head:
            raise MisuseError("a recorder records one manager, and this recorder has recorded another")
        if self._log is not None:
            self._log.is_open = 0
        self._parts.describe(header)
        self._log = log

    def close(self, counters: dict[str, Any]) -> None:
        """Write the last records and the manager's counters, and close the file. Idempotent.

        Waits at most 5 seconds for the thread. If the thread needs longer, logs a warning: the last calls
        will be missing if the process ends now.
        """
        self._counters = self._counters or counters
        was_closing = self._closing.is_set()
        self._closing.set()
        self._thread.join(CLOSING_S)
        if self._thread.is_alive() and not was_closing:
            text = "kvoffload: the recording of calls to %s is still open after %g s: its end may be missing"
            logger.warning(text, self.path, CLOSING_S)

    # ---- the thread

    def _run(self) -> None:
        try:
            while self.ended is None:
                is_last = self._closing.wait(POLL_S)
                if self._log is not None:
                    self._take(self._log, is_last)
                if is_last:
                    self._parts.end(End(CLOSED, self._counters))
                else:
                    # All written records are whole, because the kernels advance `head` by whole records.
                    self._parts.rotate_if_due()
        except Exception as error:
            self._parts.stop(f"internal error: {error!r}")
        if self._log is not None:
            self._log.is_open = 0

    def _take(self, log: Log, is_last: bool) -> None:
        """Write the ring's records if they fill a frame, if `FLUSH_S` seconds have passed, or if `is_last`.

        If the ring had no room for a record, write all records and end the recording.
        """
        is_lost, head, now = not log.is_open, log.head, time.monotonic()
        is_due = head - log.tail >= FRAME_WORDS or now - self._last_write_s >= FLUSH_S
        if is_due or is_last or is_lost:
            self._last_write_s = now
            while log.tail < head and self.ended is None:
                start = log.tail % len(log.words)
                stop = min(start + head - log.tail, start + FRAME_WORDS, len(log.words))
                self._parts.write_calls(log.words[start:stop])
                log.tail += stop - start
        if is_lost:
            self._parts.end(End(_TOO_SLOW))
