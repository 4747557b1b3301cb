"""The twin of GDSF."""

from __future__ import annotations

from dataclasses import dataclass

from kvoffload.core.policy import BlockwisePolicy
from kvoffload.core.protection import Protected
from kvoffload.core.slots import SlotArray
from kvoffload.errors import PolicyError
from kvoffload.policies.gdsf import GDSF
from kvoffload.structures.index import Index
from kvoffload.structures.keys import Keys
from support.naive.choice import first_unprotected


@dataclass
class Block:
    """A resident block of GDSF."""

    cost: float
    frequency: float = 1.0
    rank: float = 0.0
    used_at: int = 0


class NaiveGDSF(BlockwisePolicy):
    """Twin of `policies.gdsf.GDSF`: everything is sorted for every victim."""

    name = "naive-gdsf"

    def __init__(self, index: Index) -> None:
        super().__init__(index)
        self.reset()

    def reset(self) -> None:
        self.blocks: dict[int, Block] = {}
        self.inflation = 0.0
        self._clock = 0
        self._depth: dict[bytes, int] = {}

    def replace(self, keys: Keys, slots: SlotArray, num_free: int, protected: Protected) -> None:
        self._depth = {key: protected.depth_of(key) for key in keys}
        super().replace(keys, slots, num_free, protected)

    def hit(self, slot: int) -> None:
        self.blocks[slot].frequency += 1
        self.refresh(slot)

    def refresh(self, slot: int) -> None:
        block = self.blocks[slot]
        self._clock += 1
        block.rank = self.inflation + block.frequency * block.cost
        block.used_at = self._clock

    def insert(self, slot: int, key: bytes) -> None:
        self.blocks[slot] = Block(cost=1 + self._depth[key] * GDSF.block_attention_ratio)

    def victim(self, key: bytes, protected: Protected) -> int:
        slot = first_unprotected(self.order(), protected)
        if slot is None:
            raise PolicyError(f"no block may leave for {key.hex()}")
        self.inflation = max(self.inflation, self.blocks.pop(slot).rank)
        return slot

    def forget(self, slot: int) -> None:
        del self.blocks[slot]

    def stats(self) -> dict[str, float]:
        return {"blocks": len(self.blocks), "inflation": self.inflation}

    def order(self) -> list[int]:
        return sorted(self.blocks, key=lambda slot: (self.blocks[slot].rank, self.blocks[slot].used_at))

    def ranks(self) -> list[tuple[int, float, float]]:
        """Return slot, frequency and H of every block, in ascending order of H."""
        return [(slot, self.blocks[slot].frequency, self.blocks[slot].rank) for slot in self.order()]
