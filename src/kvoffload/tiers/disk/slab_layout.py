"""Offsets and sizes of a slab's regions and records. `slab_format` encodes and decodes the contents."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvoffload.errors import ConfigError, check_integer
from kvoffload.structures.keys import MAX_KEY_BYTES, words_per_key
from kvoffload.tiers.disk.files import PAGE_BYTES

MAX_BLOCK_BYTES = 1 << 30
MAX_SLOTS = 1 << 30
MAX_CAPACITY_BYTES = 1 << 62
RESERVE_BYTES, RESERVE_SHARE = 256 * 1024 * 1024, 16
"""Size of the reserve: 256 MiB of slots, but at most a sixteenth of all slots. The reserve takes new blocks
while the slots of evicted blocks may not be overwritten yet, because the removal is not durable."""
LOCK_FILE_BYTES = PAGE_BYTES
"""Size of the lock file; it counts towards the capacity."""


def record_type(fields: str) -> np.dtype[Any]:
    """Create a packed record type from a text of fields ``name:type``, separated by spaces."""
    members: Any = [tuple(field.split(":")) for field in fields.split()]
    dtype: np.dtype[Any] = np.dtype(members)
    return dtype


GROUP = record_type(
    "magic:S8 checksum:<u8 slab_id:<u8 epoch:<u8 sequence:<u8 first_stamp:<u8 body_bytes:<u8 "
    "kind:<u4 num_removed:<u4 num_entries:<u4 num_accessed:<u4"
)
ACCESS = record_type("slot:<u4 after:<u4")
"""Journal record of an access to a block. The field ``slot`` is the slot number, with the flag `REUSE` if the
access counts as a use. The field ``after`` is the access stamp minus the group's first stamp."""


@functools.cache
def entry_dtype(key_bytes: int) -> np.dtype[Any]:
    """Return the type of the journal's record of a block."""
    return record_type(
        "slot:<u4 uses:<u4 generation:<u8 stamp:<u8 written_at_s:<u8 checksum:<u8 "
        f"key:({words_per_key(key_bytes)},)<u8"
    )


@functools.cache
def header_dtype(key_bytes: int) -> np.dtype[Any]:
    """Return the type of a block's header. The header is part of the block's checksum, but not stored."""
    return record_type(
        "fingerprint:16u1 slot:<u8 generation:<u8 block_bytes:<u8 key_bytes:<u8 "
        f"key:({words_per_key(key_bytes)},)<u8"
    )


def pages(num_bytes: int) -> int:
    """Round `num_bytes` up to whole pages."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


@dataclass(frozen=True)
class Layout:
    """Layout of a slab: ``[superblock | its copy | checkpoint 0 | checkpoint 1 | log | slots]``.

    A change of the capacity adds or removes slots at the end. The offsets of slots never change. If the
    journal must become longer, it takes the space of the first slots.

    Attributes:
        num_slots: number of slots, including slots below `first_slot`.
        first_slot: lowest slot that may hold a block.
        origin: offset of slot 0.
        journal_slots: number of slots for which the checkpoints and the log are dimensioned.
        journal_offset: offset of checkpoint 0. While the journal is replaced by a longer journal, the offset
            is behind the last slot.
    """

    block_bytes: int
    key_bytes: int
    num_slots: int
    first_slot: int = 0
    origin: int = 0
    journal_slots: int = 0
    journal_offset: int = 2 * PAGE_BYTES

    def __post_init__(self) -> None:
        if not self.journal_slots:
            object.__setattr__(self, "journal_slots", self.num_slots)
        if not self.origin:
            object.__setattr__(self, "origin", self.journal_offset + self.journal_bytes)

    @classmethod
    def within(cls, capacity_bytes: int, block_bytes: int, key_bytes: int) -> Layout:
        """Return the largest layout that fits in `capacity_bytes`. Raises `ConfigError` if no block fits."""
        block_bytes = check_integer("block_bytes", block_bytes, MAX_BLOCK_BYTES)
        key_bytes = check_integer("key_bytes", key_bytes, MAX_KEY_BYTES)
        capacity_bytes = check_integer("capacity_bytes", capacity_bytes, MAX_CAPACITY_BYTES, 0)
        low, high = 0, min(MAX_SLOTS, capacity_bytes // PAGE_BYTES)
        while low < high:
            middle = (low + high + 1) // 2
            if cls(block_bytes, key_bytes, middle).file_bytes + LOCK_FILE_BYTES <= capacity_bytes:
                low = middle
            else:
                high = middle - 1
        if low == 0:
            least = cls(block_bytes, key_bytes, 1).file_bytes + LOCK_FILE_BYTES
            raise ConfigError(
                "capacity_bytes",
                capacity_bytes,
                f"allowed: {least} or more, the size of a directory with one block of {block_bytes} bytes",
            )
        return cls(block_bytes, key_bytes, low)

    @classmethod
    def holding(cls, block_bytes: int, key_bytes: int, num_blocks: int) -> Layout:
        """Return the smallest layout that holds `num_blocks` blocks."""
        layout = cls(block_bytes, key_bytes, num_blocks)
        while layout.num_blocks < num_blocks:
            layout = cls(block_bytes, key_bytes, layout.num_slots + num_blocks - layout.num_blocks)
        return layout

    @property
    def num_blocks(self) -> int:
        """Capacity in blocks: the usable slots minus the reserve."""
        usable = self.num_usable
        return usable - min(usable // RESERVE_SHARE, -(-RESERVE_BYTES // self.slot_bytes))

    @property
    def num_usable(self) -> int:
        """Number of slots that may hold a block."""
        return self.num_slots - self.first_slot

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot: a block, rounded up to whole pages."""
        return pages(self.block_bytes)

    @property
    def entry_bytes(self) -> int:
        return entry_dtype(self.key_bytes).itemsize

    @property
    def checkpoint_group_bytes(self) -> int:
        """Bytes of one group in a checkpoint.

        A group has at most 64 KiB, because one flipped bit destroys a whole group.
        """
        return min(64 * 1024, pages(GROUP.itemsize + self.journal_slots * self.entry_bytes))

    @property
    def entries_per_group(self) -> int:
        return (self.checkpoint_group_bytes - GROUP.itemsize) // self.entry_bytes

    @property
    def num_checkpoint_groups(self) -> int:
        """Largest number of groups in a checkpoint."""
        return -(-self.journal_slots // self.entries_per_group)

    @property
    def max_entries(self) -> int:
        """Largest number of blocks in a checkpoint."""
        return self.num_checkpoint_groups * self.entries_per_group

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of a checkpoint: the head, the groups, and the copy of the head."""
        return 2 * PAGE_BYTES + self.num_checkpoint_groups * self.checkpoint_group_bytes

    @property
    def log_bytes(self) -> int:
        """Bytes of the log: half the bytes of a checkpoint's entries, but at least a minimum.

        The minimum is 1/64 of the bytes of all slots, limited to between 16 and 1,024 pages. When the log is
        full, a checkpoint is written; a longer log makes checkpoints rarer.
        """
        share = min(1024 * PAGE_BYTES, self.journal_slots * self.slot_bytes // 64)
        return max(16 * PAGE_BYTES, pages(share), pages(self.journal_slots * self.entry_bytes // 2))

    @property
    def journal_bytes(self) -> int:
        """Bytes of both checkpoints and the log."""
        return 2 * self.checkpoint_bytes + self.log_bytes

    @property
    def journal_end(self) -> int:
        return self.journal_offset + self.journal_bytes

    @property
    def is_moving(self) -> bool:
        """True if the journal is behind the slots, because a change of the capacity is unfinished."""
        return self.journal_offset >= self.slot_offset(self.num_slots)

    def checkpoint_offset(self, epoch: int) -> int:
        return self.journal_offset + (epoch % 2) * self.checkpoint_bytes

    @property
    def log_offset(self) -> int:
        return self.journal_offset + 2 * self.checkpoint_bytes

    @property
    def slots_offset(self) -> int:
        """Offset of the first slot that may hold a block."""
        return self.slot_offset(self.first_slot)

    def slot_offset(self, slot: int) -> int:
        return self.origin + slot * self.slot_bytes

    @property
    def file_bytes(self) -> int:
        return max(self.slot_offset(self.num_slots), self.journal_end)

    def slots_before(self, offset: int) -> int:
        """Number of slots that end at or before `offset`."""
        return min(self.num_slots, max(0, offset - self.origin) // self.slot_bytes)

    # ---- another capacity

    def with_capacity(self, capacity_bytes: int) -> Layout | None:
        """Return the layout for another capacity, with unchanged slot offsets; None if no block would fit.

        If the slots need a longer journal, the new journal takes the space of the first slots. Until the new
        journal is written, the old one is kept behind the last slot. If the capacity has no space there, the
        journal stays as it is, and the journal's length limits the number of slots.
        """
        room = (capacity_bytes - LOCK_FILE_BYTES - self.origin) // self.slot_bytes
        end = min(MAX_SLOTS, max(0, room))
        kept = replace(self, num_slots=min(end, self.first_slot + self.max_entries))
        if self.is_moving or end > kept.num_slots:
            grown = self._with_new_journal(end)
            if self.is_moving:
                return grown
            if grown is not None and grown.num_usable > kept.num_usable:
                last = max(self.num_slots, grown.first_slot + min(self.num_blocks, grown.num_blocks))
                if self.slot_offset(last) + self.journal_bytes + LOCK_FILE_BYTES <= capacity_bytes:
                    return grown
        return kept if kept.num_usable > 0 else None

    def _with_new_journal(self, end: int) -> Layout | None:
        """Return the layout with a new journal and, behind it, as many usable slots as fit before slot `end`.

        Returns None if no slot would be usable.
        """
        low, high = 0, end
        while low < high:
            middle = (low + high) // 2
            journal = Layout(self.block_bytes, self.key_bytes, end - middle)
            if journal.journal_end <= self.slot_offset(middle):
                high = middle
            else:
                low = middle + 1
        if low >= end:
            return None
        return Layout(self.block_bytes, self.key_bytes, end, low, self.origin, end - low)


def group_bytes(layout: Layout, num_removed: int, num_entries: int, num_accessed: int) -> int:
    """Return the bytes of a group, in whole pages."""
    return pages(
        GROUP.itemsize
        + removed_bytes(num_removed)
        + num_entries * layout.entry_bytes
        + num_accessed * ACCESS.itemsize
    )


def removed_bytes(num_removed: int) -> int:
    """Return the size in bytes of `num_removed` encoded slot numbers, padded to a multiple of 8."""
    return (num_removed + 1) // 2 * 8
