"""The index compared with a dict, with colliding keys in a full table that wraps around."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload.core.manager import OffloadingManager
from kvoffload.core.request import HASH, Path, RequestContext
from kvoffload.structures.index import ABSENT, Index
from kvoffload.structures.keys import Keys
from kvoffload.testing.scripts import long_lists
from support.kernels import remove
from support.naive.structures import NaiveIndex

MASK = 2**64 - 1
MULTIPLY, FINISH, SEED = 0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53, 0x9E3779B97F4A7C15
NUM_POSITIONS = 6
KEY_BYTES = [8, 11, 20, 32, 36]


def key_with_hash(h: int, key_bytes: int, salt: int = 0) -> bytes:
    """Return a key with the hash `h`, by inverting the hash for the first word.

    All other words are `salt`.
    """
    other_words = [salt] * ((key_bytes - 1) // 8)
    state = h ^ h >> 29 ^ h >> 58
    state = state * pow(FINISH, -1, 2**64) & MASK
    for word in reversed(other_words):
        state = _unmixed(state) ^ word
    words = [_unmixed(state) ^ SEED, *other_words]
    return b"".join(word.to_bytes(8, "little") for word in words)[:key_bytes]


def _unmixed(h: int) -> int:
    return (h ^ h >> 32) * pow(MULTIPLY, -1, 2**64) & MASK


def tag_of_home(bucket: int, buckets: int) -> int:
    """Return the smallest tag whose home is `bucket`."""
    return -(-bucket * 2**32 // buckets)


def colliding(key_bytes: int) -> list[bytes]:
    """Return keys of the last two buckets and the first, three for each tag; runs touch and wrap around."""
    buckets = 2 * NUM_POSITIONS + 1
    homes = [buckets - 2, buckets - 1, 0, 1]
    tags = [tag_of_home(home, buckets) + extra for home in homes for extra in (0, 1)]
    return [key_with_hash(tag << 32 | low, key_bytes, salt=low) for tag in tags for low in (1, 2, 3)]


@pytest.mark.parametrize("key_bytes", KEY_BYTES)
def test_keys_can_be_made_for_a_hash(key_bytes: int) -> None:
    wanted = [(7 << 32 | 9), MASK, 0, 0x0123456789ABCDEF]
    ctx = RequestContext("", key_bytes)
    ctx.extend(Keys.pack([key_with_hash(h, key_bytes) for h in wanted], key_bytes))
    assert Path.over(ctx.memory).records[:4, HASH].tolist() == wanted


@pytest.mark.parametrize("key_bytes", KEY_BYTES)
@given(long_lists(st.tuples(st.booleans(), st.integers(0, 23)), max_size=40))
def test_equals_a_dict(key_bytes: int, steps: list[tuple[bool, int]]) -> None:
    universe = colliding(key_bytes)
    index, twin = Index(NUM_POSITIONS, key_bytes), NaiveIndex()
    for insert, number in steps:
        key, unused = universe[number], set(range(NUM_POSITIONS)) - set(twin.positions.values())
        position = twin.find(key)
        if insert and position == ABSENT and unused:
            index.put(key, max(unused))
            twin.insert(key, max(unused))
        elif not insert and position != ABSENT:
            remove(index.memory, position)
            twin.remove(position)
        for other in universe:
            assert index.position_of(other) == twin.find(other)
            assert index.position_of(other) == twin.find(other)
    assert np.count_nonzero(index.table) == len(twin.positions)


@pytest.mark.parametrize("removed", range(NUM_POSITIONS))
def test_a_full_table_closes_the_gap_across_its_end(removed: int) -> None:
    keys = colliding(32)[: NUM_POSITIONS + 1]
    index = Index(NUM_POSITIONS, 32)
    for position in range(NUM_POSITIONS):
        index.put(keys[position], position)
    assert index.table[0] != 0, "the keys do not wrap around"
    remove(index.memory, removed)
    expected = [position if position != removed else ABSENT for position in range(NUM_POSITIONS)]
    assert [index.position_of(key) for key in keys[:-1]] == expected
    index.put(keys[-1], removed)
    assert index.position_of(keys[-1]) == removed


def test_an_entry_at_its_home_does_not_move_into_a_gap_before_it() -> None:
    # Two neighbours, each at its home: after removal of the first, the second must stay at its home.
    buckets = 2 * NUM_POSITIONS + 1
    first, second = (key_with_hash(tag_of_home(home, buckets) << 32, 8) for home in (4, 5))
    index = Index(NUM_POSITIONS, 8)
    index.put(first, 0)
    index.put(second, 1)
    remove(index.memory, 0)
    assert np.flatnonzero(index.table).tolist() == [5]
    assert index.position_of(second) == 1


def test_keys_that_differ_only_behind_their_first_word_and_tag_are_two() -> None:
    index, first = Index(4, 16), 7
    state = (SEED ^ first) * MULTIPLY & MASK
    state ^= state >> 32
    keys = []
    for low in (1, 2):  # solve for the second word
        mixed = int.from_bytes(key_with_hash(9 << 32 | low, 8), "little") ^ SEED
        keys.append(b"".join(word.to_bytes(8, "little") for word in (first, mixed ^ state)))
    index.put(keys[0], 0)
    assert index.position_of(keys[1]) == ABSENT
    assert index.position_of(keys[1]) == ABSENT
    index.put(keys[1], 1)
    tags = {int(entry) >> 32 for entry in index.table[index.table != 0]}
    assert tags == {9}, "the keys must have one tag"
    assert [index.position_of(key) for key in keys] == [0, 1]


def test_keys_that_differ_in_their_last_byte_are_two() -> None:
    index = Index(4, 20)
    keys = [bytes(19) + b"\0", bytes(19) + b"\1", b"\1" + bytes(19)]
    for position, key in enumerate(keys):
        assert index.position_of(key) == ABSENT
        index.put(key, position)
    assert [index.position_of(key) for key in keys] == [0, 1, 2]
    assert [index.key_at(position) for position in range(3)] == keys
    assert list(index.keys_at(np.array([2, 0]))) == [keys[2], keys[0]]


def test_clear_forgets_everything() -> None:
    index = Index(2, 8)
    index.put(b"12345678", 0)
    index.clear()
    assert index.position_of(b"12345678") == ABSENT


# ---- the path of a request: the same table, filled in the order of first sight


@given(st.lists(long_lists(st.integers(0, 60), max_size=70), max_size=4))
def test_a_path_is_the_keys_in_order_of_first_appearance(batches: list[list[int]]) -> None:
    ctx, order = RequestContext("", 8), dict[bytes, int]()
    for batch in batches:
        keys = [number.to_bytes(8, "big") for number in batch]
        positions = ctx.extend(Keys.pack(keys, 8)).tolist()
        for key in keys:
            order.setdefault(key, len(order))
        assert positions == [order[key] for key in keys]
        assert list(ctx.keys()) == list(order)
        assert ctx.length == len(order)


@given(long_lists(st.integers(0, 700), max_size=1500))
def test_single_lookups_create_the_same_path(numbers: list[int]) -> None:
    keys = [number.to_bytes(8, "big") for number in numbers]
    manager = OffloadingManager(1, key_bytes=8)
    ctx = manager.begin_request("r")
    for key in keys:
        manager.lookup_key(key, ctx)
    manager.finish_request(ctx)
    assert list(ctx.keys()) == list(dict.fromkeys(keys))


def test_records_of_a_key_survive_growth() -> None:
    ctx = RequestContext("", 8)
    first = [number.to_bytes(8, "big") for number in range(30)]
    ctx.extend(Keys.pack(first, 8))
    Path.over(ctx.memory).records[:30, 1] = np.arange(30)
    ctx.extend(Keys.pack([number.to_bytes(8, "big") for number in range(20, 100)], 8))
    assert Path.over(ctx.memory).records[:30, 1].tolist() == [*range(30)]
    assert ctx.extend(Keys.pack(first, 8)).tolist() == [*range(30)]


def test_keys_are_equal_by_length_and_by_bytes() -> None:
    batch = Keys.pack([b"ab", b"cd"], 2)
    assert batch == Keys.pack([b"ab", b"cd"], 2)
    assert batch != Keys.pack([b"ab", b"ce"], 2)
    assert batch != Keys.pack([b"ab\0", b"cd\0"], 3), "the same words, padded"
    assert batch != Keys.pack([b"ab"], 2)
    assert batch == [b"ab", b"cd"]
    assert batch != [b"ab"]
