"""Timing of products in separate processes, controlled line by line, so that they can take turns.

`serve` runs in the product's Python and times only the product; `Server` is the parent's side. Files are
dropped from the page cache before a read; the memory of servers is not.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from peers.contract import Adapter, File, Place

JOBS = 16
"""Jobs of a batch, as if from 16 requests."""
SYNC_THREADS = 16
"""Number of write threads of vLLM's tier."""


class Spent(NamedTuple):
    """Wall seconds, and CPU seconds of all threads of the product's process."""

    seconds: float
    cpu_s: float


def serve(adapter: Adapter, out: IO[str]) -> None:
    """Execute each line of stdin; answer with its wall and CPU seconds.

    ``open DIRECTORY BLOCK_BYTES NUM_BLOCKS`` comes first, and again for each other size. The commands
    ``write``, ``read``, ``fsync`` and ``syncfs`` apply to all blocks.
    """
    tier: _Tier | None = None
    for line in sys.stdin:
        command, *arguments = line.split()
        if command == "open":
            if tier is not None:
                tier.product.close()
            tier = _Tier(adapter, Path(arguments[0]), int(arguments[1]), int(arguments[2]))
            spent = Spent(0.0, 0.0)
        else:
            assert tier is not None
            timed = tier.prepared(command)
            began, cpu_began = time.perf_counter(), time.process_time()
            timed()
            spent = Spent(time.perf_counter() - began, time.process_time() - cpu_began)
        print(json.dumps(spent._asdict()), file=out, flush=True)
    if tier is not None:
        tier.product.close()


class _Tier:
    """An open tier with a pool of random bytes, and the timed operations."""

    def __init__(self, adapter: Adapter, directory: Path, block_bytes: int, num_blocks: int) -> None:
        self.product = adapter.open(directory, "model", block_bytes, num_blocks)
        pool = self.product.pool
        pool[:] = np.random.default_rng(0).integers(0, 256, pool.shape, np.uint8)
        self._directory, self._numbers = directory, list(range(num_blocks))
        self._per_job = max(1, num_blocks // JOBS)

    def prepared(self, command: str) -> Callable[[], None]:
        """Prepare an operation and return it for timing. Evictions and page-cache drops are not timed."""
        places = self.product.places(self._numbers)
        if command == "write":
            self.product.forget(list(places))
            return self._write
        if command == "read":
            drop_cached([place for place in places.values() if isinstance(place.medium, File)])
            return self._read
        if command == "fsync":
            return partial(fsync_each, list(places.values()))
        return partial(syncfs, self._directory)

    def _write(self) -> None:
        if not all(self.product.write(self._numbers, self._per_job)):
            raise RuntimeError("not every block was stored")

    def _read(self) -> None:
        if not all(self.product.read(self._numbers, self._per_job)):
            raise RuntimeError("not every block was served")


def fsync_each(places: Sequence[Place]) -> None:
    """Sync the file of every block, then every directory with such a file."""
    paths = {place.medium.path for place in places}
    with ThreadPoolExecutor(SYNC_THREADS) as threads:
        list(threads.map(_fsync, paths))
        list(threads.map(_fsync, {os.path.dirname(path) for path in paths}))


def _fsync(path: str) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def syncfs(directory: Path) -> None:
    """Sync the whole file system, including files of other processes."""
    fd = os.open(directory, os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(fd):
            raise OSError(ctypes.get_errno(), "syncfs")
    finally:
        os.close(fd)


def drop_cached(places: Sequence[Place]) -> None:
    """Drop the files of these blocks from the page cache."""
    for path in {place.medium.path for place in places}:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


class Server:
    """A child process that runs `serve`."""

    def __init__(self, command: Sequence[str], environment: dict[str, str]) -> None:
        self._child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            env=environment,
        )  # fmt: skip

    def do(self, command: str) -> Spent:
        """Run a command; returns its cost. Raises `RuntimeError` if the child ended."""
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._child.stdin.write(command + "\n")
            self._child.stdin.flush()
        line = self._child.stdout.readline()
        while line and "seconds" not in line:
            line = self._child.stdout.readline()
        if not line:
            raise RuntimeError(f"the process ended with status {self._child.wait()}")
        return Spent(**json.loads(line))

    def close(self) -> None:
        assert self._child.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._child.stdin.close()
        self._child.wait()
