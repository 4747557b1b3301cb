"""ARC: a list of blocks used once, a list of blocks used again, and a target size learnt from ghost hits.

Source: Megiddo and Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003, figure 4.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvoffload.core.ghosts import leave_ghost, prefetch_exchange
from kvoffload.core.policy import CompiledPolicy
from kvoffload.core.request import Path, Used
from kvoffload.core.state import Cache, Entering, is_quiet, victim_of_either
from kvoffload.structures.index import ABSENT, Index, find, hash_row
from kvoffload.structures.jit import inline
from kvoffload.structures.keylists import KeyLists, forget, forget_coldest
from kvoffload.structures.lists import LIST, Lists, move_to_head, push_marked, rewind, take, unlink_all
from kvoffload.structures.structs import Struct

T1, T2 = 0, 1
B1, B2 = 0, 1


class State(Struct):
    """The state of an ARC cache.

    Attributes:
        lists: T1 and T2.
        ghosts: B1 and B2.
        target: target size of T1.
        new_t1, new_t2: numbers of blocks of the current batch that join T1 and T2 after all victims are
            chosen. Until then, slots of blocks for T2 are marked (`push_marked`).
    """

    lists: Lists
    ghosts: KeyLists
    target: float
    new_t1: int
    new_t2: int


class ARC(CompiledPolicy):
    """Learns the balance of recency and frequency from blocks that return soon after their eviction.

    The paper's algorithm with all four cases and bounds, for batches with pins.

    T1 holds blocks used by one request, T2 blocks used by several. B1 holds the keys of blocks evicted from
    T1, and B2 holds the keys of blocks evicted from T2. A miss on a key in B1 raises the target size `p` of
    T1. A miss on a key in B2 lowers `p`. After either miss the block enters T2.

    Invariants: ``|T1| + |B1| <= c`` and ``|T1| + |T2| + |B1| + |B2| <= 2c``.

    The paper does not cover batches (the blocks of one store), pins (blocks in use by a transfer) and
    failures. Our choices:

    - A batch is processed block by block, and each block changes the lists and the target for the next.
      Blocks of one batch never evict each other.
    - The end of the storing request does not count as a second access. When the request finishes, the block
      moves to the front of its list, with the rest of its path.
    - A miss changes the target and the ghosts only when the block is stored. So a block that is refused
      changes nothing.
    - If REPLACE selects a list whose blocks are all protected, the other list provides the victim.
      The ghost of a victim from T1 joins B1, the ghost of a victim from T2 joins B2.
    - While slots are free (at the start, after failures), REPLACE is skipped, because no victim is needed.
      The other steps of the case run, so that the target is adapted and the bounds hold.
    - With quotas, ARC must not learn from some stores (`tenants.may_learn`). In these stores, a block without
      a ghost enters T1, and its victim leaves no ghost.
    - A block whose store failed, or that was damaged, leaves no ghost, because it was not evicted. While the
      slot of a damaged block is pinned, the lists are shorter than the cache. So the number of ghosts is
      limited to `c` separately: the coldest ghost of B2 is dropped or, if B2 is empty, the coldest of B1.

    Cost per block: O(1), and O(skipped) for protected blocks at the cold ends. Memory: 12 bytes a block
    for the lists, and 28 bytes and the key for each of `c` ghosts.
    """

    name = "arc"
    good_for = "chat under pressure, where some prefixes come back again and again"
    paper = "Megiddo and Modha, ARC: A Self-Tuning, Low Overhead Replacement Cache, FAST 2003"

    def __init__(self, index: Index) -> None:
        super().__init__(index)
        self.state = State(
            lists=Lists(self.capacity_blocks, 2), ghosts=KeyLists(self.capacity_blocks, index.key_bytes, 2)
        )

    def reset(self) -> None:
        self.state.lists.clear()
        self.state.ghosts.clear()
        self.state.target = 0.0

    def stats(self) -> dict[str, float]:
        return {
            "t1_blocks": self.state.lists.size(T1),
            "t2_blocks": self.state.lists.size(T2),
            "b1_keys": self.state.ghosts.lists.size(B1),
            "b2_keys": self.state.ghosts.lists.size(B2),
            "target_t1_blocks": self.state.target,
        }

    def ordered_lists(self) -> tuple[Lists, Sequence[int]]:
        return self.state.lists, (T1, T2)

    def lists(self) -> tuple[list[int], list[int], list[bytes], list[bytes]]:
        """Return the slots of T1 and T2 and the keys of B1 and B2, most recent first. Cost: O(blocks)."""
        return (
            self.state.lists.members(T1),
            self.state.lists.members(T2),
            self.state.ghosts.members(B1),
            self.state.ghosts.members(B2),
        )


@ARC.compiled
def access(own: State, used: Used) -> None:
    """Make a hit block the most recent of T2 (case I)."""
    links, t2 = own.lists.links, own.lists.num_positions + T2
    for i in range(used.count - 1, -1, -1):
        slot = used.slots[i]
        move_to_head(links, t2 if used.reused[i] else links[slot, LIST], slot)


@ARC.compiled
def remove(own: State, used: Used) -> None:
    unlink_all(own.lists.links, used.slots, used.count)


@inline
def _prefetch(own: State, new: Entering, cache: Cache) -> None:
    """Prefetch the data of the likely victims. The target may change within the batch, so this is a guess."""
    links, c = own.lists.links, own.lists.num_positions
    number = T1 if links[c + T1, LIST] > own.target else T2
    ghost_number = B1 if links[c + T1, LIST] + own.ghosts.lists.links[c + B1, LIST] == c else B2
    prefetch_exchange(new, cache, own.lists, number, own.ghosts, ghost_number)


@inline
def _learn(own: State, ghost: int) -> bool:
    """Process a miss: cases II to IV of the paper. `ghost`: position of the key's ghost, or ABSENT.

    With a ghost, adapts the target; without a ghost, enforces the bounds. Returns False if the victim must
    come from T1 and must leave no ghost.
    """
    links, ghosts = own.lists.links, own.ghosts
    c, sizes = own.lists.num_positions, ghosts.lists.links
    b1, b2 = c + B1, c + B2
    size_b1, size_b2 = sizes[b1, LIST], sizes[b2, LIST]
    size_t1, size_t2 = links[c + T1, LIST] + own.new_t1, links[c + T2, LIST] + own.new_t2
    if ghost != ABSENT and sizes[ghost, LIST] == b1:  # Case II
        own.target = min(own.target + max(1.0, size_b2 / size_b1), float(c))
        forget(ghosts, ghost)
    elif ghost != ABSENT:  # Case III
        own.target = max(own.target - max(1.0, size_b1 / size_b2), 0.0)
        forget(ghosts, ghost)
    elif size_t1 + size_b1 == c:  # Case IV, A
        if size_t1 == c:
            return False
        forget_coldest(ghosts, b1)
    elif size_t1 + size_t2 + size_b1 + size_b2 == 2 * c:
        # Case IV, B. With a full cache the bound on ghosts in `_evict` would do the same.
        forget_coldest(ghosts, b2)
    return True


@inline
def _evict(own: State, cache: Cache, victim: int, keeps_ghost: bool) -> None:
    """Evict `victim`. If `keeps_ghost`, add its key to B1 or B2, and drop a ghost if there are `c` ghosts."""
    c, sizes = own.lists.num_positions, own.ghosts.lists.links
    if keeps_ghost:
        if sizes[sizes.shape[0] - 1, LIST] == 0:
            forget_coldest(own.ghosts, c + B2 if sizes[c + B2, LIST] > 0 else c + B1)
        from_t1 = own.lists.links[victim, LIST] == c + T1
        leave_ghost(own.ghosts, c + B1 if from_t1 else c + B2, cache, victim)
    take(own.lists, victim)


@inline
def _replace_quietly(own: State, cache: Cache, path: Path) -> int:
    """Evict a block for a new block of T1, without a ghost.

    Returns the victim, or ABSENT if no block is evictable.
    """
    links, sizes, c = own.lists.links, own.ghosts.lists.links, own.lists.num_positions
    size_t1 = links[c + T1, LIST] + own.new_t1
    from_t1 = size_t1 >= 1 and size_t1 > own.target
    victim = victim_of_either(cache, path, own.lists, T1 if from_t1 else T2)
    if victim != ABSENT:
        if links[victim, LIST] == c + T2 and size_t1 + sizes[c + B1, LIST] == c:
            forget_coldest(own.ghosts, c + B1)
        take(own.lists, victim)
    return victim


@ARC.compiled
def replace(own: State, new: Entering, cache: Cache, path: Path) -> None:
    links, ghosts, slots, c = own.lists.links, own.ghosts, new.slots, own.lists.num_positions
    own.new_t1 = own.new_t2 = 0
    is_quiet_store = is_quiet(cache)
    _prefetch(own, new, cache)
    rewind(own.lists)
    for i in range(new.count):
        ghost = find(ghosts.index, new.keys, i, hash_row(new.keys, i))
        in_b2 = ghost != ABSENT and ghosts.lists.links[ghost, LIST] == c + B2
        size_t1 = links[c + T1, LIST] + own.new_t1
        if is_quiet_store and ghost == ABSENT and i >= new.num_given:
            victim = _replace_quietly(own, cache, path)
            if victim == ABSENT:
                return
            slots[i] = victim
            own.new_t1 += 1
            continue
        keeps_ghost = _learn(own, ghost)
        if i >= new.num_given:  # REPLACE
            from_t1 = size_t1 >= 1 and (size_t1 > own.target or (in_b2 and size_t1 == own.target))
            victim = victim_of_either(cache, path, own.lists, T1 if from_t1 or not keeps_ghost else T2)
            if victim == ABSENT:
                return
            _evict(own, cache, victim, keeps_ghost)
            slots[i] = victim
        if ghost != ABSENT:
            own.new_t2 += 1
            slots[i] = ~slots[i]
        else:
            own.new_t1 += 1
    push_marked(links, c + T1, c + T2, slots, new.count)
