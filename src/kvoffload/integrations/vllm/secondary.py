"""Our tiers behind vLLM's own RAM tier, for users who want only those.

    "secondary_tiers": [{"type": "KVOffloadDisk", "module_path": "kvoffload.integrations.vllm.secondary",
                         "path": "/nvme/kv", "capacity": "1TiB"},
                        {"type": "KVOffloadTier", "module_path": "kvoffload.integrations.vllm.secondary",
                         "url": "valkey://cache:6379/team-a"}]

Owns the translation of vLLM's jobs, requests and view of RAM. No error of ours reaches the engine.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
from vllm import __version__ as vllm_version
from vllm.v1.kv_offload import base
from vllm.v1.kv_offload.base import Locality, LookupResult, Medium, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from kvoffload.integrations.vllm.scheduler_side.containment import contained
from kvoffload.integrations.vllm.scheduler_side.lookups import path_of
from kvoffload.integrations.vllm.scheduler_side.manager import USUAL_KEY_BYTES
from kvoffload.integrations.vllm.shared.logs import join_vllm, logger
from kvoffload.integrations.vllm.shared.producer import find_configuration
from kvoffload.integrations.vllm.shared.tiers import (
    Producer,
    say_what_a_reset_misses,
    tier_owner,
    usable_tiers,
)
from kvoffload.integrations.vllm.shared.versions import SINCE_SECONDARY, check_version, engine_facts, events
from kvoffload.structures.keys import Keys
from kvoffload.tiering.wait import TierWait
from kvoffload.tiers.contract import NO_JOB
from kvoffload.tiers.guarded import GuardedTier
from kvoffload.tiers.spec import open_tiers, parse_tiers

_DRAIN_TIMEOUT_S, _SHARED_DRAIN_TIMEOUT_S = 30.0, 2.0
_NEW_WAIT_AFTER_S = 2.0


class KVOffloadTier(SecondaryTierManager):
    """One of our tiers as vLLM's tiering manager calls it: verified at every read.

    A block is HIT if its entry is here. Its bytes are verified when it is read; if some are damaged, vLLM
    gets the keys of the blocks that arrived, and computes the others. A tier that machines share is asked,
    once a step for all blocks that were looked up; until it answers a block is RETRY, for no longer than the
    tier's `probe_timeout`.

    Takes the options of a tier of `KVOffloadSpec`: ``url`` and what may stand behind its ``?``, or those of a
    disk. Raises `ConfigError` when the engine starts. Thread: the scheduler's.

    Attributes:
        broken: an error of ours was contained, or the tier could not be opened: it is not used any more.
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
        check_version(vllm_version, SINCE_SECONDARY, type(self).__name__)
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        join_vllm()
        options.pop("locality", None)
        kind = {} if "url" in options else {"type": "disk"}
        (checked,) = parse_tiers("secondary_tiers", [{**kind, **options}])
        slots = np.asarray(primary_kv_view).view(np.uint8)
        self._pool = slots.reshape(len(slots), -1)
        # vLLM's RAM has its own layout: its blocks are not interchangeable with those of `KVOffloadSpec`.
        facts = engine_facts(offloading_spec, vllm_version)
        self._missing: list[str] = []
        producer = Producer.of(facts, find_configuration(offloading_spec, facts.engine_id), pool="vllm")
        owner = tier_owner(producer, facts, self._pool.shape[1], USUAL_KEY_BYTES, self._missing)
        # vLLM offers blocks as they are stored, in pieces of a path, and once.
        usable = usable_tiers(producer, [checked], self._missing)
        opened = open_tiers(usable, replace(owner, tells_paths=False))
        # An exception of the tier is a miss, and the tier is tried again; `contained` is for errors of ours.
        self._opened = [GuardedTier(tier) for tier in opened]
        self._records: dict[str, object] = {}
        self._jobs: dict[int, Any] = {}
        self._finished: list[Any] = []
        # Blocks to ask for at the end of the step; each probe's blocks; and how long requests wait for them.
        self._unknown: dict[bytes, None] = {}
        self._probes: dict[int, set[bytes]] = {}
        self._waits: dict[str, TierWait] = {}
        self.broken = not self._opened
        if self._opened and self._tier.shared:
            self.locality = Locality.REMOTE

    @property
    def _tier(self) -> GuardedTier:
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
        self._waits.pop(req_context.req_id, None)
        path = path_of(req_context)
        if record is not None and path and len(path[0]) == USUAL_KEY_BYTES:
            self._tier.finish_request(record, Keys.pack(path, USUAL_KEY_BYTES))

    @contained(lambda key, req_context: LookupResult.MISS)
    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        """Whether a block is here. Reads nothing."""
        if len(key) != USUAL_KEY_BYTES:
            return LookupResult.MISS
        one, record = Keys.pack([key], USUAL_KEY_BYTES), self._records.get(req_context.req_id)
        if self._tier.contains(one, record)[0]:
            return LookupResult.HIT
        if not self._tier.shared or not self._tier.unknown(one, record)[0]:
            return LookupResult.MISS
        wait = self._waits.setdefault(req_context.req_id, TierWait([]))
        if not wait.waits_for_probe(time.monotonic(), self._tier.probe_timeout_s, _NEW_WAIT_AFTER_S):
            return LookupResult.MISS
        self._unknown[key] = None
        return LookupResult.RETRY

    @contained(lambda context: None)
    def on_schedule_end(self, context: Any) -> None:
        """Ask for what was looked up in this step, and is not being asked for."""
        unknown, self._unknown = self._unknown, {}
        new = [key for key in unknown if not any(key in asked for asked in self._probes.values())]
        if new and (job := self._tier.submit_probe(Keys.pack(new, USUAL_KEY_BYTES))) != NO_JOB:
            self._probes[job] = {*new}

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
            if self._probes.pop(result.job, None) is not None:
                continue
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

    @contained(list)
    def take_events(self) -> list[Any]:
        """Of a tier that machines share, what this engine has written there, and what of that it has found
        gone."""
        changes, name = self._tier.take_changes(), self._tier.name
        return [event for keys, removed in changes for event in events(base, keys, removed, name)]

    def has_pending_work(self) -> bool:
        """Whether vLLM must keep stepping while no request runs."""
        return bool(self._jobs or self._finished or self._probes or self._unknown)

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
        makes the blocks in the tier wrong too, and there is no other notification.
        """
        name, timeout_s = self._tier.name, _SHARED_DRAIN_TIMEOUT_S if self._tier.shared else _DRAIN_TIMEOUT_S
        if not self._tier.drain(timeout_s):
            logger.error("kvoffload: the %s does not answer while vLLM resets its cache", name)
        self._take_finished()
        self._tier.clear()
        if not self._tier.drain(timeout_s):
            logger.error(
                "kvoffload: the %s does not record the reset: old blocks may be back after a restart", name
            )

    def shutdown(self) -> None:
        """Close the tier; its blocks stay."""
        try:
            for tier in self._opened:
                tier.close()
        except Exception:
            logger.exception("kvoffload: the tier behind vLLM's RAM could not be closed")

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
        logger.exception("kvoffload: internal error in %s; the tier is no longer used", where)
        with contextlib.suppress(Exception):
            self._tier.close()
        for job in self._jobs.values():
            self._finished.append(JobResult(job_id=job.job_id, success=False))
        self._jobs.clear()
        self._probes.clear()
        self._unknown.clear()


class KVOffloadDisk(KVOffloadTier):
    """A `DiskTier` behind vLLM's RAM: bounded, and warm after a restart. Takes path, capacity, policy,
    admission, max_write_bytes_per_day, salt."""
