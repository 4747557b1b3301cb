"""The twin of SIEVE."""

from __future__ import annotations

from kvoffload.core.policy import BlockwisePolicy
from kvoffload.core.protection import Protected
from kvoffload.core.slots import SlotArray
from kvoffload.errors import PolicyError
from kvoffload.policies.sieve import SIEVE
from kvoffload.structures.index import Index
from kvoffload.structures.keys import Keys
from support.naive.choice import first_unprotected


class NaiveSIEVE(BlockwisePolicy):
    """Twin of `policies.sieve.SIEVE`: a list of slots, the oldest first, a set of marks, and the hand.

    Attributes:
        hand: slot of the block to examine next; None for the oldest.
    """

    name = "naive-sieve"
    patience = SIEVE.patience

    def __init__(self, index: Index) -> None:
        super().__init__(index)
        self.reset()

    def reset(self) -> None:
        self.queue: list[int] = []
        self.visited: set[int] = set()
        self.hand: int | None = None
        self._spares = 0

    def hit(self, slot: int) -> None:
        self.visited.add(slot)

    def replace(self, keys: Keys, slots: SlotArray, num_free: int, protected: Protected) -> None:
        """Add the batch to the queue as a whole, after its last victim."""
        self._spares = self.patience
        for row in range(num_free, len(keys)):
            slots[row] = self.victim(keys[row], protected)
        for slot, key in zip(slots.tolist(), keys, strict=True):
            self.insert(slot, key)

    def insert(self, slot: int, key: bytes) -> None:
        self.queue.append(slot)

    def victim(self, key: bytes, protected: Protected) -> int:
        if first_unprotected(self.queue, protected) is None:
            raise PolicyError(f"no block may leave for {key.hex()}")
        while True:
            slot = self.queue[0] if self.hand is None else self.hand
            if slot not in protected:
                if slot not in self.visited or self._spares == 0:
                    self.hand = slot
                    self.forget(slot)
                    return slot
                self.visited.remove(slot)
                self._spares -= 1
            self.hand = self._newer(slot)

    def forget(self, slot: int) -> None:
        if slot == self.hand:
            self.hand = self._newer(slot)
        self.queue.remove(slot)
        self.visited.discard(slot)

    def stats(self) -> dict[str, float]:
        return {"visited_blocks": len(self.visited)}

    def order(self) -> list[int]:
        return list(self.queue)

    def marks(self) -> tuple[int | None, list[int]]:
        """Return the slot under the hand, None for the oldest, and visited slots in ascending order."""
        return self.hand, sorted(self.visited)

    def _newer(self, slot: int) -> int | None:
        following = self.queue[self.queue.index(slot) + 1 :]
        return following[0] if following else None
