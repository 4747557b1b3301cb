"""Adapter of `kvoffload.open` with a disk to `contract`: `request.store_from` and `load_into`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import kvoffload
from kvoffload.cache.key_chain import KEY_BYTES, KeyChain
from kvoffload.cache.owner import Limit
from kvoffload.structures.keys import Keys
from kvoffload.tiers.disk.slab_layout import LOCK_FILE_BYTES, Layout
from peers.contract import Adapter, Place, Pool, page_aligned
from peers.kvoffload_disk import BadSectors, journal_pages, journal_places

TOKENS = 16
PATIENCE_S = 60.0


class KvoffloadOpen:
    """A `Product`: `kvoffload.open`. Each block is a separate prompt. `read` empties RAM first."""

    pool: Pool

    def __init__(self, directory: Path, model: str, block_bytes: int, num_blocks: int) -> None:
        self.pool = page_aligned(num_blocks, block_bytes)
        self._kv = [self.pool.reshape(num_blocks, TOKENS, -1)]
        self._open(directory, model, kvoffload.KVLayout.of(self._kv, "block token dim"), num_blocks)

    def _open(self, directory: Path, model: str, layout: kvoffload.KVLayout, num_blocks: int) -> None:
        self._directory, self._files = directory, BadSectors()
        self._slab = Layout.holding(layout.block_bytes, KEY_BYTES, num_blocks)
        self._cache = kvoffload.open(
            model=model,
            layout=layout,
            ram=2 * num_blocks * layout.block_bytes,
            tiers=[f"disk:{directory}:{self._slab.file_bytes + LOCK_FILE_BYTES}"],
            deadline_s=PATIENCE_S,
        )
        disk: Any = self._cache.manager.lanes[0].tier.inner
        disk._slab._files = self._files

    def write(self, numbers: Sequence[int], blocks_per_job: int) -> list[bool]:
        for row, number in enumerate(numbers):
            with self._cache.request(self.prompt(number)) as request:
                request.store_from(self._kv, [row])
        return [self._cache.flush(PATIENCE_S)] * len(numbers)

    def read(self, numbers: Sequence[int], blocks_per_job: int) -> list[bool]:
        self._empty_ram()
        loaded = []
        for row, number in enumerate(numbers):
            self._end_pause()
            with self._cache.request(self.prompt(number)) as request:
                loaded.append(request.load_into(self._kv, [row]) == TOKENS)
        return loaded

    def forget(self, numbers: Sequence[int]) -> None:
        self._empty_ram()
        keys = Keys.pack([self.key(number) for number in numbers], KEY_BYTES)
        tier = self._cache.manager.lanes[0].tier
        self._owned(lambda: (tier.delete(keys), tier.drain(PATIENCE_S)))

    def prompt(self, number: int) -> list[int]:
        """Return the tokens of a block, and one more token."""
        return [int(token) for token in np.random.default_rng(number).integers(2, 97, TOKENS + 1)]

    def key(self, number: int) -> bytes:
        chain = KeyChain(TOKENS, self.salt)
        chain.extend(self.prompt(number))
        return chain.keys[0]

    salt = ""

    def places(self, numbers: Sequence[int]) -> dict[int, Place]:
        """Locate blocks by the journal."""
        wanted = {self.key(number): number for number in numbers}
        return journal_places(self._path, self._slab, wanted)

    @property
    def _path(self) -> Path:
        (path,) = self._directory.glob("*.slab")
        return path

    def records(self) -> list[Place]:
        return journal_pages(self._path, self._slab)

    def make_unreadable(self, places: Sequence[Place]) -> None:
        self._files.ranges += [(place.offset, place.end) for place in places]

    def close(self) -> None:
        self._cache.close()

    def _empty_ram(self) -> None:
        self._cache.flush(PATIENCE_S)
        ram = self._cache.manager.ram_manager
        self._owned(lambda: ram.discard(ram.index.keys_at(ram.slots.ready())))

    def _end_pause(self) -> None:
        """End the pause of 10 s that a tier makes after three reads in a row without a sound block."""
        self._cache.manager.lanes[0]._next_try = 0.0

    def _owned(self, call: Callable[[], Any]) -> None:
        """Run a call of the manager on the cache's own thread."""

        async def job() -> None:
            call()

        self._cache._owner.run(job(), Limit(PATIENCE_S))


ADAPTERS = {
    "kvoffload-open": Adapter(
        kvoffload.__version__,
        "`kvoffload.open`, a disk, through `request.load_into`; no pause of 10 s after three failed reads",
        KvoffloadOpen,
    )
}
