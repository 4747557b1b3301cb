"""Adapter of the disk of vLLM's `SimpleCPUOffloadConnector`, its `DiskBackend`, to `contract`.

The index of slots is in memory, as in vLLM's scheduler. CUDA's streams and copies are replaced
(`tests/support/cpu_transfers.py`); threads, staging buffers and files are vLLM's.
"""

from __future__ import annotations

import errno
import importlib
import os
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from vllm.v1.simple_kv_offload import disk_backend

from peers.contract import TIMEOUT_S, Adapter, File, Place, page_aligned
from peers.vllm_fs import vllm_version

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))
stand_ins: Any = importlib.import_module("support.cpu_transfers")


class VllmSimpleDisk:
    """A `Product`: vLLM's `DiskBackend`."""

    def __init__(self, directory: Path, model: str, block_bytes: int, num_blocks: int) -> None:
        stand_ins.run_on_cpu()
        # A dying thread must not print its traceback in every scene.
        threading.excepthook = lambda _: None
        self.pool = page_aligned(num_blocks, block_bytes)
        self._block_bytes, self._slots = block_bytes, dict[int, int]()
        self._free = list(range(num_blocks))
        self._path = directory / "kv.rank_0"
        self._unreadable: set[int] = set()
        self._backend: Any = disk_backend.DiskBackend()
        stream = stand_ins.Stream()
        self._backend.init(
            {"layer": torch.from_numpy(self.pool).view(torch.int8)}, torch.device("cpu"), stream, stream,
            str(self._path), num_blocks, block_bytes,
        )  # fmt: skip
        disk_backend.os = stand_ins.Instead(os, preadv=self._preadv)

    def _preadv(self, fd: int, buffers: Any, offset: int) -> int:
        if offset in self._unreadable:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return os.preadv(fd, buffers, offset)

    def write(self, numbers: Sequence[int], blocks_per_job: int) -> list[bool]:
        """Store blocks. After its thread has ended, a store is never reported, and its block is a miss."""
        stored = []
        for row, number in enumerate(numbers):
            if number not in self._slots:
                slot = self._free.pop(0)
                if not self._copy([row], [slot], is_store=True):
                    stored.append(False)
                    continue
                self._slots[number] = slot
            stored.append(True)
        return stored

    def read(self, numbers: Sequence[int], blocks_per_job: int) -> list[bool]:
        """Load blocks. Raises `TimeoutError` for a load that never ends; vLLM's request waits forever."""
        loaded = []
        for row, number in enumerate(numbers):
            slot = self._slots.get(number)
            loaded.append(slot is not None)
            if slot is not None and not self._copy([slot], [row], is_store=False):
                raise TimeoutError("the load thread has ended, and requests wait forever")
        return loaded

    def _copy(self, sources: list[int], destinations: list[int], *, is_store: bool) -> bool:
        """Copy blocks; returns False if the thread has ended."""
        ended: list[Any] = []
        self._backend.launch_copy(sources, destinations, is_store, 0, ended)
        thread = self._backend._store_thread if is_store else self._backend._load_thread
        deadline = time.monotonic() + TIMEOUT_S
        while not ended:
            if not thread.is_alive() and not ended:
                return False
            assert time.monotonic() < deadline
            time.sleep(0.0002)
        return True

    def forget(self, numbers: Sequence[int]) -> None:
        """Free the slots, as vLLM's block pool does on eviction."""
        self._free += [self._slots.pop(number) for number in numbers]

    def places(self, numbers: Sequence[int]) -> dict[int, Place]:
        """Locate blocks in the file, which the end of the process unlinks."""
        if not self._path.exists():
            return {}
        size, file = self._block_bytes, File(str(self._path))
        return {
            number: Place(file, self._slots[number] * size, (self._slots[number] + 1) * size)
            for number in numbers
            if number in self._slots
        }

    def records(self) -> list[Place]:
        return []

    def make_unreadable(self, places: Sequence[Place]) -> None:
        self._unreadable.update(place.offset for place in places)

    def close(self) -> None:
        self._backend.shutdown()


ADAPTERS = {
    "vllm-simple": Adapter(
        vllm_version(),
        "`kv_offload_backend: disk`, defaults: O_DIRECT; a file that ends with the process",
        VllmSimpleDisk,
        keeps=False,
    )
}
