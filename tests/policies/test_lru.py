"""LRU: the order by hand, and every decision against the naive twin."""

from __future__ import annotations

from typing import Any

import pytest

from kvoffload.core.manager import OffloadingManager
from kvoffload.policies.lru import LRU
from support.letters import keys, letters_at, make, store, text
from support.naive.lru import NaiveLRU


def order(manager: OffloadingManager) -> str:
    """Resident keys, which are single letters here, the coldest first."""
    policy: Any = manager.policy
    return letters_at(manager, policy.order())


def evicted_by(manager: OffloadingManager, letters: str) -> str:
    return text(store(manager, letters).evicted)


@pytest.fixture(params=[LRU, NaiveLRU])
def manager(request: pytest.FixtureRequest) -> OffloadingManager:
    return make(request.param)


def test_the_block_that_was_used_longest_ago_leaves(manager: OffloadingManager) -> None:
    assert [evicted_by(manager, letter) for letter in "abcd"] == [""] * 4
    assert order(manager) == "abcd"
    assert evicted_by(manager, "e") == "a"
    manager.touch(keys("b"))
    assert order(manager) == "cdeb"
    assert evicted_by(manager, "fg") == "cd"
    assert order(manager) == "ebgf"


def test_what_is_stored_together_is_lost_from_its_tail(manager: OffloadingManager) -> None:
    ctx = manager.begin_request("still decoding")
    store(manager, "abcd", ctx)
    assert order(manager) == "dcba"
    assert evicted_by(manager, "xy") == "dc"


def test_a_path_is_lost_from_its_tail(manager: OffloadingManager) -> None:
    ctx = manager.begin_request("r")
    store(manager, "abcd", ctx)
    manager.finish_request(ctx)
    assert order(manager) == "dcba"
    assert [evicted_by(manager, new) for new in "wxyz"] == ["d", "c", "b", "a"]


def test_the_path_takes_its_place_when_the_request_finishes(manager: OffloadingManager) -> None:
    store(manager, "abcd")
    ctx = manager.begin_request("r", keys("cd"))
    assert manager.lookup(keys("cd"), ctx).num_ready == 2
    manager.complete_load(manager.prepare_load(keys("cd"), ctx))
    assert order(manager) == "dcba"
    manager.finish_request(ctx)
    assert order(manager) == "badc"


def test_a_path_that_was_stored_in_pieces_is_put_in_order(manager: OffloadingManager) -> None:
    ctx = manager.begin_request("r")
    store(manager, "ab", ctx)
    store(manager, "cd", ctx)
    assert order(manager) == "badc"
    manager.finish_request(ctx)
    assert order(manager) == "dcba"


def test_pinned_blocks_and_those_in_flight_are_passed_over(manager: OffloadingManager) -> None:
    store(manager, "ab")
    in_flight = manager.prepare_store(keys("c"))
    store(manager, "d")
    load = manager.prepare_load(keys("a"))
    assert evicted_by(manager, "e") == "b"
    assert evicted_by(manager, "f") == "d"
    assert order(manager) == "acef"
    manager.complete_load(load)
    assert in_flight is not None
    manager.complete_store(in_flight)
    assert evicted_by(manager, "gh") == "ac"


def test_blocks_that_are_removed_leave_the_order(manager: OffloadingManager) -> None:
    store(manager, "abc")
    manager.discard(keys("b"))
    plan = manager.prepare_store(keys("d"))
    assert plan is not None
    manager.complete_store(plan, success=False)
    assert order(manager) == "ca"
    manager.reset()
    assert order(manager) == ""
