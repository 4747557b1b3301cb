"""What tiers share: their contract, and the checksum that binds a block's bytes to its key.

Knows neither media nor devices.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from kvoffload.core.jit import I64, READONLY_U64_MATRIX, U64_ARRAY, inline, kernel
from kvoffload.core.keys import Keys
from kvoffload.transfer import CopyEngine, Rows
from kvoffload.transfer.engine import DeviceArray

Mask: TypeAlias = npt.NDArray[np.bool_]
"""Shape ``(n,)``: one answer for each block of a batch."""

Checksums: TypeAlias = npt.NDArray[np.uint64]
"""Shape ``(n,)``. 0 (`NO_CHECKSUM`) stands for none; a checksum is never 0."""

NO_CHECKSUM = 0

ODD = np.uint64(0x9E3779B97F4A7C15)
"""splitmix64's step: odd, so that its multiples are all different, and without a pattern in its bits."""


class BlockTier(Protocol):
    """Slots of one size that hold the bytes of blocks. Which key has which slot is the manager's affair."""

    @property
    def num_slots(self) -> int: ...
    @property
    def block_bytes(self) -> int: ...

    def write(self, keys: Keys, slots: Rows, source: DeviceArray | CopyEngine, source_rows: Rows) -> None:
        """Store blocks ``source[source_rows[i]]``, each under its key, into their slots."""
        ...

    def read(self, keys: Keys, slots: Rows, dest: DeviceArray | CopyEngine, dest_rows: Rows) -> Mask:
        """Load the blocks that still are what was stored under their key; answer which those are."""
        ...

    def verify_slots(self, keys: Keys, slots: Rows) -> Mask:
        """Which slots still hold what was stored under these keys."""
        ...

    def close(self) -> None:
        """Release what the tier holds. A second call does nothing."""
        ...


def key_digests(keys: Keys) -> Checksums:
    """A 64-bit digest of each key: the seed that makes a checksum one of *this* key.

    Two keys of up to 8 bytes never share a digest, longer ones with probability 2^-64. It is part of
    what tiers may persist and does not change; the hash of the index is another one, and may.

    Cost: 2 ns a word. Thread: any.
    """
    digests = np.empty(len(keys), np.uint64)
    _digest(keys.words, keys.key_bytes, digests)
    return digests


def block_checksums(memory: memoryview, starts: list[int], block_bytes: int, digests: Checksums) -> Checksums:
    """xxh3_64 of each block at ``memory[start : start + block_bytes]``, seeded with its key's digest.

    Cost: 0.5 µs a block, then memory speed (10-20 GB/s).
    """
    xxh3 = xxhash.xxh3_64_intdigest
    sums = [
        xxh3(memory[start : start + block_bytes], seed) or 1
        for start, seed in zip(starts, digests.tolist(), strict=True)
    ]
    return np.array(sums, np.uint64)


@inline
def mix(word: Any) -> Any:
    """splitmix64's finisher (Steele, Lea and Flood, OOPSLA'14): a bijection that spreads every bit."""
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return word ^ (word >> np.uint64(31))


@kernel(I64(READONLY_U64_MATRIX, I64, U64_ARRAY))
def _digest(words: npt.NDArray[np.uint64], key_bytes: int, digests: Checksums) -> int:
    for row in range(words.shape[0]):
        digest = np.uint64(key_bytes)
        # Not `words.shape[1]`: how far a batch pads its keys is no property of the key.
        for word in range((key_bytes + 7) // 8):
            digest = mix((digest ^ words[row, word]) + ODD)
        digests[row] = digest
    return len(words)
