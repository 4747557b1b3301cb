"""Common properties of FIFO, SLRU, LFU, SIEVE and S3-FIFO, and of their twins."""

from __future__ import annotations

from typing import Any

import pytest

from kvoffload.core.manager import OffloadingManager
from kvoffload.core.policy import EvictionPolicy
from kvoffload.policies.fifo import FIFO
from kvoffload.policies.lfu import LFU
from kvoffload.policies.s3fifo import S3FIFO
from kvoffload.policies.sieve import SIEVE
from kvoffload.policies.slru import SLRU
from support.letters import keys, letters_at, load, make, store, text, use
from support.naive.fifo import NaiveFIFO
from support.naive.lfu import NaiveLFU
from support.naive.s3fifo import NaiveS3FIFO
from support.naive.sieve import NaiveSIEVE
from support.naive.slru import NaiveSLRU
from support.twin_scripts import inside

POLICIES = [FIFO, SLRU, LFU, SIEVE, S3FIFO, NaiveFIFO, NaiveSLRU, NaiveLFU, NaiveSIEVE, NaiveS3FIFO]


@pytest.fixture(params=POLICIES)
def policy(request: pytest.FixtureRequest) -> type[EvictionPolicy]:
    policy_class: type[EvictionPolicy] = request.param
    return policy_class


@pytest.mark.parametrize("capacity", [1, 2, 3])
def test_a_tiny_cache_works(policy: type[EvictionPolicy], capacity: int) -> None:
    manager = make(policy, capacity)
    for letters in ["a", "aab", "bca", "cabdd", "dcba", "a", "aaaabbbbccccdddd"] * 3:
        use(manager, letters)
        inside(manager)
        store(manager, letters[-1])
        assert manager.lookup(keys(letters[-1])).num_ready == 1
    ctx = manager.begin_request("longer than the cache")
    plan = store(manager, "wxyz", ctx)
    assert text(plan.keys) == "wxyz"[:capacity]


def test_the_only_evictable_block_is_found(policy: type[EvictionPolicy]) -> None:
    """The policy finds the block anywhere in its order while all other blocks are pinned."""
    history = ["abcdef", "ab", "abc", "a", "gh", "ab", "g", "hgab"]
    for free in range(6):
        manager = make(policy, 6)
        for letters in history:
            use(manager, letters)
        resident = letters_at(manager, manager.policy.order() or [])
        pinned = [load(manager, letter) for letter in resident if letter != resident[free]]
        assert text(store(manager, "z").evicted) == resident[free]
        inside(manager)
        for plan in pinned:
            manager.complete_load(plan)
        assert len(store(manager, "uvwxy").evicted) == 5
        inside(manager)


def test_removed_blocks_leave_the_order_and_return_as_new(policy: type[EvictionPolicy]) -> None:
    manager = make(policy, 5)
    use(manager, "abcdea")
    assert manager.discard(keys("ac")) == 2
    inside(manager)
    manager.complete_store(store_of(manager, "xy"), success=False)
    inside(manager)
    use(manager, "ac")
    assert sorted(letters_at(manager, manager.policy.order() or [])) == list("abcde")
    inside(manager)


def test_reset_forgets_everything(policy: type[EvictionPolicy]) -> None:
    manager, fresh = make(policy, 4), make(policy, 4)
    use(manager, "abcaadefgaabc")
    manager.reset()
    assert inside(manager) == inside(fresh)
    for again in (manager, fresh):
        use(again, "bcdaefgabcc")
    assert inside(manager) == inside(fresh)


def test_a_store_is_no_second_use_when_its_request_finishes(policy: type[EvictionPolicy]) -> None:
    """The end of the storing request does not change a policy's counts."""
    finished, running = make(policy, 4), make(policy, 4)
    for manager in (finished, running):
        ctx = manager.begin_request("r")
        store(manager, "abc", ctx)
        if manager is finished:
            manager.touch(keys("abc"), ctx)
            manager.finish_request(ctx)
    assert inside(finished)[1:] == inside(running)[1:]


def store_of(manager: OffloadingManager, letters: str) -> Any:
    plan = manager.prepare_store(keys(letters))
    assert plan is not None
    return plan
