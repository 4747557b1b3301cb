"""Invariants 6 to 10 of the manager (DESIGN 4): accesses, failures, events, and the guarantee of a HIT."""

from __future__ import annotations

import numpy as np
import pytest

from kvoffload.core.manager import OffloadingManager
from kvoffload.core.slots import SlotArray
from kvoffload.structures.index import Index
from kvoffload.structures.jit import BoolArray
from kvoffload.testing.audit import audit
from support.letters import (
    HIT,
    MISS,
    POLICIES,
    begin_store,
    keys,
    load,
    make,
    readable,
    states,
    store,
    text,
)
from support.naive.lru import NaiveLRU


@pytest.fixture(params=POLICIES)
def manager(request: pytest.FixtureRequest) -> OffloadingManager:
    return make(request.param)


# ---- 6. One request, one access per block; 7. the whole path


class Recorder(NaiveLRU):
    """A policy that records its calls."""

    name = "recorder"

    def __init__(self, index: Index) -> None:
        super().__init__(index)
        self.accesses = ""

    def access(self, slots: SlotArray, reused: BoolArray) -> None:
        for slot, is_reuse in zip(slots.tolist(), reused.tolist(), strict=True):
            letter = self.index.key_at(slot).decode()
            self.accesses += letter if is_reuse else f"({letter})"


def take_accesses(manager: OffloadingManager) -> str:
    """Return the accesses in prefix order, with blocks that are only reordered in brackets."""
    assert isinstance(manager.policy, Recorder)
    accesses, manager.policy.accesses = manager.policy.accesses, ""
    return accesses


def test_invariant_06_one_request_is_one_access_per_block() -> None:
    manager = make(Recorder)
    store(manager, "abc")
    ctx = manager.begin_request("r")
    for _ in range(3):  # the request is retried, preempted and repeated
        manager.lookup(keys("abc"), ctx)
        manager.lookup_key(b"a", ctx)
        manager.complete_load(load(manager, "ab", ctx))
        store(manager, "abc", ctx)
    assert take_accesses(manager) == ""
    manager.finish_request(ctx)
    assert take_accesses(manager) == "abc"


def test_invariant_06_a_touch_is_the_access_and_finish_only_reorders() -> None:
    manager = make(Recorder)
    store(manager, "abc")
    ctx = manager.begin_request("r")
    manager.touch(keys("bb"), ctx)
    manager.touch(keys("b"), ctx)
    assert take_accesses(manager) == "b"
    manager.lookup(keys("abc"), ctx)
    manager.finish_request(ctx)
    # The path is in the order of first sight: b came first.
    assert take_accesses(manager) == "(b)ac"


def test_invariant_06_a_requests_own_store_is_no_second_access() -> None:
    manager = make(Recorder)
    store(manager, "a")
    ctx = manager.begin_request("r")
    store(manager, "abc", ctx)
    manager.touch(keys("abc"), ctx)
    assert take_accesses(manager) == "a"
    manager.finish_request(ctx)
    assert take_accesses(manager) == "(a)(b)(c)"


def test_invariant_06_without_a_request_every_touch_is_an_access() -> None:
    manager = make(Recorder)
    store(manager, "a")
    manager.touch(keys("a"))
    manager.touch(keys("aax"))
    assert take_accesses(manager) == "aa"


def test_invariant_07_a_hit_refreshes_the_path_that_the_device_served() -> None:
    manager = make(Recorder)
    store(manager, "abcd")
    ctx = manager.begin_request("r", keys("abcd"))  # the device has a and b, and asks for the rest
    assert manager.lookup(keys("cd"), ctx).num_ready == 2
    manager.complete_load(load(manager, "cd", ctx))
    manager.finish_request(ctx)
    assert take_accesses(manager) == "abcd"


# ---- 8. Failed stores


def test_invariant_08_a_failed_store_leaves_no_key_and_frees_its_slots(manager: OffloadingManager) -> None:
    plan = begin_store(manager, "abc")
    manager.complete_store(plan, success=False)
    audit(manager)
    assert states(manager, "abc") == [MISS] * 3
    assert (manager.stats().free, manager.stats().store_failed, manager.stats().stored) == (4, 3, 0)
    assert readable(manager) == ""
    assert text(store(manager, "abcd").keys) == "abcd"


def test_invariant_08_a_key_that_was_evicted_meanwhile_does_no_harm(manager: OffloadingManager) -> None:
    ctx = manager.begin_request("r")
    plan = store(manager, "ab", ctx)
    assert len(store(manager, "wxyz").evicted) == 2
    manager.touch(keys("ab"), ctx)
    manager.finish_request(ctx)
    assert states(manager, "abwxyz") == [MISS] * 2 + [HIT] * 4
    assert plan.completed
    audit(manager)


def test_invariant_08_a_failed_block_can_be_offered_again_by_the_same_request(
    manager: OffloadingManager,
) -> None:
    ctx = manager.begin_request("r")
    manager.complete_store(begin_store(manager, "ab", ctx), success=False)
    assert text(store(manager, "ab", ctx).keys) == "ab"
    manager.finish_request(ctx)
    assert states(manager, "ab") == [HIT, HIT]


# ---- 9. Events


def test_invariant_09_events_report_readable_blocks_in_order(manager: OffloadingManager) -> None:
    plan = begin_store(manager, "abcd")
    assert readable(manager) == ""
    manager.complete_store(plan)
    assert readable(manager) == "+a+b+c+d"
    first, second = text(begin_store(manager, "ef").evicted)
    assert readable(manager) == f"-{first}-{second}"
    remaining = "".join(letter for letter in "dcba" if letter not in (first, second))
    assert manager.discard(keys("dcba")) == 2
    assert readable(manager) == "".join(f"-{letter}" for letter in remaining)


@pytest.mark.parametrize("drop_in_flight", [False, True])
def test_invariant_09_events_go_on_across_a_reset(manager: OffloadingManager, drop_in_flight: bool) -> None:
    store(manager, "abc")
    reading, writing = load(manager, "ab"), begin_store(manager, "d")
    manager.discard(keys("b"))
    readable(manager)
    manager.reset(drop_in_flight=drop_in_flight)
    audit(manager)
    assert readable(manager) == "-a-c"
    assert states(manager, "abcd") == [MISS] * 4
    manager.complete_store(writing)
    manager.complete_load(reading)
    audit(manager)
    assert readable(manager) == ""
    assert manager.stats().free == 4
    store(manager, "a")
    assert readable(manager) == "+a"


def test_invariant_09_events_name_medium_and_block_size() -> None:
    manager = OffloadingManager(2, key_bytes=1, enable_events=True, medium="DISK", block_size=512)
    store(manager, "a")
    [event] = manager.take_events()
    assert (event.medium, event.block_size, event.removed) == ("DISK", 512, False)
    assert manager.take_events() == []


def test_invariant_09_without_events_there_is_nothing_to_take() -> None:
    manager = OffloadingManager(2, key_bytes=1)
    manager.complete_store(begin_store(manager, "abc"))
    assert manager.take_events() == []


# ---- 10. A HIT is a promise


def test_invariant_10_a_hit_can_be_loaded_until_the_next_change(manager: OffloadingManager) -> None:
    store(manager, "abc")
    assert states(manager, "abc") == [HIT] * 3
    plan = load(manager, "abc")
    assert text(plan.keys) == "abc"
    assert [manager.index.key_at(slot) for slot in plan.slots] == keys("abc")


def test_invariant_10_a_damaged_block_is_a_miss_from_then_on(manager: OffloadingManager) -> None:
    store(manager, "abc")
    first, second = load(manager, "abc"), load(manager, "abc")
    manager.complete_load(first, damaged=[1])
    audit(manager)
    assert states(manager, "abc") == [HIT, MISS, HIT]
    # The slot is still being read, so it is not reused; b itself may be stored in another slot.
    assert manager.stats().condemned == 1
    again = store(manager, "b")
    assert set(again.slots.tolist()).isdisjoint(second.slots.tolist())
    manager.complete_load(second, damaged=[1])
    audit(manager)
    assert states(manager, "abc") == [HIT] * 3
    stats = manager.stats()
    assert (stats.loaded, stats.discarded, stats.condemned, stats.free) == (4, 1, 0, 1)


def test_invariant_10_damaged_rows_may_be_an_array() -> None:
    manager = make()
    store(manager, "ab")
    manager.complete_load(load(manager, "ab"), damaged=np.array([0, 1]))
    assert states(manager, "ab") == [MISS, MISS]
