"""Adapters of SGLang's `file` backend and of kvoffload in SGLang to `contract`.

Created by SGLang's factory and called as by its cache controller, with SGLang's host pool: a block is a page
of the pool. Needs the environment of tools/engines_env.sh.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sglang.srt import runtime_context
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.storage import StorageBackendFactory

from kvoffload import __version__
from kvoffload.tiers.disk.slab_layout import LOCK_FILE_BYTES, Layout
from peers.contract import Adapter, File, Place, Pool, files_to_unreadable, key
from peers.kvoffload_disk import BadSectors, journal_pages, journal_places

logging.disable(logging.ERROR)
runtime_context.get_parallel().override_permanently(
    attn_dcp_size=1, attn_dcp_rank=0, tp_rank=0, tp_size=1, pp_rank=0, pp_size=1
)
PAGE, LAYERS, HEADS = 16, 2, 2


class SglangStorage:
    """A `Product` with SGLang's host pool; a block is a page of the pool."""

    pool: Pool

    def __init__(
        self, directory: Path, model: str, block_bytes: int, num_blocks: int, extra: dict[str, Any]
    ) -> None:
        head_dim = block_bytes // (2 * LAYERS * HEADS * PAGE * 2)
        device = MHATokenToKVPool(
            size=PAGE, page_size=PAGE, dtype=torch.bfloat16, head_num=HEADS, head_dim=head_dim,
            layer_num=LAYERS, device="cpu", enable_memory_saver=False,
        )  # fmt: skip
        self._host = MHATokenToKVPoolHost(
            device.get_device_pool_infos()[0].buffer_info, float(num_blocks), 0, PAGE, "page_first",
            pin_memory=False, device_capacity_tokens=device.size, start_layer=0, end_layer=LAYERS - 1,
        )  # fmt: skip
        self.pool = np.empty((num_blocks, block_bytes), np.uint8)
        config = HiCacheStorageConfig(
            tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, is_mla_model=False,
            enable_storage_metrics=False, is_page_first_layout=True, model_name=model, extra_config=extra,
        )  # fmt: skip
        self._directory = directory
        backend = "dynamic" if "module_path" in extra else "file"
        self._storage: Any = StorageBackendFactory.create_backend(backend, config, self._host)
        self._storage.register_mem_pool_host(self._host)
        self._storage.on_host_pools_registered()

    def _data(self, row: int) -> Any:
        return torch.from_numpy(self.pool[row]).view(torch.bfloat16)

    def write(self, numbers: Sequence[int], blocks_per_job: int) -> list[bool]:
        stored = []
        for row, number in enumerate(numbers):
            self._host.set_from_flat_data_page(row * PAGE, self._data(row))
            stored.append(self._set(row, key(number).hex()))
        return stored

    def read(self, numbers: Sequence[int], blocks_per_job: int) -> list[bool]:
        loaded = []
        for row, number in enumerate(numbers):
            name = key(number).hex()
            loaded.append(self._storage.batch_exists([name]) == 1 and self._get(row, name))
            if loaded[-1]:
                self.pool[row] = self._host.get_data_page(row * PAGE).view(torch.uint8).numpy()
        return loaded

    def _indices(self, row: int) -> Any:
        return torch.arange(row * PAGE, (row + 1) * PAGE)

    def _set(self, row: int, name: str) -> bool:
        return bool(self._storage.batch_set([name], [self._host.get_data_page(row * PAGE)]))

    def _get(self, row: int, name: str) -> bool:
        """Load a page as the controller's `_generic_page_get`, which reports an exception as a miss."""
        try:
            (page,) = self._storage.batch_get([name], [self._host.get_dummy_flat_data_page()])
        except Exception:
            return False
        if page is not None:
            self._host.set_from_flat_data_page(row * PAGE, page)
        return page is not None

    def close(self) -> None:
        close = getattr(self._storage, "close", None)
        if close is not None:
            close()


class SglangFile(SglangStorage):
    """A `Product`: SGLang's `file` backend."""

    def __init__(self, directory: Path, model: str, block_bytes: int, num_blocks: int) -> None:
        super().__init__(directory, model, block_bytes, num_blocks, {"file_storage_path": str(directory)})

    def _path(self, number: int) -> Path:
        name: str = self._storage._get_suffixed_key(key(number).hex())
        return self._directory / f"{name}.bin"

    def forget(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._path(number).unlink()

    def places(self, numbers: Sequence[int]) -> dict[int, Place]:
        paths = {number: self._path(number) for number in numbers}
        return {
            n: Place(File(str(path)), 0, path.stat().st_size) for n, path in paths.items() if path.exists()
        }

    def records(self) -> list[Place]:
        """Return nothing: the metadata are the file names."""
        return []

    def make_unreadable(self, places: Sequence[Place]) -> None:
        files_to_unreadable(places)


class KvoffloadInSglang(SglangStorage):
    """A `Product`: our backend in SGLang, through interface v1."""

    def __init__(self, directory: Path, model: str, block_bytes: int, num_blocks: int) -> None:
        half = block_bytes // 2  # K and V of a page are separate blocks
        self._layout = Layout.holding(half, 34, 2 * num_blocks)
        capacity = self._layout.file_bytes + LOCK_FILE_BYTES
        self._files = BadSectors()
        super().__init__(
            directory, model, block_bytes, num_blocks,
            {
                "backend_name": "kvoffload", "module_path": "kvoffload.integrations.sglang",
                "class_name": "KVOffloadStorage", "interface_v1": 1, "identity": model,
                "tiers": [f"disk:{directory}:{capacity}"],
            },
        )  # fmt: skip
        (tier,) = self._storage.store.tiers
        self._slab = tier.inner._slab
        self._slab._files = self._files

    def _set(self, row: int, name: str) -> bool:
        return bool(self._storage.batch_set_v1([name], self._indices(row))[0])

    def _get(self, row: int, name: str) -> bool:
        return bool(self._storage.batch_get_v1([name], self._indices(row))[0])

    def forget(self, numbers: Sequence[int]) -> None:
        names = self._storage._keys("kv", [key(number).hex() for number in numbers])
        self._storage.store.delete(names, self.pool.shape[1])
        self._storage.store.tiers[0].drain(60.0)

    def places(self, numbers: Sequence[int]) -> dict[int, Place]:
        """Locate the first block of each page by the journal."""
        names = self._storage._keys("kv", [key(number).hex() for number in numbers])
        wanted = dict(zip((name + b"\0\0" for name in names), numbers, strict=True))
        return journal_places(self._path, self._slab.layout, wanted)

    @property
    def _path(self) -> Path:
        (path,) = self._directory.glob("*.slab")
        return path

    def records(self) -> list[Place]:
        return journal_pages(self._path, self._slab.layout)

    def make_unreadable(self, places: Sequence[Place]) -> None:
        self._files.ranges += [(place.offset, place.end) for place in places]


_INTERFACE = "driven through the interface of its controller"
ADAPTERS = {
    "sglang": Adapter(version("sglang"), f"`file`, defaults; {_INTERFACE}", SglangFile),
    "kvoffload-sglang": Adapter(
        __version__, f"`KVOffloadStorage`, a disk; {_INTERFACE} v1", KvoffloadInSglang
    ),
}
