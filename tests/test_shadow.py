"""The shadow LRU: what it counts, by hand, and beside its naive twin."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers_of_hazard import compare, take_in
from kvoffload.policies.hazard import shadow
from kvoffload.policies.hazard.shadow import ShadowLRU
from kvoffload.structures.keys import Keys
from kvoffload.testing.naive.shadow import NaiveShadow, hash_of

KEYS = [bytes([n]) for n in range(24)]
requests = st.lists(
    st.tuples(st.sampled_from(["use", "drop"]), st.lists(st.sampled_from(KEYS), unique=True, max_size=10)),
    max_size=40,
)


def pack(keys: list[bytes]) -> Keys:
    return Keys.pack(keys, 1)


def use(cache: ShadowLRU, keys: str, held: int = 0) -> list[int]:
    """A request for these letters, of which the owner holds the first `held`; the counts after it."""
    path = [letter.encode() for letter in keys]
    compare(cache, pack(path), np.arange(len(path)) < held)
    return cache.counts.tolist()


def test_it_is_lru_of_the_whole_when_the_cache_is_small() -> None:
    cache = ShadowLRU(3, 1)
    assert use(cache, "abc") == [3, 0, 0]
    assert use(cache, "abc", held=1) == [6, 1, 3]
    # A path is lost from its tail: c leaves for d.
    assert use(cache, "d") == [7, 1, 3]
    assert use(cache, "abc", held=3) == [10, 4, 5]
    assert cache.keys.members(0) == [b"a", b"b", b"c"]


def test_of_a_request_longer_than_the_cache_the_head_is_kept() -> None:
    cache = ShadowLRU(2, 1)
    use(cache, "abcd")
    assert cache.keys.members(0) == [b"a", b"b"]


def test_only_hits_along_the_prefix_count() -> None:
    cache = ShadowLRU(4, 1)
    use(cache, "b")
    assert use(cache, "ab") == [3, 0, 0]


def test_a_large_cache_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shadow, "SMALL_CAPACITY", 8)
    sampled = [key for key in map(bytes, ([n] for n in range(256))) if (hash_of(key) >> 8) % 4 == 0]
    cache = ShadowLRU(8, 1)
    path = pack([bytes([n]) for n in range(256)])
    compare(cache, path, np.ones(256, np.bool_))
    assert cache.counts.tolist() == [len(sampled), len(sampled), 0]
    compare(cache, pack(sampled[:3]), np.zeros(3, np.bool_))
    assert cache.keys.members(0) == sampled[:2], "a quarter of eight, and the head of what came"


@pytest.mark.parametrize("is_victim_tier", [False, True])
@pytest.mark.parametrize("small_capacity", [1, 100])
@given(requests, st.integers(1, 20))
def test_counts_as_its_naive_twin(
    is_victim_tier: bool,
    small_capacity: int,
    script: list[tuple[str, list[bytes]]],
    capacity_blocks: int,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shadow, "SMALL_CAPACITY", small_capacity)
        cache, twin = ShadowLRU(capacity_blocks, 1), NaiveShadow(capacity_blocks)
    for step, keys in script:
        if step == "drop" and is_victim_tier:
            take_in(cache, pack(keys))
            twin.store(keys)
        else:
            held = [hash_of(key) % 3 > 0 for key in keys]
            compare(cache, pack(keys), np.array(held, np.bool_), is_victim_tier)
            twin.observe(keys, held, is_victim_tier)
        assert cache.keys.members(0) == twin.keys[::-1]
        assert cache.counts.tolist() == [twin.sampled, twin.own_hits, twin.shadow_hits]
