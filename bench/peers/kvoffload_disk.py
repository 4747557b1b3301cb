"""Adapter of kvoffload's disk tier to `contract`."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

from kvoffload.tiers.disk import DiskTier
from kvoffload.tiers.disk.files import PAGE_BYTES, Buffers, Files
from kvoffload.tiers.disk.recovery import recover
from kvoffload.tiers.disk.slab import Slab
from kvoffload.tiers.disk.slab_directory import Geometry
from kvoffload.tiers.disk.slab_layout import LOCK_FILE_BYTES, Layout
from kvoffload.tiers.rate_limited_log import RateLimitedLog
from peers.contract import KEY_BYTES, Adapter, File, Place, key, page_aligned
from peers.kvoffload_tier import KvoffloadTier, keys_of


class BadSectors(Files):
    """Fails reads of certain ranges of the slab with EIO."""

    def __init__(self) -> None:
        self.ranges: list[tuple[int, int]] = []

    def read(self, fd: int, buffers: Buffers, offset: int) -> int:
        end = offset + sum(len(buffer) for buffer in buffers)
        if any(first < end and offset < last for first, last in self.ranges):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().read(fd, buffers, offset)


class KvoffloadDisk(KvoffloadTier):
    """A `Product`: kvoffload's disk tier."""

    def __init__(self, directory: Path, model: str, block_bytes: int, num_blocks: int) -> None:
        self._layout = Layout.holding(block_bytes, KEY_BYTES, num_blocks)
        self._files = BadSectors()
        self.pool = page_aligned(num_blocks, block_bytes)
        self._tier = DiskTier(
            directory,
            self._layout.file_bytes + LOCK_FILE_BYTES,
            block_bytes,
            key_bytes=KEY_BYTES,
            fingerprint=model,
            files=self._files,
        )
        self._path = directory / Geometry(self._layout, 0, model).slab_name

    def forget(self, numbers: Sequence[int]) -> None:
        self._tier.delete(keys_of(numbers))
        self._tier.drain(60.0)

    def places(self, numbers: Sequence[int]) -> dict[int, Place]:
        """Locate blocks by the journal."""
        wanted = {key(number): number for number in numbers}
        return journal_places(self._path, self._layout, wanted)

    def records(self) -> list[Place]:
        return journal_pages(self._path, self._layout)

    def make_unreadable(self, places: Sequence[Place]) -> None:
        self._files.ranges += [(place.offset, place.end) for place in places]


def journal_places(path: Path, layout: Layout, wanted: Mapping[bytes, int]) -> dict[int, Place]:
    """Locate blocks by the journal. `wanted`: number of each block, by key."""
    slab = Slab.open(path, Files(), RateLimitedLog(__name__), read_only=True)
    assert isinstance(slab, Slab), slab
    with contextlib.closing(slab):
        contents = recover(slab).contents
    slots, places = contents.slots(), {}
    for name, slot in zip(contents.keys(slots), slots.tolist(), strict=True):
        if name in wanted:
            offset = layout.slot_offset(slot)
            places[wanted[name]] = Place(File(str(path)), offset, offset + layout.block_bytes)
    return places


def journal_pages(path: Path, layout: Layout) -> list[Place]:
    """Return all used pages of checkpoints and log."""
    pages = []
    with open(path, "rb") as slab:
        for offset in range(2 * PAGE_BYTES, layout.slots_offset, PAGE_BYTES):
            slab.seek(offset)
            if any(page := slab.read(PAGE_BYTES)):
                used = len(page.rstrip(b"\0"))
                pages.append(Place(File(str(path)), offset, offset + used))
    return pages


ADAPTERS = {
    "kvoffload": Adapter(
        version("kvoffload"), "`DiskTier`, defaults: a slab, synced before a write is reported", KvoffloadDisk
    )
}
