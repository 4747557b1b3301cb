"""The parts of a recording: their files and names, the size limit and the rotation.

When a part has reached a quarter of the size limit, the recording continues in a new part. Each part begins
with the manager's state, so that it can be replayed alone. A second process computes this state by a replay
of the previous part; this replay is a *cut* (`calls.cut`). While the cut runs, the new part already receives
calls. When all parts together reach the limit, the oldest part is removed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import IO, Protocol, TypeAlias

from msgspec.structs import replace

from kvoffload.calls.file_format import CLOSED, CONTINUED, HASHES, End, FrameWriter, Header
from kvoffload.structures.jit import I32Array

PARTS, STATE_SHARE = 4, 8
"""A part takes 1/`PARTS` of the size limit of the recording. The state at its beginning takes at most
1/`STATE_SHARE` of the limit."""
logger = logging.getLogger("kvoffload.calls")

Create: TypeAlias = Callable[[Path], IO[bytes]]
"""Function that creates a file of a recording. Raises `FileExistsError` for a file that exists."""


class Cut(Protocol):
    """A running replay of a part. At its end it writes the beginning of the next part to a file."""

    def poll(self) -> str | None:
        """Return None while the cut runs, an empty text after success, or the reason of a failure."""

    def stop(self) -> None:
        """End the cut, if it runs."""


StartCut: TypeAlias = Callable[[Path, Path], Cut]
"""Function that starts a cut. Arguments: the complete part; the file for the beginning of the next part."""


def part_path(path: Path, number: int) -> Path:
    """Return the path of a part: ``kv.calls``, ``kv.part2.calls``, ``kv.part3.calls``."""
    return path if number == 1 else path.with_name(f"{path.stem}.part{number}{path.suffix}")


def parts_of(path: Path) -> list[Path]:
    """Return the existing parts of a recording, in order.

    `path` is the path of the first part, which need not exist. If it is the path of a later part, only this
    part is returned.
    """
    pattern = re.compile(rf"{re.escape(path.stem)}\.part(\d+){re.escape(path.suffix)}")
    numbers = {1: path} if path.exists() else {}
    with contextlib.suppress(OSError):
        for other in path.parent.iterdir():
            if match := pattern.fullmatch(other.name):
                numbers[int(match[1])] = other
    return [numbers[number] for number in sorted(numbers)]


def create_file(path: Path) -> IO[bytes]:
    """Create a file. Raises `FileExistsError` if the file exists."""
    return path.open("xb")


def new_file(path: Path, create: Create = create_file) -> tuple[Path, IO[bytes]]:
    """Create a new file. If a recording with this name exists, a number is added to the name.

    So each engine writes its own files, and so does each restart of an engine.
    """
    number, free = 1, path
    while True:
        with contextlib.suppress(FileExistsError):
            if not parts_of(free):
                return free, create(free)
        number += 1
        free = path.with_name(f"{path.stem}-{number}{path.suffix}")


class Parts:
    """Writes the frames of a recording to files, which together have at most `max_bytes`.

    The first error ends the recording, with a warning in the log. A failed cut does not end the recording,
    but no further part begins: the recording then ends when it reaches the limit.

    Args:
        path: path of the first part. If the file exists, the next free name is used: ``NAME-2.calls``, ...
        create: creates a part.
        start_cut: starts a cut.

    Attributes:
        path: the current part.
        first: the first part, which may have been removed.
        ended: reason of the end; None while the recording goes on.

    Thread: one at a time. Raises: `OSError` if the first part cannot be created.
    """

    def __init__(self, path: Path, max_bytes: int, create: Create, start_cut: StartCut) -> None:
        self._create, self._start_cut, self._max_bytes = create, start_cut, max_bytes
        self.path, self._file = new_file(path, create)
        self.first = self.path
        self.ended: str | None = None
        self._sizes: dict[Path, int] = {self.path: 0}
        self._frames, self._header_bytes = FrameWriter(), 0
        self._describe: Callable[[], Header] | None = None
        self._header: Header | None = None
        self._cut: Cut | None = None
        self._needs_part_before = self._rotates = False

    def describe(self, header: Callable[[], Header]) -> None:
        """Set the function that returns the file header, which describes the recorded manager.

        Call this method before the first `write_calls`, because the header comes first in the file.
        """
        self._describe = header

    def write_calls(self, words: I32Array) -> None:
        """Write records of calls as one frame."""
        self._write_header()
        self._write(self._frames.calls(words))

    def rotate_if_due(self) -> None:
        """Begin a new part if the current part is large enough. Call this method between two records.

        Does not begin a part while a cut is running. When the cut has ended, inserts the cut's state at the
        beginning of the current part.
        """
        if self.ended is not None:
            return
        try:
            if self._cut is not None:
                self._poll_cut(self._cut)
            elif self._rotates and self._sizes[self.path] >= self._max_bytes // PARTS:
                assert self._header is not None, "recordings rotate from their header on"
                self._rotate(self._header)
        except OSError as error:
            self.stop(error.strerror or str(error))

    def end(self, end: End) -> None:
        """Write the end mark and close the file."""
        if self.ended is not None:
            return
        self._write_header()
        with contextlib.suppress(OSError):
            self._file.write(self._frames.end(end))
        if end.reason == CLOSED:
            self.ended = CLOSED
            self._close()
        else:
            self.stop(end.reason)

    def stop(self, reason: str) -> None:
        """Close the file without an end mark, with a line in the log."""
        if self.ended is None:
            self.ended = reason
            logger.warning("kvoffload: the recording of calls to %s has ended: %s", self.path, reason)
            self._close()

    # ---- frames

    def _write_header(self) -> None:
        if self._header is None and self._describe is not None:
            self._begin_part(self._describe())
            # A state of policies of other packages cannot be read safely.
            self._rotates = self._header is not None and self._header.keys == HASHES

    def _begin_part(self, header: Header) -> None:
        self._header, data = header, self._frames.header(header)
        self._header_bytes = len(data)
        self._write(data)

    def _write(self, data: bytes) -> None:
        if self.ended is not None:
            return
        if not self._make_room(len(data)):
            self.end(End(f"it has reached its limit ({sum(self._sizes.values()):,} bytes)"))
            return
        try:
            self._file.write(data)
            self._file.flush()
        except OSError as error:
            self.stop(error.strerror or str(error))
            return
        self._sizes[self.path] += len(data)

    def _make_room(self, num_bytes: int) -> bool:
        """Remove the oldest parts until a write fits; return False if the write cannot fit."""
        while sum(self._sizes.values()) + num_bytes > self._max_bytes:
            if len(self._sizes) <= 1 + self._needs_part_before:
                return False
            oldest = next(iter(self._sizes))
            with contextlib.suppress(OSError):
                oldest.unlink()
            del self._sizes[oldest]
        return True

    def _close(self) -> None:
        if self._cut is not None:
            self._end_cut(self._cut)
        with contextlib.suppress(OSError):  # the log has the cause already
            self._file.close()

    # ---- rotation

    @property
    def _beginning(self) -> Path:
        """The file to which a cut writes the header and state of the current part."""
        return self.path.with_name(f"{self.path.name}.new")

    def _rotate(self, header: Header) -> None:
        """End the current part, begin the next part and start its cut."""
        next_part = replace(header, part=header.part + 1)
        path = part_path(self.first, next_part.part)
        file = self._create(path)
        self._write(self._frames.end(End(CONTINUED)))
        if self.ended is not None:
            file.close()
            path.unlink()
            return
        self._file.close()
        complete, self.path, self._file, self._frames = self.path, path, file, FrameWriter()
        self._sizes[path], self._needs_part_before = 0, True
        self._begin_part(next_part)
        if self.ended is not None:
            return
        try:
            self._cut = self._start_cut(complete, self._beginning)
        except OSError as error:
            self._end_rotation(error.strerror or str(error))

    def _poll_cut(self, cut: Cut) -> None:
        problem = cut.poll()
        if problem is None:
            return
        num_bytes = 0 if problem else self._beginning.stat().st_size
        if num_bytes > self._max_bytes // STATE_SHARE:
            problem = (
                f"the state at the beginning of a part takes {num_bytes:,} bytes, more than "
                f"1/{STATE_SHARE} of the limit of {self._max_bytes:,} bytes"
            )
        if problem:
            self._end_rotation(problem)
        elif self._make_room(num_bytes):
            self._complete_beginning()
        else:
            self._end_rotation("the replay of a part took too long: the recording is at its limit")
        self._end_cut(cut)

    def _complete_beginning(self) -> None:
        """Replace the header of the current part by the header and state in the file `_beginning`."""
        with self.path.open("rb") as source:
            file = self._beginning.open("ab")
            try:
                source.seek(self._header_bytes)
                shutil.copyfileobj(source, file, 1 << 20)
                file.flush()
                os.replace(self._beginning, self.path)
            except BaseException:
                file.close()
                raise
        self._file.close()
        self._file, self._needs_part_before = file, False
        self._sizes[self.path] = file.tell()

    def _end_cut(self, cut: Cut) -> None:
        cut.stop()
        with contextlib.suppress(OSError):
            self._beginning.unlink()
        self._cut = None

    def _end_rotation(self, reason: str) -> None:
        self._rotates = False
        logger.warning(
            "kvoffload: the recording of calls to %s will end at record_max_bytes, because it cannot be "
            "rotated: %s", self.path, reason
        )  # fmt: skip
