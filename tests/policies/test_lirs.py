"""LIRS: the paper's figure 2, and our conventions."""

from __future__ import annotations

from typing import Any

import pytest

from kvoffload.core.manager import OffloadingManager
from kvoffload.core.policy import EvictionPolicy
from kvoffload.policies.lirs import LIRS
from kvoffload.testing.audit import audit
from support.letters import begin_store, keys, letters_at, load, make, store, text, use
from support.naive.lirs import NaiveLIRS
from support.policy_state import lists_of


def state(manager: OffloadingManager) -> tuple[str, str, str, str]:
    """Return stack S, the LIR blocks, Q, and the ghosts, most recent first."""
    audit(manager)
    policy: Any = manager.policy
    stack, lir, queue, ghosts = lists_of(policy)
    return text(stack), letters_at(manager, lir), letters_at(manager, queue), text(ghosts)


@pytest.fixture(params=[LIRS, NaiveLIRS])
def policy(request: pytest.FixtureRequest) -> type[EvictionPolicy]:
    policy_class: type[EvictionPolicy] = request.param
    return policy_class


@pytest.fixture
def manager(policy: type[EvictionPolicy]) -> OffloadingManager:
    """The paper's example at time 9: two LIR blocks, one HIR block, and the ghost D in S."""
    manager = make(policy, 3)
    use(manager, "badae")
    assert state(manager) == ("eadb", "ab", "e", "d")
    return manager


def test_figure_2b_a_lir_block_is_used(manager: OffloadingManager) -> None:
    use(manager, "b")  # it was the bottom: D is pruned
    assert state(manager) == ("bea", "ba", "e", "d")


def test_figure_2c_a_resident_hir_block_in_s_is_used(manager: OffloadingManager) -> None:
    use(manager, "e")  # it becomes LIR, and B HIR
    assert state(manager) == ("ea", "ea", "b", "d")


def test_figure_2d_a_hir_block_that_has_left_and_is_in_s_is_used(manager: OffloadingManager) -> None:
    use(manager, "d")  # E leaves and stays in S; D becomes LIR, and B HIR
    assert state(manager) == ("dea", "da", "b", "e")


def test_figure_2e_a_block_that_is_not_in_s_is_used(manager: OffloadingManager) -> None:
    use(manager, "c")  # E leaves, C is HIR
    assert state(manager) == ("ceadb", "ab", "c", "ed")


def test_a_hir_block_that_is_not_in_s_stays_hir(manager: OffloadingManager) -> None:
    use(manager, "e")
    assert state(manager) == ("ea", "ea", "b", "d")
    use(manager, "b")  # goes to the end of Q, and to the top of S
    assert state(manager) == ("bea", "ea", "b", "d")
    use(manager, "b")
    assert state(manager) == ("be", "be", "a", "d")


def test_a_pruned_block_counts_as_unknown(manager: OffloadingManager) -> None:
    use(manager, "b")
    use(manager, "d")  # remembered, but no more in S
    assert state(manager) == ("dbea", "ba", "d", "e")


# ---- where the paper is silent


def test_free_slots_make_lir_blocks_until_the_set_is_full(policy: type[EvictionPolicy]) -> None:
    manager = make(policy, 3)
    store(manager, "abc")
    assert state(manager) == ("ab", "ab", "c", "")


def test_a_long_request_takes_lir_slots_as_hir(policy: type[EvictionPolicy]) -> None:
    manager = make(policy, 5)
    use(manager, "abcde")
    assert state(manager) == ("edcba", "dcba", "e", "")
    store(manager, "xyz")  # e leaves Q; then a and b have to go, and are not remembered
    assert state(manager) == ("xyzedc", "dc", "xyz", "e")
    use(manager, "y")  # the LIR set has room again for what is used twice
    assert state(manager) == ("yxzedc", "ydc", "xz", "e")
    use(manager, "a")
    assert state(manager) == ("ayxzedc", "ydc", "ax", "ze")


def test_a_block_that_a_batch_made_hir_is_its_next_victim(policy: type[EvictionPolicy]) -> None:
    manager = make(policy, 5)
    use(manager, "abcdef")
    assert state(manager) == ("fedcba", "dcba", "f", "e")
    store(manager, "ex")  # f leaves for e, which makes a HIR, which leaves for x
    assert state(manager) == ("exfdcb", "edcb", "x", "f")


def test_a_batch_that_empties_q_evicts_the_coldest_lir_block(policy: type[EvictionPolicy]) -> None:
    manager = make(policy, 5)
    use(manager, "abcdef")
    store(manager, "exy")
    assert state(manager) == ("exyfdc", "edc", "xy", "f")


def test_the_lir_set_recovers_after_losing_all_blocks(policy: type[EvictionPolicy]) -> None:
    manager = make(policy, 3)
    use(manager, "abc")
    manager.discard(keys("ab"))
    assert state(manager) == ("", "", "c", "")
    use(manager, "c")
    assert state(manager) == ("c", "c", "", "")


def test_a_store_and_the_finish_of_its_request_are_no_second_access(policy: type[EvictionPolicy]) -> None:
    manager = make(policy, 3)
    use(manager, "ab")
    ctx = manager.begin_request("r")
    store(manager, "c", ctx)
    use(manager, "a")
    assert state(manager) == ("acb", "ab", "c", "")
    manager.touch(keys("c"), ctx)
    manager.finish_request(ctx)
    assert state(manager) == ("cab", "ab", "c", "")


def test_if_q_is_pinned_the_coldest_lir_block_leaves(manager: OffloadingManager) -> None:
    load(manager, "e")
    store(manager, "c")
    assert state(manager) == ("cea", "a", "ce", "d")


def test_failed_and_damaged_blocks_are_not_remembered(manager: OffloadingManager) -> None:
    manager.complete_store(begin_store(manager, "c"), success=False)
    assert state(manager) == ("eadb", "ab", "", "ed")
    manager.complete_load(load(manager, "b"), damaged=[0])
    assert state(manager) == ("ea", "a", "", "ed")


def test_a_refusal_changes_nothing(manager: OffloadingManager) -> None:
    before = state(manager)
    reading = load(manager, "bae")
    assert manager.prepare_store(keys("d")) is None
    assert state(manager) == before
    manager.complete_load(reading)
    store(manager, "d")
    assert state(manager) == ("dea", "da", "b", "e")


def test_no_more_than_c_keys_are_kept(policy: type[EvictionPolicy]) -> None:
    manager = make(policy, 3)
    use(manager, "abcdefgh")
    assert state(manager) == ("hgfeba", "ba", "h", "gfe")


def test_one_block_is_an_lru(policy: type[EvictionPolicy]) -> None:
    manager = make(policy, 1)
    use(manager, "aab")
    assert state(manager) == ("", "", "b", "")


def test_reset_forgets_everything(manager: OffloadingManager) -> None:
    manager.reset()
    assert state(manager) == ("", "", "", "")
    use(manager, "badae")
    assert state(manager) == ("eadb", "ab", "e", "d")
