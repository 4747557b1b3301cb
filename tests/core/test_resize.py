"""Resizes of the slots in use: evicted blocks, their order, and the state that remains."""

from __future__ import annotations

import itertools
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test

from kvoffload.core.hints import Hints
from kvoffload.core.manager import OffloadingManager
from kvoffload.core.plans import STORES
from kvoffload.core.policy import POLICIES
from kvoffload.core.tenants import Quota
from kvoffload.core.unseen import unseen_keys
from kvoffload.errors import ConfigError
from kvoffload.policies.hazard.lifetimes import ENTERING
from kvoffload.structures.index import words_with_hash
from kvoffload.testing.audit import audit
from kvoffload.testing.scripts import Step, key_of, play, random_script, scripts
from kvoffload.testing.state_machine import manager_machine
from support.naive.arc import NaiveARC
from support.naive.fifo import NaiveFIFO
from support.naive.lru import NaiveLRU
from support.policy_changes import with_policy_changes
from support.resizes import with_resizes
from support.small_hazard import SmallHazard

OTHERS: list[Any] = [SmallHazard if name == "hazard" else name for name in POLICIES.names()]
KEYS = [key_of(number, 8) for number in range(12)]


def manager_of(policy: Any = "lru", capacity: int = 8, **options: Any) -> OffloadingManager:
    return OffloadingManager(capacity, key_bytes=8, policy=policy, **options)


def full(policy: Any = "lru", **options: Any) -> OffloadingManager:
    """Return a full manager of eight blocks; block 0 is the warmest."""
    manager = manager_of(policy, **options)
    manager.complete_store(manager.prepare_store(KEYS[:8]))
    return manager


def resize(manager: OffloadingManager, num_blocks: int) -> int:
    """Resize; return the number of calls."""
    manager.begin_resize(num_blocks)
    num_calls = 1
    while manager.advance_resize(2):
        num_calls += 1
        assert num_calls < 100
        audit(manager)
    audit(manager)
    return num_calls


def resident(manager: OffloadingManager) -> list[int]:
    return [number for number, key in enumerate(KEYS) if manager.contains([key])[0]]


def test_the_coldest_blocks_leave_and_new_blocks_have_less_room() -> None:
    manager = full(enable_events=True)
    manager.take_events()
    assert resize(manager, 3) == 3
    assert resident(manager) == [0, 1, 2]
    removed = [key for event in manager.take_events() for key in event.keys if event.removed]
    assert sorted(removed) == KEYS[3:8]
    stats = manager.stats()
    assert (stats.capacity, stats.evicted, stats.stored, stats.store_failed, stats.dropped) == (3, 5, 8, 0, 0)
    manager.complete_store(manager.prepare_store(KEYS[8:12]))
    assert resident(manager) == [8, 9, 10]
    audit(manager)


def test_a_larger_part_is_free_at_once() -> None:
    manager = full()
    resize(manager, 2)
    assert resize(manager, 7) == 1
    assert (manager.usable_blocks, manager.counters().free, resident(manager)) == (7, 5, [0, 1])
    manager.complete_store(manager.prepare_store(KEYS[8:12]))
    assert resident(manager) == [0, 1, 8, 9, 10, 11]
    assert manager.counters().evicted == 6


def test_free_slots_go_first() -> None:
    manager = manager_of()
    manager.complete_store(manager.prepare_store(KEYS[:3]))
    assert resize(manager, 3) == 1
    assert (resident(manager), manager.counters().evicted) == ([0, 1, 2], 0)


def test_a_resize_can_be_replaced_by_another() -> None:
    manager = full()
    manager.begin_resize(2)
    assert manager.advance_resize(3)
    assert manager.usable_blocks == 5
    resize(manager, 6)
    assert resident(manager) == [0, 1, 2, 3, 4]
    manager.begin_resize(8)
    manager.begin_resize(6)
    assert not manager.advance_resize()


@pytest.mark.parametrize("policy", ["lru", NaiveLRU])
def test_pinned_blocks_and_blocks_in_flight_stay_and_are_waited_for(policy: Any) -> None:
    manager = full(policy)
    plan = manager.pin(KEYS[2:8])
    store = manager.prepare_store(KEYS[8:9])
    manager.begin_resize(3)
    for _ in range(5):
        assert manager.advance_resize()
        audit(manager)
    assert resident(manager) == [2, 3, 4, 5, 6, 7, 8]
    assert manager.usable_blocks == 7
    manager.complete_store(store)
    assert manager.advance_resize()
    assert manager.usable_blocks == 6
    manager.unpin(plan)
    while manager.advance_resize():
        audit(manager)
    assert manager.usable_blocks == 3


def test_blocks_that_requests_wait_for_leave_last() -> None:
    manager = full()
    ctx = manager.begin_request("waits", KEYS[6:8])
    manager.expect(ctx)
    resize(manager, 3)
    assert resident(manager) == [0, 6, 7]
    resize(manager, 1)
    assert len(resident(manager)) == 1


@pytest.mark.parametrize("drop_in_flight", [False, True])
@pytest.mark.parametrize("is_complete", [False, True])
def test_a_reset_keeps_the_size(drop_in_flight: bool, is_complete: bool) -> None:
    manager = full()
    plan = manager.pin(KEYS[:1])
    manager.begin_resize(3)
    while manager.advance_resize(2) and is_complete:
        pass
    manager.reset(drop_in_flight=drop_in_flight)
    audit(manager)
    while manager.advance_resize(1):
        audit(manager)
    manager.unpin(plan)
    audit(manager)
    assert (manager.usable_blocks, manager.counters().free) == (3, 3)
    manager.complete_store(manager.prepare_store(KEYS[:8]))
    assert resident(manager) == [0, 1, 2]
    resize(manager, 8)
    assert manager.counters().free == 5


def test_minimums_of_tenants_are_kept() -> None:
    """Tenant a keeps its minimum although its blocks are the coldest; too small a pool is refused."""
    manager = manager_of(tenants={"a": Quota(3)})
    for name, keys in (("a", KEYS[:4]), ("b", KEYS[4:8])):
        ctx = manager.begin_request(name, keys, hints=Hints(tenant=name))
        manager.complete_store(manager.prepare_store(keys, ctx))
        manager.finish_request(ctx)
    with pytest.raises(ConfigError, match="minimums add up to more than the capacity of 2"):
        manager.begin_resize(2)
    resize(manager, 3)
    assert resident(manager) == [0, 1, 2]
    assert manager.stats().tenants["a"].held == 3
    with pytest.raises(ConfigError, match="capacity of 3"):
        manager.set_tenants({"a": Quota(4)})


@pytest.mark.parametrize("capacity", [8, 64])
def test_a_tenant_with_all_usable_slots_is_always_observed(capacity: int) -> None:
    manager = manager_of(capacity=capacity, tenants={"a": Quota(0)})
    resize(manager, 8)
    for number in range(50):
        keys = [key_of(4 * number + i, 8) for i in range(4)]
        ctx = manager.begin_request("", keys)
        manager.complete_store(manager.prepare_store(keys, ctx))
        assert not ctx.is_quiet, f"request {number}"
        manager.finish_request(ctx)


def test_hazard_compares_itself_with_an_lru_of_the_size_in_use() -> None:
    def sizes(*policies: Any) -> list[tuple[int, float]]:
        return [(each.history.shadow.capacity_blocks, each.lifetimes.entering) for each in policies]

    def size(blocks: int) -> tuple[int, float]:
        return blocks, ENTERING * blocks

    manager = manager_of(SmallHazard)
    old, change = manager.policy, manager.prepare_policy_change(SmallHazard)
    resize(manager, 3)
    manager.reset()
    assert sizes(old, change.new) == [size(3), size(8)]
    manager.complete_store(manager.prepare_store(KEYS[:3]))
    manager.begin_policy_change(change)
    assert sizes(old, change.new) == [size(3), size(3)]
    resize(manager, 6)
    assert sizes(old, change.new) == [size(6), size(6)]
    while manager.advance_policy_change():
        pass
    resize(manager, 2)
    assert sizes(old, manager.policy) == [size(6), size(2)]


def test_hazard_does_not_become_lru_in_a_smaller_pool() -> None:
    """An LRU of the whole pool would hold all sessions, so no policy in the used part could match it."""
    random, num_late, hits = Random(3), 0, 0
    manager = manager_of("hazard", 512)
    resize(manager, 64)
    for number in range(1500):
        session = random.randrange(25) if number % 4 else 1000 + number
        keys = [(8 * session + i).to_bytes(8, "little") for i in range(8)]
        ctx = manager.begin_request("", keys)
        if number >= 750:
            hits += manager.lookup(keys, ctx).num_ready
            num_late += manager.policy.is_lru
        plan = manager.prepare_store(keys, ctx)
        if plan is not None:
            manager.complete_store(plan)
        manager.finish_request(ctx)
    assert num_late == 0, f"LRU decided {num_late} of 750 requests; {hits} of 6000 blocks were hits"


@pytest.mark.parametrize("num_blocks", [0, -1, 9])
def test_a_size_beyond_the_pool_is_refused(num_blocks: int) -> None:
    manager = full()
    with pytest.raises(ConfigError, match="num_blocks"):
        manager.begin_resize(num_blocks)
    assert not manager.advance_resize()
    assert manager.usable_blocks == 8


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("policy", OTHERS)
def test_every_policy(policy: Any, store: str) -> None:
    for seed, size in itertools.product(range(2), (1, 5)):
        manager = manager_of(policy, 12, store=store)
        play(manager, random_script(seed, num_steps=80, settle=True))
        resize(manager, size)
        play(manager, random_script(seed + 9, num_steps=60, settle=True), audit)
        resize(manager, 12)
        play(manager, random_script(seed + 5, num_steps=60, settle=True), audit)


@pytest.mark.parametrize(
    ("policy", "naive"), [("lru", NaiveLRU), ("fifo", NaiveFIFO), ("arc", NaiveARC)], ids=str
)
@given(
    scripts(max_steps=60),
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 30)), max_size=3),
    st.sampled_from(STORES),
)
@settings(max_examples=settings().max_examples // 3)
def test_compiled_and_naive_policies_evict_the_same_blocks(
    policy: str, naive: Any, script: list[Step], sizes: list[tuple[int, int]], store: str
) -> None:
    def logged(made: Any) -> Any:
        manager, step, at = manager_of(made, 9, store=store), 0, {s: n for n, s in sizes}

        def after(manager: OffloadingManager) -> Any:
            nonlocal step
            step += 1
            if step in at:
                manager.begin_resize(at[step])
            goes_on = manager.advance_resize(2)
            return goes_on, manager.counters(), manager.policy.order()

        return play(manager, script, after)

    assert logged(policy) == logged(naive)


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("policy", ["lru", "s3fifo", "gdsf", SmallHazard, NaiveLRU])
def test_the_state_machine_with_resizes(policy: Any, store: str) -> None:
    machine = manager_machine(
        policy, store=store, key_bytes=8, max_examples=max(2, settings().max_examples // 5)
    )
    run_state_machine_as_test(with_resizes(machine), settings=machine.TestCase.settings)


def test_the_state_machine_with_resizes_and_policy_changes() -> None:
    machine = manager_machine("lru", key_bytes=8, max_examples=max(2, settings().max_examples // 5))
    changing = with_policy_changes(with_resizes(machine), ("lru", "gdsf", "s3fifo"))
    run_state_machine_as_test(changing, settings=machine.TestCase.settings)


@pytest.mark.parametrize("key_bytes", [8, 32, 36])
def test_unseen_keys_have_the_same_hashes_at_any_length(key_bytes: int) -> None:
    """In a replay of recorded hashes, keys have the same hashes as in the recorded manager."""
    from kvoffload.core.request import HASH, Path, RequestContext

    def hashes(length: int) -> list[int]:
        ctx = RequestContext("", length)
        ctx.add(unseen_keys(length))
        row_hashes: list[int] = Path.over(ctx.memory).records[: ctx.length, HASH].tolist()
        return row_hashes

    assert hashes(key_bytes) == hashes(8)
    assert len({*unseen_keys(key_bytes)}) == 512
    assert words_with_hash(unseen_keys(8).words[:1, 0], 3).shape == (1, 3)
