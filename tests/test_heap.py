"""The indexed heap against sorted lists."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvoffload.structures.heap import CLOCK, OUTSIDE, SIZE, Heap, push, sift_down, take_out
from kvoffload.testing.scripts import long_lists

# The helpers of kernels are called from Python here: compiled for each test run, so never stale.

NUM_POSITIONS = 20

steps = long_lists(
    st.tuples(
        st.sampled_from(["put", "put", "take", "raise"]), st.integers(0, NUM_POSITIONS - 1), st.integers(0, 5)
    ),
    max_size=80,
)


@given(steps)
def test_equals_a_sorted_list(script: list[tuple[str, int, int]]) -> None:
    heap = Heap(NUM_POSITIONS)
    arrays = (heap.heap, heap.place, heap.rank, heap.stamp)
    twin: dict[int, tuple[float, int]] = {}
    for time, (action, position, number) in enumerate(script, 1):
        if action == "put" and position not in twin:
            twin[position] = (float(number), time)
            heap.rank[position], heap.stamp[position] = twin[position]
            push(*arrays, heap.state, position)
        elif action == "take" and position in twin:
            del twin[position]
            take_out(*arrays, heap.state, position)
        elif action == "raise" and position in twin:
            twin[position] = (twin[position][0] + number, time)
            heap.rank[position], heap.stamp[position] = twin[position]
            sift_down(*arrays, heap.state[SIZE], heap.place[position])
        in_order = sorted(twin, key=lambda position: twin[position])
        assert heap.members() == in_order
        assert heap.state[SIZE] == len(twin)
        inside = heap.heap[: heap.state[SIZE]].tolist()
        assert all(twin[inside[(at - 1) // 2]] < twin[inside[at]] for at in range(1, len(inside)))
        for position in range(NUM_POSITIONS):
            place = heap.place[position]
            assert heap.heap[place] == position if position in twin else place == OUTSIDE
    heap.clear()
    assert heap.members() == []
    assert heap.state[CLOCK] == 0


def test_what_fills_a_gap_may_have_to_rise() -> None:
    heap = Heap(7)
    arrays = (heap.heap, heap.place, heap.rank, heap.stamp, heap.state)
    for position, rank in enumerate([1, 10, 2, 11, 12, 3, 4]):
        heap.rank[position] = rank
        push(*arrays, position)
    take_out(*arrays, 3)  # the last one, 4, takes its place below 10
    assert heap.rank[heap.heap[: heap.state[SIZE]]].tolist() == [1, 4, 2, 10, 12, 3]
    assert [int(heap.rank[position]) for position in heap.members()] == [1, 2, 3, 4, 10, 12]
