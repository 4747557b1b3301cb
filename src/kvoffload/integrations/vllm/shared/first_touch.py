"""Allocates the pages of a shared mapping in advance, in the process that will use them.

The kernel allocates a page on the NUMA node of the thread that touches the page first. So the process that
will use a page must be the first to touch it.
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
"""Number of bytes that a thread allocates in one batch. It is small, so that all threads end soon after an
error."""
_MAX_THREADS = 4
_NODES = Path("/sys/devices/system/node/has_memory")

# `mmap.madvise` would hold the interpreter's lock while the kernel zeroes gigabytes.
_libc = ctypes.CDLL(None, use_errno=True)

Span = tuple[int, int]
"""A part of a file: its offset and its length, in bytes."""


def ask_for_huge_pages(address: int, num_bytes: int) -> bool:
    """Ask the kernel to use huge pages (2 MiB) for later allocations in this mapping.

    Returns True if the kernel accepts. Nevertheless it uses huge pages only if the file system is mounted
    with the option ``huge=``. Raises nothing.
    """
    return advise(address, num_bytes, _MADV_HUGEPAGE) == 0


def has_several_nodes() -> bool:
    """Return True if this machine has memory on several NUMA nodes. Raises nothing."""
    try:
        return not _NODES.read_text().strip().isdecimal()
    except OSError:
        return False


def num_threads(num_workers: int) -> int:
    """Return how many threads each worker should use if `num_workers` workers allocate at the same time."""
    return max(1, min(_MAX_THREADS, len(os.sched_getaffinity(0)) // num_workers))


def take(fd: int, address: int, spans: Sequence[Span], threads: int) -> None:
    """Allocate zeroed pages for parts of a mapped file, on the NUMA node of this process.

    Existing pages do not change. After the call, no write into a span can fail because memory is missing.

    Args:
        address: address of the file's first byte in this process.
        threads: number of threads.

    Raises: `OSError` if there is not enough memory; some pages may have been allocated by then.
    Cost: 0.6 s per GiB in pages of 4 KiB, 0.06 s per GiB in huge pages (`bench/pool_start.py`).
    """

    def take_batch(batch: list[Span]) -> None:
        for start, num_bytes in batch:
            _take(fd, address, start, num_bytes)

    with ThreadPoolExecutor(threads, thread_name_prefix="kvoffload-first-touch") as executor:
        # After an error `map` cancels the batches that have not begun.
        for _ in executor.map(take_batch, _batches(spans)):
            pass


def _take(fd: int, address: int, start: int, num_bytes: int) -> None:
    """Allocate whole pages. Linux before 5.14 only reserves them; their NUMA node is then chosen later."""
    while (failed := advise(address + start, num_bytes, _MADV_POPULATE_WRITE)) == errno.EINTR:
        pass
    if failed:
        # This call raises the real cause; `madvise` reports a lack of memory as a bad address.
        os.posix_fallocate(fd, start, num_bytes)


def advise(address: int, num_bytes: int, advice: int) -> int:
    """Call `madvise`. Returns the error number, or 0."""
    arguments = ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), ctypes.c_int(advice)
    return ctypes.get_errno() if _libc.madvise(*arguments) else 0


def _batches(spans: Sequence[Span]) -> Iterator[list[Span]]:
    """Yield the spans in batches of about `_STEP_BYTES`, in order."""
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
