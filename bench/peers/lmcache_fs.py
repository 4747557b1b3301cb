"""Adapter of LMCache's second-level adapters `fs` and `fs_native` to `contract`.

Created by LMCache's factory and called as by its storage manager: look up and lock, load, unlock. `fs` also
runs below LMCache's AES-GCM serde, wrapped as by its storage manager.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from peers.contract import Adapter, File, Place, files_to_unreadable, key, page_aligned, parts, until_ended

os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")

import torch
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.config import L1ManagerConfig, L1MemoryManagerConfig
from lmcache.v1.distributed.l1_manager import L1Manager
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.fs_l2_adapter import (
    FSL2AdapterConfig,
    _object_key_to_filename,
)
from lmcache.v1.distributed.l2_adapters.fs_native_l2_adapter import FSNativeL2AdapterConfig
from lmcache.v1.distributed.l2_adapters.serde_wrapper import SerdeL2AdapterWrapper
from lmcache.v1.distributed.serde import SerdeConfig, create_serde_processor
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj

logging.disable(logging.ERROR)


class LmcacheFs:
    """A `Product`: `fs` or `fs_native`."""

    layouts: dict[int, Any] = {}  # noqa: RUF012

    def __init__(
        self, configuration: Any, options: dict[str, Any], directory: Path, model: str,
        block_bytes: int, num_blocks: int,
    ) -> None:  # fmt: skip
        self._directory = directory
        config = configuration.from_dict({"base_path": str(directory), **options})
        self._open(config, model, block_bytes, num_blocks)

    def _open(self, config: Any, model: str, block_bytes: int, num_blocks: int) -> None:
        self._model = model
        self.pool = page_aligned(num_blocks, block_bytes)
        memory = torch.from_numpy(self.pool)
        self._objects = [_object(memory[row], row * block_bytes) for row in range(num_blocks)]
        self._adapter: Any = create_l2_adapter(config)

    def write(self, numbers: Sequence[int], blocks_per_job: int) -> list[bool]:
        jobs = {
            self._adapter.submit_store_task(
                [self._key(numbers[row]) for row in piece], [self._objects[row] for row in piece]
            ): piece
            for piece in parts(len(numbers), blocks_per_job)
        }
        stored = [False] * len(numbers)
        in_flight = set(jobs)

        def poll() -> None:
            for job, result in self._adapter.pop_completed_store_tasks().items():
                in_flight.discard(job)
                for row in jobs[job]:
                    stored[row] = result.is_successful()

        until_ended(in_flight, poll)
        return stored

    def read(self, numbers: Sequence[int], blocks_per_job: int) -> list[bool]:
        keys = [self._key(number) for number in numbers]
        lookups = {
            self._adapter.submit_lookup_and_lock_task([keys[row] for row in piece], self.layouts): list(piece)
            for piece in parts(len(keys), blocks_per_job)
        }
        hit_rows = _rows(lookups, self._adapter.query_lookup_and_lock_result)
        loads = {
            self._adapter.submit_load_task(
                [keys[row] for row in rows], [self._objects[row] for row in rows]
            ): rows
            for piece in parts(len(hit_rows), blocks_per_job)
            for rows in [[hit_rows[i] for i in piece]]
        }
        loaded = set(_rows(loads, self._adapter.query_load_result))
        self._adapter.submit_unlock([keys[row] for row in hit_rows])
        return [row in loaded for row in range(len(numbers))]

    def forget(self, numbers: Sequence[int]) -> None:
        self._adapter.delete([self._key(number) for number in numbers])

    def _key(self, number: int) -> Any:
        return ObjectKey(chunk_hash=key(number), model_name=self._model, kv_rank=0x01000100)

    def places(self, numbers: Sequence[int]) -> dict[int, Place]:
        """Locate existing files."""
        places = {}
        for number in numbers:
            path = self._directory / _object_key_to_filename(self._key(number))
            if path.exists():
                places[number] = Place(File(str(path)), 0, path.stat().st_size)
        return places

    def records(self) -> list[Place]:
        """Return nothing: the metadata are the file names."""
        return []

    def make_unreadable(self, places: Sequence[Place]) -> None:
        files_to_unreadable(places)

    def close(self) -> None:
        self._adapter.close()


class LmcacheEncrypted(LmcacheFs):
    """A `Product`: `fs` below the serde. Both models use the same master key."""

    def __init__(self, directory: Path, model: str, block_bytes: int, num_blocks: int) -> None:
        master = directory.parent / "master-key"
        if not master.exists():
            master.write_bytes(bytes(range(32)))
        super().__init__(FSL2AdapterConfig, {}, directory, model, block_bytes, num_blocks)
        serde = create_serde_processor(SerdeConfig("aesgcm", {"master_key_path": str(master)}))
        memory = L1MemoryManagerConfig(2 * num_blocks * block_bytes + (1 << 20), use_lazy=False, shm_name="")
        self._adapter = SerdeL2AdapterWrapper(self._adapter, serde, L1Manager(L1ManagerConfig(memory)))


def _object(memory: Any, address: int) -> Any:
    """Make a memory object for a row of the pool, unknown to LMCache's allocator."""
    size = memory.numel()
    metadata = MemoryObjMetadata(
        shape=torch.Size([size]), dtype=torch.uint8, address=address, phy_size=size, ref_count=1,
        fmt=MemoryFormat.BINARY, shapes=[torch.Size([size])], dtypes=[torch.uint8],
    )  # fmt: skip
    return TensorMemoryObj(memory, metadata, parent_allocator=None)


def _rows(jobs: dict[int, list[int]], query: Callable[[int], Any]) -> list[int]:
    """Wait for jobs; returns the rows in their bitmaps."""
    rows: list[int] = []
    in_flight = set(jobs)

    def poll() -> None:
        for job in list(in_flight):
            bitmap = query(job)
            if bitmap is not None:
                in_flight.discard(job)
                rows.extend(jobs[job][i] for i in bitmap.get_indices_list())

    until_ended(in_flight, poll)
    return sorted(rows)


_FS, _NATIVE = (partial(LmcacheFs, config) for config in (FSL2AdapterConfig, FSNativeL2AdapterConfig))
OFF = "its AES-GCM serde, which is opt-in, is off"
ADAPTERS = {
    "lmcache": Adapter(version("lmcache"), f'`{{"type": "fs"}}`, defaults; {OFF}', partial(_FS, {})),
    "lmcache-aesgcm": Adapter(
        version("lmcache"), "`fs` with `serde` `aesgcm`, a master key of 32 bytes", LmcacheEncrypted
    ),
    "lmcache-direct": Adapter(
        version("lmcache"), f"`fs` with `use_odirect`; {OFF}", partial(_FS, {"use_odirect": True})
    ),
    "lmcache-native": Adapter(
        version("lmcache"), f"`fs_native` with `use_odirect`; {OFF}", partial(_NATIVE, {"use_odirect": True})
    ),
}
