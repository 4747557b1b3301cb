"""Our disk behind vLLM's own RAM tier, for users who want only that.

    "secondary_tiers": [{"type": "KVOffloadDisk", "module_path": "kvoffload.integrations.vllm.secondary",
                         "path": "/nvme/kv", "capacity": "1TiB"}]

Owns the translation of vLLM's jobs, requests and view of RAM. No error of ours reaches the engine.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
from vllm import __version__ as vllm_version
from vllm.v1.kv_offload.base import LookupResult, Medium, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from kvoffload.integrations.vllm.containment import contained
from kvoffload.integrations.vllm.logs import join_vllm, logger
from kvoffload.integrations.vllm.lookups import path_of
from kvoffload.integrations.vllm.manager import USUAL_KEY_BYTES
from kvoffload.integrations.vllm.tiers import say_what_a_reset_misses, tier_owner
from kvoffload.integrations.vllm.versions import SINCE_SECONDARY, check_version, engine_facts
from kvoffload.structures.keys import Keys
from kvoffload.tiers.base import NO_JOB, SecondaryTier
from kvoffload.tiers.options import open_tiers, parse_tiers

_DRAIN_TIMEOUT_S = 30.0


class KVOffloadDisk(SecondaryTierManager):
    """A `DiskTier` as vLLM's tiering manager calls it: bounded, verified at every read, warm after a restart.

    A block is HIT if its entry is here. Its bytes are verified when it is read; if some are damaged, vLLM
    gets the keys of the blocks that arrived, and computes the others.

    Takes the options of a tier of `KVOffloadSpec`: path, capacity, policy, admission,
    max_write_bytes_per_day, salt. Raises `ConfigError` when the engine starts. Thread: the scheduler's.

    Attributes:
        broken: an error of ours was contained, or the disk could not be opened: it is not used any more.
    """

    medium = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **options: Any,
    ) -> None:
        check_version(vllm_version, SINCE_SECONDARY, "KVOffloadDisk")
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        join_vllm()
        options.pop("locality", None)
        (checked,) = parse_tiers("secondary_tiers", [{"type": "disk", **options}])
        slots = np.asarray(primary_kv_view).view(np.uint8)
        self._pool = slots.reshape(len(slots), -1)
        # vLLM's RAM has its own layout: its blocks are not interchangeable with those of `KVOffloadSpec`.
        facts = engine_facts(offloading_spec, vllm_version)
        self._missing: list[str] = []
        owner = tier_owner(facts, self._pool.shape[1], USUAL_KEY_BYTES, self._missing, pool="vllm")
        self._opened = open_tiers([checked], owner)
        self._records: dict[str, object] = {}
        self._jobs: dict[int, Any] = {}
        self._finished: list[Any] = []
        self.broken = not self._opened

    @property
    def _tier(self) -> SecondaryTier:
        return self._opened[0]

    @contained(lambda req_context: RequestOffloadingContext())
    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        """Open the tier's record of the request."""
        if req_context.req_id not in self._records:
            self._records[req_context.req_id] = self._tier.begin_request(req_context.req_id)
        return RequestOffloadingContext()

    @contained(lambda req_context: None)
    def on_request_finished(self, req_context: Any) -> None:
        """Report to the tier what the request used."""
        record = self._records.pop(req_context.req_id, None)
        path = path_of(req_context)
        if record is not None and path and len(path[0]) == USUAL_KEY_BYTES:
            self._tier.finish_request(record, Keys.pack(path, USUAL_KEY_BYTES))

    @contained(lambda key, req_context: LookupResult.MISS)
    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        """Whether a block is here. Reads nothing."""
        if len(key) != USUAL_KEY_BYTES:
            return LookupResult.MISS
        found = self._tier.contains(Keys.pack([key], USUAL_KEY_BYTES), self._records.get(req_context.req_id))
        return LookupResult.HIT if found[0] else LookupResult.MISS

    def submit_store(self, job_metadata: Any) -> None:
        """Begin to write those of these blocks that the tier takes."""
        self._submit(job_metadata, is_store=True)

    def submit_load(self, job_metadata: Any) -> None:
        """Begin to read these blocks into vLLM's RAM."""
        self._submit(job_metadata, is_store=False)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """The results of jobs that have ended; for a load also which blocks are sound."""
        self._take_finished()
        finished, self._finished = self._finished, []
        return finished

    @contained(lambda: None)
    def _take_finished(self) -> None:
        for result in self._tier.finished():
            job = self._jobs.pop(result.job)
            keys = list(job.keys)
            sound = None
            if not result.ok.all() and job.is_promotion:
                sound = [key for key, ok in zip(keys, result.ok.tolist(), strict=True) if ok] or None
            self._finished.append(
                JobResult(
                    job_id=job.job_id,
                    success=bool(result.ok.all()),
                    successful_keys=sound,
                    transfer_time=result.seconds,
                    transfer_bytes=int(result.ok.sum()) * self._pool.shape[1],
                )
            )

    def has_pending_work(self) -> bool:
        """Whether vLLM must keep stepping while no request runs."""
        return bool(self._jobs or self._finished)

    def touch(self, keys: Collection[bytes], req_context: Any) -> None:
        """Nothing: uses are reported once a request, when it finishes."""

    def drain_jobs(self) -> None:
        """Wait for the jobs under way, and forget everything."""
        say_what_a_reset_misses(self._missing)
        self._forget()

    @contained(lambda: None)
    def _forget(self) -> None:
        """Wait for the jobs under way, and forget everything.

        vLLM calls this when its cache is reset, and only then. The reason for a reset, such as new weights,
        makes the blocks on the disk wrong too, and there is no other notification.
        """
        if not self._tier.drain(_DRAIN_TIMEOUT_S):
            logger.error("kvoffload: the disk does not answer while vLLM resets its cache")
        self._take_finished()
        self._tier.clear()
        if not self._tier.drain(_DRAIN_TIMEOUT_S):
            logger.error(
                "kvoffload: the disk does not record the reset: old blocks may be back after a restart"
            )

    def shutdown(self) -> None:
        """Close the disk; its blocks stay."""
        try:
            for tier in self._opened:
                tier.close()
        except Exception:
            logger.exception("kvoffload: the disk could not be closed")

    def _submit(self, job: Any, *, is_store: bool) -> None:
        keys, rows = list(job.keys), np.asarray(job.chunk_ids, np.int64)
        number = self._begin(job, keys, rows, is_store)
        if number == NO_JOB:
            # A store of no block is no failure; a load of no block is.
            self._finished.append(JobResult(job_id=job.job_id, success=is_store))
        else:
            self._jobs[number] = job

    @contained(lambda job, keys, rows, is_store: NO_JOB)
    def _begin(self, job: Any, keys: list[bytes], rows: npt.NDArray[np.int64], is_store: bool) -> int:
        packed = Keys.pack(keys, USUAL_KEY_BYTES)
        if not is_store:
            return self._tier.submit_read(packed, self._pool, rows)
        number, _ = self._tier.submit_write(
            packed, self._pool, rows, self._records.get(job.req_context.req_id)
        )
        return number

    def _before_call(self) -> None:
        """Nothing to do."""

    def _break(self, where: str) -> None:
        """Contain an error of ours: end all transfers, then report their jobs as failed."""
        self.broken = True
        logger.exception("kvoffload: internal error in %s; the disk is no longer used", where)
        with contextlib.suppress(Exception):
            self._tier.close()
        for job in self._jobs.values():
            self._finished.append(JobResult(job_id=job.job_id, success=False))
        self._jobs.clear()
