"""Limits of waits and reads: deadlines, slow tiers, failing tiers, room for the engine."""

from __future__ import annotations

import pytest

from kvoffload.core.plans import LookupResult
from kvoffload.tiering.speed import ReadSpeed
from support.letters import HIT, MISS, keys, text
from support.tiering_rig import RETRY, Rig, end_reads


def test_a_request_waits_at_most_until_the_deadline() -> None:
    rig = Rig(immediate=False, deadline_s=2.0)
    rig.below("ab")
    ctx = rig.begin()
    assert rig.ask("ab", ctx) == (0, RETRY)
    rig.clock.now += 1.9
    assert rig.ask("ab", ctx) == (0, RETRY)
    rig.clock.now += 0.2
    assert rig.ask("ab", ctx) == (0, MISS)
    assert rig.ask("ab", ctx) == (0, MISS)
    assert rig.manager.counts.gave_up == 1
    rig.manager.finish_request(ctx)
    rig.end_all()
    other = rig.begin()
    assert rig.ask("ab", other) == (2, HIT), "late blocks serve the next request"


def test_a_request_waits_at_most_as_long_as_computing_takes() -> None:
    rig = Rig(immediate=False, deadline_s=2.0, recompute_s_per_block=0.1)
    rig.below("ab")
    ctx = rig.begin()
    assert rig.ask("ab", ctx) == (0, RETRY)
    rig.clock.now += 0.21
    assert rig.ask("ab", ctx) == (0, MISS)


def test_a_second_wait_has_its_own_deadline() -> None:
    rig = Rig(capacity=8, immediate=False, deadline_s=2.0)
    rig.below("a")
    ctx = rig.begin()
    assert rig.ask("ab", ctx) == (0, RETRY)
    rig.end_all()
    assert rig.ask("ab", ctx) == (1, MISS)
    rig.clock.now += 100
    rig.below("b")
    assert rig.ask("ab", ctx) == (1, RETRY)


def test_a_tier_slower_than_computing_is_only_tried_every_10_s() -> None:
    rig = Rig(capacity=8, immediate=False, recompute_s_per_block=0.1, deadline_s=100.0)
    rig.below("abcdefgh")

    def serve(letters: str, seconds: float) -> tuple[int, LookupResult]:
        ctx = rig.begin()
        answer = rig.ask(letters, ctx)
        for job in rig.tier.jobs:
            job.seconds = seconds
        rig.end_all()
        rig.manager.finish_request(ctx)
        return answer

    assert serve("ab", 2.0) == (0, RETRY), "no read has been measured yet"
    assert serve("cd", 2.0) == (0, RETRY), "the trial"
    assert serve("ef", 0.0) == (0, MISS)
    assert rig.manager.counts.not_worth == 2
    rig.clock.now += 11
    for pair in ("ef", "gh"):
        rig.manager.discard(keys("abcdefgh"))
        assert serve(pair, 0.01) == (0, RETRY), "the trial was fast"
        rig.clock.now += 11
    assert not rig.tier.jobs


def test_a_failed_read_does_not_count_for_speed() -> None:
    rig = Rig(capacity=8, immediate=False, recompute_s_per_block=0.1, deadline_s=100.0)
    rig.below("abcdef")
    assert rig.ask("ab", rig.begin()) == (0, RETRY)
    end_reads(rig, 2.0)  # slow: a second for each block
    assert rig.ask("cd", rig.begin()) == (0, RETRY), "the trial"
    end_reads(rig, 0.0001, failing=True)
    assert rig.ask("ef", rig.begin()) == (0, MISS)
    assert rig.manager.counts.not_worth == 2


def test_a_tier_is_not_read_for_10_s_after_three_failed_reads() -> None:
    rig = Rig(capacity=8, immediate=False)
    rig.below("abcdef")
    for letter in "abc":
        assert rig.ask(letter, rig.begin()) == (0, RETRY)
        end_reads(rig, 0.001, failing=True)
    assert rig.ask("d", rig.begin()) == (0, MISS)
    rig.clock.now += 11
    assert rig.ask("d", rig.begin()) == (0, RETRY), "tried again"
    end_reads(rig, 0.001, failing=True)
    assert rig.ask("e", rig.begin()) == (0, MISS), "one more failure stops reads at once"
    rig.clock.now += 11
    assert rig.ask("e", rig.begin()) == (0, RETRY)
    end_reads(rig, 0.001)
    assert rig.ask("f", rig.begin()) == (0, RETRY), "one successful read is enough"


def test_a_read_is_cut_where_it_still_pays() -> None:
    rig = Rig(capacity=16, tiers=2, immediate=False, recompute_s_per_block=0.1, deadline_s=100.0)
    rig.below("xyabcdef")
    rig.below("zwgh", tier=1)
    for letters, tier, seconds in (("xy", 0, 0.02), ("zw", 1, 4.0)):
        assert rig.ask(letters, rig.begin()) == (0, RETRY)
        end_reads(rig, seconds, tier)
    ctx = rig.begin()
    assert rig.ask("abcdefgh", ctx) == (0, RETRY)
    assert [[text(job.keys) for job in tier.jobs] for tier in rig.tiers] == [["abcdef"], []]
    assert rig.manager.counts.not_worth == 2
    rig.end_all()
    assert rig.ask("abcdefgh", ctx) == (6, MISS)


def test_blocks_in_ram_do_not_justify_a_slow_read() -> None:
    rig = Rig(capacity=16, immediate=False, recompute_s_per_block=0.1, deadline_s=100.0)
    rig.below("xyz")
    for letter in "xy":  # two seconds for each block: the first read, and the trial
        assert rig.ask(letter, rig.begin()) == (0, RETRY)
        end_reads(rig, 2.0)
    rig.tier.takes = False
    rig.store("abcdefgh")
    assert rig.ask("abcdefghz", rig.begin()) == (8, MISS)


def test_a_block_is_read_from_the_faster_tier_and_then_from_the_other() -> None:
    rig = Rig(capacity=8, tiers=2, immediate=False, recompute_s_per_block=100.0, deadline_s=100.0)
    rig.below("xabc")
    rig.below("yabc", tier=1)
    for letter, tier, seconds in (("x", 0, 2.0), ("y", 1, 0.01)):
        assert rig.ask(letter, rig.begin()) == (0, RETRY)
        end_reads(rig, seconds, tier)
    ctx = rig.begin()
    assert rig.ask("abc", ctx) == (0, RETRY)
    assert [[text(job.keys) for job in tier.jobs] for tier in rig.tiers] == [[], ["abc"]]
    end_reads(rig, 0.01, 1, failing=True)
    assert rig.ask("abc", ctx) == (0, RETRY), "a second try, from the other tier"
    assert [[text(job.keys) for job in tier.jobs] for tier in rig.tiers] == [["abc"], []]
    end_reads(rig, 2.0, 0)
    assert rig.ask("abc", ctx)[0] == 3


def test_a_slow_tier_is_not_read_for_a_single_block_and_a_fast_tier_behind_it_is() -> None:
    rig = Rig(capacity=8, tiers=2, immediate=False, recompute_s_per_block=0.1, deadline_s=100.0)
    rig.below("abcdef")
    rig.below("xyz", tier=1)
    for letters, seconds in (("a", 2.0), ("bc", 2.1)):  # the first read; the trial
        assert rig.ask(letters, rig.begin()) == (0, RETRY)
        rig.tier.jobs[0].seconds = seconds
        rig.end_all()
    assert rig.ask("d", rig.begin()) == (0, MISS)
    assert rig.ask("ef", rig.begin()) == (0, MISS)
    assert rig.manager.counts.not_worth == 3
    assert rig.ask("x", rig.begin()) == (0, RETRY)
    assert rig.ask("yz", rig.begin()) == (0, RETRY)
    assert [text(job.keys) for job in rig.tiers[1].jobs] == ["x", "yz"]


def test_a_stalled_tier_gets_no_jobs_until_it_answers() -> None:
    rig = Rig(capacity=8, immediate=False, deadline_s=1.0)
    rig.below("ab")
    stuck = rig.begin()
    assert rig.ask("a", stuck) == (0, RETRY)
    rig.clock.now += 4.1
    other = rig.begin()
    assert rig.ask("b", other) == (0, MISS)
    rig.store("cd", other)
    assert len(rig.tier.jobs) == 1, "the tier gets no other job"
    rig.end_all()
    assert [text(job.keys) for job in rig.tier.jobs] == ["cd"], (
        "the waiting blocks, after the tier has answered"
    )
    rig.end_all()
    assert rig.ask("b", rig.begin()) == (0, RETRY)


def test_reads_leave_room_for_the_engine() -> None:
    rig = Rig(capacity=8, immediate=False, max_in_flight=0.5)
    rig.below("abcdefgh")
    ctx = rig.begin()
    assert rig.ask("abcdefgh", ctx) == (0, RETRY)
    assert [text(job.keys) for job in rig.tier.jobs] == ["abcd"]
    assert rig.store("wxyz").keys == keys("wxyz")


def test_a_prefix_that_is_read_alone_may_take_half_of_ram() -> None:
    rig = Rig(capacity=16, immediate=False, max_in_flight=0.25)
    rig.below("abcdefghijkl")
    assert rig.ask("abcdefg", rig.begin()) == (0, RETRY)
    assert [text(job.keys) for job in rig.tier.jobs] == ["abcdefg"], "more than a quarter of RAM"
    assert rig.ask("hijkl", rig.begin()) == (0, MISS), (
        "together with other reads a quarter of RAM is the limit"
    )
    assert rig.manager.counts.no_room == 5
    rig.end_all()
    rig.below("mnopqrstuvwx")
    assert rig.ask("mnopqrstuvwx", rig.begin()) == (0, RETRY)
    assert [text(job.keys) for job in rig.tier.jobs] == ["mnopqrst"]


def test_a_request_that_excludes_tiers_is_served_from_ram_only() -> None:
    rig = Rig(capacity=8, immediate=False)
    rig.below("ab")
    ctx = rig.begin()
    rig.manager.leave_out_tiers(ctx)
    assert rig.ask("ab", ctx) == (0, MISS)
    assert rig.manager.lookup_key(keys("a")[0], ctx) is MISS
    assert not rig.tier.jobs
    other = rig.begin()
    assert rig.ask("ab", other) == (0, RETRY)
    rig.end_all()
    assert rig.ask("ab", ctx)[0] == 2, "from RAM"
    assert [rig.manager.source_of(key, other) for key in keys("abc")] == [1, 1, 0]
    assert [rig.manager.source_of(key, ctx) for key in keys("ab")] == [0, 0]


def test_the_reads_of_all_requests_share_one_bound() -> None:
    rig = Rig(capacity=8, immediate=False, max_in_flight=0.5)
    rig.below("abcdefghijklm")
    assert rig.ask("abc", rig.begin()) == (0, RETRY)
    assert rig.ask("defg", rig.begin()) == (0, RETRY)
    assert rig.ask("h", rig.begin()) == (0, MISS)
    assert [text(job.keys) for job in rig.tier.jobs] == ["abc", "d"]
    assert rig.manager.counts.no_room == 4
    rig.tier.jobs[0].fail = {b"b"}
    rig.end_all()
    assert rig.ask("ijklm", rig.begin()) == (0, RETRY)
    assert [text(job.keys) for job in rig.tier.jobs] == ["ijkl"], (
        "ended reads, successful or not, no longer count"
    )


def test_read_speed_finds_latency_and_rate() -> None:
    speed = ReadSpeed()
    assert speed.seconds_for(10) == 0.0
    for count in (1, 8, 64, 3, 20):
        speed.learn(count, 0.5 + 0.01 * count)
    assert speed.seconds_for(100) == pytest.approx(1.5)
    for _ in range(200):
        speed.learn(10, 0.1)
    assert speed.seconds_for(20) == pytest.approx(0.2, rel=0.05), "the old speed is forgotten"


def test_read_speed_of_one_size_goes_through_the_origin() -> None:
    speed = ReadSpeed()
    for _ in range(3):
        speed.learn(10, 0.1)
    assert speed.seconds_for(5) == pytest.approx(0.05)
