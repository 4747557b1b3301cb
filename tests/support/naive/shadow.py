"""The twin of the shadow LRU."""

from __future__ import annotations

from itertools import takewhile

_WORD = (1 << 64) - 1


class NaiveShadow:
    """Twin of `policies.hazard.shadow.ShadowLRU`: a list of keys, the coldest first.

    Attributes:
        lead: blocks that LRU has served more than the owner.
    """

    def __init__(self, capacity_blocks: int) -> None:
        self.capacity = capacity_blocks
        self.keys: list[bytes] = []
        self.lead = 0.0

    def judge(self, in_lru: list[bool], held: list[bool]) -> None:
        """Compare the requested blocks that LRU held with the blocks that the policy held."""
        self.lead += len([*takewhile(bool, in_lru)]) - len([*takewhile(bool, held)])

    def store(self, keys: list[bytes]) -> None:
        """Make these blocks the most recent, the first block foremost."""
        self.forget(keys)
        self.keys += keys[::-1]
        del self.keys[: max(0, len(self.keys) - self.capacity)]

    def forget(self, keys: list[bytes]) -> None:
        """Remove these blocks, if present."""
        self.keys = [key for key in self.keys if key not in keys]


def hash_of(key: bytes) -> int:
    """Return the hash of `structures.index.hash_row`."""
    h = 0x9E3779B97F4A7C15
    for start in range(0, len(key), 8):
        h = (h ^ int.from_bytes(key[start : start + 8], "little")) * 0xFF51AFD7ED558CCD & _WORD
        h ^= h >> 32
    h = h * 0xC4CEB9FE1A85EC53 & _WORD
    return h ^ (h >> 29)
