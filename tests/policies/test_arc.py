"""ARC: the cases of figure 4 worked by hand, and its bounds."""

from __future__ import annotations

from typing import Any

import pytest

from kvoffload.core.manager import OffloadingManager
from kvoffload.core.policy import EvictionPolicy
from kvoffload.policies.arc import ARC
from kvoffload.testing.audit import audit
from support.letters import begin_store, keys, letters_at, load, make, store, text, use
from support.naive.arc import NaiveARC


def arc(capacity_blocks: int, policy: type[EvictionPolicy] = ARC) -> OffloadingManager:
    return make(policy, capacity_blocks)


def state(manager: OffloadingManager) -> tuple[str, str, str, str, float]:
    """Return T1, T2, B1, B2, each most recent first as in the paper, and p."""
    audit(manager)
    policy: Any = manager.policy
    t1, t2, b1, b2 = policy.lists()
    p = policy.stats()["target_t1_blocks"]
    return letters_at(manager, t1), letters_at(manager, t2), text(b1), text(b2), p


@pytest.fixture(params=[ARC, NaiveARC])
def policy(request: pytest.FixtureRequest) -> type[EvictionPolicy]:
    policy_class: type[EvictionPolicy] = request.param
    return policy_class


def test_case_1_a_hit_moves_to_the_front_of_t2(policy: type[EvictionPolicy]) -> None:
    manager = arc(3, policy)
    use(manager, "abc")
    assert state(manager) == ("cba", "", "", "", 0)
    use(manager, "ab")
    assert state(manager) == ("c", "ba", "", "", 0)
    use(manager, "a")
    assert state(manager) == ("c", "ab", "", "", 0)


def test_case_2_a_ghost_of_b1_raises_the_target_and_enters_t2(policy: type[EvictionPolicy]) -> None:
    manager = arc(2, policy)
    use(manager, "aabc")
    assert state(manager) == ("c", "a", "b", "", 0)
    use(manager, "b")  # p = 0 + max(1, 0/1); |T1| = 1 is not above p, so the victim is in T2
    assert state(manager) == ("c", "b", "", "a", 1)


def test_case_2_learns_faster_the_smaller_b1_is(policy: type[EvictionPolicy]) -> None:
    manager = arc(3, policy)
    use(manager, "aabbcdceg")
    assert state(manager) == ("ge", "c", "d", "ba", 1)
    use(manager, "d")  # p = 1 + max(1, 2/1)
    assert state(manager) == ("ge", "d", "", "cba", 3)


def test_case_2_the_target_does_not_exceed_c(policy: type[EvictionPolicy]) -> None:
    manager = arc(2, policy)
    use(manager, "aabcb")
    assert state(manager) == ("c", "b", "", "a", 1)
    use(manager, "dabcdabcdabcd")
    assert 0 <= state(manager)[4] <= 2


def test_case_3_a_ghost_of_b2_lowers_the_target_and_enters_t2(policy: type[EvictionPolicy]) -> None:
    manager = arc(2, policy)
    use(manager, "aabcb")
    use(manager, "a")  # p = max(1 - max(1, 0/1), 0); |T1| = 1 > 0, so the victim is in T1
    assert state(manager) == ("", "ab", "c", "", 0)


def test_case_3_t1_gives_also_when_it_is_as_large_as_the_target(policy: type[EvictionPolicy]) -> None:
    manager = arc(3, policy)
    use(manager, "aabbcdcegd")
    assert state(manager) == ("ge", "d", "", "cba", 3)
    use(manager, "a")  # p = 3 - max(1, 0/3) = 2 = |T1|, and a is in B2
    assert state(manager) == ("g", "ad", "e", "cb", 2)


def test_case_4a_t1_alone_fills_the_cache_its_victim_is_forgotten(policy: type[EvictionPolicy]) -> None:
    manager = arc(2, policy)
    use(manager, "abc")
    assert state(manager) == ("cb", "", "", "", 0)


def test_case_4a_otherwise_the_coldest_of_b1_is_forgotten(policy: type[EvictionPolicy]) -> None:
    manager = arc(2, policy)
    use(manager, "aabc")
    use(manager, "d")
    assert state(manager) == ("d", "a", "c", "", 0)


def test_case_4b_a_full_directory_forgets_the_coldest_of_b2(policy: type[EvictionPolicy]) -> None:
    manager = arc(2, policy)
    use(manager, "aabcb" + "c" + "d")
    assert state(manager) == ("d", "c", "", "ba", 1)
    use(manager, "e")  # 2c keys are known, and |L1| < c; |T1| = 1 is not above p
    assert state(manager) == ("ed", "", "", "cb", 1)
    use(manager, "f")  # |T1| = c: d leaves without a ghost
    assert state(manager) == ("fe", "", "", "cb", 1)
    use(manager, "c")
    assert state(manager) == ("f", "c", "e", "b", 0)


# ---- cases that the paper does not specify


def test_a_batch_equals_its_blocks_stored_in_turn(policy: type[EvictionPolicy]) -> None:
    together, one_by_one = arc(3, policy), arc(3, policy)
    for manager in (together, one_by_one):
        use(manager, "aabbcd")
        assert state(manager) == ("d", "ba", "c", "", 0)
    store(together, "ce")
    store(one_by_one, "c")
    store(one_by_one, "e")
    assert state(together) == state(one_by_one) == ("ed", "c", "", "ba", 1)


def test_blocks_of_one_batch_do_not_evict_each_other(policy: type[EvictionPolicy]) -> None:
    manager = arc(2, policy)
    use(manager, "aa")
    plan = manager.prepare_store([b"b", b"c", b"d"])
    assert plan is not None
    assert (list(plan.keys), list(plan.evicted), plan.num_dropped) == ([b"b", b"c"], keys("a"), 1)


def test_a_store_and_the_finish_of_its_request_are_no_second_access(policy: type[EvictionPolicy]) -> None:
    manager = arc(4, policy)
    ctx = manager.begin_request("r")
    store(manager, "abc", ctx)
    manager.touch(keys("abc"), ctx)
    manager.finish_request(ctx)
    assert state(manager) == ("abc", "", "", "", 0)


@pytest.mark.parametrize("pinned", ["d", "ab"])
def test_a_pinned_list_leaves_the_victim_to_the_other(policy: type[EvictionPolicy], pinned: str) -> None:
    manager = arc(3, policy)
    use(manager, "aabbcd")
    assert state(manager) == ("d", "ba", "c", "", 0)
    load(manager, pinned)
    if pinned == "d":
        store(manager, "e")  # T1 is pinned, so the victim is in T2, and becomes a ghost of T2
        assert state(manager) == ("ed", "b", "c", "a", 0)
    else:
        store(manager, "c")  # with p = 1 the victim should be in T2, but T2 is pinned: it is in T1
        assert state(manager) == ("", "cba", "d", "", 1)


def test_a_refusal_does_not_change_the_target(policy: type[EvictionPolicy]) -> None:
    manager = arc(2, policy)
    use(manager, "aabc")
    before = state(manager)
    reading = load(manager, "a")
    ctx = manager.begin_request("r", keys("c"))
    assert manager.prepare_store(keys("b"), ctx) is None
    assert state(manager) == before
    manager.complete_load(reading)
    store(manager, "b", ctx)
    assert state(manager) == ("c", "b", "", "a", 1)


def test_a_ghost_of_a_dropped_block_does_not_adapt_the_target(policy: type[EvictionPolicy]) -> None:
    manager = arc(2, policy)
    use(manager, "aabc")
    load(manager, "a")
    store(manager, "eb")  # room for e alone
    assert state(manager) == ("e", "a", "c", "", 0)


def test_free_slots_are_filled_without_a_victim_but_the_ghost_teaches(policy: type[EvictionPolicy]) -> None:
    manager = arc(2, policy)
    use(manager, "aabc")
    manager.discard(keys("a"))
    assert state(manager) == ("c", "", "b", "", 0)
    use(manager, "b")
    assert state(manager) == ("c", "b", "", "", 1)


def test_failed_and_damaged_blocks_leave_no_ghost(policy: type[EvictionPolicy]) -> None:
    manager = arc(2, policy)
    use(manager, "aabc")
    manager.complete_store(begin_store(manager, "b"), success=False)
    assert state(manager) == ("c", "", "", "a", 1)
    manager.complete_load(load(manager, "c"), damaged=[0])
    assert state(manager) == ("", "", "", "a", 1)


def test_no_more_than_c_ghosts_while_a_damaged_block_is_pinned(policy: type[EvictionPolicy]) -> None:
    manager = arc(3, policy)
    use(manager, "aabb")
    load(manager, "a")
    manager.discard(keys("a"))
    use(manager, "efddcc")
    assert state(manager) == ("", "cd", "fe", "b", 0)
    use(manager, "g")  # 5 of 2c keys are known, so no case forgets a key; b is still forgotten for d
    assert state(manager) == ("g", "c", "fe", "d", 0)


def test_reset_forgets_ghosts_and_the_target(policy: type[EvictionPolicy]) -> None:
    manager = arc(2, policy)
    use(manager, "aabcb")
    manager.reset()
    assert state(manager) == ("", "", "", "", 0)
    use(manager, "aabcb")
    assert state(manager) == ("c", "b", "", "a", 1)
