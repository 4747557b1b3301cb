"""Stand-ins for CUDA's streams, events and copies, which run vLLM's CUDA connectors on its CPU build.

`run_on_cpu` replaces only these names in vLLM's transfer modules. Schedulers, managers, workers, threads and
the order of transfers are vLLM's own. A copy of the stand-ins ends before the call returns.
"""

from __future__ import annotations

import ctypes
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches
from vllm.v1.kv_offload.cpu import gpu_worker
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.simple_kv_offload import copy_backend, cuda_mem_ops, disk_backend, worker


class Stream:
    """A stream whose work has always ended."""

    cuda_stream = 0

    def __init__(self, priority: int = 0) -> None:
        pass

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, 0

    def wait_event(self, event: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass


class _Event:
    """An event that has always passed."""

    def __init__(self, enable_timing: bool = False) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: Any) -> float:
        return 0.0


@contextmanager
def _stream(stream: Any) -> Any:
    yield


class Instead:
    """A module or object with some attributes replaced."""

    def __init__(self, original: Any, **replaced: Any) -> None:
        self._original = original
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def _copy(destinations: Any, sources: Any, sizes: Any) -> None:
    for destination, source, size in zip(destinations, sources, sizes, strict=True):
        ctypes.memmove(destination, source, size)


def _batch_memcpy(destinations: int, sources: int, sizes: int, count: int, *_: Any) -> int:
    """``cuMemcpyBatchAsync``: copy `count` pieces; three arrays of 64-bit numbers describe them."""
    arrays = ((ctypes.c_uint64 * count).from_address(address) for address in (destinations, sources, sizes))
    _copy(*arrays)
    return 0


def _swap_blocks_batch(sources: Any, destinations: Any, sizes: Any, **_: Any) -> None:
    """``swap_blocks_batch``, which the CPU build lacks."""
    _copy(destinations.tolist(), sources.tolist(), sizes.tolist())


class _OnDevice(torch.Tensor):
    """A tensor in host memory whose `is_cuda` is True."""

    @property
    def is_cuda(self) -> bool:
        return True


def run_on_cpu() -> None:
    """Replace the CUDA names in vLLM's transfer modules, in this process."""
    cuda = SimpleNamespace(Stream=Stream, current_stream=Stream)
    with_cuda = Instead(torch, cuda=cuda, Event=_Event)
    for module in (worker, copy_backend, disk_backend, gpu_worker):
        module.torch = with_cuda
    worker.pin_tensor = disk_backend.pin_tensor = lambda tensor: None
    cuda_mem_ops._batch_memcpy = _batch_memcpy, 1
    platform = Instead(
        gpu_worker.current_platform,
        Stream=Stream,
        current_stream=Stream,
        stream=_stream,
        set_device=Stream,
    )
    for module in (copy_backend, disk_backend, gpu_worker):
        module.current_platform = platform
    gpu_worker.ops = Instead(gpu_worker.ops, swap_blocks_batch=_swap_blocks_batch)


class NativeSpec(CPUOffloadingSpec):
    """vLLM's specification of offloading to RAM, with its manager and its worker."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> Any:
        """Return vLLM's worker; the original refuses devices other than CUDA's and Intel's."""
        if self._worker is None:
            run_on_cpu()
            for cache in kv_caches.tensors:
                cache.tensor = cache.tensor.as_subclass(_OnDevice)
            self._worker = self.create_worker(kv_caches)
        return self._worker
