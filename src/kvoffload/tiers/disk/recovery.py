"""Recovery of a journal: reads the newest complete checkpoint, then the log after it. Writes nothing.

A group records what happened to slots: emptied, written, used. Later records of a slot replace earlier
records. If a group is lost, the recovered state of its slots is the state before that group. Such an outdated
entry is harmless, because its checksum does not match when the slot is read.

A page that cannot be read is an error, not damage, because a later attempt may succeed.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvoffload.structures.keys import Keys, words_per_key
from kvoffload.tiers.contract import Checksums
from kvoffload.tiers.disk.files import PAGE_BYTES, aligned
from kvoffload.tiers.disk.slab import Outcomes, Positions, Scratch, Slab
from kvoffload.tiers.disk.slab_format import (
    CHECKPOINT,
    GROUP_MAGIC,
    LOG,
    MAX_NUMBER,
    REUSE,
    Bytes,
    Group,
    Head,
    Records,
    decode_group,
    decode_head,
)
from kvoffload.tiers.disk.slab_layout import GROUP, Layout, entry_dtype
from kvoffload.tiers.write_budget import HOUR_S
from kvoffload.transfer import Blocks

Progress: TypeAlias = Callable[[int, int], None]
"""Callback with the number of metadata bytes read so far, and the total number."""

_SALVAGE = "nothing was changed; if this persists, `kvoffload disk compact` keeps the readable blocks"
_LAST_STAMP = np.uint64(MAX_NUMBER)
_WINDOW_BYTES = 16 * 1024 * 1024
_MIX = np.uint64(0x9E3779B97F4A7C15)


class Contents:
    """Metadata of the blocks in a slab, in flat arrays indexed by slot. Invalid blocks are left out.

    Attributes:
        generation: number of the block's write, which is greater for each later write; 0 marks an empty slot.
        stamp: access stamp of the last use; later uses have greater stamps.
        uses: number of uses since the write.
        written_at_s: time of the write, in seconds since 1970.
        checksum: checksum over header and bytes.
        words: key, packed as in `Keys`.
        last_generation: greatest generation of any block ever written, including removed blocks.
        written: number of written blocks, including removed blocks, by hour since 1970.
    """

    def __init__(self, layout: Layout, void_before: int = 0) -> None:
        n, self._first_slot = layout.num_slots, layout.first_slot
        self._void_before = np.uint64(void_before)
        self.key_bytes = layout.key_bytes
        self.generation = np.zeros(n, np.uint64)
        self.stamp = np.zeros(n, np.uint64)
        self.uses = np.zeros(n, np.uint32)
        self.written_at_s = np.zeros(n, np.uint64)
        self.checksum = np.zeros(n, np.uint64)
        self.last_generation = 0
        self.written: dict[int, int] = {}
        self.words = np.zeros((n, words_per_key(layout.key_bytes)), np.uint64)

    def __len__(self) -> int:
        return int(np.count_nonzero(self.generation))

    def slots(self) -> npt.NDArray[np.int64]:
        """Return the slots that hold a block, ascending."""
        return np.flatnonzero(self.generation)

    def newest_slots(self) -> npt.NDArray[np.int64]:
        """Return the slot of each key's newest block, ascending. A key has two slots only after damage.

        Cost: a sort of one hash per key.
        """
        slots = self.slots()
        words = self.words[slots, 0].copy()
        for column in self.words.T[1:]:
            words = words * _MIX + column[slots]
        order = np.argsort(words, kind="stable")
        equal = words[order[1:]] == words[order[:-1]]
        if not equal.any():
            return slots
        may_repeat = np.zeros(len(slots), np.bool_)
        may_repeat[order[1:][equal]] = may_repeat[order[:-1][equal]] = True
        older = list[int]()
        newest: dict[bytes, int] = {}
        by_age = slots[may_repeat][np.argsort(self.generation[slots[may_repeat]], kind="stable")]
        for slot, key in zip(by_age.tolist(), self.keys(by_age), strict=True):
            if key in newest:
                older.append(newest[key])
            newest[key] = slot
        return np.setdiff1d(slots, older)

    def forget(self, slots: npt.NDArray[np.integer]) -> None:
        """Mark slots as empty."""
        self.generation[slots] = 0
        self.uses[slots] = 0

    def move(self, slots: npt.NDArray[np.int64], to: npt.NDArray[np.int64], checksums: Checksums) -> None:
        """Record that blocks were moved from `slots` to the slots `to`.

        `checksums` are new, because a block's checksum depends on its slot.
        """
        for values in (self.generation, self.stamp, self.uses, self.written_at_s, self.words):
            values[to] = values[slots]
        self.checksum[to] = checksums
        self.forget(slots)

    def keys(self, slots: npt.NDArray[np.int64]) -> Keys:
        """Return the keys of the blocks in these slots."""
        return Keys(self.words[slots], self.key_bytes)

    def apply(self, group: Group) -> None:
        """Apply the records of one journal group: removals, then entries, then accesses."""
        n = len(self.generation)
        self.forget(group.removed[group.removed < n])
        entries = group.entries[(group.entries["slot"] >= self._first_slot) & (group.entries["slot"] < n)]
        if group.kind == LOG:
            hours, counts = np.unique(entries["written_at_s"] // HOUR_S, return_counts=True)
            for hour, count in zip(hours.tolist(), counts.tolist(), strict=True):
                self.written[hour] = self.written.get(hour, 0) + count
        self.last_generation = max(self.last_generation, int(entries["generation"].max(initial=0)))
        entries = entries[entries["generation"] >= self._void_before]
        slots = entries["slot"]
        self.generation[slots] = entries["generation"]
        # A use of a block may be recorded before its entry.
        self.stamp[slots] = np.maximum(self.stamp[slots], np.minimum(entries["stamp"], _LAST_STAMP))
        self.uses[slots] += entries["uses"]
        self.written_at_s[slots] = entries["written_at_s"]
        self.checksum[slots] = entries["checksum"]
        self.words[slots] = entries["key"]
        accessed = group.accessed[(group.accessed["slot"] & ~REUSE) < n]
        used = accessed["slot"] & ~REUSE
        used_at = np.uint64(min(group.first_stamp, _LAST_STAMP)) + accessed["after"]
        np.maximum.at(self.stamp, used, np.minimum(used_at, _LAST_STAMP))
        np.add.at(self.uses, used[accessed["slot"] & REUSE != 0], 1)

    def entries(self, slots: npt.NDArray[np.int64]) -> Records:
        """Return journal records of the blocks in these slots."""
        records = np.empty(len(slots), entry_dtype(self.key_bytes))
        records["slot"] = slots
        for name in ("uses", "generation", "stamp", "written_at_s", "checksum"):
            records[name] = getattr(self, name)[slots]
        records["key"] = self.words[slots]
        return records


def read_in_chunks(
    slab: Slab, contents: Contents, slots: Positions
) -> Iterator[tuple[Positions, Keys, Outcomes, Blocks]]:
    """Read and verify the blocks in `slots`; yields slots, keys, outcomes and bytes, a few blocks at a time.

    The yielded bytes are valid until the next iteration, which reuses their memory.
    """
    layout, scratch, step = slab.layout, Scratch(slab), slab.chunk_blocks
    pool = aligned(step * layout.slot_bytes).reshape(step, -1)[:, : layout.block_bytes]
    for start in range(0, len(slots), step):
        batch = slots[start : start + step]
        keys, rows = contents.keys(batch), np.arange(len(batch))
        expected = contents.generation[batch], contents.checksum[batch]
        yield batch, keys, slab.read_blocks(keys, batch, *expected, pool, rows, scratch), pool


@dataclass
class Recovered:
    """State of a journal, as `recover` reads it.

    Attributes:
        contents: the blocks.
        epoch: epoch of the checkpoint and the log.
        sequence: number of the next group in the log.
        log_end: offset of the next group in the log.
        damaged: number of lost groups, heads and pages, including losses from unreadable pages.
        unreadable: number of pages that the medium failed to read, except heads with a sound copy.
        unfinished: True if the log ends in an incomplete group, as after a crash. This is no damage.
        corrected: True if `contents` differ from the journal. A new checkpoint is then needed.
    """

    contents: Contents
    epoch: int = 0
    sequence: int = 0
    log_end: int = 0
    damaged: int = 0
    unreadable: int = 0
    unfinished: bool = False
    corrected: bool = False


def recover(slab: Slab, progress: Progress | None = None, *, salvage: bool = False) -> Recovered:
    """Read the journal of a slab. Damage is counted, and raises no error.

    Args:
        progress: called after each 16 MiB of the checkpoint, and at the end.
        salvage: True to count unreadable pages as damage, False to raise `OSError` for them.

    Cost: reads the checkpoint and the log once, 80 bytes a block; a few seconds for 16 million blocks.
    """
    recovered = Recovered(Contents(slab.layout, slab.void_before))
    heads = _heads(slab, recovered)
    total = (
        slab.layout.log_bytes
        + sum(head.num_groups for head in heads[:1]) * slab.layout.checkpoint_group_bytes
    )
    report = progress or (lambda done, total: None)
    if heads:
        recovered.epoch, recovered.contents.written = heads[0].epoch, dict(heads[0].written)
        recovered.contents.last_generation = heads[0].last_generation
        for done in _read_checkpoint(slab, heads[0], recovered):
            report(done, total)
    else:
        recovered.damaged += 1
    _read_log(slab, recovered)
    report(total, total)
    if recovered.unreadable and not salvage:
        raise OSError(errno.EIO, f"{recovered.unreadable} pages of its journal cannot be read: {_SALVAGE}")
    recovered.corrected = _correct_hours(recovered.contents, slab.now_s())
    return recovered


def _correct_hours(contents: Contents, now_s: int) -> bool:
    """Move write counts of future hours to the present hour; returns True if there were future hours.

    A wrong clock causes future hours. They would reduce write budgets until these hours have passed.
    """
    now = now_s // HOUR_S
    ahead = [hour for hour in contents.written if hour > now]
    for hour in ahead:
        contents.written[now] = contents.written.get(now, 0) + contents.written.pop(hour)
    return bool(ahead)


def _heads(slab: Slab, recovered: Recovered) -> list[Head]:
    """Read the heads of complete checkpoints, the newest first."""
    layout, heads = slab.layout, set()
    for region in (0, 1):
        first, unreadable, num_sound = layout.checkpoint_offset(region), 0, 0
        for offset in (first, first + layout.checkpoint_bytes - PAGE_BYTES):
            page, failed = slab.read_pages(offset, PAGE_BYTES)
            unreadable += failed
            head = decode_head(layout, slab.identity.slab_id, page)
            if head is not None and head.epoch % 2 == region:
                heads.add(head)
                num_sound += 1
        recovered.damaged += unreadable
        if num_sound == 0:
            # This checkpoint may be the newest.
            recovered.unreadable += unreadable
    return sorted(heads, reverse=True)


def _read_checkpoint(slab: Slab, head: Head, recovered: Recovered) -> Iterator[int]:
    """Apply the groups of a checkpoint; yields the number of bytes read so far."""
    layout = slab.layout
    size = layout.checkpoint_group_bytes
    start = layout.checkpoint_offset(head.epoch) + PAGE_BYTES
    end = start + head.num_groups * size
    window = max(1, _WINDOW_BYTES // size) * size
    for offset in range(start, end, window):
        memory, unreadable = slab.read_pages(offset, min(window, end - offset))
        recovered.unreadable += unreadable
        for at in range(0, len(memory), size):
            group = decode_group(layout, slab.identity.slab_id, memory[at : at + size])
            sequence = (offset + at - start) // size
            if group and (group.kind, group.epoch, group.sequence) == (CHECKPOINT, head.epoch, sequence):
                recovered.contents.apply(group)
            else:
                recovered.damaged += 1
        yield offset + len(memory) - start


def _read_log(slab: Slab, recovered: Recovered) -> None:
    layout = slab.layout
    memory, unreadable = slab.read_pages(layout.log_offset, layout.log_bytes)
    recovered.damaged += unreadable
    recovered.unreadable += unreadable
    starts, epochs = _candidates(slab, memory)
    candidates = list(zip(starts, epochs, strict=True))
    slab_id = slab.identity.slab_id
    newer = (
        epoch
        for at, epoch in candidates
        if epoch > recovered.epoch and decode_group(layout, slab_id, memory[at:])
    )
    newest = max(newer, default=recovered.epoch)
    if newest != recovered.epoch:
        # The checkpoint of this log is lost: an older checkpoint remains, or none.
        recovered.damaged += 1
        recovered.epoch = newest
    broken = 0
    for at, epoch in candidates:
        if epoch != recovered.epoch or at < recovered.log_end:
            continue
        group = decode_group(layout, slab_id, memory[at:])
        if group is None or group.kind != LOG or group.sequence < recovered.sequence:
            broken += 1
            continue
        recovered.damaged += group.sequence - recovered.sequence
        broken = 0
        recovered.contents.apply(group)
        recovered.sequence, recovered.log_end = group.sequence + 1, at + group.num_bytes
    recovered.unfinished = broken > 0


def _candidates(slab: Slab, memory: Bytes) -> tuple[list[int], list[int]]:
    """Find the pages of the log at which a group of this slab may start.

    Returns two lists of equal length: the offsets of the pages, and the epochs of the groups.
    """
    heads = np.ndarray((len(memory) // PAGE_BYTES,), GROUP, memory, strides=(PAGE_BYTES,))
    rows = np.flatnonzero((heads["magic"] == GROUP_MAGIC) & (heads["slab_id"] == slab.identity.slab_id))
    return (rows * PAGE_BYTES).tolist(), heads["epoch"][rows].tolist()
