"""Takes the memory of a shared mapping before it is used, by the process that will use it.

The kernel takes a page from the memory node of the thread that touches it first. Owns the system calls. Does
not know what the bytes mean, nor whose they are.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_MADV_HUGEPAGE, _MADV_POPULATE_WRITE = 14, 23
_STEP_BYTES = 64 * 2**20
"""What a thread takes at once: it must not outlive an error of another thread by minutes."""
_MAX_THREADS = 4
_NODES = Path("/sys/devices/system/node/has_memory")

# `mmap.madvise` would keep the interpreter's lock while the kernel zeroes gigabytes.
_libc = ctypes.CDLL(None, use_errno=True)

Span = tuple[int, int]
"""Bytes of a file: the first, and how many."""


def ask_for_huge_pages(address: int, num_bytes: int) -> bool:
    """Ask for pages of 2 MiB in this mapping, for all of it that is taken later; whether the kernel agrees.

    It agrees wherever it knows the question; whether it has such pages to give depends on how the file
    system of the file is mounted (``huge=``). Raises: nothing.
    """
    return _advise(address, num_bytes, _MADV_HUGEPAGE) == 0


def has_several_nodes() -> bool:
    """Whether this machine has memory on more than one node. Raises: nothing."""
    try:
        return not _NODES.read_text().strip().isdecimal()
    except OSError:
        return False


def num_threads(num_workers: int) -> int:
    """How many threads a worker takes memory with, if all workers do so at once."""
    return max(1, min(_MAX_THREADS, len(os.sched_getaffinity(0)) // num_workers))


def take(fd: int, address: int, spans: Sequence[Span], threads: int) -> None:
    """Reserve these spans of a file that is mapped whole, place them near this process, and zero new pages.

    What has been taken before stays as it is. Later no write into a span can fail for lack of memory.

    Args:
        address: of the file's first byte in this process. threads: how many work on it.

    Raises: `OSError` if there is no memory; part of it may have been taken then.
    Cost: 0.6 s a GiB in pages of 4 KiB, a tenth of that in huge pages (`bench/pool_start.py`).
    """

    def one(batch: list[Span]) -> None:
        for start, num_bytes in batch:
            _take(fd, address, start, num_bytes)

    with ThreadPoolExecutor(threads, thread_name_prefix="kvoffload-first-touch") as executor:
        # After an error `map` cancels what has not begun.
        for _ in executor.map(one, _batches(spans)):
            pass


def _take(fd: int, address: int, start: int, num_bytes: int) -> None:
    """Take whole pages. Where the kernel cannot touch them for us (before 5.14) they are only reserved."""
    while (failed := _advise(address + start, num_bytes, _MADV_POPULATE_WRITE)) == errno.EINTR:
        pass
    if failed:
        # Also for its reason: a page that is missing is a bad address to the call above.
        os.posix_fallocate(fd, start, num_bytes)


def _advise(address: int, num_bytes: int, advice: int) -> int:
    """The error of `madvise`, 0 for none."""
    arguments = ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), ctypes.c_int(advice)
    return ctypes.get_errno() if _libc.madvise(*arguments) else 0


def _batches(spans: Sequence[Span]) -> Iterator[list[Span]]:
    """The spans in pieces of about `_STEP_BYTES`, in order."""
    batch: list[Span] = []
    total = 0
    for start, num_bytes in spans:
        for at in range(start, start + num_bytes, _STEP_BYTES):
            size = min(_STEP_BYTES, start + num_bytes - at)
            batch.append((at, size))
            total += size
            if total >= _STEP_BYTES:
                yield batch
                batch, total = [], 0
    if batch:
        yield batch
