"""A tier without bytes, for replays without data, sweeps and plans.

Decides with the same manager, eviction policies and admission rules as a disk tier. Jobs end at once.
"""

from __future__ import annotations

import sys

import numpy as np

from kvoffload.core.admission import Admission
from kvoffload.core.manager import OffloadingManager
from kvoffload.core.plans import StorePlan
from kvoffload.core.policy import EvictionPolicy
from kvoffload.core.request import RequestContext
from kvoffload.core.slots import SlotArray
from kvoffload.structures.keys import Keys
from kvoffload.tiers.contract import NO_JOB, JobResult, Mask, TierStats
from kvoffload.tiers.offer import ManagedTier, Purse
from kvoffload.tiers.write_budget import WriteBudget
from kvoffload.transfer import Blocks, Rows


class SimulatedTier(ManagedTier):
    """A tier that records which blocks it has, and stores no bytes.

    Args:
        capacity_blocks, policy, admission, key_bytes: arguments of `OffloadingManager`.
        block_bytes: bytes of a block in RAM, for the byte counters of `TierStats`.
        identity: see `SecondaryTier`.
        write_budget: limit of the writes in a day. It counts blocks instead of bytes.
    """

    name = "simulated"

    def __init__(
        self,
        capacity_blocks: int,
        *,
        key_bytes: int,
        block_bytes: int = 0,
        identity: int = 0,
        policy: str | type[EvictionPolicy] = "lru",
        admission: str | Admission = "all",
        write_budget: WriteBudget | None = None,
    ) -> None:
        self.identity = identity
        self.block_bytes = self.stored_bytes = block_bytes
        super().__init__(
            OffloadingManager(capacity_blocks, key_bytes=key_bytes, policy=policy, admission=admission)
        )
        if write_budget is not None:
            self._purse = Purse(write_budget, self._manager, 1, {})
        self._ended: list[JobResult] = []
        self._next_job = 0

    def begin_request(self, request_id: str) -> RequestContext:
        return self._manager.begin_request(request_id)

    def finish_request(self, request: object, path: Keys) -> None:
        assert isinstance(request, RequestContext)
        # Lookups begin with the blocks that RAM lacks, so their order is not the prefix order.
        self._manager.finish_request(request, path)

    def contains(self, keys: Keys, request: object | None = None) -> Mask:
        assert request is None or isinstance(request, RequestContext)
        return self._manager.contains(keys, request)

    def submit_read(self, keys: Keys, pool: Blocks, rows: Rows) -> int:
        ok = self._manager.contains(keys)
        self._counts.read += int(np.count_nonzero(ok))
        return self._end(ok)

    def submit_write(
        self, keys: Keys, pool: Blocks, rows: Rows, request: object | None = None
    ) -> tuple[int, Mask]:
        assert request is None or isinstance(request, RequestContext)
        accepted = np.zeros(len(keys), np.bool_)
        plan, at = self._prepare_offer(keys, request, None)
        if plan is None:
            return NO_JOB, accepted
        accepted[at] = True
        return self.begin_write(plan), accepted

    @property
    def queue_room(self) -> int:
        return sys.maxsize

    def finished(self) -> list[JobResult]:
        ended, self._ended = self._ended, []
        return ended

    def delete(self, keys: Keys) -> int:
        return self._manager.discard(keys)

    def clear(self) -> None:
        self._manager.reset()

    def drain(self, timeout_s: float) -> bool:
        return True

    def stats(self) -> TierStats:
        self._counts.written = self._manager.stats().stored
        return super().stats()

    def close(self) -> None:
        pass

    def begin_write(self, plan: StorePlan) -> int:
        """Record accepted blocks as written; return the number of the job, which has already ended."""
        self._manager.complete_store(plan)
        return self._end(np.ones(len(plan), np.bool_))

    def _end(self, ok: Mask) -> int:
        self._next_job += 1
        self._ended.append(JobResult(self._next_job, ok, 0.0))
        return self._next_job


class NoMemory:
    """The RAM of a replay without data: it has slots, but no bytes."""

    def __init__(self, num_slots: int) -> None:
        self.pool: Blocks = np.empty((num_slots, 0), np.uint8)

    def seal(self, keys: Keys, slots: SlotArray) -> None:
        pass

    def verify_slots(self, keys: Keys, slots: SlotArray) -> Mask:
        return np.ones(len(keys), np.bool_)
