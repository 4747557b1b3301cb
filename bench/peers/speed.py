"""A product that is told what to do, line by line, so that several can take turns.

`serve` runs under the product's own Python and times nothing but the product; `Server` is the other end.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

import numpy as np

from peers.contract import Adapter, Place

SYNC_THREADS = 16
"""As many as vLLM's tier writes with."""


def serve(adapter: Adapter, directory: Path, block_bytes: int, num_blocks: int, out: IO[str]) -> None:
    """Answer each line of stdin, a command, with the seconds that it took; until ``close``."""
    product = adapter.open(directory, "model", block_bytes, num_blocks)
    random = np.random.default_rng(0)
    product.pool[:] = random.integers(0, 256, product.pool.shape, np.uint8)
    numbers, per_job = list(range(num_blocks)), max(1, num_blocks // 16)
    places: list[Place] = []

    def write() -> None:
        if not all(product.write(numbers, per_job)):
            raise RuntimeError("not every block was stored")

    def read() -> None:
        if not all(product.read(numbers, per_job)):
            raise RuntimeError("not every block was served")

    commands: dict[str, Callable[[], None]] = {
        "write": write,
        "read": read,
        "fsync": lambda: fsync_each(places),
        "syncfs": lambda: syncfs(directory),
    }
    for line in sys.stdin:
        command = line.strip()
        if command == "close":
            break
        # What a batch replaces, and what the page cache has, is nobody's time.
        if command == "write":
            product.forget(list(product.places(numbers)))
            syncfs(directory)
        if command in ("read", "fsync"):
            places = list(product.places(numbers).values())
        if command == "read":
            drop_cached(places)
        began = time.perf_counter()
        commands[command]()
        print(json.dumps({"seconds": time.perf_counter() - began}), file=out, flush=True)
    product.close()


def fsync_each(places: Sequence[Place]) -> None:
    """Every file of these blocks, then every directory that has one."""
    paths = {place.path for place in places}
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
    """Everything on the file system at once, other processes' as well."""
    fd = os.open(directory, os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(fd):
            raise OSError(ctypes.get_errno(), "syncfs")
    finally:
        os.close(fd)


def drop_cached(places: Sequence[Place]) -> None:
    """Have the page cache forget the files of these blocks."""
    for path in {place.path for place in places}:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


class Server:
    """A child process that runs `serve`. Raises `RuntimeError` when it has ended."""

    def __init__(self, command: Sequence[str], environment: dict[str, str]) -> None:
        self._child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            env=environment,
        )  # fmt: skip
        self._answer()

    def do(self, command: str) -> float:
        """Seconds that it took."""
        assert self._child.stdin is not None
        self._child.stdin.write(command + "\n")
        self._child.stdin.flush()
        return float(self._answer()["seconds"])

    def _answer(self) -> dict[str, float]:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            raise RuntimeError(f"it ended with status {self._child.wait()}")
        answer: dict[str, float] = json.loads(line)
        return answer

    def close(self) -> None:
        assert self._child.stdin is not None
        self._child.stdin.write("close\n")
        self._child.stdin.close()
        self._child.wait()
