"""The twin of LIRS."""

from __future__ import annotations

from kvoffload.core.policy import BlockwisePolicy
from kvoffload.core.protection import Protected
from kvoffload.errors import PolicyError
from kvoffload.structures.index import Index
from support.naive.choice import first_unprotected


class NaiveLIRS(BlockwisePolicy):
    """Twin of `policies.lirs.LIRS`, with the paper's stack and its pruning.

    The docstring of `LIRS` has the conventions.

    Attributes:
        stack: keys in S, the bottom first.
        lir, queue: slot to key of the LIR blocks, the coldest first, and of the HIR blocks in Q, the first
            to leave first.
        gone: keys of evicted blocks, the earliest evicted first; some of them are in S.
    """

    name = "naive-lirs"

    def __init__(self, index: Index) -> None:
        super().__init__(index)
        self.max_lir = self.capacity_blocks - max(1, self.capacity_blocks // 100)
        self.reset()

    def reset(self) -> None:
        self.stack: list[bytes] = []
        self.lir: dict[int, bytes] = {}
        self.queue: dict[int, bytes] = {}
        self.gone: list[bytes] = []
        self._case_done = False
        self._enters_lir = False

    def hit(self, slot: int) -> None:
        if slot in self.queue and (len(self.lir) < self.max_lir or self.queue[slot] in self.stack):
            self.lir[slot] = self.queue.pop(slot)
            self._to_top(slot)
            self._demote_what_is_too_much()
        else:
            self.refresh(slot)

    def refresh(self, slot: int) -> None:
        """Move the block to the top of S, and, if it is HIR, to the end of Q."""
        home = self.lir if slot in self.lir else self.queue
        home[slot] = home.pop(slot)
        self._to_top(slot)

    def insert(self, slot: int, key: bytes) -> None:
        if not self._case_done:  # The slot was free.
            self._recall(key)
            self._enters_lir = self._enters_lir or len(self.lir) < self.max_lir
        self._case_done = False
        (self.lir if self._enters_lir else self.queue)[slot] = key
        self._to_top(slot)
        self._demote_what_is_too_much()

    def victim(self, key: bytes, protected: Protected) -> int:
        self._recall(key)
        self._case_done = True
        for home in (self.queue, self.lir):
            slot = first_unprotected(home, protected)
            if slot is None:
                continue
            key_evicted = home.pop(slot)
            if home is self.queue and key_evicted in self.stack:
                if len(self.gone) == self.capacity_blocks:
                    self._forget_gone(self.gone[0])
                self.gone.append(key_evicted)
            else:
                self._drop(key_evicted)
            return slot
        raise PolicyError(f"no block may leave for {key.hex()}")

    def forget(self, slot: int) -> None:
        self._drop((self.lir if slot in self.lir else self.queue).pop(slot))

    def _recall(self, key: bytes) -> None:
        """Record whether the absent block `key` is in S, and stop remembering it."""
        self._enters_lir = key in self.gone and key in self.stack
        if key in self.gone:
            self._forget_gone(key)

    def _forget_gone(self, key: bytes) -> None:
        self.gone.remove(key)
        self._drop(key)

    def _to_top(self, slot: int) -> None:
        key = self.lir.get(slot) or self.queue[slot]
        if key in self.stack:
            self.stack.remove(key)
        self.stack.append(key)
        self._prune()

    def _drop(self, key: bytes) -> None:
        if key in self.stack:
            self.stack.remove(key)
        self._prune()

    def _demote_what_is_too_much(self) -> None:
        if len(self.lir) > self.max_lir:
            slot = next(iter(self.lir))
            self.queue[slot] = self.lir.pop(slot)
            self._prune()

    def _prune(self) -> None:
        """Remove keys from the bottom of S until a LIR block is there."""
        while self.stack and self.stack[0] not in self.lir.values():
            del self.stack[0]

    def stats(self) -> dict[str, float]:
        return {
            "lir_blocks": len(self.lir),
            "hir_blocks": len(self.queue),
            "gone_keys": len(self.gone),
        }

    def order(self) -> list[int]:
        return [*self.queue, *self.lir]

    def lists(self) -> tuple[list[bytes], list[int], list[int], list[bytes]]:
        """Return keys in S, slots of LIR blocks and of Q, and ghosts, most recent first."""
        return self.stack[::-1], [*self.lir][::-1], [*self.queue][::-1], self.gone[::-1]
