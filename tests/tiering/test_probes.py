"""Shared tiers: probes, stale blocks, break-even."""

from __future__ import annotations

import pytest

from kvoffload.tiering import promotion
from kvoffload.tiering.worth import break_even
from support.letters import HIT, MISS, keys
from support.scripted_tier import ScriptedSharedTier
from support.tiering_rig import RETRY, Rig, expect, fails, jobs, shared_rig


def test_one_probe_covers_the_rest_of_a_path() -> None:
    rig = shared_rig()
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
    assert rig.ask("abcdef", rig.begin()) == (3, MISS), "recently absent blocks are not probed again"
    assert jobs(rig) == []


def test_blocks_in_ram_or_on_disk_are_not_probed_and_are_read_meanwhile() -> None:
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


def test_no_probe_for_blocks_behind_an_absent_block() -> None:
    rig = shared_rig()
    rig.presence[b"b"] = False
    assert rig.ask("abcd", rig.begin()) == (0, RETRY)
    assert jobs(rig) == [("probe", "a")]


def test_two_requests_share_one_probe() -> None:
    rig = shared_rig()
    first, second = rig.begin(), rig.begin()
    assert rig.ask("abc", first) == rig.ask("abcd", second) == (0, RETRY)
    assert jobs(rig) == [("probe", "abc"), ("probe", "d")]


def test_a_request_waits_for_probes_at_most_the_probe_timeout() -> None:
    rig = shared_rig()
    ctx = rig.begin()
    assert rig.ask("ab", ctx) == (0, RETRY)
    rig.clock.now += 0.04
    assert rig.ask("ab", ctx) == (0, RETRY)
    rig.clock.now += 0.02
    assert rig.ask("ab", ctx) == (0, MISS)
    assert rig.ask("cd", ctx) == (0, MISS), "the request does not wait for another probe either"
    rig.below("ab")
    rig.end_all()
    assert rig.ask("ab", ctx) == (0, RETRY), (
        "blocks found after the wait are read if the request repeats its lookup"
    )
    assert jobs(rig) == [("read", "ab")]
    rig.clock.now += 3.0
    assert rig.ask("ef", ctx) == (0, RETRY), "after a pause a new wait begins"


def test_a_failed_probe_is_a_miss_and_is_not_repeated_at_once() -> None:
    rig = shared_rig()
    ctx = rig.begin()
    rig.ask("ab", ctx)
    rig.tier.jobs[0].fail = {b"a", b"b"}
    rig.end_all()
    assert rig.ask("ab", ctx) == (0, MISS)
    assert jobs(rig) == []


def test_key_by_key_one_probe_a_step() -> None:
    rig = shared_rig()
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


def test_key_by_key_a_request_waits_at_most_the_probe_timeout() -> None:
    rig = shared_rig()
    ctx = rig.begin()
    assert rig.manager.lookup_key(b"a", ctx) is RETRY
    rig.manager.poll()
    rig.clock.now += 0.06
    assert rig.manager.lookup_key(b"a", ctx) is MISS


def test_a_block_evicted_from_a_shared_tier_is_stale_and_not_lost() -> None:
    rig = shared_rig()
    ctx = rig.begin()
    rig.presence.update(dict.fromkeys(keys("abc"), True))
    rig.below("ac")
    for _ in range(5):
        rig.ask("abc", ctx)
        rig.end_all()
    assert rig.ask("abc", ctx) == (1, MISS)
    assert (rig.manager.counts.stale, rig.manager.counts.lost, rig.manager.counts.promoted) == (1, 0, 2)


def test_stale_blocks_are_no_failure_of_the_tier() -> None:
    rig = shared_rig()
    for letter in "abcd":
        rig.presence[letter.encode()] = True
        rig.ask(letter, rig.begin())
        rig.end_all()
    assert rig.manager.counts.stale == 4
    assert not rig.manager.lanes[0].is_failing(rig.clock.now)


def test_the_time_of_a_probe_counts_against_the_read() -> None:
    """A block takes 20 ms to read and 30 ms to compute; after a probe of 15 ms reading does not pay."""
    for asked_s, expected in [(0.0, [("read", "a")]), (0.015, [])]:
        rig = shared_rig(recompute_s_per_block=0.03)
        rig.manager.lanes[0].speed.learn(1, 0.02)
        assert rig.manager.lanes[0].is_trial_due(rig.clock.now), "and the next one is not"
        rig.below("a")
        ctx = rig.begin()
        assert rig.ask("ab", ctx) == (0, RETRY)
        rig.end_all()
        rig.clock.now += asked_s
        rig.ask("ab", ctx)
        assert jobs(rig) == expected


def test_an_exception_of_submit_probe_is_a_miss() -> None:
    rig = shared_rig()
    rig.tier.submit_probe = fails  # type: ignore[method-assign]
    ctx = rig.begin()
    assert rig.ask("abc", ctx) == (0, MISS)
    assert rig.manager.tier_stats()[0].failed == 3


def test_a_stalled_shared_tier_gets_no_probes() -> None:
    rig = shared_rig()
    rig.ask("a", rig.begin())
    rig.clock.now += 10.0
    assert rig.ask("b", rig.begin()) == (0, MISS)
    assert jobs(rig) == [("probe", "a")]


def test_a_request_that_excludes_tiers_sends_no_probe() -> None:
    rig = shared_rig()
    ctx = rig.begin()
    rig.manager.leave_out_tiers(ctx)
    assert rig.ask("a", ctx) == (0, MISS)
    assert rig.manager.lookup_key(b"a", ctx) is MISS
    assert jobs(rig) == []


def test_a_queued_request_is_probed_ahead() -> None:
    """The probe has ended when the request is served. Tiers that the request excludes are not probed."""
    rig = shared_rig()
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
    ("compute_s", "text"),
    [
        (None, "all its blocks are read"),
        (0.01, "faster than 0.1 GB/s; `kvoffload tier bench` measures the server"),
    ],
)
def test_the_break_even_of_a_shared_tier_is_logged(
    compute_s: float | None, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A block of 1 MB computed in 10 ms corresponds to 0.1 GB/s."""
    assert text in break_even(ScriptedSharedTier(1_000_000), compute_s)
    with caplog.at_level("INFO"):
        shared_rig(recompute_s_per_block=0.5)
    assert "tier far: a read pays if blocks arrive faster than 1.6e-08 GB/s" in caplog.text


def test_distrusted_blocks_come_from_no_tier() -> None:
    """An audit found them wrong although their bytes are intact: a read would revive them."""
    rig = Rig(capacity=16, immediate=False)
    rig.below("abc", tier=0)
    rig.manager.distrust([b"b"])
    ctx = rig.begin()
    assert rig.ask("abc", ctx) == (0, RETRY)
    assert jobs(rig, 0) == [("read", "a")]
    rig.end_all()
    assert rig.ask("abc", ctx) == (1, MISS)
    assert rig.manager.lookup_key(b"b", ctx) is MISS


def test_no_kind_of_read_revives_a_distrusted_block() -> None:
    """Tried: reads ahead, reads in flight, and tiers that get the block again."""
    rig = Rig(capacity=16, immediate=False)
    rig.below("abc")
    ctx = rig.begin("xyz")
    rig.below("yz")
    rig.store("x")
    rig.end_all()
    assert rig.ask("xyz", ctx) == (1, RETRY)
    assert jobs(rig)[-1] == ("read", "yz")
    rig.manager.distrust(keys("bz"))  # one is being read
    assert not rig.tier.contains(rig.manager.pack(keys("b"))).any(), "a disk forgets the block"
    rig.below("bz")  # another process, or a write in flight, brings them back
    rig.end_all()
    assert rig.ask("xyz", ctx) == (2, MISS)
    expect(rig, "abc")
    rig.manager.poll()
    assert jobs(rig) == [("read", "a")], "ahead"
    rig.end_all()
    assert rig.manager.contains(rig.manager.pack(keys("abcxyz"))).tolist() == [
        *(True, False, False),
        *(True, True, False),
    ]
    assert rig.ask("abc", rig.begin("abc")) == (1, MISS)
    rig.manager.reset()
    rig.below("abz")
    assert rig.ask("abz", rig.begin("abz")) == (0, RETRY)
    assert jobs(rig)[-1] == ("read", "abz"), "a reset trusts all blocks"


def test_a_write_in_flight_brings_no_distrusted_block_to_a_disk() -> None:
    """After a restart of the process nothing would prevent a read of the block."""
    rig = Rig(capacity=16, immediate=False)
    rig.store("ab")
    assert jobs(rig) == [("write", "ab")]
    rig.manager.distrust(keys("b"))
    rig.end_all()
    assert rig.tier.contains(rig.manager.pack(keys("ab"))).tolist() == [True, False]


def test_after_too_many_wrong_blocks_no_tier_is_read(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No distrusted key is forgotten, so that no wrong block returns; the memory is bounded."""
    monkeypatch.setattr(promotion, "MOST_DISTRUSTED", 2)
    rig = Rig(capacity=16, immediate=False)
    rig.below("abcdef")
    running, reading = rig.begin("abc"), rig.begin("ef")
    rig.manager.distrust(keys("xy"))
    assert rig.ask("ef", reading) == (0, RETRY)
    rig.manager.distrust(keys("c"))
    assert "nothing is loaded from tiers until the cache is reset" in caplog.text
    rig.end_all()
    assert rig.ask("ef", reading) == (0, MISS), "the result of the read in flight is ignored"
    for ctx in (running, rig.begin("abc")):
        assert rig.ask("abc", ctx) == (0, MISS)
        assert rig.manager.lookup_key(b"a", ctx) is MISS
    rig.manager.distrust(keys("d"))
    assert caplog.text.count("nothing is loaded") == 1
    rig.store("ghx")
    rig.end_all()
    written = rig.tier.contains(rig.manager.pack(keys("ghx")))
    assert written.tolist() == [True, True, False], "sound blocks stay on the disk"
    rig.manager.reset()
    rig.below("ab")
    assert rig.ask("ab", rig.begin("ab")) == (0, RETRY)


@pytest.mark.parametrize("shared", [True, False])
def test_a_request_may_exclude_only_shared_or_only_local_tiers(shared: bool) -> None:
    rig = Rig(capacity=16, immediate=False, shared=True)
    rig.below("ab", tier=0)
    rig.below("abc", tier=1)
    ctx = rig.begin()
    rig.manager.leave_out_tiers(ctx, shared=shared)
    assert rig.ask("abcd", ctx) == (0, RETRY)
    assert (jobs(rig, 0), jobs(rig, 1)) == (([("read", "ab")], []) if shared else ([], [("probe", "abcd")]))
    rig.end_all()
    assert rig.ask("abcd", ctx) == ((2, MISS) if shared else (0, RETRY))
