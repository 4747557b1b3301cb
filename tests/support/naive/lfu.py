"""The twin of LFU."""

from __future__ import annotations

from kvoffload.core.policy import BlockwisePolicy
from kvoffload.core.protection import Protected
from kvoffload.errors import PolicyError
from kvoffload.policies.lfu import LFU
from kvoffload.structures.index import Index
from support.naive.choice import first_unprotected


class NaiveLFU(BlockwisePolicy):
    """Twin of `policies.lfu.LFU`: slots from the least to the most recent, each with its count of uses."""

    name = "naive-lfu"
    max_count = LFU.max_count

    def __init__(self, index: Index) -> None:
        super().__init__(index)
        self.counts: dict[int, int] = {}

    def hit(self, slot: int) -> None:
        self.counts[slot] = min(self.counts.pop(slot) + 1, self.max_count)

    def refresh(self, slot: int) -> None:
        """Make the block the most recent of the blocks with its count."""
        self.counts[slot] = self.counts.pop(slot)

    def insert(self, slot: int, key: bytes) -> None:
        self.counts[slot] = 1

    def victim(self, key: bytes, protected: Protected) -> int:
        slot = first_unprotected(self.order(), protected)
        if slot is None:
            raise PolicyError(f"no block may leave for {key.hex()}")
        self.forget(slot)
        return slot

    def forget(self, slot: int) -> None:
        del self.counts[slot]

    def reset(self) -> None:
        self.counts.clear()

    def stats(self) -> dict[str, float]:
        counts = list(self.counts.values())
        return {"used_once_blocks": counts.count(1), "at_max_count_blocks": counts.count(self.max_count)}

    def order(self) -> list[int]:
        return sorted(self.counts, key=self.counts.__getitem__)
