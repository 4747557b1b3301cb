"""The cascade: which blocks are offered to tiers, when, and how many are pinned."""

from __future__ import annotations

from typing import Any

import pytest

from kvoffload.admission.reuse import ReuseAdmission
from kvoffload.tiering.cascade import write_room
from support.letters import keys, text
from support.tiering_rig import BLOCK_BYTES, Rig, fails


def test_blocks_of_a_finished_request_are_evicted_last() -> None:
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


def test_admission_to_ram_is_as_without_tiers() -> None:
    rig = Rig(admission=ReuseAdmission(1, 2))
    for stored in ("", "ab"):
        ctx = rig.begin("ab")
        plan = rig.manager.prepare_store(keys("ab"), ctx)
        assert plan is not None
        assert text(plan.keys) == stored, "at the second request"
        rig.manager.complete_store(rig.compute(plan))
        rig.manager.finish_request(ctx)


def test_stored_blocks_cascade_to_every_tier_byte_for_byte() -> None:
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
    assert set(rig.tier.blocks) == {*keys("abcd")}, "only complete blocks"


def test_a_failed_store_is_not_offered() -> None:
    rig = Rig()
    rig.manager.complete_store(rig.compute(rig.manager.prepare_store(keys("ab"))), success=False)
    assert rig.tier.blocks == {}


def test_a_busy_tier_is_offered_the_block_again_when_the_request_finishes() -> None:
    rig = Rig()
    rig.tier.takes = False
    ctx = rig.begin()
    rig.store("abc", ctx)
    assert rig.manager.stats().evictable == 3, "no block is pinned for a busy tier"
    rig.tier.takes = True
    rig.manager.finish_request(ctx)
    assert set(rig.tier.blocks) == {*keys("abc")}
    assert rig.tier.used == [keys("abc")]
    assert rig.tier.open_requests == []


def test_a_request_is_reported_to_tiers_when_its_last_store_is_complete() -> None:
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


def test_blocks_of_a_failed_write_are_unpinned() -> None:
    rig = Rig(capacity=8, immediate=False, max_in_flight=0.5)
    rig.store("abcd")
    rig.tier.jobs[0].fail = {b"a", b"c"}
    rig.end_all()
    assert rig.manager.stats().evictable == 4
    rig.store("efgh")
    assert [text(job.keys) for job in rig.tier.jobs] == ["efgh"], (
        "the failed blocks no longer count towards the share"
    )
    assert rig.manager.counts.not_offered == 0


def test_pinned_blocks_are_bounded() -> None:
    rig = Rig(capacity=8, immediate=False, max_in_flight=0.25)
    rig.store("abcd")
    assert [text(job.keys) for job in rig.tier.jobs] == ["ab"]


def test_the_bound_of_pinned_blocks_follows_a_resize() -> None:
    """Writes must never pin all slots in use."""
    rig = Rig(capacity=16, immediate=False, max_in_flight=0.25)
    rig.manager.begin_resize(8)
    assert not rig.manager.advance_resize()
    rig.store("abcdefgh")
    assert [text(job.keys) for job in rig.tier.jobs] == ["ab"]
    rig.manager.begin_resize(16)
    assert not rig.manager.advance_resize()
    rig.manager.poll()
    assert [text(job.keys) for job in rig.tier.jobs] == ["ab", "cd"]


def test_all_tiers_share_one_budget_of_pinned_blocks() -> None:
    """A tier that hangs keeps only its own share pinned."""
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
    assert write_room(rig.manager.lanes, 1, 20) + lane.num_writing >= 9, "the tier is no longer slow"


def test_a_failed_write_does_not_count_for_speed() -> None:
    rig = Rig(capacity=16, tiers=2, immediate=False, max_in_flight=0.25)
    rig.store("ab")
    for tier in rig.tiers:
        tier.jobs[0].seconds = 1.0
    rig.tiers[0].jobs[0].fail, rig.tiers[0].jobs[0].seconds = {b"a", b"b"}, 1e-6
    rig.end_all()
    assert [lane.write_s_per_block for lane in rig.manager.lanes] == [0.0, 0.5]


def test_blocks_wait_for_a_busy_tier() -> None:
    rig = Rig(capacity=8, immediate=False, max_in_flight=0.25)
    rig.store("abcdef")
    for expected in ("ab", "cd", "ef"):
        assert [text(job.keys) for job in rig.tier.jobs] == [expected]
        rig.end_all()
    assert not rig.manager.has_jobs
    assert set(rig.tier.blocks) == {*keys("abcdef")}
    assert rig.manager.counts.not_offered == 0


def test_a_step_makes_one_offer_to_a_tier_that_accepts_nothing() -> None:
    """Otherwise a step could offer all of RAM."""
    rig = Rig(capacity=16, immediate=False, max_in_flight=0.25)
    rig.store("abcdefghijkl")
    offers: list[str] = []
    submit = rig.tier.submit_write

    def noted(offered: list[bytes], *arguments: Any) -> Any:
        offers.append(text(offered))
        return submit(offered, *arguments)

    rig.tier.submit_write = noted  # type: ignore[method-assign]
    rig.tier.takes = False
    rig.end_all()
    assert offers == ["efgh"]
    rig.manager.poll()
    assert offers == ["efgh", "ijkl"]
    assert not rig.manager.has_jobs


def test_waiting_blocks_that_leave_ram_are_counted_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(capacity=4, immediate=False, max_in_flight=0.5)
    rig.store("abcd")
    rig.store("xy")  # in place of c and d, which wait
    assert [text(job.keys) for job in rig.tier.jobs] == ["ab"]
    rig.end_all()
    rig.manager.poll()
    assert [text(job.keys) for job in rig.tier.jobs] == ["xy"]
    assert rig.manager.counts.not_offered == 2
    assert "tier t0: 2 blocks left RAM unwritten" in caplog.text


def test_close_logs_the_number_of_blocks_that_were_not_written(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(capacity=4, immediate=False, max_in_flight=0.5)
    rig.store("abcd")
    rig.store("xy")  # in place of c and d, which wait
    rig.end_all()
    rig.manager.poll()
    rig.end_all()
    rig.store("uv")
    rig.store("w")  # waits for u and v
    caplog.clear()
    rig.manager.close(timeout_s=0)
    (line,) = caplog.messages
    assert line == (
        "tier t0: 2 of 9 blocks left RAM before the tier could write them; 1 were queued at close: call "
        "flush() first"
    )
    caplog.clear()
    rig.manager.close(timeout_s=0)
    assert not caplog.messages


def test_close_logs_nothing_if_every_block_was_written(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(capacity=4)
    rig.store("abcd")
    assert rig.manager.flush(1.0)
    rig.manager.close()
    assert not caplog.messages


def test_waiting_blocks_are_bounded_by_the_capacity_of_ram() -> None:
    rig = Rig(capacity=4, immediate=False, max_in_flight=0.25)
    rig.store("a")
    for letter in "bcdefghijk":
        rig.store(letter)
    assert len(rig.manager.lanes[0].waiting) <= 4
    while rig.manager.has_jobs:
        rig.end_all()
    counts = rig.manager.counts
    assert len(rig.tier.blocks) + counts.not_offered == 11


def test_flush_writes_the_blocks_that_the_tier_lacks() -> None:
    rig = Rig(capacity=8, max_in_flight=0.25)
    rig.store("abcdef")
    assert rig.manager.settle(1.0)
    rig.tier.blocks.clear()
    rig.below("b")
    assert rig.manager.flush(1.0)
    assert set(rig.tier.blocks) == {*keys("abcdef")}
    rig.tier.blocks.clear()
    rig.tier.takes = False
    assert rig.manager.flush(1.0), "flush does not wait for blocks that the tier refuses"
    assert not rig.manager.has_jobs


def test_blocks_wait_for_room_in_the_queue_of_a_tier() -> None:
    rig = Rig(capacity=8, immediate=False)
    rig.tier.room = 2
    rig.store("abcdef")
    for expected in ("ab", "cd", "ef"):
        assert [text(job.keys) for job in rig.tier.jobs] == [expected]
        rig.end_all()
    assert set(rig.tier.blocks) == {*keys("abcdef")}


def test_flush_returns_false_if_a_tier_lost_blocks() -> None:
    rig = Rig(capacity=8)
    rig.store("abcd")
    assert rig.manager.flush(1.0)
    rig.tier.blocks.clear()
    rig.tier.submit_write = fails  # type: ignore[method-assign]
    assert not rig.manager.flush(1.0)


@pytest.mark.parametrize("drop_in_flight", [False, True])
def test_a_reset_drops_the_waiting_blocks(drop_in_flight: bool) -> None:
    rig = Rig(capacity=8, immediate=False, max_in_flight=0.25)
    rig.store("abcdef")
    (job,) = rig.tier.jobs
    rig.tier.drain = lambda timeout_s: rig.tier.end(job) or True if rig.tier.jobs else True  # type: ignore[method-assign,func-returns-value]
    rig.manager.reset(drop_in_flight=drop_in_flight)
    rig.end_all()
    assert rig.manager.stats().free == 8
    assert not rig.tier.jobs
    assert rig.tier.blocks == {}


def test_close_drops_the_waiting_blocks() -> None:
    rig = Rig(capacity=8, immediate=False, max_in_flight=0.25)
    rig.store("abcdef")
    rig.manager.close(timeout_s=0.0)
    assert [text(job.keys) for job in rig.tier.jobs] == ["ab"]


def test_flush_times_out() -> None:
    rig = Rig(capacity=8, immediate=False)
    rig.store("ab")
    assert not rig.manager.flush(0.0)
