"""Reasons of missing blocks with tiers behind RAM."""

from __future__ import annotations

from kvoffload.core.plans import LookupResult
from support.letters import keys
from support.tiering_rig import Rig, end_reads

MISS, RETRY = LookupResult.MISS, LookupResult.RETRY


def counted(rig: Rig, letters: str) -> dict[str, int]:
    """Return the reasons of a request that begins without waiting."""
    ctx, before = rig.begin(letters), rig.manager.stats().misses
    rig.manager.lookup(keys(letters), ctx)
    rig.manager.count_misses(ctx, 0)
    after = rig.manager.stats().misses
    return {name: n for name in after if (n := after[name] - before.get(name, 0))}


def test_a_tier_whose_blocks_have_no_room_in_ram() -> None:
    rig = Rig(capacity=4, explain_misses=True)
    rig.below("abcdefgh")
    ctx = rig.begin("abcdefghi")
    assert rig.ask("abcdefghi", ctx) == (0, RETRY)
    rig.manager.poll()
    assert rig.ask("abcdefghi", ctx) == (4, MISS)
    assert rig.manager.count_misses(ctx, 4) == 5
    assert rig.manager.stats().misses == {"tier_gave_up": 4, "never_seen": 1}
    assert rig.manager.count_misses(ctx, 0, keys("xab")) == 3
    assert rig.manager.stats().misses == {"tier_gave_up": 4, "never_seen": 2, "behind_a_gap": 2}


def test_blocks_in_a_tier_behind_a_gap() -> None:
    rig = Rig(capacity=8, explain_misses=True)
    rig.below("bc")
    rig.store("d")
    assert counted(rig, "abcd") == {"never_seen": 1, "behind_a_gap": 3}


def test_a_failed_read_and_distrusted_blocks() -> None:
    rig = Rig(capacity=8, immediate=False, explain_misses=True)
    rig.below("ab")
    ctx = rig.begin("ab")
    assert rig.ask("ab", ctx) == (0, RETRY)
    end_reads(rig, 0.01, failing=True)
    rig.tier.blocks.clear()
    assert counted(rig, "ab") == {"tier_gave_up": 2}
    rig.store("e")
    rig.manager.distrust(keys("e"))
    assert counted(rig, "e") == {"damaged": 1}
