"""GDSF: its formula worked by hand, and our conventions."""

from __future__ import annotations

from typing import Any

import pytest

from kvoffload.core.manager import OffloadingManager
from kvoffload.policies.gdsf import GDSF
from kvoffload.testing.audit import audit
from support.letters import begin_store, keys, letters_at, load, make, store, use
from support.naive.gdsf import NaiveGDSF
from support.policy_state import lists_of


def state(manager: OffloadingManager) -> tuple[str, list[float], float]:
    """Return the blocks and their H in ascending order, and L."""
    audit(manager)
    policy: Any = manager.policy
    ranks = lists_of(policy)
    letters = letters_at(manager, [slot for slot, _, _ in ranks])
    return letters, [round(h, 6) for _, _, h in ranks], policy.stats()["inflation"]


@pytest.fixture(params=[GDSF, NaiveGDSF])
def manager(request: pytest.FixtureRequest) -> OffloadingManager:
    return make(request.param, 3)


def test_worked_by_hand(manager: OffloadingManager) -> None:
    use(manager, "abc")
    assert state(manager) == ("abc", [1, 1, 1], 0)
    use(manager, "a")
    assert state(manager) == ("bca", [1, 1, 2], 0)
    use(manager, "d")  # evicts b; L becomes the H of b
    assert state(manager) == ("cad", [1, 2, 2], 1)
    use(manager, "e")
    assert state(manager) == ("ade", [2, 2, 2], 1)
    use(manager, "f")  # a was used twice, but long ago
    assert state(manager) == ("def", [2, 2, 3], 2)
    use(manager, "ee")
    assert state(manager) == ("dfe", [2, 3, 5], 2)


def test_a_deep_block_costs_more(manager: OffloadingManager) -> None:
    store(manager, "abc")
    assert state(manager) == ("abc", [1, 1.0005, 1.001], 0)
    ctx = manager.begin_request("r", keys("bx"))
    store(manager, "x", ctx)  # the second block of its path
    assert state(manager) == ("bcx", [1.0005, 1.001, 2.0005], 1)
    use(manager, "c")
    assert state(manager) == ("bxc", [1.0005, 2.0005, 3.002], 1)


def test_among_equals_the_tail_of_a_path_leaves_first(manager: OffloadingManager) -> None:
    use(manager, "abc")
    ctx = manager.begin_request("r", keys("abc"))
    manager.finish_request(ctx)
    assert state(manager) == ("cba", [2, 2, 2], 0)


def test_a_store_and_the_finish_of_its_request_are_no_second_access(manager: OffloadingManager) -> None:
    use(manager, "ab")
    ctx = manager.begin_request("r")
    store(manager, "c", ctx)
    use(manager, "de")
    assert state(manager) == ("cde", [1, 2, 2], 1)
    manager.touch(keys("c"), ctx)
    manager.finish_request(ctx)
    assert state(manager) == ("dec", [2, 2, 2], 1)


def test_pinned_blocks_are_passed_over_and_l_never_goes_back(manager: OffloadingManager) -> None:
    use(manager, "abccc")
    reading = load(manager, "ab")
    use(manager, "d")
    assert state(manager) == ("abd", [1, 1, 4], 3)
    manager.complete_load(reading)
    use(manager, "e")
    assert state(manager) == ("bde", [1, 4, 4], 3)


def test_blocks_of_one_batch_do_not_evict_each_other(manager: OffloadingManager) -> None:
    use(manager, "aaa")
    assert list(begin_store(manager, "wxyz").evicted) == keys("a")
    assert state(manager) == ("wxy", [4, 4.0005, 4.001], 3)


def test_blocks_that_are_removed_leave_the_heap(manager: OffloadingManager) -> None:
    use(manager, "abc")
    manager.complete_store(begin_store(manager, "d"), success=False)
    manager.discard(keys("b"))
    assert state(manager) == ("c", [1], 1)


def test_a_refusal_changes_nothing(manager: OffloadingManager) -> None:
    use(manager, "abc")
    before = state(manager)
    load(manager, "abc")
    assert manager.prepare_store(keys("d")) is None
    assert state(manager) == before


def test_reset_forgets_the_inflation(manager: OffloadingManager) -> None:
    use(manager, "abcd")
    manager.reset()
    assert state(manager) == ("", [], 0)
    use(manager, "a")
    assert state(manager) == ("a", [1], 0)
