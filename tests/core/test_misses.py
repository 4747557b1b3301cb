"""Reasons of missing blocks: the bounded record against a dictionary, and a manager's events."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload import OffloadingManager
from kvoffload.core import miss_reasons
from kvoffload.core.hints import Hints
from kvoffload.core.miss_record import EVICTED, NEVER_SEEN, REASON_OF, WAYS, MissRecord
from kvoffload.core.plans import ON_DEVICE_EVICTION
from kvoffload.core.policy import REFUSED
from kvoffload.core.protection import Protected
from kvoffload.core.slots import SlotArray
from kvoffload.core.tenants import Quota
from kvoffload.structures.keys import Keys
from kvoffload.testing.audit import audit
from support.naive.lru import NaiveLRU

KEYS = [bytes([7, 7, 7, number]) for number in range(40)]


def manager_of(capacity: int, **options: Any) -> OffloadingManager:
    return OffloadingManager(capacity, key_bytes=4, explain_misses=True, **options)


def reason(manager: OffloadingManager, key: bytes) -> str:
    """Return the reason of one block; empty if it can be loaded."""
    before = manager.stats().misses
    manager.count_misses(manager.begin_request("asks"), 0, [key])
    changed = [name for name, count in manager.stats().misses.items() if count != before.get(name, 0)]
    return changed[0] if changed else ""


def serve(manager: OffloadingManager, keys: list[bytes], *, success: bool = True) -> dict[str, int]:
    """Serve a request; return its misses by reason."""
    before = manager.stats().misses
    ctx = manager.begin_request("r")
    num_ready = manager.lookup(keys, ctx).num_ready
    missed = manager.count_misses(ctx, num_ready)
    assert missed == len(keys) - num_ready
    if num_ready:
        manager.complete_load(manager.prepare_load(keys[:num_ready], ctx))
    plan = manager.prepare_store(keys, ctx)
    if plan is not None:
        manager.complete_store(plan, success)
    manager.finish_request(ctx)
    audit(manager)
    after = manager.stats().misses
    return {name: n for name in after if (n := after[name] - before.get(name, 0))}


EVENTS = st.tuples(st.integers(EVICTED, NEVER_SEEN - 1), st.lists(st.sampled_from(KEYS), max_size=6))


@given(st.lists(EVENTS, max_size=30), st.sampled_from([1, 4, 30]))
def test_the_record_is_a_dictionary_that_forgets_the_oldest(events: Any, capacity: int) -> None:
    manager, twin = manager_of(capacity), dict[bytes, int]()
    for event, keys in events:
        manager.note_absent(keys, event)
        for key in keys:
            twin.pop(key, None)
            twin[key] = event
    audit(manager)
    latest = list(twin)[-WAYS:]
    for key in KEYS:
        recorded = reason(manager, key)
        if recorded == miss_reasons.UNKNOWN:
            assert key not in latest, "the last events are always known"
            assert len(twin) >= WAYS
        else:
            assert recorded == REASON_OF[twin.get(key, NEVER_SEEN)]


def test_a_record_has_8_bytes_for_each_slot_or_does_not_exist() -> None:
    for capacity in (1, 4, 5, 1000, 4096):
        record = MissRecord(capacity)
        assert 8 * capacity <= record.table.nbytes < 8 * capacity + 32
        assert record.table.ctypes.data % 64 == 0
    manager = OffloadingManager(8, key_bytes=4)
    assert manager.miss_record.num_entries == 0
    assert serve(manager, KEYS[:2]) == {"unknown": 2}
    manager.reset()
    manager.note_absent(KEYS, EVICTED)
    assert manager.miss_record.num_entered == 0


def test_evicted_behind_a_gap_and_in_flight() -> None:
    manager = manager_of(4)
    assert serve(manager, KEYS[:3]) == {"never_seen": 3}
    assert serve(manager, KEYS[3:6]) == {"never_seen": 3}
    assert serve(manager, KEYS[:3]) == {"evicted": 2}, "the head was kept"
    manager.discard(KEYS[:1])
    assert serve(manager, KEYS[:5]) == {"damaged": 1, "behind_a_gap": 3, "evicted": 1}
    ctx = manager.begin_request("stores")
    plan = manager.prepare_store(KEYS[10:12], ctx)
    assert plan is not None
    assert reason(manager, KEYS[10]) == "in_flight"
    manager.complete_store(plan)
    assert reason(manager, KEYS[10]) == ""


def test_blocks_that_were_not_stored() -> None:
    manager = manager_of(4, admission="reuse:2")
    assert serve(manager, KEYS[:2]) == {"never_seen": 2}
    assert serve(manager, KEYS[:2]) == {"not_admitted": 2}
    assert serve(manager, KEYS[:2]) == {}
    manager = manager_of(3)
    assert serve(manager, KEYS[:5]) == {"never_seen": 5}
    assert serve(manager, KEYS[:5]) == {"no_room": 2}
    full = manager.pin(KEYS[:3])
    assert serve(manager, KEYS[8:9]) == {"never_seen": 1}
    assert serve(manager, KEYS[8:9]) == {"no_room": 1}
    manager.unpin(full)
    assert serve(manager, KEYS[9:10], success=False) == {"never_seen": 1}
    assert reason(manager, KEYS[9]) == "failed_store"


class RefusesAll(NaiveLRU):
    """LRU that refuses blocks for which no slot is free."""

    name = "refuses-all"
    refuses = True

    def replace(self, keys: Keys, slots: SlotArray, num_free: int, protected: Protected) -> None:
        slots[num_free : len(keys)] = REFUSED
        self.slots += map(int, slots[:num_free])


def test_a_policy_that_refuses() -> None:
    manager = manager_of(4, policy=RefusesAll)
    serve(manager, KEYS[:3])
    assert serve(manager, KEYS[10:14]) == {"never_seen": 4}
    assert serve(manager, KEYS[10:14]) == {"refused": 3}
    assert manager.stats().refused == 6


def test_rule_policy_and_room_exclude_blocks_of_one_offer() -> None:
    """The first of five blocks is stored, and the rule refuses the last."""
    manager = manager_of(4, policy=RefusesAll, admission="reuse:2")
    for _ in range(2):
        serve(manager, KEYS[:3])
    pinned = manager.pin(KEYS[:2])
    serve(manager, KEYS[10:14])
    assert serve(manager, KEYS[10:15]) == {"not_admitted": 4, "never_seen": 1}
    names = [reason(manager, key) for key in KEYS[10:15]]
    assert names == ["", "refused", "no_room", "no_room", "not_admitted"]
    manager.unpin(pinned)


def test_a_rule_excludes_blocks_that_the_policy_must_accept() -> None:
    """The tenant's second offer is within its minimum: only the rule may refuse, although the policy has."""
    quotas = {"tenant": Quota(min_blocks=3)}
    manager = manager_of(4, policy=RefusesAll, admission="reuse:2", tenants=quotas)
    for _ in range(2):
        serve(manager, KEYS[:4])
    for _ in range(2):
        ctx = manager.begin_request("r", KEYS[10:14], hints=Hints(tenant="tenant"))
        plan = manager.prepare_store(KEYS[10:14], ctx)
        assert plan is not None
        assert plan.num_refused == 4
    assert reason(manager, KEYS[10]) == "refused"
    plan = manager.prepare_store(KEYS[14:16], ctx)
    assert plan is not None
    assert plan.num_refused == 2
    assert [reason(manager, key) for key in KEYS[14:16]] == ["not_admitted"] * 2


def test_a_reset_is_the_reason_of_every_block_that_it_drops() -> None:
    manager = manager_of(4)
    serve(manager, KEYS[:4])
    serve(manager, KEYS[4:6])
    ctx = manager.begin_request("stores")
    plan = manager.prepare_store(KEYS[8:9], ctx)
    assert plan is not None
    evicted = [key for key in KEYS[:6] if not manager.contains([key])[0]]
    manager.reset()
    manager.complete_store(plan)
    for key in KEYS[:6]:
        assert reason(manager, key) == ("evicted" if key in evicted else "reset")
    assert reason(manager, KEYS[8]) == "reset"
    assert reason(manager, KEYS[9]) == "never_seen"


@pytest.mark.parametrize("start", [0, 3, 40, 61])
def test_long_runs_are_sampled_and_their_ends_are_exact(start: int) -> None:
    """Only every eighth block of a long run with one reason is looked up."""
    manager = manager_of(400)
    path = [bytes([9, 9, number // 250, number % 250]) for number in range(300)]
    manager.note_absent(path[start : start + 100], EVICTED)
    plan = manager.prepare_store(path[200:230])
    assert plan is not None
    manager.complete_store(plan)
    ctx = manager.begin_request("r", path)
    assert manager.count_misses(ctx, 0) == 300
    reasons = manager.stats().misses
    assert reasons == {"evicted": 100, "behind_a_gap": 30, "never_seen": 170}
    ready = manager.prepare_store(path[:10])
    assert ready is not None
    manager.complete_store(ready)
    assert manager.count_misses(ctx, 5) == 290, "leading ready blocks do not count"


def test_blocks_that_the_device_evicted_without_an_offer() -> None:
    manager = manager_of(4, store=ON_DEVICE_EVICTION)
    manager.keep(KEYS[:2])
    assert reason(manager, KEYS[0]) == "not_offered"
    plan = manager.prepare_store(KEYS[:1])
    assert plan is not None
    manager.complete_store(plan)
    assert reason(manager, KEYS[0]) == ""
    audit(manager)


@pytest.mark.parametrize("store", ["on-compute", "on-device-eviction"])
@given(data=st.data())
def test_the_last_event_of_each_block(store: str, data: st.DataObject) -> None:
    """Reasons equal the last event of each block in the manager's own results, while the record has room."""
    manager, last = manager_of(5, store=store, admission=data.draw(st.sampled_from(["all", "reuse:2"]))), {}
    universe = KEYS[:12]
    for _ in range(data.draw(st.integers(1, 12))):
        keys = data.draw(st.lists(st.sampled_from(universe), min_size=1, max_size=5, unique=True))
        event = data.draw(st.sampled_from(["store", "store", "store", "fail", "discard", "reset"]))
        if event == "reset":
            last |= {key: "reset" for key in universe if manager.contains([key])[0]}
            manager.reset()
        elif event == "discard":
            last |= {key: "damaged" for key in keys if manager.contains([key])[0]}
            manager.discard(keys)
        else:
            ctx = manager.begin_request("r", keys)
            plan = manager.prepare_store(keys, ctx)
            if plan is None:
                last |= {key: "no_room" for key in keys if not manager.contains([key])[0]}
            else:
                missing = [keys[row] for row in plan.missing_rows.tolist()]
                dropped = missing[len(plan) :][: plan.num_dropped]
                left_out = missing[len(plan) :][plan.num_dropped :]
                last |= dict.fromkeys(plan.evicted, "evicted") | dict.fromkeys(dropped, "no_room")
                last |= dict.fromkeys(left_out, "not_admitted")
                if event == "fail":
                    last |= dict.fromkeys(plan.keys, "failed_store")
                manager.complete_store(plan, event != "fail")
            manager.finish_request(ctx)
        audit(manager)
        for key in universe:
            expected = "" if manager.contains([key])[0] else last.get(key, "never_seen")
            recorded = reason(manager, key)
            assert recorded == expected or (recorded == "unknown" and len(last) >= WAYS)
