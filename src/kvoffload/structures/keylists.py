"""Keys in recency lists, without blocks: ghosts of evicted blocks, counters of keys.

Owns an index over a fixed number of positions, the lists that order them and a list of spare positions.
Does not know why a key is remembered.
"""

from __future__ import annotations

import numpy as np

from kvoffload.structures.index import Index, insert, remove
from kvoffload.structures.jit import I32Matrix, U64Array, U64Matrix, inline
from kvoffload.structures.lists import PREV, Lists, push_head, unlink


class KeyLists:
    """At most `capacity` keys in `num_lists` lists, most recent first.

    Kernels get `index.table`, `index.keys` and `lists.links`. List number `num_lists` holds the spare
    positions. Memory: 28 bytes a key, and the key.
    """

    __slots__ = ("index", "lists", "num_lists")

    def __init__(self, capacity: int, key_bytes: int, num_lists: int) -> None:
        self.index = Index(capacity, key_bytes).populate()
        self.num_lists = num_lists
        self.lists = Lists(capacity, num_lists + 1)
        self._fill_spare()

    def clear(self) -> None:
        """Forget every key. Cost: O(capacity)."""
        self.index.clear()
        self.lists.clear()
        self._fill_spare()

    def members(self, number: int) -> list[bytes]:
        """Keys of list `number`, most recent first. Cost: O(members), for tests and reports."""
        return [self.index.key_at(position) for position in self.lists.members(number)]

    def _fill_spare(self) -> None:
        lists, capacity = self.lists, self.lists.num_positions
        sentinel = lists.sentinel(self.num_lists)
        ring = np.arange(-1, capacity + 1, dtype=np.int32)
        ring[0] = ring[-1] = sentinel
        lists.links[:capacity, 0] = ring[:-2]
        lists.links[:capacity, 1] = ring[2:]
        lists.links[:capacity, 2] = sentinel
        lists.links[sentinel] = (ring[-2], ring[1], capacity)


@inline
def remember(
    table: U64Array,
    keys: U64Matrix,
    links: I32Matrix,
    sentinel: int,
    batch: U64Matrix,
    row: int,
    h: np.uint64,
) -> int:
    """Put the absent key `batch[row]` at the head of a list; there must be a spare position."""
    spare = links.shape[0] - 1
    position = links[spare, PREV]
    unlink(links, position)
    insert(table, keys, batch, row, h, position)
    push_head(links, sentinel, position)
    return position


@inline
def forget(table: U64Array, keys: U64Matrix, links: I32Matrix, position: int) -> None:
    """Forget the key at `position`, which becomes spare."""
    remove(table, keys, position)
    unlink(links, position)
    push_head(links, links.shape[0] - 1, position)


@inline
def forget_coldest(table: U64Array, keys: U64Matrix, links: I32Matrix, sentinel: int) -> None:
    """Forget the last key of a list that is not empty."""
    forget(table, keys, links, links[sentinel, PREV])
