"""A disk tier driven one job at a time, with blocks whose bytes are derived from key and version."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvoffload.core.manager import OffloadingManager
from kvoffload.structures.keys import Keys
from kvoffload.testing.audit import audit
from kvoffload.tiers.contract import NO_JOB
from kvoffload.tiers.disk import DiskTier
from kvoffload.tiers.disk.committer import Committer
from kvoffload.tiers.disk.slab import Slab
from kvoffload.tiers.disk.slab_directory import Geometry, slabs_in
from kvoffload.tiers.disk.slab_layout import LOCK_FILE_BYTES, Layout
from support.timeouts import HANGS_S

KEY_BYTES = 12


def keys_of(numbers: Sequence[int]) -> Keys:
    """Make a key for each number."""
    return Keys.pack([b"key%09d" % number for number in numbers], KEY_BYTES)


@functools.lru_cache(maxsize=4096)
def block_of(number: int, version: int, block_bytes: int) -> npt.NDArray[np.uint8]:
    """Make the bytes of a block, different for each number and version."""
    return np.random.default_rng([number, version]).integers(0, 256, block_bytes, np.uint8)


def capacity_for(num_slots: int, block_bytes: int) -> int:
    """Return the capacity of a directory for exactly `num_slots` blocks."""
    return Layout.holding(block_bytes, KEY_BYTES, num_slots).file_bytes + LOCK_FILE_BYTES


def slab_name(block_bytes: int = 4096) -> str:
    """Return the file name of a `Disk`'s slab."""
    return Geometry(Layout(block_bytes, KEY_BYTES, 1), 0, "model").slab_name


def slab_in(directory: Path) -> Path:
    """Return the only slab of a directory."""
    (slab,) = slabs_in(directory)
    return slab


def slots_in_use(tier: DiskTier) -> list[int]:
    """Return the slab's slots that hold or may get blocks, and the reserve, ascending."""
    placement = tier._placement
    return sorted(np.concatenate([placement._place, placement._reserve, placement._beyond]).tolist())


class Driver:
    """A tier with its own pool, driven one job at a time. Compares every served block with its write.

    Attributes:
        versions: version last written under each number.
        wrong: number of served blocks with wrong bytes; must stay 0.
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
            assert time.monotonic() < deadline, "the job did not end"
            time.sleep(0.0002)

    def write(self, numbers: Sequence[int], version: int = 0, request: object | None = None) -> list[int]:
        """Store blocks; returns the numbers of acknowledged blocks."""
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
        """Load blocks; returns the numbers of served blocks."""
        self.pool[:] = 0
        job = self.tier.submit_read(keys_of(numbers), self.pool, np.arange(len(numbers)))
        served = np.flatnonzero(self.wait(job)).tolist()
        for row in served:
            expected = block_of(numbers[row], self.versions[numbers[row]], self.block_bytes)
            self.wrong += not np.array_equal(self.pool[row], expected)
        return [numbers[row] for row in served]

    def here(self, numbers: Sequence[int]) -> list[int]:
        """Return the numbers of blocks that the tier contains."""
        present = self.tier.contains(keys_of(numbers))
        return [number for number, is_here in zip(numbers, present, strict=True) if is_here]

    def use(self, numbers: Sequence[int]) -> None:
        """Use blocks by one request, in prefix order."""
        self.tier.finish_request(self.tier.begin_request("uses"), keys_of(numbers))


class Disk(Driver):
    """A driven `DiskTier` with a capacity of `num_slots` blocks. All access to its internals is here."""

    tier: DiskTier

    def __init__(self, path: Path, num_slots: int, block_bytes: int = 4096, **options: Any) -> None:
        options = {"fingerprint": "model", "key_bytes": KEY_BYTES, "num_threads": 2, **options}
        super().__init__(DiskTier(path, capacity_for(num_slots, block_bytes), block_bytes, **options))

    @property
    def layout(self) -> Layout:
        """Layout of the slab."""
        return self.slab.layout

    @property
    def slab(self) -> Slab:
        """The open slab."""
        return self.tier._slab

    @property
    def manager(self) -> OffloadingManager:
        """The manager, which decides the contents."""
        return self.tier._manager

    @property
    def committer(self) -> Committer:
        """The committer of the journal."""
        return self.tier._committer

    def audit(self) -> None:
        """Check the accounting of the manager."""
        audit(self.manager)

    def slots_in_use(self) -> list[int]:
        """Return the slab's slots that hold or may get blocks, and the reserve, ascending."""
        return slots_in_use(self.tier)

    def kill(self) -> None:
        """End like ``kill -9``: submitted system calls complete, but nothing is closed in order."""
        assert self.tier._pipeline.close(HANGS_S)
        self.slab.close()
        self.tier._lock.release()
