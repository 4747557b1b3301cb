"""W-TinyLFU: duels worked by hand, and our conventions."""

from __future__ import annotations

from typing import Any

import pytest

from kvoffload.core.manager import OffloadingManager
from kvoffload.core.policy import EvictionPolicy
from kvoffload.policies.wtinylfu import WTinyLFU
from kvoffload.testing.audit import audit
from support.letters import begin_store, keys, letters_at, load, make, store, use
from support.naive.wtinylfu import NaiveWTinyLFU
from support.policy_state import lists_of


def state(manager: OffloadingManager) -> tuple[str, str, str]:
    """Return window, probation, protected, each most recent first."""
    audit(manager)
    policy: Any = manager.policy
    window, probation, protected = lists_of(policy)
    return letters_at(manager, window), letters_at(manager, probation), letters_at(manager, protected)


@pytest.fixture(params=[WTinyLFU, NaiveWTinyLFU])
def policy(request: pytest.FixtureRequest) -> type[EvictionPolicy]:
    policy_class: type[EvictionPolicy] = request.param
    return policy_class


def test_worked_by_hand(policy: type[EvictionPolicy]) -> None:
    manager = make(policy, 3)  # a window of one block, two in the main cache, one of them protected
    use(manager, "abc")  # blocks that do not fit into the window enter the main cache, which has room
    assert state(manager) == ("c", "ba", "")
    use(manager, "d")  # c, seen once, against a, seen once: the newcomer leaves
    assert state(manager) == ("d", "ba", "")
    use(manager, "a")  # used again on probation
    assert state(manager) == ("d", "b", "a")
    use(manager, "b")  # there is room for one protected block: a goes back on probation
    assert state(manager) == ("d", "a", "b")
    use(manager, "dd")
    assert state(manager) == ("d", "a", "b")
    use(manager, "e")  # d, seen three times, against a, seen twice
    assert state(manager) == ("e", "d", "b")
    use(manager, "f")
    assert state(manager) == ("f", "d", "b")
    use(manager, "db")
    assert state(manager) == ("f", "d", "b")


def test_a_key_is_remembered_after_its_block_is_evicted(policy: type[EvictionPolicy]) -> None:
    manager = make(policy, 3)
    use(manager, "abc" + "x" + "c")  # c was evicted for x, and is stored again
    assert state(manager) == ("c", "ba", "")
    use(manager, "d")  # seen twice by now, it wins against a
    assert state(manager) == ("d", "cb", "")


# ---- cases that the paper does not specify


def test_a_request_longer_than_the_window(policy: type[EvictionPolicy]) -> None:
    manager = make(policy, 5)
    use(manager, "abcde")
    assert state(manager) == ("e", "dcba", "")
    store(manager, "xyz")  # e loses against a; then a and b of the main cache are evicted
    assert state(manager) == ("xyz", "dc", "")
    use(manager, "p")  # the window is too large: its candidates duel
    assert state(manager) == ("pxy", "dc", "")
    use(manager, "yyq")
    assert state(manager) == ("qyp", "dc", "")
    use(manager, "cr")
    assert state(manager) == ("rqy", "d", "c")
    use(manager, "s")  # y wins without a victim, because the main cache has room; q loses
    assert state(manager) == ("sr", "yd", "c")


def test_one_winner_for_each_block_enters_without_a_victim(policy: type[EvictionPolicy]) -> None:
    manager = make(policy, 6)
    use(manager, "abcdef")
    store(manager, "vwxyz")
    assert state(manager) == ("vwxyz", "e", "")
    use(manager, "vwxyz")
    use(manager, "q")  # v wins and e stays; w wins too, and e leaves
    assert state(manager) == ("qzyx", "wv", "")


def test_a_winner_of_a_duel_is_on_probation(policy: type[EvictionPolicy]) -> None:
    manager = make(policy, 6)
    use(manager, "abcdefabcdff")
    load(manager, "e")
    manager.discard(keys("e"))  # its slot is not free until it was read
    assert state(manager) == ("f", "", "dcba")
    store(manager, "g")  # f wins against a, and the main cache has room, but there is no other victim
    assert state(manager) == ("g", "", "dcba")


def test_free_slots_fill_the_main_cache_from_the_cold_end(policy: type[EvictionPolicy]) -> None:
    manager = make(policy, 5)
    store(manager, "abcd")
    assert state(manager) == ("a", "bcd", "")


def test_a_window_within_its_share_leaves_the_victim_to_the_main_cache(policy: type[EvictionPolicy]) -> None:
    manager = make(policy, 3)
    use(manager, "abc")
    manager.discard(keys("c"))
    in_flight = begin_store(manager, "d")
    manager.discard(keys("b"))
    manager.complete_store(in_flight, success=False)
    use(manager, "ef")
    assert state(manager) == ("f", "ea", "")
    load(manager, "f")
    manager.discard(keys("f"))  # its slot is not free until it was read
    assert state(manager) == ("", "ea", "")
    store(manager, "g")
    assert state(manager) == ("g", "e", "")


@pytest.mark.parametrize("pinned", ["c", "ab"])
def test_a_pinned_segment_leaves_the_victim_to_the_other(policy: type[EvictionPolicy], pinned: str) -> None:
    manager = make(policy, 3)
    use(manager, "abccc")
    load(manager, pinned)
    store(manager, "d")
    assert state(manager) == (("dc", "b", "") if pinned == "c" else ("d", "ba", ""))


def test_protected_blocks_leave_last(policy: type[EvictionPolicy]) -> None:
    manager = make(policy, 3)
    use(manager, "abcb")
    assert state(manager) == ("c", "a", "b")
    load(manager, "ac")
    store(manager, "d")
    assert state(manager) == ("dc", "a", "")


def test_a_store_and_the_finish_of_its_request_are_one_use(policy: type[EvictionPolicy]) -> None:
    manager = make(policy, 3)
    ctx = manager.begin_request("r")
    store(manager, "abc", ctx)
    manager.touch(keys("abc"), ctx)
    manager.finish_request(ctx)
    assert state(manager) == ("a", "bc", "")
    use(manager, "d")  # seen once, like c: so a leaves
    assert state(manager) == ("d", "bc", "")


def test_a_refusal_does_not_change_the_sketch(policy: type[EvictionPolicy]) -> None:
    manager = make(policy, 3)
    use(manager, "abc")
    reading = load(manager, "abc")
    for _ in range(3):
        assert manager.prepare_store(keys("d")) is None
    manager.complete_load(reading)
    store(manager, "d")
    assert state(manager) == ("d", "ba", "")
    store(manager, "e")  # d was seen once
    assert state(manager) == ("e", "ba", "")


def test_reset_forgets_frequencies(policy: type[EvictionPolicy]) -> None:
    manager = make(policy, 3)
    use(manager, "abcccc")
    manager.reset()
    use(manager, "abcd")
    assert state(manager) == ("d", "ba", "")
