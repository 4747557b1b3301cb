"""System calls of the disk tier: all reads, writes and syncs of a slab, and all clocks.

Tests replace `Files` by a subclass that injects faults or has its own clocks.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Buffers: TypeAlias = Sequence[Any]
"""Contiguous objects that support the buffer protocol."""

PAGE_BYTES = 4096
"""Alignment of offsets, lengths and addresses for direct I/O."""


class Files:
    """System calls of the disk tier. A call that fails raises `OSError`. Thread: any, several at a time."""

    def time_s(self) -> float:
        """Return seconds since 1970."""
        return time.time()

    def monotonic_s(self) -> float:
        """Return seconds of a monotonic clock."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Sleep. Called to wait for another process that holds the lock of the directory."""
        time.sleep(seconds)

    def open(self, path: Path, flags: int) -> int:
        """Open a file, with direct I/O if the file system supports it. A new file gets mode 0600.

        Refuses a symbolic link, because its target may be outside of the directory.
        """
        flags |= os.O_CLOEXEC | os.O_NOFOLLOW
        with contextlib.suppress(OSError):
            return os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o600)
        return os.open(path, flags, 0o600)

    def allocate(self, fd: int, num_bytes: int) -> None:
        """Extend the file to at least `num_bytes`. Reserves the disk space if the file system can do so."""
        start = self.size(fd)
        if num_bytes <= start:
            return
        if hasattr(os, "posix_fallocate"):
            try:
                # Only the new part, because some C libraries emulate this call with writes.
                os.posix_fallocate(fd, start, num_bytes - start)
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                    raise
        os.ftruncate(fd, num_bytes)

    def shorten(self, fd: int, num_bytes: int) -> None:
        """Truncate the file to `num_bytes`."""
        os.ftruncate(fd, num_bytes)

    def size(self, fd: int) -> int:
        """Return the length of the file in bytes."""
        return os.fstat(fd).st_size

    def read(self, fd: int, buffers: Buffers, offset: int) -> int:
        """Fill the buffers from `offset`; returns the number of bytes read."""
        return os.preadv(fd, buffers, offset)

    def write(self, fd: int, buffers: Buffers, offset: int) -> int:
        """Write the buffers at `offset`; returns the number of bytes written."""
        return os.pwritev(fd, buffers, offset)

    def sync(self, fd: int) -> None:
        """Make all earlier writes durable."""
        getattr(os, "fdatasync", os.fsync)(fd)

    def sync_directory(self, path: Path) -> None:
        """Make creations, renames and deletions in a directory durable."""
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def close(self, fd: int) -> None:
        """Close the file."""
        os.close(fd)


def aligned(num_bytes: int) -> npt.NDArray[np.uint8]:
    """Allocate zeroed memory for direct I/O: aligned to a page, in whole pages."""
    length = -(-max(1, num_bytes) // PAGE_BYTES) * PAGE_BYTES
    return np.frombuffer(mmap.mmap(-1, length), np.uint8)
