"""Encodings of a slab: superblock, journal groups, checkpoint heads and block headers, with checksums.

`slab_layout` has the offsets; docs/formats.md describes the format. All integers are little-endian. Does no
I/O.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from kvoffload.structures.keys import MAX_KEY_BYTES, Keys
from kvoffload.tiers.disk.files import PAGE_BYTES
from kvoffload.tiers.disk.slab_layout import (
    ACCESS,
    GROUP,
    MAX_BLOCK_BYTES,
    MAX_SLOTS,
    Layout,
    entry_dtype,
    group_bytes,
    header_dtype,
    record_type,
    removed_bytes,
)
from kvoffload.tiers.producer_text import pack, unpack

FORMAT_VERSION = 4
LOG, CHECKPOINT = 1, 2
REUSE = np.uint32(1 << 31)
"""Flag in the slot number of an access record: the access counts as a use of the block. Without the flag, the
access changes only the order of the blocks in the policy, because the request itself wrote the block."""

Bytes: TypeAlias = npt.NDArray[np.uint8]
Records: TypeAlias = npt.NDArray[Any]
SlabSlots: TypeAlias = npt.NDArray[np.uint32]

SLAB_MAGIC, GROUP_MAGIC, CHECKPOINT_MAGIC = b"KVOFSLAB", b"KVOGROUP", b"KVOCHECK"

SUPERBLOCK = record_type(
    "magic:S8 checksum:<u8 version:<u4 page_bytes:<u4 capacity_bytes:<u8 num_slots:<u8 block_bytes:<u8 "
    "key_bytes:<u4 text_bytes:<u4 slab_id:<u8 fingerprint:16u1 created_at_s:<u8 checkpoint_bytes:<u8 "
    "checkpoint_group_bytes:<u8 log_bytes:<u8 void_before:<u8 revision:<u8 first_slot:<u8 origin:<u8 "
    "journal_slots:<u8 journal_offset:<u8"
)
HEAD = record_type(
    "magic:S8 checksum:<u8 slab_id:<u8 epoch:<u8 num_entries:<u8 num_groups:<u8 num_hours:<u8 "
    "last_generation:<u8"
)
HOUR = record_type("hour:<u8 num_blocks:<u8")
MAX_NUMBER = 1 << 62
"""Limit of epochs, sequences and generations.

A greater number can only come from damage, and would overflow.
"""
MAX_HOURS = 48
"""Number of hours for which a checkpoint counts the written blocks. Write budgets need the last 24 hours."""


class Identity(NamedTuple):
    """Identity of a slab and of its producer.

    Attributes:
        slab_id: random number that identifies the slab. Every journal group and head contains it.
        fingerprint: digest of the producer's text (`producer_of`). Part of every block's checksum.
        text: the producer's text, for reports. The superblock contains a shortened text.
        created_at_s: seconds since 1970.
    """

    slab_id: int
    fingerprint: bytes
    text: str
    created_at_s: int


# ---- superblock


def encode_superblock(
    layout: Layout, identity: Identity, capacity_bytes: int, void_before: int = 0, revision: int = 0
) -> Bytes:
    """Encode a superblock as one page.

    Args:
        void_before: blocks with a lower generation are invalid.
        revision: number that increases with each change of the superblock. If both copies are sound, the
            copy with the higher revision is valid.
    """
    text = pack(identity.text)
    page, fields = _page(SUPERBLOCK)
    fields["magic"] = SLAB_MAGIC
    fields["version"], fields["page_bytes"] = FORMAT_VERSION, PAGE_BYTES
    fields["capacity_bytes"], fields["num_slots"] = capacity_bytes, layout.num_slots
    fields["block_bytes"], fields["key_bytes"] = layout.block_bytes, layout.key_bytes
    fields["text_bytes"], fields["slab_id"] = len(text), identity.slab_id
    fields["fingerprint"] = np.frombuffer(identity.fingerprint, np.uint8)
    fields["created_at_s"] = identity.created_at_s
    fields["checkpoint_bytes"], fields["log_bytes"] = layout.checkpoint_bytes, layout.log_bytes
    fields["checkpoint_group_bytes"] = layout.checkpoint_group_bytes
    fields["void_before"], fields["revision"] = void_before, revision
    for name in ("first_slot", "origin", "journal_slots", "journal_offset"):
        fields[name] = getattr(layout, name)
    page[SUPERBLOCK.itemsize : SUPERBLOCK.itemsize + len(text)] = np.frombuffer(text, np.uint8)
    return seal_page(page, fields)


def void_before(superblock: Bytes) -> int:
    """Read the smallest valid generation from a superblock."""
    return int(superblock[: SUPERBLOCK.itemsize].view(SUPERBLOCK)["void_before"][0])


def revision_of(superblock: Bytes) -> int:
    """Read the revision of a superblock."""
    return int(superblock[: SUPERBLOCK.itemsize].view(SUPERBLOCK)["revision"][0])


def decode_superblock(page: Bytes) -> tuple[Layout, Identity, int] | str:
    """Decode a superblock; return its layout, identity and capacity in bytes.

    For an unusable superblock, returns the reason as text.
    """
    fields = page[: SUPERBLOCK.itemsize].view(SUPERBLOCK)[0]
    if fields["magic"] != SLAB_MAGIC:
        return "it is not a slab"
    if fields["version"] != FORMAT_VERSION:
        return f"its format version is {fields['version']}, and this kvoffload reads version {FORMAT_VERSION}"
    if not _sound(page, int(fields["checksum"])):
        return "its superblock is damaged"
    ranges = ("block_bytes", MAX_BLOCK_BYTES), ("key_bytes", MAX_KEY_BYTES), ("num_slots", MAX_SLOTS)
    for name, largest in (*ranges, ("journal_slots", MAX_SLOTS)):
        if not 1 <= int(fields[name]) <= largest:
            return f"its superblock has {name} {fields[name]}; allowed: 1 to {largest}"
    counts = fields["void_before"], fields["revision"], fields["origin"], fields["journal_offset"]
    if fields["page_bytes"] != PAGE_BYTES or max(map(int, counts)) >= MAX_NUMBER:
        return "its superblock contradicts itself"
    names = "block_bytes", "key_bytes", "num_slots", "first_slot", "origin", "journal_slots", "journal_offset"
    layout = Layout(*(int(fields[name]) for name in names))
    if not is_possible(layout):
        return "its superblock contradicts itself"
    text = unpack(page[SUPERBLOCK.itemsize :][: int(fields["text_bytes"])].tobytes())
    sizes = "checkpoint_bytes", "checkpoint_group_bytes", "log_bytes"
    if any(int(fields[size]) != getattr(layout, size) for size in sizes):
        return "its journal has other sizes than this version computes"
    identity = Identity(
        int(fields["slab_id"]), fields["fingerprint"].tobytes(), text, int(fields["created_at_s"])
    )
    return layout, identity, int(fields["capacity_bytes"])


def is_possible(layout: Layout) -> bool:
    """Return True if the regions of a layout do not overlap."""
    offsets = layout.origin, layout.journal_offset
    if layout.first_slot >= layout.num_slots or any(offset % PAGE_BYTES for offset in offsets):
        return False
    starts_behind_superblocks = min(layout.journal_offset, layout.slots_offset) >= 2 * PAGE_BYTES
    return starts_behind_superblocks and (layout.journal_end <= layout.slots_offset or layout.is_moving)


# ---- journal


class Group(NamedTuple):
    """Contents of one journal group. Removals apply first, then entries, then accesses.

    Attributes:
        epoch: epoch of the log or checkpoint.
        sequence: number of the group in the log or checkpoint.
        kind: `LOG` or `CHECKPOINT`.
        removed: emptied slots.
        entries: records of written blocks.
        accessed: records of accesses, with stamps relative to `first_stamp`.
        num_bytes: encoded size in whole pages.
    """

    epoch: int
    sequence: int
    kind: int
    removed: SlabSlots
    entries: Records
    accessed: Records
    first_stamp: int
    num_bytes: int


def encode_group(layout: Layout, slab_id: int, group: Group, into: Bytes) -> Bytes:
    """Encode a group at the start of aligned memory `into`; returns the used part of `into`."""
    counts = len(group.removed), len(group.entries), len(group.accessed)
    out = into[: group_bytes(layout, *counts)]
    out[:] = 0
    end = GROUP.itemsize
    for records in (group.removed, group.entries, group.accessed):
        raw = np.frombuffer(records.tobytes(), np.uint8)
        out[end : end + len(raw)] = raw
        end += -(-len(raw) // 8) * 8
    fields = out[: GROUP.itemsize].view(GROUP)
    fields["magic"], fields["slab_id"], fields["kind"] = GROUP_MAGIC, slab_id, group.kind
    fields["epoch"], fields["sequence"] = group.epoch, group.sequence
    fields["first_stamp"], fields["body_bytes"] = group.first_stamp, end - GROUP.itemsize
    fields["num_removed"], fields["num_entries"], fields["num_accessed"] = counts
    fields["checksum"] = chained_checksum(out[: GROUP.itemsize], out[GROUP.itemsize : end])
    return out


def decode_group(layout: Layout, slab_id: int, memory: Bytes) -> Group | None:
    """Decode the group at the start of `memory`; None if it is damaged or incomplete."""
    if len(memory) < GROUP.itemsize:
        return None
    header = memory[: GROUP.itemsize].copy()
    fields = header.view(GROUP)[0]
    if fields["magic"] != GROUP_MAGIC or fields["slab_id"] != slab_id:
        return None
    body = memory[GROUP.itemsize : GROUP.itemsize + int(fields["body_bytes"])]
    checksum, fields["checksum"] = int(fields["checksum"]), 0
    if len(body) != int(fields["body_bytes"]) or chained_checksum(header, body) != checksum:
        return None
    if max(fields["epoch"], fields["sequence"]) >= MAX_NUMBER:
        return None
    num_removed, num_entries, num_accessed = (
        int(fields[name]) for name in ("num_removed", "num_entries", "num_accessed")
    )
    dtype = entry_dtype(layout.key_bytes)
    removed_end = removed_bytes(num_removed)
    entries_end = removed_end + num_entries * dtype.itemsize
    if len(body) != entries_end + num_accessed * ACCESS.itemsize:
        return None
    entries = body[removed_end:entries_end].view(dtype)
    if (entries["generation"] >= MAX_NUMBER).any():
        return None
    return Group(
        int(fields["epoch"]),
        int(fields["sequence"]),
        int(fields["kind"]),
        body[: 4 * num_removed].view("<u4"),
        entries,
        body[entries_end : entries_end + num_accessed * ACCESS.itemsize].view(ACCESS),
        int(fields["first_stamp"]),
        group_bytes(layout, num_removed, num_entries, num_accessed),
    )


class Head(NamedTuple):
    """Head of a checkpoint. The checkpoint's first and last page are equal copies, written after all groups.

    Attributes:
        last_generation: greatest generation of any block that was ever written, also of removed blocks.
        written: (hour since 1970, number of blocks written in this hour), ascending.
    """

    epoch: int
    num_entries: int
    num_groups: int
    last_generation: int = 0
    written: tuple[tuple[int, int], ...] = ()


def encode_head(slab_id: int, head: Head) -> Bytes:
    """Encode a head as one page."""
    page, fields = _page(HEAD)
    fields["magic"], fields["slab_id"] = CHECKPOINT_MAGIC, slab_id
    fields["epoch"], fields["num_entries"], fields["num_groups"] = head[:3]
    fields["num_hours"], fields["last_generation"] = len(head.written), head.last_generation
    hours = np.array([(hour, min(count, MAX_NUMBER)) for hour, count in head.written], HOUR)
    page[HEAD.itemsize : HEAD.itemsize + hours.nbytes] = hours.view(np.uint8)
    return seal_page(page, fields)


def decode_head(layout: Layout, slab_id: int, page: Bytes) -> Head | None:
    """Decode a head; None if it is damaged or belongs to another slab."""
    fields = page[: HEAD.itemsize].view(HEAD)[0]
    if fields["magic"] != CHECKPOINT_MAGIC or fields["slab_id"] != slab_id:
        return None
    if not _sound(page, int(fields["checksum"])):
        return None
    limits = {
        "epoch": MAX_NUMBER,
        "last_generation": MAX_NUMBER,
        "num_entries": layout.max_entries + 1,
        "num_groups": layout.num_checkpoint_groups + 1,
        "num_hours": MAX_HOURS + 1,
    }
    if any(int(fields[name]) >= limit for name, limit in limits.items()):
        return None
    hours = page[HEAD.itemsize :][: int(fields["num_hours"]) * HOUR.itemsize].view(HOUR)
    written = tuple((int(hour), min(int(count), MAX_NUMBER)) for hour, count in hours.tolist())
    epoch, num_entries, num_groups = (int(fields[name]) for name in ("epoch", "num_entries", "num_groups"))
    return Head(epoch, num_entries, num_groups, int(fields["last_generation"]), written)


# ---- blocks


def block_seeds(
    fingerprint: bytes,
    block_bytes: int,
    keys: Keys,
    slots: npt.NDArray[np.int64],
    generations: npt.NDArray[np.uint64],
) -> npt.NDArray[np.uint64]:
    """Compute the checksum seed of each block: xxh3_64 of the block's header."""
    headers = np.empty(len(slots), header_dtype(keys.key_bytes))
    headers["fingerprint"] = np.frombuffer(fingerprint, np.uint8)
    headers["slot"], headers["generation"] = slots, generations
    headers["block_bytes"], headers["key_bytes"] = block_bytes, keys.key_bytes
    headers["key"] = keys.words
    packed, width = headers.tobytes(), headers.itemsize
    digest = xxhash.xxh3_64_intdigest
    return np.array([digest(packed[at : at + width]) for at in range(0, len(packed), width)], np.uint64)


def chained_checksum(header: Any, payload: Any) -> int:
    """Compute xxh3_64 of the payload, seeded with xxh3_64 of the header.

    The checksum field of the header must be 0.
    """
    return xxhash.xxh3_64_intdigest(payload, xxhash.xxh3_64_intdigest(header))


def _page(dtype: np.dtype[Any]) -> tuple[Bytes, Any]:
    page = np.zeros(PAGE_BYTES, np.uint8)
    return page, page[: dtype.itemsize].view(dtype)


def seal_page(page: Bytes, fields: Any) -> Bytes:
    """Compute and set the checksum of a page. Requires a checksum field of 0; returns the page."""
    fields["checksum"] = xxhash.xxh3_64_intdigest(page.data)
    return page


def _sound(page: Bytes, checksum: int) -> bool:
    """Return True if a page has this checksum. The checksum field, bytes 8 to 15, counts as 0."""
    blank = page.copy()
    blank[8:16] = 0
    return xxhash.xxh3_64_intdigest(blank.data) == checksum
