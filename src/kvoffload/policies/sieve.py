"""SIEVE: a queue in which no block moves, and a hand that evicts blocks not visited since its last pass.

Source: Zhang, Yang, Yue, Vigfusson and Rashmi, "SIEVE is Simpler than LRU: an Efficient Turn-Key Eviction
Algorithm for Web Caches", NSDI 2024, algorithm 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
import numpy as np

from kvoffload.core.policy import CompiledPolicy
from kvoffload.core.request import Path, Used
from kvoffload.core.state import Cache, Entering, evictable
from kvoffload.structures.index import ABSENT, Index
from kvoffload.structures.jit import BoolArray, inline
from kvoffload.structures.lists import PREV, Lists, push_head, unlink
from kvoffload.structures.structs import Struct


class State(Struct):
    """The state of a SIEVE cache.

    Attributes:
        queue: all blocks, newest first.
        visited: True for each block that was used since its store, or since the hand last passed it.
        hand: the slot at which the next search begins. ABSENT: the search begins at the oldest block.
        num_visited: number of visited blocks.
        patience: largest number of visited blocks that a call spares from eviction.
        patience_left: number of visited blocks that the current call may still spare.
    """

    queue: Lists
    visited: BoolArray
    hand: int
    num_visited: int
    patience: int
    patience_left: int


class SIEVE(CompiledPolicy):
    """Scans a FIFO with a hand that spares used blocks.

    This is the paper's algorithm, extended to batches and to pinned blocks. Unlike in the paper, the search
    of one call is limited.

    A hit marks a block as visited, and moves nothing. A new block joins the queue at the head. To find a
    victim, the hand moves from the oldest block towards the head, then starts at the oldest block again. The
    hand clears the marks of visited blocks, and evicts the first block without a mark. Visited blocks keep
    their places. The next search continues from the victim's place.

    Where the paper leaves a choice:

    - The blocks of a batch join the queue together, after the batch's last victim was chosen. If this victim
      was at the head of the queue, the hand therefore continues at the oldest block, as in the paper. The
      blocks join in prefix order, so that the first block of an unused prefix is evicted first. With this
      order the hits equal the hits of an independent simulator, with which our golden tests compare them. But
      on a chat trace it lowers the prefix-hit ratio by up to 0.003.
    - The store of a block does not count as a visit, and the end of a request does not change the order.
    - The hand passes a protected block without changing its mark.
    - If the block at the hand is removed, the hand moves to the next block, as it does after an eviction.
    - A call spares at most `patience` visited blocks, then evicts the next evictable block, even if it was
      visited. Without this limit a call could scan the whole cache, which takes 0.2 s for a million blocks.
      The limit changes no decision in replays of the recorded traces.

    Cost per block: O(1) on average, because each spared block was visited before. A call costs at most
    O(patience), and O(skipped) for protected blocks. Memory: 13 bytes a block.
    """

    name = "sieve"
    good_for = "small caches for shared prompts amid chats that end early; elsewhere LRU is better"
    paper = (
        "Zhang, Yang, Yue, Vigfusson and Rashmi, SIEVE is Simpler than LRU: an Efficient Turn-Key Eviction "
        "Algorithm for Web Caches, NSDI 2024"
    )
    patience: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] = 8_192

    def __init__(self, index: Index) -> None:
        super().__init__(index)
        self.state = State(
            queue=Lists(self.capacity_blocks, 1),
            visited=np.full(self.capacity_blocks, False, np.bool_),
            hand=ABSENT,
            patience=self.patience,
        )

    def reset(self) -> None:
        self.state.queue.clear()
        self.state.visited.fill(False)
        self.state.hand, self.state.num_visited = ABSENT, 0

    def stats(self) -> dict[str, float]:
        return {"visited_blocks": self.state.num_visited}

    def ordered_lists(self) -> tuple[Lists, Sequence[int]]:
        return self.state.queue, (0,)


@SIEVE.compiled
def access(own: State, used: Used) -> None:
    visited = own.visited
    for i in range(used.count):
        slot = used.slots[i]
        if used.reused[i] and not visited[slot]:
            visited[slot] = True
            own.num_visited += 1


@inline
def _next_victim(own: State, cache: Cache, path: Path, hand: int) -> int:
    """Return the slot of the next victim, found from `hand` on. Spares up to `patience_left` visited blocks.

    If no block is evictable, returns the sentinel of the queue.
    """
    links, sentinel, visited = own.queue.links, own.queue.num_positions, own.visited
    rounds = 0
    while True:
        if hand == sentinel:
            # Three rounds: the rest of the current one, one that clears the marks, one that finds the victim.
            rounds += 1
            if rounds == 4:
                return hand
        elif evictable(cache, path, hand):
            if not visited[hand] or own.patience_left == 0:
                return hand
            visited[hand] = False
            own.num_visited -= 1
            own.patience_left -= 1
        hand = links[hand, PREV]


@SIEVE.compiled
def replace(own: State, new: Entering, cache: Cache, path: Path) -> None:
    links, sentinel, visited = own.queue.links, own.queue.num_positions, own.visited
    own.patience_left = own.patience
    hand = sentinel if own.hand == ABSENT else own.hand
    for i in range(new.num_given, new.count):
        victim = _next_victim(own, cache, path, hand)
        if victim == sentinel:
            return
        hand = links[victim, PREV]
        own.num_visited -= visited[victim]
        unlink(links, victim)
        new.slots[i] = victim
    own.hand = ABSENT if hand == sentinel else hand
    for i in range(new.count):
        visited[new.slots[i]] = False
        push_head(links, sentinel, new.slots[i])


@SIEVE.compiled
def remove(own: State, used: Used) -> None:
    links, sentinel = own.queue.links, own.queue.num_positions
    for i in range(used.count):
        slot = used.slots[i]
        if slot == own.hand:
            newer = links[slot, PREV]
            own.hand = ABSENT if newer == sentinel else newer
        own.num_visited -= own.visited[slot]
        own.visited[slot] = False
        unlink(links, slot)
