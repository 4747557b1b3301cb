"""The worker side: runs transfers, computes checksums of stored blocks, and handles failed jobs.

Owns the jobs of one worker. Does not choose blocks, and knows only the digests of keys.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult

from kvoffload.core.slots import SlotArray
from kvoffload.integrations.vllm.shared.logs import logger
from kvoffload.integrations.vllm.shared.pool import SharedPool
from kvoffload.integrations.vllm.worker_side.auditor import Auditor
from kvoffload.integrations.vllm.worker_side.copies import Copies
from kvoffload.integrations.vllm.worker_side.slots_spec import (
    SlotsSpec,
    audited_apart,
    without_torn_groups,
)
from kvoffload.structures.jit import compile_all
from kvoffload.tiers.rate_limited_log import RateLimitedLog


@dataclass
class _Job:
    slots: SlotsSpec
    is_store: bool
    torn: SlotArray = field(default_factory=lambda: np.empty(0, np.int32))
    copied: bool = False
    sealing: Future[TransferResult] | None = None
    auditing: Future[None] | None = None
    audited: SlotArray = field(default_factory=lambda: np.empty(0, np.int32))
    forget_findings: bool = False
    result: TransferResult | None = None


class KVOffloadWorker(OffloadingWorker):
    """Transfers between this worker's tensors and its part of the pool.

    vLLM's connector stops the engine if a worker reports a failed job. So the worker marks the slots of a
    failed job in the pool, and reports the job as successful. The scheduler then forgets the blocks of marked
    slots. `take_failed_loads` returns failed loads, so that vLLM computes their requests again (`patches`).

    Args:
        blocks_per_chunk: engine blocks in a slot.
        seal: True to compute checksums of stored blocks.
        auditor: compares the blocks that a store marks as audited; None if no audit is configured.

    Attributes:
        copies: the copies between engine and pool.
        failures_are_named: True if vLLM calls `take_failed_loads`. If False, failed loads become failed jobs.
        fences_come_late: True if the engine may overwrite blocks before it calls `wait` for the stores that
            read these blocks (`versions.fences_come_late`). Such stores are dropped.
        num_failed: number of failed jobs.
        num_overwritten: number of stores dropped because of a late fence.
    """

    def __init__(
        self,
        pool: SharedPool,
        part: int,
        copies: Copies,
        *,
        blocks_per_chunk: int,
        seal: bool,
        auditor: Auditor | None = None,
    ) -> None:
        self._pool, self._part, self.copies = pool, part, copies
        self._blocks_per_chunk, self._auditor = blocks_per_chunk, auditor
        self._sealer = ThreadPoolExecutor(1, thread_name_prefix="kvoffload-seal") if seal else None
        self._jobs: dict[int, _Job] = {}
        self._failed_loads: set[int] = set()
        self.failures_are_named = False
        self.fences_come_late = False
        self.num_failed = self.num_overwritten = 0
        self._log = RateLimitedLog(logger.name)
        if seal:
            compile_all()

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: SlotsSpec) -> bool:
        """Begin a store; returns True.

        Skips incomplete chunks, and compares audited blocks instead of storing them.
        """
        try:
            blocks, slots, torn = without_torn_groups(src_spec, dst_spec, self._blocks_per_chunk)
            (blocks, slots), audited = audited_apart(blocks, slots, self._blocks_per_chunk)
        except Exception as error:
            self._jobs[job_id] = job = _Job(dst_spec, True)
            self._fail(job_id, job, error)
            return True
        job = _Job(slots, True, torn)
        if audited is not None and self._auditor is not None:
            try:
                job.audited = audited[1].block_ids
                job.auditing = self._auditor.submit(audited[0], job.audited)
            except Exception as error:
                self._log.error("audit", "kvoffload: an audit failed: %s: %s", type(error).__name__, error)
        if (len(torn) or audited is not None) and not len(slots.block_ids):
            self._jobs[job_id] = job
            job.copied = True
            self._end(job, TransferResult(job_id, True, 0, 0.0))
        else:
            self._submit(job_id, job, blocks, self.copies.store)
        return True

    def submit_load(self, job_id: int, src_spec: SlotsSpec, dst_spec: Any, expedited: bool = False) -> bool:
        """Begin a load; returns True."""
        self._submit(job_id, _Job(src_spec, False), dst_spec, self.copies.load)
        return True

    def get_finished(self) -> list[TransferResult]:
        """Return the jobs that have ended since the last call. Failed blocks are marked in the pool."""
        self._collect()
        done = [
            (job_id, job.result)
            for job_id, job in self._jobs.items()
            if job.result is not None and (job.auditing is None or job.auditing.done())
        ]
        for job_id, _ in done:
            self._end_audit(self._jobs[job_id])
            del self._jobs[job_id]
        return [result for _, result in done]

    def wait(self, job_ids: set[int]) -> None:
        """Wait until these jobs have ended. Their blocks and slots may then be reused.

        If waiting fails, the jobs that have not ended count as failed. With `fences_come_late`, stores that
        were being copied when this method was called are dropped.
        """
        known = {job_id for job_id in job_ids if job_id in self._jobs}
        for job_id in known:
            self._wait_for_audit(self._jobs[job_id])
        copying = [job_id for job_id in sorted(known) if not self._jobs[job_id].copied]
        cause: Exception = OSError("the copy has not ended")
        try:
            self.copies.wait(known)
        except Exception as error:
            logger.exception("kvoffload: waiting for transfers failed")
            cause = error
        self._collect(wait_for=known)
        for job_id in copying:
            job = self._jobs[job_id]
            if not job.copied:
                self._fail(job_id, job, cause)
            elif self.fences_come_late and job.is_store:
                self._drop(job)

    def _wait_for_audit(self, job: _Job) -> None:
        """Wait for the audit. If fences come late, discard the findings, because blocks may have changed."""
        if job.auditing is not None and not job.auditing.done():
            job.auditing.exception()
            if self.fences_come_late:
                job.forget_findings = True

    def _end_audit(self, job: _Job) -> None:
        if job.auditing is None:
            return
        if (error := job.auditing.exception()) is not None:
            self._log.error("audit", "kvoffload: an audit failed: %s: %s", type(error).__name__, error)
        elif job.forget_findings:
            self._pool.findings[self._part, job.audited] = np.zeros((), self._pool.findings.dtype)

    def take_failed_loads(self) -> set[int]:
        """Return the loads that have failed since the last call. `get_finished` reports these loads, too."""
        failed, self._failed_loads = self._failed_loads, set()
        return failed

    def running(self) -> set[int]:
        """Return the jobs that `get_finished` has not reported."""
        return set(self._jobs)

    def shutdown(self) -> None:
        """Wait for the jobs in flight and close the pool, even if the copies cannot be closed."""
        try:
            self.copies.close()
        finally:
            if self._sealer is not None:
                self._sealer.shutdown()
            if self._auditor is not None:
                self._auditor.close()
            self._pool.close()

    def _submit(
        self, job_id: int, job: _Job, engine: Any, begin: Callable[[int, Any, SlotsSpec], None]
    ) -> None:
        self._jobs[job_id] = job
        try:
            begin(job_id, engine, job.slots)
        except Exception as error:
            self._fail(job_id, job, error)

    def _collect(self, wait_for: set[int] | frozenset[int] = frozenset()) -> None:
        for copied in self.copies.finished():
            job = self._jobs.get(copied.job)
            if job is None or job.copied:
                continue  # `wait` has failed the job
            job.copied = True
            if copied.error is not None:
                self._fail(copied.job, job, copied.error)
                continue
            result = TransferResult(copied.job, True, copied.num_bytes, copied.seconds)
            if self._sealer is not None and job.is_store:
                job.sealing = self._sealer.submit(self._seal, job.slots, result)
            else:
                self._end(job, result)
        for job_id, job in self._jobs.items():
            if job.sealing is not None and job.result is None and (job_id in wait_for or job.sealing.done()):
                error = job.sealing.exception()
                if error is not None:
                    self._fail(job_id, job, error)
                else:
                    self._end(job, job.sealing.result())

    def _end(self, job: _Job, result: TransferResult) -> None:
        if job.is_store:
            self._pool.fail(self._part, job.torn)
        job.result = result

    def _drop(self, job: _Job) -> None:
        """Make the scheduler discard a store's blocks, which may have changed while they were copied."""
        self.num_overwritten += 1
        self._pool.fail(self._part, job.slots.block_ids)

    def _fail(self, job_id: int, job: _Job, error: BaseException) -> None:
        self.num_failed += 1
        job.copied = True
        kind, count = "store" if job.is_store else "load", len(job.slots.block_ids)
        text = "kvoffload: a %s of %d blocks failed; the blocks are computed again: %s: %s"
        self._log.error(kind, text, kind, count, type(error).__name__, error)
        slots = job.slots.block_ids
        self._pool.fail(self._part, slots[slots >= 0])
        self._pool.fail(self._part, job.torn)
        if not job.is_store:
            self._failed_loads.add(job_id)
        job.result = TransferResult(job_id, job.is_store or self.failures_are_named)

    def _seal(self, slots: SlotsSpec, result: TransferResult) -> TransferResult:
        start = time.perf_counter()
        assert slots.digests is not None
        self._pool.seal(self._part, slots.block_ids, slots.digests)
        result.transfer_time += time.perf_counter() - start
        return result
