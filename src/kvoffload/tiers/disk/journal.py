"""The journal of a slab: a crash-safe record of the block in each slot.

Records are appended to a log in *groups* of whole pages. When the log is full, a checkpoint of all blocks
overwrites the older of two checkpoints. Then the log restarts empty, in the next epoch. No durable page of
the log is overwritten before the restart.

The committer decides the order of groups, syncs and data.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvoffload.tiers.disk.files import PAGE_BYTES, aligned
from kvoffload.tiers.disk.recovery import Contents, Recovered, recover
from kvoffload.tiers.disk.slab import Slab
from kvoffload.tiers.disk.slab_format import (
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
from kvoffload.tiers.disk.slab_layout import ACCESS, GROUP, Layout, group_bytes

MAX_GROUP_BYTES = 1024 * 1024


class Journal:
    """Appends groups to the log of an open slab, as the log's only writer.

    Thread: one at a time. If `append`, `checkpoint` or `sync` raises `OSError`, the state of the medium is
    unknown, and the caller must not append again.

    Args:
        recovered: the result of `recover(slab)`. If the journal is damaged or was corrected, the constructor
            writes a checkpoint and starts a new epoch, so that later readers cannot mix old and new groups.

    Attributes:
        damaged: number of unreadable parts of the journal.
    """

    def __init__(self, slab: Slab, recovered: Recovered) -> None:
        self._slab, self._layout = slab, slab.layout
        self._epoch, self._sequence, self._at = recovered.epoch, recovered.sequence, recovered.log_end
        self._max_group_bytes = min(MAX_GROUP_BYTES, self._layout.log_bytes // 4 // PAGE_BYTES * PAGE_BYTES)
        self._memory = aligned(self._max_group_bytes)
        self.damaged = recovered.damaged
        # A killed process may have written groups without a sync.
        self.sync()
        if recovered.damaged or recovered.corrected:
            self.checkpoint(recovered.contents)

    def append(self, removed: SlabSlots, entries: Records, accessed: Records, first_stamp: int) -> None:
        """Append records as one group, or as several groups if they exceed the limit of a group.

        The last group is durable after `sync`. Groups of earlier calls must have been synced before this
        call, so that a log ends in at most one torn group.
        """
        layout = self._layout
        for number, (removals, blocks, accesses) in enumerate(self._split(removed, entries, accessed)):
            if number > 0:
                self.sync()
            size = group_bytes(layout, len(removals), len(blocks), len(accesses))
            if self._at + size > layout.log_bytes:
                recovered = recover(self._slab)
                self.damaged += recovered.damaged
                self.checkpoint(recovered.contents)
            group = Group(self._epoch, self._sequence, LOG, removals, blocks, accesses, first_stamp, size)
            encoded = encode_group(layout, self._slab.identity.slab_id, group, self._memory)
            self._slab.write_pages(layout.log_offset + self._at, encoded)
            self._at += size
            self._sequence += 1

    def _split(
        self, removed: SlabSlots, entries: Records, accessed: Records
    ) -> Iterator[tuple[SlabSlots, Records, Records]]:
        """Yield (removals, entries, accesses) for each group to write.

        If all records fit in one group, yields one group. Otherwise each group has records of one kind.
        Groups of removals come first, then groups of entries, then groups of accesses.
        """
        if group_bytes(self._layout, len(removed), len(entries), len(accessed)) <= self._max_group_bytes:
            yield removed, entries, accessed
            return
        room = self._max_group_bytes - GROUP.itemsize - 8
        for kind, records in enumerate((removed, entries, accessed)):
            step = room // records.itemsize
            for start in range(0, len(records), step):
                pieces = [removed[:0], entries[:0], accessed[:0]]
                pieces[kind] = records[start : start + step]
                yield pieces[0], pieces[1], pieces[2]

    def checkpoint(self, contents: Contents) -> None:
        """Overwrite the older checkpoint with `contents`, durably, and restart the log.

        Cost: a write of 80 bytes a block, and two syncs.
        """
        epoch = self._epoch + 1
        write_checkpoint(self._slab, self._layout, epoch, contents)
        self._epoch, self._sequence, self._at = epoch, 0, 0

    def sync(self) -> None:
        """Make all groups and data that were written so far durable. Raises `OSError` if this fails."""
        self._slab.sync()


def write_checkpoint(slab: Slab, layout: Layout, epoch: int, contents: Contents) -> None:
    """Write `contents` as the durable checkpoint of `epoch`, at the checkpoint's offset in `layout`.

    Raises: `OSError` if this fails.
    """
    slab_id = slab.identity.slab_id
    start, slots = layout.checkpoint_offset(epoch), contents.slots()
    memory = aligned(layout.checkpoint_group_bytes)
    no_slots, no_accesses, step = np.empty(0, np.uint32), np.empty(0, ACCESS), layout.entries_per_group
    num_groups = -(-len(slots) // step)
    for sequence in range(num_groups):
        entries = contents.entries(slots[sequence * step : (sequence + 1) * step])
        group = Group(epoch, sequence, CHECKPOINT, no_slots, entries, no_accesses, 0, 0)
        encoded = encode_group(layout, slab_id, group, memory)
        slab.write_pages(start + PAGE_BYTES + sequence * layout.checkpoint_group_bytes, encoded)
    slab.sync()
    head = aligned(PAGE_BYTES)
    written = tuple(sorted(contents.written.items())[-MAX_HOURS:])
    head[:] = encode_head(slab_id, Head(epoch, len(slots), num_groups, contents.last_generation, written))
    for offset in (start, start + layout.checkpoint_bytes - PAGE_BYTES):
        slab.write_pages(offset, head)
    slab.sync()
