"""A victim tier: duplicates, offers of dropped blocks, single refusals, equivalence of two LRUs to one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload.admission.reuse import ReuseAdmission
from kvoffload.core.manager import OffloadingManager
from kvoffload.core.plans import ON_DEVICE_EVICTION
from kvoffload.core.policy import POLICIES as POLICY_NAMES
from kvoffload.core.policy import REFUSED, EvictionPolicy
from kvoffload.core.protection import Protected
from kvoffload.core.slots import SlotArray
from kvoffload.errors import ConfigError, PolicyError
from kvoffload.replay.config import ReplayConfig
from kvoffload.replay.data import DataPlane
from kvoffload.replay.faults import parse_injection
from kvoffload.replay.replay import Replay
from kvoffload.structures.jit import BoolArray
from kvoffload.structures.keys import Keys
from kvoffload.testing.audit import audit, duplicate_slots, snapshot
from kvoffload.testing.scripts import long_lists
from kvoffload.traces.format import read_trace
from kvoffload.traces.sessions import generate
from kvoffload.traces.trace import Trace
from kvoffload.traces.workloads import builtin
from support.letters import (
    HIT,
    MISS,
    POLICIES,
    begin_store,
    keys,
    letters_at,
    load,
    make,
    readable,
    states,
    store,
    text,
)
from support.naive.lru import NaiveLRU
from support.small_trace import trace_of


def victim_tier(policy: Any = "lru", capacity_blocks: int = 4, **options: Any) -> OffloadingManager:
    return make(policy, capacity_blocks, store=ON_DEVICE_EVICTION, **options)


def read(manager: OffloadingManager, letters: str) -> None:
    """Load blocks to the device without a request, which makes them duplicates."""
    manager.complete_load(load(manager, letters))
    audit(manager)


def use_on_device(manager: OffloadingManager, letters: str) -> None:
    """Run a request that the device serves alone."""
    manager.finish_request(manager.begin_request("r", keys(letters)))
    audit(manager)


def leave(manager: OffloadingManager, letters: str = "123") -> str:
    """Return the victims for new blocks, in order."""
    return text(store(manager, letters).evicted)


@pytest.fixture(params=[*POLICIES, "hazard"])
def manager(request: pytest.FixtureRequest) -> OffloadingManager:
    """A victim tier with blocks a to d; among equals d is evicted first."""
    manager = victim_tier(request.param)
    store(manager, "abcd")
    readable(manager)
    return manager


# ---- duplicates


def test_a_loaded_block_becomes_a_duplicate_when_its_load_ends(manager: OffloadingManager) -> None:
    reading = load(manager, "ab")
    assert manager.stats().duplicates == 0
    manager.complete_load(reading)
    audit(manager)
    assert manager.stats().duplicates == 2
    assert manager.policy.order() is None or len(manager.policy.order()) == 2
    assert states(manager, "ab") == [HIT, HIT]


def test_a_block_used_on_the_device_is_a_duplicate(manager: OffloadingManager) -> None:
    use_on_device(manager, "ab")
    assert manager.stats().duplicates == 2
    manager.touch(keys("c"))
    assert manager.stats().duplicates == 3
    audit(manager)


def test_duplicates_leave_first_the_latest_foremost(manager: OffloadingManager) -> None:
    read(manager, "ab")
    read(manager, "c")
    assert leave(manager) == "cab"
    assert leave(manager, "4") in ("1", "2", "3", "d"), "then the policy decides"


def test_a_duplicate_that_is_used_again_is_the_latest() -> None:
    manager = victim_tier()
    store(manager, "abcd")
    read(manager, "a")
    read(manager, "b")
    read(manager, "a")
    assert manager.stats().duplicates == 2
    assert leave(manager) == "abd"


def test_a_block_in_flight_is_no_duplicate(manager: OffloadingManager) -> None:
    writing = begin_store(manager, "x")
    use_on_device(manager, "x")
    assert manager.stats().duplicates == 0
    manager.complete_store(writing)
    audit(manager)
    assert manager.stats().duplicates == 0


def test_contains_covers_blocks_after_a_gap(manager: OffloadingManager) -> None:
    begin_store(manager, "x")
    resident = next(letter for letter in "abcd" if states(manager, letter) == [HIT])
    read(manager, resident)
    assert manager.contains(keys(f"{resident}zxz")).tolist() == [True, False, True, False]
    before = snapshot(manager)
    manager.contains(keys("abcdz"))
    assert snapshot(manager) == before


# ---- offers


def test_a_duplicate_that_the_device_drops_is_kept_without_a_copy(manager: OffloadingManager) -> None:
    read(manager, "ab")
    plan = store(manager, "ab")
    assert (len(plan.keys), len(plan.rows), len(plan.missing_rows), len(plan.evicted)) == (0, 0, 0, 0)
    stats = manager.stats()
    assert (stats.kept, stats.duplicates, stats.stored, stats.evicted) == (2, 0, 4, 0)
    assert readable(manager) == ""


def test_an_offered_block_that_is_no_duplicate_is_unchanged(manager: OffloadingManager) -> None:
    before = snapshot(manager)
    assert len(store(manager, "abcd").keys) == 0
    assert snapshot(manager) == before


def test_a_kept_block_is_the_most_recent() -> None:
    manager = victim_tier()
    store(manager, "abcd")
    read(manager, "cd")
    store(manager, "cd")
    assert leave(manager, "1234") == "badc"


@pytest.mark.parametrize(("offer", "order"), [("abn", "nba"), ("anb", "bna"), ("nab", "ban"), ("bna", "anb")])
def test_kept_and_stored_blocks_take_their_places_in_one_order(offer: str, order: str) -> None:
    manager = victim_tier(capacity_blocks=3)
    store(manager, "ab")
    read(manager, "ab")
    plan = store(manager, offer)
    assert (text(plan.keys), plan.rows.tolist(), manager.stats().kept) == ("n", [offer.index("n")], 2)
    assert leave(manager) == order


def test_a_block_that_is_offered_twice_is_kept_once(manager: OffloadingManager) -> None:
    read(manager, "a")
    plan = store(manager, "axax")
    assert (text(plan.keys), plan.rows.tolist(), manager.stats().kept) == ("x", [1], 1)


def test_an_offered_duplicate_is_not_evicted_for_another_block_of_the_offer(
    manager: OffloadingManager,
) -> None:
    read(manager, "ab")
    assert text(store(manager, "ax").evicted) == "b"
    assert states(manager, "a") == [HIT]


def test_without_room_nothing_changes(manager: OffloadingManager) -> None:
    read(manager, "a")
    reading = load(manager, "abcd")
    before = snapshot(manager, ignore=["dropped"])
    assert manager.prepare_store(keys("ax")) is None
    assert snapshot(manager, ignore=["dropped"]) == before
    manager.complete_load(reading)
    assert manager.stats().duplicates == 4


def test_a_failed_store_frees_its_slots(manager: OffloadingManager) -> None:
    read(manager, "ab")
    plan = begin_store(manager, "xyz")
    manager.complete_store(plan, success=False)
    audit(manager)
    stats = manager.stats()
    assert (stats.free, stats.duplicates, stats.store_failed, stats.evicted) == (3, 0, 3, 3)
    assert states(manager, "abxyz") == [MISS] * 5
    assert text(store(manager, "xyz").keys) == "xyz"


# ---- fates of duplicates


def test_a_pinned_duplicate_is_not_evicted(manager: OffloadingManager) -> None:
    read(manager, "ab")
    reading = load(manager, "a")
    assert leave(manager, "1")[0] == "b"
    assert "a" not in leave(manager, "23")
    manager.complete_load(reading)
    assert leave(manager, "4") == "a"


def test_a_pinned_duplicate_that_is_offered_is_a_duplicate_again_after_its_load(
    manager: OffloadingManager,
) -> None:
    read(manager, "a")
    reading = load(manager, "a")
    store(manager, "a")
    assert (manager.stats().kept, manager.stats().duplicates) == (1, 0)
    manager.complete_load(reading)
    audit(manager)
    assert leave(manager, "1") == "a"


def test_a_damaged_duplicate_is_a_miss(manager: OffloadingManager) -> None:
    read(manager, "abc")
    manager.complete_load(load(manager, "ab"), damaged=[0])
    audit(manager)
    assert states(manager, "abc") == [MISS, HIT, HIT]
    assert (manager.stats().duplicates, manager.stats().free) == (2, 1)
    assert readable(manager) == "-a"


def test_a_block_that_arrives_damaged_is_no_duplicate(manager: OffloadingManager) -> None:
    manager.complete_load(load(manager, "ab"), damaged=[0, 1])
    audit(manager)
    assert (manager.stats().duplicates, manager.stats().free) == (0, 2)


def test_a_discarded_duplicate_frees_its_slot(manager: OffloadingManager) -> None:
    read(manager, "ab")
    assert manager.discard(keys("bcx")) == 2
    audit(manager)
    assert (manager.stats().duplicates, manager.stats().free) == (1, 2)
    store(manager, "xy")
    assert leave(manager, "1") == "a"


def test_a_condemned_block_does_not_become_a_duplicate(manager: OffloadingManager) -> None:
    read(manager, "a")
    first, second, third = load(manager, "ab"), load(manager, "ab"), load(manager, "c")
    manager.discard(keys("abc"))
    audit(manager)
    assert (manager.stats().condemned, manager.stats().duplicates) == (3, 0)
    for reading in (first, third, second):
        manager.complete_load(reading)
        audit(manager)
        assert manager.stats().duplicates == 0
    assert (manager.stats().condemned, manager.stats().free) == (0, 3)


def test_a_block_that_returned_to_another_slot_is_not_condemned(
    manager: OffloadingManager,
) -> None:
    first, second = load(manager, "a"), load(manager, "a")
    manager.complete_load(first, damaged=[0])
    store(manager, "a")
    manager.complete_load(second)
    audit(manager)
    assert manager.stats().duplicates == 0
    read(manager, "a")
    assert manager.stats().duplicates == 1


@pytest.mark.parametrize("drop_in_flight", [False, True])
def test_reset_forgets_duplicates(manager: OffloadingManager, drop_in_flight: bool) -> None:
    read(manager, "ab")
    reading = load(manager, "bc")
    manager.reset(drop_in_flight=drop_in_flight)
    audit(manager)
    assert manager.stats().duplicates == 0
    store(manager, "wx")
    manager.complete_load(reading)
    audit(manager)
    assert (manager.stats().duplicates, manager.stats().free) == (0, 2)


def test_events_report_evicted_duplicates_and_not_kept_ones(manager: OffloadingManager) -> None:
    read(manager, "abc")
    store(manager, "c")
    store(manager, "xy")
    assert readable(manager) == "-a-b+x+y"


# ---- blocks that return


class RecordsCalls(NaiveLRU):
    """LRU that records its calls."""

    name = "records-calls"

    def access(self, slots: SlotArray, reused: BoolArray) -> None:
        self.calls = [*self._calls(), (letters_at_index(self, slots), reused.tolist())]
        super().access(slots, reused)

    def _calls(self) -> list[tuple[str, list[bool]]]:
        return getattr(self, "calls", [])

    def take_calls(self) -> list[tuple[str, list[bool]]]:
        calls, self.calls = self._calls(), []
        return calls


class Observing(RecordsCalls):
    """A policy that observes all traffic."""

    def observe(self, path: Keys, slots: SlotArray, start: int, on_device: int) -> None:
        """Do nothing."""


def letters_at_index(policy: EvictionPolicy, slots: SlotArray) -> str:
    return text(policy.index.keys_at(slots))


def calls_for(manager: OffloadingManager, letters: str) -> list[tuple[str, list[bool]]]:
    """Return the policy's calls when the device drops blocks."""
    store(manager, letters)
    policy: Any = manager.policy
    calls: list[tuple[str, list[bool]]] = policy.take_calls()
    return calls


def test_a_block_that_the_device_served_returns_used_again() -> None:
    manager = victim_tier(RecordsCalls)
    use_on_device(manager, "abc")
    use_on_device(manager, "b")
    assert calls_for(manager, "abc") == [("abc", [False, True, False])]


def test_a_block_that_was_hit_here_returns_used_again() -> None:
    manager = victim_tier(RecordsCalls)
    assert calls_for(manager, "abcd") == []
    read(manager, "ab")
    assert calls_for(manager, "b") == [("b", [True])], "kept"
    assert calls_for(manager, "xyz") == [], "b is in the order, and the new blocks were used once"
    assert calls_for(manager, "a") == [("a", [True])], "a had lost its slot"


def test_kept_and_new_blocks_are_reported_in_one_order() -> None:
    manager = victim_tier(RecordsCalls)
    store(manager, "ab")
    read(manager, "a")
    use_on_device(manager, "xy")
    use_on_device(manager, "y")
    assert calls_for(manager, "xay") == [("xay", [False, True, True])]


def test_all_calls_of_a_request_are_one_use() -> None:
    manager = victim_tier(RecordsCalls)
    request = manager.begin_request("r", keys("a"))
    manager.touch(keys("a"), request)
    manager.touch(keys("a"), request)
    manager.finish_request(request)
    assert calls_for(manager, "a") == []


def test_a_return_is_reported_once_for_each_use() -> None:
    manager = victim_tier(RecordsCalls, 2)
    use_on_device(manager, "a")
    use_on_device(manager, "a")
    assert calls_for(manager, "a") == [("a", [True])]
    store(manager, "xy")
    assert states(manager, "a") == [MISS]
    assert calls_for(manager, "a") == [], "computed once since its eviction"


def test_a_policy_that_observes_gets_no_reports_of_returns() -> None:
    manager = victim_tier(Observing)
    use_on_device(manager, "a")
    use_on_device(manager, "a")
    assert calls_for(manager, "a") == []
    assert (manager.store_mode.cache.known.lists.num_positions, POLICY_NAMES.find("hazard").observes()) == (
        0,
        True,
    )


def test_a_refused_block_stays_known() -> None:
    manager = victim_tier(admission="reuse:2", policy=RecordsCalls)
    manager.complete_load(load(manager, ""))
    use_on_device(manager, "a")
    assert len(store(manager, "a").keys) == 0
    use_on_device(manager, "a")
    assert calls_for(manager, "a") == [("a", [True])]


def test_reset_forgets_marks() -> None:
    manager = victim_tier(RecordsCalls)
    use_on_device(manager, "aab")
    use_on_device(manager, "a")
    manager.reset()
    assert calls_for(manager, "ab") == []


class NaiveKnown:
    """The naive model: two bounded lists of keys, coldest first."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.once: list[bytes] = []
        self.again: list[bytes] = []

    def note(self, key: bytes, again: bool) -> None:
        if key in self.once + self.again:
            again = True
            (self.once if key in self.once else self.again).remove(key)
        home = self.again if again else self.once
        home.append(key)
        del home[: -self.room]

    def take_out(self, key: bytes) -> bool:
        was_again = key in self.again
        if key in self.once + self.again:
            (self.again if was_again else self.once).remove(key)
        return was_again


_LETTERS = st.integers(0, 11).flatmap(
    lambda first: st.integers(1, 5).map(lambda n: "abcdefghijklmnop"[first : first + n])
)
_ACTS = st.tuples(
    st.sampled_from(["use", "use", "use and load", "drop", "fail", "abandon", "keep"]), _LETTERS
)


@given(long_lists(_ACTS, 40), st.integers(1, 6))
def test_the_policy_receives_the_reports_of_the_naive_model(
    acts: list[tuple[str, str]], capacity: int
) -> None:
    manager, model = victim_tier(RecordsCalls, capacity), NaiveKnown(capacity)
    policy: Any = manager.policy
    for act, letters in acts:
        here = dict(zip(letters, manager.contains(keys(letters)).tolist(), strict=True))
        duplicates = letters_at(manager, duplicate_slots(manager) or [])
        if act in ("use", "use and load", "abandon"):
            request = manager.begin_request("r", keys(letters))
            if act != "use":
                ready = manager.lookup(keys(letters), request).num_ready
                manager.complete_load(load(manager, letters[:ready], request))
                for letter in letters[:ready]:
                    model.note(letter.encode(), again=True)
            if act != "abandon":
                manager.finish_request(request)
                for letter in letters:
                    model.note(letter.encode(), here[letter])
            assert policy.take_calls() == []
        elif act == "keep":
            manager.keep(keys(letters))
            enters = [letter for letter in letters if letter in duplicates]
            flags = [model.take_out(letter.encode()) for letter in enters]
            assert policy.take_calls() == ([("".join(enters), flags)] if any(flags) else [])
        else:
            plan = manager.prepare_store(keys(letters))
            if plan is None:  # only blocks of this batch could be evicted for it
                assert policy.take_calls() == []
                continue
            enters = [key for key in letters if key in duplicates or key.encode() in list(plan.keys)]
            flags = [model.take_out(letter.encode()) for letter in enters]
            both = 0 < len(plan.keys) < len(enters)
            assert policy.take_calls() == ([("".join(enters), flags)] if any(flags) or both else [])
            manager.complete_store(plan, success=act == "drop")
        audit(manager)
    known = manager.store_mode.cache.known
    assert [known.members(number)[::-1] for number in (0, 1)] == [model.once, model.again]


@pytest.mark.parametrize("policy", ["lru", "fifo"])
def test_a_policy_that_ignores_uses_decides_the_same_with_reports(small_chat: Trace, policy: str) -> None:
    policy_class = POLICY_NAMES.find(policy)
    reporting_class = type("Told", (policy_class,), {"counts_uses": True})
    assert (policy_class.needs_returns(), reporting_class.needs_returns()) == (False, True)
    blocks = small_chat.unique_blocks // 20
    digests = [
        Replay(small_chat, ReplayConfig(blocks, tested, "all", blocks, ON_DEVICE_EVICTION))
        .run()
        .decisions_sha256
        for tested in (policy_class, reporting_class)
    ]
    assert digests[0] == digests[1]


# ---- admission


def test_reuse_admits_each_block_on_its_own() -> None:
    manager = victim_tier(admission=ReuseAdmission(1, 2), capacity_blocks=9)
    use_on_device(manager, "abc")
    use_on_device(manager, "bd")
    plan = store(manager, "dcba")
    assert (text(plan.keys), plan.rows.tolist(), plan.missing_rows.tolist()) == ("b", [2], [2, 0, 1, 3])
    assert (plan.num_refused, manager.stats().refused) == (3, 3)
    use_on_device(manager, "acd")
    assert text(store(manager, "abcd").keys) == "acd"


def test_an_offer_is_no_request() -> None:
    manager = victim_tier(admission="reuse:2")
    use_on_device(manager, "a")
    for _ in range(3):
        assert len(store(manager, "a").keys) == 0


def test_a_load_is_observed_when_it_begins() -> None:
    rule = ReuseAdmission(1, 2)
    manager = victim_tier(admission=rule)
    ctx = manager.begin_request("r", keys("ab"))
    manager.complete_load(load(manager, "", ctx))
    assert rule.tracked() == {b"a": 1, b"b": 1}
    manager.finish_request(ctx)
    assert rule.tracked() == {b"a": 1, b"b": 1}


def test_a_kept_block_needs_no_admission() -> None:
    manager = victim_tier(admission=ReuseAdmission(1, 2, max_tracker_size=2))
    use_on_device(manager, "a")
    use_on_device(manager, "a")
    store(manager, "a")
    read(manager, "a")
    use_on_device(manager, "xy")  # a is forgotten by the rule
    assert manager.stats().duplicates == 1
    store(manager, "a")
    assert (manager.stats().kept, manager.stats().refused) == (1, 0)


def test_the_write_cost_is_a_parameter_of_the_policy() -> None:
    assert victim_tier("hazard").policy.write_cost is None
    assert victim_tier("hazard:-0.5").policy.write_cost == -0.5
    assert victim_tier("hazard,write_cost=0").policy.write_cost == 0
    with pytest.raises(ConfigError, match="'write_cost' is unknown or given twice; allowed: none"):
        victim_tier("lru,write_cost=1")
    with pytest.raises(ConfigError, match="write_cost: allowed: a number from -1 to 1000"):
        victim_tier("hazard,write_cost=-2")


@pytest.mark.parametrize("mode", ["", "victim", "on-eviction"])
def test_an_unknown_mode_is_refused(mode: str) -> None:
    with pytest.raises(ConfigError, match=r"store: .*allowed: on-compute, on-device-eviction"):
        make(store=mode)


# ---- refusals by the policy


class Choosy(NaiveLRU):
    """LRU that refuses some letters, unless there is a free slot."""

    name = "choosy"
    refuses = True
    stops_at_the_first = True

    def replace(self, keys: Keys, slots: SlotArray, num_free: int, protected: Protected) -> None:
        refusing = False
        taken = []
        for row, key in enumerate(keys):
            if row >= num_free:
                refusing = key in b"pqr" or (refusing and protected.one_prefix and self.stops_at_the_first)
                slots[row] = REFUSED if refusing else self.victim(key, protected)
            if slots[row] != REFUSED:
                taken.append(int(slots[row]))
        self.slots += reversed(taken)


class TakesLaterBlocks(Choosy):
    stops_at_the_first = False


def aligned(manager: OffloadingManager, plan: Any, offered: str) -> None:
    """Check that keys, slots and rows of a plan agree."""
    audit(manager)
    assert letters_at(manager, plan.slots) == text(plan.keys) == "".join(offered[row] for row in plan.rows)
    assert sorted(plan.missing_rows) == sorted(set(plan.missing_rows.tolist()))
    assert len(plan.missing_rows) == len(plan.keys) + plan.num_dropped + plan.num_refused


def test_each_block_of_a_victim_batch_is_accepted_or_refused_independently() -> None:
    manager = victim_tier(Choosy, 5)
    store(manager, "abcde")
    plan = store(manager, "wpxqy")
    aligned(manager, plan, "wpxqy")
    assert (text(plan.keys), text(plan.evicted), plan.num_refused) == ("wxy", "edc", 2)
    assert plan.missing_rows.tolist() == [0, 2, 4, 1, 3]
    assert manager.stats().refused == 2


def test_given_slots_go_to_the_first_blocks() -> None:
    manager = victim_tier(Choosy)
    store(manager, "abc")
    read(manager, "b")
    plan = store(manager, "pqrw")  # a free slot, a duplicate's slot, and two victims of the policy
    aligned(manager, plan, "pqrw")
    assert (text(plan.keys), text(plan.evicted), plan.num_refused) == ("pqw", "bc", 1)
    assert plan.missing_rows.tolist() == [0, 1, 3, 2]


def test_refused_and_dropped_blocks_are_distinguished() -> None:
    manager = victim_tier(Choosy)
    store(manager, "abcd")
    load(manager, "ab")
    plan = store(manager, "pwqxy")
    aligned(manager, plan, "pwqxy")
    assert (text(plan.keys), plan.num_refused, plan.num_dropped) == ("w", 1, 3)
    assert plan.missing_rows.tolist() == [1, 2, 3, 4, 0]
    assert (manager.stats().refused, manager.stats().dropped) == (1, 3)


def test_policy_and_admission_refuse_side_by_side() -> None:
    manager = victim_tier(Choosy, admission="reuse:2")
    for _ in range(2):
        use_on_device(manager, "abcdpwxy")
    store(manager, "abcd")
    load(manager, "a")
    offered = "1pw2xy"
    plan = store(manager, offered)
    aligned(manager, plan, offered)
    assert (text(plan.keys), plan.num_refused, plan.num_dropped) == ("wx", 3, 1)
    assert plan.missing_rows.tolist() == [2, 4, 5, 1, 0, 3]


def test_a_whole_batch_may_be_refused() -> None:
    manager = victim_tier(Choosy)
    store(manager, "abcd")
    plan = store(manager, "pq")
    aligned(manager, plan, "pq")
    assert (len(plan.keys), len(plan.evicted), plan.num_refused) == (0, 0, 2)


def test_the_tail_of_a_prefix_is_refused() -> None:
    manager = make(Choosy)
    store(manager, "abc")
    plan = store(manager, "wxpy")
    aligned(manager, plan, "wxpy")
    assert (text(plan.keys), text(plan.evicted), plan.num_refused) == ("wx", "c", 2)
    assert plan.missing_rows.tolist() == [0, 1, 2, 3]
    assert manager.stats().refused == 2


def test_refused_tail_and_overflow_of_a_prefix_are_distinguished() -> None:
    manager = make(Choosy)
    store(manager, "abcd")
    load(manager, "a")
    plan = store(manager, "wpxyz")
    aligned(manager, plan, "wpxyz")
    assert (text(plan.keys), plan.num_refused, plan.num_dropped) == ("w", 2, 2)
    assert plan.missing_rows.tolist() == [0, 3, 4, 1, 2]


def test_a_policy_that_accepts_a_block_after_a_refused_one_is_detected() -> None:
    manager = make(TakesLaterBlocks)
    store(manager, "abcd")
    before = snapshot(manager, ignore=["policy"])
    with pytest.raises(PolicyError, match="refused a block and accepted a later block"):
        manager.prepare_store(keys("wpx"))
    assert snapshot(manager, ignore=["policy"]) == before


def test_a_refusal_by_a_policy_that_may_not_refuse_is_an_error() -> None:
    manager = victim_tier(type("Sly", (Choosy,), {"refuses": False}))
    store(manager, "abcd")
    with pytest.raises(PolicyError, match="named slot -1"):
        manager.prepare_store(keys("wp"))


# ---- policies that break their contract


class NamesRemovedSlots(NaiveLRU):
    name = "names-what-was-removed"

    def forget(self, slot: int) -> None:
        super().forget(slot)
        self.removed = slot

    def victim(self, key: bytes, protected: Protected) -> int:
        return self.removed


@pytest.mark.parametrize("offered", ["wxyz", "bwxy", "wbxyzv", "c123"])
def test_a_policy_that_names_a_removed_slot_changes_nothing(offered: str) -> None:
    manager = victim_tier(NamesRemovedSlots)
    store(manager, "abcd")
    read(manager, "b")
    read(manager, "c")
    read(manager, "a")
    reading = load(manager, "c")  # pins a duplicate between evictable duplicates
    manager.touch(keys("a"))
    before = snapshot(manager, ignore=["policy"])
    with pytest.raises(PolicyError, match=r"not in the policy's order"):
        manager.prepare_store(keys(offered))
    assert snapshot(manager, ignore=["policy"]) == before
    manager.complete_load(reading)
    assert manager.stats().duplicates == 3


@pytest.mark.parametrize("named", [-1, 4, 10**6])
def test_a_policy_that_names_no_slot_changes_nothing(named: int) -> None:
    policy = type("NamesNoSlot", (NaiveLRU,), {"victim": lambda self, key, protected: named})
    manager = victim_tier(policy, 4)
    store(manager, "abcd")
    read(manager, "ab")
    before = snapshot(manager, ignore=["policy"])
    with pytest.raises((PolicyError, IndexError)):
        manager.prepare_store(keys("wxyz"))
    assert snapshot(manager, ignore=["policy"]) == before


# ---- LRU on the device and LRU behind it are one LRU


turns = st.tuples(st.integers(0, 30), st.integers(0, 6), st.integers(1, 3))


def conversations(steps: list[tuple[int, int, int]], longest: int) -> Trace:
    """Draw requests that each extend a part of an earlier request by new blocks."""
    requests: list[list[int]] = [[]]
    following = 0
    for earlier, shared, grown in steps:
        known = requests[earlier % len(requests)][:shared]
        request = [*known, *range(following, following + grown)][:longest]
        following += grown
        requests.append(request)
    return trace_of(*requests[1:])


# A request must fit into the device, because blocks beyond its size are not offered; a single LRU takes them.


@given(long_lists(turns, 40), st.integers(4, 9), st.integers(1, 9))
def test_two_lrus_act_as_one(steps: list[tuple[int, int, int]], device_blocks: int, capacity: int) -> None:
    if not steps:
        return
    trace = conversations(steps, longest=4)
    replay = Replay(trace, ReplayConfig(capacity, "lru", "all", device_blocks, ON_DEVICE_EVICTION))
    replay.run()
    audit(replay.manager)
    single = Replay(trace, ReplayConfig(capacity + device_blocks))
    single.run()
    assert replay.hits_per_request.tolist() == single.hits_per_request.tolist()


GOLDEN = {
    ("made_up", 250, 250): (None, 6),
    ("agentic_3h", 2_000, 2_000): (0.5506, 4),
    ("conversation_first60", 1_000, 1_000): (0.057368, 6),
    ("conversation_first60", 4_000, 4_000): (None, 6),
}
"""Hit ratio of LRU at the summed size, from tests/support/golden_numbers.py (None: computed), and digits."""


@pytest.mark.trace
@pytest.mark.parametrize(
    ("name", "device_blocks", "capacity"),
    [pytest.param(*case, marks=pytest.mark.slow if case[1] == 4_000 else ()) for case in GOLDEN],
)
@pytest.mark.slow
def test_golden_number_of_two_lrus(
    recorded_trace_path: Callable[[str], Path], name: str, device_blocks: int, capacity: int
) -> None:
    ratio, digits = GOLDEN[name, device_blocks, capacity]
    trace = read_trace(recorded_trace_path(name))
    replay = Replay(trace, ReplayConfig(capacity, "lru", "all", device_blocks, ON_DEVICE_EVICTION))
    report = replay.run()
    single = Replay(trace, ReplayConfig(capacity + device_blocks)).run()
    assert report.prefix_hit_ratio == single.prefix_hit_ratio
    assert ratio is None or round(report.prefix_hit_ratio, digits) == ratio
    assert report.prefix_hit_ratio <= report.optimum_hit_ratio


# ---- with real bytes


@pytest.fixture(scope="module")
def small_chat() -> Trace:
    return generate(builtin("chat", sessions=150))


@pytest.mark.parametrize("admission", ["all", "reuse:2"])
@pytest.mark.parametrize("policy", ["lru", "arc", "hazard"])
def test_every_byte_is_verified(small_chat: Trace, policy: str, admission: str) -> None:
    blocks = small_chat.unique_blocks // 5
    config = ReplayConfig(blocks, policy, admission, blocks // 4, ON_DEVICE_EVICTION)
    data = DataPlane(blocks, 4096)
    run = Replay(small_chat, config, data)
    report = run.run()
    assert report.blocks_verified == report.offload_hit_blocks > 0
    assert report.bytes_stored == report.blocks_written * 4096
    assert (report.mismatches_caught, report.mismatches_served) == (0, 0)
    assert report.decisions_sha256 == Replay(small_chat, config).run().decisions_sha256
    assert run.manager.stats().kept > 0
    audit(run.manager)
    data.close()


@pytest.mark.parametrize("policy", ["lru", "hazard"])
def test_damage_is_a_miss_and_never_served(small_chat: Trace, policy: str) -> None:
    blocks = small_chat.unique_blocks // 5
    data = DataPlane(blocks, 4096, parse_injection("bitflip:0.05", seed=7))
    run = Replay(small_chat, ReplayConfig(blocks, policy, "all", blocks // 4, ON_DEVICE_EVICTION), data)
    report = run.run()
    assert report.mismatches_served == 0
    assert 0 < report.mismatches_caught <= report.damage_injected
    audit(run.manager)
    data.close()


def test_hits_and_blocks_are_counted_once(small_chat: Trace) -> None:
    blocks = small_chat.unique_blocks // 20
    run = Replay(small_chat, ReplayConfig(blocks, "lru", "all", blocks, ON_DEVICE_EVICTION))
    report = run.run()
    assert report.prefix_hit_blocks == report.device_hit_blocks + report.offload_hit_blocks
    assert report.prefix_hit_blocks == np.sum(run.hits_per_request)
    assert report.prefix_hit_ratio <= report.block_hit_ratio <= 1
