"""Speed of the disk tier against raw I/O and against one file per block, in one run.

    python bench/disk.py --path DIRECTORY

All sides transfer the same blocks with direct I/O between a disk and the same memory. After a write pass the
data are durable, except for "a file each". *raw* uses one preallocated file and one `fdatasync`, without
verification or index; its fastest method counts: pieces of one block, 1 MiB or 4 MiB, with 1 to 16 threads.

The speed of a shared disk changes from second to second. Therefore each pass of the tier or of files is
compared with the mean of a raw pass before and a raw pass after it. Prints medians and quartiles of the
ratios. Files are measured in at most 3 passes.
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
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvoffload.settings.read import parse_size
from kvoffload.structures.keys import Keys
from kvoffload.tiers.disk import DiskTier
from kvoffload.tiers.disk.files import aligned
from kvoffload.tiers.disk.slab_layout import LOCK_FILE_BYTES, Layout

PIECE_BYTES = 4 * 1024 * 1024
KEY_BYTES = 36
SLAB_PASSES = 4
"""Number of passes that fit into the slab."""
DIRECT = getattr(os, "O_DIRECT", 0)
Pool = npt.NDArray[np.uint8]


class Cost(NamedTuple):
    """Cost of one pass: wall time, and CPU time of all threads."""

    wall_s: float
    cpu_s: float


def cost_of(work: Callable[[], object]) -> Cost:
    began, worked = time.perf_counter(), time.process_time()
    work()
    return Cost(time.perf_counter() - began, time.process_time() - worked)


class Raw:
    """One preallocated file, transferred in pieces."""

    def __init__(self, path: Path, pool: Pool) -> None:
        self._fd = os.open(path / "raw", os.O_RDWR | os.O_CREAT | DIRECT, 0o600)
        os.posix_fallocate(self._fd, 0, pool.nbytes)
        self._memory = pool.reshape(-1)
        self._block = pool.shape[1]

    def methods(self) -> list[tuple[int, int]]:
        """All pairs of piece size in bytes and number of threads."""
        pieces = sorted({self._block, 1 << 20, PIECE_BYTES})
        return [(piece, threads) for piece in pieces if piece >= self._block for threads in (1, 4, 8, 16)]

    def move(self, operation: Callable[..., int], piece: int, threads: int) -> None:
        size = max(piece, self._block)
        pieces = [(self._memory[at : at + size], at) for at in range(0, len(self._memory), size)]
        if threads == 1:
            for memory, at in pieces:
                operation(self._fd, [memory], at)
            return
        with ThreadPoolExecutor(threads) as executor:
            list(executor.map(lambda item: operation(self._fd, [item[0]], item[1]), pieces))

    def write(self, piece: int, threads: int) -> None:
        self.move(os.pwritev, piece, threads)
        os.fdatasync(self._fd)

    def read(self, piece: int, threads: int) -> None:
        self.move(os.preadv, piece, threads)

    def close(self) -> None:
        os.close(self._fd)


class Tier:
    """Our disk tier: jobs of `request_blocks` blocks, all submitted at once, into a full slab."""

    def __init__(self, path: Path, pool: Pool, request_blocks: int, threads: int) -> None:
        count, block_bytes = pool.shape
        capacity = Layout.holding(block_bytes, KEY_BYTES, SLAB_PASSES * count).file_bytes + LOCK_FILE_BYTES
        self._tier = DiskTier(
            path / "tier", capacity, block_bytes, key_bytes=KEY_BYTES, fingerprint="bench",
            num_threads=threads, queue_bytes=2 * capacity,
        )  # fmt: skip
        self._pool, self._life, self._step = pool, 0, request_blocks
        self._jobs: list[tuple[Keys, npt.NDArray[np.int64]]] = []

    def rename(self) -> None:
        """Give the blocks new keys, so that the next pass writes all of them."""
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
    """One file per block, written under a temporary name and renamed, with four threads."""

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


class Against(NamedTuple):
    """A side compared with raw passes: its median speed, quartiles of its share of the raw speed, and the
    median CPU time of both per pass."""

    bytes_per_s: float
    shares: list[float]
    cpu_s: float
    raw_cpu_s: float


def against(
    raw: Callable[[], object],
    side: Callable[[], object],
    before: Callable[[], object],
    passes: int,
    moved: int,
) -> Against:
    """Measure passes of a side between raw passes; `before` runs before each of the side's, not timed."""
    costs, raws, shares = list[Cost](), [cost_of(raw)], list[float]()
    for _ in range(passes):
        before()
        costs.append(cost_of(side))
        raws.append(cost_of(raw))
        shares.append((raws[-2].wall_s + raws[-1].wall_s) / 2 / costs[-1].wall_s)
    median = statistics.median
    return Against(
        moved / median(cost.wall_s for cost in costs),
        statistics.quantiles(shares, n=4),
        median(cost.cpu_s for cost in costs),
        median(cost.cpu_s for cost in raws),
    )


def measure(path: Path, block_bytes: int, total_bytes: int, *, passes: int, threads: int, batch: int) -> None:
    """Measure and print one block size."""
    count = total_bytes // block_bytes
    pool = aligned(count * block_bytes).reshape(count, block_bytes)
    pool[:] = np.random.default_rng(0).integers(0, 256, pool.shape, np.uint8)
    raw, tier = Raw(path, pool), Tier(path, pool, batch or max(1, 16 * PIECE_BYTES // block_bytes), threads)
    files = Directory(path, pool)
    # Not counted: the first pass writes into unallocated space.
    raw.write(PIECE_BYTES, 4)
    files.write(False)
    for _ in range(SLAB_PASSES):
        tier.rename()
        tier.write()
    sides: dict[str, dict[str, Callable[[], object]]] = {
        "write": {
            "ours": tier.write,
            "a file each": partial(files.write, False),
            "a file each, synced": partial(files.write, True),
        },
        "read": {"ours": tier.read, "a file each": files.read},
    }
    for verb, sides_of_verb in sides.items():
        move = raw.write if verb == "write" else raw.read
        seconds = {
            way: statistics.median(cost_of(partial(move, *way)).wall_s for _ in range(3))
            for way in raw.methods()
        }
        piece, workers = best = min(seconds, key=seconds.__getitem__)
        print(
            f"{block_bytes >> 10:5d} KiB {verb:5s}: fastest raw, {piece >> 10} KiB x {workers} threads: "
            f"{pool.nbytes / seconds[best] / 1e9:.2f} GB/s"
        )
        for name, side in sides_of_verb.items():
            before = tier.rename if side == tier.write else lambda: None
            rounds = passes if name == "ours" else min(passes, 3)
            result = against(partial(move, *best), side, before, rounds, pool.nbytes)
            low, middle, high = result.shares
            print(
                f"{'':17s} {name:20s} {result.bytes_per_s / 1e9:.2f} GB/s, "
                f"{middle:.2f} of raw ({low:.2f} to {high:.2f}); CPU a block "
                f"{result.cpu_s / count * 1e6:.0f} us, raw {result.raw_cpu_s / count * 1e6:.0f} us",
                flush=True,
            )
    raw.close()
    tier.close()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--path", type=Path, required=True, help="directory on the disk to measure")
    parser.add_argument("--total", default="2GiB")
    parser.add_argument("--block-bytes", nargs="+", default=["64KiB", "256KiB", "1MiB", "2MiB", "4MiB"])
    parser.add_argument("--passes", type=int, default=11)
    parser.add_argument("--threads", type=int, default=16, help="threads of the tier")
    parser.add_argument("--batch", type=int, default=0, help="blocks per job of the tier; 0: 64 MiB")
    chosen = parser.parse_args(arguments)
    total_bytes = parse_size("total", chosen.total)
    for text in chosen.block_bytes:
        path = chosen.path / "kvoffload-bench-disk"
        path.mkdir(parents=True)
        try:
            block_bytes = parse_size("block-bytes", text)
            measure(
                path, block_bytes, total_bytes,
                passes=chosen.passes, threads=chosen.threads, batch=chosen.batch,
            )  # fmt: skip
        finally:
            shutil.rmtree(path)


if __name__ == "__main__":
    main()
