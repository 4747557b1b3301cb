"""The twin of the shadow LRU."""

from __future__ import annotations

from itertools import takewhile

from kvoffload.policies.hazard import shadow

_WORD = (1 << 64) - 1


class NaiveShadow:
    """Twin of `policies.hazard.shadow.ShadowLRU`: a list of keys, the coldest first.

    Attributes:
        sampled, own_hits, shadow_hits: what is counted.
    """

    def __init__(self, capacity_blocks: int) -> None:
        self.one_in = shadow.SAMPLED_ONE_IN if capacity_blocks >= shadow.SMALL_CAPACITY else 1
        self.capacity = max(1, capacity_blocks // self.one_in)
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self.keys: list[bytes] = []
        self.sampled = self.own_hits = self.shadow_hits = 0

    def observe(self, keys: list[bytes], held: list[bool], is_victim_tier: bool) -> None:
        """A request uses these blocks; `held` are those that the owner has."""
        rows = [row for row, key in enumerate(keys) if self._is_sampled(key)]
        self.sampled += len(rows)
        if self.one_in == 1:
            self.own_hits += len([*takewhile(bool, held)])
            self.shadow_hits += len([*takewhile(self.keys.__contains__, keys)])
        else:
            self.own_hits += sum(held[row] for row in rows)
            self.shadow_hits += sum(keys[row] in self.keys for row in rows)
        hits = [keys[row] for row in rows if keys[row] in self.keys]
        for key in reversed(hits):
            self.keys.remove(key)
            if not is_victim_tier:
                self.keys.append(key)
        if not is_victim_tier and len(hits) < len(rows):
            self.store(keys)

    def store(self, keys: list[bytes]) -> None:
        """These blocks become the most recent, the first most of all."""
        for key in filter(self._is_sampled, reversed(keys[: self.one_in * self.capacity])):
            if key in self.keys:
                self.keys.remove(key)
            elif len(self.keys) == self.capacity:
                del self.keys[0]
            self.keys.append(key)

    def _is_sampled(self, key: bytes) -> bool:
        return (hash_of(key) >> 8) % self.one_in == 0


def hash_of(key: bytes) -> int:
    """`structures.index.hash_row`."""
    h = 0x9E3779B97F4A7C15
    for start in range(0, len(key), 8):
        h = (h ^ int.from_bytes(key[start : start + 8], "little")) * 0xFF51AFD7ED558CCD & _WORD
        h ^= h >> 32
    h = h * 0xC4CEB9FE1A85EC53 & _WORD
    return h ^ (h >> 29)
