"""SIEVE: a queue in which no block moves, and a hand that evicts blocks not visited since it last passed.

Source: Zhang, Yang, Yue, Vigfusson and Rashmi, "SIEVE is Simpler than LRU: an Efficient Turn-Key Eviction
Algorithm for Web Caches", NSDI 2024, algorithm 1.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np

from kvoffload.core.policy import EvictionPolicy
from kvoffload.core.protection import Protected, evictable
from kvoffload.core.slots import SlotArray
from kvoffload.structures.index import ABSENT, Index
from kvoffload.structures.jit import (
    BoolArray,
    I32Array,
    I32Matrix,
    ReadBoolArray,
    ReadI32Array,
    U64Array,
    U64Matrix,
    kernel,
)
from kvoffload.structures.keys import Keys
from kvoffload.structures.lists import PREV, Lists, push_head, unlink

HAND, VISITED = 0, 1
"""Entries of `SIEVE._state`: the slot at which the hand rests, or ABSENT for the oldest block; the number of
visited blocks."""


class SIEVE(EvictionPolicy):
    """The paper's algorithm, for batches with pins, and with a limit to the search in one call.

    A hit marks a block as visited, and moves nothing. A new block joins the queue at its head. To find a
    victim the hand moves from the oldest block towards the head, and from there to the oldest again; it
    clears the mark of a visited block, which keeps its place, and the first block without a mark leaves. The
    next search continues from there.

    Where the paper leaves a choice:

    - The blocks of a batch join the queue together, after the last victim, in prefix order. A victim at
      the head therefore sends the hand to the oldest block, as in the paper, even if blocks of its batch
      came before it. Prefix order means that of unused blocks the head of a prefix leaves first; it gives
      the golden numbers to the last digit, and costs up to 0.003 of the prefix-hit ratio on a chat trace.
    - A request's own store is no visit, and a finished path does not change the order.
    - The hand passes a protected block without changing its mark.
    - When the block at which the hand rests is removed, the hand moves to the next one, as for a victim.
    - A call spares at most `patience` visited blocks; then the next block that may leave does, visited or
      not. Without this limit the hand could go round the whole cache in one call, a fifth of a second for a
      million blocks. The limit changes no decision on the recorded traces.

    Cost per block: O(1) on average, since each spared block was visited before; at most O(patience) in a
    call; and O(skipped) for protected blocks. Memory: 13 bytes a block.
    """

    name = "sieve"
    good_for = "small caches for shared prompts amid chats that end early; elsewhere LRU is better"
    paper = (
        "Zhang, Yang, Yue, Vigfusson and Rashmi, SIEVE is Simpler than LRU: an Efficient Turn-Key Eviction "
        "Algorithm for Web Caches, NSDI 2024"
    )
    patience: Annotated[int, msgspec.Meta(ge=0)] = 8_192

    def __init__(self, index: Index) -> None:
        super().__init__(index)
        self._queue = Lists(self.capacity_blocks, 1)
        self._visited = np.full(self.capacity_blocks, False, np.bool_)
        self._state = np.array([ABSENT, 0], np.int32)

    def access(self, slots: SlotArray, reused: BoolArray) -> None:
        _access(self._visited, self._state, slots, reused)

    def replace(self, keys: Keys, slots: SlotArray, num_free: int, protected: Protected) -> None:
        _replace(
            self._queue.links,
            self._visited,
            self._state,
            self.patience,
            slots,
            num_free,
            protected.ref_cnt,
            protected.path_table,
            protected.path_keys,
            protected.index_keys,
        )

    def remove(self, slots: SlotArray) -> None:
        _remove(self._queue.links, self._visited, self._state, slots)

    def reset(self) -> None:
        self._queue.clear()
        self._visited.fill(False)
        self._state[:] = (ABSENT, 0)

    def stats(self) -> dict[str, float]:
        return {"visited_blocks": int(self._state[VISITED])}

    def order(self) -> list[int]:
        return self._queue.members(0)[::-1]

    def marks(self) -> tuple[int | None, list[int]]:
        """Slot at which the hand rests, None for the oldest; visited slots. Cost: O(blocks), for tests."""
        hand = int(self._state[HAND])
        return None if hand == ABSENT else hand, np.flatnonzero(self._visited).tolist()


@kernel
def _access(visited: BoolArray, state: I32Array, slots: ReadI32Array, reused: ReadBoolArray) -> int:
    for i in range(slots.shape[0]):
        if reused[i] and not visited[slots[i]]:
            visited[slots[i]] = True
            state[VISITED] += 1
    return slots.shape[0]


@kernel
def _replace(
    links: I32Matrix,
    visited: BoolArray,
    state: I32Array,
    patience: int,
    slots: I32Array,
    num_free: int,
    ref_cnt: I32Array,
    path_table: U64Array,
    path_keys: U64Matrix,
    index_keys: U64Matrix,
) -> int:
    sentinel = links.shape[0] - 1
    hand = sentinel if state[HAND] == ABSENT else np.int64(state[HAND])
    for i in range(num_free, slots.shape[0]):
        rounds = 0
        while True:
            if hand == sentinel:
                # The rest of the round it was in, one that clears the marks, one that finds the victim.
                rounds += 1
                if rounds == 4:
                    return i
            elif evictable(ref_cnt, path_table, path_keys, index_keys, hand):
                if not visited[hand] or patience == 0:
                    break
                visited[hand] = False
                state[VISITED] -= 1
                patience -= 1
            hand = links[hand, PREV]
        newer = links[hand, PREV]
        state[VISITED] -= visited[hand]
        unlink(links, hand)
        slots[i] = hand
        hand = newer
    state[HAND] = ABSENT if hand == sentinel else hand
    for i in range(slots.shape[0]):
        visited[slots[i]] = False
        push_head(links, sentinel, slots[i])
    return slots.shape[0]


@kernel
def _remove(links: I32Matrix, visited: BoolArray, state: I32Array, slots: ReadI32Array) -> int:
    sentinel = links.shape[0] - 1
    for i in range(slots.shape[0]):
        slot = slots[i]
        if slot == state[HAND]:
            newer = links[slot, PREV]
            state[HAND] = ABSENT if newer == sentinel else newer
        state[VISITED] -= visited[slot]
        visited[slot] = False
        unlink(links, slot)
    return slots.shape[0]
