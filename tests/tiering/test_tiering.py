"""Tiers behind RAM: what goes down and when, what comes up, who waits, and that nothing harms the engine.

Keys are letters; the bytes of a block are its letter, eight times.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from kvoffload.admission.reuse import ReuseAdmission
from kvoffload.core.plans import ON_DEVICE_EVICTION, LookupResult, StorePlan
from kvoffload.core.policy import POLICIES
from kvoffload.core.request import RequestContext
from kvoffload.errors import ConfigError
from kvoffload.testing.audit import audit
from kvoffload.testing.scripted_tier import ScriptedSharedTier, ScriptedTier
from kvoffload.tiering.cascade import write_room
from kvoffload.tiering.manager import TieredManager
from kvoffload.tiering.speed import ReadSpeed
from kvoffload.tiering.worth import break_even
from kvoffload.tiers.memory import MemoryTier
from support.letters import HIT, MISS, PENDING, keys, text
from support.tiering_rig import BLOCK_BYTES, RETRY, Rig

# ---- requests


def test_what_a_finished_request_has_used_stays_longest() -> None:
    rig = Rig(capacity=3)
    for letter in "abc":
        ctx = rig.begin(letter)
        rig.store(letter, ctx)
        rig.manager.finish_request(ctx)
    ctx = rig.begin("a")
    rig.load("a", ctx)
    rig.manager.finish_request(ctx)
    assert ctx.finished
    assert text(rig.store("d").evicted) == "b"


def test_the_gate_of_ram_is_that_of_the_manager_without_tiers() -> None:
    rig = Rig(admission=ReuseAdmission(1, 2))
    for stored in ("", "ab"):
        ctx = rig.begin("ab")
        plan = rig.manager.prepare_store(keys("ab"), ctx)
        assert plan is not None
        assert text(plan.keys) == stored, "at the second request"
        rig.manager.complete_store(rig.compute(plan))
        rig.manager.finish_request(ctx)


# ---- down


def test_what_is_stored_cascades_to_every_tier_byte_for_byte() -> None:
    rig = Rig(tiers=2)
    rig.store("abc")
    for tier in rig.tiers:
        assert tier.blocks == {key: key * BLOCK_BYTES for key in keys("abc")}
    assert rig.manager.stats().evictable == 3


def test_a_block_is_pinned_while_it_cascades() -> None:
    rig = Rig(immediate=False)
    rig.store("abcd")
    assert rig.manager.stats().evictable == 0
    assert rig.manager.prepare_store(keys("e")) is None
    rig.end_all()
    rig.store("e")
    assert set(rig.tier.blocks) == {*keys("abcd")}, "only what was complete"


def test_a_failed_store_is_not_offered() -> None:
    rig = Rig()
    rig.manager.complete_store(rig.compute(rig.manager.prepare_store(keys("ab"))), success=False)
    assert rig.tier.blocks == {}


def test_a_busy_tier_delays_nobody_and_is_offered_the_block_again_when_its_request_finishes() -> None:
    rig = Rig()
    rig.tier.takes = False
    ctx = rig.begin()
    rig.store("abc", ctx)
    assert rig.manager.stats().evictable == 3, "nothing is pinned for a tier that does not take it"
    rig.tier.takes = True
    rig.manager.finish_request(ctx)
    assert set(rig.tier.blocks) == {*keys("abc")}
    assert rig.tier.used == [keys("abc")]
    assert rig.tier.open_requests == []


def test_a_tier_hears_of_the_request_when_its_last_store_is_complete() -> None:
    rig = Rig()
    ctx = rig.begin()
    first = rig.compute(rig.manager.prepare_store(keys("ab"), ctx))
    second, third = rig.compute(rig.manager.prepare_store(keys("abcd"), ctx)).split()
    rig.manager.finish_request(ctx)
    rig.manager.complete_store(first)
    rig.manager.complete_store(third, success=False)
    assert rig.tier.used == []
    rig.manager.complete_store(second)
    assert rig.tier.used == [keys("abcd")]
    assert set(rig.tier.blocks) == {*keys("abc")}


def test_a_block_that_cannot_cascade_is_unpinned_like_one_that_did() -> None:
    rig = Rig(capacity=8, immediate=False, max_in_flight=0.5)
    rig.store("abcd")
    rig.tier.jobs[0].fail = {b"a", b"c"}
    rig.end_all()
    assert rig.manager.stats().evictable == 4
    rig.store("efgh")
    assert [text(job.keys) for job in rig.tier.jobs] == ["efgh"], (
        "its part of the share is free again as well"
    )
    assert rig.manager.counts.not_offered == 0


def test_what_tiers_may_pin_is_bounded() -> None:
    rig = Rig(capacity=8, immediate=False, max_in_flight=0.25)
    rig.store("abcd")
    assert [text(job.keys) for job in rig.tier.jobs] == ["ab"]


def test_all_tiers_together_pin_no_more_than_one_budget() -> None:
    """A tier that hangs with its part pinned leaves the others theirs, and the engine the rest of RAM."""
    rig = Rig(capacity=16, tiers=2, immediate=False, max_in_flight=0.25)
    rig.store("abcdefgh")
    assert [[text(job.keys) for job in tier.jobs] for tier in rig.tiers] == [["ab"], ["ab"]]
    hangs, answers = rig.tiers
    for expected in ("cd", "ef", "gh"):
        answers.end(answers.jobs[0])
        rig.manager.poll()
        assert [text(job.keys) for job in answers.jobs] == [expected]
    assert [text(job.keys) for job in hangs.jobs] == ["ab"]


def test_a_slow_tier_gets_a_smaller_part_of_the_budget() -> None:
    rig = Rig(capacity=40, tiers=2, immediate=False, max_in_flight=0.5)
    quick, slow = rig.tiers
    rig.store("ab")
    quick.jobs[0].seconds, slow.jobs[0].seconds = 0.01, 1.0
    rig.end_all()
    rig.store("cdefghijklmnopqrstuvwxyz")
    assert [len(job.keys) for tier in rig.tiers for job in tier.jobs] == [16, 4], "of 20: 4 to 1"
    rig.end_all()
    lane = rig.manager.lanes[1]
    for _ in range(200):
        lane.num_writing += 1
        lane.end_write(1, 1, 0.005)
    assert write_room(rig.manager.lanes, 1, 20) + lane.num_writing >= 9, "it is no longer slow"


def test_a_write_that_fails_says_nothing_about_speed() -> None:
    rig = Rig(capacity=16, tiers=2, immediate=False, max_in_flight=0.25)
    rig.store("ab")
    for tier in rig.tiers:
        tier.jobs[0].seconds = 1.0
    rig.tiers[0].jobs[0].fail, rig.tiers[0].jobs[0].seconds = {b"a", b"b"}, 1e-6
    rig.end_all()
    assert [lane.write_s_per_block for lane in rig.manager.lanes] == [0.0, 0.5]


def test_what_a_busy_tier_cannot_take_waits_for_its_turn() -> None:
    rig = Rig(capacity=8, immediate=False, max_in_flight=0.25)
    rig.store("abcdef")
    for expected in ("ab", "cd", "ef"):
        assert [text(job.keys) for job in rig.tier.jobs] == [expected]
        rig.end_all()
    assert not rig.manager.has_jobs
    assert set(rig.tier.blocks) == {*keys("abcdef")}
    assert rig.manager.counts.not_offered == 0


def test_a_step_makes_one_offer_even_to_a_tier_that_takes_nothing() -> None:
    """Else what waits, up to all of RAM, would be offered within one step, bit by bit."""
    rig = Rig(capacity=16, immediate=False, max_in_flight=0.25)
    rig.store("abcdefghijkl")
    offers: list[str] = []
    submit = rig.tier.submit_write

    def noted(offered: list[bytes], *rest: Any) -> Any:
        offers.append(text(offered))
        return submit(offered, *rest)

    rig.tier.submit_write = noted  # type: ignore[method-assign]
    rig.tier.takes = False
    rig.end_all()
    assert offers == ["efgh"]
    rig.manager.poll()
    assert offers == ["efgh", "ijkl"]
    assert not rig.manager.has_jobs


def test_what_leaves_ram_before_its_turn_is_counted_and_said(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(capacity=4, immediate=False, max_in_flight=0.5)
    rig.store("abcd")
    rig.store("xy")  # in place of c and d, which wait
    assert [text(job.keys) for job in rig.tier.jobs] == ["ab"]
    rig.end_all()
    rig.manager.poll()
    assert [text(job.keys) for job in rig.tier.jobs] == ["xy"]
    assert rig.manager.counts.not_offered == 2
    assert "tier t0: 2 blocks left RAM unwritten" in caplog.text


def test_what_waits_is_bounded_by_what_ram_can_hold() -> None:
    rig = Rig(capacity=4, immediate=False, max_in_flight=0.25)
    rig.store("a")
    for letter in "bcdefghijk":
        rig.store(letter)
    assert len(rig.manager.lanes[0].waiting) <= 4
    while rig.manager.has_jobs:
        rig.end_all()
    counts = rig.manager.counts
    assert len(rig.tier.blocks) + counts.not_offered == 11


def test_flush_writes_what_ram_has_and_the_tier_lacks() -> None:
    rig = Rig(capacity=8, max_in_flight=0.25)
    rig.store("abcdef")
    assert rig.manager.settle(1.0)
    rig.tier.blocks.clear()
    rig.below("b")
    assert rig.manager.flush(1.0)
    assert set(rig.tier.blocks) == {*keys("abcdef")}
    rig.tier.blocks.clear()
    rig.tier.takes = False
    assert rig.manager.flush(1.0), "what the tier does not want is not waited for"
    assert not rig.manager.has_jobs


def test_what_the_queue_of_a_tier_cannot_take_waits_as_well() -> None:
    rig = Rig(capacity=8, immediate=False)
    rig.tier.room = 2
    rig.store("abcdef")
    for expected in ("ab", "cd", "ef"):
        assert [text(job.keys) for job in rig.tier.jobs] == [expected]
        rig.end_all()
    assert set(rig.tier.blocks) == {*keys("abcdef")}


def test_flush_says_when_a_tier_lost_some_of_it() -> None:
    rig = Rig(capacity=8)
    rig.store("abcd")
    assert rig.manager.flush(1.0)
    rig.tier.blocks.clear()
    rig.tier.submit_write = raises  # type: ignore[method-assign]
    assert not rig.manager.flush(1.0)


def raises(*_: Any) -> Any:
    raise OSError("the medium is gone")


@pytest.mark.parametrize("drop_in_flight", [False, True])
def test_what_waits_is_forgotten_by_a_reset_and_not_written_before_it(drop_in_flight: bool) -> None:
    rig = Rig(capacity=8, immediate=False, max_in_flight=0.25)
    rig.store("abcdef")
    (job,) = rig.tier.jobs
    rig.tier.drain = lambda timeout_s: rig.tier.end(job) or True if rig.tier.jobs else True  # type: ignore[method-assign,func-returns-value]
    rig.manager.reset(drop_in_flight=drop_in_flight)
    rig.end_all()
    assert rig.manager.stats().free == 8
    assert not rig.tier.jobs
    assert rig.tier.blocks == {}


def test_close_writes_nothing_that_waits() -> None:
    rig = Rig(capacity=8, immediate=False, max_in_flight=0.25)
    rig.store("abcdef")
    rig.manager.close(timeout_s=0.0)
    assert [text(job.keys) for job in rig.tier.jobs] == ["ab"]


def test_flush_has_an_end() -> None:
    rig = Rig(capacity=8, immediate=False)
    rig.store("ab")
    assert not rig.manager.flush(0.0)


# ---- up


def test_a_prefix_is_promoted_and_becomes_a_hit() -> None:
    rig = Rig(immediate=False)
    rig.below("abc")
    ctx = rig.begin()
    assert rig.ask("abcd", ctx) == (0, RETRY)
    assert rig.ask("abcd", ctx) == (0, RETRY), "asking again begins nothing new"
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
    assert rig.manager.hit_blocks == [2, 2, 1], "of two tiers that have a block the first one is read"


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


def test_a_prefix_larger_than_ram_is_cut_to_what_fits_and_answered() -> None:
    """No livelock: promotions never evict the request's own blocks, and are not asked for again and again."""
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


def test_what_finds_no_room_is_not_waited_for_any_more() -> None:
    """Also when room comes meanwhile: asked again at every step, it would drive out what found room."""
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
    assert rig.ask("cd", rig.begin()) == (0, RETRY), "another request asks anew"


def test_what_cannot_be_read_is_a_miss_and_what_stands_before_it_a_hit() -> None:
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


def out_of_order(*_: Any) -> Any:
    raise OSError("out of order")


def test_a_tier_that_raises_instead_of_reading_is_a_miss_and_keeps_no_slot(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Of the two tiers that have a share of the prefix one begins to read."""
    rig = Rig(tiers=2, immediate=False)
    rig.below("ab", 0)
    rig.below("cd", 1)
    rig.tiers[1].submit_read = out_of_order  # type: ignore[method-assign]
    ctx = rig.begin()
    assert rig.ask("abcd", ctx) == (0, RETRY)
    assert rig.manager.stats().writing == 2, "the share of the other tier"
    rig.end_all()
    assert rig.ask("abcd", ctx) == (2, MISS), "and is not asked for again"
    assert rig.manager.stats().writing == 0
    assert rig.manager.counts.lost == 2
    assert [stats.failed for stats in rig.manager.tier_stats()] == [0, 2]
    assert "t1: 2 blocks were not read: OSError: out of order" in caplog.text
    del rig.tiers[1].submit_read  # type: ignore[misc]
    rig.load("ab", ctx)
    rig.manager.finish_request(ctx)
    later = rig.begin()
    assert rig.ask("cd", later) == (0, RETRY), "another request asks anew"
    rig.end_all()
    assert rig.ask("cd", later) == (2, HIT)


def test_key_by_key_a_tier_that_raises_is_a_miss() -> None:
    rig = Rig()
    rig.below("a")
    rig.tier.submit_read = out_of_order  # type: ignore[method-assign]
    ctx = rig.begin()
    assert rig.manager.lookup_key(b"a", ctx) is RETRY
    assert not rig.manager.poll()
    assert rig.manager.lookup_key(b"a", ctx) is MISS
    assert rig.manager.stats().writing == 0


def test_a_tier_that_raises_instead_of_writing_pins_nothing_and_the_others_get_the_blocks(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rig = Rig(tiers=2)
    rig.tiers[0].submit_write = out_of_order  # type: ignore[method-assign]
    ctx = rig.begin("abcd")
    rig.store("abcd", ctx)
    rig.manager.finish_request(ctx)
    assert not rig.manager.has_jobs
    assert rig.manager.stats().evictable == 4
    assert text([*rig.tiers[1].blocks]) == "abcd"
    assert "t0: 4 blocks were not written: OSError: out of order" in caplog.text
    # At the end of the request they were offered again.
    assert rig.manager.tier_stats()[0].failed == 8
    assert rig.tiers[0].used == [keys("abcd")], "it hears of the request"
    del rig.tiers[0].submit_write  # type: ignore[misc]
    rig.store("e")
    assert text([*rig.tiers[0].blocks]) == "e"


def test_blocks_are_promoted_whatever_the_admission_rule_of_ram_thinks() -> None:
    rig = Rig(admission="reuse:2")
    rig.below("ab")
    ctx = rig.begin()
    assert rig.ask("ab", ctx) == (0, RETRY)
    rig.manager.poll()
    assert rig.ask("ab", ctx) == (2, HIT)


@pytest.mark.parametrize("store", ["on-compute", ON_DEVICE_EVICTION])
@pytest.mark.parametrize("policy", POLICIES.names())
def test_with_any_policy(policy: str, store: str) -> None:
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


def test_a_request_without_a_record_asks_ram_alone() -> None:
    rig = Rig()
    rig.below("a")
    assert rig.manager.lookup(keys("a")) == (0, MISS)
    assert rig.manager.lookup_key(b"a") is MISS


# ---- key by key, as vLLM asks


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


def test_key_by_key_what_finds_no_room_is_a_miss() -> None:
    rig = Rig(capacity=2)
    rig.below("abc")
    ctx = rig.begin()
    for key in keys("abc"):
        assert rig.manager.lookup_key(key, ctx) is RETRY
    rig.manager.poll()
    rig.manager.poll()
    assert [rig.manager.lookup_key(key, ctx) for key in keys("abc")] == [HIT, HIT, MISS]


def test_another_requests_store_is_pending_and_no_retry() -> None:
    rig = Rig(immediate=False)
    plan = rig.manager.prepare_store(keys("a"))
    ctx = rig.begin()
    assert rig.ask("ab", ctx) == (0, PENDING)
    assert rig.manager.lookup_key(b"a", ctx) is PENDING
    rig.manager.complete_store(rig.compute(plan))


# ---- no harm


def test_a_request_waits_no_longer_than_the_deadline() -> None:
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
    assert rig.ask("ab", other) == (2, HIT), "what came late serves the next"


def test_nor_longer_than_computing_would_take() -> None:
    rig = Rig(immediate=False, deadline_s=2.0, recompute_s_per_block=0.1)
    rig.below("ab")
    ctx = rig.begin()
    assert rig.ask("ab", ctx) == (0, RETRY)
    rig.clock.now += 0.21
    assert rig.ask("ab", ctx) == (0, MISS)


def test_a_second_wait_of_one_request_counts_from_its_own_start() -> None:
    rig = Rig(capacity=8, immediate=False, deadline_s=2.0)
    rig.below("a")
    ctx = rig.begin()
    assert rig.ask("ab", ctx) == (0, RETRY)
    rig.end_all()
    assert rig.ask("ab", ctx) == (1, MISS)
    rig.clock.now += 100
    rig.below("b")
    assert rig.ask("ab", ctx) == (1, RETRY)


def test_a_tier_slower_than_computing_is_left_alone_but_tried_now_and_then() -> None:
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

    assert serve("ab", 2.0) == (0, RETRY), "nothing is known yet"
    assert serve("cd", 2.0) == (0, RETRY), "the probe"
    assert serve("ef", 0.0) == (0, MISS)
    assert rig.manager.counts.not_worth == 2
    rig.clock.now += 11
    for pair in ("ef", "gh"):
        rig.manager.discard(keys("abcdefgh"))
        assert serve(pair, 0.01) == (0, RETRY), "the probe was fast"
        rig.clock.now += 11
    assert not rig.tier.jobs


def end_reads(rig: Rig, seconds: float, tier: int = 0, *, failing: bool = False) -> None:
    for job in rig.tiers[tier].jobs:
        job.seconds = seconds
        job.fail = {*job.keys} if failing else set()
    rig.end_all()


def test_a_read_that_fails_is_not_learnt_as_a_fast_one() -> None:
    rig = Rig(capacity=8, immediate=False, recompute_s_per_block=0.1, deadline_s=100.0)
    rig.below("abcdef")
    assert rig.ask("ab", rig.begin()) == (0, RETRY)
    end_reads(rig, 2.0)  # slow: a second a block
    assert rig.ask("cd", rig.begin()) == (0, RETRY), "the probe"
    end_reads(rig, 0.0001, failing=True)
    assert rig.ask("ef", rig.begin()) == (0, MISS)
    assert rig.manager.counts.not_worth == 2


def test_a_tier_whose_reads_bring_nothing_is_left_alone_for_a_while() -> None:
    rig = Rig(capacity=8, immediate=False)
    rig.below("abcdef")
    for letter in "abc":
        assert rig.ask(letter, rig.begin()) == (0, RETRY)
        end_reads(rig, 0.001, failing=True)
    assert rig.ask("d", rig.begin()) == (0, MISS)
    rig.clock.now += 11
    assert rig.ask("d", rig.begin()) == (0, RETRY), "tried again"
    end_reads(rig, 0.001, failing=True)
    assert rig.ask("e", rig.begin()) == (0, MISS), "and left alone at once"
    rig.clock.now += 11
    assert rig.ask("e", rig.begin()) == (0, RETRY)
    end_reads(rig, 0.001)
    assert rig.ask("f", rig.begin()) == (0, RETRY), "one that arrived is enough"


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


def test_what_is_here_already_makes_no_read_worth_it() -> None:
    rig = Rig(capacity=16, immediate=False, recompute_s_per_block=0.1, deadline_s=100.0)
    rig.below("xyz")
    for letter in "xy":  # two seconds a block: nothing is known yet, and the probe
        assert rig.ask(letter, rig.begin()) == (0, RETRY)
        end_reads(rig, 2.0)
    rig.tier.takes = False
    rig.store("abcdefgh")
    assert rig.ask("abcdefghz", rig.begin()) == (8, MISS)


def test_of_two_tiers_that_have_a_block_the_faster_is_asked_and_then_the_other() -> None:
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
    assert rig.ask("abc", ctx) == (0, RETRY), "a second try, where they are as well"
    assert [[text(job.keys) for job in tier.jobs] for tier in rig.tiers] == [["abc"], []]
    end_reads(rig, 2.0, 0)
    assert rig.ask("abc", ctx)[0] == 3


def test_a_slow_tier_is_left_alone_for_one_block_too_and_a_fast_one_behind_it_is_not() -> None:
    rig = Rig(capacity=8, tiers=2, immediate=False, recompute_s_per_block=0.1, deadline_s=100.0)
    rig.below("abcdef")
    rig.below("xyz", tier=1)
    for letters, seconds in (("a", 2.0), ("bc", 2.1)):  # nothing is known yet; the probe
        assert rig.ask(letters, rig.begin()) == (0, RETRY)
        rig.tier.jobs[0].seconds = seconds
        rig.end_all()
    assert rig.ask("d", rig.begin()) == (0, MISS)
    assert rig.ask("ef", rig.begin()) == (0, MISS)
    assert rig.manager.counts.not_worth == 3
    assert rig.ask("x", rig.begin()) == (0, RETRY)
    assert rig.ask("yz", rig.begin()) == (0, RETRY)
    assert [text(job.keys) for job in rig.tiers[1].jobs] == ["x", "yz"]


def test_a_tier_that_does_not_answer_is_left_alone_until_it_does() -> None:
    rig = Rig(capacity=8, immediate=False, deadline_s=1.0)
    rig.below("ab")
    stuck = rig.begin()
    assert rig.ask("a", stuck) == (0, RETRY)
    rig.clock.now += 4.1
    other = rig.begin()
    assert rig.ask("b", other) == (0, MISS)
    rig.store("cd", other)
    assert len(rig.tier.jobs) == 1, "nothing more is given to it"
    rig.end_all()
    assert [text(job.keys) for job in rig.tier.jobs] == ["cd"], "when it answers it gets what has waited"
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
    assert [text(job.keys) for job in rig.tier.jobs] == ["abcdefg"], "more than a quarter"
    assert rig.ask("hijkl", rig.begin()) == (0, MISS), "beside others a quarter is the limit"
    assert rig.manager.counts.no_room == 5
    rig.end_all()
    rig.below("mnopqrstuvwx")
    assert rig.ask("mnopqrstuvwx", rig.begin()) == (0, RETRY)
    assert [text(job.keys) for job in rig.tier.jobs] == ["mnopqrst"]


def test_a_request_that_leaves_out_the_tiers_gets_nothing_from_them() -> None:
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


def test_the_reads_of_all_requests_together_keep_to_their_share_of_ram() -> None:
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
    assert [text(job.keys) for job in rig.tier.jobs] == ["ijkl"], "what has ended, well or not, is given back"


# ---- resets and ends


def test_reset_forgets_everything_everywhere_also_what_is_under_way() -> None:
    rig = Rig(immediate=False)
    rig.below("ab")
    ctx = rig.begin()
    rig.ask("ab", ctx)
    rig.store("cd")
    rig.manager.reset()
    assert rig.ask("ab", ctx) == (0, MISS)
    rig.end_all()
    assert rig.ask("ab", ctx) == (0, MISS)
    assert rig.tier.blocks == {}
    audit(rig.manager)
    assert rig.manager.stats().free == 4


@pytest.mark.parametrize("immediate", [True, False])
def test_a_reset_that_drops_transfers_spares_the_slots_of_the_tiers(immediate: bool) -> None:
    """Whoever resets vouches for the engine's transfers, not for a disk that still reads from RAM."""
    rig = Rig(immediate=immediate, deadline_s=0.01)
    rig.store("abcd")
    rig.manager.reset(drop_in_flight=True)
    assert rig.manager.stats().free == (4 if immediate else 0)
    rig.end_all()
    assert rig.manager.stats().free == 4


@pytest.mark.parametrize("hangs", [False, True])
def test_after_a_reset_that_drops_transfers_no_tier_would_remember_after_a_crash(hangs: bool) -> None:
    """Each tier forgets durably before it returns, also when another tier does not answer."""
    rig = Rig(capacity=8, tiers=2, deadline_s=0.01)
    rig.store("ab")
    assert all(tier.drain(0.0) for tier in rig.tiers)
    assert [set(tier.durable) for tier in rig.tiers] == [{*keys("ab")}] * 2
    rig.tier.immediate = not hangs
    rig.store("cd")
    rig.manager.reset(drop_in_flight=True)
    assert [set(tier.durable) for tier in rig.tiers] == [{*keys("ab")} if hangs else set(), set()]


def test_settle_says_whether_all_jobs_ended_and_close_closes_the_tiers() -> None:
    rig = Rig(immediate=False)
    rig.store("ab")
    assert not rig.manager.settle(0.0)
    rig.tier.end(rig.tier.jobs[0])
    assert rig.manager.settle(0.0)
    rig.manager.close(0.0)
    assert rig.tier.closed


def test_ram_takes_checksums_of_what_was_promoted() -> None:
    rig = Rig()
    rig.below("a")
    ctx = rig.begin()
    assert rig.ask("a", ctx) == (0, RETRY)
    rig.manager.poll()
    plan = rig.load("a", ctx)
    assert rig.ram.verify_slots(plan.keys, plan.slots).all()


def test_damage_in_ram_does_not_cascade_with_a_good_checksum() -> None:
    rig = Rig()
    plan = rig.compute(rig.manager.prepare_store(keys("abc")))
    rig.pool[plan.slots[1]] ^= 1
    rig.manager.complete_store(plan)
    assert set(rig.tier.blocks) == {*keys("ac")}
    assert rig.manager.lookup_key(b"b") is MISS


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ram": MemoryTier(3, 8)}, "ram: '3 slots'.* allowed: 4 or more"),
        ({"deadline_s": 0}, "deadline_s: 0 .* more than 0"),
        ({"max_in_flight": 1.5}, "max_in_flight: 1.5"),
        ({"tiers": [ScriptedTier(16)]}, "tier scripted: .*16 bytes.*8"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"ram": MemoryTier(4, 8), "tiers": []} | options
    with pytest.raises(ConfigError, match=message):
        TieredManager(4, key_bytes=1, **given)


# ---- tiers that machines share: they have to be asked


def far(**options: Any) -> Rig:
    """A manager whose only tier is shared, and whose jobs the test ends."""
    return Rig(**({"capacity": 8, "tiers": 0, "immediate": False, "shared": True} | options))


def jobs(rig: Rig, tier: int = 0) -> list[tuple[str, str]]:
    """What each job of a tier is, and its blocks."""
    kinds = {(True, False): "read", (False, False): "write", (False, True): "probe"}
    return [(kinds[job.is_read, job.pool is None], text(job.keys)) for job in rig.tiers[tier].jobs]


def test_a_shared_tier_is_asked_once_for_the_whole_rest_of_a_path() -> None:
    rig = far()
    rig.below("abc")
    ctx = rig.begin()
    assert rig.ask("abcdef", ctx) == (0, RETRY)
    assert rig.ask("abcdef", ctx) == (0, RETRY)
    assert jobs(rig) == [("probe", "abcdef")]
    rig.end_all()
    assert rig.ask("abcdef", ctx) == (0, RETRY)
    assert jobs(rig) == [("read", "abc")]
    rig.end_all()
    assert rig.ask("abcdef", ctx) == (3, MISS)
    rig.load("abc", ctx)
    assert rig.manager.hit_blocks == [0, 3]
    assert rig.ask("abcdef", rig.begin()) == (3, MISS), "what was absent a moment ago is not asked for again"
    assert jobs(rig) == []


def test_what_ram_and_a_disk_have_is_not_asked_for_and_read_meanwhile() -> None:
    rig = Rig(capacity=16, immediate=False, shared=True)
    rig.store("a")
    rig.end_all()
    rig.below("bc", tier=0)
    rig.below("defg", tier=1)
    ctx = rig.begin()
    assert rig.ask("abcdefgh", ctx) == (1, RETRY)
    assert (jobs(rig, 0), jobs(rig, 1)) == ([("read", "bc")], [("probe", "defgh")])
    rig.tiers[0].end(rig.tiers[0].jobs[0])
    rig.manager.poll()
    assert rig.ask("abcdefgh", ctx) == (3, RETRY), "it waits for the answer"
    rig.end_all()
    assert rig.ask("abcdefgh", ctx) == (3, RETRY)
    assert jobs(rig, 1) == [("read", "defg")]
    rig.end_all()
    assert rig.ask("abcdefgh", ctx) == (7, MISS)


def test_nothing_is_asked_for_behind_a_block_that_nobody_has() -> None:
    rig = far()
    rig.believed[b"b"] = False
    assert rig.ask("abcd", rig.begin()) == (0, RETRY)
    assert jobs(rig) == [("probe", "a")]


def test_two_requests_share_one_probe() -> None:
    rig = far()
    first, second = rig.begin(), rig.begin()
    assert rig.ask("abc", first) == rig.ask("abcd", second) == (0, RETRY)
    assert jobs(rig) == [("probe", "abc"), ("probe", "d")]


def test_a_request_waits_for_answers_no_longer_than_the_probes_deadline() -> None:
    rig = far()
    ctx = rig.begin()
    assert rig.ask("ab", ctx) == (0, RETRY)
    rig.clock.now += 0.04
    assert rig.ask("ab", ctx) == (0, RETRY)
    rig.clock.now += 0.02
    assert rig.ask("ab", ctx) == (0, MISS)
    assert rig.ask("cd", ctx) == (0, MISS), "nor for another one"
    rig.below("ab")
    rig.end_all()
    assert rig.ask("ab", ctx) == (0, RETRY), "what it did not wait for is read all the same, if it asks again"
    assert jobs(rig) == [("read", "ab")]
    rig.clock.now += 3.0
    assert rig.ask("ef", ctx) == (0, RETRY), "after a pause a new wait begins"


def test_a_probe_that_nobody_answers_is_a_miss_and_not_repeated_at_once() -> None:
    rig = far()
    ctx = rig.begin()
    rig.ask("ab", ctx)
    rig.tier.jobs[0].fail = {b"a", b"b"}
    rig.end_all()
    assert rig.ask("ab", ctx) == (0, MISS)
    assert jobs(rig) == []


def test_key_by_key_one_probe_a_step() -> None:
    rig = far()
    rig.below("abc")
    ctx = rig.begin()
    for _ in range(2):
        assert [rig.manager.lookup_key(key, ctx) for key in keys("abcd")] == [RETRY] * 4
        assert rig.manager.poll()
        assert jobs(rig) == [("probe", "abcd")]
    rig.end_all()
    assert [rig.manager.lookup_key(key, ctx) for key in keys("abcd")] == [RETRY, RETRY, RETRY, MISS]
    rig.manager.poll()
    assert jobs(rig) == [("read", "abc")]
    rig.end_all()
    assert [rig.manager.lookup_key(key, ctx) for key in keys("abcd")] == [HIT, HIT, HIT, MISS]


def test_key_by_key_no_longer_than_the_probes_deadline() -> None:
    rig = far()
    ctx = rig.begin()
    assert rig.manager.lookup_key(b"a", ctx) is RETRY
    rig.manager.poll()
    rig.clock.now += 0.06
    assert rig.manager.lookup_key(b"a", ctx) is MISS


def test_a_block_that_has_left_a_shared_tier_is_stale_and_not_lost() -> None:
    rig = far()
    ctx = rig.begin()
    rig.believed.update(dict.fromkeys(keys("abc"), True))
    rig.below("ac")
    for _ in range(5):
        rig.ask("abc", ctx)
        rig.end_all()
    assert rig.ask("abc", ctx) == (1, MISS)
    assert (rig.manager.counts.stale, rig.manager.counts.lost, rig.manager.counts.promoted) == (1, 0, 2)


def test_a_tier_whose_blocks_have_all_left_has_not_failed() -> None:
    rig = far()
    for letter in "abcd":
        rig.believed[letter.encode()] = True
        rig.ask(letter, rig.begin())
        rig.end_all()
    assert rig.manager.counts.stale == 4
    assert not rig.manager.lanes[0].is_failing(rig.clock.now)


def test_what_asking_has_taken_counts_against_a_read() -> None:
    """A block takes 20 ms to read and 30 to compute; after 15 ms of asking that pays no more."""
    for asked_s, expected in [(0.0, [("read", "a")]), (0.015, [])]:
        rig = far(recompute_s_per_block=0.03)
        rig.manager.lanes[0].speed.learn(1, 0.02)
        assert rig.manager.lanes[0].is_trial_due(rig.clock.now), "and the next one is not"
        rig.below("a")
        ctx = rig.begin()
        assert rig.ask("ab", ctx) == (0, RETRY)
        rig.end_all()
        rig.clock.now += asked_s
        rig.ask("ab", ctx)
        assert jobs(rig) == expected


def test_a_shared_tier_that_raises_instead_of_asking_is_a_miss() -> None:
    rig = far()
    rig.tier.submit_probe = raises  # type: ignore[method-assign]
    ctx = rig.begin()
    assert rig.ask("abc", ctx) == (0, MISS)
    assert rig.manager.tier_stats()[0].failed == 3


def test_a_shared_tier_that_does_not_answer_is_not_asked() -> None:
    rig = far()
    rig.ask("a", rig.begin())
    rig.clock.now += 10.0
    assert rig.ask("b", rig.begin()) == (0, MISS)
    assert jobs(rig) == [("probe", "a")]


def test_a_request_that_leaves_out_the_tiers_asks_none() -> None:
    rig = far()
    ctx = rig.begin()
    rig.manager.leave_out_tiers(ctx)
    assert rig.ask("a", ctx) == (0, MISS)
    assert rig.manager.lookup_key(b"a", ctx) is MISS
    assert jobs(rig) == []


def test_a_request_in_the_queue_is_asked_for_ahead() -> None:
    """When its turn comes it is known what a shared tier has; what a request leaves out is not asked."""
    rig = far()
    rig.below("ab")
    ctx = rig.begin("abc")
    rig.manager.expect(ctx)
    rig.manager.poll()
    assert jobs(rig) == [("probe", "abc")]
    rig.end_all()
    assert rig.ask("abc", ctx) == (0, RETRY)
    assert jobs(rig) == [("read", "ab")]
    rig = Rig(capacity=8, immediate=False, shared=True)
    other = rig.begin("xyz")
    rig.manager.leave_out_tiers(other, shared=True)
    rig.manager.expect(other)
    rig.manager.poll()
    assert jobs(rig, 1) == []


@pytest.mark.parametrize(
    ("compute_s", "said"),
    [
        (None, "all its blocks are read"),
        (0.01, "faster than 0.1 GB/s; `kvoffload tier bench` measures the server"),
    ],
)
def test_a_shared_tier_says_at_the_start_what_it_needs(
    compute_s: float | None, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A block of 1 MB computed in 10 ms corresponds to 0.1 GB/s."""
    tier = ScriptedSharedTier(1_000_000)
    assert said in break_even(tier, compute_s)
    with caplog.at_level("INFO"):
        far(recompute_s_per_block=0.5)
    assert "tier far: a read pays if blocks arrive faster than 1.6e-08 GB/s" in caplog.text


@pytest.mark.parametrize("shared", [True, False])
def test_a_request_may_leave_out_only_some_of_the_tiers(shared: bool) -> None:
    rig = Rig(capacity=16, immediate=False, shared=True)
    rig.below("ab", tier=0)
    rig.below("abc", tier=1)
    ctx = rig.begin()
    rig.manager.leave_out_tiers(ctx, shared=shared)
    assert rig.ask("abcd", ctx) == (0, RETRY)
    assert (jobs(rig, 0), jobs(rig, 1)) == (([("read", "ab")], []) if shared else ([], [("probe", "abcd")]))
    rig.end_all()
    assert rig.ask("abcd", ctx) == ((2, MISS) if shared else (0, RETRY))


# ---- the estimate


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


# ---- all of it in any order

LETTERS = "abcdefghijkl"
runs = st.tuples(st.integers(0, 8), st.integers(1, 8)).map(lambda run: LETTERS[run[0] : run[0] + run[1]])


class TieringMachine(RuleBasedStateMachine):
    """A pool of real bytes: whatever is ready, in RAM or below, holds its key's bytes at every step."""

    requests: Bundle[RequestContext] = Bundle("requests")
    stores: Bundle[StorePlan] = Bundle("stores")

    @initialize(
        policy=st.sampled_from(["lru", "arc", "hazard"]),
        is_gated=st.booleans(),
        store=st.sampled_from(["on-compute", ON_DEVICE_EVICTION]),
        max_in_flight=st.sampled_from([0.3, 1.0]),
        recompute=st.sampled_from([None, 0.05]),
        tiers=st.integers(1, 2),
        shared=st.booleans(),
    )
    def start(
        self,
        policy: str,
        is_gated: bool,
        store: str,
        max_in_flight: float,
        recompute: float | None,
        tiers: int,
        shared: bool,
    ) -> None:
        self.rig = Rig(
            5,
            tiers=tiers,
            shared=shared,
            immediate=False,
            policy=policy,
            admission=ReuseAdmission(1, 2, 8) if is_gated else "all",
            store=store,
            max_in_flight=max_in_flight,
            recompute_s_per_block=recompute,
            deadline_s=1.0,
        )
        self.unfinished: list[RequestContext] = []
        self.in_flight: list[StorePlan] = []

    @rule(target=requests, letters=runs)
    def begin(self, letters: str) -> RequestContext:
        ctx = self.rig.begin(letters)
        self.unfinished.append(ctx)
        return ctx

    @rule(ctx=requests, letters=runs)
    def ask(self, ctx: RequestContext, letters: str) -> None:
        if ctx.finished:
            return
        num_ready, stopped_by = self.rig.ask(letters, ctx)
        if stopped_by is not RETRY:
            self.rig.load(letters[:num_ready], ctx)

    @rule(ctx=requests, letters=runs)
    def ask_key_by_key(self, ctx: RequestContext, letters: str) -> None:
        if ctx.finished:
            return
        for key in keys(letters):
            if self.rig.manager.lookup_key(key, ctx) is MISS:
                break

    @rule(target=stores, ctx=st.one_of(requests, st.none()), letters=runs)
    def store(self, ctx: RequestContext | None, letters: str) -> StorePlan | None:
        if ctx is not None and ctx.finished:
            ctx = None
        plan = self.rig.manager.prepare_store(keys(letters), ctx)
        if plan is not None:
            self.rig.pool[plan.slots] = 0xDD
            self.rig.ram.erase(plan.slots)
            self.in_flight.append(plan)
        return plan

    @rule(plan=consumes(stores), success=st.booleans())
    def complete(self, plan: StorePlan | None, success: bool) -> None:
        if plan is not None:
            self.in_flight.remove(plan)
            self.rig.manager.complete_store(self.rig.compute(plan), success)

    @rule(ctx=consumes(requests))
    def finish(self, ctx: RequestContext) -> None:
        if not ctx.finished:
            self.unfinished.remove(ctx)
            self.rig.manager.finish_request(ctx)

    @rule(data=st.data())
    def end_a_job(self, data: st.DataObject) -> None:
        jobs = [(tier, job) for tier in self.rig.tiers for job in tier.jobs]
        if jobs:
            tier, job = data.draw(st.sampled_from(jobs))
            job.fail = {key for key in job.keys if data.draw(st.integers(0, 4)) == 0}
            job.seconds = data.draw(st.sampled_from([0.001, 1.0]))
            tier.end(job)

    @rule()
    def poll(self) -> None:
        self.rig.manager.poll()

    @rule(seconds=st.sampled_from([0.1, 1.5, 20.0]))
    def wait(self, seconds: float) -> None:
        self.rig.clock.now += seconds

    @rule(letters=runs, last=st.booleans())
    def the_tier_forgets(self, letters: str, last: bool) -> None:
        """Of the last tier, which may be shared, this process does not come to know of it."""
        for key in keys(letters):
            self.rig.tiers[-last].blocks.pop(key, None)

    @rule(letters=runs)
    def another_client_writes(self, letters: str) -> None:
        if isinstance(self.rig.tiers[-1], ScriptedSharedTier):
            self.rig.below(letters, tier=-1)

    @rule(letters=runs)
    def hints_run_out(self, letters: str) -> None:
        for key in keys(letters):
            self.rig.believed.pop(key, None)

    @rule(takes=st.booleans())
    def the_tier_is_busy_or_not(self, takes: bool) -> None:
        self.rig.tier.takes = takes

    @rule(letters=runs)
    def discard(self, letters: str) -> None:
        self.rig.manager.discard(keys(letters))

    @rule(chance=st.integers(0, 9))
    def reset(self, chance: int) -> None:
        if chance == 0:
            self.rig.manager.reset()

    @invariant()
    def nothing_lies(self) -> None:
        manager = self.rig.manager
        audit(manager)
        for key in keys(LETTERS):
            if manager.lookup_key(key) is HIT:
                plan = manager.pin([key])
                assert self.rig.pool[plan.slots].tobytes() == key * BLOCK_BYTES
                manager.unpin(plan)
        for tier in self.rig.tiers:
            for key, block in tier.blocks.items():
                assert block == key * BLOCK_BYTES

    def teardown(self) -> None:
        """When all has ended, nothing is left of it."""
        if not hasattr(self, "rig"):
            return
        for plan in self.in_flight:
            self.rig.manager.complete_store(self.rig.compute(plan))
        for ctx in self.unfinished:
            self.rig.manager.finish_request(ctx)
        for _ in range(3 + 2 * len(LETTERS)):  # one after the other, if tiers may pin but one block
            self.rig.end_all()
        assert self.rig.manager.settle(0.0)
        stats = self.rig.manager.stats()
        assert stats.writing == stats.condemned == 0
        assert stats.evictable == stats.ready
        assert all(not tier.open_requests for tier in self.rig.tiers)
        assert not self.rig.manager.waits
        assert not self.rig.manager.promotion.promoting


TestTieringMachine = TieringMachine.TestCase
TestTieringMachine.settings = settings(
    max_examples=settings().max_examples // 4, stateful_step_count=50, deadline=None
)


# ---- requests that wait in the engine's queue


def wait(rig: Rig, letters: str) -> RequestContext:
    ctx = rig.begin(letters)
    rig.manager.expect(ctx)
    return ctx


def test_what_a_waiting_request_will_ask_for_is_read_ahead() -> None:
    rig = Rig(capacity=8, immediate=False)
    rig.below("abcd")
    ctx = wait(rig, "ab")
    assert not rig.tier.jobs, "in the next step"
    assert rig.manager.poll()
    rig.end_all()
    assert rig.manager.counts.read_ahead == 2
    assert rig.ask("ab", ctx) == (2, HIT), "without waiting"
    rig.manager.withdraw(ctx)
    rig.load("ab", ctx)
    assert rig.manager.hit_blocks == [0, 2], "from the tier, though it was ready"
    assert not rig.manager.poll()


def test_the_longest_waiting_is_read_for_first_and_one_after_the_other() -> None:
    rig = Rig(capacity=8, immediate=False)
    rig.below("abcd")
    for letters in ("ab", "cd"):
        wait(rig, letters)
    rig.manager.poll()
    rig.manager.poll()
    assert [text(job.keys) for job in rig.tier.jobs] == ["ab"]
    rig.end_all()
    rig.manager.poll()
    assert rig.manager.counts.read_ahead == 4


def test_nothing_is_read_ahead_while_somebody_reads() -> None:
    rig = Rig(capacity=8, immediate=False)
    rig.below("abcd")
    assert rig.ask("ab", rig.begin()) == (0, RETRY)
    waiting = wait(rig, "cd")
    rig.manager.poll()
    assert [text(job.keys) for job in rig.tier.jobs] == ["ab"]
    rig.manager.withdraw(waiting)
    rig.end_all()
    rig.manager.poll()
    assert not rig.tier.jobs, "it waits no more"
    assert rig.manager.counts.read_ahead == 0


def test_what_could_not_be_read_ahead_is_not_given_up() -> None:
    rig = Rig(capacity=4, immediate=False, max_in_flight=0.25)
    rig.below("abcd")
    ctx = wait(rig, "abcd")
    rig.manager.poll()
    assert [text(job.keys) for job in rig.tier.jobs] == ["a"], "a quarter of RAM"
    rig.end_all()
    assert (rig.manager.counts.no_room, rig.manager.counts.read_ahead) == (0, 1)
    assert rig.ask("abcd", ctx) == (1, RETRY), "and half of it for one that is served"


def test_a_read_ahead_that_fails_is_a_miss() -> None:
    rig = Rig(capacity=8, immediate=False)
    rig.below("ab")
    ctx = wait(rig, "ab")
    rig.manager.poll()
    end_reads(rig, 0.1, failing=True)
    assert rig.manager.counts.lost == 2
    rig.manager.withdraw(ctx)
    rig.manager.finish_request(ctx)
    assert not rig.manager.poll()


@pytest.mark.parametrize("end", ["finish", "leave out", "reset"])
def test_nothing_is_read_ahead_for_who_does_not_wait_for_it(end: str) -> None:
    rig = Rig(capacity=8, immediate=False)
    rig.below("ab")
    ctx = wait(rig, "ab")
    if end == "finish":
        rig.manager.finish_request(ctx)
    elif end == "leave out":
        rig.manager.leave_out_tiers(ctx)
    else:
        rig.manager.reset()
    rig.manager.poll()
    assert not rig.tier.jobs
    audit(rig.manager)
