"""The twin of S3-FIFO."""

from __future__ import annotations

from kvoffload.core.policy import BlockwisePolicy
from kvoffload.core.protection import Protected
from kvoffload.core.slots import SlotArray
from kvoffload.errors import PolicyError
from kvoffload.policies.s3fifo import MAX_COUNT, S3FIFO
from kvoffload.structures.index import Index
from kvoffload.structures.keys import Keys
from support.naive.choice import first_unprotected


class NaiveS3FIFO(BlockwisePolicy):
    """Twin of `policies.s3fifo.S3FIFO`: algorithm 1 of the paper; its docstring has the conventions.

    Attributes:
        small, main: slot to key of the blocks in S and M, the oldest first.
        ghosts: keys that G remembers, the oldest first.
        counts: uses of each block.
    """

    name = "naive-s3fifo"
    small_share = S3FIFO.small_share
    patience = S3FIFO.patience

    def __init__(self, index: Index) -> None:
        super().__init__(index)
        self.small_blocks = max(1, int(self.small_share * self.capacity_blocks))
        self.max_ghosts = max(1, self.capacity_blocks - self.small_blocks)
        self.reset()

    def reset(self) -> None:
        self.small: dict[int, bytes] = {}
        self.main: dict[int, bytes] = {}
        self.ghosts: list[bytes] = []
        self.counts: dict[int, int] = {}
        self._spares = 0
        self.is_victim_tier = False
        self._joins_main: dict[bytes, bool] = {}

    def hit(self, slot: int) -> None:
        if self.is_victim_tier:
            self.main[slot] = (self.small if slot in self.small else self.main).pop(slot)
            return
        self.counts[slot] = min(self.counts[slot] + 1, MAX_COUNT)

    def replace(self, keys: Keys, slots: SlotArray, num_free: int, protected: Protected) -> None:
        """Choose each block's queue in turn; the blocks enter the queues together, the head last."""
        self.is_victim_tier = not protected.one_prefix
        self._spares = self.patience
        self._joins_main.clear()
        for row, key in enumerate(keys):
            remembered = key in self.ghosts
            if remembered:
                self.ghosts.remove(key)
            if row >= num_free:
                slots[row] = self.victim(key, protected)
                self._joins_main[key] = remembered
            else:
                self._joins_main[key] = remembered or self._small_is_full()
        for row in reversed(range(len(keys))):
            self.insert(int(slots[row]), keys[row])

    def insert(self, slot: int, key: bytes) -> None:
        (self.main if self._joins_main[key] else self.small)[slot] = key
        self.counts[slot] = 0

    def victim(self, key: bytes, protected: Protected) -> int:
        from_small = self._small_is_full()
        while True:
            small, main = (first_unprotected(queue, protected) for queue in (self.small, self.main))
            if small is not None and (from_small or main is None):
                from_small = True
                block = self.small.pop(small)
                if self.counts[small] > 1 and self._spares > 0:
                    self.main[small] = block
                    self.counts[small] = 0
                    self._spares -= 1
                    continue
                if len(self.ghosts) == self.max_ghosts:
                    del self.ghosts[0]
                self.ghosts.append(block)
                return small
            if main is None:
                raise PolicyError(f"no block may leave for {key.hex()}")
            from_small = False
            block = self.main.pop(main)
            if self.counts[main] == 0 or self._spares == 0:
                return main
            self.main[main] = block
            self.counts[main] -= 1
            self._spares -= 1

    def _small_is_full(self) -> bool:
        coming = list(self._joins_main.values()).count(False)
        return len(self.small) + coming >= self.small_blocks

    def forget(self, slot: int) -> None:
        (self.small if slot in self.small else self.main).pop(slot)

    def stats(self) -> dict[str, float]:
        return {
            "small_blocks": len(self.small),
            "main_blocks": len(self.main),
            "ghost_keys": len(self.ghosts),
        }

    def order(self) -> list[int]:
        return [*self.small, *self.main]

    def queues(self) -> tuple[list[int], list[int], list[bytes], dict[int, int]]:
        """Return slots of S and M and keys of G, newest first, and counts by slot."""
        small, main = [*self.small][::-1], [*self.main][::-1]
        return small, main, self.ghosts[::-1], {slot: self.counts[slot] for slot in small + main}
