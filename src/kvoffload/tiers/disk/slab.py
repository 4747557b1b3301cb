"""The slab of one directory: a file of slots of one size, read and written in runs of neighbours.

Owns the file, the headers of blocks and their verification. Does not know which slots hold something, nor
who may overwrite one: the journal and the volume do.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest as xxh3

from kvoffload.core.keys import Keys
from kvoffload.errors import ConfigError
from kvoffload.tiers.base import Mask
from kvoffload.tiers.checksum import checksums
from kvoffload.tiers.disk.files import PAGE_BYTES, Buffers, Files, aligned
from kvoffload.tiers.disk.format import (
    Bytes,
    Head,
    Identity,
    Records,
    decode_superblock,
    encode_head,
    encode_superblock,
    fill_headers,
)
from kvoffload.tiers.disk.layout import Layout, header_dtype
from kvoffload.tiers.disk.notices import Notices
from kvoffload.transfer import Blocks
from kvoffload.transfer.copies import address_of

SLAB_NAME = "kvoffload.slab"
CHUNK_BYTES = 4 * 1024 * 1024
"""Asked of the system in one call. More gains nothing, and a thread is busy longer."""
MAX_RUN_BLOCKS = 500
"""A header and a block are two buffers, and a call takes 1024."""

SOUND, UNREADABLE, MISMATCH = 0, 1, 2
"""What reading a block came to: verified; the medium failed; not what was stored under this key."""

Outcomes = npt.NDArray[np.uint8]
Positions = npt.NDArray[np.int64]
_PIECE_BYTES = 1024 * 1024


class Scratch:
    """Memory of one thread: aligned pages for headers, and a block for those that lie badly in theirs."""

    def __init__(self, layout: Layout) -> None:
        self.num_blocks = min(MAX_RUN_BLOCKS, max(1, CHUNK_BYTES // layout.slot_bytes))
        memory = aligned(self.num_blocks * PAGE_BYTES)
        dtype = header_dtype(layout.key_bytes)
        self.pages = list(memory.reshape(self.num_blocks, PAGE_BYTES))
        self.headers: Records = np.ndarray((self.num_blocks,), dtype, memory, strides=(PAGE_BYTES,))
        self._bounce: Bytes | None = None
        self._layout = layout

    def bounce(self, num_blocks: int) -> Bytes:
        """A block's worth of whole pages for each of so many headers; made when first asked for."""
        if self._bounce is None:
            size = self._layout.slot_bytes - PAGE_BYTES
            self._bounce = aligned(self.num_blocks * size).reshape(self.num_blocks, size)
        return self._bounce[:num_blocks]


class Slab:
    """An open slab.

    Reading and writing blocks never raises for what the medium does: it answers. Reading and writing pages,
    which the journal is made of, and `sync` raise `OSError`.

    Thread: any, each with its own `Scratch`, for different slots.

    Attributes:
        layout, identity, capacity_bytes: as its superblock says.
    """

    def __init__(
        self, fd: int, layout: Layout, identity: Identity, capacity_bytes: int, files: Files, notices: Notices
    ) -> None:
        self.layout, self.identity, self.capacity_bytes = layout, identity, capacity_bytes
        self._fd, self._files, self._notices = fd, files, notices
        self._slots_offset, self._slot_bytes = layout.slots_offset, layout.slot_bytes
        self._header_dtype = header_dtype(layout.key_bytes)

    @classmethod
    def create(
        cls,
        path: Path,
        layout: Layout,
        identity: Identity,
        capacity_bytes: int,
        files: Files,
        notices: Notices,
    ) -> Slab:
        """Make a slab where there is none, all of its room reserved. Raises `ConfigError`.

        It gets its name when it is whole: a crash on the way leaves ``kvoffload.slab.new``, which the next
        attempt replaces.
        """
        unfinished = path.with_name(path.name + ".new")
        try:
            unfinished.unlink(missing_ok=True)
            fd = files.open(unfinished, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise ConfigError(
                "path", str(path.parent), f"a directory that can be written ({error.strerror})"
            ) from None
        slab = cls(fd, layout, identity, capacity_bytes, files, notices)
        try:
            files.allocate(fd, layout.file_bytes)
            page = aligned(PAGE_BYTES)
            page[:] = encode_superblock(layout, identity, capacity_bytes)
            slab.write_pages(0, page)
            slab.write_pages(PAGE_BYTES, page)
            page[:] = encode_head(identity.slab_id, Head(0, 0, 0))
            slab.write_pages(layout.checkpoint_offset(0), page)
            slab.write_pages(layout.checkpoint_offset(0) + layout.checkpoint_bytes - PAGE_BYTES, page)
            slab.sync()
            os.rename(unfinished, path)
            files.sync_directory(path.parent)
        except OSError as error:
            slab.close()
            unfinished.unlink(missing_ok=True)
            why = f"{path.parent} cannot give that much ({error.strerror})"
            raise ConfigError("capacity_bytes", capacity_bytes, why) from None
        return slab

    @classmethod
    def open(cls, path: Path, files: Files, notices: Notices, *, read_only: bool = False) -> Slab | str:
        """Open a slab; or why it is none that this version can use. Raises `OSError`."""
        fd = files.open(path, os.O_RDONLY if read_only else os.O_RDWR)
        reason = "it is too short to be a slab"
        try:
            for offset in (0, PAGE_BYTES):
                page = aligned(PAGE_BYTES)
                try:
                    transfer(files.read, fd, [page], offset)
                except OSError:
                    continue
                found = decode_superblock(page)
                if not isinstance(found, str):
                    slab, fd = cls(fd, *found, files, notices), -1
                    return slab
                reason = found
        finally:
            if fd >= 0:
                files.close(fd)
        return reason

    # ---- blocks

    def write_blocks(
        self, keys: Keys, slots: Positions, generations: npt.NDArray[np.uint64],
        pool: Blocks, rows: Positions, scratch: Scratch, written_at_s: int,
    ) -> Mask:  # fmt: skip
        """Write ``pool[rows[i]]`` into ``slots[i]``, ascending; which were, though not yet durably.

        At most `Scratch.num_blocks` of them. Cost: a pass over the bytes for checksums, then one call
        of the system for each run of neighbours.
        """
        headers = scratch.headers[: len(slots)]
        fill_headers(
            headers,
            self.identity.fingerprint,
            self.layout.block_bytes,
            keys,
            slots,
            generations,
            written_at_s,
        )
        blocks = [pool[row] for row in rows.tolist()]
        headers["checksum"] = self._checksums(headers, address_of(pool) + rows * pool.strides[0])
        if self._in_place(pool):
            padded = blocks
        else:
            padded = list(scratch.bounce(len(blocks)))
            for i, block in enumerate(blocks):
                padded[i][: len(block)] = block
                padded[i][len(block) :] = 0
        return self._each_run(self._files.write, slots, scratch, padded)

    def read_blocks(
        self, keys: Keys, slots: Positions, generations: npt.NDArray[np.uint64],
        pool: Blocks, rows: Positions, scratch: Scratch,
    ) -> Outcomes:  # fmt: skip
        """Read ``slots[i]``, ascending, into ``pool[rows[i]]``, and verify; how each one went.

        Key, fingerprint, slot, length and generation are compared, and the checksum over them and the
        bytes. A row whose outcome is not `SOUND` holds anything.
        """
        blocks = [pool[row] for row in rows.tolist()]
        if self._in_place(pool):
            padded, at = blocks, address_of(pool) + rows * pool.strides[0]
        else:
            bounce = scratch.bounce(len(blocks))
            padded, at = list(bounce), address_of(bounce) + np.arange(len(blocks)) * bounce.strides[0]
        there = self._each_run(self._files.read, slots, scratch, padded)
        found = np.ascontiguousarray(scratch.headers[: len(slots)])
        said = found["checksum"].copy()
        expected = np.zeros(len(slots), self._header_dtype)
        fill_headers(
            expected, self.identity.fingerprint, self.layout.block_bytes, keys, slots, generations,
            found["written_at_s"],
        )  # fmt: skip
        found["checksum"] = 0
        width = self._header_dtype.itemsize
        sound = (found.view(np.uint8).reshape(-1, width) == expected.view(np.uint8).reshape(-1, width)).all(1)
        sound[there] &= self._checksums(found[there], at[there]) == said[there]
        if padded is not blocks:
            for i in np.flatnonzero(there & sound).tolist():
                blocks[i][:] = padded[i][: len(blocks[i])]
        outcomes: Outcomes = np.where(sound, np.uint8(SOUND), np.uint8(MISMATCH))
        outcomes[~there] = UNREADABLE
        return outcomes

    def _checksums(self, headers: Records, addresses: Positions) -> npt.NDArray[np.uint64]:
        """What `chained_checksum` is, of headers whose checksum is 0 and the blocks at these addresses."""
        packed, width = headers.tobytes(), self._header_dtype.itemsize
        seeds = [xxh3(packed[at : at + width]) for at in range(0, len(packed), width)]
        return checksums(addresses, self.layout.block_bytes, np.array(seeds, np.uint64))

    def read_header(self, slot: int, scratch: Scratch) -> Any:
        """The header of a slot as it stands there, unverified. Raises `OSError`."""
        transfer(self._files.read, self._fd, scratch.pages[:1], self._slots_offset + slot * self._slot_bytes)
        return scratch.headers[0].copy()

    def _in_place(self, pool: Blocks) -> bool:
        """Whether rows of this pool can be given to direct I/O as they are."""
        address: int = pool.__array_interface__["data"][0]
        return (address | pool.strides[0] | self.layout.block_bytes) % PAGE_BYTES == 0

    def _each_run(
        self,
        operation: Callable[[int, Buffers, int], int],
        slots: Positions,
        scratch: Scratch,
        blocks: list[Bytes],
    ) -> Mask:
        """Move header and block of each slot, a run of neighbours in one go; which were moved."""
        moved = np.zeros(len(slots), np.bool_)
        for first, end in _runs(slots):
            try:
                self._move(operation, slots, scratch, blocks, first, end)
                moved[first:end] = True
            except OSError as error:
                self._complain(operation, error)
                # One bad sector must not cost its neighbours. The rest of what can fail fails for all.
                if error.errno == errno.EIO and end - first > 1:
                    for i in range(first, end):
                        try:
                            self._move(operation, slots, scratch, blocks, i, i + 1)
                            moved[i] = True
                        except OSError as again:
                            self._complain(operation, again)
        return moved

    def _move(
        self, operation: Callable[[int, Buffers, int], int], slots: Positions, scratch: Scratch,
        blocks: list[Bytes], first: int, end: int,
    ) -> None:  # fmt: skip
        buffers = [part for i in range(first, end) for part in (scratch.pages[i], blocks[i])]
        transfer(operation, self._fd, buffers, self._slots_offset + int(slots[first]) * self._slot_bytes)

    def _complain(self, operation: Callable[..., int], error: OSError) -> None:
        verb = operation.__name__
        self._notices.warn(f"{verb} {error.errno}", "disk tier: cannot %s blocks: %s", verb, error.strerror)

    # ---- pages

    def read_pages(self, offset: int, num_bytes: int) -> tuple[Bytes, int]:
        """A part of the slab, and how many of its pages could not be read: those are zero."""
        memory, unreadable = aligned(num_bytes), 0
        for start in range(0, num_bytes, _PIECE_BYTES):
            piece = memory[start : min(start + _PIECE_BYTES, num_bytes)]
            try:
                transfer(self._files.read, self._fd, [piece], offset + start)
            except OSError:
                for at in range(0, len(piece), PAGE_BYTES):
                    try:
                        transfer(
                            self._files.read, self._fd, [piece[at : at + PAGE_BYTES]], offset + start + at
                        )
                    except OSError as error:
                        self._complain(self._files.read, error)
                        piece[at : at + PAGE_BYTES] = 0
                        unreadable += 1
        return memory[:num_bytes], unreadable

    def write_pages(self, offset: int, memory: Bytes) -> None:
        """Write whole pages of aligned memory. Raises `OSError`."""
        transfer(self._files.write, self._fd, [memory], offset)

    def sync(self) -> None:
        """Return when everything that was written before is on the medium. Raises `OSError`."""
        self._files.sync(self._fd)

    def complete(self) -> None:
        """Give a file that has been cut its length back; what was in the part is gone. Raises `OSError`."""
        if self._files.size(self._fd) < self.layout.file_bytes:
            self._notices.warn("short", "disk tier: the slab was cut short: what was there is lost")
            self._files.allocate(self._fd, self.layout.file_bytes)

    def close(self) -> None:
        """Let go of the file. Once more does nothing."""
        if self._fd >= 0:
            self._files.close(self._fd)
            self._fd = -1


def transfer(operation: Callable[[int, Buffers, int], int], fd: int, buffers: Buffers, offset: int) -> None:
    """Read or write all of `buffers`, in as many calls as it takes. `OSError`, also at the end of a file."""
    remaining = sum(len(buffer) for buffer in buffers)
    while True:
        moved = operation(fd, buffers, offset)
        remaining -= moved
        if remaining <= 0:
            return
        if moved <= 0:
            raise OSError(errno.EIO, "the file ends before its slots do")
        offset += moved
        buffers = list(_after(buffers, moved))


def _after(buffers: Buffers, num_bytes: int) -> Iterator[Any]:
    for buffer in buffers:
        if num_bytes < len(buffer):
            yield buffer[num_bytes:] if num_bytes else buffer
        num_bytes = max(0, num_bytes - len(buffer))


def _runs(slots: Positions) -> Iterator[tuple[int, int]]:
    """First and end of each run of neighbours in ascending slots."""
    breaks = (np.flatnonzero(np.diff(slots) != 1) + 1).tolist()
    return zip([0, *breaks], [*breaks, len(slots)], strict=True)


def now_s() -> int:
    """Seconds since 1970, as the slab has them."""
    return int(time.time())
