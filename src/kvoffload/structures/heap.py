"""An indexed heap of positions, for policies that order blocks by priority.

A position has a rank (its priority) and a stamp (the time of its insertion), which orders positions of equal
rank. The heap does not know keys, or the meaning of a rank.

To keep the heap small, it does not contain all positions, but one position of each *chain*. A chain is a list
of positions in ascending order. Only its first position is in the heap; when this position is removed, the
next position of the chain takes its place. Positions that are pushed one after the other in ascending or
descending order form a chain. The ranks of blocks often ascend or descend along a request's path; then the
path is one chain, and the heap fits the processor's cache. If pushes are unordered, every chain has one
position, and the structure is a plain binary min-heap.
"""

from __future__ import annotations

import numpy as np

from kvoffload.structures.jit import F64Matrix, I32Array, I32Matrix, inline, prefetch
from kvoffload.structures.structs import Struct

NONE = -1
RANK, STAMP = 0, 1
BEFORE, AFTER, PLACE = 0, 1, 2


class Heap(Struct):
    """An empty heap over `num_positions` positions. Memory: 32 bytes a position.

    Attributes:
        order: rank and stamp of each position; shape ``(num_positions, 2)``. Stamps are integers.
        links: shape ``(num_positions, 3)``. The columns BEFORE and AFTER have the previous and the next
            position of the chain, or NONE. For the first position of a chain, the column PLACE has its index
            in `firsts`.
        firsts: the first position of each chain, in heap order. Only the first `num_chains` entries are
            valid.
        size: number of positions in all chains.
        clock: the stamp that was given last.
        last: the position that was inserted last, or NONE.
        aside: the position that was set aside last (`set_aside`), or NONE. Positions that are set aside form
            a linked list: for each of them, the column AFTER has the position that was set aside before it.
    """

    order: F64Matrix
    links: I32Matrix
    firsts: I32Array
    num_chains: int
    size: int
    clock: int
    last: int
    aside: int

    def __init__(self, num_positions: int) -> None:
        super().__init__(
            order=np.full((num_positions, 2), 0.0, np.float64),
            links=np.full((num_positions, 3), NONE, np.int32),
            firsts=np.full(num_positions, NONE, np.int32),
        )
        self.clear()

    def clear(self) -> None:
        """Empty the heap. Cost: O(1)."""
        self.num_chains = self.size = self.clock = 0
        self.last = self.aside = NONE

    def chains(self) -> list[list[int]]:
        """Return a list of the positions of each chain. Cost: O(n), for tests and reports."""
        chains = []
        for position in self.firsts[: self.num_chains].tolist():
            chains.append([position])
            while (position := int(self.links[position, AFTER])) != NONE:
                chains[-1].append(position)
        return chains

    def members(self) -> list[int]:
        """Return the positions in ascending order. Cost: O(n log n), for tests and reports."""
        inside = np.array([position for chain in self.chains() for position in chain], np.int32)
        in_order: list[int] = inside[
            np.lexsort((self.order[inside, STAMP], self.order[inside, RANK]))
        ].tolist()
        return in_order


@inline
def _precedes(order: F64Matrix, a: int, b: int) -> bool:
    if order[a, RANK] == order[b, RANK]:
        return order[a, STAMP] < order[b, STAMP]
    return order[a, RANK] < order[b, RANK]


@inline
def _put(heap: Heap, place: int, position: int) -> None:
    heap.firsts[place] = position
    heap.links[position, PLACE] = place


@inline
def _sift_up(heap: Heap, hole: int, position: int) -> None:
    """Move the free place `hole` up while its parent is greater, then put `position` there."""
    order, firsts = heap.order, heap.firsts
    while hole > 0:
        parent = (hole - 1) >> 1
        if not _precedes(order, position, firsts[parent]):
            break
        _put(heap, hole, firsts[parent])
        hole = parent
    _put(heap, hole, position)


@inline
def _sift_down(heap: Heap, hole: int, position: int) -> None:
    """Move the free place `hole` down while a child is less, then put `position` there."""
    order, firsts, size = heap.order, heap.firsts, heap.num_chains
    while True:
        child = 2 * hole + 1
        if child >= size:
            break
        if child + 1 < size and _precedes(order, firsts[child + 1], firsts[child]):
            child += 1
        if not _precedes(order, firsts[child], position):
            break
        _put(heap, hole, firsts[child])
        hole = child
    _put(heap, hole, position)


@inline
def _end_chain(heap: Heap, place: int) -> None:
    """Remove the chain at index `place` of `firsts`, because it is empty. The last chain fills the gap."""
    heap.num_chains -= 1
    moved = heap.firsts[heap.num_chains]
    if place < heap.num_chains:
        _sift_down(heap, place, moved)
        _sift_up(heap, heap.links[moved, PLACE], moved)


@inline
def insert_again(heap: Heap, position: int) -> None:
    """Insert a position whose rank and stamp are already set.

    If possible, `position` extends the chain of L, the position that was inserted last:

    - If L is the first of its chain, and `position` is less than L, `position` becomes the first of this
      chain.
    - If L is the last of its chain, and `position` is greater than L, `position` becomes the last of this
      chain.
    - Otherwise `position` starts a new chain.
    """
    links, last = heap.links, heap.last
    is_less = last != NONE and _precedes(heap.order, position, last)
    heap.size += 1
    heap.last = position
    links[position, BEFORE] = links[position, AFTER] = NONE
    if is_less and links[last, BEFORE] == NONE:
        links[position, AFTER] = last
        links[last, BEFORE] = position
        _sift_up(heap, links[last, PLACE], position)
    elif last != NONE and not is_less and links[last, AFTER] == NONE:
        links[position, BEFORE] = last
        links[last, AFTER] = position
    else:
        heap.num_chains += 1
        _sift_up(heap, heap.num_chains - 1, position)


@inline
def push(heap: Heap, position: int, rank: float) -> None:
    """Insert a position, after all positions of equal rank."""
    heap.clock += 1
    heap.order[position, RANK], heap.order[position, STAMP] = rank, heap.clock
    insert_again(heap, position)


@inline
def take_out(heap: Heap, position: int) -> None:
    """Remove a position from the heap. Its rank and stamp stay readable."""
    links = heap.links
    before, after = links[position, BEFORE], links[position, AFTER]
    heap.size -= 1
    if heap.last == position:
        heap.last = NONE
    if after != NONE:
        links[after, BEFORE] = before
    if before != NONE:
        links[before, AFTER] = after
    elif after == NONE:
        _end_chain(heap, links[position, PLACE])
    else:
        prefetch(links, links[after, AFTER])
        prefetch(heap.order, links[after, AFTER])
        _sift_down(heap, links[position, PLACE], after)


@inline
def set_aside(heap: Heap, position: int) -> None:
    """Remember a position that was taken out, so that `put_back` can reinsert it."""
    heap.links[position, AFTER] = heap.aside
    heap.aside = position


@inline
def put_back(heap: Heap) -> None:
    """Reinsert the positions that were set aside, with their old ranks and stamps."""
    while heap.aside != NONE:
        position = heap.aside
        heap.aside = heap.links[position, AFTER]
        insert_again(heap, position)
