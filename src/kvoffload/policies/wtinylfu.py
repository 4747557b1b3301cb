"""W-TinyLFU: a small LRU window in front of a large segmented LRU that admits by frequency.

Source: Einziger, Friedman and Manes, "TinyLFU: A Highly Efficient Cache Admission Policy", ACM
Transactions on Storage 13(4), 2017.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvoffload.core.policy import CompiledPolicy
from kvoffload.core.request import Path, Used
from kvoffload.core.state import Cache, Entering, next_victim
from kvoffload.structures.index import ABSENT, Index, hash_row
from kvoffload.structures.jit import inline, prefetch
from kvoffload.structures.keylists import prefetch_keys
from kvoffload.structures.lists import (
    LIST,
    PREV,
    Lists,
    carry,
    move_to_head,
    push_all,
    rewind,
    take,
    unlink_all,
)
from kvoffload.structures.sketch import FrequencySketch, add, estimate, prefetch_count
from kvoffload.structures.structs import Struct

WINDOW, PROBATION, PROTECTED = 0, 1, 2
_SEGMENTS = (WINDOW, PROBATION, PROTECTED)


class State(Struct):
    """The state of a W-TinyLFU cache.

    Attributes:
        index: the manager's index, which has the keys of the blocks.
        lists: window, probation and protected.
        sketch: estimates of how often each block was used recently.
        max_window, max_main, max_protected: intended size of the window, of the main cache (probation and
            protected), and of its protected list, in blocks.
        num_entering: number of blocks of the current batch that have been processed. All blocks join the
            window after the batch's last victim was chosen.
        is_victim_tier: 1 if `access` reports blocks that return from the device.
    """

    index: Index
    lists: Lists
    sketch: FrequencySketch
    max_window: int
    max_main: int
    max_protected: int
    num_entering: int
    is_victim_tier: int


class WTinyLFU(CompiledPolicy):
    """An LRU window before a cache that admits popular blocks.

    This is the paper's algorithm, extended to batches and to pinned blocks. The window has 1 % of the slots.
    The rest is the main cache: 80 % of its slots are for protected blocks, and 20 % for blocks on probation.

    A new block enters the window. When the window is full, its coldest block duels with the main cache's
    coldest block on probation: the block that was used less often recently is evicted; on a tie, the window's
    block is evicted. If the window's block wins, it enters the main cache on probation. A block on probation
    becomes protected when it is used again. If there are too many protected blocks, the coldest returns to
    probation. A sketch with aging estimates the frequencies of uses and stores (`structures.sketch`).

    The paper does not cover batches, pinned blocks and failed stores. Our choices:

    - A batch is processed block by block, and each block changes the lists and the sketch for the next.
      Blocks of one batch never evict each other, and the head of the batch is the most recent.
    - A request may be longer than the window, so that no block of the window is evictable. Then a block of
      the main cache is evicted without a duel, and the window grows beyond its intended size. Later blocks of
      the window duel as usual.
    - While the main cache is smaller than intended, it may grow by one block for each new block. The first
      winner of a duel then enters the main cache without an eviction, and the window's next block duels.
    - While the window is smaller than intended, for example after blocks were discarded, a block of the main
      cache is evicted without a duel.
    - If the window or the main cache is fully protected, the other provides the victim. The main cache
      provides its coldest evictable block on probation, else its coldest evictable protected block.
    - A batch that used free slots may make the window larger than intended. The window's coldest blocks then
      move to the main cache without a duel, until the main cache has its intended size. At most one block
      moves for each free slot that the batch used.
    - In a victim tier, a block that returns from the device after another use goes on probation without a
      duel. The sketch counts the block's store, but not its use on the device.
    - The end of the storing request does not count as a second use. All blocks of the request move to the
      front of their lists, but the sketch does not count this use.
    - The sketch counts a missed block only when the block is stored. A block that is refused changes nothing.

    Cost per block: O(1), and O(skipped) for protected blocks at the cold ends of the lists. Memory: 12 bytes
    per block for the lists and 8 for the sketch.
    """

    name = "wtinylfu"
    good_for = "few popular prefixes among much one-off traffic; far behind lru where sessions fit"
    paper = (
        "Einziger, Friedman and Manes, TinyLFU: A Highly Efficient Cache Admission Policy, "
        "ACM Transactions on Storage 13(4), 2017"
    )

    def __init__(self, index: Index) -> None:
        super().__init__(index)
        max_window = max(1, self.capacity_blocks // 100)
        max_main = self.capacity_blocks - max_window
        self.state = State(
            lists=Lists(self.capacity_blocks, 3),
            sketch=FrequencySketch(self.capacity_blocks),
            index=index,
            max_window=max_window,
            max_main=max_main,
            max_protected=max_main * 4 // 5,
        )

    def reset(self) -> None:
        self.state.lists.clear()
        self.state.sketch.clear()

    def stats(self) -> dict[str, float]:
        window, probation, protected = (self.state.lists.size(segment) for segment in _SEGMENTS)
        return {"window_blocks": window, "probation_blocks": probation, "protected_blocks": protected}

    def ordered_lists(self) -> tuple[Lists, Sequence[int]]:
        return self.state.lists, _SEGMENTS


@inline
def _prefetch_used(own: State, used: Used) -> None:
    links, keys = own.lists.links, own.index.keys
    for i in range(used.count):
        prefetch(links, used.slots[i])
        if used.reused[i]:
            prefetch(keys, used.slots[i])
    for i in range(used.count):
        if used.reused[i]:
            prefetch_count(own.sketch, hash_row(keys, used.slots[i]))


@WTinyLFU.compiled
def access(own: State, used: Used) -> None:
    links, keys, c = own.lists.links, own.index.keys, own.lists.num_positions
    probation, protected = c + PROBATION, c + PROTECTED
    _prefetch_used(own, used)
    for i in range(used.count - 1, -1, -1):
        slot = used.slots[i]
        home = links[slot, LIST]
        if used.reused[i] and own.is_victim_tier:
            home = probation
        elif used.reused[i]:
            add(own.sketch, hash_row(keys, slot))
            if home == probation:
                home = protected
        move_to_head(links, home, slot)
        if links[protected, LIST] > own.max_protected:
            move_to_head(links, probation, links[protected, PREV])


@WTinyLFU.compiled
def remove(own: State, used: Used) -> None:
    unlink_all(own.lists.links, used.slots, used.count)


@inline
def _prefetch_duels(own: State, new: Entering) -> None:
    """Prefetch the keys and frequencies that the duels of a batch are likely to read."""
    links, keys, window = own.lists.links, own.index.keys, own.lists.num_positions + WINDOW
    num_leaving = new.count - new.num_given
    for i in range(new.count):
        prefetch_count(own.sketch, hash_row(new.keys, i))
    prefetch_keys(keys, own.lists, WINDOW, num_leaving)
    prefetch_keys(keys, own.lists, PROBATION, num_leaving)
    slot = links[window, PREV]
    for _ in range(min(num_leaving, np.int64(links[window, LIST]))):
        prefetch_count(own.sketch, hash_row(keys, slot))
        slot = links[slot, PREV]


@inline
def _window_is_too_large(own: State) -> bool:
    return own.lists.links[own.lists.num_positions + WINDOW, LIST] + own.num_entering > own.max_window


@inline
def _main_has_room(own: State) -> bool:
    """Return True if the main cache is smaller than intended."""
    links, c = own.lists.links, own.lists.num_positions
    return links[c + PROBATION, LIST] + links[c + PROTECTED, LIST] < own.max_main


@inline
def _defender(own: State, cache: Cache, path: Path) -> int:
    """Return the block of the main cache that duels with a block of the window.

    It is the coldest evictable block on probation. If there is none, it is the coldest evictable protected
    block, or ABSENT.
    """
    slot = next_victim(cache, path, own.lists, PROBATION)
    return slot if slot != ABSENT else next_victim(cache, path, own.lists, PROTECTED)


@inline
def _wins(own: State, candidate: int, defender: int) -> bool:
    """Return True if the block of the window has the higher recent frequency."""
    keys = own.index.keys
    return estimate(own.sketch, hash_row(keys, candidate)) > estimate(own.sketch, hash_row(keys, defender))


@inline
def _victim(own: State, cache: Cache, path: Path) -> int:
    """Return the next victim, or ABSENT if no block is evictable. Winners of duels enter the main cache."""
    may_grow = True
    while True:
        candidate = next_victim(cache, path, own.lists, WINDOW)
        defender = _defender(own, cache, path)
        if defender == ABSENT:
            return candidate
        if candidate == ABSENT or not _window_is_too_large(own):
            return defender
        if not _wins(own, candidate, defender):
            return candidate
        may_grow = may_grow and _main_has_room(own)
        carry(own.lists, PROBATION, candidate)
        if not may_grow:
            return defender
        may_grow = False


@inline
def _fill_main(own: State, num_free: int) -> None:
    """Move up to `num_free` of the window's coldest blocks to the main cache.

    Stops when the window or the main cache has its intended size.
    """
    links, c = own.lists.links, own.lists.num_positions
    for _ in range(num_free):
        if not (_window_is_too_large(own) and _main_has_room(own)):
            return
        move_to_head(links, c + PROBATION, links[c + WINDOW, PREV])


@WTinyLFU.compiled
def replace(own: State, new: Entering, cache: Cache, path: Path) -> None:
    own.is_victim_tier = not new.one_prefix
    _prefetch_duels(own, new)
    rewind(own.lists)
    for i in range(new.count):
        add(own.sketch, hash_row(new.keys, i))
        own.num_entering = i + 1
        if i >= new.num_given:
            victim = _victim(own, cache, path)
            if victim == ABSENT:
                return
            take(own.lists, victim)
            new.slots[i] = victim
    own.num_entering = 0
    push_all(own.lists.links, own.lists.num_positions + WINDOW, new.slots, new.count)
    _fill_main(own, new.num_given)
