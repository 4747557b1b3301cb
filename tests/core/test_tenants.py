"""Tenants: quotas limit the victims of a store, under every policy. See also `support.tenant_machine`."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload.core.hints import Hints
from kvoffload.core.manager import OffloadingManager
from kvoffload.core.plans import ON_DEVICE_EVICTION
from kvoffload.core.policy import POLICIES
from kvoffload.core.protection import Protected
from kvoffload.core.request import RequestContext
from kvoffload.core.tenants import (
    LEARNT_ALWAYS,
    LEARNT_PART,
    MAX_TENANTS,
    UNLIMITED,
    UNSURE,
    Quota,
    Tenants,
    may_learn,
    room_of_store,
)
from kvoffload.errors import ConfigError, PolicyError
from kvoffload.structures.jit import kernel
from kvoffload.testing.audit import audit, snapshot
from support.letters import HIT, MISS, keys, make, states, store, text
from support.naive.lru import NaiveLRU
from support.naive.tenants import Blocks
from support.naive.tenants import room_of_store as naive_room
from support.small_hazard import HazardOfFewKeys, SmallHazard

BUILTIN = [name for name in POLICIES.names() if ":" not in name]
AB = {"a": Quota(4), "b": Quota(2, 6)}


def serve(manager: OffloadingManager, tenant: str, letters: str) -> str:
    """Run a request of a tenant; return the evicted blocks."""
    ctx = manager.begin_request(tenant, keys(letters), hints=Hints(tenant=tenant))
    ready = manager.lookup(keys(letters), ctx).num_ready
    manager.complete_load(manager.prepare_load(keys(letters)[:ready], ctx))
    plan = manager.prepare_store(keys(letters), ctx)
    if plan is not None:
        manager.complete_store(plan)
    manager.finish_request(ctx)
    audit(manager)
    return "".join(chr(key[0]) for key in plan.evicted) if plan is not None else ""


def held(manager: OffloadingManager) -> dict[str, int]:
    return {name: tenant.held for name, tenant in manager.stats().tenants.items()}


def scan(manager: OffloadingManager, tenant: str, count: int = 40) -> None:
    """Store new blocks, two for each request."""
    for number in range(count):
        ctx = manager.begin_request(tenant, hints=Hints(tenant=tenant))
        plan = manager.prepare_store([bytes([128 + 2 * number % 127]), bytes([129 + 2 * number % 127])], ctx)
        if plan is not None:
            manager.complete_store(plan)
        manager.finish_request(ctx)
        audit(manager)


# ---- under every policy


@pytest.mark.parametrize("policy", BUILTIN)
def test_a_scan_leaves_the_minimum_of_another_tenant(policy: str) -> None:
    manager = make(policy, 8, tenants=AB)
    serve(manager, "a", "abcd")
    scan(manager, "b")
    assert states(manager, "abcd") == [HIT] * 4
    assert held(manager) == {"a": 4, "b": 4, "other": 0}


@pytest.mark.parametrize("policy", BUILTIN)
def test_without_quotas_the_same_scan_evicts_the_blocks(policy: str) -> None:
    manager = make(policy, 8)
    serve(manager, "a", "abcd")
    scan(manager, "b")
    if policy != "hazard":  # hazard may refuse the scan
        assert MISS in states(manager, "abcd")


@pytest.mark.parametrize("policy", BUILTIN)
def test_idle_memory_is_borrowed_and_returned(policy: str) -> None:
    manager = make(policy, 8, tenants=AB)
    scan(manager, "b")
    assert held(manager)["b"] == 6, "the maximum"
    for number in range(4):
        serve(manager, "a", "abcdefgh"[number])
    assert held(manager)["a"] == 4, f"{policy} did not return borrowed blocks"


@pytest.mark.parametrize("policy", BUILTIN)
def test_a_tenant_at_its_maximum_evicts_own_blocks_while_slots_are_free(policy: str) -> None:
    manager = make(policy, 8, tenants={"b": Quota(0, 2)})
    serve(manager, "b", "pq")
    assert serve(manager, "b", "r") in ("p", "q", "")
    assert held(manager)["b"] == 2
    assert manager.stats().free == 6


# ---- which blocks leave


def test_a_tenant_below_its_minimum_takes_blocks_of_others_first() -> None:
    manager = make("lru", 6, tenants={"a": Quota(4)})
    serve(manager, "a", "ab")
    serve(manager, "b", "pqrs")
    assert serve(manager, "a", "c") == "s", "its own block b is colder"
    assert serve(manager, "a", "d") == "r"
    assert serve(manager, "a", "e") == "b", "at its minimum, a evicts the coldest block of all"


def test_a_surplus_must_cover_the_whole_store() -> None:
    manager = make("lru", 6, tenants={"a": Quota(3), "b": Quota(2)})
    serve(manager, "a", "abcd")
    serve(manager, "b", "pq")
    assert serve(manager, "b", "rs") == "qp", "a could lose only one block"
    assert serve(manager, "b", "t") == "d"


def test_without_room_the_head_of_a_store_is_kept() -> None:
    manager = make("lru", 4, tenants={"a": Quota(2)})
    serve(manager, "a", "abc")
    ctx = manager.begin_request("b", hints=Hints(tenant="b"))
    plan = manager.prepare_store(keys("pqrst"), ctx)
    assert plan is not None
    assert (text(plan.keys), plan.num_dropped) == ("pq", 3)
    manager.complete_store(plan)
    before = snapshot(manager.policy.order())
    pinned = manager.pin(keys("pq"))
    assert manager.prepare_store(keys("x"), ctx) is None, "a has its minimum, and b's blocks are pinned"
    assert snapshot(manager.policy.order()) == before
    manager.unpin(pinned)


def test_a_shared_block_belongs_to_its_first_storer() -> None:
    manager = make("lru", 4, tenants={"a": Quota(0), "b": Quota(0)})
    serve(manager, "a", "x")
    serve(manager, "b", "xy")
    assert held(manager) == {"a": 1, "b": 1, "other": 0}
    assert manager.stats().tenants["b"].loaded == 1


def test_expected_blocks_leave_last_among_the_blocks_that_may_leave() -> None:
    manager = make("lru", 6, tenants={"a": Quota(2)})
    serve(manager, "a", "ab")
    serve(manager, "b", "pqrs")
    manager.expect(manager.begin_request("waits", keys("srq")))
    assert serve(manager, "b", "t") == "p"
    assert serve(manager, "b", "u") == "t"
    assert serve(manager, "b", "vw") == "sr", "too few other blocks may leave"
    assert states(manager, "ab") == [HIT] * 2


def test_duplicates_of_a_protected_tenant_keep_their_slots() -> None:
    manager = make("lru", 4, store=ON_DEVICE_EVICTION, tenants={"a": Quota(2)})
    store(manager, "ab", manager.begin_request("a", hints=Hints(tenant="a")))
    store(manager, "pq", manager.begin_request("b", hints=Hints(tenant="b")))
    ctx = manager.begin_request("a", hints=Hints(tenant="a"))
    manager.complete_load(manager.prepare_load(keys("ab"), ctx))
    plan = store(manager, "r", manager.begin_request("b", hints=Hints(tenant="b")))
    assert text(plan.evicted) in ("p", "q")
    ctx = manager.begin_request("b", hints=Hints(tenant="b"))
    manager.complete_load(manager.prepare_load(keys("r"), ctx))
    manager.finish_request(ctx)
    plan = store(manager, "s", manager.begin_request("b", hints=Hints(tenant="b")))
    assert text(plan.evicted) == "r", "a duplicate of the tenant itself"


def test_a_policy_that_ignores_quotas_is_caught() -> None:
    class Ignores(NaiveLRU):
        name = "ignores-quotas"

        def victim(self, key: bytes, protected: Protected) -> int:
            slot = self.order()[0]
            self.forget(slot)
            return slot

    manager = make(Ignores, 4, tenants={"a": Quota(2)})
    serve(manager, "a", "ab")
    serve(manager, "b", "pq")
    with pytest.raises(PolicyError, match="protected"):
        serve(manager, "b", "r")


# ---- quotas


def test_quotas_change_at_run_time() -> None:
    manager = make("lru", 4)
    serve(manager, "a", "ab")
    assert manager.stats().tenants == {}
    manager.set_tenants({"a": Quota(2)})
    serve(manager, "a", "cd")
    assert held(manager) == {"a": 2, "other": 2}, "blocks stored before the change belong to other"
    manager.set_tenants({"a": Quota(0, 1), "b": Quota(3)})
    assert held(manager)["a"] == 2, "nothing leaves at once"
    assert serve(manager, "b", "pqr")[-1:] in "cd"
    assert held(manager) == {"a": 1, "b": 3, "other": 0}
    manager.set_tenants({})
    assert held(manager) == {"other": 4}
    assert serve(manager, "b", "s") == "c"
    manager.reset()
    audit(manager)
    assert held(manager) == {"other": 0}


def test_a_removed_minimum_protects_no_blocks() -> None:
    manager = make("lru", 4)
    manager.set_tenants({"a": Quota(2)})
    serve(manager, "a", "ab")
    manager.set_tenants({"b": Quota(1)})
    serve(manager, "c", "cdef")
    assert states(manager, "abcdef") == [MISS, MISS, HIT, HIT, HIT, HIT]


@pytest.mark.parametrize(
    ("quotas", "message"),
    [
        ({"a": Quota(3), "b": Quota(2)}, "add up"),
        ({"a": Quota(-1)}, "tenants.a.min"),
        ({"a": Quota(2, 1)}, "tenants.a.max"),
        ({"a": Quota(0, 0)}, "tenants.a.max"),
        ({"a": Quota(float("nan"))}, "tenants.a.min"),
        ({"a": Quota("1")}, "tenants.a.min"),
        ({"a": Quota(1.5)}, "tenants.a.min"),
        ({"a": Quota(1, 2.5)}, "tenants.a.max"),
        ({"a": 1}, "tenants.a.*allowed: a Quota"),
        ({1: Quota(1)}, "needs a name"),
        ({"": Quota(1)}, "needs a name"),
        ({str(number): Quota() for number in range(MAX_TENANTS)}, "at most 62"),
    ],
)
def test_wrong_quotas_change_nothing(quotas: dict[str, Quota], message: str) -> None:
    manager = make("lru", 4, tenants={"a": Quota(1)})
    before = snapshot(manager)
    with pytest.raises(ConfigError, match=message):
        manager.set_tenants(quotas)
    assert snapshot(manager) == before
    with pytest.raises(ConfigError, match=message):
        make("lru", 4, tenants=quotas)


def test_integers_of_numpy_are_quotas() -> None:
    manager = make("lru", 4, tenants={"a": Quota(np.int64(1), np.int32(3))})
    assert manager.tenants == {"a": Quota(1, 3)}
    assert [
        type(number) for number in (manager.tenants["a"].min_blocks, manager.tenants["a"].max_blocks)
    ] == [int] * 2


def test_names_keep_their_numbers() -> None:
    manager = make("lru", 8, tenants={"a": Quota(1), "b": Quota(1)})
    old = manager.begin_request("b", hints=Hints(tenant="b"))
    manager.set_tenants({"c": Quota(1), "b": Quota(1)})
    store(manager, "x", old)
    serve(manager, "a", "y")
    serve(manager, "c", "z")
    assert held(manager) == {"c": 1, "b": 1, "other": 1}


# ---- the room of a store


@kernel
def _room(tenants: Tenants, owner: int, wanted: int, num_free: int, margin: int) -> int:
    return room_of_store(tenants, owner, wanted, num_free, margin)


counts = st.tuples(st.integers(0, 30), st.integers(0, 30), st.integers(0, 30))
limits = st.tuples(st.integers(0, 40), st.none() | st.integers(1, 60)).filter(
    lambda limit: limit[1] is None or limit[0] <= limit[1]  # `check_quotas` refuses other limits
)


@given(
    st.lists(st.tuples(counts, limits), min_size=1, max_size=5),
    st.integers(0, 40),
    st.integers(0, 10),
    st.integers(0, 4),
    st.sets(st.integers(0, 4), max_size=2),
)
def test_the_room_equals_the_naive_twins(
    rows: list[Any], wanted: int, num_free: int, storing: int, ended: set[int]
) -> None:
    tenants, blocks, quotas = Tenants(0), {}, {}
    names = [str(number) for number in range(len(rows))]
    for number, (numbers, (low, high)) in enumerate(rows):
        free_to_go, evictable, owned = sorted(numbers)
        blocks[names[number]] = Blocks(owned, evictable, free_to_go)
        quotas[names[number]] = Quota(low, high)
        tenants.held[number], tenants.evictable[number] = owned, evictable
        tenants.on_path[number] = evictable - free_to_go
        tenants.min[number], tenants.max[number] = low, UNLIMITED if high is None else high
    tenants.num_tenants, owner = len(rows), storing % len(rows)
    ended = {number for number in ended if number < len(rows) and number != owner}
    tenants.orphans = sum(1 << number for number in ended)
    room = _room(tenants.memory, owner, wanted, num_free, 0)
    orphans = {names[number] for number in ended}
    expected = naive_room(blocks, quotas, names[owner], wanted, num_free, orphans)
    assert (room, tenants.usable_free) == (expected.room, expected.usable_free)
    if room > tenants.usable_free:
        givers = {name for number, name in enumerate(names) if tenants.givers >> number & 1}
        assert givers == expected.givers
    on_path = tenants.on_path.copy()
    givers, margin = tenants.givers, int(on_path.sum())
    tenants.on_path.fill(0)
    if margin and (sure := _room(tenants.memory, owner, wanted, num_free, margin)) != UNSURE:
        assert sure == room, "an answer without the path differs from the answer with it"
        assert room <= tenants.usable_free or tenants.givers == givers


# ---- learning of policies


@kernel
def _may_learn(tenants: Tenants, owner: int, num_missing: int, num_stored: int, capacity: int) -> bool:
    return may_learn(tenants, owner, num_missing, num_stored, capacity)


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 64)), max_size=200), st.integers(0, 400))
def test_a_policy_learns_in_proportion_from_a_tenant_beyond_its_minimum(
    stores: list[tuple[bool, int]], held: int
) -> None:
    capacity, offered, learnt = 1000, 0, 0
    tenants = Tenants(0)
    tenants.num_tenants, tenants.held[1], tenants.min[1] = 2, held, held // 2
    for is_own, count in stores:
        offered += count
        may = _may_learn(tenants.memory, int(is_own), count, count, capacity)
        learnt += count if is_own and may else 0
        share = LEARNT_ALWAYS + LEARNT_PART * held / capacity
        assert learnt <= share * offered + 1e-6
    last = sum(count for is_own, count in stores if is_own)
    if stores and last * capacity <= held * offered and all(is_own for is_own, _ in stores):
        assert learnt == last, "a tenant with the whole cache"


def test_a_policy_learns_from_stores_that_evict_nothing_or_are_within_the_minimum() -> None:
    tenants = Tenants(0)
    tenants.num_tenants, tenants.held[1], tenants.min[1] = 2, 10, 30
    for _ in range(9):
        assert _may_learn(tenants.memory, 1, 20, 20, 1000)
    assert not _may_learn(tenants.memory, 1, 21, 21, 1000)
    tenants.usable_free = 21
    assert _may_learn(tenants.memory, 1, 21, 21, 1000)


def test_a_scan_leaves_few_ghosts_and_few_samples() -> None:
    learnt = []
    for policy, number in (("arc", "b1_keys"), (HazardOfFewKeys, "references")):
        quotas = {"other": Quota(990), "scan": Quota(0, 10)}
        manager = OffloadingManager(1000, key_bytes=8, policy=policy, tenants=quotas)
        serve_numbers(manager, "", range(990))
        serve_numbers(
            manager, "", range(500)
        )  # into ARC's T2, because a T1 that fills the cache has no ghosts
        before = manager.stats().policy[number]
        for first in range(10_000, 15_000, 10):
            serve_numbers(manager, "scan", range(first, first + 10))
        learnt.append(manager.stats().policy[number] - before)
        audit(manager)
    share = LEARNT_ALWAYS + LEARNT_PART * 10 / 1000
    assert all(0 < number <= share * 6_000 + 10 for number in learnt), learnt


# ---- searches


def skipping(policy: str, num_protected: int = 3000) -> OffloadingManager:
    """Create a manager whose coldest blocks are protected, after a short scan."""
    manager = OffloadingManager(
        num_protected + 200, key_bytes=8, policy=policy, tenants={"a": Quota(num_protected)}
    )
    serve_numbers(manager, "a", range(num_protected))
    for start in range(10_000, 12_000, 20):
        serve_numbers(manager, "b", range(start, start + 20))
    return manager


def serve_numbers(manager: OffloadingManager, tenant: str, numbers: range) -> RequestContext:
    batch = [number.to_bytes(8, "little") for number in numbers]
    ctx = manager.begin_request(tenant, batch, hints=Hints(tenant=tenant))
    plan = manager.prepare_store(batch, ctx)
    assert plan is not None
    manager.complete_store(plan)
    manager.finish_request(ctx)
    return ctx


@pytest.mark.parametrize("policy", [SmallHazard if name == "hazard" else name for name in POLICIES.names()])
def test_remembered_places_change_no_decision(policy: Any) -> None:
    """Compares remembering every skipped block with remembering none; blocks are used between the stores."""
    for seed in range(4):
        orders = []
        for stride in (1, 1 << 40):
            rng = random.Random(seed)
            quotas = {"a": Quota(20, 30), "b": Quota(5, 30)}
            manager = OffloadingManager(40, key_bytes=8, policy=policy, tenants=quotas)
            manager.store_mode.cache.tenants.stride = stride
            log = []
            for _ in range(300):
                tenant, first = rng.choice("aab"), rng.randrange(60)
                numbers = range(
                    first + 100 * (tenant == "b"), first + 100 * (tenant == "b") + rng.randrange(1, 6)
                )
                serve_numbers(manager, tenant, numbers)
                log.append(manager.policy.order())
            orders.append(log)
        assert orders[0] == orders[1], f"seed {seed}"


def test_counters_do_not_jump_when_quotas_change() -> None:
    manager = make("lru", 4)
    manager.set_tenants({"a": Quota(2)})
    serve(manager, "a", "abcd")
    serve(manager, "a", "efgh")
    before = manager.stats().tenants
    assert before["a"].evicted > 0
    manager.set_tenants({})
    assert manager.stats().tenants["other"].evicted == before["other"].evicted
    assert manager.stats().tenants["other"].held == 4
    manager.set_tenants({"a": Quota(2, 1 << 62)})
    assert manager.stats().tenants["a"].evicted == before["a"].evicted


def test_the_end_of_a_request_does_not_change_its_tenant() -> None:
    manager = make("lru", 4)
    before = manager.begin_request("before the quotas", hints=Hints(tenant="a"))
    manager.set_tenants({"a": Quota(), "b": Quota()})
    store(manager, "x")
    moved = manager.begin_request("moved", hints=Hints(tenant="a"))
    manager.set_tenant(moved, "b")
    loads = [manager.prepare_load(keys("x"), ctx) for ctx in (before, moved)]
    for load in loads:
        manager.finish_request(load.request, hints=Hints("stop"))
        manager.complete_load(load)
    loaded = {name: tenant.loaded for name, tenant in manager.stats().tenants.items()}
    assert loaded == {"a": 0, "b": 1, "other": 1}


@pytest.mark.parametrize("policy", ["lru", "fifo"])
def test_a_search_begins_behind_protected_blocks(policy: str) -> None:
    manager = skipping(policy)
    tenants = manager.store_mode.cache.tenants
    used = np.flatnonzero(tenants.marks[:, 2])
    assert len(used) == 1
    row = tenants.marks[used[0]]
    place = int(row[3 + 2 * (row[2] - 1)])
    order = manager.policy.order()
    assert order is not None
    assert 3000 - tenants.stride <= order.index(place) + 1 <= 3000
    # Using the block at a remembered place invalidates the place, not the quota.
    key = manager.index.key_at(place)
    ctx = manager.begin_request("a", [key], hints=Hints(tenant="a"))
    manager.touch([key], ctx)
    manager.finish_request(ctx)
    serve_numbers(manager, "b", range(20_000, 20_050))
    assert held(manager) == {"a": 3000, "other": 200}
