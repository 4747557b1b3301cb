"""LFU: counts and ties by hand."""

from __future__ import annotations

import pytest

from kvoffload.core.manager import OffloadingManager
from kvoffload.policies.lfu import LFU
from support.letters import keys, letters_at, load, make, store, text, use
from support.naive.lfu import NaiveLFU


@pytest.fixture(params=[LFU, NaiveLFU])
def manager(request: pytest.FixtureRequest) -> OffloadingManager:
    return make(request.param, 4)


def order(manager: OffloadingManager) -> str:
    """Return the resident keys by count; among equal counts the least recent key is first."""
    return letters_at(manager, manager.policy.order() or [])


def test_the_rules_by_hand(manager: OffloadingManager) -> None:
    use(manager, "abcd" + "aab" + "d")  # a 3; b, d 2; c 1
    assert order(manager) == "cbda"
    use(manager, "e")
    assert order(manager) == "ebda", "c had the fewest uses"
    use(manager, "f")
    assert order(manager) == "fbda", "a newcomer is the next victim, however recent"
    use(manager, "ff" + "g")
    assert order(manager) == "gdaf", "f, used 3 times, overtook b and d; b was less recent than d"
    use(manager, "c")
    assert order(manager) == "cdaf", "c starts again at 1"


def test_a_path_keeps_its_head_longest(manager: OffloadingManager) -> None:
    ctx = manager.begin_request("r")
    store(manager, "ab", ctx)
    store(manager, "cd", ctx)
    assert order(manager) == "badc"
    manager.finish_request(ctx)
    assert order(manager) == "dcba", "the path takes its place, and counts once"
    assert manager.policy.stats()["used_once_blocks"] == 4
    manager.touch(keys("abc"))
    assert order(manager) == "dcba"
    assert text(store(manager, "ef").evicted) == "dc"


def test_higher_counts_leave_when_lower_ones_are_protected(manager: OffloadingManager) -> None:
    use(manager, "abcd" + "aaabb")  # a 4, b 3, c 1, d 1
    load(manager, "cd")
    assert text(store(manager, "ef").evicted) == "ba"


@pytest.mark.parametrize("twin", [LFU, NaiveLFU])
def test_counts_end(twin: type[LFU] | type[NaiveLFU]) -> None:
    manager = make(type("Low", (twin,), {"max_count": 3}), 3)
    use(manager, "a" * 9 + "b" * 3 + "c" * 4)
    assert manager.policy.stats() == {"used_once_blocks": 0, "at_max_count_blocks": 3}
    assert order(manager) == "abc", "at the end of counting, recency decides"
    use(manager, "a")
    assert text(store(manager, "d").evicted) == "b"
