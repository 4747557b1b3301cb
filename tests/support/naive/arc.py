"""The twin of ARC."""

from __future__ import annotations

from kvoffload.core.policy import BlockwisePolicy
from kvoffload.core.protection import Protected
from kvoffload.errors import PolicyError
from kvoffload.structures.index import Index
from support.naive.choice import first_unprotected


class NaiveARC(BlockwisePolicy):
    """Twin of `policies.arc.ARC`: figure 4 of the paper, line by line; its docstring has the conventions.

    Attributes:
        t1, t2: slot to key of the resident blocks, the coldest first.
        b1, b2: remembered keys, the coldest first.
        p: target size of T1.
    """

    name = "naive-arc"

    def __init__(self, index: Index) -> None:
        super().__init__(index)
        self.reset()

    def reset(self) -> None:
        self.t1: dict[int, bytes] = {}
        self.t2: dict[int, bytes] = {}
        self.b1: list[bytes] = []
        self.b2: list[bytes] = []
        self.p = 0.0
        self._case_done = False
        self._enters_t2 = False

    def hit(self, slot: int) -> None:
        """Make the block the most recent of T2 (case I)."""
        home = self.t1 if slot in self.t1 else self.t2
        self.t2[slot] = home.pop(slot)

    def refresh(self, slot: int) -> None:
        """Make the block the most recent of its list."""
        home = self.t1 if slot in self.t1 else self.t2
        home[slot] = home.pop(slot)

    def insert(self, slot: int, key: bytes) -> None:
        if not self._case_done:  # The slot was free: all of the case but REPLACE.
            self._learn(key)
        self._case_done = False
        (self.t2 if self._enters_t2 else self.t1)[slot] = key

    def victim(self, key: bytes, protected: Protected) -> int:
        if protected.is_quiet and key not in self.b1 and key not in self.b2:
            return self._replace_quietly(key, protected)
        in_b2 = key in self.b2
        keeps_ghost = self._learn(key)
        self._case_done = True
        size = len(self.t1)
        from_t1 = size >= 1 and (size > self.p or (in_b2 and size == self.p))
        homes = [(self.t1, self.b1), (self.t2, self.b2)]
        for home, ghosts in homes if from_t1 or not keeps_ghost else reversed(homes):
            slot = first_unprotected(home, protected)
            if slot is not None:
                key_evicted = home.pop(slot)
                if keeps_ghost:
                    if len(self.b1) + len(self.b2) == self.capacity_blocks:
                        del (self.b2 or self.b1)[0]
                    ghosts.append(key_evicted)
                return slot
        raise PolicyError(f"no block may leave for {key.hex()}")

    def _replace_quietly(self, key: bytes, protected: Protected) -> int:
        """REPLACE for a block of T1, without a ghost."""
        self._case_done, self._enters_t2 = True, False
        homes = [self.t1, self.t2]
        for home in homes if len(self.t1) > self.p else reversed(homes):
            slot = first_unprotected(home, protected)
            if slot is not None:
                if home is self.t2 and len(self.t1) + len(self.b1) == self.capacity_blocks:
                    del self.b1[0]
                del home[slot]
                return slot
        raise PolicyError(f"no block may leave for {key.hex()}")

    def _learn(self, key: bytes) -> bool:
        """Run cases II, III and IV up to REPLACE; return whether the victim for `key` becomes a ghost."""
        c = self.capacity_blocks
        self._enters_t2 = key in self.b1 or key in self.b2
        if key in self.b1:  # Case II
            self.p = min(self.p + max(1.0, len(self.b2) / len(self.b1)), float(c))
            self.b1.remove(key)
        elif key in self.b2:  # Case III
            self.p = max(self.p - max(1.0, len(self.b1) / len(self.b2)), 0.0)
            self.b2.remove(key)
        elif len(self.t1) + len(self.b1) == c:  # Case IV, A
            if len(self.t1) == c:
                return False
            del self.b1[0]
        elif len(self.t1) + len(self.t2) + len(self.b1) + len(self.b2) == 2 * c:  # Case IV, B
            del self.b2[0]
        return True

    def forget(self, slot: int) -> None:
        (self.t1 if slot in self.t1 else self.t2).pop(slot)

    def stats(self) -> dict[str, float]:
        return {
            "t1_blocks": len(self.t1),
            "t2_blocks": len(self.t2),
            "b1_keys": len(self.b1),
            "b2_keys": len(self.b2),
            "target_t1_blocks": self.p,
        }

    def order(self) -> list[int]:
        return [*self.t1, *self.t2]

    def lists(self) -> tuple[list[int], list[int], list[bytes], list[bytes]]:
        """Return slots of T1 and T2 and keys of B1 and B2, each most recent first."""
        return [*self.t1][::-1], [*self.t2][::-1], self.b1[::-1], self.b2[::-1]
