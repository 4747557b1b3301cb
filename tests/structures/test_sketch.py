"""The frequency sketch: estimates are never too low before aging, aging halves them, and the twin agrees."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload.structures.sketch import MAX_COUNT, FrequencySketch
from kvoffload.testing.scripts import long_lists
from support import kernels as helpers_of_kernels
from support.kernels import add, estimate
from support.naive.sketch import NaiveSketch, hash_of

KEY_BYTES = 12


def key_of(number: int) -> bytes:
    return number.to_bytes(KEY_BYTES, "big")


def estimate_of(sketch: FrequencySketch, number: int) -> int:
    return int(estimate(sketch, key_of(number)))


def count_uses(sketch: FrequencySketch, number: int, times: int = 1) -> None:
    for _ in range(times):
        add(sketch, key_of(number))


@given(long_lists(st.integers(0, 200), max_size=400), st.sampled_from([40, 100]))
def test_never_too_low_before_counts_age(numbers: list[int], capacity: int) -> None:
    sketch, numbers = FrequencySketch(capacity), numbers[: 10 * capacity - 1]
    for number in numbers:
        count_uses(sketch, number)
    for number, count in Counter(numbers).items():
        assert estimate_of(sketch, number) >= min(count, MAX_COUNT)


def test_few_keys_in_a_large_sketch_are_counted_exactly() -> None:
    sketch = FrequencySketch(10_000)
    for number in range(20):
        count_uses(sketch, number, number)
    assert [estimate_of(sketch, number) for number in range(20)] == [*range(15), *[15] * 5]
    assert estimate_of(sketch, 21) == 0


@pytest.mark.parametrize(("before", "after"), [(1, 0), (2, 1), (5, 2), (14, 7), (20, 7)])
def test_counts_are_halved_when_they_age(before: int, after: int) -> None:
    sketch = FrequencySketch(8)  # one line
    count_uses(sketch, 1, before)
    sketch.additions = 79
    count_uses(sketch, 2)
    assert estimate_of(sketch, 1) == after
    assert sketch.additions == 40


def test_every_counter_of_a_large_table_is_halved_once_and_no_two_at_a_time() -> None:
    sketch = FrequencySketch(40)  # five lines
    sketch.table.fill(np.uint64(0xF7A95310_F7A95310))
    sketch.additions = 398
    halved = []
    for _ in range(8):
        count_uses(sketch, 1)
        halved.append(int((sketch.table == np.uint64(0x73542100_73542100)).sum()) // 8)
    # The counted key is in a line that is not halved yet.
    assert halved[-1] >= 4
    assert all(after - before in (0, 1) for before, after in pairwise(halved))


def test_a_line_is_a_cache_line() -> None:
    for capacity in (1, 7, 8, 9, 1_000):
        table = FrequencySketch(capacity).table
        assert table.ctypes.data % 64 == 0
        assert len(table) == -(-capacity // 8) * 8


def test_clear_forgets_everything() -> None:
    sketch = FrequencySketch(8)
    for number in range(79):
        count_uses(sketch, number)
    sketch.clear()
    assert not sketch.table.any()
    count_uses(sketch, 1)
    assert estimate_of(sketch, 1) == 1


@given(st.binary(min_size=1, max_size=40))
def test_the_twin_has_equal_hashes(key: bytes) -> None:
    assert hash_of(key) == helpers_of_kernels.hash_of(key)
    assert hash_of(key) == helpers_of_kernels.hash_of(key)


@given(long_lists(st.integers(0, 60), max_size=300), st.sampled_from([1, 3, 8, 20, 33]))
def test_counts_as_its_naive_twin(numbers: list[int], capacity: int) -> None:
    sketch, twin = FrequencySketch(capacity), NaiveSketch(capacity)
    for number in numbers:
        count_uses(sketch, number)
        twin.add(key_of(number))
        assert estimate_of(sketch, number) == twin.estimate(key_of(number))
    for number in range(70):
        assert estimate_of(sketch, number) == twin.estimate(key_of(number))
