"""Reset, settle and close of a tiered manager, checksums, and refused options."""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest

from kvoffload.errors import ConfigError
from kvoffload.testing.audit import audit
from kvoffload.tiering.tiered_manager import TieredManager
from kvoffload.tiers.memory import MemoryTier
from support.letters import MISS, keys
from support.scripted_tier import ScriptedTier
from support.tiering_rig import RETRY, Rig, fails


def test_reset_forgets_all_blocks_including_those_in_flight() -> None:
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
def test_a_reset_that_drops_transfers_keeps_slots_that_tiers_use(immediate: bool) -> None:
    """The caller knows the engine's transfers, not the jobs of a disk."""
    rig = Rig(immediate=immediate, deadline_s=0.01)
    rig.store("abcd")
    rig.manager.reset(drop_in_flight=True)
    assert rig.manager.stats().free == (4 if immediate else 0)
    rig.end_all()
    assert rig.manager.stats().free == 4


@pytest.mark.parametrize("hangs", [False, True])
def test_a_reset_that_drops_transfers_is_durable_in_every_tier(hangs: bool) -> None:
    """Every tier makes the reset durable, even if another tier hangs."""
    rig = Rig(capacity=8, tiers=2, deadline_s=0.01)
    rig.store("ab")
    assert all(tier.drain(0.0) for tier in rig.tiers)
    assert [set(tier.durable) for tier in rig.tiers] == [{*keys("ab")}] * 2
    rig.tier.immediate = not hangs
    rig.store("cd")
    rig.manager.reset(drop_in_flight=True)
    assert [set(tier.durable) for tier in rig.tiers] == [{*keys("ab")} if hangs else set(), set()]


def test_a_store_that_ends_after_a_reset_has_dropped_it_leaves_its_request_in_no_tier() -> None:
    """The end of the dropped store was counted as the end of a second store, so the request never ended."""
    rig = Rig()
    ctx = rig.begin("ab")
    plan = rig.compute(rig.manager.prepare_store(keys("ab"), ctx))
    rig.manager.reset(drop_in_flight=True)
    rig.manager.complete_store(plan)
    rig.store("c", ctx)
    rig.manager.finish_request(ctx)
    assert not rig.manager.waits
    assert not rig.tier.open_requests


def test_a_load_that_ends_after_a_reset_has_dropped_it_is_no_hit() -> None:
    rig = Rig()
    ctx = rig.begin("a")
    rig.store("a")
    plan = rig.manager.prepare_load(keys("a"), ctx)
    rig.manager.reset(drop_in_flight=True)
    rig.manager.complete_load(plan)
    assert rig.manager.hit_blocks == [0, 0]


def test_the_end_of_a_read_from_before_a_reset_does_not_end_the_wait_for_a_later_read() -> None:
    """The lookup then answered HIT_PENDING without a time limit, as for a block that the engine computes."""
    rig = Rig(immediate=False, deadline_s=1.0)
    rig.below("a")
    assert rig.ask("a", rig.begin("a")) == (0, RETRY)
    rig.manager.reset()
    rig.below("a")
    ctx = rig.begin("a")
    assert rig.ask("a", ctx) == (0, RETRY)
    rig.tier.end(rig.tier.jobs[0])
    rig.manager.poll()
    assert rig.ask("a", ctx) == (0, RETRY)
    rig.clock.now += 0.9
    assert rig.ask("a", ctx) == (0, RETRY)
    rig.clock.now += 0.9
    assert rig.ask("a", ctx) == (0, MISS)


def test_a_tier_that_hangs_leaves_the_others_time_to_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    rig, now = Rig(tiers=3), 0.0
    waits: list[tuple[str, float]] = []
    monkeypatch.setattr("kvoffload.tiering.stack.time.monotonic", lambda: now)

    def drains(tier: ScriptedTier, seconds: float) -> Any:
        def drain(timeout_s: float) -> bool:
            nonlocal now
            waits.append((tier.name, timeout_s))
            now += min(seconds, timeout_s)
            return seconds <= timeout_s

        return drain

    for tier, seconds in zip(rig.tiers, (1e9, 1.0, 0.0), strict=True):
        tier.drain = drains(tier, seconds)  # type: ignore[method-assign]
    assert not rig.manager.drain(6.0)
    assert waits == [("t0", 2.0), ("t1", 2.0), ("t2", 3.0), ("t0", 3.0)]


def test_no_wait_is_longer_than_the_system_accepts() -> None:
    rig, waits = Rig(immediate=False, deadline_s=1e300), list[float]()
    rig.tier.drain = lambda timeout_s: bool(waits.append(timeout_s))  # type: ignore[method-assign,func-returns-value]
    assert not rig.manager.drain(1e300)
    assert max(waits) < threading.TIMEOUT_MAX


def test_settle_waits_for_jobs_and_close_closes_the_tiers() -> None:
    rig = Rig(immediate=False)
    rig.store("ab")
    assert not rig.manager.settle(0.0)
    rig.tier.end(rig.tier.jobs[0])
    assert rig.manager.settle(0.0)
    rig.manager.close(0.0)
    assert rig.tier.closed


def test_promoted_blocks_get_checksums() -> None:
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


NO_SECONDS = (0, -1.0, math.nan, math.inf, "7", True)


@pytest.mark.parametrize("value", NO_SECONDS)
def test_an_impossible_time_to_compute_a_block_is_ignored(value: Any) -> None:
    rig = Rig(recompute_s_per_block=0.5)
    with pytest.raises(ConfigError, match="recompute_s_per_block"):
        rig.manager.recompute_s_per_block = value
    assert rig.manager.recompute_s_per_block == 0.5


def test_a_flush_ends_at_its_time_limit_although_a_tier_has_no_room() -> None:
    rig = Rig()
    rig.store("ab")
    rig.tier.blocks.clear()
    rig.tier.room = 0
    assert not rig.manager.flush(0.0)


def test_a_flush_writes_all_blocks_to_a_sound_tier_beside_a_tier_that_cannot_drain() -> None:
    """It ended after the first blocks, although the sound tier had time and room for all blocks."""
    rig = Rig(capacity=8, tiers=2)
    rig.store("abcdefgh")
    sound = rig.tiers[1]
    sound.blocks.clear()
    sound.room, rig.tier.drain = 2, fails  # type: ignore[method-assign]
    assert not rig.manager.flush(10.0)
    assert set(sound.blocks) == {*keys("abcdefgh")}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ram": MemoryTier(3, 8)}, "ram: '3 slots'.* allowed: 4 or more"),
        ({"ram": None}, "ram: missing; allowed: a MemoryTier"),
        *[({"deadline_s": value}, f"deadline_s: {value!r} .* more than 0") for value in (0, math.inf, "7")],
        *[
            ({"recompute_s_per_block": value}, "recompute_s_per_block: .* more than 0")
            for value in NO_SECONDS
        ],
        ({"max_in_flight": 1.5}, "max_in_flight: 1.5"),
        ({"max_in_flight": "all"}, "max_in_flight: 'all'"),
        ({"tiers": "disk:/kv:1TiB"}, "tiers: .*a SecondaryTier"),
        ({"tiers": [ScriptedTier(16)]}, "tier scripted: .*16 bytes.*8"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"ram": MemoryTier(4, 8), "tiers": []} | options
    with pytest.raises(ConfigError, match=message):
        TieredManager(4, key_bytes=1, **given)
