"""A tier whose jobs end when and how a test decides: for tests of the code in front of a tier.

Keeps blocks in a dictionary: no policy, no capacity, no medium.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from kvoffload.structures.keys import Keys
from kvoffload.tiers.contract import NO_JOB, JobResult, Mask, SecondaryTier, TierStats
from kvoffload.transfer import Blocks, Rows


class ScriptMisuseError(BaseException):
    """The code under test broke the contract of a tier. No `except Exception` hides it from the test."""


@dataclass(eq=False)
class ScriptedJob:
    """One job; `fail` has the keys that will fail. A probe has no pool."""

    number: int
    keys: Keys
    pool: Blocks | None
    rows: npt.NDArray[np.int64]
    is_read: bool
    void: bool = False
    fail: set[bytes] = field(default_factory=set)
    seconds: float = 0.0


class ScriptedTier(SecondaryTier):
    """A tier of unlimited size.

    Attributes:
        blocks: the bytes under each key.
        jobs: jobs that have not ended; `end` ends one. With `immediate` they end when they are submitted.
        durable: the blocks that would survive a crash: those at the end of the last `drain`.
        takes: whether writes are accepted; False for a busy tier.
        room: blocks that it queues for writing; of more it drops the rest.
        used: the path that each finished request used.
        believed: of a shared tier, what this process believes of a block; it must ask for the others. What
            `blocks` has is what others see.
        on_call: called with the name of each method that is called, first; may raise, as a tier in trouble.
    """

    def __init__(
        self,
        block_bytes: int,
        *,
        name: str = "scripted",
        identity: int = 0,
        immediate: bool = False,
        shared: bool = False,
        probe_timeout_s: float = 0.05,
    ) -> None:
        self.name, self.identity, self.immediate = name, identity, immediate
        self.shared, self.probe_timeout_s = shared, probe_timeout_s if shared else 0.0
        self.believed: dict[bytes, bool] = {}
        self.block_bytes = self.stored_bytes = block_bytes
        self.written_before = {}
        self.blocks: dict[bytes, bytes] = {}
        self.durable: dict[bytes, bytes] = {}
        self.jobs: list[ScriptedJob] = []
        self.takes = True
        self.room = sys.maxsize
        self.used: list[list[bytes]] = []
        self.open_requests: list[object] = []
        self.on_call: Callable[[str], None] = lambda method: None
        self.closed = False
        self._ended: list[JobResult] = []
        self._next = 0
        self._stats = TierStats()

    def begin_request(self, request_id: str) -> object:
        self.on_call("begin_request")
        request = [request_id]
        self.open_requests.append(request)
        return request

    def finish_request(self, request: object, path: Keys) -> None:
        self.on_call("finish_request")
        self._check(request)
        self.open_requests.remove(request)
        self.used.append(list(path))

    def contains(self, keys: Keys, request: object | None = None) -> Mask:
        self.on_call("contains")
        self._check(request)
        known = self.believed if self.shared else self.blocks
        return np.array([bool(known.get(key)) for key in keys], np.bool_)

    def unknown(self, keys: Keys, request: object | None = None) -> Mask:
        self.on_call("unknown")
        return np.array([self.shared and key not in self.believed for key in keys], np.bool_)

    def submit_probe(self, keys: Keys) -> int:
        self.on_call("submit_probe")
        return self._submit(ScriptedJob(self._next, keys, None, np.zeros(len(keys), np.int64), is_read=False))

    def submit_read(self, keys: Keys, pool: Blocks, rows: Rows) -> int:
        self.on_call("submit_read")
        return self._submit(ScriptedJob(self._next, keys, pool, np.asarray(rows, np.int64), is_read=True))

    def submit_write(
        self, keys: Keys, pool: Blocks, rows: Rows, request: object | None = None
    ) -> tuple[int, Mask]:
        self.on_call("submit_write")
        self._check(request)
        rows = np.asarray(rows, np.int64)
        taken = ~self.contains(keys) & self.takes
        taken &= np.cumsum(taken) <= self.queue_room
        if not taken.any():
            return NO_JOB, taken
        return self._submit(
            ScriptedJob(self._next, keys.take(taken), pool, rows[taken], is_read=False)
        ), taken

    @property
    def queue_room(self) -> int:
        """How many more blocks it queues for writing."""
        self.on_call("queue_room")
        return self.room - sum(len(job.keys) for job in self.jobs if not job.is_read and job.pool is not None)

    def end(self, job: ScriptedJob) -> None:
        """Run a job. A block that fails is forgotten, and its destination is filled with noise. A probe that
        fails says that the block is not there."""
        self.jobs.remove(job)
        ok = np.zeros(len(job.keys), np.bool_)
        if job.pool is None:
            ok[:] = [key in self.blocks and key not in job.fail for key in job.keys]
            if not job.void:
                self.believed.update(zip(job.keys, ok.tolist(), strict=True))
            self._ended.append(JobResult(job.number, ok, job.seconds))
            return
        stale = None
        if job.is_read and self.shared:
            stale = np.array([key not in self.blocks and key not in job.fail for key in job.keys], np.bool_)
        for i, (key, row) in enumerate(zip(job.keys, job.rows.tolist(), strict=True)):
            if job.is_read:
                block = self.blocks.get(key)
                ok[i] = block is not None and key not in job.fail
                job.pool[row] = np.frombuffer(block, np.uint8) if block is not None and ok[i] else 0xEE
            else:
                ok[i] = key not in job.fail
                if ok[i] and not job.void:
                    self.blocks[key] = job.pool[row].tobytes()
            if not ok[i]:
                self.blocks.pop(key, None)
            if not job.void:
                self.believed[key] = bool(ok[i])
        count = int(ok.sum())
        if job.is_read:
            self._stats.read += count
        else:
            self._stats.written += count
        self._stats.failed += len(ok) - count
        self._ended.append(JobResult(job.number, ok, job.seconds, stale))

    def finished(self) -> list[JobResult]:
        self.on_call("finished")
        ended, self._ended = self._ended, []
        return ended

    def delete(self, keys: Keys) -> int:
        self.on_call("delete")
        for key in keys:
            self.believed.pop(key, None)
        return sum(self.blocks.pop(key, None) is not None for key in keys)

    def clear(self) -> None:
        self.on_call("clear")
        self.blocks.clear()
        self.believed.clear()
        for job in self.jobs:
            job.void = True

    def drain(self, timeout_s: float) -> bool:
        """Return at once: only the test ends jobs."""
        self.on_call("drain")
        if self.jobs:
            return False
        self.durable = dict(self.blocks)
        return True

    def stats(self) -> TierStats:
        self.on_call("stats")
        return replace(self._stats, ready=len(self.blocks))

    def close(self) -> None:
        self.on_call("close")
        self.closed = True

    def _check(self, request: object | None) -> None:
        if request is not None and request not in self.open_requests:
            raise ScriptMisuseError("a request that was finished, or never begun")

    def _submit(self, job: ScriptedJob) -> int:
        self._next += 1
        self.jobs.append(job)
        if self.immediate:
            self.end(job)
        return job.number
