"""Copies between an engine's tensors and the pool.

Owns the interface and the implementation for tensors in host memory. `cuda` has the implementation for
devices. Does not know keys or checksums, and does not handle failed copies.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol

from kvoffload.integrations.vllm.worker_side.layout import Layout
from kvoffload.integrations.vllm.worker_side.slots_spec import SlotsSpec
from kvoffload.structures.jit import compile_all
from kvoffload.transfer import Blocks, copy_blocks
from kvoffload.transfer.engine import as_blocks


class Copied(NamedTuple):
    """The result of a copy job. If `error` is None, all bytes have arrived."""

    job: int
    num_bytes: int
    seconds: float
    error: BaseException | None = None


class Copies(Protocol):
    """Copies blocks between the engine's tensors and the pool, in jobs.

    Two stores, or two loads, end in the order of their submission. If `store` or `load` raises, the job has
    not begun.

    Thread: call all methods on one thread.
    """

    def store(self, job: int, engine: Any, slots: SlotsSpec) -> None:
        """Begin to copy the engine's blocks into slots."""
        ...

    def load(self, job: int, engine: Any, slots: SlotsSpec) -> None:
        """Begin to copy slots into the engine's blocks."""
        ...

    def finished(self) -> list[Copied]:
        """Return the results of jobs that have ended since the last call."""
        ...

    def wait(self, jobs: set[int]) -> None:
        """Wait until these jobs have ended. `finished` then returns the results."""
        ...

    def close(self) -> None:
        """Wait for the jobs in flight, and release the tensors and the pool."""
        ...


class HostCopies:
    """Copies to and from tensors in host memory. One thread copies, while the engine's step continues.

    Attributes:
        layout: offsets of the tensors in a slot, and the regions of each group.
        tensors: the engine's tensors, as blocks of bytes.
    """

    def __init__(self, kv_caches: Any, layout: Layout, part: Blocks) -> None:
        self.layout, self._part = layout, part
        self.tensors = [as_blocks(tensor.tensor) for tensor in kv_caches.tensors]
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvoffload-copies")
        self._jobs: dict[int, Future[tuple[int, float]]] = {}
        compile_all()

    def store(self, job: int, engine: Any, slots: SlotsSpec) -> None:
        self._jobs[job] = self._thread.submit(self._copy, engine, slots, _store)

    def load(self, job: int, engine: Any, slots: SlotsSpec) -> None:
        self._jobs[job] = self._thread.submit(self._copy, engine, slots, _load)

    def finished(self) -> list[Copied]:
        ended = [job for job, future in self._jobs.items() if future.done()]
        return [_result(job, self._jobs.pop(job)) for job in ended]

    def wait(self, jobs: set[int]) -> None:
        for job in jobs & self._jobs.keys():
            self._jobs[job].exception()

    def close(self) -> None:
        self._thread.shutdown()
        self.tensors.clear()
        del self._part

    def _copy(self, engine: Any, slots: SlotsSpec, copy: Callable[..., None]) -> tuple[int, float]:
        start, num_bytes = time.perf_counter(), 0
        for move in self.layout.moves(engine, slots.block_ids):
            for region in self.layout.regions[move.group]:
                begin = region.start + move.inner * region.stride
                in_pool = self._part[:, begin : begin + region.num_bytes]
                copy(self.tensors[region.tensor][:, : region.num_bytes], move.blocks, in_pool, move.slots)
            num_bytes += self.layout.num_bytes(move)
        return num_bytes, time.perf_counter() - start


def _store(tensor: Blocks, blocks: Any, in_pool: Blocks, slots: Any) -> None:
    copy_blocks(tensor, blocks, in_pool, slots)


def _load(tensor: Blocks, blocks: Any, in_pool: Blocks, slots: Any) -> None:
    copy_blocks(in_pool, slots, tensor, blocks)


def _result(job: int, future: Future[tuple[int, float]]) -> Copied:
    error = future.exception()
    return Copied(job, 0, 0.0, error) if error is not None else Copied(job, *future.result())
