"""LMCache's `fs` and `fs_native` adapters of its second level behind the calls of `contract`.

Made by its own factory and driven as its storage manager does it: look up and lock, load, unlock. `fs` also
below LMCache's AES-GCM serde, wrapped as its storage manager does it.
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
    """A `Product`."""

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
                [self._key(numbers[row]) for row in part], [self._objects[row] for row in part]
            ): part
            for part in parts(len(numbers), blocks_per_job)
        }
        stored = [False] * len(numbers)
        left = set(jobs)

        def poll() -> None:
            for job, result in self._adapter.pop_completed_store_tasks().items():
                left.discard(job)
                for row in jobs[job]:
                    stored[row] = result.is_successful()

        until_ended(left, poll)
        return stored

    def read(self, numbers: Sequence[int], blocks_per_job: int) -> list[bool]:
        keys = [self._key(number) for number in numbers]
        lookups = {
            self._adapter.submit_lookup_and_lock_task([keys[row] for row in part], self.layouts): list(part)
            for part in parts(len(keys), blocks_per_job)
        }
        found = _rows(lookups, self._adapter.query_lookup_and_lock_result)
        loads = {
            self._adapter.submit_load_task(
                [keys[row] for row in some], [self._objects[row] for row in some]
            ): some
            for part in parts(len(found), blocks_per_job)
            for some in [[found[i] for i in part]]
        }
        loaded = set(_rows(loads, self._adapter.query_load_result))
        self._adapter.submit_unlock([keys[row] for row in found])
        return [row in loaded for row in range(len(numbers))]

    def forget(self, numbers: Sequence[int]) -> None:
        self._adapter.delete([self._key(number) for number in numbers])

    def _key(self, number: int) -> Any:
        return ObjectKey(chunk_hash=key(number), model_name=self._model, kv_rank=0x01000100)

    def places(self, numbers: Sequence[int]) -> dict[int, Place]:
        """The files that exist."""
        found = {}
        for number in numbers:
            path = self._directory / _object_key_to_filename(self._key(number))
            if path.exists():
                found[number] = Place(File(str(path)), 0, path.stat().st_size)
        return found

    def records(self) -> list[Place]:
        """None: what it knows is in the names of its files."""
        return []

    def make_unreadable(self, places: Sequence[Place]) -> None:
        files_to_unreadable(places)

    def close(self) -> None:
        self._adapter.close()


class LmcacheEncrypted(LmcacheFs):
    """A `Product`: `fs` below the serde. Both models have the operator's one master key."""

    def __init__(self, directory: Path, model: str, block_bytes: int, num_blocks: int) -> None:
        master = directory.parent / "master-key"
        if not master.exists():
            master.write_bytes(bytes(range(32)))
        super().__init__(FSL2AdapterConfig, {}, directory, model, block_bytes, num_blocks)
        serde = create_serde_processor(SerdeConfig("aesgcm", {"master_key_path": str(master)}))
        memory = L1MemoryManagerConfig(2 * num_blocks * block_bytes + (1 << 20), use_lazy=False, shm_name="")
        self._adapter = SerdeL2AdapterWrapper(self._adapter, serde, L1Manager(L1ManagerConfig(memory)))


def _object(memory: Any, address: int) -> Any:
    """A memory object over one row of the pool, which their allocator does not know."""
    size = memory.numel()
    metadata = MemoryObjMetadata(
        shape=torch.Size([size]), dtype=torch.uint8, address=address, phy_size=size, ref_count=1,
        fmt=MemoryFormat.BINARY, shapes=[torch.Size([size])], dtypes=[torch.uint8],
    )  # fmt: skip
    return TensorMemoryObj(memory, metadata, parent_allocator=None)


def _rows(jobs: dict[int, list[int]], query: Callable[[int], Any]) -> list[int]:
    """The rows that the jobs' bitmaps name."""
    rows: list[int] = []
    left = set(jobs)

    def poll() -> None:
        for job in list(left):
            bitmap = query(job)
            if bitmap is not None:
                left.discard(job)
                rows.extend(jobs[job][i] for i in bitmap.get_indices_list())

    until_ended(left, poll)
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
