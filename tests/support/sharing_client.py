"""A machine that shares blocks, for tests: a tier, and RAM. A block repeats its number."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np

from kvoffload.structures.keys import Keys
from kvoffload.tiers.contract import NO_JOB, JobResult
from kvoffload.tiers.memory import MemoryTier
from support.pauses import end_pauses
from support.valkey_server import PATIENCE_S

NUM_SLOTS = 64
CANARY = 0xEE
"""Byte in all rows before a read."""


def some_keys(*numbers: int) -> Keys:
    return Keys.pack([number.to_bytes(36, "big") for number in numbers], 36)


class SharingClient(ABC):
    """A machine: a tier, RAM, and the tier's record of the only request, if the tier has records."""

    record: object | None = None

    def __init__(self, tier: Any, block_bytes: int, record: object | None = None) -> None:
        self.tier, self.record = tier, record
        self.ram = MemoryTier(NUM_SLOTS, block_bytes)
        self.pool = self.ram.pool

    # ---- names on the server

    @abstractmethod
    def names(self, number: int) -> list[Any]:
        """Return the names of the values of a block, in the epoch that the tier knows."""

    @abstractmethod
    def epoch_key(self, number: int) -> Any:
        """Return the name of the epoch of a block."""

    # ---- jobs

    def wait(self, job: int) -> JobResult:
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            for result in self.tier.finished():
                assert result.job == job
                return result
            time.sleep(0.0005)
        raise AssertionError("the job does not end")

    def write(self, *numbers: int) -> list[int]:
        """Write blocks; returns the blocks that were written or already present."""
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
        """Read blocks, and check their bytes; returns the served blocks."""
        return self.check(self.wait(self.begin_read(*numbers)), *numbers)

    def check(self, result: JobResult, *numbers: int) -> list[int]:
        """Check the bytes of the served blocks, and the other rows; returns the served blocks."""
        served = [row for row in range(len(numbers)) if result.ok[row]]
        for row in served:
            assert (self.pool[row].view(np.uint16) == numbers[row]).all(), "a wrong block was served"
        assert (self.pool[len(numbers) :] == CANARY).all()
        return [numbers[row] for row in served]

    def probe(self, *numbers: int) -> list[int]:
        job = self.tier.submit_probe(some_keys(*numbers))
        ok = self.wait(job).ok if job != NO_JOB else np.zeros(len(numbers), np.bool_)
        return [number for number, is_there in zip(numbers, ok, strict=True) if is_there]

    # ---- state of the tier

    @property
    def parts(self) -> list[Any]:
        """The tier, or the tiers of all nodes of a cluster."""
        return [self.tier]

    def changes(self) -> list[tuple[set[int], bool]]:
        """Return the reported changes: numbers of blocks, and True if they are gone.

        Successive changes of one kind are merged, because each node of a cluster reports its own.
        """
        merged: list[tuple[set[int], bool]] = []
        for keys, are_gone in self.tier.take_changes():
            numbers = {int.from_bytes(key, "big") for key in keys}
            if merged and merged[-1][1] == are_gone:
                assert not merged[-1][0] & numbers, "a change was reported twice"
                merged[-1][0].update(numbers)
            else:
                merged.append((numbers, are_gone))
        return merged

    def presence(self, *numbers: int) -> list[bool | None]:
        """Return the cached presence of each block: True, False, or None if a probe is needed."""
        keys = some_keys(*numbers)
        present, unknown = self.tier.contains(keys), self.tier.unknown(keys)
        assert not (present & unknown).any()
        return [None if u else bool(p) for p, u in zip(present, unknown, strict=True)]

    def forget(self, *numbers: int) -> None:
        """Remove these blocks from the presence cache, or all blocks if none are named."""
        for node in self.parts:
            node.presence.forget(some_keys(*numbers).digests) if numbers else node.presence.clear()

    def assume_present(self, *numbers: int) -> None:
        """Enter blocks into the presence cache."""
        for node in self.parts:
            node.presence.learn(some_keys(*numbers).digests, np.ones(len(numbers), np.bool_))

    def limit_in_flight(self, num_blocks: int) -> None:
        """Set the number of blocks that may be in flight, in each direction and at each server."""
        for node in self.parts:
            node.jobs.in_flight_bytes = num_blocks * node.block_bytes

    def is_open(self) -> bool:
        """Return True if the circuit breaker of any server is closed."""
        return any(node.is_open() for node in self.parts)

    def is_well(self) -> bool:
        """Return True if every server answers reads."""
        are_open = [node.is_open("read") for node in self.parts]  # no short cut: every node has to reconnect
        return all(are_open)

    def wait_until_open(self) -> None:
        """Wait until every server answers reads, with all pauses of the circuit breakers."""
        until = time.monotonic() + PATIENCE_S
        while not self.is_well():
            assert time.monotonic() < until
            time.sleep(0.001)

    def reconnect(self) -> None:
        """Wait until every server answers reads, without the pauses of the circuit breakers."""
        until = time.monotonic() + PATIENCE_S
        while not self.is_well():
            end_pauses(self.tier)
            assert time.monotonic() < until
            time.sleep(0.001)

    def reset(self) -> None:
        """Reset the shared cache, and wait until the servers have confirmed the reset."""
        self.tier.clear()
        assert self.tier.drain(PATIENCE_S)


C = TypeVar("C", bound=SharingClient)


def closed_at_the_end(client_type: Callable[..., C]) -> Iterator[Callable[..., C]]:
    """Yield a function that makes clients, and close their tiers afterwards. For fixtures."""
    clients: list[C] = []

    def make(*server: Any, **options: Any) -> C:
        clients.append(client_type(*server, **options))
        return clients[-1]

    yield make
    for client in clients:
        client.tier.close()
