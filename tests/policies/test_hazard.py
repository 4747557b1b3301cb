"""Hazard: its statistics by hand, evictions and refusals, guards, and all decisions compared with the twin.

test_golden.py pins digests of its decisions on the built-in workloads.
"""

from __future__ import annotations

import itertools
import random
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload.admission.reuse import ReuseAdmission
from kvoffload.core.hints import Hints
from kvoffload.core.manager import OffloadingManager
from kvoffload.core.plans import ON_COMPUTE, ON_DEVICE_EVICTION, STORES
from kvoffload.core.request import Path, RequestContext
from kvoffload.core.tenants import Quota
from kvoffload.policies.hazard.age_buckets import NUM_AGES, age_bounds
from kvoffload.policies.hazard.history import NUM_GAP_CLASSES, NUM_KINDS, History
from kvoffload.policies.hazard.lifetimes import Lifetimes
from kvoffload.policies.hazard.path_runs import RUN_OF
from kvoffload.policies.hazard.policy import Hazard
from kvoffload.replay.config import ReplayConfig
from kvoffload.replay.replay import Replay
from kvoffload.structures.keys import Keys
from kvoffload.testing.audit import audit
from kvoffload.testing.scripts import Step, key_of, play, random_script, scripts
from kvoffload.traces.sessions import generate
from kvoffload.traces.workloads import builtin
from support import hazard_kernels as parts
from support.letters import HIT, MISS, begin_store, keys, load, make, states, store, text, use
from support.naive.hazard import NaiveHazard, Sampled
from support.naive.shadow import hash_of
from support.small_hazard import HazardOfFewKeys

# ---- ages


def test_buckets_of_ages_are_two_an_octave() -> None:
    bounds = age_bounds()
    assert bounds[:8].tolist() == [0, 8, 11, 16, 22, 32, 45, 64]
    assert (len(bounds), bounds.dtype) == (NUM_AGES + 1, np.int64)
    assert (np.diff(bounds) > 0).all()
    assert bounds[-1] > 64_000_000, "a cache of millions of blocks fits"


# ---- the history


def observe(history: History, letters: str, now: int, start: int = 0) -> list[int]:
    """Return the classes of a request's blocks from `start` on."""
    return parts.remember(history, Keys.pack(keys(letters), 1), now, start)


def classify(history: History, letters: str, now: int) -> list[tuple[int, int]]:
    return parts.classify(history, Keys.pack(keys(letters), 1), now)


def test_a_new_block_has_no_gap_and_a_used_one_its_octave() -> None:
    history = History(9, 1, gap_unit=8, capacity_blocks=4)
    assert observe(history, "a", 0) == [0]
    # A gap of 24 is log2(32) - log2(8) = 2 octaves above the unit: the third gap class of two uses.
    assert observe(history, "a", 24) == [NUM_GAP_CLASSES + 3]
    # The next gap is 0 octaves, so the mean is 1; three uses are the next class of counts.
    assert observe(history, "a", 24) == [2 * NUM_GAP_CLASSES + 2]


def test_use_counts_fall_into_five_classes() -> None:
    history = History(9, 1, gap_unit=1, capacity_blocks=4)
    by_count = [observe(history, "a", 0)[0] // NUM_GAP_CLASSES for _ in range(12)]
    assert by_count == [0, 1, 2, 2, 3, 3, 3, 3, 3, 4, 4, 4]


def test_long_gaps_share_the_last_class() -> None:
    history = History(9, 1, gap_unit=1, capacity_blocks=4)
    observe(history, "a", 0)
    assert observe(history, "a", 1 << 40) == [2 * NUM_GAP_CLASSES - 1]


def test_a_gap_between_powers_of_two_is_linear() -> None:
    history = History(9, 1, gap_unit=4, capacity_blocks=4)
    observe(history, "ab", 0)
    # The log2 of 4 + 2 = 6 is approximated as 2.5, so the gap is half an octave. The next gap has
    # log2(19) - 2 = 4.1875 - 2 octaves, so the mean is 1.34: class 2.
    assert observe(history, "a", 2) == [NUM_GAP_CLASSES + 1]
    assert observe(history, "a", 17) == [2 * NUM_GAP_CLASSES + 2]


def test_a_new_tail_inherits_the_gap_of_its_path() -> None:
    history = History(9, 1, gap_unit=8, capacity_blocks=4)
    assert observe(history, "ab", 0) == [0, 0]
    known, _, new, newest = observe(history, "abcd", 24)
    assert (known, new, newest) == (NUM_GAP_CLASSES + 3, 3, 3)


def test_a_request_that_grows_inherits_from_its_own_last_block() -> None:
    history = History(9, 1, gap_unit=8, capacity_blocks=4)
    observe(history, "a", 0)
    observe(history, "a", 24)
    assert observe(history, "ab", 30, start=1) == [3]
    assert observe(history, "xy", 30, start=1) == [0], "x is unknown"


def test_a_path_is_forgotten_from_its_tail_and_an_unknown_key_is_new() -> None:
    history = History(4, 1, gap_unit=8, capacity_blocks=4)
    observe(history, "abc", 5)
    observe(history, "xy", 9)
    assert history.keys.members(0) == keys("xyab")
    assert classify(history, "abcx", 11) == [(0, 5), (0, 5), (0, 11), (0, 9)]
    history.clear()
    assert classify(history, "a", 12) == [(0, 12)]


def test_the_head_of_a_request_longer_than_the_history_is_known() -> None:
    history = History(2, 1, gap_unit=8, capacity_blocks=4)
    observe(history, "ab", 0)
    assert observe(history, "abcd", 24) == [NUM_GAP_CLASSES + 3] * 2 + [3, 3]
    assert history.keys.members(0) == keys("ab")


# ---- the life table


def life_table(sample_capacity: int = 9, half_life: int = 1 << 40, num_classes: int = 4) -> Lifetimes:
    """Create a life table that samples all keys, which are single letters; two classes form a group."""
    table = Lifetimes(num_classes, 2, 1, 1, 1, sample_capacity, half_life)
    table.sampled_one_in = 1
    return table


def live(table: Lifetimes, letters: str, now: int, block_class: int = 0) -> None:
    parts.live(table, Keys.pack(keys(letters), 1), now, block_class)


def counts(table: Lifetimes, block_class: int = 0, ages: int = 6) -> tuple[list[float], list[float]]:
    return table.exposed[block_class, :ages].tolist(), table.reused[block_class, :ages].tolist()


def test_the_life_table_counts_as_by_hand() -> None:
    table = life_table()
    live(table, "abc", 0)
    assert counts(table) == ([3, 0, 0, 0, 0, 0], [0] * 6)
    live(table, "a", 7)  # in the first bucket, 0 to 7
    assert counts(table) == ([4, 0, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0])
    live(table, "b", 8)  # b and c have seen the second bucket, 8 to 10
    assert counts(table) == ([5, 2, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0])
    live(table, "c", 25)  # c is 25, in 22 to 31; a is 18, in 16 to 21; b is 17, there too
    assert counts(table) == ([6, 4, 3, 3, 1, 0], [1, 1, 0, 0, 1, 0])


def test_a_life_counts_in_the_class_of_its_beginning() -> None:
    table = life_table()
    live(table, "a", 0, block_class=0)
    live(table, "a", 9, block_class=3)
    assert counts(table, 0) == ([1, 1, 0, 0, 0, 0], [0, 1, 0, 0, 0, 0])
    assert counts(table, 3) == ([1, 0, 0, 0, 0, 0], [0] * 6)


def test_the_oldest_key_of_a_full_sample_is_forgotten() -> None:
    table = life_table(sample_capacity=2)
    live(table, "ab", 0)
    live(table, "c", 9)  # the tail, b, is forgotten
    live(table, "b", 10)  # a is forgotten for b, which is new
    assert counts(table) == ([4, 2, 0, 0, 0, 0], [0] * 6)
    assert sorted(table.begun.keys.members(0)) == keys("bc")


def test_after_its_requests_end_a_block_has_two_lives() -> None:
    table = life_table()
    live(table, "ab", 0)
    parts.live_after(table, Keys.pack(keys("a"), 1), 9, 3)
    live(table, "b", 17)  # b is used at 17, in 16 to 21; a has seen those ages, and is 8 from its end
    assert counts(table, 0) == ([3, 2, 2, 2, 0, 0], [0, 0, 0, 1, 0, 0])
    assert counts(table, 3) == ([1, 1, 0, 0, 0, 0], [0] * 6)
    live(table, "a", 18)
    assert counts(table, 0)[1] == [0, 0, 0, 2, 0, 0]
    assert counts(table, 3)[1] == [0, 1, 0, 0, 0, 0]
    live(table, "a", 20)
    assert counts(table, 3)[1] == [0, 1, 0, 0, 0, 0], "a use also ends the life since the end"


def test_evidence_fades_with_its_half_life() -> None:
    table = life_table(half_life=100)
    live(table, "ab", 0)
    live(table, "a", 4)
    live(table, "x", 104)
    exposed, reused = counts(table)
    # Evaluated at 0 and at 104; there all counts so far, including a and b at 104, fade by 2 ** -1.04.
    faded = 2**-1.04
    assert reused[0] == pytest.approx(1 * faded)
    assert exposed[0] == pytest.approx((3 + 1) * faded)
    table.clear()
    assert not table.exposed.any()
    assert not table.reused.any()


def test_small_caches_sample_more_keys() -> None:
    assert Lifetimes(2, 1, 1, 10, 8, 64, 1).sampled_one_in == 4
    assert Lifetimes(2, 1, 1, 64 * 4 * 2 // 3, 8, 64, 1).sampled_one_in == 8
    table = Lifetimes(1, 1, 1, 10, 2, 64, 1)
    letters = [bytes([n, n]) for n in range(60)]
    parts.live(table, Keys.pack(letters, 2), 0)
    assert sorted(table.begun.keys.members(0)) == [key for key in letters if hash_of(key) % 4 == 0]


@given(st.integers(0, 2**32 - 1))
def test_worth_is_a_gittins_index(seed: int) -> None:
    rng = np.random.default_rng(seed)
    table = life_table(num_classes=4)
    table.exposed[:] = rng.integers(0, 2_000, table.exposed.shape) * rng.integers(0, 2, table.exposed.shape)
    table.reused[:] = np.floor(table.exposed * rng.random(table.exposed.shape) * rng.random())
    table.is_known[:] = 1
    table.evaluate(0)
    everyone = (table.reused.sum(0) + 0.5) / (table.exposed.sum(0) + 1.5)
    for each in range(4):
        group = slice(each // 2 * 2, each // 2 * 2 + 2)
        of_group = (table.reused[group].sum(0) + 50 * everyone) / (table.exposed[group].sum(0) + 50)
        chance = (table.reused[each] + 50 * of_group) / (table.exposed[each] + 50)
        width = np.diff(table.bounds)
        for age in range(NUM_AGES):
            alive = np.cumprod([1.0, *(1 - chance[age:-1])])
            hits = np.cumsum(alive * chance[age:])
            slot_time = table.entering + np.cumsum(alive * (1 - chance[age:] / 2) * width[age:])
            assert table.worth[table.rows[each], age] == pytest.approx((hits / slot_time).max(), rel=1e-4)


# ---- evictions and refusals


class Learnt(Hazard):
    """A Hazard policy after its warm-up that does not learn during a test."""

    name = "learnt"
    history_capacity, sample_capacity, warm_up, promise = 64, 64, 0, 1.0

    def teach(self, *worth_by_count: float) -> None:
        """Set the worth of blocks used once, twice, 3-4 times, ..., at all ages.

        The last value is for all higher counts.
        """
        self.state.oldest_victim = 1
        table = self.lifetimes
        table.rows[:] = np.arange(len(table.rows))
        for each, worth in enumerate(worth_by_count):
            table.worth[each * NUM_GAP_CLASSES * NUM_KINDS :] = worth
        table.next_evaluation = 1 << 60


def learnt(
    capacity_blocks: int, *worth_by_count: float, write_cost: float | None = None, **options: Any
) -> OffloadingManager:
    manager = make(type("Learnt", (Learnt,), {"write_cost": write_cost}), capacity_blocks, **options)
    assert isinstance(manager.policy, Learnt)
    manager.policy.teach(*worth_by_count)
    return manager


def request(manager: OffloadingManager, letters: str) -> tuple[str, str, int]:
    """Run a request; return stored blocks, victims, and the number of refused blocks."""
    ctx = manager.begin_request(letters, keys(letters))
    plan = store(manager, letters, ctx)
    manager.finish_request(ctx)
    audit(manager)
    return text(plan.keys), text(plan.evicted), plan.num_refused


def test_a_new_block_that_is_worth_less_is_refused() -> None:
    manager = learnt(2, 0.1, 1.0)
    use(manager, "abab")
    assert request(manager, "x") == ("", "", 1)
    assert states(manager, "abx") == [HIT, HIT, MISS]
    # At its second request x is a block used twice: worth as much as the others, but more recent.
    assert request(manager, "x") == ("x", "a", 0)


def test_a_new_block_that_is_worth_more_is_taken() -> None:
    manager = learnt(2, 1.0, 0.1)
    use(manager, "aab")
    assert request(manager, "x") == ("x", "a", 0)


def test_a_free_slot_is_never_refused() -> None:
    manager = learnt(3, 0.1, 1.0)
    use(manager, "aabb")
    assert request(manager, "x") == ("x", "", 0)


def test_all_blocks_after_a_refused_block_are_refused() -> None:
    manager = learnt(3, 0.1, 1.0)
    use(manager, "abcaab")
    # x is worth as much as c, because both were used once; y would have to replace a or b.
    assert request(manager, "xyz") == ("x", "c", 2)


@pytest.mark.parametrize(
    ("store", "write_cost", "is_taken"),
    [
        (ON_COMPUTE, None, False),
        (ON_DEVICE_EVICTION, None, True),
        (ON_COMPUTE, -0.2, True),
        (ON_DEVICE_EVICTION, 0.0, False),
        (ON_COMPUTE, -0.1, False),
    ],
)
def test_the_write_cost_is_a_dial(store: str, write_cost: float | None, is_taken: bool) -> None:
    manager = learnt(1, 0.85, 1.0, store=store, write_cost=write_cost)
    if store == ON_DEVICE_EVICTION:  # an offer to a victim tier is no use
        manager.touch(keys("ax"))
    manager.touch(keys("a"))
    manager.complete_store(begin_store(manager, "a"))
    assert len(begin_store(manager, "x").keys) == is_taken


def test_the_deepest_block_of_a_path_leaves_first() -> None:
    manager = learnt(4, 1.0, 0.1)
    request(manager, "ab")
    request(manager, "abc")
    request(manager, "d")
    # a and b are worth least; b is colder, and c behind b is useless without it.
    assert request(manager, "x") == ("x", "c", 0)
    assert request(manager, "y") == ("y", "b", 0)
    assert request(manager, "z") == ("z", "a", 0)


def test_the_candidate_leaves_if_the_deepest_block_is_protected() -> None:
    manager = learnt(4, 1.0, 0.1)
    request(manager, "ab")
    request(manager, "abc")
    request(manager, "d")
    reading = load(manager, "c")
    assert request(manager, "x") == ("x", "b", 0)
    manager.complete_load(reading)
    assert request(manager, "y") == ("y", "c", 0)


def test_a_block_belongs_to_the_run_of_its_last_request() -> None:
    manager = learnt(5, 1.0, 0.1)
    request(manager, "abc")
    request(manager, "ax")
    request(manager, "bc")  # a path of its own, as far as it is known
    assert request(manager, "yz") == ("yz", "x", 0), "the candidate a marks the path ax"
    assert request(manager, "v") == ("v", "a", 0)
    assert request(manager, "w") == ("w", "c", 0)


@pytest.mark.parametrize(("worth_of_a_new_one", "is_taken"), [(0.34, True), (0.33, False)])
def test_worth_is_linear_between_two_ages(worth_of_a_new_one: float, is_taken: bool) -> None:
    manager = learnt(2, 9.0)
    policy: Any = manager.policy
    policy.lifetimes.worth[0, :3] = worth_of_a_new_one, 0.5, 0.25  # at the ages of 0, 8 and 11
    use(manager, "ab")
    for _ in range(8):
        manager.touch(keys("b"))
    # a has the age 10 now: two thirds of the way from 0.5 to 0.25.
    assert request(manager, "x") == (("x", "a", 0) if is_taken else ("", "", 1))


def use_on_device(manager: OffloadingManager, letters: str, times: int) -> None:
    for _ in range(times):
        manager.finish_request(manager.begin_request(letters, keys(letters)))


def test_in_a_victim_tier_each_block_is_rated_independently() -> None:
    manager = learnt(4, 0.3, 0.4, 2.0, 9.0, store=ON_DEVICE_EVICTION, write_cost=0.0)
    for letters, times in (("xy", 2), ("mn", 5)):
        use_on_device(manager, letters, times)
        store(manager, letters)
    use_on_device(manager, "pq", 1)
    use_on_device(manager, "ab", 3)
    # Tail first: q is worth less than y, and b replaces y; p is worth less than x, and a replaces x.
    plan = begin_store(manager, "apbq")
    assert (text(plan.keys), sorted(plan.evicted), plan.num_refused) == ("ab", keys("xy"), 2)
    assert plan.missing_rows.tolist() == [0, 2, 1, 3]


def test_in_a_victim_tier_a_new_block_may_be_replaced_by_an_earlier_one() -> None:
    manager = learnt(2, 0.5, 0.4, 2.0, 9.0, store=ON_DEVICE_EVICTION)
    for letters, times in (("x", 2), ("y", 5)):
        use_on_device(manager, letters, times)
        store(manager, letters)
    use_on_device(manager, "q", 1)
    use_on_device(manager, "a", 3)
    plan = begin_store(manager, "aq")
    # q is worth more than x, and a more than q.
    assert (text(plan.keys), text(plan.evicted), plan.num_refused) == ("a", "x", 1)
    assert plan.missing_rows.tolist() == [0, 1]


def test_in_a_victim_tier_requests_of_one_batch_keep_separate_runs() -> None:
    manager = learnt(5, 1.0, 0.1, store=ON_DEVICE_EVICTION)
    use_on_device(manager, "ab", 1)
    use_on_device(manager, "cd", 1)
    store(manager, "ab")
    manager.complete_load(load(manager, "ab"))
    # The device drops both paths: a and b are kept, c and d come.
    plan = begin_store(manager, "abcd")
    assert (text(plan.keys), manager.stats().kept) == ("cd", 2)
    policy: Any = manager.policy
    runs = [int(policy.state.runs.runs[slot, RUN_OF]) for slot in policy.order()]
    assert text(manager.index.key_at(slot) for slot in policy.order()) == "dcba"
    assert runs[0] == runs[1] != runs[2] == runs[3]


# ---- ends of requests


def last_used(manager: OffloadingManager, letters: str) -> list[int]:
    """Return the last use of these blocks in the policy or its twin."""
    policy: Any = manager.policy
    if isinstance(policy, NaiveHazard):
        return [policy.history[key].last for key in keys(letters)]
    return [when for _, when in parts.classify(policy.history, Keys.pack(keys(letters), 1), -1)]


@pytest.mark.parametrize("policy", [Hazard, NaiveHazard])
def test_ages_count_from_the_end_unless_no_request_came_since(policy: Any) -> None:
    manager = make(policy, 9)
    first = manager.begin_request("1", keys("sab"))
    manager.touch(keys("sab"), first)
    second = manager.begin_request("2", keys("sxy"))
    manager.touch(keys("sxy"), second)
    manager.finish_request(first)
    assert last_used(manager, "sabxy") == [6, 6, 6, 3, 3], "the second one shares the system prompt"
    manager.finish_request(second)
    assert last_used(manager, "sabxy") == [6, 6, 6, 6, 6]
    third = manager.begin_request("3", keys("sxy"))
    manager.touch(keys("sxy"), third)
    manager.finish_request(third)
    assert last_used(manager, "sabxy") == [6, 6, 6, 6, 6], "the request ended at once"
    fourth = manager.begin_request("4", keys("sab"))
    manager.touch(keys("sab"), fourth)
    manager.finish_request(fourth, hints=Hints("stop"))
    assert last_used(manager, "sabxy") == [9, 9, 9, 6, 6], "this request too, although its label is new"


# ---- the guards


def test_hazard_is_lru_during_its_warm_up() -> None:
    manager = make(Hazard, 4)
    policy = manager.policy
    evicted = []
    for number in range(60):
        plan = manager.prepare_store([bytes([number])])
        assert plan is not None
        manager.complete_store(plan)
        evicted += list(plan.evicted)
        if policy.stats()["is_lru"]:
            assert evicted == [bytes([n]) for n in range(number - 3)]
    assert policy.stats()["is_lru"] == 0
    assert len(evicted) > 0


def promising(capacity_blocks: int = 4) -> Any:
    manager = learnt(capacity_blocks, 1.0)
    policy: Any = manager.policy
    policy.state.promise = 0.01
    return policy


def judged(policy: Any, count: int, lead: float) -> bool:
    """Return True if LRU decides after `count` more references that begin with a lead of `lead` blocks."""
    policy.history.shadow.lead = lead
    parts.keep_promise(policy.state, count)
    return bool(policy.is_lru)


def test_lru_decides_from_a_dangerous_lead_until_it_is_negligible() -> None:
    policy = promising()
    assert not judged(policy, 0, 400)
    assert judged(policy, 0, 401)
    assert judged(policy, 0, 281), "0.28 points of 100,000 references are not negligible"
    assert not judged(policy, 0, 280)


def test_hazard_decides_again_within_fifty_thousand_references() -> None:
    """The lead fades at the same rate, whatever its age and the age of the cache."""
    policy = promising()
    policy.state.references = 10_000_000
    assert judged(policy, 0, 401)
    waited = 0
    while policy.is_lru:
        assert judged(policy, 100, policy.history.shadow.lead) == policy.is_lru
        waited += 100
    assert 30_000 < waited < 40_000


def test_a_request_longer_than_the_memory_of_the_guard_leaves_no_lead() -> None:
    policy = promising()
    assert not judged(policy, 200_000, 5_000)
    assert policy.history.shadow.lead == 0


def test_the_guard_of_a_large_cache_remembers_four_turnovers() -> None:
    policy = promising(50_000)
    assert not judged(policy, 0, 800)
    assert judged(policy, 0, 801)
    assert judged(policy, 100_000, 1_200)
    assert policy.history.shadow.lead == 600


@pytest.mark.parametrize(
    ("parameters", "promised"),
    [
        ({}, 0.01),
        ({"write_cost": -0.2}, 0.01),
        ({"write_cost": 0.3}, 0.02),
        ({"write_cost": 1.0, "promise": 0.1}, 0.1),
    ],
)
def test_a_positive_write_cost_lowers_the_promise(parameters: dict[str, float], promised: float) -> None:
    for policy in (Hazard, NaiveHazard):
        made: Any = make(type("Dialled", (policy,), parameters), 4).policy
        assert (made.promised if policy is NaiveHazard else made.state.promise) == promised


def test_a_lead_over_lru_is_credited_up_to_one_percent() -> None:
    policy = promising()
    assert not judged(policy, 0, -5_000)
    assert policy.history.shadow.lead == -1_000
    assert judged(policy, 0, policy.history.shadow.lead + 1_401)


def test_a_long_time_as_lru_ends() -> None:
    """A long idle block is evicted at an untypical age. A few turnovers of the cache later, before three
    times that age have passed, Hazard must decide again.
    """
    manager = make(Hazard, 4)
    policy: Any = manager.policy
    store(manager, "z")
    for _ in range(20_000):
        use(manager, "a")
    clock = iter(range(10**6))

    def new_block() -> None:
        plan = manager.prepare_store([bytes([next(clock) % 90 + 128])])
        assert plan is not None
        manager.complete_store(plan)

    while policy.state.oldest_victim == 0:
        new_block()
    assert policy.state.oldest_victim > 15_000
    assert policy.is_lru
    for _ in range(60):
        new_block()
    assert not policy.is_lru
    assert policy.state.references < 3 * 10_000


def test_blocks_served_by_the_device_count_as_no_reuse() -> None:
    """Two tiers get the same requests; for one of them a device serves all blocks."""
    learnt_of = []
    for served in (0, 2):
        manager = make(Hazard, 8)
        for _ in range(200):
            request = manager.begin_request("r", keys("ab"))
            manager.lookup(keys("ab")[served:], request)
            plan = manager.prepare_store(keys("ab"), request)
            assert plan is not None
            manager.complete_store(plan)
            manager.finish_request(request)
        learnt_of.append(float(manager.policy.lifetimes.reused.sum()))  # type: ignore[attr-defined]
    assert learnt_of[0] > 100
    assert learnt_of[1] == 0


def finish_all(manager: OffloadingManager, label: Hints, names: str) -> None:
    """Run concurrent requests for these letters, which end with this label after all have begun."""
    requests = [manager.begin_request(name, keys(name)) for name in names]
    for name, request in zip(names, requests, strict=True):
        plan = manager.prepare_store(keys(name), request)
        if plan is not None:
            manager.complete_store(plan)
    for request in requests:
        manager.finish_request(request, hints=label)


def test_ages_count_from_the_end_of_a_request_and_its_label_is_part_of_the_class() -> None:
    manager = make(Hazard, 8)
    policy: Any = manager.policy
    finish_all(manager, Hints(finish_reason="tool_calls"), "abc")
    assert policy.state.last[policy.order()].tolist() == [3, 3, 3]
    known = parts.classify(policy.history, Keys.pack(keys("abc"), 1), 3)
    assert [last for _, last in known] == [3, 3, 3]
    assert policy.history.labels[:].max() == 1
    finish_all(manager, Hints(), "a")
    at_end = policy.history.labels[:]
    assert sorted(at_end[at_end > 0].tolist()) == [1, 1], "a new use begins without a label"


def test_an_informative_label_is_learnt() -> None:
    """Blocks of requests that ended with `go` are used again at once, with `end` never: the policy learns to
    prefer blocks with `go`."""
    manager = make(type("Eager", (HazardOfFewKeys,), {"warm_up": 0}), 6)
    rng = random.Random(5)
    number_of: dict[str, int] = {}
    for _ in range(3_000):
        label = rng.choice(["go", "end"])
        name = bytes([rng.randrange(256), rng.randrange(256)])
        for _ in range(1 + 3 * (label == "go")):
            request = manager.begin_request("r", [name[:1]])
            plan = manager.prepare_store([name[:1]], request)
            if plan is not None:
                manager.complete_store(plan)
            manager.finish_request(request, hints=Hints(finish_reason=label))
            number_of[label] = Path.over(request.memory).label
    table: Any = manager.policy.lifetimes  # type: ignore[attr-defined]
    numbers = [number_of[label] for label in ("go", "end")]
    go, end = (table.exposed[number::NUM_KINDS, 0] for number in numbers)
    for number, least, most in zip(numbers, (0.6, 0.0), (1.0, 0.1), strict=True):
        at_once = table.reused[number::NUM_KINDS, 0].sum() / table.exposed[number::NUM_KINDS, 0].sum()
        assert least <= at_once <= most
    both_seen = np.minimum(go, end).argmax()
    worth_go, worth_end = (table.worth[table.rows[number::NUM_KINDS], 0][both_seen] for number in numbers)
    assert worth_go > worth_end


def test_stats_are_reported() -> None:
    manager = make(Hazard, 4)
    use(manager, "ab")
    assert manager.stats().policy == {
        "is_lru": 1.0,
        "shadow_lead": 0.0,
        "history_keys": 2,
        "references": 2,
    }


# ---- comparisons with the twin

sizes = st.fixed_dictionaries(
    {
        "history_capacity": st.integers(1, 16),
        "sample_capacity": st.integers(1, 8),
        "half_life": st.integers(20, 100),
        "warm_up": st.integers(0, 2),
        "promise": st.sampled_from([0.0, 1e-5, 0.003, 1.0]),
    }
)
"""Small enough that histories and samples overflow within a script."""


def policy_and_twin(
    attributes: dict[str, Any], capacity_blocks: int, admission: str = "all", **options: Any
) -> list[OffloadingManager]:
    return [
        OffloadingManager(
            capacity_blocks,
            key_bytes=8,
            policy=type("Small", (policy,), attributes),
            admission=ReuseAdmission(8, 2, 40) if admission == "gated" else admission,
            **options,
        )
        for policy in (Hazard, NaiveHazard)
    ]


def led_by(lead: float, managers: list[OffloadingManager]) -> list[OffloadingManager]:
    """Set LRU's lead over the policies, as from earlier traffic."""
    for manager in managers:
        policy: Any = manager.policy
        (policy if isinstance(policy, NaiveHazard) else policy.history).shadow.lead = lead
    return managers


def state(manager: OffloadingManager) -> Any:
    """Return the whole state of Hazard or its twin in a common form."""
    audit(manager)
    policy: Any = manager.policy
    if isinstance(policy, NaiveHazard):
        blocks = {slot: (block.block_class, block.last) for slot, block in policy.blocks.items()}
        classes = {number: members[::-1] for number, members in enumerate(policy.classes) if members}
        known, sampled, shadow = (
            [*policy.history],
            [youngest_first(lives) for lives in (policy.begun, policy.ended)],
            policy.shadow.keys[::-1],
        )
        guards = [bool(policy.lru_decides), policy.oldest_victim]
    else:
        c = manager.capacity_blocks
        blocks = {
            s: (int(policy.state.lists.links[s, 2]) - c, int(policy.state.last[s])) for s in policy.order()
        }
        lists = policy.state.lists
        classes = {number: lists.members(number) for number in np.flatnonzero(lists.links[c:, 2]).tolist()}
        known, shadow = policy.history.keys.members(0), policy.history.shadow.blocks
        shadow = [policy.history.keys.index.key_at(place) for place in shadow.members(0)]
        lifetimes = policy.lifetimes
        sampled = [
            [key for age in range(NUM_AGES + 1) for key in lives.keys.members(age)]
            for lives in (lifetimes.begun, lifetimes.ended)
        ]
        guards = [bool(policy.state.lru_decides), policy.state.oldest_victim]
    return blocks, classes, known, sampled, shadow, guards, policy.order(), policy.stats()


def youngest_first(lives: dict[bytes, Sampled]) -> list[bytes]:
    """Return the keys with the youngest first, and the stopped ones last."""
    stopped = [key for key, life in lives.items() if life.has_stopped]
    return [key for key in lives if key not in stopped][::-1] + stopped[::-1]


@pytest.mark.parametrize("store", STORES)
@given(
    scripts(num_keys=16, max_steps=60),
    st.integers(1, 6),
    sizes,
    st.sampled_from(["all", "gated"]),
    st.sampled_from([None, 0.3]),
    st.sampled_from([0.0, 2.0, 200.0]),
)
def test_decides_as_its_naive_twin(
    store: str,
    script: list[Step],
    capacity_blocks: int,
    attributes: dict[str, Any],
    admission: str,
    write_cost: float | None,
    lead: float,
) -> None:
    attributes = {**attributes, "write_cost": write_cost}
    managers = policy_and_twin(attributes, capacity_blocks, store=store, admission=admission)
    fast, naive = led_by(lead, managers)
    for decision, expected in zip(play(fast, script, state), play(naive, script, state), strict=True):
        assert decision == expected


@pytest.mark.parametrize("store", STORES)
@given(
    scripts(num_keys=16, max_steps=60),
    st.lists(st.tuples(st.integers(1, 6), st.integers(0, 30)), max_size=3),
    sizes,
    st.sampled_from([0.0, 2.0]),
)
def test_decides_as_its_naive_twin_with_resizes(
    store: str,
    script: list[Step],
    resizes: list[tuple[int, int]],
    attributes: dict[str, Any],
    lead: float,
) -> None:
    logs = []
    for manager in led_by(lead, policy_and_twin(attributes, 6, store=store)):
        steps, size_at = itertools.count(), {step: size for size, step in resizes}

        def look(manager: OffloadingManager, steps: Any = steps, size_at: Any = size_at) -> Any:
            manager.begin_resize(size_at.get(next(steps), manager._wanted_blocks))
            manager.advance_resize(2)
            return state(manager)

        logs.append(play(manager, script, look))
    assert logs[0] == logs[1]


class _OfTenants:
    """A manager whose requests belong to three tenants in turn, without hints."""

    def __init__(self, manager: OffloadingManager) -> None:
        self.manager, self._numbers = manager, itertools.cycle([1, 2, 0])

    def begin_request(self, *arguments: Any, **keywords: Any) -> RequestContext:
        ctx = self.manager.begin_request(*arguments, **keywords)
        ctx.set_tenant(next(self._numbers))
        return ctx

    def __getattr__(self, name: str) -> Any:
        return getattr(self.manager, name)


@pytest.mark.parametrize("store", STORES)
@given(
    scripts(num_keys=40, max_steps=80),
    st.integers(6, 12),
    st.integers(1, 5),
    sizes,
    st.sampled_from([0.0, 200.0]),
)
def test_decides_as_its_naive_twin_with_tenants(
    store: str,
    script: list[Step],
    capacity: int,
    low: int,
    attributes: dict[str, Any],
    lead: float,
) -> None:
    logs = []
    for manager in led_by(lead, policy_and_twin(attributes, capacity, store=store)):
        manager.set_tenants({"a": Quota(low), "b": Quota(1, capacity - low), "other": Quota(0, low)})
        manager.store_mode.cache.tenants.stride = 1
        logs.append(play(cast(Any, _OfTenants(manager)), script, lambda _, of=manager: state(of)))
    assert logs[0] == logs[1]


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize(
    ("seed", "num_steps"),
    [(1, 250), pytest.param(1, 700, marks=pytest.mark.slow), pytest.param(3, 700, marks=pytest.mark.slow)],
)
def test_decides_as_its_naive_twin_for_long(store: str, seed: int, num_steps: int) -> None:
    attributes = {
        "history_capacity": 9,
        "sample_capacity": 1,
        "half_life": 40,
        "warm_up": 1,
        "promise": 0.0,
    }
    script = random_script(seed, num_steps)
    reached: set[str] = set()

    def look(manager: OffloadingManager) -> Any:
        policy: Any = manager.policy
        reached.update(name for name, is_so in {
            "LRU decides": policy.is_lru,
            "it decides itself": not policy.is_lru,
            "LRU has led by too much": policy.state.lru_decides,
            "the history is full": policy.history.keys.lists.size(1) == 0,
            "the sample is full": policy.lifetimes.begun.keys.lists.size(NUM_AGES) == 0,
            "old ages are known": policy.lifetimes.reused[:, 4:].any(),
            "a block is refused": manager.stats().refused > 0,
            "a block is kept": manager.stats().kept > 0 or store == ON_COMPUTE,
        }.items() if is_so)  # fmt: skip
        return state(manager)

    for lead in (0.0, 2.0, 50.0):
        fast, naive = led_by(lead, policy_and_twin(attributes, 4, store=store))
        assert play(fast, script, look) == play(naive, script, state)
    assert len(reached) == 8, reached


@pytest.mark.parametrize("device_blocks", [0, 60])
@pytest.mark.parametrize("capacity", [20, 90])
@pytest.mark.parametrize("small", [False, True])
def test_replays_as_its_naive_twin(device_blocks: int, capacity: int, small: bool) -> None:
    attributes = {"history_capacity": 64, "sample_capacity": 32, "half_life": 300}
    trace = generate(builtin("chat", sessions=60))
    digests = []
    for policy in (Hazard, NaiveHazard):
        tried = type("Small", (policy,), attributes if small else {})
        store = ON_DEVICE_EVICTION if device_blocks else ON_COMPUTE
        run = Replay(trace, ReplayConfig(capacity, tried, "all", device_blocks, store))
        digests.append((run.run().decisions_sha256, run.manager.policy.stats()))
        audit(run.manager)
    assert digests[0] == digests[1]


@given(scripts(max_steps=60), st.integers(1, 6))
def test_while_it_is_lru_it_decides_as_lru(script: list[Step], capacity_blocks: int) -> None:
    cautious = type(
        "Cautious", (Hazard,), {"warm_up": 1 << 40, "history_capacity": 64, "sample_capacity": 64}
    )
    for mode in STORES:
        logs = []
        for policy in (cautious, "lru"):
            manager = OffloadingManager(capacity_blocks, key_bytes=8, policy=policy, store=mode)
            log = play(manager, script)
            if mode == ON_DEVICE_EVICTION:  # a victim tier has the same victims in the opposite order
                log = [(action, _without_slots(decision)) for action, decision, _ in log]
            logs.append(log)
        assert logs[0] == logs[1]


def _without_slots(decision: Any) -> Any:
    if isinstance(decision, tuple) and len(decision) == 4:
        stored, _, evicted, refused = decision
        return stored, sorted(evicted), refused
    return decision


@pytest.mark.parametrize("store", STORES)
def test_reset_forgets_everything(store: str) -> None:
    attributes = {
        "history_capacity": 9,
        "sample_capacity": 1,
        "half_life": 40,
        "warm_up": 1,
    }
    used, fresh = (policy_and_twin(attributes, 4, store=store)[0] for _ in range(2))
    # Waiting requests keep waiting.
    play(used, [*random_script(1, 700), *(("served", number, []) for number in range(3))])
    assert used.policy.stats()["references"] > 400
    used.reset(drop_in_flight=True)
    audit(used)
    script = random_script(2, 700)
    for decision, expected in zip(play(used, script, state), play(fresh, script, state), strict=True):
        assert decision == expected


@pytest.mark.parametrize("store", STORES)
def test_it_decides_the_same_again(store: str) -> None:
    logs = []
    for _ in range(2):
        manager = OffloadingManager(4, key_bytes=8, policy=Learnt, store=store)
        logs.append(play(manager, random_script(3, 400), state))
    assert logs[0] == logs[1]


def test_hashes_of_the_twin_are_those_of_the_index() -> None:
    """Equal hashes are necessary for the twin to sample the same keys."""
    for key_bytes in (1, 7, 8, 20, 36):
        table = Lifetimes(1, 1, 1, 10, key_bytes, 512, 1)
        batch = [key_of(n, key_bytes) for n in range(200)]
        parts.live(table, Keys.pack(batch, key_bytes), 0)
        assert sorted(table.begun.keys.members(0)) == [key for key in batch if hash_of(key) % 4 == 0]
