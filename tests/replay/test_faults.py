"""Injected damage: all of it is caught, nothing wrong is served, and runs are reproducible."""

from __future__ import annotations

import numpy as np
import pytest

from kvoffload.errors import ConfigError
from kvoffload.replay.content import fill, matches
from kvoffload.replay.faults import KINDS, parse_injection
from kvoffload.structures.keys import Keys
from kvoffload.tiers.memory import MemoryTier

NUM_BLOCKS, BLOCK_BYTES = 64, 256
KEYS = Keys.pack([number.to_bytes(16, "big") for number in range(NUM_BLOCKS)], 16)
ROWS = np.arange(NUM_BLOCKS)


def written_tier(verify: bool = True) -> MemoryTier:
    device = np.zeros((NUM_BLOCKS, BLOCK_BYTES), np.uint8)
    fill(KEYS, device, ROWS)
    tier = MemoryTier(NUM_BLOCKS, BLOCK_BYTES, verify=verify)
    tier.write(KEYS, ROWS, device, ROWS)
    return tier


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("probability", [0.05, 0.5, 1.0])
@pytest.mark.parametrize("seed", range(5))
def test_every_fault_is_caught_and_none_served(kind, probability, seed):
    tier, injection = written_tier(), parse_injection(f"{kind}:{probability}", seed)
    damaged = injection.apply(tier, ROWS)
    assert injection.injected == len(damaged) == len(np.unique(damaged))
    out = np.zeros((NUM_BLOCKS, BLOCK_BYTES), np.uint8)
    sound = tier.read(KEYS, ROWS, out, ROWS)
    assert np.flatnonzero(~sound).tolist() == damaged.tolist()
    assert matches(KEYS, out, ROWS)[sound].all()
    assert not out[~sound].any()
    if probability == 1.0 and kind in ("bitflip", "zero"):
        assert len(damaged) == NUM_BLOCKS


@pytest.mark.parametrize("kind", KINDS)
def test_without_checksums_wrong_content_is_counted(kind):
    tier, injection = written_tier(verify=False), parse_injection(f"{kind}:0.3", 1)
    damaged = injection.apply(tier, ROWS)
    out = np.zeros((NUM_BLOCKS, BLOCK_BYTES), np.uint8)
    assert tier.read(KEYS, ROWS, out, ROWS).all()
    assert np.flatnonzero(~matches(KEYS, out, ROWS)).tolist() == damaged.tolist()
    assert len(damaged) > 0


@pytest.mark.parametrize("kind", KINDS)
def test_equal_seeds_cause_equal_damage(kind):
    def pool_after(seed: int) -> bytes:
        tier, injection = written_tier(), parse_injection(f"{kind}:0.2", seed)
        for batch in (ROWS[:20], ROWS[20:21], ROWS[21:]):
            injection.apply(tier, batch)
        return tier.pool.tobytes()

    assert pool_after(3) == pool_after(3)
    assert pool_after(3) != pool_after(4)


def test_the_random_sequence_is_equal_on_every_python():
    assert parse_injection("bitflip:0.1", 7).apply(written_tier(), ROWS).tolist() == [3, 4, 6, 15, 25, 46, 58]


def test_a_swap_damages_two_slots_also_in_a_batch_of_one():
    tier = written_tier()
    damaged = parse_injection("swap:1").apply(tier, ROWS[5:6])
    assert len(damaged) == 2
    assert 5 in damaged
    # Checksums were swapped, too: each block is sound under the other key, so only the key shows the damage.
    swapped = Keys.pack([KEYS[int(slot)] for slot in damaged[::-1]], 16)
    assert tier.verify_slots(swapped, damaged).all()
    assert np.flatnonzero(~tier.verify_slots(KEYS, ROWS)).tolist() == damaged.tolist()


def test_unchanged_bytes_are_not_counted_as_damage():
    tier = MemoryTier(1, 64)
    tier.write(KEYS[:1], ROWS[:1], np.zeros((1, 64), np.uint8), ROWS[:1])
    for spec in ("zero:1", "swap:1", "torn:1", "bitflip:0"):
        injection = parse_injection(spec)
        assert injection.apply(tier, ROWS[:1]).tolist() == []
        assert injection.injected == 0
    assert tier.verify_slots(KEYS[:1], ROWS[:1]).all()


@pytest.mark.parametrize(
    "spec", ["", "bitflip", "bitflip:", "bitflip:x", "bitflip:1.5", "bitflip:-0.1", "rot:0.1", "zero:nan"]
)
def test_an_invalid_specification_names_the_allowed_values(spec):
    with pytest.raises(ConfigError, match=r"inject: .* KIND bitflip, swap, zero, torn"):
        parse_injection(spec)


def test_the_seed_is_shown():
    assert repr(parse_injection("torn:1e-4", 9)) == "Injection(torn:0.0001, seed=9, injected=0)"
