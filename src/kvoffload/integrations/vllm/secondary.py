"""kvoffload's tiers behind vLLM's own RAM tier, for users who do not replace vLLM's manager.

    "secondary_tiers": [{"type": "KVOffloadDisk", "module_path": "kvoffload.integrations.vllm.secondary",
                         "path": "/nvme/kv", "capacity": "1TiB"},
                        {"type": "KVOffloadTier", "module_path": "kvoffload.integrations.vllm.secondary",
                         "url": "valkey://cache:6379/team-a"}]

Translates vLLM's jobs, requests and RAM buffer into calls of a tier. Internal errors never reach the engine.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterable
from dataclasses import asdict
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from vllm import __version__ as vllm_version
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload import base
from vllm.v1.kv_offload.base import Locality, LookupResult, Medium, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from kvoffload import __version__
from kvoffload.integrations.containment import contained
from kvoffload.integrations.logs import join
from kvoffload.integrations.vllm.scheduler_side.lookups import path_of
from kvoffload.integrations.vllm.scheduler_side.metrics import Reports, tier_definitions
from kvoffload.integrations.vllm.shared.logs import logger
from kvoffload.integrations.vllm.shared.producer import find_configuration
from kvoffload.integrations.vllm.shared.tiers import USUAL_KEY_BYTES, EngineTiers, Producer
from kvoffload.integrations.vllm.shared.versions import SINCE_SECONDARY, check_version, engine_facts, events
from kvoffload.metrics.counts import tier_values
from kvoffload.structures.keys import Keys
from kvoffload.tiering.wait import TierWait
from kvoffload.tiers.contract import NO_JOB
from kvoffload.tiers.guarded import GuardedTier
from kvoffload.tiers.spec import parse_tiers

_DRAIN_TIMEOUT_S, _SHARED_DRAIN_TIMEOUT_S = 30.0, 2.0
_NEW_WAIT_AFTER_S = 2.0
_INFO = {
    "kvoffload_tier": "name",
    "kvoffload_policy": "policy",
    "kvoffload_admission": "admission",
    "kvoffload_capacity": "capacity",
}
"""Mapping: label of vLLM's info metric -> name of the tier's option that is its value. If a tier does not
have the option, the label is empty."""


class KVOffloadTier(SecondaryTierManager):
    """Adapter that lets vLLM's tiering manager use a tier of kvoffload. Every block that is read is verified.

    A lookup returns HIT if the tier has an entry for the block. A load reports which blocks were read and
    sound, and vLLM computes the other blocks. A shared tier is asked (probed) once per step, for all blocks
    that were looked up in the step. Until its reply, a lookup returns RETRY, but no longer than the tier's
    `probe_timeout`.

    Options: ``url`` and its parameters, or the options of a disk, as for a tier of `KVOffloadSpec`.
    Raises `ConfigError` for wrong options when the engine starts.

    Thread: the scheduler's. Since vLLM 0.33 `lookup` is also called by a thread that polls other tiers, for
    requests of peer engines. vLLM's lock serializes the calls.

    Attributes:
        tolerates_off_thread_polling: False, so that vLLM 0.33 polls for finished jobs only in its steps.
        broken: True if the tier is not used, because it could not be opened, the engine's keys have another
            length, or an internal error has occurred.
    """

    medium = Medium.STORAGE
    tolerates_off_thread_polling: ClassVar[bool] = False

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
        join(logger)
        options.pop("locality", None)
        kind = {} if "url" in options else {"type": "disk"}
        (checked,) = parse_tiers("secondary_tiers", [{**kind, **options}])
        slots = np.asarray(primary_kv_view).view(np.uint8)
        self._pool = slots.reshape(len(slots), -1)
        # vLLM's RAM has its own layout, so blocks of `KVOffloadSpec` cannot be used here, nor vice versa.
        facts = engine_facts(offloading_spec, vllm_version)
        producer = Producer.of(facts, find_configuration(offloading_spec, facts.engine_id), pool="vllm")
        self._tiers = EngineTiers([checked], facts, producer)
        # vLLM offers single blocks, each once, and no whole paths.
        opened = self._tiers.open(self._pool.shape[1], USUAL_KEY_BYTES, reports_paths=False)
        # After an exception in the tier the result is a miss, and the tier stays in use. After an exception
        # in this class (`contained`) the tier is no longer used.
        self._opened = [GuardedTier(tier) for tier in opened]
        self._records: dict[str, object] = {}
        self._jobs: dict[int, Any] = {}
        self._finished: list[Any] = []
        # `_unknown`: blocks to probe at the end of the step. `_probes`: blocks of each running probe.
        # `_waits`: for each request, the wait for probes.
        self._unknown: dict[bytes, None] = {}
        self._probes: dict[int, set[bytes]] = {}
        self._waits: dict[str, TierWait] = {}
        self._metrics = Reports()
        self._info = {label: str(getattr(checked, option, "")) for label, option in _INFO.items()}
        self.broken = not self._opened
        if self._opened and self._tier.shared:
            self.locality = Locality.REMOTE

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        """Return the definitions of the tier's metrics, ``vllm:kvoffload_tier_...``."""
        return tier_definitions()

    @classmethod
    def config_info_keys(cls, tier_config: dict[str, Any]) -> tuple[str, ...]:
        """Return the labels of vLLM's info metric, whose values are in `config_info`. Called by vLLM 0.33."""
        return ("kvoffload_version", *_INFO)

    def config_info(self) -> dict[str, str]:
        """Return version and options of the tier, for vLLM's info metric. Called by vLLM 0.33."""
        return {"kvoffload_version": __version__, **self._info}

    def get_stats(self) -> OffloadingConnectorStats | None:
        """Return the changed metrics, or None if no report is due. vLLM calls this in every step."""
        is_due = self._metrics.is_due(time.monotonic(), is_idle=not self._records)
        return self._take_stats() if is_due else None

    @contained(None)
    def _take_stats(self) -> OffloadingConnectorStats:
        stats = self._tier.stats()
        return self._metrics.take(tier_values(self._tier.name, {"hits": stats.read, **asdict(stats)}))

    @property
    def _tier(self) -> GuardedTier:
        return self._opened[0]

    @contained(RequestOffloadingContext())
    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        """Begin a record of the request in the tier."""
        if req_context.req_id not in self._records:
            self._records[req_context.req_id] = self._tier.begin_request(req_context.req_id)
        return RequestOffloadingContext()

    @contained(None)
    def on_request_finished(self, req_context: Any) -> None:
        """Report to the tier that the path of the request was used."""
        record = self._records.pop(req_context.req_id, None)
        self._waits.pop(req_context.req_id, None)
        path = path_of(req_context)
        if record is not None and path and self._accepts(path[0]):
            self._tier.finish_request(record, Keys.pack(path, USUAL_KEY_BYTES))

    def _accepts(self, key: bytes) -> bool:
        """Return True if the key has the expected length. Otherwise mark the tier as broken."""
        self.broken = not self._tiers.accept(len(key))
        return not self.broken

    @contained(LookupResult.MISS)
    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        """Return HIT or MISS, or RETRY while a shared tier is probed for the block. Reads no blocks."""
        if not self._accepts(key):
            return LookupResult.MISS
        packed, record = Keys.pack([key], USUAL_KEY_BYTES), self._records.get(req_context.req_id)
        if self._tier.contains(packed, record)[0]:
            return LookupResult.HIT
        if not self._tier.shared or not self._tier.unknown(packed, record)[0]:
            return LookupResult.MISS
        wait = self._waits.setdefault(req_context.req_id, TierWait([]))
        if not wait.waits_for_probe(time.monotonic(), self._tier.probe_timeout_s, _NEW_WAIT_AFTER_S):
            return LookupResult.MISS
        self._unknown[key] = None
        return LookupResult.RETRY

    @contained(None)
    def on_schedule_end(self, context: Any) -> None:
        """Ask a shared tier for the blocks that were looked up in this step, if their presence is unknown.

        Does not ask for blocks of earlier probes that still run.
        """
        unknown, self._unknown = self._unknown, {}
        new = [key for key in unknown if not any(key in probed for probed in self._probes.values())]
        if new and (job := self._tier.submit_probe(Keys.pack(new, USUAL_KEY_BYTES))) != NO_JOB:
            self._probes[job] = {*new}

    def submit_store(self, job_metadata: Any) -> None:
        """Start to write the blocks of a job, except blocks that the tier does not accept."""
        self._submit(job_metadata, is_store=True)

    def submit_load(self, job_metadata: Any) -> None:
        """Start to read the blocks of a job into vLLM's RAM."""
        self._submit(job_metadata, is_store=False)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Return the results of finished jobs. For a failed load, they list the blocks that are sound."""
        self._take_finished()
        finished, self._finished = self._finished, []
        return finished

    @contained(None)
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
        """Return the events of a shared tier: blocks that this engine has written or has found missing."""
        changes, name = self._tier.take_changes(), self._tier.name
        return [event for keys, removed in changes for event in events(base, keys, removed, name)]

    def has_pending_work(self) -> bool:
        """Return True if jobs, results or probes are pending: vLLM then makes steps even without requests."""
        return bool(self._jobs or self._finished or self._probes or self._unknown)

    def touch(self, keys: Collection[bytes], req_context: Any) -> None:
        """Do nothing, because `on_request_finished` reports the use of the request's path."""

    def drain_jobs(self) -> None:
        """Wait for the jobs in flight, then forget all blocks.

        vLLM calls this when its cache is reset. The stored blocks are then invalid, too, for example because
        of new weights.
        """
        self._forget()
        self._tiers.log_unreached()

    @contained(None)
    def _forget(self) -> None:
        # vLLM drains jobs only at a reset of its cache, and reports the reset in no other way. The tier's
        # blocks are then wrong as well, for example because of new weights.
        name, timeout_s = self._tier.name, _SHARED_DRAIN_TIMEOUT_S if self._tier.shared else _DRAIN_TIMEOUT_S
        if not self._tier.drain(timeout_s):
            logger.error(
                "kvoffload: the %s did not finish its jobs in time for a reset of vLLM's cache", name
            )
        self._take_finished()
        self._tier.clear()
        if not self._tier.drain(timeout_s):
            logger.error(
                "kvoffload: the %s did not record a reset of the cache in time; old blocks may be served "
                "after a restart",
                name,
            )

    def shutdown(self) -> None:
        """Close the tier. The stored blocks remain."""
        try:
            for tier in self._opened:
                tier.close()
        except Exception:
            logger.exception("kvoffload: the tier behind vLLM's RAM could not be closed")

    def _submit(self, job: Any, *, is_store: bool) -> None:
        keys, rows = list(job.keys), np.asarray(job.chunk_ids, np.int64)
        number = self._begin(job, keys, rows, is_store)
        if number == NO_JOB:
            # A store without blocks is a success, a load without blocks a failure. `transfer_bytes` is set,
            # because vLLM would otherwise count the bytes of the job.
            self._finished.append(JobResult(job_id=job.job_id, success=is_store, transfer_bytes=0))
        else:
            self._jobs[number] = job

    @contained(NO_JOB)
    def _begin(self, job: Any, keys: list[bytes], rows: npt.NDArray[np.int64], is_store: bool) -> int:
        if keys and not self._accepts(keys[0]):
            return NO_JOB
        packed = Keys.pack(keys, USUAL_KEY_BYTES)
        if not is_store:
            return self._tier.submit_read(packed, self._pool, rows)
        number, _ = self._tier.submit_write(
            packed, self._pool, rows, self._records.get(job.req_context.req_id)
        )
        return number

    def stop_after_error(self, method: str) -> None:
        """Log an internal error, end all transfers, and report their jobs as failed."""
        self.broken = True
        self._tiers.give_up()
        logger.exception("kvoffload: internal error in %s; the tier is no longer used", method)
        with contextlib.suppress(Exception):
            self._tier.close()
        for job in self._jobs.values():
            self._finished.append(JobResult(job_id=job.job_id, success=False))
        self._jobs.clear()
        self._probes.clear()
        self._unknown.clear()


class KVOffloadDisk(KVOffloadTier):
    """A `DiskTier` behind vLLM's RAM. The capacity is limited, and the blocks survive a restart.

    Options: path, capacity, policy, admission, max_write_bytes_per_day, salt.
    """
