"""Every byte of a slab: superblock, groups of the journal, heads of checkpoints, headers of slots.

Owns the layout, the encodings and their checksums; docs/formats.md says the same in prose. All integers are
little-endian. Does no I/O, and does not know when anything is written.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from kvoffload.core.keys import MAX_KEY_BYTES, Keys, words_per_key
from kvoffload.errors import ConfigError
from kvoffload.tiers.disk.files import PAGE_BYTES

FORMAT_VERSION = 1
MAX_BLOCK_BYTES = 1 << 30
MAX_SLOTS = 1 << 30
MAX_TEXT_BYTES = 3072
LOCK_FILE_BYTES = PAGE_BYTES
"""What the lock file may take, counted in the capacity."""

LOG, CHECKPOINT = 1, 2
REUSE = np.uint32(1 << 31)
"""Bit of the slot in an access: it counts as a use, and is not only a new place in the order."""

Bytes: TypeAlias = npt.NDArray[np.uint8]
Records: TypeAlias = npt.NDArray[Any]
Slots: TypeAlias = npt.NDArray[np.uint32]

SLAB_MAGIC, GROUP_MAGIC, CHECKPOINT_MAGIC, BLOCK_MAGIC = b"KVOFSLAB", b"KVOGROUP", b"KVOCHECK", b"KVOBLOCK"

SUPERBLOCK = np.dtype(
    [
        ("magic", "S8"),
        ("checksum", "<u8"),
        ("version", "<u4"),
        ("page_bytes", "<u4"),
        ("capacity_bytes", "<u8"),
        ("num_slots", "<u8"),
        ("block_bytes", "<u8"),
        ("key_bytes", "<u4"),
        ("text_bytes", "<u4"),
        ("slab_id", "<u8"),
        ("fingerprint", "u1", 16),
        ("created_at_s", "<u8"),
        ("checkpoint_bytes", "<u8"),
        ("checkpoint_group_bytes", "<u8"),
        ("log_bytes", "<u8"),
    ]
)
GROUP = np.dtype(
    [
        ("magic", "S8"),
        ("checksum", "<u8"),
        ("slab_id", "<u8"),
        ("epoch", "<u8"),
        ("sequence", "<u8"),
        ("first_stamp", "<u8"),
        ("body_bytes", "<u8"),
        ("kind", "<u4"),
        ("num_removed", "<u4"),
        ("num_entries", "<u4"),
        ("num_accessed", "<u4"),
    ]
)
HEAD = np.dtype(
    [
        ("magic", "S8"),
        ("checksum", "<u8"),
        ("slab_id", "<u8"),
        ("epoch", "<u8"),
        ("num_entries", "<u8"),
        ("num_groups", "<u8"),
    ]
)
ACCESS = np.dtype([("slot", "<u4"), ("after", "<u4")])
"""A slot that was used (with `REUSE` where it counts), and when: as many stamps after the group's first."""


def entry_dtype(key_bytes: int) -> np.dtype[Any]:
    """A block that is here, as the journal has it."""
    return np.dtype(
        [
            ("slot", "<u4"),
            ("uses", "<u4"),
            ("generation", "<u8"),
            ("stamp", "<u8"),
            ("written_at_s", "<u8"),
            ("key", "<u8", (words_per_key(key_bytes),)),
        ]
    )


def header_dtype(key_bytes: int) -> np.dtype[Any]:
    """What stands before the bytes of a block in its slot."""
    return np.dtype(
        [
            ("magic", "S8"),
            ("checksum", "<u8"),
            ("fingerprint", "u1", 16),
            ("slot", "<u8"),
            ("generation", "<u8"),
            ("written_at_s", "<u8"),
            ("block_bytes", "<u8"),
            ("key_bytes", "<u8"),
            ("key", "<u8", (words_per_key(key_bytes),)),
        ]
    )


def pages(num_bytes: int) -> int:
    """`num_bytes`, rounded up to whole pages."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


@dataclass(frozen=True)
class Layout:
    """Where everything is in a slab.

    ``[superblock | its copy | checkpoint 0 | checkpoint 1 | log | slot 0 | slot 1 | ...]``
    """

    block_bytes: int
    key_bytes: int
    num_slots: int

    @classmethod
    def within(cls, capacity_bytes: int, block_bytes: int, key_bytes: int) -> Layout:
        """The most slots that fit in `capacity_bytes` with all that belongs to them; `ConfigError`."""
        for field, value, largest in (
            ("block_bytes", block_bytes, MAX_BLOCK_BYTES),
            ("key_bytes", key_bytes, MAX_KEY_BYTES),
        ):
            if not 1 <= value <= largest:
                raise ConfigError(field, value, f"allowed: 1 to {largest}")
        low, high = 0, min(MAX_SLOTS, max(0, capacity_bytes) // PAGE_BYTES)
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
                f"one block of {block_bytes} bytes needs {least} in each path",
            )
        return cls(block_bytes, key_bytes, low)

    @property
    def slot_bytes(self) -> int:
        """From one slot to the next: a page for the header, then the block."""
        return PAGE_BYTES + pages(self.block_bytes)

    @property
    def entry_bytes(self) -> int:
        return entry_dtype(self.key_bytes).itemsize

    @property
    def checkpoint_group_bytes(self) -> int:
        """Of one group of a checkpoint: small, since a flipped bit costs a group."""
        return min(64 * 1024, pages(GROUP.itemsize + self.num_slots * self.entry_bytes))

    @property
    def entries_per_group(self) -> int:
        return (self.checkpoint_group_bytes - GROUP.itemsize) // self.entry_bytes

    @property
    def checkpoint_bytes(self) -> int:
        """A head, the groups, and a copy of the head."""
        groups = -(-self.num_slots // self.entries_per_group)
        return 2 * PAGE_BYTES + groups * self.checkpoint_group_bytes

    @property
    def log_bytes(self) -> int:
        """Half a checkpoint and at least 64 KiB: a checkpoint is written when it is full."""
        return max(16 * PAGE_BYTES, pages(self.num_slots * self.entry_bytes // 2))

    def checkpoint_offset(self, epoch: int) -> int:
        return 2 * PAGE_BYTES + (epoch % 2) * self.checkpoint_bytes

    @property
    def log_offset(self) -> int:
        return 2 * PAGE_BYTES + 2 * self.checkpoint_bytes

    @property
    def slots_offset(self) -> int:
        return self.log_offset + self.log_bytes

    def slot_offset(self, slot: int) -> int:
        return self.slots_offset + slot * self.slot_bytes

    @property
    def file_bytes(self) -> int:
        return self.slot_offset(self.num_slots)


class Identity(NamedTuple):
    """Which slab this is, and who may use it.

    Attributes:
        slab_id: random; binds the journal's groups to their slab.
        fingerprint: 16 bytes of SHA-256 of the producer's text; every block carries it.
        text: the producer's text, cut to fit the superblock; for people.
        created_at_s: seconds since 1970.
    """

    slab_id: int
    fingerprint: bytes
    text: str
    created_at_s: int


def fingerprint_of(text: str) -> bytes:
    """The 16 bytes that stand for a producer."""
    return hashlib.sha256(text.encode()).digest()[:16]


# ---- superblock


def encode_superblock(layout: Layout, identity: Identity, capacity_bytes: int) -> Bytes:
    """One page."""
    text = identity.text.encode()[:MAX_TEXT_BYTES]
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
    page[SUPERBLOCK.itemsize : SUPERBLOCK.itemsize + len(text)] = np.frombuffer(text, np.uint8)
    return _sealed(page, fields)


def decode_superblock(page: Bytes) -> tuple[Layout, Identity, int] | str:
    """Layout, identity and capacity in bytes; or why this is none that we can use."""
    fields = page[: SUPERBLOCK.itemsize].view(SUPERBLOCK)[0]
    if fields["magic"] != SLAB_MAGIC:
        return "it is not a slab"
    if fields["version"] != FORMAT_VERSION:
        return f"it has format version {fields['version']}, and this is version {FORMAT_VERSION}"
    if not _sound(page, int(fields["checksum"])):
        return "its superblock is damaged"
    layout = Layout(int(fields["block_bytes"]), int(fields["key_bytes"]), int(fields["num_slots"]))
    text = page[SUPERBLOCK.itemsize :][: int(fields["text_bytes"])].tobytes().decode(errors="replace")
    identity = Identity(
        int(fields["slab_id"]), fields["fingerprint"].tobytes(), text, int(fields["created_at_s"])
    )
    return layout, identity, int(fields["capacity_bytes"])


# ---- journal


class Group(NamedTuple):
    """What one group of the journal says, in the order in which it holds: slots that were emptied, blocks
    that are here, slots that were used since `first_stamp`."""

    epoch: int
    sequence: int
    kind: int
    removed: Slots
    entries: Records
    accessed: Records
    first_stamp: int
    num_bytes: int


def group_bytes(layout: Layout, num_removed: int, num_entries: int, num_accessed: int) -> int:
    """Size of a group, in whole pages."""
    return pages(
        GROUP.itemsize
        + _removed_bytes(num_removed)
        + num_entries * layout.entry_bytes
        + num_accessed * ACCESS.itemsize
    )


def _removed_bytes(num_removed: int) -> int:
    return (num_removed + 1) // 2 * 8


def encode_group(layout: Layout, slab_id: int, group: Group, into: Bytes) -> Bytes:
    """Write a group into the front of `into`, which is aligned memory; the part that it takes."""
    counts = len(group.removed), len(group.entries), len(group.accessed)
    out = into[: group_bytes(layout, *counts)]
    out[:] = 0
    end = GROUP.itemsize
    for part in (group.removed, group.entries, group.accessed):
        raw = np.frombuffer(part.tobytes(), np.uint8)
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
    """The group at the front of `memory`; None if there is none that is whole."""
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
    num_removed, num_entries, num_accessed = (
        int(fields[name]) for name in ("num_removed", "num_entries", "num_accessed")
    )
    dtype = entry_dtype(layout.key_bytes)
    removed_end = _removed_bytes(num_removed)
    entries_end = removed_end + num_entries * dtype.itemsize
    return Group(
        int(fields["epoch"]),
        int(fields["sequence"]),
        int(fields["kind"]),
        body[: 4 * num_removed].view("<u4"),
        body[removed_end:entries_end].view(dtype),
        body[entries_end : entries_end + num_accessed * ACCESS.itemsize].view(ACCESS),
        int(fields["first_stamp"]),
        group_bytes(layout, num_removed, num_entries, num_accessed),
    )


class Head(NamedTuple):
    """The first and the last page of a checkpoint: it is whole."""

    epoch: int
    num_entries: int
    num_groups: int


def encode_head(slab_id: int, head: Head) -> Bytes:
    """One page."""
    page, fields = _page(HEAD)
    fields["magic"], fields["slab_id"] = CHECKPOINT_MAGIC, slab_id
    fields["epoch"], fields["num_entries"], fields["num_groups"] = head
    return _sealed(page, fields)


def decode_head(slab_id: int, page: Bytes) -> Head | None:
    """The head in this page, if it is one of this slab and sound."""
    fields = page[: HEAD.itemsize].view(HEAD)[0]
    if fields["magic"] != CHECKPOINT_MAGIC or fields["slab_id"] != slab_id:
        return None
    if not _sound(page, int(fields["checksum"])):
        return None
    return Head(int(fields["epoch"]), int(fields["num_entries"]), int(fields["num_groups"]))


# ---- slots


def fill_headers(
    headers: Records,
    fingerprint: bytes,
    block_bytes: int,
    keys: Keys,
    slots: npt.NDArray[np.int64],
    generations: npt.NDArray[np.uint64],
    written_at_s: npt.NDArray[np.uint64] | int,
) -> None:
    """Write headers of blocks into records of `header_dtype`; their checksums are 0."""
    headers["magic"], headers["checksum"] = BLOCK_MAGIC, 0
    headers["fingerprint"] = np.frombuffer(fingerprint, np.uint8)
    headers["slot"], headers["generation"], headers["written_at_s"] = slots, generations, written_at_s
    headers["block_bytes"], headers["key_bytes"] = block_bytes, keys.key_bytes
    headers["key"] = keys.words


def chained_checksum(header: Any, payload: Any) -> int:
    """xxh3_64 over a header, whose checksum is 0, and over what belongs to it: one seeds the other."""
    return xxhash.xxh3_64_intdigest(payload, xxhash.xxh3_64_intdigest(header))


def _page(dtype: np.dtype[Any]) -> tuple[Bytes, Any]:
    page = np.zeros(PAGE_BYTES, np.uint8)
    return page, page[: dtype.itemsize].view(dtype)


def _sealed(page: Bytes, fields: Any) -> Bytes:
    fields["checksum"] = xxhash.xxh3_64_intdigest(page.data)
    return page


def _sound(page: Bytes, checksum: int) -> bool:
    """Whether a page has this checksum: bytes 8 to 16, which count as 0."""
    blank = page.copy()
    blank[8:16] = 0
    return xxhash.xxh3_64_intdigest(blank.data) == checksum
