"""Blocks whose bytes follow from key and version, and a disk tier on top of them: for the disk tests."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvoffload.structures.keys import Keys
from kvoffload.tiers.contract import NO_JOB
from kvoffload.tiers.disk import DiskTier
from kvoffload.tiers.disk.directory import Geometry, slabs_in
from kvoffload.tiers.disk.layout import LOCK_FILE_BYTES, Layout
from support.timeouts import HANGS_S

KEY_BYTES = 12


def keys_of(numbers: Sequence[int]) -> Keys:
    """One key for each number."""
    return Keys.pack([b"key%09d" % number for number in numbers], KEY_BYTES)


@functools.lru_cache(maxsize=4096)
def block_of(number: int, version: int, block_bytes: int) -> npt.NDArray[np.uint8]:
    """The bytes of a block, different for each number and version."""
    return np.random.default_rng([number, version]).integers(0, 256, block_bytes, np.uint8)


def capacity_for(num_slots: int, block_bytes: int) -> int:
    """Bytes of a directory that holds just so many blocks."""
    return Layout.holding(block_bytes, KEY_BYTES, num_slots).file_bytes + LOCK_FILE_BYTES


def slab_name(block_bytes: int = 4096) -> str:
    """The file name of a `Disk`'s slab."""
    return Geometry(Layout(block_bytes, KEY_BYTES, 1), 0, "model").slab_name


def slab_in(directory: Path) -> Path:
    """The only slab of a directory."""
    (slab,) = slabs_in(directory)
    return slab


def slots_in_use(tier: DiskTier) -> list[int]:
    """The slab's slots that blocks have or would get, and the reserve."""
    placement = tier._placement
    return sorted([*placement._place.tolist(), *placement._reserve.tolist()])


class Driver:
    """A tier with a pool of its own, driven one job at a time. Every read that is served is compared.

    Attributes:
        versions: what was last written under each number, and may be read.
        wrong: reads that were served and had other bytes. It stays 0.
    """

    def __init__(self, tier: Any) -> None:
        self.tier, self.block_bytes, self.wrong = tier, tier.block_bytes, 0
        self.versions: dict[int, int] = {}
        self.pool = np.zeros((64, self.block_bytes), np.uint8)

    def wait(self, job: int, timeout_s: float = HANGS_S) -> npt.NDArray[np.bool_]:
        deadline = time.monotonic() + timeout_s
        while True:
            for result in self.tier.finished():
                assert result.job == job
                return result.ok
            assert time.monotonic() < deadline, "the job does not end"
            time.sleep(0.0002)

    def write(self, numbers: Sequence[int], version: int = 0, request: object | None = None) -> list[int]:
        """Store blocks; the numbers of those that are acknowledged."""
        for row, number in enumerate(numbers):
            self.pool[row] = block_of(number, version, self.block_bytes)
        job, taken = self.tier.submit_write(keys_of(numbers), self.pool, np.arange(len(numbers)), request)
        if job == NO_JOB:
            assert not taken.any()
            return []
        chosen = np.asarray(numbers)[taken]
        stored: list[int] = chosen[self.wait(job)].tolist()
        self.versions.update(dict.fromkeys(stored, version))
        return stored

    def read(self, numbers: Sequence[int]) -> list[int]:
        """Load blocks; the numbers of those that were served."""
        self.pool[:] = 0
        job = self.tier.submit_read(keys_of(numbers), self.pool, np.arange(len(numbers)))
        served = np.flatnonzero(self.wait(job)).tolist()
        for row in served:
            right = block_of(numbers[row], self.versions[numbers[row]], self.block_bytes)
            self.wrong += not np.array_equal(self.pool[row], right)
        return [numbers[row] for row in served]

    def here(self, numbers: Sequence[int]) -> list[int]:
        """Those of the blocks that the tier says it has."""
        return [
            number
            for number, found in zip(numbers, self.tier.contains(keys_of(numbers)), strict=True)
            if found
        ]

    def use(self, numbers: Sequence[int]) -> None:
        """A request uses these blocks, in prefix order."""
        self.tier.finish_request(self.tier.begin_request("uses"), keys_of(numbers))


class Disk(Driver):
    """A driven `DiskTier` that holds just so many blocks."""

    tier: DiskTier

    def __init__(self, path: Path, num_slots: int, block_bytes: int = 4096, **options: Any) -> None:
        options = {"fingerprint": "model", "key_bytes": KEY_BYTES, "num_threads": 2, **options}
        super().__init__(DiskTier(path, capacity_for(num_slots, block_bytes), block_bytes, **options))
