"""A full disk: the reserved slots are the capacity until the slab can grow."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from support.disk_blocks import Disk, keys_of
from support.recording_files import FailingFiles, raises, works
from support.timeouts import HANGS_S

NUM_BLOCKS, SMALL = 60, 20


@pytest.fixture
def full(tmp_path: Path) -> tuple[Disk, FailingFiles]:
    """A tier for 60 blocks on a disk with space for 20."""
    Disk(tmp_path, SMALL).tier.close()
    files = FailingFiles()
    files.fail = raises(errno.ENOSPC, "allocate")
    return Disk(tmp_path, NUM_BLOCKS, files=files), files


def test_the_capacity_is_the_reserved_slots(full: tuple[Disk, FailingFiles]) -> None:
    disk, _ = full
    stats = disk.tier.stats()
    assert SMALL <= stats.capacity <= SMALL + 1
    assert stats.free == stats.capacity
    for number in range(100):
        assert disk.write([number]) == [number], "no write fails or is dropped"
        disk.audit()
    stats = disk.tier.stats()
    assert (stats.failed, stats.dropped, stats.ready, stats.free) == (0, 0, stats.capacity, 0)
    newest = list(range(100 - stats.capacity, 100))
    assert disk.read(newest) == newest
    assert disk.tier.drain(HANGS_S)
    disk.tier.close()
    assert disk.wrong == 0


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.EINVAL])
def test_a_file_system_that_reserves_no_space_is_usable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """As musl and some network file systems. glibc emulates the call."""

    def refuse(fd: int, offset: int, num_bytes: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    disk = Disk(tmp_path, SMALL)
    numbers = list(range(SMALL))
    assert disk.write(numbers) == disk.read(numbers) == numbers
    disk.tier.close()


def test_growth_is_tried_again_after_a_pause(full: tuple[Disk, FailingFiles]) -> None:
    disk, files = full
    capacity, tried = disk.tier.stats().capacity, list[str]()
    files.fail = counting(tried)
    for attempt in range(3):
        files.passed_s += 1000
        before = len(tried)
        for number in range(50 * attempt, 50 * attempt + 50):
            disk.write([number])
        assert 1 <= len(tried) - before <= 3, "once in each pause"
        assert capacity <= disk.tier.stats().capacity <= capacity + 1
    assert disk.tier.stats().failed <= 3, "one block for each attempt"
    files.fail = works
    files.passed_s += 1000
    wanted = list(range(1000, 1000 + NUM_BLOCKS))
    for number in wanted:
        assert disk.write([number]) == [number]
    stats = disk.tier.stats()
    assert (stats.capacity, stats.ready, stats.free) == (NUM_BLOCKS, NUM_BLOCKS, 0)
    assert disk.read(wanted) == wanted
    assert disk.slots_in_use() == list(range(disk.layout.first_slot, disk.layout.num_slots))
    disk.tier.close()


def counting(tried: list[str]) -> Callable[[str, int], None]:
    def fail(operation: str, offset: int) -> None:
        if operation == "allocate":
            tried.append(operation)
            raise OSError(errno.ENOSPC, "full")

    return fail


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3))])
def test_a_disk_that_is_sometimes_full(tmp_path: Path, seed: int) -> None:
    """Batches, deletions, resets and restarts keep the accounting sound, and served blocks are right."""
    chance, files, versions = random.Random(seed), FailingFiles(), dict[int, int]()
    Disk(tmp_path, SMALL).tier.close()
    for life in range(3):
        files.fail = chance.choice([raises(errno.ENOSPC, "allocate"), works])
        disk = Disk(tmp_path, NUM_BLOCKS, files=files)
        disk.versions = versions
        for step in range(40):
            files.passed_s += chance.choice([0, 0, 1000])
            if chance.random() < 0.2:
                files.fail = chance.choice([raises(errno.ENOSPC, "allocate"), works])
            action = chance.random()
            numbers = chance.sample(range(200), chance.randint(1, 12))
            if action < 0.75:
                stored = disk.write(numbers, version=100 * life + step)
                assert set(disk.read(stored)) == set(stored) & set(disk.here(stored))
            elif action < 0.9:
                disk.tier.delete(keys_of(numbers))
            elif action < 0.93:
                disk.tier.clear()
            else:
                disk.read(numbers)
            disk.audit()
            layout = disk.layout
            assert disk.slots_in_use() == list(range(layout.first_slot, layout.num_slots))
        assert disk.tier.stats().mismatches == disk.wrong == 0
        assert disk.tier.drain(HANGS_S)
        disk.tier.close()
