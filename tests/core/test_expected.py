"""Requests in the engine's queue: their expected blocks are evicted last. See `testing.state_machine`."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload.core.expected import MOST_KEYS, most_expected
from kvoffload.core.manager import OffloadingManager
from kvoffload.core.plans import ON_DEVICE_EVICTION
from kvoffload.core.policy import POLICIES
from kvoffload.core.request import RequestContext
from kvoffload.errors import ConfigError, MisuseError
from kvoffload.policies.hazard.policy import Hazard
from kvoffload.replay.config import ReplayConfig
from kvoffload.replay.replay import Replay
from kvoffload.structures.index import Index
from kvoffload.structures.keys import Keys
from kvoffload.testing.audit import audit
from kvoffload.tiers.kinds.simulated import SimulatedOptions
from kvoffload.traces.sessions import generate
from kvoffload.traces.workloads import builtin
from support.letters import HIT, MISS, keys, load, make, states, store, text, use
from support.naive.hazard import NaiveHazard
from support.naive.lru import NaiveLRU
from support.run_cli import kvoffload
from support.small_hazard import HazardOfFewKeys

BUILTIN = [name for name in POLICIES.names() if ":" not in name]


def wait(manager: OffloadingManager, letters: str) -> RequestContext:
    ctx = manager.begin_request(letters, keys(letters))
    manager.expect(ctx)
    return ctx


def num_expected(manager: OffloadingManager) -> int:
    return manager.counters().expected


@pytest.mark.parametrize("policy", BUILTIN)
def test_other_blocks_leave_before_expected_blocks(policy: str) -> None:
    manager = make(policy, 8)
    use(manager, "abcdefgh")
    waiting = wait(manager, "abc")
    for letter in "qrstuvwxyz":
        store(manager, letter)
        assert states(manager, "abc") == [HIT] * 3, f"{policy} evicted an expected block for {letter}"
        audit(manager)
    manager.withdraw(waiting)
    store(manager, "ABCDEFGH")
    assert states(manager, "abc") == [MISS] * 3, "no request expects them any longer"


def test_expected_blocks_are_evicted_if_there_is_no_other_room() -> None:
    manager = make("lru", 4)
    use(manager, "abcd")
    wait(manager, "ab")
    assert text(store(manager, "xy").evicted) == "cd"
    assert sorted(text(store(manager, "stu").evicted)) == ["a", "b", "y"]


def test_absent_blocks_are_expected_too() -> None:
    manager = make("lru", 4)
    wait(manager, "ab")
    store(manager, "ab")
    assert text(store(manager, "cdef").evicted) == "ba", "otherwise the four blocks do not fit"
    store(manager, "ab")
    assert text(store(manager, "xy").evicted) == "dc"
    assert states(manager, "ab") == [HIT, HIT]


def test_a_key_is_expected_until_its_last_waiting_request_is_served() -> None:
    manager = make("lru", 8)
    first, second = wait(manager, "ab"), wait(manager, "ac")
    assert num_expected(manager) == 3
    manager.withdraw(first)
    assert num_expected(manager) == 2
    manager.withdraw(first)
    assert num_expected(manager) == 2, "a block counts once"
    manager.finish_request(second)
    assert num_expected(manager) == 0, "a finished request does not wait"
    audit(manager)


def test_the_longest_waiting_request_gets_the_room_first() -> None:
    manager = make("lru", 8)  # seven keys at most
    first, second, third = wait(manager, "abcd"), wait(manager, "pqrst"), wait(manager, "x")
    assert num_expected(manager) == 7
    use(manager, "tx")
    store(manager, "uv")
    manager.withdraw(first)
    assert num_expected(manager) == 6, "all keys of the second request, and the keys of the third"
    manager.withdraw(second)
    assert num_expected(manager) == 1
    manager.withdraw(third)
    assert num_expected(manager) == 0


def test_a_grown_path_is_expected_after_a_second_call() -> None:
    manager = make("lru", 8)
    ctx = wait(manager, "ab")
    manager.lookup(keys("abcd"), ctx)
    assert num_expected(manager) == 2
    manager.expect(ctx)
    assert num_expected(manager) == 4
    manager.withdraw(ctx)
    assert num_expected(manager) == 0


def test_a_long_path_moves_to_more_memory_and_is_still_expected_once() -> None:
    manager = OffloadingManager(400, key_bytes=2)
    path = [bytes([n // 256, n % 256]) for n in range(300)]
    ctx = manager.begin_request("long", path[:3])
    manager.expect(ctx)
    manager.lookup(path, ctx)
    manager.expect(ctx)
    assert num_expected(manager) == 300
    manager.withdraw(ctx)
    assert num_expected(manager) == 0


def test_a_reset_keeps_the_waiting_requests() -> None:
    manager = make("lru", 4)
    ctx = wait(manager, "ab")
    use(manager, "abcd")
    manager.reset()
    assert num_expected(manager) == 2
    use(manager, "abcd")
    assert text(store(manager, "xy").evicted) == "cd"
    manager.withdraw(ctx)
    assert num_expected(manager) == 0


def test_in_a_victim_tier_duplicates_leave_first_though_they_are_expected() -> None:
    manager = make("lru", 4, store=ON_DEVICE_EVICTION)
    store(manager, "abcd")
    manager.complete_load(load(manager, "cd"))
    wait(manager, "abcd")
    assert sorted(text(store(manager, "xy").evicted)) == ["c", "d"]
    assert text(store(manager, "z").evicted) in ("x", "y")
    assert states(manager, "ab") == [HIT] * 2


@pytest.mark.parametrize("policy", [Hazard, NaiveHazard])
@pytest.mark.parametrize("store_mode", ["on-compute", ON_DEVICE_EVICTION])
@pytest.mark.slow
def test_expected_blocks_are_not_refused(policy: Any, store_mode: str) -> None:
    """A policy that refuses every new block that no waiting request expects."""

    class Refuses(policy):  # type: ignore[misc]
        write_cost = 1000.0
        warm_up, promise = 0, 1.0

    manager = make(Refuses, 4, store=store_mode)
    for letter in "abcdabcd":
        manager.touch(keys(letter))
        store(manager, letter)
    learnt: Any = manager.policy
    (learnt if policy is NaiveHazard else learnt.state).oldest_victim = 1.0  # otherwise it acts as LRU
    for _ in range(3):
        store(manager, "wxyz")
    refused = manager.stats().refused
    assert refused > 0
    wait(manager, "w")
    assert text(store(manager, "w").keys) == "w"
    assert manager.stats().refused == refused
    assert text(store(manager, "x").keys) == "", "no request expects this block"


class RecordsExpected(NaiveLRU):
    """A policy in Python that records expected blocks."""

    def __init__(self, index: Index) -> None:
        super().__init__(index)
        self.reports: list[str] = []

    def expect(self, path: Keys, start: int) -> None:
        self.reports.append(f"{text(path[:start])}+{text(path[start:])}")


def test_each_expected_block_is_reported_once() -> None:
    manager = make(RecordsExpected, 8)  # seven keys at most
    reports = cast(RecordsExpected, manager.policy).reports
    first, second = wait(manager, "abcd"), wait(manager, "pqrst")
    assert reports == ["+abcd", "+pqr"], "as many blocks of the second request as fit"
    manager.lookup(keys("abcdx"), first)
    manager.expect(first)
    assert reports[2:] == [], "no room for the fifth block"
    manager.withdraw(first)
    assert reports[2:] == ["pqr+st"]
    manager.expect(second)
    manager.withdraw(second)
    manager.expect(second)
    assert reports[3:] == [], "already reported"


def test_hazard_learns_when_a_block_is_expected_and_not_when_it_is_served() -> None:
    class Sampling(HazardOfFewKeys):
        sample_capacity = 64

    learnt = []
    for has_queue in (False, True):
        manager = make(Sampling, 64)
        lives = cast(Hazard, manager.policy).lifetimes
        use(manager, path := "abcdefgh")
        waiting = wait(manager, path) if has_queue else manager.begin_request(path, keys(path))
        for letter in "ijklmnopqrstuvwxyzABCDEFGHIJKLMNOP":
            use(manager, letter)
        manager.touch(keys(path), waiting)
        learnt.append([bucket for _, bucket in np.argwhere(lives.reused > 0)])
    assert len(learnt[0]) == len(learnt[1]) > 0
    assert max(learnt[1]) < min(learnt[0]), "at the age at which the block became expected"


def test_a_cache_of_one_block_expects_nothing() -> None:
    manager = make("lru", 1)
    ctx = wait(manager, "ab")
    assert num_expected(manager) == 0
    assert text(store(manager, "x").keys) == "x"
    manager.withdraw(ctx)


def test_memory_is_bounded() -> None:
    assert most_expected(10_000_000) == MOST_KEYS


def test_without_a_queue_there_is_no_memory() -> None:
    manager = make("lru", 64)
    assert len(manager.store_mode.cache.expected.counts) == 0
    ctx = wait(manager, "ab")
    assert len(manager.store_mode.cache.expected.counts) == most_expected(64)
    assert num_expected(manager) == 2
    manager.withdraw(ctx)
    assert num_expected(manager) == 0


def test_a_finished_or_foreign_request_cannot_wait() -> None:
    manager, other = make("lru", 4), make("lru", 4)
    ctx = manager.begin_request("a", keys("a"))
    with pytest.raises(MisuseError, match="another manager"):
        other.expect(ctx)
    manager.finish_request(ctx)
    with pytest.raises(MisuseError, match="has finished"):
        manager.expect(ctx)
    manager.withdraw(ctx)


# ---- replays


@pytest.fixture(scope="module")
def agents() -> Any:
    return generate(builtin("agent", sessions=60))


@pytest.mark.parametrize(
    "mode", [{}, {"device_blocks": 300, "store": ON_DEVICE_EVICTION}], ids=["", "victim"]
)
@pytest.mark.parametrize("policy", ["lru", "hazard", "s3fifo"])
def test_a_known_queue_increases_hits(agents: Any, policy: str, mode: dict[str, Any]) -> None:
    blind, knowing = (
        Replay(agents, ReplayConfig(300, policy, **mode, queue_requests=length)) for length in (0, 16)
    )
    reports = [blind.run(), knowing.run()]
    assert reports[1].prefix_hit_ratio > reports[0].prefix_hit_ratio + 0.005
    assert reports[1].prefix_hit_ratio <= reports[1].optimum_hit_ratio
    assert [report.queue_requests for report in reports] == [0, 16]
    assert num_expected(knowing.manager) == 0
    audit(knowing.manager)


@pytest.mark.slow
def test_waiting_requests_are_served_and_tiers_are_credited(agents: Any) -> None:
    config = ReplayConfig(300, queue_requests=16, tiers=(SimulatedOptions(capacity="2000"),))
    waited = Replay(agents, config)
    report = waited.run()
    assert waited.manager.waits == {}, "no request still waits"  # type: ignore[attr-defined]
    assert waited.manager.counts.read_ahead > 0  # type: ignore[attr-defined]
    assert report.tiers[1].hit_blocks > 0, "blocks read ahead count as hits of the tier"
    assert report.prefix_hit_ratio >= Replay(agents, replace(config, tiers=())).run().prefix_hit_ratio


@given(st.integers(-3, 3) | st.sampled_from([1 << 17, 1.5, "many"]))
def test_an_invalid_length_is_one_clear_error(length: Any) -> None:
    trace = generate(builtin("chat", sessions=3))
    if isinstance(length, int) and 0 <= length <= 3:
        Replay(trace, ReplayConfig(10, queue_requests=length)).run()
    else:
        with pytest.raises(ConfigError, match=r"queue: .* allowed: a whole number from 0 to 65536"):
            Replay(trace, ReplayConfig(10, queue_requests=length))


def test_the_command_prints_its_assumption() -> None:
    done = kvoffload("replay", "chat", "--no-data", "--quiet", "--capacity", "2%", "--queue", "8")
    assert "The next 8 requests wait, and are expected: assumed." in done.stdout
    as_json = kvoffload("replay", "chat", "--no-data", "--quiet", "--queue", "8", "--format", "json")
    assert json.loads(as_json.stdout)["queue_requests"] == 8
    wrong = kvoffload("replay", "chat", "--queue", "-1")
    assert (
        wrong.returncode,
        "queue: -1 is invalid; allowed: a whole number from 0 to 65536" in wrong.stderr,
    ) == (
        2,
        True,
    )
