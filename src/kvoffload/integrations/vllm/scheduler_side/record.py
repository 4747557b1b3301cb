"""What an engine was asked, as a trace: one line for each request, when it has ended.

Owns the file, its bound, the queue and the thread that writes. Does not know vLLM: `recording` fills in.
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

from kvoffload.core.hints import Hints
from kvoffload.integrations.vllm.shared.logs import logger
from kvoffload.traces.block_size import Header
from kvoffload.traces.conversion.keys import Keys
from kvoffload.traces.formats.mooncake import Line, encode_line

MOST_WAITING = 1024
"""Requests that wait for the thread. One of 128 Ki tokens holds 64 KiB of references."""

_CLOSING_S = 5.0


@dataclass(frozen=True)
class Ended:
    """A request that has ended. Times are seconds since 1970.

    Attributes:
        hashes: of the full blocks of its prompt, as the engine has them.
        served_tokens: who had how much of the prompt: ``gpu``, ``host`` (RAM), ``disk``.
    """

    arrival_s: float
    ended_s: float
    input_tokens: int
    output_tokens: int
    hashes: Sequence[bytes]
    hints: Hints
    served_tokens: Mapping[str, int]


class RecordedLine(Line, kw_only=True, omit_defaults=True):
    """A line, with what only a recorder knows. Readers of traces leave it out."""

    finished: int
    served_tokens: dict[str, int]


class Recorder:
    """Writes requests to a new file, in a thread of its own, until it has `max_bytes`.

    Ids are hashed with a salt that is nowhere kept, so the file tells nothing of what was asked, and ids of
    two files do not compare. What is written is a whole line at a time; after a kill the last may be torn.

    Attributes:
        path: the file: the one that was asked for, or the next free ``NAME-2.jsonl``.

    Thread: `add` and `close` from one thread, which never waits for the file.
    Raises: `OSError` if no file can be made; never later.
    """

    def __init__(self, path: Path, max_bytes: int, block_tokens: int) -> None:
        self.path, file = _new_file(path)
        self._left_bytes = max_bytes
        self._file: IO[bytes] | None = file
        self._keys = Keys(secrets.token_bytes(32))
        self._waiting: Queue[Ended | None] = Queue(MOST_WAITING)
        self._is_closing = False
        self._write(Header(1, block_tokens, "vllm", "", False).line())
        self._thread = Thread(target=self._run, name="kvoffload-record", daemon=True)
        self._thread.start()

    def add(self, ended: Ended) -> bool:
        """Whether the request will be written: not if the thread does not follow, or the file is full."""
        if self._file is None:
            return False
        try:
            self._waiting.put_nowait(ended)
        except Full:
            return False
        return True

    def close(self) -> None:
        """Write what waits, for a few seconds at most. Idempotent."""
        self._is_closing = True
        with contextlib.suppress(Full):  # The thread looks at the mark when it has emptied the queue.
            self._waiting.put_nowait(None)
        self._thread.join(_CLOSING_S)

    def _run(self) -> None:
        while (ended := self._next()) is not None:
            if self._file is None:
                continue
            try:
                self._write(self._line(ended))
            except Exception as error:  # The thread must live: it empties the queue.
                self._stop(f"internal error: {error!r}")
        if self._file is not None:
            self._file.close()
            self._file = None

    def _next(self) -> Ended | None:
        try:
            return self._waiting.get_nowait()
        except Empty:
            if self._is_closing:
                return None
            if self._file is not None:
                self._flush(self._file)
            return self._waiting.get()

    def _line(self, ended: Ended) -> bytes:
        hints = ended.hints
        line = RecordedLine(
            timestamp=round(1000 * ended.arrival_s),
            input_length=ended.input_tokens,
            output_length=ended.output_tokens,
            hash_ids=self._keys.after((), ended.hashes),
            finish_reason=hints.finish_reason or None,
            session_over=hints.session_over or None,
            priority=hints.priority or None,
            time_to_live_s=hints.time_to_live_s,
            tenant=self._keys.name(hints.tenant) or None,
            finished=round(1000 * ended.ended_s),
            served_tokens=dict(ended.served_tokens),
        )
        return encode_line(line) + b"\n"

    def _write(self, line: bytes) -> None:
        file = self._file
        assert file is not None
        if len(line) > self._left_bytes:
            self._stop(f"it has its size of record_max_bytes ({file.tell():,} bytes)")
            return
        try:
            file.write(line)
        except OSError as error:
            self._stop(error.strerror or str(error))
            return
        self._left_bytes -= len(line)

    def _flush(self, file: IO[bytes]) -> None:
        try:
            file.flush()
        except OSError as error:
            self._stop(error.strerror or str(error))

    def _stop(self, why: str) -> None:
        """Nothing is written any more; the engine goes on."""
        logger.warning("kvoffload: recording to %s has ended: %s", self.path, why)
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):  # Said already: what could not be written is why it stops.
                file.close()


def _new_file(path: Path) -> tuple[Path, IO[bytes]]:
    """A file that was not there before: engines side by side, and later lives, have one each."""
    number, found = 1, path
    while True:
        try:
            return found, found.open("xb")
        except FileExistsError:
            number += 1
            found = path.with_name(f"{path.stem}-{number}{path.suffix}")
