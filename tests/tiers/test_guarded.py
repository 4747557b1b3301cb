"""A guarded tier that raises in any call: misses, counted failures, and later use of the tier."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvoffload.tiering.tiered_manager import TieredManager
from kvoffload.tiers.contract import NO_JOB, GroupedTier, JobResult
from kvoffload.tiers.guarded import GuardedTier
from support.letters import HIT, MISS, keys
from support.scripted_tier import ScriptedSharedTier, ScriptedTier
from support.tiering_rig import BLOCK_BYTES, RETRY, Clock, Rig

METHODS = [
    "begin_request", "finish_request", "contains", "unknown", "submit_probe", "submit_read", "submit_write",
    "finished", "delete", "clear", "drain", "stats", "close", "queue_room", "take_changes",
    "extend_path", "cut", "read_room",
]  # fmt: skip


class Raises:
    """A hook that raises in calls of these methods of a tier."""

    def __init__(self, *methods: str) -> None:
        self.methods, self.num_raised = {*methods}, 0

    def __call__(self, method: str) -> None:
        if method in self.methods:
            self.num_raised += 1
            raise KeyError(method)


class ScriptedGroups(ScriptedTier, GroupedTier):
    """A tier whose group methods can raise too."""

    group_blocks = 1

    def extend_path(self, request: object, path: Any) -> None:
        self.on_call("extend_path")

    def cut(self, keys: Any, room: int) -> int:
        self.on_call("cut")
        return min(room, len(keys))


class ScriptedSharedGroups(ScriptedGroups, ScriptedSharedTier):
    """A shared tier whose group methods can raise too."""


def rig_with(tier: ScriptedTier, **options: Any) -> Rig:
    """A manager with this tier in front of a healthy tier."""
    rig = Rig(tiers=1, **options)
    rig.tiers = [tier, *rig.tiers]
    rig.manager = TieredManager(
        4, ram=rig.ram, tiers=rig.tiers, key_bytes=1, clock=rig.clock, max_in_flight=1.0, enable_events=True
    )
    return rig


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_no_exception_of_a_tier_escapes(method: str, shared: bool) -> None:
    kind = ScriptedSharedGroups if shared else ScriptedGroups
    tier = kind(BLOCK_BYTES, name="bad", immediate=True)
    hook = tier.on_call = Raises(method)
    rig = rig_with(tier)
    rig.below("abc", 0)
    rig.below("ab", 1)
    for _ in range(3):
        ctx = rig.begin("abcd")
        for _ in range(8):
            num_ready, stopped_by = rig.ask("abcd", ctx)
            rig.end_all()
            rig.manager.poll()
            rig.clock.now += 0.5
        assert stopped_by is not RETRY
        rig.load("abcd"[:num_ready], ctx)
        rig.manager.lookup_key(b"c", ctx)
        rig.manager.poll()
        rig.store("xyz", ctx)
        rig.manager.discard(keys("x"))
        rig.manager.finish_request(ctx)
        rig.manager.take_events()
        rig.manager.tier_stats()
        rig.clock.now += 100.0
    rig.manager.flush(0.0)
    rig.manager.reset(drop_in_flight=True)
    rig.manager.settle(0.0)
    tier.on_call = Raises()
    rig.clock.now += 200.0
    rig.manager.poll()
    stats = rig.manager.stats()
    assert stats.writing == stats.condemned == 0
    if method not in ("close", "delete", "cut", "extend_path"):
        assert hook.num_raised > 0 or (not shared and method in ("unknown", "submit_probe", "take_changes"))
    assert rig.manager.tier_stats()[0].errors == hook.num_raised
    rig.ask("q", rig.begin())  # first repeats a failed reset
    rig.below("ab", 0)
    if method == "finished":
        assert tier.closed, "only a close can end its jobs"
        rig.below("ab", 1)
    ctx = rig.begin()
    while rig.ask("ab", ctx)[1] is RETRY:
        rig.manager.poll()
    assert rig.ask("ab", ctx) == (2, HIT), "the tier is used again"
    tier.on_call = Raises(method)
    rig.manager.close(0.0)


def guarded(**options: Any) -> tuple[GuardedTier, ScriptedTier, Clock]:
    tier, clock = ScriptedTier(BLOCK_BYTES, **options), Clock()
    return GuardedTier(tier, clock), tier, clock


def test_a_tier_pauses_after_three_failures_for_longer_each_time() -> None:
    guard, tier, clock = guarded(immediate=True)
    tier.blocks[b"a"] = b"a" * BLOCK_BYTES
    hook = tier.on_call = Raises("contains")
    for _ in range(2):
        guard.contains(keys("a"))
    tier.on_call = Raises()
    assert guard.contains(keys("a")).all(), "two failures are no reason to pause"
    tier.on_call = hook
    for _ in range(3):
        guard.contains(keys("a"))
    for pause_s in (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0):
        before = hook.num_raised
        clock.now += pause_s - 0.01
        assert not guard.contains(keys("a")).any()
        assert guard.submit_read(keys("a"), np.zeros((1, BLOCK_BYTES), np.uint8), [0]) == NO_JOB
        assert hook.num_raised == before, "it is paused"
        clock.now += 0.02
        guard.contains(keys("a"))
        assert hook.num_raised == before + 1, "one attempt"
    tier.on_call = Raises()
    clock.now += 61.0
    assert guard.contains(keys("a")).all()


def test_a_write_to_a_paused_tier_is_dropped() -> None:
    guard, tier, _ = guarded(immediate=True)
    tier.on_call = Raises("contains")
    for _ in range(3):
        guard.contains(keys("a"))
    job, taken = guard.submit_write(keys("ab"), np.zeros((2, BLOCK_BYTES), np.uint8), np.arange(2))
    assert (job, taken.tolist()) == (NO_JOB, [False, False])
    assert guard.stats().dropped == 2


def test_jobs_with_lost_results_end_when_the_tier_is_closed() -> None:
    """They end after 10 s: until the tier is closed, it may write to their rows."""
    guard, tier, clock = guarded()
    job = guard.submit_read(keys("a"), np.zeros((1, BLOCK_BYTES), np.uint8), np.zeros(1, np.int64))
    tier.on_call = Raises("finished")
    assert guard.finished() == []
    tier.on_call = Raises()
    clock.now += 9.0
    assert guard.finished() == []
    assert not tier.closed
    clock.now += 2.0
    (result,) = guard.finished()
    assert (result.job, result.ok.tolist()) == (job, [False])
    assert tier.closed
    assert not guard.contains(keys("a")).any()
    assert not guard.drain(0.0), "a reset can no longer be recorded"
    assert guard.finished() == []


def test_jobs_that_end_after_all_keep_the_tier() -> None:
    guard, tier, clock = guarded()
    job = guard.submit_read(keys("a"), np.zeros((1, BLOCK_BYTES), np.uint8), np.zeros(1, np.int64))
    tier.on_call = Raises("finished")
    guard.finished()
    tier.on_call = Raises()
    tier.end(tier.jobs[0])
    assert [result.job for result in guard.finished()] == [job]
    clock.now += 100.0
    assert guard.finished() == []
    assert not tier.closed


def test_rows_stay_reserved_if_the_tier_cannot_be_closed() -> None:
    """The tier may still write to the rows; reusing them could serve wrong bytes."""
    guard, tier, clock = guarded()
    guard.submit_read(keys("a"), np.zeros((1, BLOCK_BYTES), np.uint8), np.zeros(1, np.int64))
    tier.on_call = Raises("finished", "close")
    guard.finished()
    clock.now += 11.0
    assert guard.finished() == []
    clock.now += 1000.0
    assert guard.finished() == []
    tier.on_call = Raises()
    clock.now += 59.0
    (result,) = guard.finished()
    assert result.ok.tolist() == [False]
    assert tier.closed
    assert guard.finished() == []


def test_a_tier_that_cannot_be_closed_delays_nobody() -> None:
    """Its rows stay reserved, but no request waits for them, and neither an idle engine nor a reset does."""
    tier = ScriptedTier(BLOCK_BYTES, name="bad")
    rig = rig_with(tier, immediate=True)
    rig.below("ab", 0)
    ctx = rig.begin()
    assert rig.ask("ab", ctx) == (0, RETRY)
    tier.on_call = Raises("finished", "close")
    rig.manager.poll()
    rig.clock.now += 11.0
    assert not rig.manager.poll()
    later = rig.begin()
    assert rig.ask("ab", later) == rig.ask("ab", ctx) == (0, MISS)
    assert rig.manager.lookup_key(b"a", later) is MISS
    assert not rig.manager.settle(3600.0)
    rig.manager.reset(drop_in_flight=True)
    assert rig.manager.stats().condemned == 2, "the tier may still write to their slots"
    rig.below("cd", 1)
    assert rig.ask("cd", rig.begin()) == (0, RETRY)
    assert not rig.manager.poll()
    tier.on_call = Raises()
    rig.clock.now += 60.0
    rig.manager.poll()
    assert rig.manager.stats().condemned == 0
    assert rig.manager.settle(60.0)
    rig.manager.close(0.0)


def test_blocks_from_before_a_reset_that_failed_are_not_served() -> None:
    guard, tier, clock = guarded(immediate=True)
    tier.blocks[b"a"] = b"a" * BLOCK_BYTES
    tier.on_call = Raises("clear")
    guard.clear()
    assert not guard.contains(keys("a")).any()
    assert not guard.drain(0.0)
    clock.now += 100.0
    assert not guard.contains(keys("a")).any()
    tier.on_call = Raises()
    clock.now += 100.0
    assert not guard.contains(keys("a")).any()
    assert tier.blocks == {}
    assert guard.drain(0.0)
    tier.blocks[b"b"] = b"b" * BLOCK_BYTES
    assert guard.contains(keys("b")).all()


def test_a_reset_that_failed_is_repeated_when_the_tier_closes() -> None:
    """If no call came between reset and close, a later process found blocks from before the reset."""
    guard, tier, _ = guarded(immediate=True)
    tier.blocks[b"a"] = b"a" * BLOCK_BYTES
    tier.on_call = Raises("clear")
    guard.clear()
    tier.on_call = Raises()
    guard.close()
    assert tier.closed
    assert tier.blocks == {}


@pytest.mark.parametrize("wrong", ["another job", "another length"])
def test_impossible_results_are_failures(wrong: str, caplog: pytest.LogCaptureFixture) -> None:
    guard, tier, _ = guarded()
    job = guard.submit_read(keys("ab"), np.zeros((2, BLOCK_BYTES), np.uint8), np.arange(2))
    result = JobResult(job + (wrong == "another job"), np.ones(2 + (wrong != "another job"), np.bool_), 0.0)
    tier.report(result)
    results = guard.finished()
    expected = [(job, [False, False])] * (wrong != "another job")
    assert [(result.job, result.ok.tolist()) for result in results] == expected
    assert guard.stats().errors == 1
    assert "finished failed" in caplog.text


WRONG_RESULTS: list[tuple[str, Callable[[Any], Any]]] = [
    *[(method, lambda result: None) for method in METHODS],
    *[(method, lambda result: "text") for method in METHODS if method != "begin_request"],
    *[("contains", change) for change in (list, lambda mask: mask.astype(np.int8), lambda mask: mask[None])],
    *[("unknown", change) for change in (list, lambda mask: mask.astype(float), lambda mask: mask[:-1])],
    *[("submit_read", lambda job: 0), ("submit_read", lambda job: [job]), ("submit_probe", lambda job: 1.5)],
    *[
        ("submit_write", lambda begun, mask=mask: (begun[0], mask(begun[1])))
        for mask in (list, np.zeros_like)
    ],
    ("submit_write", lambda begun: (NO_JOB, begun[1])),
    ("finished", lambda results: [None] * len(results)),
    *[
        ("finished", lambda results, change=change: [result._replace(**change) for result in results])
        for change in (
            {"ok": [True]},
            {"seconds": None},
            {"seconds": math.nan},
            {"stale": [True]},
            {"job": []},
        )
    ],
    ("queue_room", lambda room: -1),
    ("cut", lambda count: count + 1),
    ("read_room", lambda count: count + 1),
    ("take_changes", lambda changes: [(["text"], True)]),
]


@pytest.mark.parametrize(("method", "change"), WRONG_RESULTS)
@pytest.mark.parametrize("immediate", [True, False])
def test_a_result_that_breaks_the_contract_does_no_harm(
    method: str, change: Callable[[Any], Any], immediate: bool
) -> None:
    inner: Any = getattr(ScriptedSharedGroups, method)
    changed: Any = lambda tier, *args: change(inner(tier, *args))  # noqa: E731
    if isinstance(inner, property):
        changed = property(lambda tier: change(inner.fget(tier)))
    tier = type("Wrong", (ScriptedSharedGroups,), {method: changed})(BLOCK_BYTES, immediate=immediate)
    rig = rig_with(tier, immediate=immediate)
    rig.below("abc", 0)
    rig.below("ab", 1)
    for _ in range(3):
        ctx = rig.begin("abcd")
        for _ in range(4):
            num_ready, _ = rig.ask("abcd", ctx)
            rig.end_all()
            rig.manager.poll()
            rig.clock.now += 0.5
        rig.load("abcd"[:num_ready], ctx)
        rig.manager.lookup_key(b"c", ctx)
        rig.manager.discard(keys("xyz"))
        rig.store("xyz")
        rig.manager.distrust(keys("q"))
        rig.manager.finish_request(ctx)
        rig.manager.take_events()
        rig.manager.tier_stats()
        rig.clock.now += 100.0
    rig.manager.offer_all()
    rig.manager.reset()
    rig.manager.close(0.0)


@pytest.mark.parametrize("method", ["submit_read", "submit_write", "submit_probe"])
def test_a_tier_that_names_no_new_job_is_closed(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tier may have begun a job, and could read or write rows that RAM has reused for other blocks."""
    tier = ScriptedSharedGroups(BLOCK_BYTES, immediate=True)
    guard = GuardedTier(tier, Clock())
    monkeypatch.setattr(tier, method, lambda *arguments: None)
    arguments = (
        () if method == "submit_probe" else (np.zeros((1, BLOCK_BYTES), np.uint8), np.zeros(1, np.int64))
    )
    getattr(guard, method)(keys("a"), *arguments)
    assert tier.closed
    assert guard.stats().errors == 1


@pytest.mark.parametrize("seed", range(int(os.environ.get("KVOFFLOAD_RAISES", "6"))))
def test_calls_that_raise_at_random(seed: int) -> None:
    """Served bytes are right, and nothing stays in flight once the exceptions stop."""
    chance = random.Random(seed)
    kind = ScriptedSharedGroups if seed % 2 else ScriptedGroups
    tier = kind(BLOCK_BYTES, name="bad")
    tries = {"num": 0}

    def raise_at_random(method: str) -> None:
        if method != "close" and chance.random() < 0.15:
            tries["num"] += 1
            raise RuntimeError(method)

    tier.on_call = raise_at_random
    rig = rig_with(tier, immediate=False)
    for _ in range(150):
        letters = "abcdefghijkl"[(at := chance.randrange(8)) : at + chance.randrange(1, 5)]
        if chance.random() < 0.3:
            rig.below(letters, chance.randrange(2))
        ctx = rig.begin(letters)
        for _ in range(chance.randrange(4)):
            num_ready, stopped_by = rig.ask(letters, ctx)
            if stopped_by is not RETRY:
                rig.load(letters[:num_ready], ctx)
            for each in rig.tiers:
                for job in [*each.jobs]:
                    if chance.random() < 0.6:
                        each.end(job)
            rig.manager.poll()
        if rig.manager.stats().evictable + rig.manager.stats().free >= len(letters):
            rig.store(letters, ctx)
        rig.manager.finish_request(ctx)
        rig.clock.now += chance.choice([0.01, 0.5, 3.0])
        if chance.random() < 0.02:
            rig.manager.reset()
    assert tries["num"] > 20
    tier.on_call = lambda method: None
    for _ in range(40):
        rig.clock.now += 20.0
        rig.end_all()
    stats = rig.manager.stats()
    assert stats.writing == stats.condemned == 0
    assert stats.evictable == stats.ready
    assert rig.manager.settle(0.0)
