"""Recency lists of keys that need no cached block, such as ghosts (keys of evicted blocks).

Owns an index with a fixed number of positions, the lists that order the positions in use, and a list of the
unused positions.
"""

from __future__ import annotations

import numpy as np

from kvoffload.structures.index import Index, hash_row, home_bucket, insert, remove
from kvoffload.structures.jit import U64Array, U64Matrix, inline, prefetch
from kvoffload.structures.lists import LIST, PREV, Lists, push_head, unlink
from kvoffload.structures.structs import Struct


class KeyLists(Struct):
    """Up to `capacity` keys in `num_lists` lists, each with the most recent key first.

    A further list has the unused positions. Memory: 28 bytes and the key's length for each key of the
    capacity.
    """

    index: Index
    lists: Lists

    def __init__(self, capacity: int, key_bytes: int, num_lists: int) -> None:
        super().__init__(index=Index(capacity, key_bytes).populate(), lists=Lists(capacity, num_lists + 1))
        self._fill_spare()

    def clear(self) -> None:
        """Forget every key. Cost: O(capacity)."""
        self.index.clear()
        self.lists.clear()
        self._fill_spare()

    def members(self, number: int) -> list[bytes]:
        """Return the keys of list `number`, most recent first. Cost: O(members), for tests and reports."""
        return [self.index.key_at(position) for position in self.lists.members(number)]

    def _fill_spare(self) -> None:
        lists, capacity = self.lists, self.lists.num_positions
        sentinel = len(lists.links) - 1
        ring = np.arange(-1, capacity + 1, dtype=np.int32)
        ring[0] = ring[-1] = sentinel
        lists.links[:capacity, 0] = ring[:-2]
        lists.links[:capacity, 1] = ring[2:]
        lists.links[:capacity, 2] = sentinel
        lists.links[sentinel] = (ring[-2], ring[1], capacity)


@inline
def remember(keys: KeyLists, sentinel: int, batch: U64Matrix, row: int, h: np.uint64) -> int:
    """Add the absent key ``batch[row]`` with hash `h` at the head of a list; returns its position.

    The capacity must not be reached yet.
    """
    links = keys.lists.links
    position = links[links.shape[0] - 1, PREV]
    unlink(links, position)
    insert(keys.index, batch, row, h, position)
    push_head(links, sentinel, position)
    return position


@inline
def forget(keys: KeyLists, position: int) -> None:
    """Forget the key at `position`, which becomes unused."""
    links = keys.lists.links
    remove(keys.index, position)
    unlink(links, position)
    push_head(links, links.shape[0] - 1, position)


@inline
def forget_coldest(keys: KeyLists, sentinel: int) -> None:
    """Forget the last key of a list that is not empty."""
    forget(keys, keys.lists.links[sentinel, PREV])


@inline
def prefetch_keys(keys: U64Matrix, lists: Lists, number: int, count: int) -> None:
    """Prefetch the keys of the `count` coldest members of a list."""
    links, sentinel = lists.links, lists.num_positions + number
    position = links[sentinel, PREV]
    for _ in range(min(count, np.int64(links[sentinel, LIST]))):
        prefetch(keys, position)
        position = links[position, PREV]


@inline
def prefetch_buckets(table: U64Array, keys: U64Matrix, lists: Lists, number: int, count: int) -> None:
    """Prefetch the index buckets of a list's `count` coldest keys. Call `prefetch_keys` some time before."""
    links, sentinel = lists.links, lists.num_positions + number
    position = links[sentinel, PREV]
    for _ in range(min(count, np.int64(links[sentinel, LIST]))):
        prefetch(table, home_bucket(table, hash_row(keys, position)))
        position = links[position, PREV]
