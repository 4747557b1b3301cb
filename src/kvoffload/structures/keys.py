"""Batches of block keys in the packed form that kernels read.

This module knows nothing about a key except that it is a byte string. All keys of one manager have the same
length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, TypeAlias, overload

import numpy as np
import numpy.typing as npt

OffloadKey: TypeAlias = bytes
"""Identity of a block: the engine's chained block hash, followed by the KV-cache group index."""

MAX_KEY_BYTES = 1024

KeyWords: TypeAlias = npt.NDArray[np.uint64]
KeyDigests: TypeAlias = npt.NDArray[np.uint64]


class Keys(Sequence[bytes]):
    """A batch of keys of one length, packed into rows of 64-bit words.

    Methods of managers accept keys as a list of ``bytes`` or as a `Keys`. A list must be packed in each call,
    which costs about 30 ns a key. If you use keys more than once, pack them with `Keys.pack` and pass slices
    such as ``keys[:n]``, which are views. Do not change `words`, because managers keep references to its
    rows.

    Attributes:
        words: one row for each key, padded with zero bytes: uint64, little-endian, C-contiguous, shape
            ``(len(keys), words_per_key(key_bytes))``.
        key_bytes: length of one key in bytes.
    """

    __slots__ = ("_digests", "key_bytes", "words")

    def __init__(self, words: KeyWords, key_bytes: int, digests: KeyDigests | None = None) -> None:
        self.words = words
        self.key_bytes = key_bytes
        self._digests = digests

    @classmethod
    def pack(cls, keys: Sequence[bytes], key_bytes: int) -> Keys:
        """Pack `keys`. Raises `ValueError` that names the first key whose length is not `key_bytes`."""
        count, num_words = len(keys), words_per_key(key_bytes)
        padding = bytes(8 * num_words - key_bytes)
        joined = padding.join([*keys, b""]) if padding else b"".join(keys)
        # The total length is no proof, because one key may be too long and another too short.
        if list(map(len, keys)).count(key_bytes) != count and (problem := wrong_key(keys, key_bytes)):
            raise problem
        return cls(np.ndarray((count, num_words), np.uint64, joined), key_bytes)

    @property
    def digests(self) -> KeyDigests:
        """Digests of the keys (`digests_of`): uint64, shape ``(len(keys),)``. Computed on first access."""
        if self._digests is None:
            from kvoffload.structures.digests import digests_of  # here, because it imports numba

            self._digests = digests_of(self.words, self.key_bytes)
        return self._digests

    def __len__(self) -> int:
        return len(self.words)

    @overload
    def __getitem__(self, item: int) -> bytes: ...
    @overload
    def __getitem__(self, item: slice) -> Keys: ...
    def __getitem__(self, item: int | slice) -> bytes | Keys:
        if isinstance(item, slice):
            digests = None if self._digests is None else self._digests[item]
            return Keys(np.ascontiguousarray(self.words[item]), self.key_bytes, digests)
        row: bytes = self.words[item].tobytes()
        return row[: self.key_bytes]

    def take(self, rows: npt.NDArray[Any]) -> Keys:
        """Return a copy of some keys. They are selected by `rows`: row numbers or a mask."""
        digests = None if self._digests is None else self._digests[rows]
        return Keys(taken(self.words, rows), self.key_bytes, digests)

    def __iter__(self) -> Iterator[bytes]:
        size, stride = self.key_bytes, self.words.shape[1] * 8
        data = self.words.tobytes()
        return (data[start : start + size] for start in range(0, len(data), stride))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Keys):
            return self.key_bytes == other.key_bytes and np.array_equal(self.words, other.words)
        if isinstance(other, Sequence):
            return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        head = ", ".join(key.hex() for key in self[:3])
        return f"Keys({len(self)} x {self.key_bytes} bytes: {head}{', ...' if len(self) > 3 else ''})"


def words_per_key(key_bytes: int) -> int:
    """Return the number of 64-bit words that hold one key."""
    return (key_bytes + 7) // 8


def taken(words: KeyWords, rows: npt.NDArray[Any]) -> KeyWords:
    """Return a copy of some rows of `words`. They are selected by `rows`: row numbers or a mask.

    The array is indexed as if each row were one item, because numpy releases the GIL when it indexes an array
    of two dimensions. The scheduler's thread might then wait milliseconds to get the GIL back.
    """
    if rows.dtype == np.bool_:
        rows = rows.nonzero()[0]
    num_keys, num_words = words.shape
    whole = np.ndarray(num_keys, _whole_row(num_words), words)
    return np.ndarray((len(rows), num_words), np.uint64, whole[rows])


@cache
def _whole_row(num_words: int) -> np.dtype[np.void]:
    return np.dtype((np.void, 8 * num_words))


def wrong_key(keys: Sequence[bytes], key_bytes: int) -> ValueError | TypeError | None:
    """Return an error about the first key that is not ``bytes`` of length `key_bytes`, or None."""
    for position, key in enumerate(keys):
        if not isinstance(key, bytes):
            return TypeError(f"key {position} is {type(key).__name__} {key!r}; keys are bytes")
        if len(key) != key_bytes:
            return ValueError(
                f"key {position} ({key.hex()}) has {len(key)} bytes; "
                f"all keys of this manager have {key_bytes}"
            )
    return None
