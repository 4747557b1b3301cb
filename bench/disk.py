"""The disk tier beside the best raw method and beside a file for each block, in one run.

    python bench/disk.py --path DIRECTORY --total 1GiB

All sides write and read the same blocks, with direct I/O, from and into the same memory, and end a pass with
their data durable, except "file, no sync". *raw* is the best of several ways of moving them to and from one
preallocated file: pieces of a block or of 4 MiB, by one thread or four, and one `fdatasync`. It verifies
nothing and remembers nothing. Sides take turns; the median of the passes counts.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvoffload.config import parse_size
from kvoffload.core.keys import Keys
from kvoffload.tiers.disk import DiskTier
from kvoffload.tiers.disk.files import aligned
from kvoffload.tiers.disk.layout import LOCK_FILE_BYTES, Layout

PIECE_BYTES = 4 * 1024 * 1024
KEY_BYTES = 36
DIRECT = getattr(os, "O_DIRECT", 0)
Pool = npt.NDArray[np.uint8]


def seconds_of(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


class Raw:
    """One preallocated file, moved in pieces."""

    def __init__(self, path: Path, pool: Pool) -> None:
        self._fd = os.open(path / "raw", os.O_RDWR | os.O_CREAT | DIRECT, 0o600)
        os.posix_fallocate(self._fd, 0, pool.nbytes)
        self._memory = pool.reshape(-1)
        self._block = pool.shape[1]

    def methods(self) -> list[tuple[int, int]]:
        """Bytes of a piece, and threads."""
        return [(PIECE_BYTES, 1), (PIECE_BYTES, 4), (self._block, 4), (self._block, 16)]

    def move(self, operation: Callable[..., int], piece: int, threads: int) -> None:
        size = max(piece, self._block)
        parts = [(self._memory[at : at + size], at) for at in range(0, len(self._memory), size)]
        if threads == 1:
            for part, at in parts:
                operation(self._fd, [part], at)
            return
        with ThreadPoolExecutor(threads) as executor:
            list(executor.map(lambda item: operation(self._fd, [item[0]], item[1]), parts))

    def write(self, piece: int, threads: int) -> None:
        self.move(os.pwritev, piece, threads)
        os.fdatasync(self._fd)

    def read(self, piece: int, threads: int) -> None:
        self.move(os.preadv, piece, threads)

    def close(self) -> None:
        os.close(self._fd)


class Tier:
    """Ours: one job for each `request_blocks`, all of them submitted at once."""

    def __init__(self, path: Path, pool: Pool, request_blocks: int, threads: int) -> None:
        count, block_bytes = pool.shape
        capacity = Layout(block_bytes, KEY_BYTES, count).file_bytes + LOCK_FILE_BYTES
        self._tier = DiskTier(
            path / "tier", capacity, block_bytes, key_bytes=KEY_BYTES, fingerprint="bench",
            num_threads=threads, queue_bytes=2 * capacity,
        )  # fmt: skip
        self._pool, self._life, self._step = pool, 0, request_blocks
        self._jobs: list[tuple[Keys, npt.NDArray[np.int64]]] = []

    def rename(self) -> None:
        """The blocks get new keys, as the next to be written have."""
        self._life += 1
        rows = np.arange(len(self._pool))
        names = [b"%0*d" % (KEY_BYTES, self._life * len(rows) + row) for row in rows.tolist()]
        keys = Keys.pack(names, KEY_BYTES)
        starts = range(0, len(rows), self._step)
        self._jobs = [(keys[at : at + self._step], rows[at : at + self._step]) for at in starts]

    def write(self) -> None:
        for keys, rows in self._jobs:
            _, taken = self._tier.submit_write(keys, self._pool, rows)
            assert taken.all()
        self._wait()

    def read(self) -> None:
        for keys, rows in self._jobs:
            self._tier.submit_read(keys, self._pool, rows)
        self._wait()

    def _wait(self) -> None:
        assert self._tier.drain(600)
        assert all(result.ok.all() for result in self._tier.finished())

    def close(self) -> None:
        self._tier.close()


class Directory:
    """A file for each block, written beside its name and renamed, by four threads."""

    def __init__(self, path: Path, pool: Pool) -> None:
        self._path, self._pool = path / "files", pool
        self._path.mkdir()

    def _write_one(self, row: int, sync: bool) -> None:
        name = self._path / f"{row:08d}"
        fd = os.open(f"{name}.tmp", os.O_WRONLY | os.O_CREAT | DIRECT, 0o600)
        os.pwritev(fd, [self._pool[row]], 0)
        if sync:
            os.fdatasync(fd)
        os.close(fd)
        os.rename(f"{name}.tmp", name)

    def _read_one(self, row: int) -> None:
        fd = os.open(self._path / f"{row:08d}", os.O_RDONLY | DIRECT)
        os.preadv(fd, [self._pool[row]], 0)
        os.close(fd)

    def write(self, sync: bool) -> None:
        with ThreadPoolExecutor(4) as executor:
            list(executor.map(lambda row: self._write_one(row, sync), range(len(self._pool))))

    def read(self) -> None:
        with ThreadPoolExecutor(4) as executor:
            list(executor.map(self._read_one, range(len(self._pool))))


def measure(path: Path, block_bytes: int, total_bytes: int, passes: int, threads: int) -> dict[str, float]:
    """Seconds of each side, medians."""
    count = total_bytes // block_bytes
    pool = aligned(count * block_bytes).reshape(count, block_bytes)
    pool[:] = np.random.default_rng(0).integers(0, 256, pool.shape, np.uint8)
    raw, tier = Raw(path, pool), Tier(path, pool, max(1, 16 * PIECE_BYTES // block_bytes), threads)
    files = Directory(path, pool)
    sides: dict[str, Callable[[], object]] = {}
    for piece, workers in raw.methods():
        sides[f"raw write {piece >> 10} KiB x{workers}"] = partial(raw.write, piece, workers)
    sides["tier write"] = tier.write
    sides["file+sync write"] = lambda: files.write(True)
    sides["file write"] = lambda: files.write(False)
    for piece, workers in raw.methods():
        sides[f"raw read {piece >> 10} KiB x{workers}"] = partial(raw.read, piece, workers)
    sides["tier read"] = tier.read
    sides["file read"] = files.read
    # The first pass of all goes into room that nothing was written to yet: it is not counted.
    raw.write(PIECE_BYTES, 1)
    tier.write()
    times: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(passes):
        for name in sides if number % 2 == 0 else reversed(sides):
            times[name].append(seconds_of(sides[name]))
    raw.close()
    tier.close()
    return {name: statistics.median(values) for name, values in times.items()}


def report(block_bytes: int, total_bytes: int, seconds: dict[str, float]) -> None:
    moved = total_bytes // block_bytes * block_bytes / 1e9
    for verb, others in (("write", ("file+sync write", "file write")), ("read", ("file read",))):
        best = min((name for name in seconds if name.startswith(f"raw {verb}")), key=seconds.__getitem__)
        ours = seconds[f"tier {verb}"]
        beside = ", ".join(f"{seconds[name] / ours:.2f}x of {name.split()[0]}" for name in others)
        print(
            f"{block_bytes >> 10:5d} KiB {verb:5s}: ours {moved / ours:.2f} GB/s, "
            f"{best} {moved / seconds[best]:.2f} GB/s: {seconds[best] / ours:.2f} of raw; {beside}"
        )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--path", type=Path, required=True, help="a directory on the disk to measure")
    parser.add_argument("--total", default="1GiB")
    parser.add_argument("--block-bytes", nargs="+", default=["64KiB", "256KiB", "1MiB", "2MiB", "4MiB"])
    parser.add_argument("--passes", type=int, default=5)
    parser.add_argument("--threads", type=int, default=4, help="of the tier")
    chosen = parser.parse_args(arguments)
    total_bytes = parse_size("total", chosen.total)
    for text in chosen.block_bytes:
        path = chosen.path / "kvoffload-bench-disk"
        path.mkdir(parents=True)
        try:
            block_bytes = parse_size("block-bytes", text)
            report(
                block_bytes,
                total_bytes,
                measure(path, block_bytes, total_bytes, chosen.passes, chosen.threads),
            )
        finally:
            shutil.rmtree(path)


if __name__ == "__main__":
    main()
