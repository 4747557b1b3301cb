"""A slab: a file of slots of one size, read and written in runs of consecutive slots.

Owns the file and verifies blocks. The journal and the tier own the metadata, and decide when a slot may be
overwritten.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvoffload.errors import UnavailableError
from kvoffload.structures.keys import Keys
from kvoffload.tiers.checksum import checksums
from kvoffload.tiers.contract import Checksums, Mask
from kvoffload.tiers.disk.files import PAGE_BYTES, Buffers, Files, aligned
from kvoffload.tiers.disk.room import Room
from kvoffload.tiers.disk.slab_format import (
    Bytes,
    Head,
    Identity,
    block_seeds,
    decode_superblock,
    encode_head,
    encode_superblock,
    revision_of,
    void_before,
)
from kvoffload.tiers.disk.slab_layout import Layout
from kvoffload.tiers.rate_limited_log import RateLimitedLog
from kvoffload.tiers.waiting import Backoff
from kvoffload.transfer import Blocks
from kvoffload.transfer.copies import address_of, coalesce

UNFINISHED = ".new"
"""Suffix of the file name of an incomplete slab."""
CHUNK_BYTES = 4 * 1024 * 1024
"""Limit of bytes per system call. Larger calls are not faster, and block a thread for longer."""
MAX_RUN_BLOCKS = 1000
"""Limit of blocks per system call. A call accepts at most 1024 buffers."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 300.0
"""First and longest pause after failed writes, in seconds. Each attempt to write evicts a block. Without
pauses, the attempts on a failing disk would soon have evicted all blocks."""

SOUND, UNREADABLE, MISMATCH, REFUSED = 0, 1, 2, 3
"""Outcomes of reading or writing a block. `SOUND`: written, or read and verified. `UNREADABLE`: the medium
failed (EIO). `MISMATCH`: read with a wrong checksum. `REFUSED`: another error of the system, often
transient (ENOMEM, ESTALE)."""

Outcomes = npt.NDArray[np.uint8]
Positions = npt.NDArray[np.int64]
_PIECE_BYTES = 1024 * 1024


class Scratch:
    """Aligned buffer of one thread, to copy blocks whose pool does not suit direct I/O."""

    def __init__(self, slab: Slab) -> None:
        self._shape = slab.chunk_blocks, slab.layout.slot_bytes
        self._pages: Bytes | None = None

    def pages(self, num_blocks: int) -> Bytes:
        """Return one row of whole pages for each of `num_blocks` blocks. The first call allocates."""
        if self._pages is None:
            self._pages = aligned(self._shape[0] * self._shape[1]).reshape(self._shape)
        return self._pages[:num_blocks]


class Slab:
    """An open slab.

    The file may be shorter than the layout if slabs of other producers share the directory. A write to a slot
    beyond the end of the file makes the file grow.

    If the read or write of a block fails, the call raises nothing and returns the failure as the block's
    outcome. `sync` and `write_pages` raise `OSError`.

    Thread: any. Concurrent calls must use different slots, and each thread must have its own `Scratch`.

    Attributes:
        layout, identity, capacity_bytes: contents of the superblock.
        room: limit of the file's size in a directory with other slabs; None if only the layout limits it.
        chunk_blocks: limit of blocks in one call.
    """

    def __init__(
        self, fd: int, superblock: Bytes, files: Files, log: RateLimitedLog, room: Room | None = None
    ) -> None:
        decoded = decode_superblock(superblock)
        assert not isinstance(decoded, str), decoded
        self.layout, self.identity, self.capacity_bytes = decoded
        self._superblock, layout = superblock, self.layout
        self._superblocks_at = 0, PAGE_BYTES
        self._fd, self._files, self._log = fd, files, log
        self.room, self._growing = room, threading.Lock()
        self._growth_backoff, self._may_grow_at_s = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S), 0.0
        self._num_reserved = layout.slots_before(files.size(fd))
        self.chunk_blocks = max(1, min(MAX_RUN_BLOCKS, CHUNK_BYTES // layout.slot_bytes))

    @classmethod
    def create(
        cls,
        path: Path,
        layout: Layout,
        identity: Identity,
        capacity_bytes: int,
        files: Files,
        log: RateLimitedLog,
        room: Room | None = None,
    ) -> Slab:
        """Create a slab and reserve its space. Raises `UnavailableError` if this fails.

        The complete file is renamed to `path`. A crash before the rename leaves a file with suffix ``.new``.
        """
        unfinished = path.with_name(path.name + UNFINISHED)
        try:
            unfinished.unlink(missing_ok=True)
            fd = files.open(unfinished, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise UnavailableError(
                "path", str(path.parent), f"no file can be created there ({error.strerror})"
            ) from None
        page = aligned(PAGE_BYTES)
        page[:] = encode_superblock(layout, identity, capacity_bytes)
        slab = cls(fd, page.copy(), files, log, room)
        try:
            slab.reserve_all()
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
            why = f"{path.parent} has not enough space ({error.strerror})"
            raise UnavailableError("capacity_bytes", capacity_bytes, why) from None
        return slab

    @classmethod
    def open(cls, path: Path, files: Files, log: RateLimitedLog, *, read_only: bool = False) -> Slab | str:
        """Open a slab. If this version cannot use the file, return the reason as text.

        Raises: `OSError`, for example if one superblock cannot be read and the other is unusable. The caller
            must then keep the file, because a later attempt may succeed.
        """
        fd = files.open(path, os.O_RDONLY if read_only else os.O_RDWR)
        reason, sound, unreadable = "it is too short to be a slab", list[Bytes](), None
        try:
            size = files.size(fd)
            for offset in (0, PAGE_BYTES) if size >= 2 * PAGE_BYTES else ():
                page = aligned(PAGE_BYTES)
                try:
                    transfer(files.read, fd, [page], offset)
                except OSError as error:
                    unreadable = error
                    continue
                decoded = decode_superblock(page)
                if isinstance(decoded, str):
                    reason = decoded
                elif max(decoded[0].slots_offset, decoded[0].journal_end) > size:
                    reason = "it was truncated before its first slot"
                else:
                    sound.append(page)
            if unreadable and not sound:
                raise unreadable
            if not sound:
                return reason
            slab, fd = cls(fd, max(sound, key=revision_of), files, log), -1
            return slab
        finally:
            if fd >= 0:
                files.close(fd)

    # ---- room

    def touch(self) -> None:
        """Set the file's mtime to now. In a directory, the slab with the oldest mtime shrinks first."""
        os.utime(self._fd)

    @property
    def file_bytes(self) -> int:
        """Length of the file in bytes."""
        return self._files.size(self._fd)

    @property
    def num_reserved(self) -> int:
        """Number of slots in the file, counted from slot 0. Further slots need a longer file."""
        return self._num_reserved

    @property
    def may_grow(self) -> bool:
        """False during the back-off after a failed growth. Only `num_reserved` slots are usable then."""
        return self._files.monotonic_s() >= self._may_grow_at_s

    def reserve_all(self) -> None:
        """Extend the file to its full length, or to the limit of `room` if the limit is less.

        Shrinks other slabs of the directory while the disk is too full, or while the limit is too small for
        one slot. Raises `OSError` if there is no other slab left to shrink.
        """
        while not self._lengthen(self._allowed_bytes):
            lacking = self.layout.slot_offset(self.layout.first_slot + 1) - self._allowed_bytes
            if self.room is None or not self.room.make(max(0, lacking)):
                raise _no_room()

    def reserve(self, num_slots: int) -> None:
        """Extend the file to the limit of `room`, or, if the disk lacks the space, to `num_slots` slots.

        Shrinks other slabs of the directory if `num_slots` slots do not fit otherwise. If the file does not
        reach the limit, `may_grow` is False for a while. Raises `OSError`.
        """
        has_all = False
        try:
            has_all = self._reserve(num_slots)
        finally:
            if has_all:
                self._growth_backoff.reset()
            else:
                self._may_grow_at_s = self._files.monotonic_s() + self._growth_backoff.next_s()

    def _reserve(self, num_slots: int) -> bool:
        """Extend the file, see `reserve`; return True if the file has the largest size that `room` allows."""
        least = self.layout.slot_offset(num_slots)
        while True:
            allowed = self._allowed_bytes
            if allowed >= least and self._lengthen(allowed):
                return True
            if allowed >= least and self._lengthen(least):
                return False
            if self.room is None or not self.room.make(max(0, least - allowed)):
                raise _no_room()

    def lengthen_to(self, num_bytes: int) -> bool:
        """Extend the file to `num_bytes`. If the disk is full, returns False and leaves the file unchanged.

        Any other failure raises `OSError`.
        """
        before = self.file_bytes
        if num_bytes <= before:
            return True
        try:
            self._files.allocate(self._fd, num_bytes)
        except OSError as error:
            # Release a partial extension.
            self._files.shorten(self._fd, before)
            if error.errno == errno.ENOSPC:
                return False
            raise
        return True

    @property
    def _allowed_bytes(self) -> int:
        most = self.layout.file_bytes
        return most if self.room is None else min(most, self.room.own_bytes)

    def _lengthen(self, num_bytes: int) -> bool:
        """Extend the file to the last whole slot within `num_bytes`.

        If the disk is full or no usable slot fits, returns False and leaves the file unchanged.
        """
        end = self.layout.slots_before(num_bytes)
        if end <= self.layout.first_slot or not self.lengthen_to(self.layout.slot_offset(end)):
            return False
        self._num_reserved = max(self._num_reserved, end)
        return True

    def trim(self, num_slots: int) -> None:
        """Cut the file after `num_slots` slots. Raises `OSError`."""
        self._files.shorten(self._fd, self.layout.slot_offset(num_slots))
        self._num_reserved = num_slots

    def _grow(self, end: int) -> None:
        with self._growing:
            if end > self._num_reserved:
                self.reserve(end)

    # ---- blocks

    def write_blocks(
        self, keys: Keys, slots: Positions, generations: npt.NDArray[np.uint64],
        pool: Blocks, rows: Positions, scratch: Scratch,
    ) -> tuple[Mask, Checksums]:  # fmt: skip
        """Write ``pool[rows[i]]`` into ``slots[i]``; returns a mask of written blocks, and the checksums.

        `slots` must ascend and have at most `chunk_blocks` elements. Blocks are durable after `sync`. Cost:
        one pass over the bytes, and one system call per run of consecutive slots.
        """
        written, sums = np.zeros(len(slots), np.bool_), np.zeros(len(slots), np.uint64)
        count = self._num_with_room(slots)
        if count == 0:
            return written, sums
        keys, slots, generations, rows = keys[:count], slots[:count], generations[:count], rows[:count]
        sums[:count] = self._checksums(keys, slots, generations, pool, rows)
        if not self._in_place(pool):
            pages, width = scratch.pages(count), pool.shape[1]
            for page, row in zip(pages, rows.tolist(), strict=True):
                page[:width], page[width:] = pool[row], 0
            pool, rows = pages, np.arange(count)
        written[:count] = self._each_run(self._files.write, slots, pool, rows) == SOUND
        return written, sums

    def _num_with_room(self, slots: Positions) -> int:
        """Extend the file for these slots, if possible; returns the number of these slots in the file."""
        if slots[-1] >= self._num_reserved:
            try:
                self._grow(int(slots[-1]) + 1)
            except OSError as error:
                self._log.warn("grow", "disk tier: the slab cannot grow: %s", error.strerror)
        return int(np.searchsorted(slots, self._num_reserved))

    def read_blocks(
        self, keys: Keys, slots: Positions, generations: npt.NDArray[np.uint64], expected: Checksums,
        pool: Blocks, rows: Positions, scratch: Scratch,
    ) -> Outcomes:  # fmt: skip
        """Read ``slots[i]`` into ``pool[rows[i]]`` and verify; returns an outcome for each block.

        `slots` must ascend and have at most `chunk_blocks` elements. The checksum covers key, fingerprint,
        slot, length, generation and bytes. The contents of a row are undefined unless the outcome is `SOUND`.
        """
        in_place = self._in_place(pool)
        memory, at = (pool, rows) if in_place else (scratch.pages(len(rows)), np.arange(len(rows)))
        outcomes = self._each_run(self._files.read, slots, memory, at)
        was_read = outcomes == SOUND
        sound = was_read & (self._checksums(keys, slots, generations, memory, at) == expected)
        if not in_place:
            for i in np.flatnonzero(sound).tolist():
                pool[rows[i]] = memory[i, : pool.shape[1]]
        outcomes[was_read & ~sound] = MISMATCH
        return outcomes

    def _checksums(
        self, keys: Keys, slots: Positions, generations: npt.NDArray[np.uint64], memory: Blocks, at: Positions
    ) -> Checksums:
        block_bytes = self.layout.block_bytes
        seeds = block_seeds(self.identity.fingerprint, block_bytes, keys, slots, generations)
        return checksums(address_of(memory) + at * memory.strides[0], block_bytes, seeds)

    def _in_place(self, pool: Blocks) -> bool:
        """Return True if direct I/O accepts the pool's rows: their addresses and sizes are whole pages."""
        return (address_of(pool) | pool.strides[0] | self.layout.block_bytes) % PAGE_BYTES == 0

    def _each_run(
        self, operation: Callable[[int, Buffers, int], int], slots: Positions, memory: Blocks, at: Positions
    ) -> Outcomes:
        """Read ``slots[i]`` into ``memory[at[i]]``, or write ``memory[at[i]]`` to ``slots[i]``.

        Returns an outcome for each block. A *run* is a sequence of consecutive slots; each run takes one
        call of `operation`. If the read of a run fails, its blocks are read again one by one, so that only
        the unreadable blocks are lost. If the write of a run fails, its blocks are written again one by one
        only if the medium failed (EIO).

        Args:
            operation: function that reads or writes consecutive slots.
        """
        outcomes: Outcomes = np.full(len(slots), SOUND, np.uint8)
        for first, end in _runs(slots):
            outcomes[first:end] = code = self._outcome(operation, int(slots[first]), memory, at[first:end])
            may_pass = code == UNREADABLE or (code == REFUSED and operation == self._files.read)
            if may_pass and end - first > 1:
                for i in range(first, end):
                    outcomes[i] = self._outcome(operation, int(slots[i]), memory, at[i : i + 1])
        return outcomes

    def _outcome(
        self, operation: Callable[[int, Buffers, int], int], slot: int, memory: Blocks, rows: Positions
    ) -> int:
        try:
            transfer(operation, self._fd, _buffers(memory, rows), self.layout.slot_offset(slot))
        except OSError as error:
            self._log_error(operation, error)
            return UNREADABLE if error.errno == errno.EIO else REFUSED
        return SOUND

    def _log_error(self, operation: Callable[..., int], error: OSError) -> None:
        verb = operation.__name__
        self._log.warn(f"{verb} {error.errno}", "disk tier: cannot %s blocks: %s", verb, error.strerror)

    # ---- pages

    def read_pages(self, offset: int, num_bytes: int) -> tuple[Bytes, int]:
        """Read a range of the slab; returns the bytes and the number of unreadable pages.

        Unreadable pages are zeros in the bytes.
        """
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
                        self._log_error(self._files.read, error)
                        piece[at : at + PAGE_BYTES] = 0
                        unreadable += 1
        return memory[:num_bytes], unreadable

    def write_pages(self, offset: int, memory: Bytes) -> None:
        """Write aligned memory, in whole pages. Raises `OSError`."""
        transfer(self._files.write, self._fd, [memory], offset)

    def write_zeros(self, start: int, end: int) -> None:
        """Overwrite bytes `start` to ``end - 1`` with zeros. The range is whole pages. Raises `OSError`."""
        zeros = aligned(_PIECE_BYTES)
        for offset in range(start, end, _PIECE_BYTES):
            self.write_pages(offset, zeros[: min(_PIECE_BYTES, end - offset)])

    def sync(self) -> None:
        """Make all earlier writes durable. Raises `OSError`."""
        self._files.sync(self._fd)

    @property
    def void_before(self) -> int:
        """Smallest valid generation. Blocks of lower generations are invalid, even with a journal entry."""
        return void_before(self._superblock)

    def void(self, generation: int) -> None:
        """Invalidate blocks with a generation below `generation`, and delete the slabs of other producers.

        Durable on return, even if one superblock is damaged later. Raises `OSError` if another slab cannot be
        deleted, or neither superblock can be written.
        """
        if self.room is not None:
            with self._growing:
                self.room.clear()
        self._replace_superblock(self.layout, self.capacity_bytes, generation)

    def adopt(self, layout: Layout, capacity_bytes: int) -> None:
        """Switch to another layout and capacity, durably. The journal must already be in its new place.

        Raises `OSError` if neither superblock can be written.
        """
        self._replace_superblock(layout, capacity_bytes, self.void_before)
        self.layout, self.capacity_bytes = layout, capacity_bytes
        self._num_reserved = layout.slots_before(self.file_bytes)

    def _replace_superblock(self, layout: Layout, capacity_bytes: int, generation: int) -> None:
        """Write both superblocks, one after the other, so that one of them is always complete."""
        revision = revision_of(self._superblock) + 1
        self._superblock = encode_superblock(layout, self.identity, capacity_bytes, generation, revision)
        errors = [error for at in self._superblocks_at if (error := self._write_superblock(at))]
        if len(errors) == len(self._superblocks_at):
            raise errors[0]

    def _write_superblock(self, at: int) -> OSError | None:
        page = aligned(PAGE_BYTES)
        page[:] = self._superblock
        try:
            self.write_pages(at, page)
            self.sync()
        except OSError as error:
            self._log.warn("superblock", "disk tier: one of two superblocks cannot be written: %s", error)
            return error
        return None

    def repair_superblocks(self) -> None:
        """Rewrite each superblock that differs from the valid copy. A failed write is logged.

        Later updates write the repaired superblock first. An interrupted update then leaves the valid copy
        unchanged.
        """
        for at in (PAGE_BYTES, 0):
            if not np.array_equal(self.read_pages(at, PAGE_BYTES)[0], self._superblock):
                self._write_superblock(at)
                self._superblocks_at = at, PAGE_BYTES - at

    def now_s(self) -> int:
        """Return the time in whole seconds since 1970, as the slab stores it; at least 0."""
        return max(0, int(self._files.time_s()))

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._fd >= 0:
            self._files.close(self._fd)
            self._fd = -1


def transfer(operation: Callable[[int, Buffers, int], int], fd: int, buffers: Buffers, offset: int) -> None:
    """Read or write all buffers, in several calls if necessary.

    Raises `OSError`, also if the file ends too early.
    """
    remaining = sum(len(buffer) for buffer in buffers)
    while True:
        moved = operation(fd, buffers, offset)
        remaining -= moved
        if remaining <= 0:
            return
        if moved <= 0:
            raise OSError(errno.EIO, "the file is too short")
        offset += moved
        buffers = list(_after(buffers, moved))


def _after(buffers: Buffers, num_bytes: int) -> Iterator[Any]:
    for buffer in buffers:
        if num_bytes < len(buffer):
            yield buffer[num_bytes:] if num_bytes else buffer
        num_bytes = max(0, num_bytes - len(buffer))


def _buffers(memory: Blocks, rows: Positions) -> list[Bytes]:
    """Return rows of memory as buffers. In contiguous memory, consecutive rows share one buffer."""
    if not memory.flags.c_contiguous:
        return [memory[row] for row in rows.tolist()]
    flat, width = memory.reshape(-1), memory.shape[1]
    return [flat[int(rows[first]) * width :][: (end - first) * width] for first, end in _runs(rows)]


def _runs(numbers: Positions) -> Iterator[tuple[int, int]]:
    """Return (first index, end index) of each run of consecutive numbers."""
    return pairwise(coalesce(numbers, numbers).tolist())


def _no_room() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
