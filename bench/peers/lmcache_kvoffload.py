"""Adapter of kvoffload in LMCache to `contract`: LMCache's factory and calls with our disk tier.

Needs the environment of tools/engines_env.sh.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc
from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig

from kvoffload import __version__
from kvoffload.integrations.lmcache import _digest
from kvoffload.integrations.objects import KEY_BYTES
from kvoffload.tiers.disk.slab_layout import LOCK_FILE_BYTES, Layout
from peers.contract import Adapter, Place
from peers.kvoffload_disk import BadSectors, journal_pages, journal_places
from peers.lmcache_fs import LmcacheFs


class KvoffloadInLmcache(LmcacheFs):
    """A `Product`: `KVOffloadAdapter` in LMCache."""

    def __init__(self, directory: Path, model: str, block_bytes: int, num_blocks: int) -> None:
        self._directory, self._files = directory, BadSectors()
        self._layout = Layout.holding(block_bytes, KEY_BYTES, num_blocks)
        self._format = (block_bytes, "torch.uint8")
        config = PluginL2AdapterConfig.from_dict(
            {
                "module_path": "kvoffload.integrations.lmcache",
                "class_name": "KVOffloadAdapter",
                "adapter_params": {
                    "tiers": [f"disk:{directory}:{self._layout.file_bytes + LOCK_FILE_BYTES}"],
                    "block": block_bytes,
                },
            }
        )
        self._open(config, model, block_bytes, num_blocks)
        self.layouts = {0: MemoryLayoutDesc([torch.Size([block_bytes])], [torch.uint8])}
        (tier,) = self._adapter._store.tiers
        tier.inner._slab._files = self._files

    def forget(self, numbers: Sequence[int]) -> None:
        super().forget(numbers)
        self._adapter._store.tiers[0].drain(60.0)

    def places(self, numbers: Sequence[int]) -> dict[int, Place]:
        """Locate blocks by the journal."""
        wanted = {_digest(self._key(number), self._format) + b"\0\0": number for number in numbers}
        return journal_places(self._path, self._layout, wanted)

    @property
    def _path(self) -> Path:
        (path,) = self._directory.glob("*.slab")
        return path

    def records(self) -> list[Place]:
        return journal_pages(self._path, self._layout)

    def make_unreadable(self, places: Sequence[Place]) -> None:
        self._files.ranges += [(place.offset, place.end) for place in places]


ADAPTERS = {
    "kvoffload-lmcache": Adapter(
        __version__, f"`KVOffloadAdapter`, a disk, in LMCache {version('lmcache')}", KvoffloadInLmcache
    )
}
