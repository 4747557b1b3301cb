"""Doubly linked lists over positions: the building blocks of policies.

Owns one int32 array with a row for each position and each list. A position is in at most one list; to move
it takes a few writes. A list's row is the sentinel of a ring: its NEXT is the head (most recent), its PREV
the tail (coldest), its LIST the number of members. Does not know keys, nor why an order changes.
"""

from __future__ import annotations

import numpy as np

from kvoffload.structures.jit import I32Matrix, ReadI32Array, inline, kernel

PREV, NEXT, LIST = 0, 1, 2
UNLISTED = -1


class Lists:
    """`num_lists` empty lists over `num_positions` positions. Memory: 12 bytes a position.

    Attributes:
        links: shape ``(num_positions + num_lists, 3)``, int32. List `i` is the row `sentinel(i)`.
    """

    __slots__ = ("links", "num_lists", "num_positions")

    def __init__(self, num_positions: int, num_lists: int) -> None:
        self.num_positions, self.num_lists = num_positions, num_lists
        self.links = np.empty((num_positions + num_lists, 3), np.int32)
        self.clear()

    def clear(self) -> None:
        """Empty every list. Cost: O(positions)."""
        self.links[:, LIST] = UNLISTED
        for row in range(self.num_positions, len(self.links)):
            self.links[row] = (row, row, 0)

    def sentinel(self, number: int) -> int:
        """Row of list `number`."""
        return self.num_positions + number

    def size(self, number: int) -> int:
        """Members of list `number`."""
        return int(self.links[self.num_positions + number, LIST])

    def members(self, number: int) -> list[int]:
        """Positions in list `number`, head first. Cost: O(members), for tests and reports."""
        found, row = [], int(self.links[self.sentinel(number), NEXT])
        while row != self.sentinel(number):
            found.append(row)
            row = int(self.links[row, NEXT])
        return found


@inline
def push_head(links: I32Matrix, sentinel: int, position: int) -> None:
    """Make `position`, which is in no list, the head."""
    head = links[sentinel, NEXT]
    links[position, PREV] = sentinel
    links[position, NEXT] = head
    links[position, LIST] = sentinel
    links[head, PREV] = position
    links[sentinel, NEXT] = position
    links[sentinel, LIST] += 1


@inline
def unlink(links: I32Matrix, position: int) -> None:
    """Remove `position` from its list."""
    before, after = links[position, PREV], links[position, NEXT]
    links[before, NEXT] = after
    links[after, PREV] = before
    links[links[position, LIST], LIST] -= 1
    links[position, LIST] = UNLISTED


@inline
def move_to_head(links: I32Matrix, sentinel: int, position: int) -> None:
    """Make `position`, wherever it is, the head of the list."""
    unlink(links, position)
    push_head(links, sentinel, position)


@kernel
def unlink_all(links: I32Matrix, positions: ReadI32Array) -> int:
    """Remove each of `positions` from its list."""
    for i in range(positions.shape[0]):
        unlink(links, positions[i])
    return positions.shape[0]
