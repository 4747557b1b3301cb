"""Adapter of Mooncake's store to `contract`: its client, with a master that stores objects in files.

A put goes to memory and later to a file in the master's ``root_fs_dir``. A read prefers memory, so `read`
first evicts the memory, as the master does when memory is short. The master outlives a client.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from mooncake.store import MooncakeDistributedStore

from peers.contract import TIMEOUT_S, Adapter, File, Place, files_to_unreadable, key, page_aligned
from peers.doors import namespace, server

_SEGMENT_BYTES = 64 << 20
_FILES_TIMEOUT_S = 10.0


class MooncakeFiles:
    """A `Product`: Mooncake's store. Its keys contain the scene and the model."""

    def __init__(self, directory: Path, model: str, block_bytes: int, num_blocks: int) -> None:
        self.pool = page_aligned(num_blocks, block_bytes)
        rpc, metadata, root = server().split(" ", 2)
        self._root, self._block_bytes = Path(root), block_bytes
        self._prefix = f"{namespace(directory)}@{model.replace('/', '--')}@"
        self._in_memory: set[str] = set()
        self._store = MooncakeDistributedStore()
        failed = self._store.setup(
            "127.0.0.1", f"http://127.0.0.1:{metadata}/metadata", _SEGMENT_BYTES, _SEGMENT_BYTES, "tcp", "",
            f"127.0.0.1:{rpc}",
        )  # fmt: skip
        if failed:
            raise OSError(f"the client does not start: error {failed}")

    def _key(self, number: int) -> str:
        return self._prefix + key(number).hex()

    def write(self, numbers: Sequence[int], blocks_per_job: int) -> list[bool]:
        stored = [
            not self._store.put(self._key(number), self.pool[row].tobytes())
            for row, number in enumerate(numbers)
        ]
        self._in_memory.update(self._key(number) for number, ok in zip(numbers, stored, strict=True) if ok)
        return stored

    def read(self, numbers: Sequence[int], blocks_per_job: int) -> list[bool]:
        self._evict_memory()
        return [self._read(number, row) for row, number in enumerate(numbers)]

    def _read(self, number: int, row: int) -> bool:
        if self._store.is_exist(self._key(number)) != 1:
            return False
        block = self._store.get(self._key(number))
        self.pool[row, : len(block)] = bytearray(block)
        return len(block) > 0

    def _evict_memory(self) -> None:
        """Wait for leases to expire, and let the master evict all written blocks from memory."""
        deadline = time.monotonic() + TIMEOUT_S
        while self._in_memory:
            cleared = self._store.batch_replica_clear([*self._in_memory], self._store.get_hostname())
            self._in_memory.difference_update(cleared)
            if time.monotonic() > deadline:
                raise TimeoutError(f"{len(self._in_memory)} blocks stay in memory")
            time.sleep(0.05)

    def forget(self, numbers: Sequence[int]) -> None:
        self._evict_memory()
        for number in numbers:
            while self._store.remove(self._key(number)):
                time.sleep(0.05)  # a read holds a lease

    def places(self, numbers: Sequence[int]) -> dict[int, Place]:
        """Locate complete files."""
        deadline, places = time.monotonic() + _FILES_TIMEOUT_S, dict[int, Place]()
        while len(places) < len(numbers) and time.monotonic() < deadline:
            # Mooncake replaces characters of the key in the file name.
            files = {path.name[-64:]: path for path in self._root.rglob(f"{self._prefix[:20]}*")}
            for number in numbers:
                path = files.get(key(number).hex())
                if path is not None and os.path.getsize(path) == self._block_bytes:
                    places[number] = Place(File(str(path)), 0, self._block_bytes)
            time.sleep(0.05)
        return places

    def records(self) -> list[Place]:
        return []

    def make_unreadable(self, places: Sequence[Place]) -> None:
        files_to_unreadable(places)

    def close(self) -> None:
        self._store.close()


class MooncakeChecked(MooncakeFiles):
    """A `Product`: Mooncake's store with checksums of objects, which are off by default."""

    def __init__(self, directory: Path, model: str, block_bytes: int, num_blocks: int) -> None:
        os.environ["MOONCAKE_STORE_CHECKSUM"] = "1"
        super().__init__(directory, model, block_bytes, num_blocks)


_VERSION = version("mooncake-transfer-engine-non-cuda")
_CONFIGURATION = "its master with `--root_fs_dir`, TCP; reads from its files, after memory was evicted"
ADAPTERS = {
    "mooncake": Adapter(_VERSION, _CONFIGURATION, MooncakeFiles),
    "mooncake-checked": Adapter(_VERSION, f"{_CONFIGURATION}; `MOONCAKE_STORE_CHECKSUM=1`", MooncakeChecked),
}
