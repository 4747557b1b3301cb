"""A machine that shares blocks, for tests: a tier, and RAM. Blocks have the bytes of their numbers."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from kvoffload.structures.keys import Keys
from kvoffload.tiers.contract import NO_JOB, JobResult
from kvoffload.tiers.memory import MemoryTier
from support.valkey_server import PATIENCE_S

NUM_SLOTS = 64
CANARY = 0xEE


def some_keys(*numbers: int) -> Keys:
    return Keys.pack([number.to_bytes(36, "big") for number in numbers], 36)


class SharingClient(ABC):
    """A machine: a tier, RAM, and the tier's record of its one request, if it has one."""

    record: object | None = None

    def __init__(self, tier: Any, block_bytes: int, record: object | None = None) -> None:
        self.tier, self.record = tier, record
        self.ram = MemoryTier(NUM_SLOTS, block_bytes)
        self.pool = self.ram.pool

    def wait(self, job: int) -> JobResult:
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            for result in self.tier.finished():
                assert result.job == job
                return result
            time.sleep(0.0005)
        raise AssertionError("the job does not end")

    def write(self, *numbers: int) -> list[int]:
        """Numbers of the blocks that are there now."""
        for row, number in enumerate(numbers):
            self.pool[row].view(np.uint16)[:] = number
        keys, rows = some_keys(*numbers), np.arange(len(numbers))
        job, taken = self.tier.submit_write(keys, self.pool, rows, self.record)
        offered = [number for number, took in zip(numbers, taken, strict=True) if took]
        ok = self.wait(job).ok if job != NO_JOB else []
        return [number for number, is_ok in zip(offered, ok, strict=True) if is_ok]

    def begin_read(self, *numbers: int) -> int:
        self.pool[:] = CANARY
        return self.tier.submit_read(some_keys(*numbers), self.pool, np.arange(len(numbers)))

    def read(self, *numbers: int) -> list[int]:
        """Numbers of the blocks that may be used; each of them has its bytes, whatever happened."""
        return self.check(self.wait(self.begin_read(*numbers)), *numbers)

    @abstractmethod
    def check(self, result: JobResult, *numbers: int) -> list[int]:
        """Numbers of the blocks that may be used; each of them has its bytes."""

    def probe(self, *numbers: int) -> list[int]:
        job = self.tier.submit_probe(some_keys(*numbers))
        ok = self.wait(job).ok if job != NO_JOB else np.zeros(len(numbers), np.bool_)
        return [number for number, is_there in zip(numbers, ok, strict=True) if is_there]

    def changes(self) -> list[tuple[set[int], bool]]:
        """Numbers of the blocks that the tier has told of, and whether they are gone."""
        told = self.tier.take_changes()
        return [({int.from_bytes(key, "big") for key in keys}, removed) for keys, removed in told]

    def believes(self, *numbers: int) -> list[bool | None]:
        """Of each block: there, not there, or None for what it would have to ask for."""
        keys = some_keys(*numbers)
        present, unknown = self.tier.contains(keys), self.tier.unknown(keys)
        assert not (present & unknown).any()
        return [None if u else bool(p) for p, u in zip(present, unknown, strict=True)]
