"""A machine that shares blocks, for tests: a tier, and RAM. Blocks have the bytes of their numbers."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from kvoffload.structures.keys import Keys
from kvoffload.testing.fault_proxy import FaultProxy
from kvoffload.tiers.base import NO_JOB, JobResult
from kvoffload.tiers.kinds.valkey import ValkeyOptions
from kvoffload.tiers.memory import MemoryTier
from kvoffload.tiers.options import TierOwner
from valkey_server import PATIENCE_S, Cluster, Server

BLOCK_BYTES, NUM_SLOTS = 24 * 1024, 64
CANARY = 0xEE


def some_keys(*numbers: int) -> Keys:
    return Keys.pack([number.to_bytes(36, "big") for number in numbers], 36)


class Client:
    """A machine: a tier, and RAM."""

    def __init__(
        self,
        place: Server | Cluster | FaultProxy,
        *,
        fingerprint: str = "model",
        namespace: str = "ns",
        **options: Any,
    ) -> None:
        patient = {"timeout": PATIENCE_S, "probe_timeout": PATIENCE_S}
        address = f"valkey://127.0.0.1:{place.port}" if isinstance(place, FaultProxy) else place.url
        described = ValkeyOptions(url=f"{address}/{namespace}", **(patient | options))
        self.tier: Any = described.open(TierOwner(BLOCK_BYTES, 36, fingerprint))
        self.ram = MemoryTier(NUM_SLOTS, BLOCK_BYTES)
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
        job, taken = self.tier.submit_write(some_keys(*numbers), self.pool, np.arange(len(numbers)))
        offered = [number for number, took in zip(numbers, taken, strict=True) if took]
        ok = self.wait(job).ok if job != NO_JOB else []
        return [number for number, is_ok in zip(offered, ok, strict=True) if is_ok]

    def begin_read(self, *numbers: int) -> int:
        self.pool[:] = CANARY
        return self.tier.submit_read(some_keys(*numbers), self.pool, np.arange(len(numbers)))

    def read(self, *numbers: int) -> list[int]:
        """Numbers of the blocks that may be used; each of them has its bytes, whatever happened."""
        return self.check(self.wait(self.begin_read(*numbers)), *numbers)

    def check(self, result: JobResult, *numbers: int) -> list[int]:
        good = [row for row in range(len(numbers)) if result.ok[row]]
        for row in good:
            assert (self.pool[row].view(np.uint16) == numbers[row]).all(), "a wrong block was served"
        assert (self.pool[len(numbers) :] == CANARY).all()
        return [numbers[row] for row in good]

    def probe(self, *numbers: int) -> list[int]:
        job = self.tier.submit_probe(some_keys(*numbers))
        ok = self.wait(job).ok if job != NO_JOB else np.zeros(len(numbers), np.bool_)
        return [number for number, is_there in zip(numbers, ok, strict=True) if is_there]

    def believes(self, *numbers: int) -> list[bool | None]:
        """Of each block: there, not there, or None for what it would have to ask for."""
        keys = some_keys(*numbers)
        present, unknown = self.tier.contains(keys), self.tier.unknown(keys)
        assert not (present & unknown).any()
        return [None if u else bool(p) for p, u in zip(present, unknown, strict=True)]

    def name(self, number: int) -> bytes:
        epoch = self.tier._epoch
        assert epoch is not None
        return epoch.names(some_keys(number))[0]

    def come_to_terms(self, is_open: bool = True) -> None:
        """Wait until the tier is open, or closed."""
        until = time.monotonic() + PATIENCE_S
        while self.tier._is_open() is not is_open:
            assert time.monotonic() < until
            time.sleep(0.001)

    def try_again_now(self) -> None:
        """The pauses of circuit and greetings are over."""
        if self.tier._circuit._next_try is not None:
            self.tier._circuit._next_try = 0.0
        self.tier._greet_at = 0.0
