"""The twin of 2Q."""

from __future__ import annotations

from kvoffload.core.policy import BlockwisePolicy
from kvoffload.core.protection import Protected
from kvoffload.core.slots import SlotArray
from kvoffload.errors import PolicyError
from kvoffload.structures.index import Index
from kvoffload.structures.keys import Keys
from support.naive.choice import first_unprotected


class NaiveTwoQ(BlockwisePolicy):
    """Twin of `policies._2q.TwoQ`: the paper's full version; its docstring has the conventions.

    Attributes:
        a1in, am: slot to key of the resident blocks, the coldest first.
        a1out: remembered keys, the coldest first.
        arriving: slots of A1in whose storing request has not finished yet.
    """

    name = "naive-2q"

    def __init__(self, index: Index) -> None:
        super().__init__(index)
        self.max_a1in = max(1, self.capacity_blocks // 4)
        self.max_a1out = max(1, self.capacity_blocks // 2)
        self.reset()

    def reset(self) -> None:
        self.a1in: dict[int, bytes] = {}
        self.am: dict[int, bytes] = {}
        self.a1out: list[bytes] = []
        self.arriving: set[int] = set()
        self._enters_am = self.is_victim_tier = False

    def hit(self, slot: int) -> None:
        if self.is_victim_tier and slot in self.a1in:
            self.am[slot] = self.a1in.pop(slot)
            self.arriving.discard(slot)
        elif slot in self.am:
            self.am[slot] = self.am.pop(slot)

    def refresh(self, slot: int) -> None:
        if slot in self.am:
            self.hit(slot)
        if slot in self.arriving:
            self.arriving.remove(slot)
            self.a1in[slot] = self.a1in.pop(slot)

    def replace(self, keys: Keys, slots: SlotArray, num_free: int, protected: Protected) -> None:
        self.is_victim_tier = not protected.one_prefix
        super().replace(keys, slots, num_free, protected)
        # Ordering the batch was not the end of its request.
        self.arriving.update(slot for slot in slots.tolist() if slot in self.a1in)

    def insert(self, slot: int, key: bytes) -> None:
        if key in self.a1out:  # The slot was free.
            self.a1out.remove(key)
            self._enters_am = True
        if self._enters_am:
            self.am[slot] = key
        else:
            self.a1in[slot] = key
            self.arriving.add(slot)
        self._enters_am = False

    def victim(self, key: bytes, protected: Protected) -> int:
        if key in self.a1out:
            self.a1out.remove(key)
            self._enters_am = True
        from_a1in = len(self.a1in) > self.max_a1in
        for home in (self.a1in, self.am) if from_a1in else (self.am, self.a1in):
            slot = first_unprotected(home, protected)
            if slot is not None:
                key_evicted = home.pop(slot)
                self.arriving.discard(slot)
                if home is self.a1in:
                    self.a1out = [*self.a1out, key_evicted][-self.max_a1out :]
                return slot
        raise PolicyError(f"no block may leave for {key.hex()}")

    def forget(self, slot: int) -> None:
        (self.a1in if slot in self.a1in else self.am).pop(slot)
        self.arriving.discard(slot)

    def stats(self) -> dict[str, float]:
        return {
            "a1in_blocks": len(self.a1in),
            "am_blocks": len(self.am),
            "a1out_keys": len(self.a1out),
        }

    def order(self) -> list[int]:
        return [*self.a1in, *self.am]

    def lists(self) -> tuple[list[int], list[int], list[bytes]]:
        """Return slots of A1in and Am and keys of A1out, each most recent first."""
        return [*self.a1in][::-1], [*self.am][::-1], self.a1out[::-1]
