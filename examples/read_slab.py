"""Reader of slabs without kvoffload; implements docs/formats.md. Usage: read_slab.py PATH."""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator
from pathlib import Path

from xxhash import xxh3_64_intdigest as xxh3

PAGE = 4096
SUPERBLOCK = struct.Struct("<8sQIIQQQIIQ16sQQQQQQQQQQ")
GROUP = struct.Struct("<8sQQQQQQIIII")
HEAD = struct.Struct("<8sQQQQQ")
ENTRY = struct.Struct("<IIQQQQ")
HEADER = struct.Struct("<16sQQQQ")


def checked(page: bytes, body: bytes | None = None) -> bool:
    """Verify bytes 8 to 16: the checksum of a page, or of a group's header and body."""
    blank = page[:8] + bytes(8) + page[16:]
    seeded = xxh3(blank) if body is None else xxh3(body, xxh3(blank))
    return seeded == int.from_bytes(page[8:16], "little")


def read_slab(path: Path) -> Iterator[tuple[bytes, int, int, bytes]]:
    """Yield key, slot, generation and bytes of every valid block."""
    data = path.read_bytes()  # a real reader seeks
    pages = (data[:PAGE], data[PAGE : 2 * PAGE])
    sound = [SUPERBLOCK.unpack_from(p) for p in pages if p.startswith(b"KVOFSLAB") and checked(p)]
    (_, _, version, page_bytes, _, num_slots, block_bytes, key_bytes, _, slab_id, fingerprint, _,
     checkpoint_bytes, group_bytes, log_bytes, void_before, _, first_slot, origin, _, journal,
     ) = max(sound, key=lambda s: s[16])  # fmt: skip
    assert (version, page_bytes) == (4, PAGE)
    padded_key, log = -(-key_bytes // 8) * 8, journal + 2 * checkpoint_bytes
    log_end, slot_bytes = log + log_bytes, -(-block_bytes // PAGE) * PAGE
    entry_bytes, entries = ENTRY.size + padded_key, {}

    def group(at: int, end: int, wanted: int) -> tuple[int, int, int, bytes, int, int] | None:
        """Read a sound group of a kind; returns epoch, sequence, end, body, removals and entries."""
        header = data[at : at + GROUP.size]
        magic, _, slab, epoch, sequence, _, length, kind, removed, added, _ = GROUP.unpack(header)
        body, end_of_group = (
            data[at + GROUP.size : end][:length],
            at + -(-(GROUP.size + length) // PAGE) * PAGE,
        )
        if (magic, slab, kind, len(body)) != (b"KVOGROUP", slab_id, wanted, length) or not checked(
            header, body
        ):
            return None
        return epoch, sequence, end_of_group, body, removed, added

    def hold(body: bytes, removed: int, added: int) -> None:
        for (slot,) in struct.iter_unpack("<I", body[: 4 * removed]):
            entries.pop(slot, None)
        start = (removed + 1) // 2 * 8
        for entry in range(start, start + added * entry_bytes, entry_bytes):
            slot, _, generation, _, _, checksum = ENTRY.unpack_from(body, entry)
            if generation >= void_before and first_slot <= slot < num_slots:
                entries[slot] = generation, checksum, body[entry + ENTRY.size :][:padded_key]

    heads = [(0, 0, 0)]
    for place, region in enumerate((journal, journal + checkpoint_bytes)):
        for at in (region, region + checkpoint_bytes - PAGE):
            magic, _, slab, epoch, _, groups = HEAD.unpack_from(data, at)
            if (magic, slab, epoch % 2) == (b"KVOCHECK", slab_id, place) and checked(data[at : at + PAGE]):
                heads.append((epoch, region, groups))
    newest, region, groups = max(heads)
    for number in range(groups):
        at = region + PAGE + number * group_bytes
        if (fields := group(at, at + group_bytes, 2)) and fields[:2] == (newest, number):
            hold(*fields[3:])
    in_log = [(at, fields) for at in range(log, log_end, PAGE) if (fields := group(at, log_end, 1))]
    newest, after, next_sequence = max([newest, *(fields[0] for _, fields in in_log)]), log, 0
    for at, (epoch, sequence, end, *contents) in in_log:
        if epoch == newest and at >= after and sequence >= next_sequence:
            hold(*contents)
            after, next_sequence = end, sequence + 1
    for slot, (generation, checksum, key) in sorted(entries.items()):
        payload = data[origin + slot * slot_bytes :][:block_bytes]
        header = HEADER.pack(fingerprint, slot, generation, block_bytes, key_bytes) + key
        if xxh3(payload, xxh3(header)) == checksum:
            yield key[:key_bytes], slot, generation, payload


if __name__ == "__main__":
    for key, slot, generation, payload in read_slab(Path(sys.argv[1])):
        print(f"{key.hex()} slot {slot} generation {generation} {len(payload)} bytes")
