"""Adapter of spoolcache's file store, `TokenFileStore`, to `contract`, without vLLM.

spoolcache's connector needs CUDA; the store does not. A block is a chain of one file of 256 tokens. As in the
connector, each deployment has its own root, named by a digest of the model.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from spoolcache.config import STAGING_SLOT_BYTES, aligned_chunk_tokens
from spoolcache.errors import ManifestError
from spoolcache.hma import GroupGeometry, HMALayout, LayerGeometry
from spoolcache.token_files import TokenFileStore

from peers.contract import Adapter, File, Place, files_to_unreadable, key, page_aligned

TOKENS_PER_PAGE = 16
CHUNK_TOKENS = aligned_chunk_tokens(TOKENS_PER_PAGE)


class Spoolcache:
    """A `Product`: spoolcache's file store."""

    def __init__(self, directory: Path, model: str, block_bytes: int, num_blocks: int) -> None:
        self.pool = page_aligned(num_blocks, block_bytes)
        layout = _layout(block_bytes, num_blocks)
        deployment = hashlib.sha256(model.encode()).hexdigest()
        self._root = directory / deployment / "rank-0000"
        self._root.mkdir(parents=True, exist_ok=True)
        self._store = TokenFileStore(
            self._root,
            layout=layout,
            slot_bytes=STAGING_SLOT_BYTES,
            expected_deployment_digest=deployment,
            expected_rank_digest=hashlib.sha256(b"rank 0").hexdigest(),
            expected_rank=0,
            expected_topology_digest=hashlib.sha256(b"one worker").hexdigest(),
            expected_profile=layout.profile,
            expected_layout_digest=layout.digest,
        )

    def write(self, numbers: Sequence[int], blocks_per_job: int) -> list[bool]:
        """Store one file after the other, as for a chain."""
        stored = []
        for row, number in enumerate(numbers):
            try:
                if self._store.valid_chunk(_key(number), None, CHUNK_TOKENS) is None:
                    self._store.commit_chunk(_key(number), None, CHUNK_TOKENS, self.pool[row].data)
            except (OSError, ManifestError):
                stored.append(False)
            else:
                stored.append(True)
        return stored

    def read(self, numbers: Sequence[int], blocks_per_job: int) -> list[bool]:
        return [self._read(number, row) for row, number in enumerate(numbers)]

    def _read(self, number: int, row: int) -> bool:
        """Restore a chain as the connector does: pin a view, then read every file into its row."""

        @contextmanager
        def receiver(_: Any) -> Iterator[Any]:
            yield lambda view: self.pool[row].__setitem__(slice(None), np.frombuffer(view, np.uint8))

        try:
            with self._store.restore_view(_key(number)) as view:
                if not view.result.is_hit:
                    return False
                self._store.stream_objects(view.descriptors, receiver, lease=view)
        except (OSError, ManifestError):
            return False
        return True

    def forget(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._store.evict(_key(number))

    def _path(self, number: int) -> Path:
        return self._root / "manifests" / _key(number)[:2] / f"{_key(number)}.kv"

    def places(self, numbers: Sequence[int]) -> dict[int, Place]:
        """Locate existing files, with their headers."""
        paths = {number: self._path(number) for number in numbers}
        return {
            number: Place(File(str(path)), 0, os.path.getsize(path))
            for number, path in paths.items()
            if path.exists()
        }

    def records(self) -> list[Place]:
        path = self._root / "state" / "token-format.json"
        return [Place(File(str(path)), 0, os.path.getsize(path))]

    def make_unreadable(self, places: Sequence[Place]) -> None:
        files_to_unreadable(places)

    def close(self) -> None:
        self._store.close()


def _key(number: int) -> str:
    return key(number).hex()


def _layout(block_bytes: int, num_blocks: int) -> HMALayout:
    """Make a layout of one layer; 16 pages of 16 tokens are a block of 256."""
    page_bytes = block_bytes * TOKENS_PER_PAGE // CHUNK_TOKENS
    layer = LayerGeometry("layer.0", "FullAttentionSpec", page_bytes)
    group = GroupGeometry(
        group_index=0,
        spec_name="FullAttentionSpec",
        block_size=TOKENS_PER_PAGE,
        storage_block_size=TOKENS_PER_PAGE,
        manager_page_size_bytes=page_bytes,
        dcp_replicated=False,
        dcp_shard_count=1,
        logical_tokens_per_page=TOKENS_PER_PAGE,
        reuse_policy="full",
        reuse_window_tokens=None,
        running_state_tail_pages=0,
        is_eagle_group=False,
        layers=(layer,),
    )
    return HMALayout(num_blocks, 1, (group,))


ADAPTERS = {
    "spoolcache": Adapter(
        version("spoolcache"),
        "its store of files without its connector; every file is synced, every read verified",
        Spoolcache,
    )
}
