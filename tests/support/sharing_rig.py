"""Whole machines that share a tier: a manager with RAM and the shared tier."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from kvoffload.core.plans import LookupResult
from kvoffload.core.request import RequestContext
from kvoffload.testing.audit import audit
from kvoffload.tiering.tiered_manager import TieredManager
from kvoffload.tiers.memory import MemoryTier
from kvoffload.tiers.spec import TierOptions, TierOwner
from support.valkey_server import PATIENCE_S

BLOCK_BYTES, CAPACITY = 4096, 32


HIT, MISS, RETRY = LookupResult.HIT, LookupResult.MISS, LookupResult.RETRY


def some_keys(*numbers: int) -> list[bytes]:
    return [number.to_bytes(36, "big") for number in numbers]


class Machine:
    """A manager with RAM and a shared tier, and an engine. The bytes of a block repeat its number."""

    def __init__(self, described: TierOptions, **options: Any) -> None:
        self.described = described
        self.tier: Any = described.open(TierOwner(BLOCK_BYTES, 36, "model"))
        self.ram = MemoryTier(CAPACITY, BLOCK_BYTES)
        self.manager = TieredManager(
            CAPACITY,
            key_bytes=36,
            ram=self.ram,
            tiers=[self.tier],
            deadline_s=PATIENCE_S,
            max_in_flight=1.0,
            **options,
        )

    def serve(self, *numbers: int) -> int:
        """Serve a request: load hits, compute and store the other blocks; returns the number of hits."""
        ctx = self.manager.begin_request("r", some_keys(*numbers))
        num_ready = self.look_up(ctx, *numbers)
        plan = self.manager.prepare_load(some_keys(*numbers[:num_ready]), ctx)
        for number, slot in zip(numbers, plan.slots.tolist(), strict=False):
            assert (self.ram.pool[slot].view(np.uint16) == number).all(), "a wrong block was served"
        self.manager.complete_load(plan)
        stored = self.manager.prepare_store(some_keys(*numbers[num_ready:]), ctx)
        if stored is not None:
            for key, slot in zip(stored.keys, stored.slots.tolist(), strict=True):
                self.ram.pool[slot].view(np.uint16)[:] = int.from_bytes(key, "big")
            self.ram.seal(stored.keys, stored.slots)
            self.manager.complete_store(stored)
        self.manager.finish_request(ctx)
        audit(self.manager)
        return num_ready

    def look_up(self, ctx: RequestContext, *numbers: int) -> int:
        until = time.monotonic() + PATIENCE_S
        while True:
            result = self.manager.lookup(some_keys(*numbers), ctx)
            if result.stopped_by is not RETRY:
                return result.num_ready
            assert time.monotonic() < until
            self.manager.poll()
            time.sleep(0.0005)

    def rest(self) -> None:
        assert self.manager.settle(PATIENCE_S)
