"""Lists and lists of keys, compared with Python lists."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvoffload.structures.index import ABSENT
from kvoffload.structures.keylists import KeyLists
from kvoffload.structures.keys import Keys
from kvoffload.structures.lists import Lists
from kvoffload.testing.audit import audit_key_lists, audit_lists
from kvoffload.testing.scripts import long_lists
from support.kernels import forget, forget_coldest, move_to_head, push_head, remember, unlink
from support.naive.structures import NaiveLists

NUM_POSITIONS, NUM_LISTS = 6, 3

steps = long_lists(
    st.tuples(st.integers(0, 2), st.integers(0, NUM_LISTS - 1), st.integers(0, NUM_POSITIONS - 1)),
    max_size=50,
)


@given(steps)
def test_lists_equal_python_lists(script: list[tuple[int, int, int]]) -> None:
    lists, twin = Lists(NUM_POSITIONS, NUM_LISTS), NaiveLists(NUM_LISTS)
    for step, number, position in script:
        listed = any(position in members for members in twin.lists)
        if (step == 0) == listed:
            continue
        if step == 0:
            push_head(lists.links, lists.sentinel(number), position)
            twin.push_head(number, position)
        elif step == 1:
            unlink(lists.links, position)
            twin.unlink(position)
        else:
            move_to_head(lists.links, lists.sentinel(number), position)
            twin.move_to_head(number, position)
        assert [lists.members(i) for i in range(NUM_LISTS)] == twin.lists
        assert [lists.size(i) for i in range(NUM_LISTS)] == [len(members) for members in twin.lists]
        audit_lists("lists", lists)
    lists.clear()
    assert [lists.members(i) for i in range(NUM_LISTS)] == [[]] * NUM_LISTS


@given(steps)
def test_lists_of_keys_equal_python_lists(script: list[tuple[int, int, int]]) -> None:
    capacity = 4
    key_lists = KeyLists(capacity, 8, 2)
    twin: list[list[bytes]] = [[], []]
    for step, number, key_number in script:
        key, number = key_number.to_bytes(8, "big"), number % 2
        batch = Keys.pack([key], 8).words
        position = key_lists.index.position_of(key)
        assert (position != ABSENT) == (key in twin[0] + twin[1])
        sentinel = key_lists.lists.sentinel(number)
        if step == 0 and position == ABSENT and len(twin[0] + twin[1]) < capacity:
            remember(key_lists.memory, sentinel, batch)
            twin[number].insert(0, key)
        elif step == 1 and position != ABSENT:
            forget(key_lists.memory, position)
            twin = [[other for other in members if other != key] for members in twin]
        elif step == 2 and twin[number]:
            forget_coldest(key_lists.memory, sentinel)
            twin[number].pop()
        assert [key_lists.members(0), key_lists.members(1)] == twin
        audit_key_lists("key lists", key_lists)


def test_lists_of_keys_start_and_clear_with_every_position_spare() -> None:
    key_lists = KeyLists(5, 8, 2)
    spare = key_lists.lists.members(2)
    assert sorted(spare) == [0, 1, 2, 3, 4]
    batch, sentinel = Keys.pack([b"12345678"], 8).words, key_lists.lists.sentinel(1)
    remember(key_lists.memory, sentinel, batch)
    assert key_lists.members(1) == [b"12345678"]
    assert key_lists.lists.size(2) == 4
    key_lists.clear()
    assert key_lists.members(1) == []
    assert key_lists.lists.members(2) == spare
    assert key_lists.index.position_of(b"12345678") == ABSENT
    audit_key_lists("key lists", key_lists)
