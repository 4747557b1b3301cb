"""Keys that belong to no block. The manager uses them to evict blocks without storing new blocks.

A policy evicts blocks only to insert new blocks. So to shrink the cache, the manager offers these keys to the
policy as new blocks, and then removes them from the policy at once.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from kvoffload.structures.index import words_with_hash
from kvoffload.structures.keys import Keys, words_per_key

MOST_UNSEEN = 512


@lru_cache(maxsize=4)
def unseen_keys(key_bytes: int) -> Keys:
    """Return `MOST_UNSEEN` keys of `key_bytes` bytes each, which are the same in every process.

    If `key_bytes` is 8 or more, the hashes of the keys do not depend on `key_bytes`. So a replay of recorded
    hashes makes the same decisions as the recorded cache. If `key_bytes` is below 8, a real block may have
    one of the keys; then the manager skips this key.
    """
    hashes = np.random.default_rng(0x6B766F).integers(0, 1 << 64, MOST_UNSEEN, np.uint64)
    words = words_with_hash(hashes, words_per_key(key_bytes))
    if key_bytes < 8:
        words &= np.uint64((1 << (8 * key_bytes)) - 1)
    return Keys(words, key_bytes)
