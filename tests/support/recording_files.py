"""Implementations of `Files` for tests of the disk tier: one records what a crash could leave, others fail.

Owns a model of what a medium may do with writes before a sync: keep them, lose them, tear them at any sector,
fill them with zeros, in any order. Tests use the tier's own seam, `Files`; the tier does not know this
module.
"""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from kvoffload.tiers.disk.files import Buffers, Files

SECTOR_BYTES = 512


class Write(NamedTuple):
    """A write as it was submitted; `end` is the position in the record at which it returned."""

    begin: int
    end: int
    offset: int
    data: bytes


class Recorder(Files):
    """Passes all calls on, and records each write and each sync of the file that was opened last.

    A position in the record counts the operations so far. `image` returns what the file may hold after a
    crash at a position. Thread: any.

    Attributes:
        writes: every write, in the order in which they returned.
        size_bytes: of the file.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._position = 0
        self.writes: list[Write] = []
        self._syncs: list[tuple[int, int]] = []
        self.size_bytes = 0

    @property
    def position(self) -> int:
        """Number of operations so far."""
        with self._lock:
            return self._position

    def allocate(self, fd: int, num_bytes: int) -> None:
        """As `Files.allocate`; begins the record."""
        super().allocate(fd, num_bytes)
        self.size_bytes = num_bytes

    def write(self, fd: int, buffers: Buffers, offset: int) -> int:
        """As `Files.write`."""
        begin = self._tick()
        written = super().write(fd, buffers, offset)
        data = b"".join(bytes(buffer) for buffer in buffers)[:written]
        with self._lock:
            self._position += 1
            self.writes.append(Write(begin, self._position, offset, data))
        return written

    def sync(self, fd: int) -> None:
        """As `Files.sync`."""
        begin = self._tick()
        super().sync(fd)
        self._syncs.append((begin, self._tick()))

    def _tick(self) -> int:
        with self._lock:
            self._position += 1
            return self._position

    def image(self, position: int, chance: random.Random, kind: str, base: bytes = b"") -> bytes:
        """What the file may hold after a crash at `position`: all synced writes, and of the others

        - ``all``: all that returned (the process died, the system did not);
        - ``none``: nothing;
        - ``some``: any of the writes, in any order;
        - ``last``: only the last of the writes, although others were begun before it;
        - ``torn``: any sectors of any of them;
        - ``prefix``: of each, a prefix of any length;
        - ``zeros``: sectors of them; the others are zeros.

        `base` is what the file held when the record began.
        """
        synced = max((begin for begin, end in self._syncs if end <= position), default=0)
        content = bytearray(base or bytes(self.size_bytes))
        begun = sorted(
            (write for write in self.writes if write.begin <= position), key=lambda write: write.end
        )
        unsynced = [write for write in begun if write.end > synced]
        for write in begun:
            if write.end <= synced:
                content[write.offset : write.offset + len(write.data)] = write.data
        if kind == "last":
            unsynced = unsynced[-1:]
        elif kind != "all":
            chance.shuffle(unsynced)
        for write in unsynced:
            _land(content, write, position, chance, kind)
        return bytes(content)


def _land(content: bytearray, write: Write, position: int, chance: random.Random, kind: str) -> None:
    """Apply the part of an unsynced write that survives this kind of crash."""
    if kind == "none" or (kind == "all" and write.end > position):
        return
    if kind in ("all", "last", "some"):
        if kind != "some" or chance.random() < 0.5:
            content[write.offset : write.offset + len(write.data)] = write.data
        return
    stop = chance.randrange(len(write.data) + 1) if kind == "prefix" else len(write.data)
    odds = chance.random()
    for at in range(0, stop, SECTOR_BYTES):
        end = min(at + SECTOR_BYTES, stop)
        if kind == "prefix" or chance.random() < odds:
            content[write.offset + at : write.offset + end] = write.data[at:end]
        elif kind == "zeros":
            content[write.offset + at : write.offset + end] = bytes(end - at)


KINDS = ("all", "none", "some", "last", "torn", "prefix", "zeros")
"""The kinds of crashes of `Recorder.image`."""


class FailingFiles(Files):
    """Fails or waits where a test decides.

    Attributes:
        fail: called before each operation with its name (``read``, ``write``, ``sync``, ``allocate``) and
            its offset; it may raise `OSError`, wait, or do nothing.
    """

    def __init__(self) -> None:
        self.fail: Callable[[str, int], None] = lambda operation, offset: None

    def allocate(self, fd: int, num_bytes: int) -> None:
        """As `Files.allocate`."""
        self.fail("allocate", 0)
        super().allocate(fd, num_bytes)

    def read(self, fd: int, buffers: Buffers, offset: int) -> int:
        """As `Files.read`."""
        self.fail("read", offset)
        return super().read(fd, buffers, offset)

    def write(self, fd: int, buffers: Buffers, offset: int) -> int:
        """As `Files.write`."""
        self.fail("write", offset)
        return super().write(fd, buffers, offset)

    def sync(self, fd: int) -> None:
        """As `Files.sync`."""
        self.fail("sync", 0)
        super().sync(fd)


class BufferedFiles(Files):
    """Through the system's cache, as on file systems without direct I/O."""

    def open(self, path: Path, flags: int) -> int:
        """As `Files.open`."""
        return os.open(path, flags | os.O_CLOEXEC, 0o600)


class ShortFiles(BufferedFiles):
    """Moves only a few bytes in each call, as every system may.

    Attributes:
        num_bytes: the most bytes of a call.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes

    def read(self, fd: int, buffers: Buffers, offset: int) -> int:
        """As `Files.read`."""
        return super().read(fd, self._head(buffers), offset)

    def write(self, fd: int, buffers: Buffers, offset: int) -> int:
        """As `Files.write`."""
        return super().write(fd, self._head(buffers), offset)

    def _head(self, buffers: Buffers) -> Buffers:
        room, head = self.num_bytes, []
        for buffer in buffers:
            head.append(buffer[:room])
            room -= len(head[-1])
        return head


class SparseFiles(Files):
    """Reserves no room: for slabs larger than the disk of the test machine."""

    def allocate(self, fd: int, num_bytes: int) -> None:
        """Set the length of the file, without reserving room."""

        os.ftruncate(fd, num_bytes)


def raises(number: int, *operations: str, above: int = 0) -> Callable[[str, int], None]:
    """A `FailingFiles.fail` that raises this error for these operations, at offsets from `above` on."""

    def fail(operation: str, offset: int) -> None:
        if operation in operations and (offset >= above or operation == "sync"):
            raise OSError(number, errno.errorcode[number])

    return fail


def write_image(directory: Path, name: str, image: bytes) -> Path:
    """Write what a crash left into a directory, as the file `name`."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / name
    path.write_bytes(image)
    path.chmod(0o600)
    return path
