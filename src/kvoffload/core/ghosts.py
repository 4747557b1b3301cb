"""Functions for ghosts, the remembered keys of evicted blocks. Several policies share them.

Decides nothing: a policy chooses which blocks become ghosts, and how to treat a block that returns.
"""

from __future__ import annotations

from kvoffload.core.state import Cache, Entering
from kvoffload.structures.index import ABSENT, find, hash_row, home_bucket
from kvoffload.structures.jit import inline, prefetch
from kvoffload.structures.keylists import (
    KeyLists,
    forget,
    forget_coldest,
    prefetch_buckets,
    prefetch_keys,
    remember,
)
from kvoffload.structures.lists import LIST, Lists


@inline
def leave_ghost(ghosts: KeyLists, sentinel: int, cache: Cache, slot: int) -> int:
    """Remember the key of the victim in `slot` as a ghost; return the ghost's position.

    If no position is free, the coldest ghost of the list with this `sentinel` is forgotten first.
    """
    links, keys = ghosts.lists.links, cache.index.keys
    if links[links.shape[0] - 1, LIST] == 0:
        forget_coldest(ghosts, sentinel)
    return remember(ghosts, sentinel, keys, slot, hash_row(keys, slot))


@inline
def pop_ghost(ghosts: KeyLists, new: Entering, row: int) -> bool:
    """Forget the ghost of the new block in this row. Return True if the block had a ghost."""
    ghost = find(ghosts.index, new.keys, row, hash_row(new.keys, row))
    if ghost != ABSENT:
        forget(ghosts, ghost)
    return ghost != ABSENT


@inline
def prefetch_exchange(
    new: Entering, cache: Cache, lists: Lists, number: int, ghosts: KeyLists, ghost_number: int
) -> None:
    """Prefetch the cache lines that a store will probably change. A wrong guess costs only time.

    The store evicts the coldest blocks of list `number`, and forgets the coldest ghosts of list
    `ghost_number`.
    """
    table, index_keys, ghost_keys = ghosts.index.table, cache.index.keys, ghosts.index.keys
    num_leaving = new.count - new.num_given
    for i in range(new.count):
        prefetch(table, home_bucket(table, hash_row(new.keys, i)))
    prefetch_keys(index_keys, lists, number, num_leaving)
    prefetch_keys(ghost_keys, ghosts.lists, ghost_number, num_leaving)
    prefetch_buckets(table, index_keys, lists, number, num_leaving)
    prefetch_buckets(table, ghost_keys, ghosts.lists, ghost_number, num_leaving)
