"""Truncated slabs lose only the blocks behind the cut, also after the file has grown again."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvoffload.tiers.disk.inspection import opened, verify
from kvoffload.tiers.disk.slab_layout import Layout
from support.disk_blocks import KEY_BYTES, Disk, keys_of, slab_in
from support.timeouts import HANGS_S

NUM_BLOCKS, BLOCK_BYTES = 24, 4096
LAYOUT = Layout.holding(BLOCK_BYTES, KEY_BYTES, NUM_BLOCKS)


def reopened(directory: Path, versions: dict[int, int]) -> Disk:
    disk = Disk(directory, NUM_BLOCKS, BLOCK_BYTES)
    disk.versions = versions
    return disk


def closed(disk: Disk) -> None:
    assert disk.tier.drain(HANGS_S)
    disk.tier.close()
    assert disk.wrong == 0


@pytest.mark.parametrize("cut_at", [0, 9])
def test_blocks_that_are_written_again_after_a_cut_are_kept(tmp_path: Path, cut_at: int) -> None:
    numbers = list(range(20))
    disk = Disk(tmp_path, NUM_BLOCKS, BLOCK_BYTES)
    assert disk.write(numbers) == numbers
    closed(disk)
    os.truncate(slab_in(tmp_path), LAYOUT.slot_offset(cut_at))
    disk = reopened(tmp_path, dict.fromkeys(numbers, 0))
    assert disk.here(numbers) == numbers[:cut_at]
    # In another order, so that no block is written to its old slot.
    again = disk.write(numbers[cut_at:][::-1], version=1)
    assert sorted(again) == numbers[cut_at:]
    closed(disk)
    disk = reopened(tmp_path, disk.versions)
    assert disk.read(numbers) == numbers
    assert disk.tier.stats().mismatches == 0
    closed(disk)
    with opened(tmp_path) as (slab, recovered):
        assert verify(slab, recovered) == []


@settings(max_examples=settings().max_examples // 5)
@given(seed=st.integers(0, 2**32))
def test_random_cuts_lose_only_blocks_behind_the_cut(
    tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    directory, chance = tmp_path_factory.mktemp("cut"), random.Random(seed)
    everything, versions = list(range(NUM_BLOCKS)), dict[int, int]()
    for life in range(4):
        disk = reopened(directory, versions)
        here = disk.here(everything)
        assert sorted(here) == sorted(versions), f"seed {seed}, life {life}"
        assert disk.read(here) == here
        for step in range(3):
            numbers = chance.sample(everything, chance.randint(1, 8))
            disk.tier.delete(keys_of(numbers))
            for number in numbers:
                versions.pop(number, None)
            assert sorted(disk.write(numbers, version=10 * life + step)) == sorted(numbers)
        assert disk.tier.stats().mismatches == 0
        closed(disk)
        with opened(directory) as (slab, recovered):
            assert verify(slab, recovered) == []
            slot_of = {
                int(recovered.contents.keys([slot])[0][3:]): slot
                for slot in recovered.contents.slots().tolist()
            }
            end = chance.randint(0, slab.layout.num_slots)
        os.truncate(slab_in(directory), LAYOUT.slot_offset(end) + chance.choice([0, 100]))
        versions = {number: version for number, version in versions.items() if slot_of[number] < end}
