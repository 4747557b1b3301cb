"""All system calls of the disk tier: every read, write and sync of a slab goes through a `Files`.

Tests replace it by one that records, tears, delays or refuses. Does not know slabs.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Buffers: TypeAlias = Sequence[Any]
"""Objects with the buffer protocol, contiguous."""

PAGE_BYTES = 4096
"""Offsets, lengths and addresses that every device accepts without a copy: multiples of this."""


class Files:
    """The system calls that the disk tier needs. Errors are `OSError`. Thread: any, several at a time."""

    def open(self, path: Path, flags: int) -> int:
        """Open a file, with direct I/O if its file system has it; a new file is private to its owner.

        A symbolic link is refused: it leads out of the directory.
        """
        flags |= os.O_CLOEXEC | os.O_NOFOLLOW
        with contextlib.suppress(OSError):
            return os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o600)
        return os.open(path, flags, 0o600)

    def allocate(self, fd: int, num_bytes: int) -> None:
        """Make the file at least this long, and reserve the room of what is new if the file system can."""
        start = self.size(fd)
        if num_bytes <= start:
            return
        if hasattr(os, "posix_fallocate"):
            # Not what is there: where the library imitates this call it writes, and others write there too.
            os.posix_fallocate(fd, start, num_bytes - start)
        os.ftruncate(fd, num_bytes)

    def shorten(self, fd: int, num_bytes: int) -> None:
        """Give back the room behind this many bytes."""
        os.ftruncate(fd, num_bytes)

    def size(self, fd: int) -> int:
        """Bytes of the file."""
        return os.fstat(fd).st_size

    def read(self, fd: int, buffers: Buffers, offset: int) -> int:
        """Fill the buffers from `offset` on; returns how many bytes were read."""
        return os.preadv(fd, buffers, offset)

    def write(self, fd: int, buffers: Buffers, offset: int) -> int:
        """Write the buffers from `offset` on; returns how many bytes were written."""
        return os.pwritev(fd, buffers, offset)

    def sync(self, fd: int) -> None:
        """Return when everything written before is on the medium."""
        getattr(os, "fdatasync", os.fsync)(fd)

    def sync_directory(self, path: Path) -> None:
        """Return when the names in a directory are on the medium."""
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def close(self, fd: int) -> None:
        """Close the file."""
        os.close(fd)


def aligned(num_bytes: int) -> npt.NDArray[np.uint8]:
    """Zeroed memory that direct I/O accepts: it starts on a page, and its length is whole pages."""
    length = -(-max(1, num_bytes) // PAGE_BYTES) * PAGE_BYTES
    return np.frombuffer(mmap.mmap(-1, length), np.uint8)
