"""Segmented LRU: both segments by hand."""

from __future__ import annotations

import pytest

from kvoffload.core.manager import OffloadingManager
from kvoffload.core.policy import EvictionPolicy
from kvoffload.policies.slru import SLRU
from support.letters import keys, letters_at, load, make, store, text, use
from support.naive.slru import NaiveSLRU


class EvenSLRU(SLRU):
    proven_share = 0.5


class EvenNaiveSLRU(NaiveSLRU):
    proven_share = 0.5


@pytest.fixture(params=[EvenSLRU, EvenNaiveSLRU])
def manager(request: pytest.FixtureRequest) -> OffloadingManager:
    """A policy with four slots, two of them for proven blocks."""
    return make(request.param, 4)


def segments(manager: OffloadingManager) -> tuple[str, str]:
    """Return blocks on probation and proven blocks, each coldest first."""
    listed = letters_at(manager, manager.policy.order() or [])
    on_probation = int(manager.policy.stats()["probation_blocks"])
    return listed[:on_probation], listed[on_probation:]


def test_the_rules_by_hand(manager: OffloadingManager) -> None:
    use(manager, "abcd")
    assert segments(manager) == ("abcd", ""), "probation uses slots that proven blocks do not need"
    use(manager, "b")
    assert segments(manager) == ("acd", "b"), "a hit proves a block"
    use(manager, "a")
    assert segments(manager) == ("cd", "ba")
    use(manager, "b")
    assert segments(manager) == ("cd", "ab"), "a proven block becomes the most recent"
    use(manager, "c")
    assert segments(manager) == ("da", "bc"), (
        "the segment is full: its coldest block becomes the most recent on probation"
    )
    use(manager, "e")
    assert segments(manager) == ("ae", "bc"), "the coldest block on probation is evicted"
    use(manager, "fgh")
    assert segments(manager) == ("gh", "bc"), "a scan leaves the proven blocks alone"


def test_a_path_keeps_its_head_longest(manager: OffloadingManager) -> None:
    ctx = manager.begin_request("first")
    store(manager, "abcd", ctx)
    manager.finish_request(ctx)
    assert segments(manager) == ("dcba", "")
    manager.touch(keys("abcd"))
    assert segments(manager) == ("dc", "ba"), "all are hit; there is room for the head"
    assert text(store(manager, "ef").evicted) == "dc"


def test_own_stores_move_within_their_segment(manager: OffloadingManager) -> None:
    use(manager, "aab")
    ctx = manager.begin_request("r", keys("acd"))
    store(manager, "acd", ctx)
    assert segments(manager) == ("bdc", "a")
    manager.finish_request(ctx)
    assert segments(manager) == ("bdc", "a"), "a is hit, c and d are not"


def test_proven_blocks_leave_when_the_others_are_protected(manager: OffloadingManager) -> None:
    use(manager, "abcdab")
    load(manager, "cd")
    assert segments(manager) == ("cd", "ab")
    assert text(store(manager, "e").evicted) == "a"
    assert segments(manager) == ("cde", "b")


def test_a_pinned_lir_block_can_become_hir(manager: OffloadingManager) -> None:
    use(manager, "abcdab")
    plan = load(manager, "a")
    use(manager, "c")
    assert segments(manager) == ("da", "bc")
    assert text(store(manager, "ef").evicted) == "db"
    manager.complete_load(plan)
    assert text(store(manager, "g").evicted) == "a"


@pytest.mark.parametrize("policy", [SLRU, NaiveSLRU])
def test_a_share_below_one_block_is_lru(policy: type[EvictionPolicy]) -> None:
    manager = make(policy, 4)
    use(manager, "abcdab")
    assert segments(manager) == ("cdab", "")
