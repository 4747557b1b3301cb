"""Fake tiers for tests of code that uses a tier. The test decides when and how each job ends.

Blocks are kept in a dictionary, without policy, capacity or medium.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from kvoffload.structures.keys import Keys
from kvoffload.tiers.contract import NO_JOB, JobResult, Mask, SecondaryTier, SharedTier, TierStats
from kvoffload.transfer import Blocks, Rows


class ScriptMisuseError(BaseException):
    """The code under test broke the contract of a tier. No `except Exception` hides this error."""


@dataclass(eq=False)
class ScriptedJob:
    """A job in flight.

    Attributes:
        pool: memory to read into or to write from; None for a probe.
        void: True if the tier was cleared after the job began. A void write stores nothing. A void read or
            probe does not update the presence cache.
        fail: keys of blocks whose read, write or probe will fail.
        seconds: duration of the job that is reported.
    """

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
        immediate: True to end each job when it is submitted.
        blocks: the bytes under each key.
        jobs: jobs in flight; `end` ends a job.
        durable: blocks that would survive a crash: a copy of `blocks` at the last `drain`.
        takes: False if the tier is busy and accepts no writes.
        read_limit: limit of the blocks that are being read.
        room: capacity of the write queue, in blocks; blocks beyond the capacity are rejected.
        used: the path of each finished request.
        on_call: called at the start of each method with the method's name; may raise, to simulate a failure.
    """

    def __init__(
        self, block_bytes: int, *, name: str = "scripted", identity: int = 0, immediate: bool = False
    ) -> None:
        self.name, self.identity, self.immediate = name, identity, immediate
        self.block_bytes = self.stored_bytes = block_bytes
        self.blocks: dict[bytes, bytes] = {}
        self.durable: dict[bytes, bytes] = {}
        self.jobs: list[ScriptedJob] = []
        self.takes = True
        self.room = self.read_limit = sys.maxsize
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
        return np.array([self.is_present(key) for key in keys], np.bool_)

    def read_room(self, keys: Keys) -> int:
        self.on_call("read_room")
        num_reading = sum(len(job.keys) for job in self.jobs if job.is_read)
        return min(len(keys), max(0, self.read_limit - num_reading))

    def submit_read(self, keys: Keys, pool: Blocks, rows: Rows) -> int:
        self.on_call("submit_read")
        return self._submit(ScriptedJob(self._next, keys, pool, np.asarray(rows, np.int64), is_read=True))

    def submit_write(
        self, keys: Keys, pool: Blocks, rows: Rows, request: object | None = None
    ) -> tuple[int, Mask]:
        self.on_call("submit_write")
        self._check(request)
        rows = np.asarray(rows, np.int64)
        accepted = ~self.contains(keys) & self.takes
        accepted &= np.cumsum(accepted) <= self.queue_room
        if not accepted.any():
            return NO_JOB, accepted
        job = ScriptedJob(self._next, keys.take(accepted), pool, rows[accepted], is_read=False)
        return self._submit(job), accepted

    @property
    def queue_room(self) -> int:
        self.on_call("queue_room")
        return self.room - sum(len(job.keys) for job in self.jobs if not job.is_read and job.pool is not None)

    def end(self, job: ScriptedJob) -> None:
        """Run a job. A failed block is forgotten; a failed read overwrites its destination."""
        self.jobs.remove(job)
        run = self._read if job.is_read else self._write
        ok = np.array([run(job, key, row) for key, row in zip(job.keys, job.rows.tolist(), strict=True)])
        self.finish(job, ok.astype(np.bool_))

    def report(self, result: JobResult) -> None:
        """Report a result as if a job had ended, for tests of impossible results."""
        self._ended.append(result)

    def finished(self) -> list[JobResult]:
        self.on_call("finished")
        ended, self._ended = self._ended, []
        return ended

    def delete(self, keys: Keys) -> int:
        self.on_call("delete")
        return sum(self.blocks.pop(key, None) is not None for key in keys)

    def clear(self) -> None:
        self.on_call("clear")
        self.blocks.clear()
        for job in self.jobs:
            job.void = True

    def drain(self, timeout_s: float) -> bool:
        """Return at once, because only the test ends jobs."""
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

    def is_present(self, key: bytes) -> bool:
        """Return the tier's answer for this key in `contains`."""
        return key in self.blocks

    def _read(self, job: ScriptedJob, key: bytes, row: int) -> bool:
        assert job.pool is not None
        block = None if key in job.fail else self.blocks.get(key)
        job.pool[row] = 0xEE if block is None else np.frombuffer(block, np.uint8)
        if block is None:
            self.blocks.pop(key, None)
        return block is not None

    def _write(self, job: ScriptedJob, key: bytes, row: int) -> bool:
        assert job.pool is not None
        if key in job.fail:
            self.blocks.pop(key, None)
        elif not job.void:
            self.blocks[key] = job.pool[row].tobytes()
        return key not in job.fail

    def finish(self, job: ScriptedJob, ok: Mask, stale: Mask | None = None) -> None:
        """Count the blocks of a read or write that has run, and report its result."""
        count = int(ok.sum())
        if job.is_read:
            self._stats.read += count
        else:
            self._stats.written += count
        self._stats.failed += len(ok) - count
        self._ended.append(JobResult(job.number, ok, job.seconds, stale))

    def _check(self, request: object | None) -> None:
        if request is not None and request not in self.open_requests:
            raise ScriptMisuseError("the request was finished or never begun")

    def _submit(self, job: ScriptedJob) -> int:
        self._next += 1
        self.jobs.append(job)
        if self.immediate:
            self.end(job)
        return job.number


class ScriptedSharedTier(ScriptedTier, SharedTier):
    """A `ScriptedTier` that machines share. `blocks` are the blocks on the server.

    Attributes:
        presence: presence cache of this process; blocks without an entry are `unknown`.
    """

    def __init__(self, block_bytes: int, *, probe_timeout_s: float = 0.05, **options: object) -> None:
        super().__init__(block_bytes, **options)  # type: ignore[arg-type]
        self.probe_timeout_s = probe_timeout_s
        self.presence: dict[bytes, bool] = {}

    def unknown(self, keys: Keys, request: object | None = None) -> Mask:
        self.on_call("unknown")
        return np.array([key not in self.presence for key in keys], np.bool_)

    def submit_probe(self, keys: Keys) -> int:
        self.on_call("submit_probe")
        return self._submit(ScriptedJob(self._next, keys, None, np.zeros(len(keys), np.int64), is_read=False))

    def take_changes(self) -> list[tuple[list[bytes], bool]]:
        self.on_call("take_changes")
        return []

    def delete(self, keys: Keys) -> int:
        for key in keys:
            self.presence.pop(key, None)
        return super().delete(keys)

    def clear(self) -> None:
        self.presence.clear()
        super().clear()

    def end(self, job: ScriptedJob) -> None:
        """End a job as `ScriptedTier.end`; a failed probe reports the block as absent."""
        if job.pool is None:
            self.jobs.remove(job)
            ok = np.array([key in self.blocks and key not in job.fail for key in job.keys], np.bool_)
            self._ended.append(JobResult(job.number, ok, job.seconds))
            self._learn(job, ok)
        else:
            super().end(job)

    def is_present(self, key: bytes) -> bool:
        """Return True if this process knows that the server has the block."""
        return self.presence.get(key, False)

    def finish(self, job: ScriptedJob, ok: Mask, stale: Mask | None = None) -> None:
        """Finish as `ScriptedTier.finish`, mark blocks that a read did not find as stale, and learn."""
        if job.is_read:
            stale = np.array(
                [not sound and key not in job.fail for key, sound in zip(job.keys, ok.tolist(), strict=True)]
            )
        super().finish(job, ok, stale)
        self._learn(job, ok)

    def _learn(self, job: ScriptedJob, ok: Mask) -> None:
        if not job.void:
            self.presence.update(zip(job.keys, ok.tolist(), strict=True))
