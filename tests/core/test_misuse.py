"""Invariant 11 of the manager (DESIGN 4): misuse and bad policies raise errors and corrupt nothing."""

from __future__ import annotations

from typing import Any

import pytest

from kvoffload.core.manager import OffloadingManager
from kvoffload.core.protection import Protected
from kvoffload.errors import ConfigError, MisuseError, PolicyError
from kvoffload.structures.index import Index
from kvoffload.structures.keys import Keys
from kvoffload.testing.audit import audit, snapshot
from support.letters import (
    POLICIES,
    begin_store,
    keys,
    load,
    make,
    store,
)
from support.naive.lru import NaiveLRU


@pytest.fixture(params=POLICIES)
def manager(request: pytest.FixtureRequest) -> OffloadingManager:
    return make(request.param)


# ---- 11. Misuse


def refused(manager: OffloadingManager, call: Any, match: str) -> None:
    before = snapshot(manager)
    with pytest.raises(MisuseError, match=match):
        call()
    assert snapshot(manager) == before
    audit(manager)


def test_invariant_11_completing_twice_names_the_key(manager: OffloadingManager) -> None:
    stored = store(manager, "ab")
    refused(manager, lambda: manager.complete_store(stored), "complete_store of a plan .* key 61")
    refused(manager, lambda: manager.complete_store(stored, success=False), "key 61")
    loaded = load(manager, "ba")
    manager.complete_load(loaded)
    refused(manager, lambda: manager.complete_load(loaded, [0]), "complete_load of a plan .* key 62")


def test_invariant_11_a_completed_plan_is_not_split(manager: OffloadingManager) -> None:
    stored = store(manager, "ab")
    refused(manager, lambda: stored.split(), "split of a plan that is completed: .* key 61")
    loaded = load(manager, "ba")
    parts = loaded.split()
    refused(manager, lambda: loaded.split(), "split of a plan that is completed: .* key 62")
    for part in parts:
        manager.complete_load(part)
    audit(manager)


def test_a_load_has_the_keys_that_were_pinned_even_if_the_callers_list_grows(
    manager: OffloadingManager,
) -> None:
    store(manager, "ab")
    path = keys("a")
    plan = manager.prepare_load(path)
    path += keys("b")
    assert (list(plan.keys), len(plan.slots)) == (keys("a"), 1)
    manager.complete_load(plan)


def test_numbers_of_blocks_below_zero_are_refused(manager: OffloadingManager) -> None:
    store(manager, "abcd")
    ctx = manager.begin_request("asks", keys("ab"))
    manager.begin_resize(2)
    for call in (manager.advance_resize, manager.advance_policy_change):
        with pytest.raises(ConfigError, match="num_blocks: -1 is invalid; allowed: 0 to"):
            call(-1)
    with pytest.raises(ConfigError, match="start: -1 is invalid; allowed: 0 to"):
        manager.count_misses(ctx, -1)
    audit(manager)


def test_invariant_11_loading_an_unready_block_names_the_key_and_pins_nothing(
    manager: OffloadingManager,
) -> None:
    store(manager, "ab")
    begin_store(manager, "c")
    refused(manager, lambda: load(manager, "abx"), "not ready: key 78")
    refused(manager, lambda: load(manager, "acb"), "not ready: key 63")
    assert manager.stats().evictable == 2


def test_invariant_11_a_finished_request_is_rejected(manager: OffloadingManager) -> None:
    ctx = manager.begin_request("req-7")
    manager.finish_request(ctx)
    for call in (manager.lookup, manager.touch, manager.prepare_load, manager.prepare_store):
        refused(manager, lambda call=call: call(keys("a"), ctx), "request 'req-7' has finished")
    refused(manager, lambda: manager.lookup_key(b"a", ctx), "'req-7' has finished")
    refused(manager, lambda: manager.finish_request(ctx), "'req-7' has finished")


def test_invariant_11_a_key_of_another_length_is_named(manager: OffloadingManager) -> None:
    wrong = [b"a", b"long"]
    calls: list[Any] = [manager.lookup, manager.touch, manager.prepare_load, manager.prepare_store]
    for call in (*calls, manager.discard):
        with pytest.raises(ValueError, match="6c6f6e67"):
            call(wrong)
        with pytest.raises(ValueError, match="keys of 4 bytes"):
            call(Keys.pack([b"long"], 4))
    with pytest.raises(ValueError, match="6c6f6e67"):
        manager.lookup_key(b"long")


def test_invariant_11_a_plan_of_the_other_kind_is_refused(manager: OffloadingManager) -> None:
    store(manager, "ab")
    reading, writing = load(manager, "ab"), begin_store(manager, "c")
    refused(manager, lambda: manager.complete_store(reading), "LoadPlan")  # type: ignore[arg-type]
    refused(manager, lambda: manager.complete_load(writing), "StorePlan")  # type: ignore[arg-type]
    manager.complete_store(writing)
    manager.complete_load(reading)


def test_invariant_11_a_plan_or_request_of_another_manager_is_refused(manager: OffloadingManager) -> None:
    other = make()
    store(other, "ab")
    store(manager, "cb")
    plan, ctx = load(other, "ab"), other.begin_request("elsewhere")
    other.lookup(keys("a"), ctx)
    refused(manager, lambda: manager.complete_load(plan), "another manager.* key 61")
    refused(manager, lambda: manager.lookup(keys("a"), ctx), "'elsewhere'")
    refused(manager, lambda: manager.lookup_key(b"a", ctx), "'elsewhere'")
    refused(manager, lambda: manager.finish_request(ctx), "'elsewhere'")
    other.complete_load(plan)


@pytest.mark.parametrize("damaged", [[2], [-1], [0, 7]])
def test_invariant_11_damaged_rows_must_be_rows_of_the_plan(
    manager: OffloadingManager, damaged: list[int]
) -> None:
    store(manager, "ab")
    plan = load(manager, "ab")
    refused(manager, lambda: manager.complete_load(plan, damaged), "damaged rows")
    manager.complete_load(plan, [1, 1])
    assert (manager.stats().loaded, manager.stats().discarded) == (1, 1)


def test_impossible_arguments_are_refused_at_construction() -> None:
    for bad in (
        {"capacity_blocks": 0},
        {"capacity_blocks": 2**31},
        {"capacity_blocks": 2.5},
        {"key_bytes": 0},
        {"key_bytes": 1025},
    ):
        with pytest.raises(ConfigError, match=f"{next(iter(bad))}: .* is invalid; allowed: 1 to"):
            OffloadingManager(**{"capacity_blocks": 1, **bad})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"policy: 'lur' .*did you mean lru\?"):
        make("lur")
    for no_policy in (int, NaiveLRU(Index(1, 1))):
        with pytest.raises(ConfigError, match="policy"):
            make(no_policy)
    for no_rule in ("sometimes", 2):
        with pytest.raises(ConfigError, match="admission"):
            make(admission=no_rule)


# ---- Checks of policies


class Liar(NaiveLRU):
    """A policy that names the victims that the test sets."""

    name = "liar"
    lie: tuple[int, ...] = ()

    def replace(self, keys: Keys, slots: Any, num_free: int, protected: Protected) -> None:
        if len(slots) > num_free:
            slots[num_free : num_free + len(self.lie)] = self.lie
        else:
            super().replace(keys, slots, num_free, protected)


@pytest.mark.parametrize(
    ("lie", "mistake"),
    [
        ((0, 2), "a pinned block"),
        ((2, 1), "a block in flight"),
        ((3, 2), "a block of the storing request"),
        ((2, 2), "the same block twice"),
        ((2,), "too few"),
        ((), "nobody"),
        ((2, 6), "a slot that does not exist"),
        ((-1, 2), "a negative slot"),
    ],
)
def test_a_policy_that_names_wrong_victims_is_detected(lie: tuple[int, ...], mistake: str) -> None:
    manager = make(Liar, 6)
    store(manager, "a")
    begin_store(manager, "b")
    store(manager, "cdef")
    load(manager, "a")
    assert isinstance(manager.policy, Liar)
    manager.policy.lie = lie
    ctx = manager.begin_request("r", keys("d"))
    before = snapshot(manager)
    with pytest.raises(PolicyError, match=r"policy 'liar' named slot -?[0-9]+ as the victim for key 7[89]"):
        manager.prepare_store(keys("xy"), ctx)
    assert snapshot(manager) == before, mistake
    audit(manager)


def test_a_policy_that_names_a_free_slot_is_detected() -> None:
    manager = make(Liar, 3)
    store(manager, "abc")
    manager.discard(keys("b"))
    assert isinstance(manager.policy, Liar)
    manager.policy.lie = (1,)
    with pytest.raises(PolicyError):
        manager.prepare_store(keys("xy"))
    audit(manager)


@pytest.mark.parametrize("lie", [(2, 2), (1,), (), (6, 0)])
def test_a_policy_that_names_wrong_victims_of_a_resize_is_detected(lie: tuple[int, ...]) -> None:
    manager = make(Liar, 6)
    store(manager, "a")
    begin_store(manager, "b")
    store(manager, "cdef")
    assert isinstance(manager.policy, Liar)
    manager.policy.lie = lie
    manager.begin_resize(4)
    before = snapshot(manager)
    with pytest.raises(PolicyError, match=r"policy 'liar' named slot -?[0-9]+ as the victim"):
        manager.advance_resize(2)
    assert snapshot(manager) == before
    audit(manager)


class Thief(NaiveLRU):
    """A policy that changes the free slots."""

    name = "thief"

    def replace(self, keys: Keys, slots: Any, num_free: int, protected: Protected) -> None:
        super().replace(keys, slots, num_free, protected)
        slots[0] = 3


def test_a_policy_that_changes_free_slots_is_detected() -> None:
    manager = make(Thief)
    with pytest.raises(PolicyError, match="'thief' changed the free slots that it received"):
        manager.prepare_store(keys("ab"))
    assert manager.stats().free == 4
    manager.reset()  # the policy's own order could not be trusted
    audit(manager)
