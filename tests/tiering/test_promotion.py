"""Promotion: blocks that are read from tiers into RAM, by prefix, key by key, and ahead."""

from __future__ import annotations

import pytest

from kvoffload.core.plans import ON_DEVICE_EVICTION
from kvoffload.core.policy import POLICIES
from kvoffload.testing.audit import audit
from support.letters import HIT, MISS, PENDING, keys, text
from support.tiering_rig import RETRY, Rig, end_reads, expect, fails, jobs


def test_a_prefix_is_promoted_and_becomes_a_hit() -> None:
    rig = Rig(immediate=False)
    rig.below("abc")
    ctx = rig.begin()
    assert rig.ask("abcd", ctx) == (0, RETRY)
    assert rig.ask("abcd", ctx) == (0, RETRY), "a repeated lookup begins no read"
    assert [text(job.keys) for job in rig.tier.jobs] == ["abc"]
    rig.end_all()
    assert rig.ask("abcd", ctx) == (3, MISS)
    rig.load("abc", ctx)
    assert rig.manager.hit_blocks == [0, 3]
    assert rig.manager.counts.promoted == 3


def test_a_hit_may_be_split_over_ram_and_tiers() -> None:
    rig = Rig(capacity=6, tiers=2)
    rig.store("ad")
    for tier in rig.tiers:
        tier.blocks.clear()
    rig.below("bc", tier=1)
    rig.below("be", tier=0)
    ctx = rig.begin()
    assert rig.ask("abcdef", ctx) == (1, RETRY)
    rig.manager.poll()
    assert rig.ask("abcdef", ctx) == (5, MISS)
    rig.load("abcde", ctx)
    assert rig.manager.hit_blocks == [2, 2, 1], "a block in two tiers is read from the first tier"


def test_two_requests_share_one_read() -> None:
    rig = Rig(immediate=False)
    rig.below("ab")
    first, second = rig.begin(), rig.begin()
    assert rig.ask("ab", first) == rig.ask("ab", second) == (0, RETRY)
    assert len(rig.tier.jobs) == 1
    rig.end_all()
    assert rig.ask("ab", second) == rig.ask("ab", first) == (2, HIT)
    rig.load("ab", first)
    rig.load("ab", second)
    assert rig.manager.hit_blocks == [0, 4]


def test_a_prefix_larger_than_ram_is_cut_to_fit() -> None:
    """No livelock: promotion neither evicts the request's own blocks nor repeats."""
    rig = Rig(capacity=4)
    rig.store("xy")
    rig.below("abcdefgh")
    ctx = rig.begin()
    assert rig.ask("abcdefgh", ctx) == (0, RETRY)
    rig.manager.poll()
    for _ in range(3):
        assert rig.ask("abcdefgh", ctx) == (4, MISS)
        rig.manager.poll()
    assert rig.manager.counts.no_room == 4
    rig.load("abcd", ctx)


def test_a_read_that_runs_alone_takes_half_of_the_slots_in_use() -> None:
    rig = Rig(capacity=16, immediate=False, max_in_flight=0.5)
    rig.manager.begin_resize(8)
    assert not rig.manager.advance_resize()
    rig.below("abcdefgh")
    rig.ask("abcdefgh", rig.begin())
    assert [text(job.keys) for job in rig.tier.jobs] == ["abcd"]


def test_blocks_without_room_are_given_up() -> None:
    """A retry in each step would evict the blocks that found room."""
    rig = Rig(capacity=8, immediate=False, max_in_flight=0.25)
    rig.below("abcd")
    rig.ask("ab", rig.begin())
    late = rig.begin()
    for _ in range(2):
        assert rig.ask("cd", late) == (0, MISS)
        assert rig.manager.counts.no_room == 2
    rig.end_all()
    assert rig.ask("cd", late) == (0, MISS)
    assert not rig.tier.jobs
    assert rig.ask("cd", rig.begin()) == (0, RETRY), "another request tries again"


@pytest.mark.parametrize("prefix", ["aab", "aabb", "abca", "abab"])
def test_a_block_behind_a_repeated_block_is_read_from_its_own_tier(prefix: str) -> None:
    rig = Rig(capacity=8, tiers=2, immediate=False)
    rig.below("a", 0)
    rig.below("bc", 1)
    ctx = rig.begin()
    assert rig.ask(prefix, ctx) == (0, RETRY)
    rig.end_all()
    assert rig.ask(prefix, ctx) == (len(prefix), HIT)
    assert (rig.manager.counts.lost, rig.manager.counts.no_room) == (0, 0)


def test_a_request_waits_for_room_in_a_tier() -> None:
    """The tier answers later, and each request gets all its blocks."""
    rig = Rig(capacity=16, immediate=False)
    rig.below("abcdefgh")
    rig.tier.read_limit = 3
    first, second = rig.begin(), rig.begin()
    assert rig.ask("abcd", first) == rig.ask("efgh", second) == (0, RETRY)
    assert jobs(rig) == [("read", "abc")]
    assert rig.ask("efgh", second) == (0, RETRY)
    rig.end_all()
    assert rig.ask("efgh", second) == (0, RETRY)
    assert jobs(rig) == [("read", "efg")]
    assert rig.ask("abcd", first) == (3, RETRY)
    rig.end_all()
    assert rig.ask("abcd", first) == (3, RETRY)
    assert rig.ask("efgh", second) == (3, RETRY)
    rig.end_all()
    assert rig.ask("abcd", first) == rig.ask("efgh", second) == (4, HIT)
    assert rig.manager.counts.lost == 0


def test_a_request_gives_up_a_tier_without_room_at_its_time_limit() -> None:
    rig = Rig(capacity=16, immediate=False, deadline_s=5.0)
    rig.below("abcd")
    rig.tier.read_limit = 2
    rig.ask("ab", rig.begin())
    late = rig.begin()
    assert rig.ask("cd", late) == (0, RETRY)
    for _ in range(6):
        rig.clock.now += 1.0
        _, stopped_by = rig.ask("cd", late)
    assert stopped_by is MISS
    assert rig.manager.counts.gave_up == 1


def test_key_by_key_a_request_waits_for_room_in_a_tier() -> None:
    rig = Rig(capacity=16, immediate=False)
    rig.below("abcd")
    rig.tier.read_limit = 1
    ctx = rig.begin()
    for letter in "abcd":
        for _ in range(2):
            assert [rig.manager.lookup_key(key, ctx) for key in keys("abcd")][-1] is RETRY
            rig.manager.poll()
        assert jobs(rig) == [("read", letter)]
        rig.end_all()
    assert [rig.manager.lookup_key(key, ctx) for key in keys("abcd")] == [HIT] * 4


def test_blocks_before_an_unreadable_block_are_hits() -> None:
    rig = Rig(immediate=False)
    rig.below("abcd")
    ctx = rig.begin()
    rig.ask("abcd", ctx)
    rig.tier.jobs[0].fail = {b"c"}
    rig.end_all()
    assert rig.ask("abcd", ctx) == (2, MISS)
    assert rig.manager.counts.lost == 1
    rig.load("ab", ctx)
    assert rig.manager.stats().writing == 0


def test_an_exception_of_submit_read_is_a_miss_and_keeps_no_slot(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Two tiers share a prefix; one begins to read, the other raises."""
    rig = Rig(tiers=2, immediate=False)
    rig.below("ab", 0)
    rig.below("cd", 1)
    rig.tiers[1].submit_read = fails  # type: ignore[method-assign]
    ctx = rig.begin()
    assert rig.ask("abcd", ctx) == (0, RETRY)
    assert rig.manager.stats().writing == 2, "the share of the other tier"
    rig.end_all()
    assert rig.ask("abcd", ctx) == (2, MISS), "the failed tier is not asked again"
    assert rig.manager.stats().writing == 0
    assert rig.manager.counts.lost == 2
    assert [stats.failed for stats in rig.manager.tier_stats()] == [0, 2]
    assert "t1: 2 blocks were not read: OSError: out of order" in caplog.text
    del rig.tiers[1].submit_read  # type: ignore[misc]
    rig.load("ab", ctx)
    rig.manager.finish_request(ctx)
    later = rig.begin()
    assert rig.ask("cd", later) == (0, RETRY), "another request tries again"
    rig.end_all()
    assert rig.ask("cd", later) == (2, HIT)


def test_key_by_key_an_exception_of_submit_read_is_a_miss() -> None:
    rig = Rig()
    rig.below("a")
    rig.tier.submit_read = fails  # type: ignore[method-assign]
    ctx = rig.begin()
    assert rig.manager.lookup_key(b"a", ctx) is RETRY
    assert not rig.manager.poll()
    assert rig.manager.lookup_key(b"a", ctx) is MISS
    assert rig.manager.stats().writing == 0


def test_an_exception_of_submit_write_pins_nothing_and_spares_the_other_tiers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rig = Rig(tiers=2)
    rig.tiers[0].submit_write = fails  # type: ignore[method-assign]
    ctx = rig.begin("abcd")
    rig.store("abcd", ctx)
    rig.manager.finish_request(ctx)
    assert not rig.manager.has_jobs
    assert rig.manager.stats().evictable == 4
    assert text([*rig.tiers[1].blocks]) == "abcd"
    assert "t0: 4 blocks were not written: OSError: out of order" in caplog.text
    # At the end of the request the blocks were offered again.
    assert rig.manager.tier_stats()[0].failed == 8
    assert rig.tiers[0].used == [keys("abcd")], "the request is reported to the tier"
    del rig.tiers[0].submit_write  # type: ignore[misc]
    rig.store("e")
    assert text([*rig.tiers[0].blocks]) == "e"


def test_admission_to_ram_does_not_stop_promotion() -> None:
    rig = Rig(admission="reuse:2")
    rig.below("ab")
    ctx = rig.begin()
    assert rig.ask("ab", ctx) == (0, RETRY)
    rig.manager.poll()
    assert rig.ask("ab", ctx) == (2, HIT)


@pytest.mark.parametrize(
    ("policy", "store"),
    [
        *((policy, "on-compute") for policy in POLICIES.names()),
        ("lru", ON_DEVICE_EVICTION),
        ("hazard", ON_DEVICE_EVICTION),
    ],
)
def test_promotion_with_every_policy(policy: str, store: str) -> None:
    rig = Rig(policy=policy, store=store)
    rig.store("vwxy")
    rig.below("abc")
    ctx = rig.begin()
    assert rig.ask("abc", ctx) == (0, RETRY)
    rig.manager.poll()
    assert rig.ask("abc", ctx) == (3, HIT)
    rig.load("abc", ctx)
    rig.manager.finish_request(ctx)
    audit(rig.manager)


def test_a_lookup_without_a_request_searches_only_ram() -> None:
    rig = Rig()
    rig.below("a")
    assert rig.manager.lookup(keys("a")) == (0, MISS)
    assert rig.manager.lookup_key(b"a") is MISS


def test_key_by_key_one_read_is_begun_at_the_end_of_the_step() -> None:
    rig = Rig(immediate=False)
    rig.store("x")
    rig.end_all()
    rig.below("abc")
    ctx = rig.begin()
    answers = [rig.manager.lookup_key(key, ctx) for key in keys("abcd")]
    assert answers == [RETRY, RETRY, RETRY, MISS]
    assert rig.tier.jobs == []
    assert rig.manager.poll()
    assert [text(job.keys) for job in rig.tier.jobs] == ["abc"]
    assert [rig.manager.lookup_key(key, ctx) for key in keys("abcd")] == answers
    rig.end_all()
    assert [rig.manager.lookup_key(key, ctx) for key in keys("abcd")] == [HIT, HIT, HIT, MISS]
    rig.load("abc", ctx)
    assert rig.manager.hit_blocks == [0, 3]
    assert not rig.manager.poll()


def test_key_by_key_blocks_without_room_are_misses() -> None:
    rig = Rig(capacity=2)
    rig.below("abc")
    ctx = rig.begin()
    for key in keys("abc"):
        assert rig.manager.lookup_key(key, ctx) is RETRY
    rig.manager.poll()
    rig.manager.poll()
    assert [rig.manager.lookup_key(key, ctx) for key in keys("abc")] == [HIT, HIT, MISS]


def test_a_store_in_flight_is_pending_and_not_retry() -> None:
    rig = Rig(immediate=False)
    plan = rig.manager.prepare_store(keys("a"))
    ctx = rig.begin()
    assert rig.ask("ab", ctx) == (0, PENDING)
    assert rig.manager.lookup_key(b"a", ctx) is PENDING
    rig.manager.complete_store(rig.compute(plan))


def test_blocks_of_a_queued_request_are_read_ahead() -> None:
    rig = Rig(capacity=8, immediate=False)
    rig.below("abcd")
    ctx = expect(rig, "ab")
    assert not rig.tier.jobs, "reads begin in the next step"
    assert rig.manager.poll()
    rig.end_all()
    assert rig.manager.counts.read_ahead == 2
    assert rig.ask("ab", ctx) == (2, HIT), "without waiting"
    rig.manager.withdraw(ctx)
    rig.load("ab", ctx)
    assert rig.manager.hit_blocks == [0, 2], "they count as hits of the tier, although they were ready in RAM"
    assert not rig.manager.poll()


def test_queued_requests_are_read_for_in_order() -> None:
    rig = Rig(capacity=8, immediate=False)
    rig.below("abcd")
    for letters in ("ab", "cd"):
        expect(rig, letters)
    rig.manager.poll()
    rig.manager.poll()
    assert [text(job.keys) for job in rig.tier.jobs] == ["ab"]
    rig.end_all()
    rig.manager.poll()
    assert rig.manager.counts.read_ahead == 4


def test_nothing_is_read_ahead_during_another_read() -> None:
    rig = Rig(capacity=8, immediate=False)
    rig.below("abcd")
    assert rig.ask("ab", rig.begin()) == (0, RETRY)
    waiting = expect(rig, "cd")
    rig.manager.poll()
    assert [text(job.keys) for job in rig.tier.jobs] == ["ab"]
    rig.manager.withdraw(waiting)
    rig.end_all()
    rig.manager.poll()
    assert not rig.tier.jobs, "the request no longer waits"
    assert rig.manager.counts.read_ahead == 0


def test_blocks_without_room_for_reading_ahead_are_not_given_up() -> None:
    rig = Rig(capacity=4, immediate=False, max_in_flight=0.25)
    rig.below("abcd")
    ctx = expect(rig, "abcd")
    rig.manager.poll()
    assert [text(job.keys) for job in rig.tier.jobs] == ["a"], "a quarter of RAM"
    rig.end_all()
    assert (rig.manager.counts.no_room, rig.manager.counts.read_ahead) == (0, 1)
    assert rig.ask("abcd", ctx) == (1, RETRY), "half of RAM for a request that is served"


def test_a_read_ahead_that_fails_is_a_miss() -> None:
    rig = Rig(capacity=8, immediate=False)
    rig.below("ab")
    ctx = expect(rig, "ab")
    rig.manager.poll()
    end_reads(rig, 0.1, failing=True)
    assert rig.manager.counts.lost == 2
    rig.manager.withdraw(ctx)
    rig.manager.finish_request(ctx)
    assert not rig.manager.poll()


@pytest.mark.parametrize("end", ["finish", "leave out", "reset"])
def test_nothing_is_read_ahead_for_a_request_that_no_longer_waits(end: str) -> None:
    rig = Rig(capacity=8, immediate=False)
    rig.below("ab")
    ctx = expect(rig, "ab")
    if end == "finish":
        rig.manager.finish_request(ctx)
    elif end == "leave out":
        rig.manager.leave_out_tiers(ctx)
    else:
        rig.manager.reset()
    rig.manager.poll()
    assert not rig.tier.jobs
    audit(rig.manager)
