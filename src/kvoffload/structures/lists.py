"""Doubly linked lists over positions, the building blocks of policies.

A position is in at most one list. All links are stored in one int32 array with the columns PREV, NEXT and
LIST. The array has a row for each position, followed by a row for each list.

- In the row of a position, PREV is the neighbour towards the head, and NEXT is the neighbour towards the
  tail. LIST is the number of the list's row, or `UNLISTED` if the position is in no list.
- The row of a list is called its sentinel. In this row, NEXT is the head (most recent position), PREV is the
  tail (coldest position), and LIST is the number of positions in the list. If the list is empty, NEXT and
  PREV are the number of the sentinel's row.

Every list also has a cursor, so that a search for a victim, from tail to head, can be interrupted and
continued. `rewind` starts the search. During a search, use `take` instead of `unlink`, and `carry` instead of
`move_to_head`. This module does not know keys.
"""

from __future__ import annotations

import numpy as np

from kvoffload.structures.jit import I32Array, I32Matrix, inline, kernel
from kvoffload.structures.structs import Struct

PREV, NEXT, LIST = 0, 1, 2
UNLISTED = -1


class Lists(Struct):
    """`num_lists` empty lists over `num_positions` positions. Memory: 12 bytes a position.

    Attributes:
        links: all links, as the module describes: int32, shape ``(num_positions + num_lists, 3)``. The row of
            list `i` is `sentinel(i)`.
        cursors: for each list, the position that the search visits next: int32, shape ``(num_lists,)``. After
            the search has visited the head, the cursor is the list's sentinel.
    """

    links: I32Matrix
    cursors: I32Array
    num_positions: int

    def __init__(self, num_positions: int, num_lists: int) -> None:
        super().__init__(
            links=np.empty((num_positions + num_lists, 3), np.int32),
            cursors=np.full(num_lists, 0, np.int32),
            num_positions=num_positions,
        )
        self.clear()

    @property
    def num_lists(self) -> int:
        """Number of lists."""
        return len(self.links) - self.num_positions

    def clear(self) -> None:
        """Empty every list. Cost: O(positions)."""
        self.links[:, LIST] = UNLISTED
        for row in range(self.num_positions, len(self.links)):
            self.links[row] = (row, row, 0)

    def sentinel(self, number: int) -> int:
        """Return the number of the row, in `links`, of list `number`."""
        return self.num_positions + number

    def size(self, number: int) -> int:
        """Return the number of positions in list `number`."""
        return int(self.links[self.num_positions + number, LIST])

    def members(self, number: int) -> list[int]:
        """Return the positions in list `number`, head first. Cost: O(members)."""
        positions = np.empty(self.size(number), np.int32)
        _write_members(self.links, self.sentinel(number), positions)
        members: list[int] = positions.tolist()
        return members


@kernel
def _write_members(links: I32Matrix, sentinel: int, positions: I32Array) -> None:
    row = sentinel
    for i in range(positions.shape[0]):
        row = links[row, NEXT]
        positions[i] = row


@inline
def push_head(links: I32Matrix, sentinel: int, position: int) -> None:
    """Add `position`, which must be in no list, at the head of the list with this sentinel."""
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
    """Move `position` from its list to the head of the list with this sentinel."""
    unlink(links, position)
    push_head(links, sentinel, position)


@inline
def unlink_all(links: I32Matrix, positions: I32Array, count: int) -> None:
    """Remove the first `count` entries of `positions` from their lists."""
    for i in range(count):
        unlink(links, positions[i])


@inline
def push_all(links: I32Matrix, sentinel: int, positions: I32Array, count: int) -> None:
    """Add the first `count` entries of `positions`, which must be in no list, at the head of a list.

    ``positions[0]`` becomes the head, and the other positions follow in order.
    """
    for i in range(count - 1, -1, -1):
        push_head(links, sentinel, positions[i])


@inline
def push_marked(links: I32Matrix, sentinel: int, marked: int, positions: I32Array, count: int) -> None:
    """Add the first `count` entries of `positions`, as `push_all` does, but to two lists.

    An entry may be marked: it is then ``~position`` instead of ``position``. Marked entries join the list
    with the sentinel `marked`, and their marks are removed in `positions`. All other entries join the list
    with the sentinel `sentinel`.
    """
    for i in range(count - 1, -1, -1):
        if positions[i] < 0:
            positions[i] = ~positions[i]
            push_head(links, marked, positions[i])
        else:
            push_head(links, sentinel, positions[i])


@inline
def rewind(lists: Lists) -> None:
    """Start a search at the tail of every list."""
    links, cursors, first = lists.links, lists.cursors, lists.num_positions
    for number in range(cursors.shape[0]):
        cursors[number] = links[first + number, PREV]


@inline
def take(lists: Lists, position: int) -> None:
    """Remove `position` from its list. Allowed during a search, unlike `unlink`."""
    links, cursors = lists.links, lists.cursors
    number = links[position, LIST] - lists.num_positions
    if cursors[number] == position:
        cursors[number] = links[position, PREV]
    unlink(links, position)


@inline
def carry(lists: Lists, number: int, position: int) -> None:
    """Move `position` to the head of list `number`. Allowed during a search, which visits `position` last."""
    cursors, sentinel = lists.cursors, lists.num_positions + number
    take(lists, position)
    push_head(lists.links, sentinel, position)
    if cursors[number] == sentinel:
        cursors[number] = position
