"""Changes of a slab's size: blocks move inside the file, and the coldest leave if not all have room.

Owns the order of writes that makes this safe: a crash at any write or sync leaves a sound slab, and the next
opening begins again from there. Does not know why a slab changes its size.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kvoffload.tiers.disk.files import aligned
from kvoffload.tiers.disk.journal import Journal, write_checkpoint
from kvoffload.tiers.disk.layout import Layout
from kvoffload.tiers.disk.recovery import Contents, Found, recover
from kvoffload.tiers.disk.slab import SOUND, Positions, Scratch, Slab

_PIECE_BYTES = 1024 * 1024


def resize(slab: Slab, found: Found, target: Layout, capacity_bytes: int) -> Found | None:
    """Give a slab another layout, with each slot where it was; returns its contents then.

    Blocks without room leave, the coldest first. Returns None, and changes nothing, if there is no room for
    the journal to grow now.

    Cost: the journal is read and written some times. Blocks are copied only from slots that are no longer
    there. Raises `OSError`.

    Args:
        target: `with_capacity(capacity_bytes)` of the slab's layout.
        capacity_bytes: at most the capacity in the superblock if an earlier change was interrupted.
    """
    layout = slab.layout
    assert not layout.is_moving or capacity_bytes <= slab.capacity_bytes
    if layout.is_moving or target.journal_slots != layout.journal_slots:
        if not layout.is_moving:
            if not _move_journal_behind(slab, found, target, capacity_bytes):
                return None
            found = recover(slab)
        found = rearrange(slab, found, target.first_slot, target.num_slots, target.num_blocks)
        _write_zeros(slab, target)
        write_checkpoint(slab, target, found.epoch + 1, found.contents)
    else:
        found = rearrange(slab, found, target.first_slot, target.num_slots, target.num_blocks)
    slab.adopt(target, capacity_bytes)
    slab.trim(slab.num_reserved)
    return recover(slab)


def rearrange(slab: Slab, found: Found, first: int, end: int, num_blocks: int) -> Found:
    """Have at most `num_blocks` blocks in a slab, all in the slots from `first` to before `end`, durably;
    returns its contents then.

    The coldest blocks leave. Of the others those that are elsewhere are copied to free slots: never more than
    slots are given up. A block that cannot be read is lost.

    Raises: `OSError`.
    """
    end = min(end, slab.num_reserved)
    contents, journal = found.contents, Journal(slab, found)
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
    return recover(slab) if len(leaving) or len(outside) else found


def _copy(slab: Slab, contents: Contents, slots: Positions, targets: Positions) -> None:
    """Copy the blocks in these slots to other slots. Each keeps its key, generation and uses."""
    layout, scratch, step = slab.layout, Scratch(slab), slab.chunk_blocks
    pool = aligned(step * layout.slot_bytes).reshape(step, -1)[:, : layout.block_bytes]
    for start in range(0, len(slots), step):
        old, new = slots[start : start + step], targets[start : start + step]
        keys, generations = contents.keys(old), contents.generation[old]
        rows = np.arange(len(old))
        outcomes = slab.read_blocks(keys, old, generations, contents.checksum[old], pool, rows, scratch)
        sound = np.flatnonzero(outcomes == SOUND)
        written = np.zeros(len(old), np.bool_)
        if len(sound):
            written[sound], checksums = slab.write_blocks(
                keys.take(sound), new[sound], generations[sound], pool, sound, scratch
            )
            moved = written[sound]
            contents.move(old[sound][moved], new[sound][moved], checksums[moved])
        contents.forget(old[~written])


def _move_journal_behind(slab: Slab, found: Found, target: Layout, capacity_bytes: int) -> bool:
    """Write the journal behind the slots, so that its old place and the slots behind it can be written.

    The superblock then names the new capacity: only up to that capacity there is room before the journal.
    False, and the slab as it was, if there is no room for that.
    """
    layout = slab.layout
    num_slots = max(slab.num_reserved, target.first_slot + min(len(found.contents), target.num_blocks))
    # From slot 0 on: a smaller capacity after a crash may use slots below the present first one.
    moved = replace(layout, num_slots=num_slots, first_slot=0, journal_offset=layout.slot_offset(num_slots))
    while slab.room is not None and slab.room.own_bytes < moved.journal_end:
        if not slab.room.make(moved.journal_end - slab.room.own_bytes):
            return False
    if num_slots > target.num_slots or not slab.lengthen_to(moved.journal_end):
        return False
    _write_zeros(slab, moved)
    write_checkpoint(slab, moved, found.epoch + 1, found.contents)
    slab.adopt(moved, capacity_bytes)
    return True


def _write_zeros(slab: Slab, layout: Layout) -> None:
    """Empty the place of a journal: what is there now is none of it."""
    empty = aligned(_PIECE_BYTES)
    for start in range(layout.journal_offset, layout.journal_end, _PIECE_BYTES):
        slab.write_pages(start, empty[: min(_PIECE_BYTES, layout.journal_end - start)])
