"""Keys of blocks that have left: what the policies that remember them have in common.

Decides nothing: a policy says which blocks become ghosts, and what it means that one comes back.
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
    """Remember the key of a block that leaves; if there is no room the coldest of the list is forgotten."""
    links, keys = ghosts.lists.links, cache.index.keys
    if links[links.shape[0] - 1, LIST] == 0:
        forget_coldest(ghosts, sentinel)
    return remember(ghosts, sentinel, keys, slot, hash_row(keys, slot))


@inline
def comes_back(ghosts: KeyLists, new: Entering, row: int) -> bool:
    """Whether a new block is remembered; then its key is forgotten."""
    ghost = find(ghosts.index, new.keys, row, hash_row(new.keys, row))
    if ghost != ABSENT:
        forget(ghosts, ghost)
    return ghost != ABSENT


@inline
def prefetch_exchange(
    new: Entering, cache: Cache, lists: Lists, number: int, ghosts: KeyLists, ghost_number: int
) -> None:
    """Ask for the cache lines of a store: of the coldest blocks of a list, which may leave and be remembered,
    and of the coldest ghosts, which may be forgotten for them.

    A wrong guess costs time, never correctness.
    """
    table, index_keys, ghost_keys = ghosts.index.table, cache.index.keys, ghosts.index.keys
    num_leaving = new.count - new.num_given
    for i in range(new.count):
        prefetch(table, home_bucket(table, hash_row(new.keys, i)))
    prefetch_keys(index_keys, lists, number, num_leaving)
    prefetch_keys(ghost_keys, ghosts.lists, ghost_number, num_leaving)
    prefetch_buckets(table, index_keys, lists, number, num_leaving)
    prefetch_buckets(table, ghost_keys, ghosts.lists, ghost_number, num_leaving)
