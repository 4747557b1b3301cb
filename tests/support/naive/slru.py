"""The twin of SLRU."""

from __future__ import annotations

from kvoffload.core.policy import BlockwisePolicy
from kvoffload.core.protection import Protected
from kvoffload.errors import PolicyError
from kvoffload.policies.slru import SLRU
from kvoffload.structures.index import Index
from support.naive.choice import first_unprotected


class NaiveSLRU(BlockwisePolicy):
    """Twin of `policies.slru.SLRU`: two lists of slots, each the coldest first."""

    name = "naive-slru"
    proven_share = SLRU.proven_share

    def __init__(self, index: Index) -> None:
        super().__init__(index)
        self.probation: list[int] = []
        self.proven: list[int] = []

    def hit(self, slot: int) -> None:
        self.forget(slot)
        self.proven.append(slot)
        if len(self.proven) > int(self.proven_share * self.capacity_blocks):
            self.probation.append(self.proven.pop(0))

    def refresh(self, slot: int) -> None:
        """Make the block the most recent of its list."""
        home = self._home(slot)
        home.remove(slot)
        home.append(slot)

    def insert(self, slot: int, key: bytes) -> None:
        self.probation.append(slot)

    def victim(self, key: bytes, protected: Protected) -> int:
        slot = first_unprotected(self.order(), protected)
        if slot is None:
            raise PolicyError(f"no block may leave for {key.hex()}")
        self.forget(slot)
        return slot

    def forget(self, slot: int) -> None:
        self._home(slot).remove(slot)

    def reset(self) -> None:
        self.probation.clear()
        self.proven.clear()

    def stats(self) -> dict[str, float]:
        return {"probation_blocks": len(self.probation), "proven_blocks": len(self.proven)}

    def order(self) -> list[int]:
        return self.probation + self.proven

    def _home(self, slot: int) -> list[int]:
        return self.probation if slot in self.probation else self.proven
