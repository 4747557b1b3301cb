"""SIEVE: algorithm 1 of the paper worked by hand; the hand with pins, failures and batches."""

from __future__ import annotations

from typing import Any

import pytest

from kvoffload.core.manager import OffloadingManager
from kvoffload.core.policy import EvictionPolicy
from kvoffload.policies.sieve import SIEVE
from kvoffload.testing.audit import audit
from support.letters import begin_store, keys, letters_at, load, make, store, text, use
from support.naive.sieve import NaiveSIEVE
from support.policy_state import lists_of


@pytest.fixture(params=[SIEVE, NaiveSIEVE])
def policy(request: pytest.FixtureRequest) -> type[EvictionPolicy]:
    policy_class: type[EvictionPolicy] = request.param
    return policy_class


def state(manager: OffloadingManager) -> str:
    """Return the queue, oldest first, with visited blocks as capitals and ``>`` before the hand's block."""
    audit(manager)
    policy: Any = manager.policy
    hand, visited = lists_of(policy)
    assert policy.stats()["visited_blocks"] == len(visited)
    queue = ""
    for slot in policy.order():
        letter = letters_at(manager, [slot])
        queue += ">" * (slot == hand) + (letter.upper() if slot in visited else letter)
    return queue


def test_algorithm_1_by_hand(policy: type[EvictionPolicy]) -> None:
    """Seven blocks exercise every line; the two oldest and the newest are visited."""
    manager = make(policy, 7)
    use(manager, "gfedcba" + "agf")
    assert state(manager) == "GFedcbA"
    use(manager, "h")
    assert state(manager) == "gf>dcbAh", "g and f are spared where they stand, e leaves"
    use(manager, "a")
    assert state(manager) == "gf>dcbAh", "a second visit marks nothing more"
    use(manager, "d")
    assert state(manager) == "gf>DcbAh"
    use(manager, "i")
    assert state(manager) == "gfd>bAhi", "the hand continues and does not return to the oldest"
    use(manager, "b")
    use(manager, "j")
    assert state(manager) == "gfdba>ij", "b and a are spared, h leaves: new blocks have no second chance"
    use(manager, "i")
    use(manager, "j")
    use(manager, "gfd")
    assert state(manager) == "GFDba>IJ"
    use(manager, "k")
    assert state(manager) == "gfd>aijk", "past the head the hand begins at the oldest again"
    use(manager, "aijkgfd")
    assert state(manager) == "GFD>AIJK"
    use(manager, "l")
    assert state(manager) == "gfd>ijkl", "all were visited: one round clears the marks, and takes the first"


def test_a_victim_at_the_head_sends_the_hand_to_the_oldest(policy: type[EvictionPolicy]) -> None:
    manager = make(policy, 3)
    use(manager, "abc" + "ab" + "d")
    assert state(manager) == "abd"
    use(manager, "e")
    assert state(manager) == ">bde"


def test_a_batch_joins_after_its_last_victim(policy: type[EvictionPolicy]) -> None:
    manager = make(policy, 4)
    use(manager, "abcd" + "abc")
    assert state(manager) == "ABCd"
    assert text(store(manager, "efg").evicted) == "dab", "c is visited, but its mark went in the first round"
    assert state(manager) == ">cefg"


def test_a_prefix_queues_up_head_first_and_finishing_moves_nothing(policy: type[EvictionPolicy]) -> None:
    manager = make(policy, 4)
    ctx = manager.begin_request("r")
    store(manager, "ab", ctx)
    store(manager, "cd", ctx)
    manager.finish_request(ctx)
    assert state(manager) == "abcd"
    use(manager, "d")
    manager.touch(keys("bc"))
    assert state(manager) == "aBCD"


def test_the_hand_passes_protected_blocks_without_touching_their_mark(policy: type[EvictionPolicy]) -> None:
    manager = make(policy, 4)
    use(manager, "abcd" + "ab")
    plan = load(manager, "ac")
    assert text(store(manager, "e").evicted) == "d"
    assert state(manager) == "Abce"
    assert text(store(manager, "f").evicted) == "b"
    assert state(manager) == "A>cef"
    manager.complete_load(plan)
    assert text(store(manager, "g").evicted) == "c"


def test_the_hand_leaves_a_removed_block(policy: type[EvictionPolicy]) -> None:
    manager = make(policy, 4)
    use(manager, "abcd" + "a" + "e")
    assert state(manager) == "a>cde"
    manager.discard(keys("c"))
    assert state(manager) == "a>de"
    manager.discard(keys("de"))
    assert state(manager) == "a"
    manager.complete_store(begin_store(manager, "f"), success=False)
    manager.discard(keys("a"))
    assert state(manager) == ""
    use(manager, "gg")
    assert state(manager) == "G"


@pytest.mark.parametrize("twin", [SIEVE, NaiveSIEVE])
def test_a_call_out_of_patience_evicts_the_next_block(twin: type[EvictionPolicy]) -> None:
    manager = make(type("Hasty", (twin,), {"patience": 2}), 4)
    use(manager, "abcd" + "abcd")
    assert text(store(manager, "ef").evicted) == "cd", "a and b were spared, c and d had to go, visited"
    assert state(manager) == "abef"
    use(manager, "ab" + "ef")
    assert text(store(manager, "g").evicted) == "e"
    assert state(manager) == "ab>Fg"
