"""2Q: the paper's full version worked by hand, and our conventions."""

from __future__ import annotations

from typing import Any

import pytest

from kvoffload.core.manager import OffloadingManager
from kvoffload.core.policy import EvictionPolicy
from kvoffload.policies._2q import TwoQ
from kvoffload.testing.audit import audit
from support.letters import begin_store, keys, letters_at, load, make, store, text, use
from support.naive.two_q import NaiveTwoQ
from support.policy_state import lists_of


def state(manager: OffloadingManager) -> tuple[str, str, str]:
    """Return A1in, Am, A1out, each most recent first."""
    audit(manager)
    policy: Any = manager.policy
    a1in, am, a1out = lists_of(policy)
    return letters_at(manager, a1in), letters_at(manager, am), text(a1out)


@pytest.fixture(params=[TwoQ, NaiveTwoQ])
def manager(request: pytest.FixtureRequest) -> OffloadingManager:
    """A manager of four blocks: Kin = 1, Kout = 2."""
    return make(request.param, 4)


def test_worked_by_hand(manager: OffloadingManager) -> None:
    use(manager, "abcd")  # free slots are filled, beyond Kin
    assert state(manager) == ("dcba", "", "")
    use(manager, "e")  # |A1in| > Kin: its oldest leaves, and is remembered
    assert state(manager) == ("edcb", "", "a")
    use(manager, "a")  # remembered: it enters Am, and the victim is in A1in
    assert state(manager) == ("edc", "a", "b")
    use(manager, "fg")  # the third key pushes b out of A1out
    assert state(manager) == ("gfe", "a", "dc")
    use(manager, "ef")  # hits in A1in do nothing
    assert state(manager) == ("gfe", "a", "dc")
    use(manager, "d")
    assert state(manager) == ("gf", "da", "ec")
    use(manager, "a")  # a hit in Am moves to its front
    assert state(manager) == ("gf", "ad", "ec")
    use(manager, "c")
    assert state(manager) == ("g", "cad", "fe")
    use(manager, "h")  # |A1in| = Kin: the victim is in Am, and is forgotten
    assert state(manager) == ("hg", "ca", "fe")
    use(manager, "d")
    assert state(manager) == ("dh", "ca", "gf")


def test_the_head_of_a_batch_is_the_youngest(manager: OffloadingManager) -> None:
    store(manager, "abc")
    assert state(manager) == ("abc", "", "")


def test_new_blocks_of_a_batch_count_for_the_next(manager: OffloadingManager) -> None:
    use(manager, "abcdeafgdac")
    assert state(manager) == ("g", "cad", "fe")
    store(manager, "xy")  # the victim for x is in Am; with x, A1in exceeds Kin, and has the victim for y
    assert state(manager) == ("xy", "ca", "gf")


def test_a_path_stored_in_parts_is_reordered_once(manager: OffloadingManager) -> None:
    ctx = manager.begin_request("r")
    store(manager, "ab", ctx)
    store(manager, "cd", ctx)
    assert state(manager) == ("cdab", "", "")
    manager.finish_request(ctx)
    assert state(manager) == ("abcd", "", "")
    later = manager.begin_request("later", keys("cd"))
    manager.touch(keys("cd"), later)
    manager.finish_request(later)
    assert state(manager) == ("abcd", "", "")


def test_a_returning_key_frees_its_place_in_a1out_first(manager: OffloadingManager) -> None:
    use(manager, "abcdef")
    assert state(manager) == ("fedc", "", "ba")
    use(manager, "b")  # c is remembered where b was, and a stays
    assert state(manager) == ("fed", "b", "ca")


def test_a_pinned_list_leaves_the_victim_to_the_other(manager: OffloadingManager) -> None:
    use(manager, "abcdea")
    assert state(manager) == ("edc", "a", "b")
    reading = load(manager, "edc")
    use(manager, "x")  # the victim should be in A1in, which is pinned: it is in Am, and a is forgotten
    assert state(manager) == ("xedc", "", "b")
    manager.complete_load(reading)
    use(manager, "b")
    assert state(manager) == ("xed", "b", "c")


@pytest.mark.parametrize("policy", [TwoQ, NaiveTwoQ])
def test_a1in_provides_the_victim_if_am_is_empty(policy: type[EvictionPolicy]) -> None:
    manager = make(policy, 1)  # Kin = 1: A1in never exceeds it
    use(manager, "ab")
    assert state(manager) == ("b", "", "a")
    use(manager, "a")
    assert state(manager) == ("", "a", "b")


def test_failed_and_damaged_blocks_are_not_remembered(manager: OffloadingManager) -> None:
    use(manager, "abcd")
    manager.complete_store(begin_store(manager, "e"), success=False)
    assert state(manager) == ("dcb", "", "a")
    manager.complete_load(load(manager, "b"), damaged=[0])
    assert state(manager) == ("dc", "", "a")


def test_a_refusal_changes_nothing(manager: OffloadingManager) -> None:
    use(manager, "abcde")
    before = state(manager)
    reading = load(manager, "edcb")
    assert manager.prepare_store(keys("a")) is None
    assert state(manager) == before
    manager.complete_load(reading)
    store(manager, "a")
    assert state(manager) == ("edc", "a", "b")


def test_reset_forgets_the_keys(manager: OffloadingManager) -> None:
    use(manager, "abcde")
    manager.reset()
    assert state(manager) == ("", "", "")
    use(manager, "a")
    assert state(manager) == ("a", "", "")
