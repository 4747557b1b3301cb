"""What a manager knows of one inference request while it runs.

Owns the request's *path*: the keys that it has asked for, loaded, touched or offered, in the order of their
first appearance, and a record of each. Because of the path a request accesses each block once, however often
it is retried, its own blocks are protected while it stores, and each key is hashed once and looked up in the
manager's index once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvoffload.structures.index import (
    ABSENT,
    Index,
    bucket_of,
    fill_bucket,
    hash_row,
    position_in,
    same_key,
    word_of,
)
from kvoffload.structures.jit import I32Array, ReadU64Matrix, U64Array, U64Matrix, inline, kernel
from kvoffload.structures.keys import Keys, joined_keys

HASH, HINT, FLAGS = 0, 1, 2
"""Columns of `records`. The hint says where the block was last found: ``version << 32 | slot + 1``, or 0. It
is valid until the slot's version changes: a block may leave and come back while a request runs."""

_INT32 = np.dtype(np.int32)
_NO_POSITIONS = np.empty(0, np.int32)

ACCESSED = 1
SCRATCH = 2


class RequestContext:
    """One inference request, from `begin_request` to `finish_request`.

    Belongs to the manager that made it, and to its thread. Memory: about 70 bytes a block of the request,
    until it finishes.

    Attributes:
        path: index of the request's keys; positions count in the order of first appearance.
        records: shape ``(capacity, 3)``, uint64: what is known of each key, for the manager's kernels.
        length: number of keys on the path; capacity: how many fit before it grows.
        unpacked_keys: single keys that were looked up and are not yet on the path.
        observed: length of the leading part of the path that policy and admission rule have observed;
            num_observations: in how many parts they observed it.
        owner: the manager. The records of one manager are wrong in another.
    """

    __slots__ = (
        "_seen",
        "_seen_at",
        "capacity",
        "finished",
        "length",
        "num_observations",
        "observed",
        "owner",
        "path",
        "records",
        "request_id",
        "unpacked_keys",
    )

    def __init__(self, request_id: str, key_bytes: int, owner: object = None, capacity: int = 32) -> None:
        self.request_id = request_id
        self.owner = owner
        self.finished = False
        self.observed = self.num_observations = 0
        self.path = Index(capacity, key_bytes)
        self.length = 0
        self.capacity = capacity
        self.records = np.zeros((capacity, 3), np.uint64)
        self.unpacked_keys: list[bytes] = []
        # The last batch with new keys, and its positions: most calls of a request are about one batch.
        self._seen: Keys | None = None
        self._seen_at = _NO_POSITIONS

    def __repr__(self) -> str:
        return f"RequestContext({self.request_id!r}, {self.length} blocks{', finished' * self.finished})"

    def flush(self) -> None:
        """Add the keys that were looked up one by one to the path."""
        if self.unpacked_keys:
            asked, self.unpacked_keys = self.unpacked_keys, []
            self.extend(asked)

    def extend(self, keys: Sequence[bytes]) -> I32Array:
        """Add `keys` to the path; returns the position of each on it. Cost: O(keys).

        Raises `ValueError` that names the first key of a wrong length.
        """
        if self.unpacked_keys:
            self.flush()
        if keys is self._seen:
            return self._seen_at
        path, count = self.path, len(keys)
        positions = np.empty(count, _INT32)
        if isinstance(keys, Keys):
            if keys.key_bytes != path.key_bytes:
                raise ValueError(f"keys of {keys.key_bytes} bytes; all keys here have {path.key_bytes}")
            length = _extend(path.table, path.keys, self.records, self.length, keys.words, positions)
            if length < 0:
                # Grown only when needed: most batches repeat what is on the path.
                self.length = ~length
                self._grow(self.length + count)
                path = self.path
                length = _extend(path.table, path.keys, self.records, self.length, keys.words, positions)
            if length > self.length:
                self._seen, self._seen_at, self.length = keys, positions, length
        else:
            if self.length + count > self.capacity:
                self._grow(self.length + count)
                path = self.path
            joined = joined_keys(keys, path.key_bytes)
            self.length = _extend_bytes(path.table, path.keys, self.records, self.length, joined, positions)
        return positions

    def keys(self) -> Keys:
        """The path: every key of the request, in the order of first appearance (a view)."""
        return Keys(self.path.keys[: self.length], self.path.key_bytes)

    def _grow(self, needed: int) -> None:
        capacity = needed if self.length == 0 else max(needed, 2 * self.capacity)
        old, records = self.keys(), self.records
        self.path = Index(capacity, self.path.key_bytes)
        self.capacity = capacity
        self.records = np.zeros((capacity, 3), np.uint64)
        _extend(self.path.table, self.path.keys, self.records, 0, old.words, np.empty(len(old), np.int32))
        self.records[: self.length] = records[: self.length]


@inline
def _take_place(
    table: U64Array, keys: U64Matrix, records: U64Matrix, length: int, batch: U64Matrix, row: int
) -> int:
    """Position of the key `batch[row]`; `length` if it is new, or ABSENT if there is no room for it."""
    h = hash_row(batch, row)
    bucket = bucket_of(table, keys, batch, row, h)
    position = position_in(table[bucket])
    if position == ABSENT and length < records.shape[0]:
        position = length
        fill_bucket(table, bucket, keys, batch, row, h, position)
        records[position, HASH] = h
    return position


@kernel
def _extend(
    table: U64Array,
    keys: U64Matrix,
    records: U64Matrix,
    length: int,
    batch: ReadU64Matrix,
    positions: I32Array,
) -> int:
    """Fill in the position of each key on the path; returns its new length, ``~length`` if it is full."""
    following = 0
    for row in range(batch.shape[0]):
        # Batches of one request repeat each other: most keys follow their predecessor on the path.
        if following < length and same_key(keys, following, batch, row):
            position = following
        else:
            position = _take_place(table, keys, records, length, batch, row)
            if position == ABSENT:
                return ~length
            length = max(length, position + 1)
        positions[row] = position
        following = position + 1
    return length


@kernel
def _extend_bytes(
    table: U64Array,
    keys: U64Matrix,
    records: U64Matrix,
    length: int,
    joined: bytes,
    positions: I32Array,
) -> int:
    """`_extend` for keys that are not packed: each is packed into the row after the path's last key."""
    count = positions.shape[0]
    following = 0
    for row in range(count):
        start, stop = len(joined) // count * row, len(joined) // count * (row + 1)
        known = following < length
        for word in range(keys.shape[1]):
            packed = word_of(joined, start + 8 * word, stop)
            known = known and keys[following, word] == packed
            keys[length, word] = packed
        position = following if known else _take_place(table, keys, records, length, keys, length)
        length = max(length, position + 1)
        positions[row] = position
        following = position + 1
    return length
