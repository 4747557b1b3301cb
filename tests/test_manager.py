"""The eleven invariants of the manager (docs/concepts.md), one or more tests each, and what a bad policy gets."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvoffload.admission import ReuseAdmission
from kvoffload.core.index import Index
from kvoffload.core.keys import Keys
from kvoffload.core.manager import OffloadingManager
from kvoffload.core.protection import Protected
from kvoffload.core.request import RequestContext
from kvoffload.errors import ConfigError, MisuseError, PolicyError
from kvoffload.testing.audit import audit, snapshot
from kvoffload.testing.naive import NaiveARC, NaiveLRU
from kvoffload.types import LoadPlan, LookupResult, StorePlan

MISS, HIT, PENDING = LookupResult.MISS, LookupResult.HIT, LookupResult.HIT_PENDING
POLICIES: list[Any] = ["lru", "arc", NaiveLRU, NaiveARC]


@pytest.fixture(params=POLICIES)
def manager(request: pytest.FixtureRequest) -> OffloadingManager:
    return make(request.param)


def make(policy: Any = "lru", capacity_blocks: int = 4, **options: Any) -> OffloadingManager:
    return OffloadingManager(capacity_blocks, key_bytes=1, policy=policy, enable_events=True, **options)


def keys(letters: str) -> list[bytes]:
    return [letter.encode() for letter in letters]


def text(found: Any) -> str:
    return b"".join(found).decode()


def begin_store(manager: OffloadingManager, letters: str, ctx: RequestContext | None = None) -> StorePlan:
    plan = manager.prepare_store(keys(letters), ctx)
    assert plan is not None
    audit(manager)
    return plan


def store(manager: OffloadingManager, letters: str, ctx: RequestContext | None = None) -> StorePlan:
    plan = begin_store(manager, letters, ctx)
    manager.complete_store(plan)
    audit(manager)
    return plan


def load(manager: OffloadingManager, letters: str, ctx: RequestContext | None = None) -> LoadPlan:
    return manager.prepare_load(keys(letters), ctx)


def states(manager: OffloadingManager, letters: str) -> list[LookupResult]:
    return [manager.lookup_key(key) for key in keys(letters)]


def readable(manager: OffloadingManager) -> str:
    """What the events since the last call say, in order: +a became readable, -a left."""
    return "".join(
        f"{'-' if event.removed else '+'}{key.decode()}"
        for event in manager.take_events()
        for key in event.keys
    )


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


# ---- 2. Who is protected


def test_invariant_02_a_pinned_block_is_not_evicted(manager: OffloadingManager) -> None:
    store(manager, "abcd")
    first, second = load(manager, "a"), load(manager, "ab")
    assert text(store(manager, "ef").evicted) == "cd"
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
    for letters in ("a", "ab", "abc", "acb", "c", "dc", "dc"):
        ctx = manager.begin_request(letters)
        store(manager, letters, ctx)
        manager.finish_request(ctx)
    here = text(key for key in keys("abcd") if manager.lookup_key(key) is HIT)
    ctx = manager.begin_request("r", keys(here) if busy == "its own" else [])
    if busy == "pinned":
        load(manager, here)
    elif busy == "in flight":
        manager.discard(keys(here))
        begin_store(manager, here)
    before = snapshot(manager, ignore=["dropped"])
    for letters in ("abcdef", "x", "yxz"):
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


def test_invariant_04_what_is_here_is_left_out_and_rows_say_which_are_meant(manager: OffloadingManager) -> None:
    store(manager, "b")
    in_flight = begin_store(manager, "d")
    plan = store(manager, "abcdee")
    assert (text(plan.keys), plan.rows.tolist()) == ("ac", [0, 2])
    manager.complete_store(in_flight)


def test_invariant_04_a_key_that_is_offered_twice_is_stored_once(manager: OffloadingManager) -> None:
    plan = store(manager, "abab")
    assert (text(plan.keys), plan.rows.tolist()) == ("ab", [0, 1])


# ---- 5. Only what is ready is a hit


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


def test_invariant_05_a_context_does_not_remember_what_is_no_longer_true(manager: OffloadingManager) -> None:
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


# ---- 6. One request, one access per block; 7. the whole path


class Recorder(NaiveLRU):
    """Writes down what a policy is told."""

    name = "recorder"

    def __init__(self, index: Index) -> None:
        super().__init__(index)
        self.told = ""

    def hit(self, slot: int) -> None:
        self.told += self.index.key_at(slot).decode()

    def refresh(self, slot: int) -> None:
        self.told += f"({self.index.key_at(slot).decode()})"


def told(manager: OffloadingManager) -> str:
    """Accesses, the tail of a request first; in brackets what only takes its place."""
    assert isinstance(manager.policy, Recorder)
    found, manager.policy.told = manager.policy.told, ""
    return found


def test_invariant_06_one_request_is_one_access_per_block() -> None:
    manager = make(Recorder)
    store(manager, "abc")
    ctx = manager.begin_request("r")
    for _ in range(3):  # retried, preempted, asked again
        manager.lookup(keys("abc"), ctx)
        manager.lookup_key(b"a", ctx)
        manager.complete_load(load(manager, "ab", ctx))
        store(manager, "abc", ctx)
    assert told(manager) == ""
    manager.finish_request(ctx)
    assert told(manager) == "cba"


def test_invariant_06_a_touch_is_the_access_and_finish_only_puts_in_order() -> None:
    manager = make(Recorder)
    store(manager, "abc")
    ctx = manager.begin_request("r")
    manager.touch(keys("bb"), ctx)
    manager.touch(keys("b"), ctx)
    assert told(manager) == "b"
    manager.lookup(keys("abc"), ctx)
    manager.finish_request(ctx)
    # The path is in the order of first sight: b came first.
    assert told(manager) == "ca(b)"


def test_invariant_06_a_requests_own_store_is_no_second_access() -> None:
    manager = make(Recorder)
    store(manager, "a")
    ctx = manager.begin_request("r")
    store(manager, "abc", ctx)
    manager.touch(keys("abc"), ctx)
    assert told(manager) == "a"
    manager.finish_request(ctx)
    assert told(manager) == "(c)(b)(a)"


def test_invariant_06_without_a_request_every_touch_is_an_access() -> None:
    manager = make(Recorder)
    store(manager, "a")
    manager.touch(keys("a"))
    manager.touch(keys("aax"))
    assert told(manager) == "aa"


def test_invariant_07_a_hit_refreshes_the_path_that_the_device_served() -> None:
    manager = make(Recorder)
    store(manager, "abcd")
    ctx = manager.begin_request("r", keys("abcd"))  # the device has a and b, and asks for the rest
    assert manager.lookup(keys("cd"), ctx).num_ready == 2
    manager.complete_load(load(manager, "cd", ctx))
    manager.finish_request(ctx)
    assert told(manager) == "dcba"


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


def test_invariant_08_a_failed_block_can_be_offered_again_by_the_same_request(manager: OffloadingManager) -> None:
    ctx = manager.begin_request("r")
    manager.complete_store(begin_store(manager, "ab", ctx), success=False)
    assert text(store(manager, "ab", ctx).keys) == "ab"
    manager.finish_request(ctx)
    assert states(manager, "ab") == [HIT, HIT]


# ---- 9. Events


def test_invariant_09_events_tell_what_is_readable_in_order(manager: OffloadingManager) -> None:
    plan = begin_store(manager, "abcd")
    assert readable(manager) == ""
    manager.complete_store(plan)
    assert readable(manager) == "+a+b+c+d"
    gone = text(begin_store(manager, "ef").evicted)
    assert readable(manager) == "".join(f"-{letter}" for letter in gone)
    [left] = set("abcd") - set(gone) - {"b"} - {"a"} or {"b"}, 
    manager.discard(keys("abcd"))
    assert sorted(readable(manager)) == sorted("".join(f"-{x}" for x in set("abcd") - set(gone)))
    assert left


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


def test_invariant_10_what_is_a_hit_can_be_loaded_until_something_happens(manager: OffloadingManager) -> None:
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
    # The slot is still being read, so it is not given away; b itself may come back elsewhere.
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
    manager.complete_load(load(manager, "ab"), damaged=np.array([0, 1]))  # type: ignore[arg-type]
    assert states(manager, "ab") == [MISS, MISS]


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


def test_invariant_11_loading_what_is_not_ready_names_the_key_and_pins_nothing(manager: OffloadingManager) -> None:
    store(manager, "ab")
    begin_store(manager, "c")
    refused(manager, lambda: load(manager, "abx"), "not ready: key 78")
    refused(manager, lambda: load(manager, "acb"), "not ready: key 63")
    assert manager.stats().evictable == 2


def test_invariant_11_a_request_that_has_finished_is_over(manager: OffloadingManager) -> None:
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


def test_impossible_arguments_are_refused_at_construction() -> None:
    for bad in ({"capacity_blocks": 0}, {"capacity_blocks": 2**31}, {"key_bytes": 0}, {"key_bytes": 1025}):
        with pytest.raises(ConfigError, match=f"{next(iter(bad))}: .* is not possible; allowed: 1 to"):
            OffloadingManager(**{"capacity_blocks": 1, **bad})
    with pytest.raises(ConfigError, match=r"policy: 'lur' .* did you mean lru\?"):
        make("lur")
    with pytest.raises(ConfigError, match="admission"):
        make(admission="sometimes")


# ---- A policy is not trusted


class Liar(NaiveLRU):
    """Names the victims that it is told to name."""

    name = "liar"
    lie: tuple[int, ...] = ()

    def replace(self, keys: Keys, slots: Any, num_free: int, protected: Protected) -> None:
        if len(slots) > num_free:
            slots[num_free : num_free + len(self.lie)] = self.lie
        else:
            super().replace(keys, slots, num_free, protected)


@pytest.mark.parametrize(
    ("lie", "what"),
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
def test_a_policy_that_names_the_wrong_victims_is_caught(lie: tuple[int, ...], what: str) -> None:
    manager = make(Liar, 6)
    store(manager, "a")
    begin_store(manager, "b")
    store(manager, "cdef")
    load(manager, "a")
    assert isinstance(manager.policy, Liar)
    manager.policy.lie = lie
    ctx = manager.begin_request("r", keys("d"))
    before = snapshot(manager)
    with pytest.raises(PolicyError, match="policy 'liar' named slot -?[0-9]+ to leave for key 7[89]"):
        manager.prepare_store(keys("xy"), ctx)
    assert snapshot(manager) == before, what
    audit(manager)


def test_a_policy_that_names_a_free_slot_is_caught() -> None:
    manager = make(Liar, 3)
    store(manager, "abc")
    manager.discard(keys("b"))
    assert isinstance(manager.policy, Liar)
    manager.policy.lie = (1,)
    with pytest.raises(PolicyError):
        manager.prepare_store(keys("xy"))
    audit(manager)
