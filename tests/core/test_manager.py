"""Invariants 1 to 5 of the manager (DESIGN 4): slots, protection, refusals, heads of runs, hits."""

from __future__ import annotations

from typing import Any

import pytest

from kvoffload.admission.reuse import ReuseAdmission
from kvoffload.core.manager import OffloadingManager
from kvoffload.testing.audit import audit, snapshot
from support.letters import (
    HIT,
    MISS,
    PENDING,
    POLICIES,
    begin_store,
    keys,
    load,
    make,
    states,
    store,
    text,
)


@pytest.fixture(params=POLICIES)
def manager(request: pytest.FixtureRequest) -> OffloadingManager:
    return make(request.param)


# ---- 1. Every slot has exactly one state


def test_invariant_01_a_slot_is_free_writing_ready_or_condemned(manager: OffloadingManager) -> None:
    def slots() -> tuple[int, int, int, int, int]:
        audit(manager)
        stats = manager.stats()
        return stats.free, stats.writing, stats.ready, stats.evictable, stats.condemned

    assert slots() == (4, 0, 0, 0, 0)
    plan = begin_store(manager, "abc")
    assert slots() == (1, 3, 0, 0, 0)
    manager.complete_store(plan)
    assert slots() == (1, 0, 3, 3, 0)
    reading, again = load(manager, "ab"), load(manager, "a")
    assert slots() == (1, 0, 3, 1, 0)
    manager.complete_load(reading)
    assert slots() == (1, 0, 3, 2, 0)
    manager.discard(keys("ac"))
    assert slots() == (2, 0, 1, 1, 1)
    manager.complete_load(again)
    assert slots() == (3, 0, 1, 1, 0)
    in_flight = begin_store(manager, "de")
    manager.reset()
    assert slots() == (2, 0, 0, 0, 2)
    manager.complete_store(in_flight)
    assert slots() == (4, 0, 0, 0, 0)


def test_invariant_01_slots_are_given_out_once_and_in_ascending_order(manager: OffloadingManager) -> None:
    assert store(manager, "ab").slots.tolist() == [0, 1]
    assert begin_store(manager, "cd").slots.tolist() == [2, 3]


# ---- 2. Protected blocks


def test_invariant_02_a_pinned_block_is_not_evicted(manager: OffloadingManager) -> None:
    store(manager, "abcd")
    first, second = load(manager, "a"), load(manager, "ab")
    assert sorted(text(store(manager, "ef").evicted)) == ["c", "d"]
    manager.complete_load(second)
    assert text(store(manager, "g").evicted) != "a"
    manager.complete_load(first)
    assert states(manager, "a") == [HIT]


def test_invariant_02_a_block_pinned_twice_in_one_load_is_released_by_it(manager: OffloadingManager) -> None:
    store(manager, "abcd")
    plan = load(manager, "aab")
    assert manager.stats().evictable == 2
    manager.complete_load(plan)
    assert manager.stats().evictable == 4
    audit(manager)


def test_invariant_02_a_block_that_is_being_written_is_not_evicted(manager: OffloadingManager) -> None:
    begin_store(manager, "abc")
    store(manager, "d")
    plan = begin_store(manager, "efg")
    assert (text(plan.keys), text(plan.evicted), plan.num_dropped) == ("e", "d", 2)


@pytest.mark.parametrize("how", ["begin", "lookup", "lookup_key", "touch", "load", "offer"])
def test_invariant_02_blocks_of_the_storing_request_are_not_evicted(
    manager: OffloadingManager, how: str
) -> None:
    store(manager, "abcd")
    ctx = manager.begin_request("r", keys("ab") if how == "begin" else [])
    if how == "lookup":
        manager.lookup(keys("ab"), ctx)
    elif how == "lookup_key":
        manager.lookup_key(b"a", ctx)
        manager.lookup_key(b"b", ctx)
    elif how == "touch":
        manager.touch(keys("ab"), ctx)
    elif how == "load":
        manager.complete_load(load(manager, "ab", ctx))
    plan = store(manager, "abefgh" if how == "offer" else "efgh", ctx)
    assert (text(plan.keys), sorted(plan.evicted), plan.num_dropped) == ("ef", keys("cd"), 2)


# ---- 3. A refusal leaves no trace


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("busy", ["pinned", "in flight", "its own"])
def test_invariant_03_a_refusal_leaves_no_trace(policy: Any, busy: str) -> None:
    manager = make(policy, 2, admission=ReuseAdmission(1, 2))
    for letters in ("a", "ab", "abc", "acb", "c", "dc", "dc", "e"):
        ctx = manager.begin_request(letters)
        plan = manager.prepare_store(keys(letters), ctx)
        if plan is not None:
            manager.complete_store(plan)
        manager.finish_request(ctx)
    here = text(key for key in keys("abcde") if manager.lookup_key(key) is HIT)
    assert len(here) == 2
    ctx = manager.begin_request("r", keys(here) if busy == "its own" else [])
    if busy == "pinned":
        load(manager, here)
    elif busy == "in flight":
        manager.discard(keys(here))
        begin_store(manager, here)
    before = snapshot(manager, ignore=["dropped"])
    for letters in ("badc", "x", "exz"):
        assert manager.prepare_store(keys(letters), ctx) is None
        assert snapshot(manager, ignore=["dropped"]) == before
    manager.finish_request(ctx)


def test_invariant_03_the_same_offer_may_succeed_later(manager: OffloadingManager) -> None:
    store(manager, "abcd")
    ctx, reading = manager.begin_request("r"), load(manager, "abcd")
    assert manager.prepare_store(keys("e"), ctx) is None
    manager.complete_load(reading)
    assert text(store(manager, "e", ctx).keys) == "e"


def test_invariant_03_nothing_to_store_is_no_refusal(manager: OffloadingManager) -> None:
    store(manager, "abcd")
    load(manager, "abcd")
    for letters in ("abcd", ""):
        plan = store(manager, letters)
        assert (len(plan.keys), len(plan.slots), len(plan.evicted)) == (0, 0, 0)


# ---- 4. The head of the run is stored


def test_invariant_04_head_of_run_is_stored(manager: OffloadingManager) -> None:
    plan = store(manager, "abcdef")
    assert (text(plan.keys), plan.num_dropped) == ("abcd", 2)
    assert manager.stats().dropped == 2
    load(manager, "ab")
    plan = store(manager, "uvwxyz")
    assert (text(plan.keys), plan.num_dropped, plan.rows.tolist()) == ("uv", 4, [0, 1])


def test_invariant_04_resident_blocks_are_skipped_and_rows_name_the_others(
    manager: OffloadingManager,
) -> None:
    store(manager, "b")
    in_flight = begin_store(manager, "d")
    plan = store(manager, "abcdee")
    assert (text(plan.keys), plan.rows.tolist()) == ("ac", [0, 2])
    manager.complete_store(in_flight)


def test_invariant_04_a_key_that_is_offered_twice_is_stored_once(manager: OffloadingManager) -> None:
    plan = store(manager, "abab")
    assert (text(plan.keys), plan.rows.tolist()) == ("ab", [0, 1])


# ---- 5. Only ready blocks are hits


def test_invariant_05_lookup_counts_the_leading_ready_blocks(manager: OffloadingManager) -> None:
    store(manager, "ab")
    plan = begin_store(manager, "c")
    ctx = manager.begin_request("r")
    assert manager.lookup(keys("abc"), ctx) == (2, PENDING)
    assert manager.lookup(keys("abx"), ctx) == (2, MISS)
    assert manager.lookup(keys("xab"), ctx) == (0, MISS)
    assert manager.lookup(keys("ba"), ctx) == (2, HIT)
    assert manager.lookup([], ctx) == (0, HIT)
    assert states(manager, "abcx") == [HIT, HIT, PENDING, MISS]
    manager.complete_store(plan)
    assert manager.lookup(keys("abc"), ctx) == (3, HIT)


def test_invariant_05_a_context_does_not_trust_stale_hints(manager: OffloadingManager) -> None:
    store(manager, "ab")
    ctx = manager.begin_request("r")
    assert manager.lookup(keys("ab"), ctx).num_ready == 2
    manager.discard(keys("ab"))
    assert manager.lookup(keys("ab"), ctx) == (0, MISS)
    store(manager, "xy")  # into the same slots
    assert manager.lookup(keys("ab"), ctx) == (0, MISS)
    store(manager, "ba")
    assert load(manager, "ab", ctx).slots.tolist() == load(manager, "ab").slots.tolist()
    manager.reset(drop_in_flight=True)
    assert manager.lookup(keys("ab"), ctx) == (0, MISS)
