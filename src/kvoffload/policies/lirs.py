"""LIRS: keeps blocks whose last two uses are close together; other blocks pass through a short queue.

Source: Jiang and Zhang, "LIRS: An Efficient Low Inter-reference Recency Set Replacement Policy to Improve
Buffer Cache Performance", SIGMETRICS 2002.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvoffload.core.ghosts import leave_ghost, prefetch_exchange
from kvoffload.core.policy import CompiledPolicy
from kvoffload.core.request import Path, Used
from kvoffload.core.state import Cache, Entering, next_victim
from kvoffload.structures.index import ABSENT, Index, find, hash_row
from kvoffload.structures.jit import I64Array, inline
from kvoffload.structures.keylists import KeyLists, forget, prefetch_keys
from kvoffload.structures.lists import (
    LIST,
    PREV,
    Lists,
    carry,
    move_to_head,
    push_marked,
    rewind,
    take,
    unlink_all,
)
from kvoffload.structures.structs import Struct

LIR, QUEUE = 0, 1
GONE = 0
NO_BOTTOM = 2**63 - 1


class State(Struct):
    """The state of a LIRS cache.

    Attributes:
        lists: the LIR blocks, and the queue Q of HIR blocks.
        gone: the ghosts, which are keys of evicted blocks.
        used_at: time of the last use of each block.
        gone_used_at: time of the last use of each ghost.
        clock: the current time, which is the number of uses and stores of blocks so far.
        max_lir: largest number of LIR blocks.
        new_lir: number of blocks of the current batch that become LIR. The blocks enter the lists after the
            batch's last victim was chosen; until then their slots are marked (`push_marked`).
    """

    lists: Lists
    gone: KeyLists
    used_at: I64Array
    gone_used_at: I64Array
    clock: int
    max_lir: int
    new_lir: int


class LIRS(CompiledPolicy):
    """Keeps blocks that are used at short intervals; evicts other blocks soon.

    This is the paper's algorithm, extended to batches and to pinned blocks. 99 % of the slots are for LIR
    blocks (low inter-reference recency), which are kept. The other blocks are HIR (high), and form the queue
    Q of the next victims. A ghost is the key of an evicted HIR block. The paper's stack S orders blocks and
    ghosts by last use, and ends at the coldest LIR block.

    - When a HIR block or a ghost in S is used, it becomes an LIR block. The coldest LIR block becomes HIR and
      joins the end of Q.
    - When a HIR block outside S is used, it stays HIR and moves to the end of Q.
    - The victim is the first block of Q. If the victim is in S, its key stays in S as a ghost.

    Unlike the paper's implementation, this class stores no stack, so that no call has to prune a long stack.
    Instead, a block or ghost is in S if its last use is later than the last use of the coldest LIR block. The
    decisions are the same; a simple implementation with a stack confirms this in the tests.

    The paper does not cover batches, pinned blocks and failed stores. Our choices:

    - A batch is processed block by block, and each block changes S and Q for the next. Blocks of one batch
      never evict each other, and the head of the batch is the most recent.
    - Q is short, so a long request may protect all blocks of Q. Then the coldest evictable LIR block is
      evicted. It leaves no ghost, because it was at the bottom of S. The new block still becomes HIR, so Q
      exceeds its 1 % for a while. If the new block became LIR instead, a scan would replace the LIR set: on a
      recorded chat, with a cache of 1,000 to 2,000 blocks, a third of all hits would be lost.
    - While the LIR set is not full, a block that gets a free slot becomes LIR, as in the paper. During this
      time, a HIR block that is used again also becomes LIR, even if it is not in S, because otherwise an LIR
      set that has shrunk would never grow again.
    - The end of the storing request does not count as a second access. The block moves to the top of S with
      the rest of its path. A HIR block also moves to the end of Q.
    - There are at most as many ghosts as slots; the oldest are forgotten first. (The paper has no limit.)
    - A block whose store failed, or that was damaged, leaves no ghost.

    A cache of one block has no LIR block, and behaves as LRU.

    Cost per block: O(1), and O(skipped) for protected blocks at the cold ends. Memory: 20 bytes a block,
    and 36 bytes and the key for each ghost.
    """

    name = "lirs"
    good_for = "agents and chat whose working set is several times the cache; behind lru where it fits"
    paper = (
        "Jiang and Zhang, LIRS: An Efficient Low Inter-reference Recency Set Replacement Policy to Improve "
        "Buffer Cache Performance, SIGMETRICS 2002"
    )

    def __init__(self, index: Index) -> None:
        super().__init__(index)
        self.state = State(
            lists=Lists(self.capacity_blocks, 2),
            gone=KeyLists(self.capacity_blocks, index.key_bytes, 1),
            used_at=np.full(self.capacity_blocks, 0, np.int64),
            gone_used_at=np.full(self.capacity_blocks, 0, np.int64),
            max_lir=self.capacity_blocks - max(1, self.capacity_blocks // 100),
        )

    def reset(self) -> None:
        self.state.lists.clear()
        self.state.gone.clear()
        self.state.clock = self.state.new_lir = 0

    def stats(self) -> dict[str, float]:
        return {
            "lir_blocks": self.state.lists.size(LIR),
            "hir_blocks": self.state.lists.size(QUEUE),
            "gone_keys": self.state.gone.lists.size(GONE),
        }

    def ordered_lists(self) -> tuple[Lists, Sequence[int]]:
        return self.state.lists, (QUEUE, LIR)


@inline
def _bottom(own: State) -> int:
    """Return the time of the last use of the coldest LIR block; NO_BOTTOM if there is no LIR block.

    The paper's stack S consists of the keys whose last use is later than this time. The time never decreases.
    """
    lir = own.lists.num_positions + LIR
    coldest = own.lists.links[lir, PREV]
    return np.int64(NO_BOTTOM) if coldest == lir else own.used_at[coldest]


@inline
def _num_lir(own: State) -> int:
    return own.lists.links[own.lists.num_positions + LIR, LIST] + own.new_lir


@inline
def _limit_lir(own: State) -> None:
    """If there are too many LIR blocks, move the coldest of them to the end of Q, as a HIR block."""
    if _num_lir(own) > own.max_lir:
        carry(own.lists, QUEUE, own.lists.links[own.lists.num_positions + LIR, PREV])


@LIRS.compiled
def access(own: State, used: Used) -> None:
    links, used_at, lir = own.lists.links, own.used_at, own.lists.num_positions + LIR
    for i in range(used.count - 1, -1, -1):
        slot = used.slots[i]
        becomes_lir = used.reused[i] and (_num_lir(own) < own.max_lir or used_at[slot] > _bottom(own))
        if links[slot, LIST] == lir or becomes_lir:
            move_to_head(links, lir, slot)
            _limit_lir(own)
        else:
            move_to_head(links, own.lists.num_positions + QUEUE, slot)
        own.clock += 1
        used_at[slot] = own.clock


@LIRS.compiled
def remove(own: State, used: Used) -> None:
    unlink_all(own.lists.links, used.slots, used.count)


@inline
def _prefetch(own: State, new: Entering, cache: Cache) -> None:
    """Prefetch the data of the likely victims: the blocks of Q first, then the coldest LIR blocks."""
    prefetch_exchange(new, cache, own.lists, QUEUE, own.gone, GONE)
    in_queue = own.lists.links[own.lists.num_positions + QUEUE, LIST]
    prefetch_keys(cache.index.keys, own.lists, LIR, new.count - new.num_given - in_queue)


@inline
def _returns_to_stack(own: State, new: Entering, i: int) -> bool:
    """Return True if the new block number `i` has a ghost in S. If it has a ghost, forget the ghost."""
    gone = find(own.gone.index, new.keys, i, hash_row(new.keys, i))
    if gone == ABSENT:
        return False
    forget(own.gone, gone)
    return own.gone_used_at[gone] > _bottom(own)


@inline
def _evict(own: State, cache: Cache, path: Path) -> int:
    """Evict the first evictable block of Q, and remember its key as a ghost if the block is in S.

    If all blocks of Q are protected, evicts the coldest evictable LIR block, which leaves no ghost. Returns
    the victim's slot, or ABSENT if no block is evictable.
    """
    victim = next_victim(cache, path, own.lists, QUEUE)
    if victim == ABSENT:
        victim = next_victim(cache, path, own.lists, LIR)
    elif own.used_at[victim] > _bottom(own):
        position = leave_ghost(own.gone, own.gone.lists.num_positions + GONE, cache, victim)
        own.gone_used_at[position] = own.used_at[victim]
    if victim != ABSENT:
        take(own.lists, victim)
    return victim


@LIRS.compiled
def replace(own: State, new: Entering, cache: Cache, path: Path) -> None:
    slots, c = new.slots, own.lists.num_positions
    _prefetch(own, new, cache)
    rewind(own.lists)
    for i in range(new.count):
        becomes_lir = _returns_to_stack(own, new, i)
        if i >= new.num_given:
            slots[i] = _evict(own, cache, path)
            if slots[i] == ABSENT:
                return
        elif _num_lir(own) < own.max_lir:
            becomes_lir = True
        own.used_at[slots[i]] = own.clock + new.count - i
        if becomes_lir:
            slots[i] = ~slots[i]
            own.new_lir += 1
            _limit_lir(own)
    own.clock += new.count
    own.new_lir = 0
    push_marked(own.lists.links, c + QUEUE, c + LIR, slots, new.count)
