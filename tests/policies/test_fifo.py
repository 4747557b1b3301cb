"""FIFO: the order by hand."""

from __future__ import annotations

import pytest

from kvoffload.core.manager import OffloadingManager
from kvoffload.core.policy import EvictionPolicy
from kvoffload.policies.fifo import FIFO
from support.letters import keys, letters_at, load, make, store, text, use
from support.naive.fifo import NaiveFIFO


@pytest.fixture(params=[FIFO, NaiveFIFO])
def policy(request: pytest.FixtureRequest) -> type[EvictionPolicy]:
    found: type[EvictionPolicy] = request.param
    return found


def order(manager: OffloadingManager) -> str:
    """Resident keys, the oldest first."""
    return letters_at(manager, manager.policy.order() or [])


@pytest.mark.parametrize(("frames", "faults"), [(3, 9), (4, 10)])
def test_beladys_anomaly(policy: type[EvictionPolicy], frames: int, faults: int) -> None:
    """The trace of Belady, Nelson and Shedler, CACM 12(6), 1969: more room, and more faults."""
    manager = make(policy, frames)
    use(manager, "abcdabeabcde")
    assert manager.stats().stored == faults


def test_the_order_is_that_of_the_stores_whatever_is_used(policy: type[EvictionPolicy]) -> None:
    manager = make(policy, 4)
    use(manager, "abcd" + "aab")
    assert order(manager) == "abcd"
    use(manager, "e")
    assert order(manager) == "bcde"


def test_a_prefix_queues_up_head_first_and_finishing_moves_nothing(policy: type[EvictionPolicy]) -> None:
    manager = make(policy, 4)
    ctx = manager.begin_request("r")
    store(manager, "ab", ctx)
    store(manager, "cd", ctx)
    manager.finish_request(ctx)
    assert order(manager) == "abcd"
    assert text(store(manager, "ef").evicted) == "ab"


def test_a_protected_block_keeps_its_place(policy: type[EvictionPolicy]) -> None:
    manager = make(policy, 4)
    store(manager, "abcd")
    plan = load(manager, "a")
    assert text(store(manager, "ef").evicted) == "bc"
    assert order(manager) == "adef"
    manager.complete_load(plan)
    assert text(store(manager, "g").evicted) == "a"
    assert manager.lookup(keys("d")).num_ready == 1
