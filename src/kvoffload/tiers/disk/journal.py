"""The journal of a slab: which slots hold which blocks, in a form that survives a crash at any instant.

Owns the end of the log and its epochs. A *group* of records is appended in whole pages of its own: a durable
page is not written again before a checkpoint has made it superfluous. When the log is full a checkpoint of
everything is written to the older of two places, and the log starts again, empty, under the next epoch.

Does not know what a removal allows or an entry promises; the committer orders groups, syncs and data.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvoffload.tiers.disk.files import PAGE_BYTES, aligned
from kvoffload.tiers.disk.format import (
    CHECKPOINT,
    LOG,
    MAX_HOURS,
    Group,
    Head,
    Records,
    SlabSlots,
    encode_group,
    encode_head,
)
from kvoffload.tiers.disk.layout import ACCESS, GROUP, Layout, group_bytes
from kvoffload.tiers.disk.recovery import Contents, Found, recover
from kvoffload.tiers.disk.slab import Slab

MAX_GROUP_BYTES = 1024 * 1024


class Journal:
    """Appends groups to the log of an open slab, as its only writer.

    Thread: one at a time. `append`, `checkpoint` and `sync` raise `OSError`; after that the state of the
    medium is unknown, and nothing may be appended.

    Args:
        slab: the slab that has the log.
        found: the result of `recover`. A damaged journal starts a new epoch at once, so that the rest of the
            old one can never be taken for a part of the new one. So does a journal whose contents were
            corrected.

    Attributes:
        bytes_written: bytes of groups and checkpoints since it was opened.
        num_checkpoints: checkpoints since it was opened.
        damaged: parts of the journal that could not be read back.
    """

    def __init__(self, slab: Slab, found: Found) -> None:
        self._slab, self._layout = slab, slab.layout
        self._epoch, self._sequence, self._at = found.epoch, found.sequence, found.log_end
        self._max_group_bytes = min(MAX_GROUP_BYTES, self._layout.log_bytes // 4 // PAGE_BYTES * PAGE_BYTES)
        self._memory = aligned(self._max_group_bytes)
        self.bytes_written = self.num_checkpoints = 0
        self.damaged = found.damaged
        # What was read may have been written by a process that was killed, and not be durable yet.
        self.sync()
        if found.damaged or found.corrected:
            self.checkpoint(found.contents)

    def append(self, removed: SlabSlots, entries: Records, accessed: Records, first_stamp: int) -> None:
        """Append these records as one group, or several if they are too many; durable after the next `sync`.

        Earlier groups must have been synced: a log ends in at most one torn group.
        """
        layout, started = self._layout, False
        for removals, blocks, accesses in self._parts(removed, entries, accessed):
            if started:
                self.sync()
            started = True
            size = group_bytes(layout, len(removals), len(blocks), len(accesses))
            if self._at + size > layout.log_bytes:
                found = recover(self._slab)
                self.damaged += found.damaged
                self.checkpoint(found.contents)
            group = Group(self._epoch, self._sequence, LOG, removals, blocks, accesses, first_stamp, size)
            encoded = encode_group(layout, self._slab.identity.slab_id, group, self._memory)
            self._slab.write_pages(layout.log_offset + self._at, encoded)
            self._at += size
            self._sequence += 1
            self.bytes_written += size

    def _parts(
        self, removed: SlabSlots, entries: Records, accessed: Records
    ) -> Iterator[tuple[SlabSlots, Records, Records]]:
        """All records, or, if they are too many for a group, parts of one kind each, in order."""
        if group_bytes(self._layout, len(removed), len(entries), len(accessed)) <= self._max_group_bytes:
            yield removed, entries, accessed
            return
        room = self._max_group_bytes - GROUP.itemsize - 8
        for kind, records in enumerate((removed, entries, accessed)):
            step = room // records.itemsize
            for start in range(0, len(records), step):
                parts = [removed[:0], entries[:0], accessed[:0]]
                parts[kind] = records[start : start + step]
                yield parts[0], parts[1], parts[2]

    def checkpoint(self, contents: Contents) -> None:
        """Write all `contents` to the older place, durably, and start an empty log.

        Cost: 80 bytes a block and two syncs.
        """
        epoch = self._epoch + 1
        self.bytes_written += write_checkpoint(self._slab, self._layout, epoch, contents)
        self._epoch, self._sequence, self._at = epoch, 0, 0
        self.num_checkpoints += 1

    def sync(self) -> None:
        """Return when all groups and data written so far are durable. Raises `OSError`."""
        self._slab.sync()


def write_checkpoint(slab: Slab, layout: Layout, epoch: int, contents: Contents) -> int:
    """Write a checkpoint where this layout has the one of `epoch`, durably; returns the bytes written.

    Raises `OSError`.
    """
    slab_id, num_bytes = slab.identity.slab_id, 2 * PAGE_BYTES
    start, slots = layout.checkpoint_offset(epoch), contents.slots()
    memory = aligned(layout.checkpoint_group_bytes)
    no_slots, no_accesses, step = np.empty(0, np.uint32), np.empty(0, ACCESS), layout.entries_per_group
    num_groups = -(-len(slots) // step)
    for sequence in range(num_groups):
        entries = contents.entries(slots[sequence * step : (sequence + 1) * step])
        group = Group(epoch, sequence, CHECKPOINT, no_slots, entries, no_accesses, 0, 0)
        encoded = encode_group(layout, slab_id, group, memory)
        slab.write_pages(start + PAGE_BYTES + sequence * layout.checkpoint_group_bytes, encoded)
        num_bytes += len(encoded)
    slab.sync()
    head = aligned(PAGE_BYTES)
    written = tuple(sorted(contents.written.items())[-MAX_HOURS:])
    head[:] = encode_head(slab_id, Head(epoch, len(slots), num_groups, contents.last_generation, written))
    for offset in (start, start + layout.checkpoint_bytes - PAGE_BYTES):
        slab.write_pages(offset, head)
    slab.sync()
    return num_bytes
