"""LRU: worked examples. test_twins.py compares all decisions with the twin."""

from __future__ import annotations

import pytest

from kvoffload.core.manager import OffloadingManager
from kvoffload.policies.lru import LRU
from support.letters import keys, letters_at, make, store, text
from support.naive.lru import NaiveLRU


def order(manager: OffloadingManager) -> str:
    """Return the resident keys, which are single letters here, coldest first."""
    return letters_at(manager, manager.policy.order() or [])


def evicted_by(manager: OffloadingManager, letters: str) -> str:
    return text(store(manager, letters).evicted)


@pytest.fixture(params=[LRU, NaiveLRU])
def manager(request: pytest.FixtureRequest) -> OffloadingManager:
    return make(request.param)


def test_the_least_recently_used_block_is_evicted(manager: OffloadingManager) -> None:
    assert [evicted_by(manager, letter) for letter in "abcd"] == [""] * 4
    assert order(manager) == "abcd"
    assert evicted_by(manager, "e") == "a"
    manager.touch(keys("b"))
    assert order(manager) == "cdeb"
    assert evicted_by(manager, "fg") == "cd"
    assert order(manager) == "ebgf"


def test_a_finished_request_orders_its_path_and_loses_its_tail_first(manager: OffloadingManager) -> None:
    ctx = manager.begin_request("r")
    store(manager, "ab", ctx)
    store(manager, "cd", ctx)
    assert order(manager) == "badc"
    manager.finish_request(ctx)
    assert order(manager) == "dcba"
    assert [evicted_by(manager, new) for new in "wxyz"] == ["d", "c", "b", "a"]
