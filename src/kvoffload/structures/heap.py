"""A heap over positions that can be found, moved and removed: for policies that order by priority.

Owns the arrays of an indexed binary heap, the least first, equal ranks in the order of their stamps. Does not
know keys, nor what a rank means.
"""

from __future__ import annotations

import numpy as np

from kvoffload.structures.jit import F64Array, I32Array, I64Array, inline

OUTSIDE = -1
SIZE, CLOCK = 0, 1


class Heap:
    """An empty heap over `num_positions` positions. Memory: 24 bytes a position.

    Attributes:
        heap: positions in heap order; only the first ``state[SIZE]`` entries are valid.
        place: index of each position in `heap`, or OUTSIDE.
        rank, stamp: the order of the positions.
        state: int64: how many positions are inside, and the last stamp.
    """

    __slots__ = ("heap", "place", "rank", "stamp", "state")

    def __init__(self, num_positions: int) -> None:
        self.heap = np.full(num_positions, 0, np.int32)
        self.place = np.full(num_positions, OUTSIDE, np.int32)
        self.rank = np.full(num_positions, 0.0, np.float64)
        self.stamp = np.full(num_positions, 0, np.int64)
        self.state = np.zeros(2, np.int64)

    def clear(self) -> None:
        """Empty the heap. Cost: O(positions)."""
        self.place.fill(OUTSIDE)
        self.state.fill(0)

    def members(self) -> list[int]:
        """Positions inside, the least first. Cost: O(n log n), for tests and reports."""
        inside = self.heap[: self.state[SIZE]]
        in_order: list[int] = inside[np.lexsort((self.stamp[inside], self.rank[inside]))].tolist()
        return in_order


@inline
def _precedes(rank: F64Array, stamp: I64Array, a: int, b: int) -> bool:
    return rank[a] < rank[b] or (rank[a] == rank[b] and stamp[a] < stamp[b])


@inline
def sift_up(heap: I32Array, place: I32Array, rank: F64Array, stamp: I64Array, at: int) -> None:
    """Move the position at index `at` of the heap up to its place."""
    position = heap[at]
    while at > 0:
        parent = (at - 1) >> 1
        if not _precedes(rank, stamp, position, heap[parent]):
            break
        heap[at] = heap[parent]
        place[heap[at]] = at
        at = parent
    heap[at] = position
    place[position] = at


@inline
def sift_down(heap: I32Array, place: I32Array, rank: F64Array, stamp: I64Array, size: int, at: int) -> None:
    """Move the position at index `at` of a heap of `size` down to its place."""
    position = heap[at]
    while True:
        child = 2 * at + 1
        if child >= size:
            break
        if child + 1 < size and _precedes(rank, stamp, heap[child + 1], heap[child]):
            child += 1
        if not _precedes(rank, stamp, heap[child], position):
            break
        heap[at] = heap[child]
        place[heap[at]] = at
        at = child
    heap[at] = position
    place[position] = at


@inline
def push(
    heap: I32Array, place: I32Array, rank: F64Array, stamp: I64Array, state: I64Array, position: int
) -> None:
    """Insert a position whose rank and stamp are set."""
    heap[state[SIZE]] = position
    state[SIZE] += 1
    sift_up(heap, place, rank, stamp, state[SIZE] - 1)


@inline
def take_out(
    heap: I32Array, place: I32Array, rank: F64Array, stamp: I64Array, state: I64Array, position: int
) -> None:
    """Remove a position, wherever it is. The heap's last entry is then free."""
    at = place[position]
    place[position] = OUTSIDE
    state[SIZE] -= 1
    last = heap[state[SIZE]]
    if last != position:
        heap[at] = last
        sift_down(heap, place, rank, stamp, state[SIZE], at)
        sift_up(heap, place, rank, stamp, place[last])
