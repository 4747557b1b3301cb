"""Records the requests of an engine as a trace: one line for each finished request.

Owns the file, its size limit, the queue and the writing thread. Does not know vLLM (see `recording`).
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, Full, Queue
from threading import Thread
from typing import IO

from kvoffload.calls.parts import new_file
from kvoffload.core.hints import Hints
from kvoffload.integrations.vllm.shared.logs import logger
from kvoffload.traces.block_size import Header
from kvoffload.traces.conversion.block_ids import Keys
from kvoffload.traces.formats.mooncake import Line, encode_line

MAX_QUEUED = 1024
"""Largest number of requests that wait for the writing thread. The references to the block hashes of a
request of 128 Ki tokens take 64 KiB."""

_CLOSING_S = 5.0


@dataclass(frozen=True)
class FinishedRequest:
    """A finished request. Times are seconds since 1970.

    Attributes:
        hashes: hashes of the full blocks of the prompt, from the engine.
        served_tokens: mapping: source (``gpu``, ``host`` for RAM, ``disk``) -> number of prompt tokens.
    """

    arrival_s: float
    finished_s: float
    input_tokens: int
    output_tokens: int
    hashes: Sequence[bytes]
    hints: Hints
    served_tokens: Mapping[str, int]


class RecordedLine(Line, kw_only=True, omit_defaults=True):
    """A line of a trace with an additional field `finished`, the end of the request in ms since 1970.

    Readers ignore this field.
    """

    finished: int


class Recorder:
    """Writes requests to a new file, on a separate thread, up to `max_bytes`.

    Block ids are hashed with a random salt that is not stored. So the file does not reveal the text of
    prompts, and the ids in two files cannot be compared. If the process is killed, the last line may be
    incomplete.

    Attributes:
        path: the file: the requested path or, if it exists, the next free ``NAME-2.jsonl``.

    Thread: call `add` and `close` on one thread; `add` never waits for the file.
    Raises: `OSError` from the constructor if the file cannot be created. Later calls raise nothing.
    """

    def __init__(self, path: Path, max_bytes: int, block_tokens: int) -> None:
        self.path, file = new_file(path)
        self._free_bytes = max_bytes
        self._file: IO[bytes] | None = file
        self._keys = Keys(secrets.token_bytes(32))
        self._queue: Queue[FinishedRequest | None] = Queue(MAX_QUEUED)
        self._is_closing = False
        self._write(Header(1, block_tokens, "vllm", "", False).line())
        self._thread = Thread(target=self._run, name="kvoffload-record", daemon=True)
        self._thread.start()

    def add(self, request: FinishedRequest) -> bool:
        """Queue a request for the file. Returns False if the queue is full or the recording has ended."""
        if self._file is None:
            return False
        try:
            self._queue.put_nowait(request)
        except Full:
            return False
        return True

    def close(self) -> None:
        """Write the queued requests and close the file. Waits for at most 5 seconds. Idempotent."""
        self._is_closing = True
        with contextlib.suppress(Full):  # the thread reads `_is_closing` when the queue is empty
            self._queue.put_nowait(None)
        self._thread.join(_CLOSING_S)

    def _run(self) -> None:
        is_open = True
        while is_open:
            try:
                request = self._next()
                is_open = request is not None
                if self._file is not None and request is not None:
                    self._write(self._line(request))
                elif self._file is not None:
                    self._file.close()
            except OSError as error:
                self._stop(error.strerror or str(error))
            except Exception as error:  # the thread must continue to empty the queue
                self._stop(f"internal error: {error!r}")
        self._file = None

    def _next(self) -> FinishedRequest | None:
        try:
            return self._queue.get_nowait()
        except Empty:
            if self._is_closing:
                return None
            if self._file is not None:
                self._file.flush()
            return self._queue.get()

    def _line(self, request: FinishedRequest) -> bytes:
        hints = request.hints
        line = RecordedLine(
            timestamp=round(1000 * request.arrival_s),
            input_length=request.input_tokens,
            output_length=request.output_tokens,
            hash_ids=self._keys.after((), request.hashes),
            finish_reason=hints.finish_reason or None,
            session_over=hints.session_over or None,
            priority=hints.priority or None,
            time_to_live_s=hints.time_to_live_s,
            tenant=self._keys.name(hints.tenant) or None,
            finished=round(1000 * request.finished_s),
            served_tokens=dict(request.served_tokens),
        )
        return encode_line(line) + b"\n"

    def _write(self, line: bytes) -> None:
        assert self._file is not None
        if len(line) > self._free_bytes:
            self._stop(f"the file has reached record_max_bytes ({self._file.tell():,} bytes)")
        else:
            self._file.write(line)
            self._free_bytes -= len(line)

    def _stop(self, reason: str) -> None:
        logger.warning("kvoffload: recording to %s has ended: %s", self.path, reason)
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):  # the log has the cause already
                file.close()
