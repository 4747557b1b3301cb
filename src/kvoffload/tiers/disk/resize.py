"""Resizing of a slab: moves blocks inside the file, and drops the coldest blocks if the space is too small.

Owns the order of writes. A crash at any write or sync leaves a sound slab, and the next opening resumes the
change.
"""

from __future__ import annotations

import errno
from dataclasses import replace

import numpy as np

from kvoffload.tiers.disk.journal import Journal, write_checkpoint
from kvoffload.tiers.disk.recovery import Contents, Recovered, read_in_chunks, recover
from kvoffload.tiers.disk.slab import REFUSED, SOUND, Positions, Scratch, Slab
from kvoffload.tiers.disk.slab_layout import Layout


def resize(slab: Slab, recovered: Recovered, target: Layout, capacity_bytes: int) -> Recovered | None:
    """Change the capacity of a slab; returns the slab's new contents. Slot offsets stay unchanged.

    Drops the coldest blocks if the space is too small. If the new capacity needs a longer journal, and there
    is no space for it now, returns None and leaves the slab unchanged.

    Args:
        target: the new layout: ``slab.layout.with_capacity(capacity_bytes)``.
        capacity_bytes: new capacity. If an interrupted change is resumed (`Layout.is_moving`), at most the
            slab's present capacity.

    Cost: a few passes over the journal, and copies of the blocks whose slots disappear. Raises `OSError`.
    """
    layout = slab.layout
    assert not layout.is_moving or capacity_bytes <= slab.capacity_bytes
    if layout.is_moving or target.journal_slots != layout.journal_slots:
        if not layout.is_moving:
            if not _move_journal_behind(slab, recovered, target, capacity_bytes):
                return None
            recovered = recover(slab)
        recovered = rearrange(slab, recovered, target.first_slot, target.num_slots, target.num_blocks)
        slab.write_zeros(target.journal_offset, target.journal_end)
        write_checkpoint(slab, target, recovered.epoch + 1, recovered.contents)
    else:
        recovered = rearrange(slab, recovered, target.first_slot, target.num_slots, target.num_blocks)
    slab.adopt(target, capacity_bytes)
    slab.trim(slab.num_reserved)
    return recover(slab)


def rearrange(slab: Slab, recovered: Recovered, first: int, end: int, num_blocks: int) -> Recovered:
    """Keep only the `num_blocks` most recently used blocks, all in slots `first` to ``end - 1``.

    Returns the slab's new contents. Kept blocks outside of this range are copied into free slots of the
    range. All changes are durable on return. A block on a bad sector is lost.

    Raises:
        OSError: the journal cannot be written, or the system refuses a read (ENOMEM, ESTALE). The slab
            stays usable, and the next attempt resumes.
    """
    end = min(end, slab.num_reserved)
    contents, journal = recovered.contents, Journal(slab, recovered)
    newest = contents.newest_slots()
    by_use = newest[np.argsort(contents.stamp[newest], kind="stable")]
    keep = min(num_blocks, max(0, end - first))
    leaving = np.setdiff1d(contents.slots(), by_use[max(0, len(by_use) - keep) :])
    if len(leaving):
        contents.forget(leaving)
        # Durable before any of these slots is written.
        journal.checkpoint(contents)
    slots = contents.slots()
    outside = slots[(slots < first) | (slots >= end)]
    if len(outside):
        targets = first + np.flatnonzero(contents.generation[first:end] == 0)[: len(outside)]
        _copy(slab, contents, outside, targets)
        slab.sync()
        journal.checkpoint(contents)
    return recover(slab) if len(leaving) or len(outside) else recovered


def _copy(slab: Slab, contents: Contents, slots: Positions, targets: Positions) -> None:
    """Copy the blocks in `slots` to `targets`. A copy keeps the key, the generation and the time of last use.

    Removes damaged blocks, and blocks whose copy could not be written, from `contents`.

    Raises:
        OSError: the system refused a read. The blocks of this chunk stay in `contents`, because the error
            may be transient.
    """
    scratch, num_read = Scratch(slab), 0
    for old, keys, outcomes, pool in read_in_chunks(slab, contents, slots):
        new, generations = targets[num_read : num_read + len(old)], contents.generation[old]
        num_read += len(old)
        if (outcomes == REFUSED).any():
            raise OSError(errno.EAGAIN, "the system refuses to read some blocks now; try again later")
        sound = np.flatnonzero(outcomes == SOUND)
        written = np.zeros(len(old), np.bool_)
        if len(sound):
            written[sound], checksums = slab.write_blocks(
                keys.take(sound), new[sound], generations[sound], pool, sound, scratch
            )
            moved = written[sound]
            contents.move(old[sound][moved], new[sound][moved], checksums[moved])
        contents.forget(old[~written])


def _move_journal_behind(slab: Slab, recovered: Recovered, target: Layout, capacity_bytes: int) -> bool:
    """Move the journal behind the slots, to make space for a longer journal in the old place.

    Writes the new capacity to the superblock. If the space behind the slots is too small, returns False and
    leaves the slab unchanged.
    """
    layout = slab.layout
    num_slots = max(slab.num_reserved, target.first_slot + min(len(recovered.contents), target.num_blocks))
    # `first_slot` 0: after a crash a smaller capacity may use slots below the present first slot.
    moved = replace(layout, num_slots=num_slots, first_slot=0, journal_offset=layout.slot_offset(num_slots))
    while slab.room is not None and slab.room.own_bytes < moved.journal_end:
        if not slab.room.make(moved.journal_end - slab.room.own_bytes):
            return False
    if num_slots > target.num_slots or not slab.lengthen_to(moved.journal_end):
        return False
    slab.write_zeros(moved.journal_offset, moved.journal_end)
    write_checkpoint(slab, moved, recovered.epoch + 1, recovered.contents)
    slab.adopt(moved, capacity_bytes)
    return True
