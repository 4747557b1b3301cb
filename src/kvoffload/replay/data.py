"""Data plane of a replay: moves real bytes between a device and the RAM tier, and verifies every byte.

Owns the memory that stands for the device, the RAM tier and the injection of damage. The contents of blocks
are computed from their keys (`replay.content`), so that every wrong byte is detected, even if the tier's
checksums do not detect it.
"""

from __future__ import annotations

import time

import numpy as np
import numpy.typing as npt

from kvoffload.core.plans import LoadPlan, StorePlan
from kvoffload.replay import content
from kvoffload.replay.faults import Injection
from kvoffload.structures.keys import Keys
from kvoffload.tiers.memory import MemoryTier

_DEVICE_BYTES = 32 << 20
"""Size, in bytes, of the memory that stands for the device. Larger plans are processed in pieces."""


class DataPlane:
    """Executes the manager's load and store plans on a `MemoryTier` of `num_slots` blocks.

    Attributes:
        ram: the RAM tier.
        cpu_s: CPU time spent in transfers and checks.
        blocks_verified: number of blocks whose checksum the tier has verified at a read.
        mismatches_served: number of blocks with wrong bytes that the tier returned as intact; should be 0.
    """

    def __init__(self, num_slots: int, block_bytes: int, injection: Injection | None = None) -> None:
        self.ram = MemoryTier(num_slots, block_bytes, verify=True)
        self._rows = max(1, _DEVICE_BYTES // block_bytes)
        self._device = np.empty((self._rows, block_bytes), np.uint8)
        self._injection = injection
        self.block_bytes = block_bytes
        self.cpu_s = 0.0
        self.bytes_stored = self.bytes_loaded = 0
        self.blocks_verified = self.mismatches_served = 0

    @property
    def damage_injected(self) -> int:
        """Number of blocks damaged on purpose so far."""
        return self._injection.injected if self._injection else 0

    def load(self, plan: LoadPlan) -> npt.NDArray[np.bool_]:
        """Copy a plan's blocks to the device and compare their bytes with the expected contents.

        Returns a mask that is True for each block whose checksum the tier found correct.
        """
        start = time.thread_time()
        sound = np.empty(len(plan.slots), np.bool_)
        for piece, rows in self._pieces(len(plan.slots)):
            keys = plan.keys[piece]
            # Zeroed, so that a block which is not copied cannot pass the check with bytes of an earlier read.
            self._device[rows] = 0
            sound[piece] = self.ram.read(keys, plan.slots[piece], self._device, rows)
            equal = content.matches(keys, self._device, rows)
            self.mismatches_served += int((sound[piece] & ~equal).sum())
        self.blocks_verified += len(sound)
        self.bytes_loaded += int(sound.sum()) * self.block_bytes
        self.cpu_s += time.thread_time() - start
        return sound

    def store(self, plan: StorePlan) -> None:
        """Write the contents of a plan's blocks to the device memory, then copy the blocks to the tier."""
        start = time.thread_time()
        for piece, rows in self._pieces(len(plan.slots)):
            keys: Keys = plan.keys[piece]
            content.fill(keys, self._device, rows)
            self.ram.write(keys, plan.slots[piece], self._device, rows)
        if self._injection is not None:
            self._injection.apply(self.ram, plan.slots)
        self.bytes_stored += len(plan.slots) * self.block_bytes
        self.cpu_s += time.thread_time() - start

    def close(self) -> None:
        self.ram.close()

    def _pieces(self, count: int) -> list[tuple[slice, npt.NDArray[np.int64]]]:
        starts = range(0, count, self._rows)
        return [
            (slice(start, min(start + self._rows, count)), np.arange(min(self._rows, count - start)))
            for start in starts
        ]
