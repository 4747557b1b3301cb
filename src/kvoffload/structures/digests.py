"""Digests of keys: 64-bit hashes for checksums and for small tables.

Tiers may store digests on disk, so this hash function must never change. The index uses another function,
`index.hash_row`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvoffload.structures.jit import ReadU64Matrix, U64Array, inline, kernel

ODD = np.uint64(0x9E3779B97F4A7C15)
"""Increment of splitmix64. It is odd, so that all its multiples modulo 2^64 differ. Its bits look random."""


def digests_of(words: ReadU64Matrix, key_bytes: int) -> U64Array:
    """Return the digests of packed keys: uint64, shape ``(len(words),)``.

    Two different keys of up to 8 bytes always have different digests. Two longer keys have the same digest
    with probability 2^-64. Cost: 2 ns a word. Thread: any.
    """
    digests = np.empty(len(words), np.uint64)
    _digest(words, key_bytes, digests)
    return digests


@inline
def mix(word: Any) -> Any:
    """Apply the finalizer of splitmix64, a bijection (Steele, Lea and Flood, OOPSLA'14)."""
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return word ^ (word >> np.uint64(31))


@kernel
def _digest(words: ReadU64Matrix, key_bytes: int, digests: U64Array) -> int:
    for row in range(words.shape[0]):
        digest = np.uint64(key_bytes)
        # Not `words.shape[1]`, because the digest must not depend on the padding of a batch.
        for word in range((key_bytes + 7) // 8):
            digest = mix((digest ^ words[row, word]) + ODD)
        digests[row] = digest
    return len(words)
