"""A hash index from keys to positions, in flat arrays. Used for managers, ghosts and request paths.

The index has two arrays:

- `table` is an open-addressing hash table with linear probing. An entry is 0 (empty) or ``tag << 32 |
  position + 1``, where the tag is the upper half of the key's hash.
- `keys` has the key of each position. The caller chooses the position of each key.

The search for a key begins at its home bucket, ``tag * buckets >> 32``. This formula allows any number of
buckets. It needs only the tag, so a removal can close the gap (backward shift) without reading `keys`. Both
arrays have their final size from the start, so there are no rehashes, tombstones or pauses.
"""

from __future__ import annotations

import numpy as np

from kvoffload.structures.batches import OneKey, is_key_at, word_at
from kvoffload.structures.jit import ReadU64Matrix, U64Array, U64Matrix, inline, kernel
from kvoffload.structures.keys import Keys, taken, words_per_key
from kvoffload.structures.structs import Struct

ABSENT = -1

MAX_POSITIONS = 2**31 - 2
"""Largest number of positions in an index or a list, because positions are stored as 32-bit numbers."""


class Index(Struct):
    """A map from keys to positions, which are numbers from 0 to ``num_positions - 1``.

    Memory: 16 bytes a position, and the key's words. Cost: a lookup, insertion or removal takes one or two
    cache misses (15 to 50 ns in an index of a million positions).
    """

    table: U64Array
    keys: U64Matrix
    key_bytes: int

    def __init__(self, num_positions: int, key_bytes: int) -> None:
        # At most half of the buckets are full: 1.5 probes for a hit, 2.5 for a miss, on average.
        super().__init__(
            table=np.zeros(2 * num_positions + 1, np.uint64),
            keys=np.zeros((num_positions, words_per_key(key_bytes)), np.uint64),
            key_bytes=key_bytes,
        )

    def populate(self) -> Index:
        """Write all memory of the index now; returns the index.

        Otherwise the operating system would allocate pages during later requests, and delay them by up to 1
        ms each.
        """
        self.table.fill(0)
        self.keys.fill(0)
        return self

    def clear(self) -> None:
        """Forget every key. Cost: O(positions)."""
        self.table.fill(0)

    def position_of(self, key: bytes) -> int:
        """Return the position of a key, or ABSENT."""
        return _find(self.memory, key)

    def put(self, key: bytes, position: int) -> None:
        """Add a key, which must be absent, at `position`. This method is for tests; kernels call `insert`."""
        _insert(self.memory, Keys.pack([key], self.key_bytes).words, position)

    def keys_at(self, positions: np.ndarray) -> Keys:
        """Return a copy of the keys at `positions`."""
        return Keys(taken(self.keys, positions), self.key_bytes)

    def key_at(self, position: int) -> bytes:
        """Return the key at `position`."""
        row: bytes = self.keys[position].tobytes()
        return row[: self.key_bytes]


@inline
def _mix(h: np.uint64, word: np.uint64) -> np.uint64:
    h = (h ^ word) * np.uint64(0xFF51AFD7ED558CCD)
    return h ^ (h >> np.uint64(32))


@inline
def _finish(h: np.uint64) -> np.uint64:
    h *= np.uint64(0xC4CEB9FE1A85EC53)
    return h ^ (h >> np.uint64(29))


@inline
def hash_row(keys: U64Matrix, row: int) -> np.uint64:
    """Return the 64-bit hash of the packed key ``keys[row]``.

    For each word the hash is multiplied and shifted, and at the end finished as in murmur3.
    """
    h = np.uint64(0x9E3779B97F4A7C15)
    for word in range(keys.shape[1]):
        h = _mix(h, keys[row, word])
    return _finish(h)


def words_with_hash(hashes: U64Array, num_words: int = 1) -> U64Array:
    """Return, for each hash, a packed key of `num_words` words that has this hash (`hash_row`).

    All words of a key except the first are 0. If `num_words` is 1, no other key has the same hash.
    """
    words = np.zeros((len(hashes), num_words), np.uint64)
    with np.errstate(over="ignore"):
        h = hashes ^ (hashes >> np.uint64(29)) ^ (hashes >> np.uint64(58))
        h = h * _inverse(0xC4CEB9FE1A85EC53)
        for _ in range(num_words):
            h = (h ^ (h >> np.uint64(32))) * _inverse(0xFF51AFD7ED558CCD)
        words[:, 0] = h ^ np.uint64(0x9E3779B97F4A7C15)
    return words


def _inverse(odd: int) -> np.uint64:
    return np.uint64(pow(odd, -1, 1 << 64))


@inline
def same_key(a: U64Array, i: int, b: U64Array, j: int) -> bool:
    """Return True if the packed keys ``a[i]`` and ``b[j]`` are equal."""
    for word in range(a.shape[1]):  # noqa: SIM110  (a generator is not a loop to numba)
        if a[i, word] != b[j, word]:
            return False
    return True


@inline
def copy_key(to: U64Array, i: int, source: U64Array, j: int) -> None:
    """Copy the key ``source[j]`` to ``to[i]``."""
    for word in range(to.shape[1]):
        to[i, word] = source[j, word]


@inline
def home_bucket(table: U64Array, h: np.uint64) -> int:
    """Return the bucket in which the search for a key with hash `h` begins."""
    return np.int64(((h >> np.uint64(32)) * np.uint64(table.shape[0])) >> np.uint64(32))


@inline
def bucket_of(index: Index, batch: U64Matrix, row: int, h: np.uint64) -> int:
    """Return the bucket of the key ``batch[row]`` with hash `h`, or the empty bucket for an absent key."""
    table, keys = index.table, index.keys
    tag = h >> np.uint64(32)
    bucket = home_bucket(table, h)
    while True:
        entry = table[bucket]
        if entry == 0 or (entry >> np.uint64(32) == tag and same_key(keys, position_in(entry), batch, row)):
            return bucket
        bucket += 1
        if bucket == table.shape[0]:
            bucket = 0


@inline
def position_in(entry: np.uint64) -> int:
    """Return the position that an entry of `table` contains; ABSENT for the entry of an empty bucket."""
    return np.int64(entry & np.uint64(0xFFFFFFFF)) - 1


@inline
def find(index: Index, batch: U64Matrix, row: int, h: np.uint64) -> int:
    """Return the position of the key `batch[row]` with hash `h`, or ABSENT."""
    return position_in(index.table[bucket_of(index, batch, row, h)])


@inline
def fill_bucket(index: Index, bucket: int, batch: U64Matrix, row: int, h: np.uint64, position: int) -> None:
    """Add the absent key ``batch[row]`` with hash `h` at `position`.

    `bucket` must be the empty bucket that `bucket_of` returned for this key.
    """
    copy_key(index.keys, position, batch, row)
    index.table[bucket] = (h & np.uint64(0xFFFFFFFF00000000)) | np.uint64(position + 1)


@inline
def insert(index: Index, batch: U64Matrix, row: int, h: np.uint64, position: int) -> None:
    """Add the key ``batch[row]`` with hash `h`, which must be absent, at `position`."""
    table = index.table
    bucket = home_bucket(table, h)
    while table[bucket] != 0:
        bucket += 1
        if bucket == table.shape[0]:
            bucket = 0
    fill_bucket(index, bucket, batch, row, h, position)


@inline
def remove(index: Index, position: int) -> None:
    """Remove the key at `position` from the table. The key itself stays readable in `keys`."""
    remove_hashed(index, position, hash_row(index.keys, position))


@inline
def remove_hashed(index: Index, position: int, h: np.uint64) -> None:
    """Remove the key at `position`, whose hash is `h`, from the table. The key stays readable in `keys`."""
    table = index.table
    size = table.shape[0]
    entry = (h & np.uint64(0xFFFFFFFF00000000)) | np.uint64(position + 1)
    bucket = home_bucket(table, h)
    while table[bucket] != entry:
        bucket += 1
        if bucket == size:
            bucket = 0
    hole = bucket
    while True:
        bucket += 1
        if bucket == size:
            bucket = 0
        entry = table[bucket]
        if entry == 0:
            break
        home = home_bucket(table, entry)
        from_home = bucket - home if bucket >= home else bucket - home + size
        from_hole = bucket - hole if bucket >= hole else bucket - hole + size
        # The entry may move into the hole only if its probe sequence includes the hole.
        if from_home >= from_hole:
            table[hole] = entry
            hole = bucket
    table[hole] = 0


@inline
def find_key(index: Index, address: int) -> int:
    """Return the position of the unpacked key at the memory address `address`, or ABSENT.

    The length of the key must be ``index.key_bytes``.
    """
    table, keys, key_bytes = index.table, index.keys, index.key_bytes
    h = np.uint64(0x9E3779B97F4A7C15)
    for word in range(keys.shape[1]):
        h = _mix(h, word_at(address, word, key_bytes))
    h = _finish(h)
    tag = h >> np.uint64(32)
    bucket = home_bucket(table, h)
    while True:
        entry = table[bucket]
        if entry == 0:
            return np.int64(ABSENT)
        if entry >> np.uint64(32) == tag and is_key_at(address, key_bytes, keys, position_in(entry)):
            return position_in(entry)
        bucket += 1
        if bucket == table.shape[0]:
            bucket = 0


@kernel
def _find(index: Index, key: OneKey) -> int:
    return find_key(index, key.address) if key.size == index.key_bytes else np.int64(ABSENT)


@kernel
def _insert(index: Index, batch: ReadU64Matrix, position: int) -> None:
    insert(index, batch, 0, hash_row(batch, 0), position)
