"""Implementations of `Files` for tests of the disk tier: a recorder of crash images, and failing media.

Models the freedom of a medium before a sync: it may keep, lose, reorder, tear or zero writes.
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
    """A write; `begin` and `end` are the positions in the record of its call and its return."""

    begin: int
    end: int
    offset: int
    data: bytes


class Recorder(Files):
    """Records each write and sync of the file that was opened last.

    A position is the number of operations so far. `image` makes a possible content of the file after a crash
    there. Thread: any.

    Attributes:
        writes: all writes, in the order of their returns.
        size_bytes: length of the file.
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
        """Extend the file, as `Files.allocate`, and record its length."""
        super().allocate(fd, num_bytes)
        self.size_bytes = num_bytes

    def write(self, fd: int, buffers: Buffers, offset: int) -> int:
        """Write to a file."""
        begin = self._tick()
        written = super().write(fd, buffers, offset)
        data = b"".join(bytes(buffer) for buffer in buffers)[:written]
        with self._lock:
            self._position += 1
            self.writes.append(Write(begin, self._position, offset, data))
        return written

    def sync(self, fd: int) -> None:
        """Sync a file."""
        begin = self._tick()
        super().sync(fd)
        self._syncs.append((begin, self._tick()))

    def _tick(self) -> int:
        with self._lock:
            self._position += 1
            return self._position

    def image(self, position: int, chance: random.Random, kind: str, base: bytes = b"") -> bytes:
        """Make a possible content of the file after a crash at `position`.

        It contains all synced writes. Of unsynced writes it contains, by kind:

        - ``all``: all that returned (the process died, the system survived);
        - ``none``: nothing;
        - ``some``: a random subset, in random order;
        - ``last``: only the last write, although earlier writes had started;
        - ``torn``: random sectors;
        - ``prefix``: a random prefix of each write;
        - ``zeros``: random sectors, and zeros for the others.

        `base` is the content of the file at the start of the record.
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
    """Apply the surviving part of an unsynced write."""
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
"""Kinds of crashes for `Recorder.image`."""


def works(operation: str, offset: int) -> None:
    """Let an operation pass: the default of `FailingFiles.fail`."""


class FailingFiles(Files):
    """A medium and clocks that a test controls.

    Attributes:
        fail: called before each operation with its name (``read``, ``write``, ``sync``, ``allocate``) and
            its offset; it may raise `OSError`, wait, or do nothing.
        clock_s: seconds since 1970; None for the real time.
        passed_s: the monotonic clock, which only tests advance.
        sleep_calls: requested sleeps; no sleep takes time.
    """

    def __init__(self, clock_s: float | None = None) -> None:
        self.fail: Callable[[str, int], None] = works
        self.clock_s, self.passed_s, self.sleep_calls = clock_s, 1000.0, list[float]()

    def time_s(self) -> float:
        """Return `clock_s`, or the real time."""
        return super().time_s() if self.clock_s is None else self.clock_s

    def monotonic_s(self) -> float:
        """Return `passed_s`."""
        return self.passed_s

    def sleep(self, seconds: float) -> None:
        """Record a sleep."""
        self.sleep_calls.append(seconds)

    def allocate(self, fd: int, num_bytes: int) -> None:
        """Extend a file."""
        self.fail("allocate", 0)
        super().allocate(fd, num_bytes)

    def read(self, fd: int, buffers: Buffers, offset: int) -> int:
        """Read from a file."""
        self.fail("read", offset)
        return super().read(fd, buffers, offset)

    def write(self, fd: int, buffers: Buffers, offset: int) -> int:
        """Write to a file."""
        self.fail("write", offset)
        return super().write(fd, buffers, offset)

    def sync(self, fd: int) -> None:
        """Sync a file."""
        self.fail("sync", 0)
        super().sync(fd)


class BufferedFiles(Files):
    """Buffered I/O, as on file systems without direct I/O."""

    def open(self, path: Path, flags: int) -> int:
        """Open a file without direct I/O."""
        return os.open(path, flags | os.O_CLOEXEC, 0o600)


class ShortFiles(BufferedFiles):
    """Moves at most `num_bytes` in each call, as every system may."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes

    def read(self, fd: int, buffers: Buffers, offset: int) -> int:
        """Read from a file."""
        return super().read(fd, self._head(buffers), offset)

    def write(self, fd: int, buffers: Buffers, offset: int) -> int:
        """Write to a file."""
        return super().write(fd, self._head(buffers), offset)

    def _head(self, buffers: Buffers) -> Buffers:
        room, head = self.num_bytes, []
        for buffer in buffers:
            head.append(buffer[:room])
            room -= len(head[-1])
        return head


class SparseFiles(Files):
    """Reserves no disk space, for slabs larger than the disk of the test machine."""

    def allocate(self, fd: int, num_bytes: int) -> None:
        """Set the length of the file without reserving disk space."""
        os.ftruncate(fd, num_bytes)


def raises(number: int, *operations: str, above: int = 0) -> Callable[[str, int], None]:
    """Make a `FailingFiles.fail` that raises an error in these operations, at offsets from `above`."""

    def fail(operation: str, offset: int) -> None:
        if operation in operations and (offset >= above or operation == "sync"):
            raise OSError(number, errno.errorcode[number])

    return fail


def write_image(directory: Path, name: str, image: bytes) -> Path:
    """Write the content of a crashed file to a directory."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / name
    path.write_bytes(image)
    path.chmod(0o600)
    return path
