"""Keys of a trace's blocks, which stand for the block hashes that an engine would compute."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvoffload.structures.keys import Keys, KeyWords
from kvoffload.traces.trace import Trace

KEY_BYTES = 32
"""Length of a key in bytes. It is the length of an engine's block hashes (SHA-256)."""

FINGERPRINT = "kvoffload replay, contents from keys, 1"
"""The `TierOwner.fingerprint` of all replays, which names the producer of blocks in a tier.

It is the same for every replay, so that a replay can read blocks that an earlier replay wrote to a disk.
"""

_STEP = np.uint64(0xD1342543DE82EF95)
# splitmix64's finisher: shift, factor, and the inverse of the factor modulo 2^64.
_ROUNDS = (
    (np.uint64(30), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x96DE1B173F119089)),
    (np.uint64(27), np.uint64(0x94D049BB133111EB), np.uint64(0x319642B2D24D8EC3)),
)
_LAST = np.uint64(31)


class TraceKeys:
    """32-byte keys of all blocks of a trace. A key is four 64-bit hashes of the block id."""

    def __init__(self, trace: Trace) -> None:
        lanes = np.arange(1, KEY_BYTES // 8 + 1, dtype=np.uint64) * _STEP
        with np.errstate(over="ignore"):
            words: KeyWords = trace.block_ids.astype(np.uint64)[:, None] + lanes[None, :]
            for shift, factor, _ in _ROUNDS:
                words ^= words >> shift
                words *= factor
            words ^= words >> _LAST
        self._words = words

    def of_blocks(self, codes: npt.NDArray[np.int32]) -> Keys:
        """Return the keys of the blocks `codes`, in this order."""
        return Keys(self._words.take(codes, axis=0), KEY_BYTES)

    @staticmethod
    def ids(keys: Keys) -> npt.NDArray[np.int64]:
        """Return the block ids of `keys`, by inverting the hash that made the first word of each key."""
        words = _shifted_back(keys.words[:, 0], _LAST)
        for shift, _, inverse in reversed(_ROUNDS):
            words = _shifted_back(words * inverse, shift)
        ids: npt.NDArray[np.int64] = (words - _STEP).view(np.int64)
        return ids


def _shifted_back(words: npt.NDArray[np.uint64], shift: np.uint64) -> npt.NDArray[np.uint64]:
    """Return the `x` for which ``x ^ (x >> shift)`` is `words`. The shift must be at least 22."""
    originals: npt.NDArray[np.uint64] = words ^ (words >> shift) ^ (words >> (shift + shift))
    return originals
