"""Read a slab without kvoffload: docs/formats.md in code. Run it with the path of a ``kvoffload.slab``."""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator
from pathlib import Path

from xxhash import xxh3_64_intdigest as xxh3

PAGE = 4096
SUPERBLOCK = struct.Struct("<8sQIIQQQIIQ16sQQQQQ")
GROUP = struct.Struct("<8sQQQQQQIIII")
HEAD = struct.Struct("<8sQQQQQ")
ENTRY = struct.Struct("<IIQQQQ")
HEADER = struct.Struct("<16sQQQQ")


def checked(page: bytes, body: bytes | None = None) -> bool:
    """Bytes 8 to 16 are the checksum of the page, or of a group and the body that it seeds."""
    blank = page[:8] + bytes(8) + page[16:]
    seeded = xxh3(blank) if body is None else xxh3(body, xxh3(blank))
    return seeded == int.from_bytes(page[8:16], "little")


def read_slab(path: Path) -> Iterator[tuple[bytes, int, int, bytes]]:
    """Key, slot, generation and bytes of every sound block."""
    data = path.read_bytes()  # a real reader seeks
    pages = (data[:PAGE], data[PAGE : 2 * PAGE])
    sound = [SUPERBLOCK.unpack_from(p) for p in pages if p.startswith(b"KVOFSLAB") and checked(p)]
    (_, _, version, page_bytes, _, _, block_bytes, key_bytes, _, slab_id, fingerprint, _,
     checkpoint_bytes, group_bytes, log_bytes, void_before) = max(sound, key=lambda s: s[-1])  # fmt: skip
    assert (version, page_bytes) == (2, PAGE)
    padded_key, log = -(-key_bytes // 8) * 8, 2 * PAGE + 2 * checkpoint_bytes
    first_slot, slot_bytes = log + log_bytes, -(-block_bytes // PAGE) * PAGE
    entry_bytes, entries = ENTRY.size + padded_key, {}

    def apply(at: int, kind: int, epoch: int, sequence: int) -> int:
        """Let the group at this place hold if it is the one expected; its size in bytes, or 0."""
        header = data[at : at + GROUP.size]
        magic, _, slab, *place, _, length, its_kind, removed, added, _ = GROUP.unpack(header)
        body = data[at + GROUP.size :][:length]
        expected = (b"KVOGROUP", slab_id, kind, [epoch, sequence])
        if (magic, slab, its_kind, place) != expected or not checked(header, body):
            return 0
        for (slot,) in struct.iter_unpack("<I", body[: 4 * removed]):
            entries.pop(slot, None)
        start = (removed + 1) // 2 * 8
        for entry in range(start, start + added * entry_bytes, entry_bytes):
            slot, _, generation, _, _, checksum = ENTRY.unpack_from(body, entry)
            if generation >= void_before:
                entries[slot] = generation, checksum, body[entry + ENTRY.size :][:padded_key]
        return -(-(GROUP.size + length) // PAGE) * PAGE

    heads = []
    for region in (2 * PAGE, 2 * PAGE + checkpoint_bytes):
        for at in (region, region + checkpoint_bytes - PAGE):
            magic, _, slab, epoch, _, groups = HEAD.unpack_from(data, at)
            if magic == b"KVOCHECK" and slab == slab_id and checked(data[at : at + PAGE]):
                heads.append((epoch, region, groups))
    epoch, region, groups = max(heads)
    for sequence in range(groups):
        apply(region + PAGE + sequence * group_bytes, 2, epoch, sequence)
    at = sequence = 0
    while at < log_bytes and (size := apply(log + at, 1, epoch, sequence)):
        at, sequence = at + size, sequence + 1
    for slot, (generation, checksum, key) in sorted(entries.items()):
        payload = data[first_slot + slot * slot_bytes :][:block_bytes]
        header = HEADER.pack(fingerprint, slot, generation, block_bytes, key_bytes) + key
        if xxh3(payload, xxh3(header)) == checksum:
            yield key[:key_bytes], slot, generation, payload


if __name__ == "__main__":
    for key, slot, generation, payload in read_slab(Path(sys.argv[1])):
        print(f"{key.hex()} slot {slot} generation {generation} {len(payload)} bytes")
