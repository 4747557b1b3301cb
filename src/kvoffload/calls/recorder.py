"""Writes the records of a manager's calls to a file, on a thread.

Owns the file, its size limit and the thread. A gap would make a recording useless, so the first problem ends
the recording, with one line in the log.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread
from typing import IO, Any, TypeAlias

from kvoffload.calls.file_format import CLOSED, End, FrameWriter, Header
from kvoffload.core.log import Log
from kvoffload.errors import MisuseError

POLL_S, FLUSH_S, CLOSING_S = 0.05, 1.0, 5.0
"""Three times in seconds: the thread's pause, the longest time until a call is written, and the longest wait
of `close`."""
FRAME_WORDS = 1 << 18
"""Number of words in the largest frame, 1 MiB before compression. The thread writes a full frame at once,
without waiting for `FLUSH_S`."""
_TOO_SLOW = "the writer did not keep up, and a gap would make the recording useless"
logger = logging.getLogger("kvoffload.calls")


Create: TypeAlias = Callable[[Path], IO[bytes]]
"""Function that creates the file of a recording. Raises `FileExistsError` for a file that exists."""


def _create(path: Path) -> IO[bytes]:
    return path.open("xb")


class CallRecorder:
    """A recording of one manager: a new file of up to `max_bytes`.

    The manager's kernels append records to a ring (`Log`). The recorder's thread compresses and writes these
    records, at least once a second. If the ring or the file is full, or a write fails, the recording ends
    with a warning in the log. The file is then sound up to its end.

    Attributes:
        path: the file: the requested path, or the next free ``NAME-2.calls``.
        ended: reason of the end; None during the recording.

    Memory: the ring, and about 20 MiB for the compression. Thread: `begin` and `close` run on the manager's
    thread. Only `close` waits for the file, for up to 5 seconds.

    Raises: `OSError` if the file cannot be created. Later errors of the file only end the recording.
    """

    def __init__(self, path: Path, max_bytes: int, create: Create = _create) -> None:
        self.path, self._file = new_file(path, create)
        self._free_bytes = max_bytes
        self.ended: str | None = None
        self._log: Log | None = None
        self._header: Callable[[], Header] | None = None
        self._frames, self._has_header = FrameWriter(), False
        self._last_write_s = time.monotonic()
        self._closing, self._counters = Event(), dict[str, Any]()
        self._thread = Thread(target=self._run, name="kvoffload-calls", daemon=True)
        self._thread.start()

    def begin(self, log: Log, header: Callable[[], Header]) -> None:
        """Start the recording of a manager.

        A second `begin` replaces the manager. Raises `MisuseError` if calls of the first manager are recorded
        already.

        Args:
            header: returns the description of the manager. Called by the recorder's thread before it writes
                the first call.
        """
        if self._log is not None and self._log.head:
            raise MisuseError("a recorder records one manager, and this recorder has recorded another")
        if self._log is not None:
            self._log.is_open = 0
        self._header, self._log = header, log

    def close(self, counters: dict[str, Any]) -> None:
        """Write the last records and the manager's counters, and close the file. Idempotent.

        Waits at most 5 seconds for the thread. After that time logs a warning, because the last calls will be
        missing if the process ends now.
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
                    self._end(End(CLOSED, self._counters))
        except Exception as error:
            self._stop(f"internal error: {error!r}")
        if self._log is not None:
            self._log.is_open = 0

    def _take(self, log: Log, is_last: bool) -> None:
        """Write the ring's records: after `FRAME_WORDS` words, after `FLUSH_S` seconds, or if `is_last`.

        If the kernels have lost a record, also ends the recording.
        """
        is_lost, head, now = not log.is_open, log.head, time.monotonic()
        is_due = head - log.tail >= FRAME_WORDS or now - self._last_write_s >= FLUSH_S
        if is_due or is_last or is_lost:
            self._last_write_s = now
            while log.tail < head and self.ended is None:
                start = log.tail % len(log.words)
                stop = min(start + head - log.tail, start + FRAME_WORDS, len(log.words))
                self._write_header()
                self._write(self._frames.calls(log.words[start:stop]))
                log.tail += stop - start
        if is_lost:
            self._end(End(_TOO_SLOW))

    def _write_header(self) -> None:
        if self._header is not None and not self._has_header:
            self._has_header = True
            self._write(self._frames.header(self._header()))

    def _write(self, data: bytes) -> None:
        if self.ended is not None:
            return
        if len(data) > self._free_bytes:
            size = self._file.tell()
            self._end(End(f"the file has reached its limit ({size:,} bytes)"))
            return
        try:
            self._file.write(data)
            self._file.flush()
        except OSError as error:
            self._stop(error.strerror or str(error))
            return
        self._free_bytes -= len(data)

    def _end(self, end: End) -> None:
        if self.ended is not None:
            return
        self._write_header()
        with contextlib.suppress(OSError):
            self._file.write(self._frames.end(end))
        if end.reason == CLOSED:
            self.ended = CLOSED
            self._close_file()
        else:
            self._stop(end.reason)

    def _stop(self, reason: str) -> None:
        if self.ended is None:
            self.ended = reason
            logger.warning("kvoffload: the recording of calls to %s has ended: %s", self.path, reason)
            self._close_file()

    def _close_file(self) -> None:
        with contextlib.suppress(OSError):  # the log has the cause already
            self._file.close()


def new_file(path: Path, create: Create = _create) -> tuple[Path, IO[bytes]]:
    """Create a new file, with a number in its name if `path` exists: each restart has its own file."""
    number, free = 1, path
    while True:
        try:
            return free, create(free)
        except FileExistsError:
            number += 1
            free = path.with_name(f"{path.stem}-{number}{path.suffix}")
