"""Keys of a trace's blocks: what stands in for the engine's block hashes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvoffload.structures.keys import Keys, KeyWords
from kvoffload.traces.trace import Trace

KEY_BYTES = 32
"""As long as the SHA-256 block hashes of an engine."""

FINGERPRINT = "kvoffload replay, contents from keys, 1"
"""The producer of a replay's blocks: any replay may read what another one has left on a disk."""


_STEP = np.uint64(0xD1342543DE82EF95)
# splitmix64's finisher, and what undoes it (modulo 2^64 the last two numbers are inverse).
_ROUNDS = (
    (np.uint64(30), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x96DE1B173F119089)),
    (np.uint64(27), np.uint64(0x94D049BB133111EB), np.uint64(0x319642B2D24D8EC3)),
)
_LAST = np.uint64(31)


class TraceKeys:
    """One 32-byte key for each block of a trace, made once, as one array (splitmix64 of the block id)."""

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
        """Keys of some blocks, in their order."""
        return Keys(self._words.take(codes, axis=0), KEY_BYTES)

    @staticmethod
    def ids(keys: Keys) -> npt.NDArray[np.int64]:
        """The block ids of keys that it has made: computed back from their first words."""
        words = _shifted_back(keys.words[:, 0], _LAST)
        for shift, _, inverse in reversed(_ROUNDS):
            words = _shifted_back(words * inverse, shift)
        found: npt.NDArray[np.int64] = (words - _STEP).view(np.int64)
        return found


def _shifted_back(words: npt.NDArray[np.uint64], shift: np.uint64) -> npt.NDArray[np.uint64]:
    """What ``x ^ (x >> shift)`` was made of; for shifts of 22 or more."""
    found: npt.NDArray[np.uint64] = words ^ (words >> shift) ^ (words >> (shift + shift))
    return found
