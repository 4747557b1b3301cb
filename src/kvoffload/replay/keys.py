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
        self._words, self._block_ids = words, trace.block_ids
        self._order: npt.NDArray[np.intp] | None = None

    def of_blocks(self, codes: npt.NDArray[np.int32]) -> Keys:
        """Keys of some blocks, in their order."""
        return Keys(self._words.take(codes, axis=0), KEY_BYTES)

    def ids(self, keys: Keys) -> npt.NDArray[np.int64]:
        """The block ids of keys that it has made, by their first words. Cost: O(log n) a key."""
        if self._order is None:
            self._order = np.argsort(self._words[:, 0])
        at = np.searchsorted(self._words[:, 0], keys.words[:, 0], sorter=self._order)
        return self._block_ids[self._order[at]]
