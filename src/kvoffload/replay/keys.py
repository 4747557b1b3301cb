"""Keys of a trace's blocks: what stands in for the engine's block hashes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvoffload.core.keys import Keys, KeyWords
from kvoffload.replay.trace import Trace

KEY_BYTES = 32
"""As long as the SHA-256 block hashes of an engine."""


class TraceKeys:
    """One 32-byte key for each block of a trace, made once, as one array (splitmix64 of the block id)."""

    def __init__(self, trace: Trace) -> None:
        lanes = np.arange(1, KEY_BYTES // 8 + 1, dtype=np.uint64) * np.uint64(0xD1342543DE82EF95)
        with np.errstate(over="ignore"):
            words: KeyWords = trace.block_ids.astype(np.uint64)[:, None] + lanes[None, :]
            words ^= words >> np.uint64(30)
            words *= np.uint64(0xBF58476D1CE4E5B9)
            words ^= words >> np.uint64(27)
            words *= np.uint64(0x94D049BB133111EB)
            words ^= words >> np.uint64(31)
        self._words = words

    def of_blocks(self, codes: npt.NDArray[np.int32]) -> Keys:
        """Keys of some blocks, in their order."""
        return Keys(self._words.take(codes, axis=0), KEY_BYTES)
