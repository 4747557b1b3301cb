"""Copies between the pool and tensors on a device. Uses vLLM's own kernels and streams.

Owns the pinning of the pool, and the views of the pool for vLLM's copies. vLLM owns the transfers
(``vllm/v1/kv_offload/cpu/gpu_worker.py``, as of 0.32).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from vllm.v1.kv_offload.cpu.gpu_worker import SingleDirectionOffloadingHandler
from vllm.v1.kv_offload.cpu.host_register import host_register, host_unregister

from kvoffload.integrations.vllm.shared.logs import logger
from kvoffload.integrations.vllm.shared.pool import SharedPool
from kvoffload.integrations.vllm.worker_side.copies import Copied
from kvoffload.integrations.vllm.worker_side.layout import Layout
from kvoffload.integrations.vllm.worker_side.slots_spec import SlotsSpec
from kvoffload.text import duration, size
from kvoffload.transfer.cuda import tensor_over
from kvoffload.transfer.pinned import PIN_AT_ONCE_BYTES, on_device, synchronized


class DeviceCopies:
    """Copies of tensors on a CUDA device, or another device that vLLM's kernels support.

    A transfer begins after the previous transfer of the same direction, and after the work that the engine
    has submitted to the device earlier.
    """

    def __init__(self, kv_caches: Any, layout: Layout, pool: SharedPool, part: int) -> None:
        self._num_slots = pool.num_slots
        tensors = [tensor.tensor for tensor in kv_caches.tensors]
        self._device = tensors[0].device
        with on_device(self._device):
            self._pinned = _pin(pool)
        views = views_of(pool, part, layout, [tensor.page_size_bytes for tensor in kv_caches.tensors])
        self._storing, self._loading = (
            SingleDirectionOffloadingHandler(
                gpu_tensors=tensors,
                cpu_tensors=views,
                blocks_per_chunk=layout.blocks_per_chunk,
                layer_refs_per_group=kv_caches.group_data_refs,
                gpu_to_cpu=to_pool,
                host_memory_is_pinned=bool(self._pinned),
            )
            for to_pool in (True, False)
        )
        self._directions = [self._storing, self._loading]

    def store(self, job: int, engine: Any, slots: SlotsSpec) -> None:
        self._check(slots)
        _check_begun(self._storing.transfer_async(job, engine, slots))

    def load(self, job: int, engine: Any, slots: SlotsSpec) -> None:
        self._check(slots)
        _check_begun(self._loading.transfer_async(job, slots, engine))

    def finished(self) -> list[Copied]:
        return [
            Copied(
                result.job_id,
                result.transfer_size or 0,
                result.transfer_time or 0.0,
                None if result.success else OSError("the transfer failed"),
            )
            for handler in self._directions
            for result in handler.get_finished()
        ]

    def wait(self, jobs: set[int]) -> None:
        """Wait until these jobs have ended.

        If waiting fails, wait until the device is idle, then raise the error.
        """
        try:
            self._storing.wait(jobs)
            self._loading.wait(jobs)
        except Exception:
            synchronized(self._device)
            raise

    def close(self) -> None:
        """Wait for the copies in flight, release the tensors, unpin the pool. Idempotent.

        Raises: the first error of vLLM's handlers. If the device is still busy after an error, a copy may
        still use the memory, so the pool stays pinned until the process ends.
        """
        failed: Exception | None = None
        directions, self._directions = self._directions, []
        with on_device(self._device):
            for direction in directions:
                try:
                    direction.shutdown()
                except Exception as error:
                    failed = failed or error
            if failed is None or synchronized(self._device):
                for address in self._pinned:
                    host_unregister(address)
            else:
                logger.error("kvoffload: the pool stays pinned, because waiting for the device failed")
            self._pinned = []
        if failed is not None:
            raise failed

    def _check(self, slots: SlotsSpec) -> None:
        """Raise `ValueError` for slots outside the pool, because vLLM's kernels do not check addresses."""
        rows = slots.block_ids
        if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < self._num_slots:
            raise ValueError(f"slots {rows.tolist()} must lie in 0 to {self._num_slots - 1}")


def _check_begun(success: bool) -> None:
    if not success:
        raise OSError("vLLM refused the transfer")


def views_of(pool: SharedPool, part: int, layout: Layout, page_bytes: Sequence[int]) -> list[Any]:
    """Return a view of the pool for each tensor: ``(num_slots, blocks_per_chunk * page_bytes)`` int8."""
    rows = pool.part(part)
    return [
        tensor_over(rows[:, start : start + size * layout.blocks_per_chunk].view(np.int8))
        for start, size in zip(layout.starts, page_bytes, strict=True)
    ]


def _pin(pool: SharedPool) -> list[int]:
    """Pin the slots and return the pinned addresses. If pinning fails, return [] and accept slower copies."""
    address, num_bytes, began = pool.address, pool.num_slots * pool.slot_stride, time.monotonic()
    step = max(1, PIN_AT_ONCE_BYTES // pool.slot_stride) * pool.slot_stride
    pinned: list[int] = []
    for start in range(0, num_bytes, step):
        if not host_register(address + start, min(step, num_bytes - start)):
            logger.warning("kvoffload: the pool cannot be pinned; copies will be slower")
            for done in pinned:
                host_unregister(done)
            return []
        pinned.append(address + start)
    took = duration(time.monotonic() - began)
    logger.info("kvoffload: %s of RAM pinned by this worker in %s", size(num_bytes), took)
    return pinned
