"""The twin of FIFO."""

from __future__ import annotations

from kvoffload.core.policy import BlockwisePolicy
from kvoffload.core.protection import Protected
from kvoffload.errors import PolicyError
from kvoffload.structures.index import Index
from support.naive.choice import first_unprotected


class NaiveFIFO(BlockwisePolicy):
    """Twin of `policies.fifo.FIFO`: a list of slots, the oldest first."""

    name = "naive-fifo"

    def __init__(self, index: Index) -> None:
        super().__init__(index)
        self.slots: list[int] = []

    def hit(self, slot: int) -> None:
        """Do nothing."""

    def insert(self, slot: int, key: bytes) -> None:
        self.slots.append(slot)

    def victim(self, key: bytes, protected: Protected) -> int:
        slot = first_unprotected(self.slots, protected)
        if slot is None:
            raise PolicyError(f"no block may leave for {key.hex()}")
        self.slots.remove(slot)
        return slot

    def forget(self, slot: int) -> None:
        self.slots.remove(slot)

    def reset(self) -> None:
        self.slots.clear()

    def stats(self) -> dict[str, float]:
        return {"queued_blocks": len(self.slots)}

    def order(self) -> list[int]:
        return list(self.slots)
