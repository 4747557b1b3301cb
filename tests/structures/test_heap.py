"""The indexed heap of chains, compared with sorted lists."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kvoffload.structures.heap import NONE, PLACE, RANK, Heap
from kvoffload.testing.scripts import long_lists
from support.kernels import push, put_back, set_aside, take_out

NUM_POSITIONS = 20


steps = long_lists(
    st.tuples(
        st.sampled_from(["put", "put", "put", "take", "raise", "aside", "back"]),
        st.integers(0, NUM_POSITIONS - 1),
        st.integers(0, 5),
    ),
    max_size=80,
)


def check_structure(heap: Heap) -> None:
    """Check that chains ascend, and that their first positions form a heap with correct places."""
    order = [tuple(pair) for pair in heap.order.tolist()]
    chains = heap.chains()
    firsts = [chain[0] for chain in chains]
    assert all(order[a] < order[b] for chain in chains for a, b in pairwise(chain))
    assert all(order[firsts[(at - 1) // 2]] < order[firsts[at]] for at in range(1, len(firsts)))
    assert [int(heap.links[first, PLACE]) for first in firsts] == list(range(len(firsts)))
    assert heap.size == sum(map(len, chains))


@given(steps)
def test_equals_a_sorted_list(script: list[tuple[str, int, int]]) -> None:
    heap = Heap(NUM_POSITIONS)
    twin: dict[int, tuple[float, int]] = {}
    aside: dict[int, tuple[float, int]] = {}
    time = 0
    for action, position, number in script:
        if action == "put" and position not in twin and position not in aside:
            time += 1
            twin[position] = (float(number), time)
            push(heap.memory, position, float(number))
        elif action == "take" and position in twin:
            del twin[position]
            take_out(heap.memory, position)
        elif action == "raise" and position in twin:
            time += 1
            twin[position] = (twin[position][0] + number, time)
            take_out(heap.memory, position)
            push(heap.memory, position, twin[position][0])
        elif action == "aside" and position in twin:
            aside[position] = twin.pop(position)
            take_out(heap.memory, position)
            set_aside(heap.memory, position)
        elif action == "back":
            twin |= aside
            aside.clear()
            put_back(heap.memory)
        assert heap.members() == sorted(twin, key=lambda position: twin[position])
        assert heap.clock == time
        check_structure(heap)
    heap.clear()
    assert heap.members() == []
    assert (heap.size, heap.clock) == (0, 0)


def test_pushes_in_order_are_one_chain() -> None:
    heap = Heap(9)
    for position, rank in enumerate([1, 2, 2, 3, 9, 8, 7, 0, 5]):
        push(heap.memory, position, rank)
    # 9 follows 3, and 8 goes to the middle of a chain; 0 goes before 7, and 5 to the middle.
    assert sorted(heap.chains()) == [[0, 1, 2, 3, 4], [7, 6, 5], [8]]
    take_out(heap.memory, 7)
    take_out(heap.memory, 2)
    assert sorted(heap.chains()) == [[0, 1, 3, 4], [6, 5], [8]]
    check_structure(heap)


def test_an_entry_that_fills_a_gap_may_move_up() -> None:
    heap = Heap(7)
    for position, rank in enumerate([1, 10, 2, 11, 12, 3, 4]):
        push(heap.memory, position, rank)
        heap.last = NONE  # each entry becomes a separate chain
    take_out(heap.memory, 3)  # the last entry, 4, takes its place below 10
    assert heap.order[heap.firsts[: heap.num_chains], RANK].tolist() == [1, 4, 2, 10, 12, 3]
    assert [int(heap.order[position, RANK]) for position in heap.members()] == [1, 2, 3, 4, 10, 12]
