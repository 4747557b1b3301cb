"""Crashes of the disk tier at every write and sync, and `kill -9` at random moments."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from kvoffload.tiers.disk.files import PAGE_BYTES, Files, aligned
from kvoffload.tiers.disk.inspection import opened, verify
from kvoffload.tiers.disk.slab import SOUND, Scratch, Slab
from kvoffload.tiers.disk.slab_directory import Geometry, open_directory
from kvoffload.tiers.disk.slab_layout import ACCESS, LOCK_FILE_BYTES, Layout, entry_dtype
from kvoffload.tiers.rate_limited_log import RateLimitedLog
from support.disk_blocks import KEY_BYTES, Disk, block_of, keys_of, slab_in, slab_name
from support.recording_files import KINDS, BufferedFiles, FailingFiles, Recorder, write_image
from support.timeouts import HANGS_S, killed_if_it_hangs

NUM_SLOTS, NUM_KEYS = 16, 36
KILLS = int(os.environ.get("KVOFFLOAD_KILLS", "20"))
BOOKS = int(os.environ.get("KVOFFLOAD_CRASH_SEEDS", "2"))


class Life:
    """Record of writes, acknowledgements and clears, by block, version and position.

    A clear is recorded as its step and the position from which it is durable.
    """

    def __init__(self) -> None:
        self.written: dict[int, list[tuple[int, int]]] = {}
        self.promises: dict[int, list[list[int]]] = {}
        self.clears: list[tuple[int, int]] = []

    def submitted(self, number: int, version: int, position: int) -> None:
        self.written.setdefault(number, []).append((version, position))

    def acknowledged(self, number: int, version: int, position: int) -> None:
        self.promises.setdefault(number, []).append([version, position, 1 << 60])

    def may_lose(self, number: int, position: int) -> None:
        """Allow the loss of a block from this position on."""
        for promise in self.promises.get(number, []):
            promise[2] = min(promise[2], position)

    def owed(self, position: int) -> dict[int, int]:
        """Return the blocks that a crash here must not lose, with their versions."""
        return {
            number: version
            for number, promises in self.promises.items()
            for version, since, until in promises
            if since <= position < until
        }

    def allowed(self, number: int, position: int) -> set[int]:
        """Return the versions that a block may have after a crash here.

        Compares clears by step: a clear of an empty tier writes nothing, so later writes may have the same
        position.
        """
        forgotten = max((step for step, durable in self.clears if durable <= position), default=-1)
        return {v for v, since in self.written.get(number, []) if v > forgotten and since <= position}


def live(disk: Disk, recorder: Recorder, seed: int, steps: int) -> Life:
    """Write, use, delete, overwrite and clear blocks, with one or several jobs in flight."""
    chance, life, everything = random.Random(seed), Life(), list(range(NUM_KEYS))
    open_jobs: dict[int, tuple[list[int], int]] = {}
    pools, forgotten = [], -1

    def settle() -> None:
        while open_jobs:
            for result in disk.tier.finished():
                numbers, version = open_jobs.pop(result.job)
                for number, ok in zip(numbers, result.ok.tolist(), strict=True):
                    if ok and version > forgotten:
                        life.acknowledged(number, version, recorder.position)
            time.sleep(0.0001)

    for step in range(steps):
        before, held = recorder.position, set(disk.here(everything))
        action = chance.random()
        if action < 0.7:
            numbers = chance.sample(everything, chance.randint(1, 5))
            pool = np.stack([block_of(number, step, disk.block_bytes) for number in numbers])
            pools.append(pool)
            request = disk.tier.begin_request("writes")
            for number in numbers:
                life.submitted(number, step, before)
            job, taken = disk.tier.submit_write(keys_of(numbers), pool, np.arange(len(numbers)), request)
            if job >= 0:
                open_jobs[job] = ([n for n, t in zip(numbers, taken.tolist(), strict=True) if t], step)
            disk.tier.finish_request(request, keys_of(numbers))
        elif action < 0.74:
            disk.tier.clear()
            assert disk.tier.drain(HANGS_S)
            life.clears.append((step, recorder.position))
            forgotten = step
        elif action < 0.85:
            disk.use(chance.sample(everything, chance.randint(1, 5)))
        else:
            disk.tier.delete(keys_of(chance.sample(everything, chance.randint(1, 3))))
        for number in held - set(disk.here(everything)):
            life.may_lose(number, before)
        if chance.random() < 0.4:
            settle()
    settle()
    return life


def check_image(directory: Path, life: Life, position: int) -> None:
    """Check that every entry verifies, no owed block is missing, and all contents were once written."""
    with opened(directory, BufferedFiles()) as (slab, recovered):
        assert recovered.damaged == 0
        slots = recovered.contents.slots()
        numbers = [int(key[3:]) for key in recovered.contents.keys(slots)]
        assert len(set(numbers)) == len(numbers)
        scratch, pool = Scratch(slab), aligned(slab.layout.block_bytes).reshape(1, -1)
        held = {}
        for slot, number in zip(slots.tolist(), numbers, strict=True):
            at, row = np.array([slot]), np.zeros(1, np.int64)
            generation, expected = recovered.contents.generation[at], recovered.contents.checksum[at]
            outcomes = slab.read_blocks(keys_of([number]), at, generation, expected, pool, row, scratch)
            assert outcomes[0] == SOUND
            allowed = life.allowed(number, position)
            versions = [v for v in allowed if np.array_equal(pool[0], block_of(number, v, pool.shape[1]))]
            assert versions, f"block {number} holds bytes that were never written under its key"
            held[number] = versions[0]
        for number, version in life.owed(position).items():
            assert number in held, f"block {number} was acknowledged and is lost"
            assert held[number] >= version, f"block {number} is older than its acknowledged version"


@pytest.mark.parametrize(
    ("seed", "steps"), [(0, 15), *(pytest.param(seed, 60, marks=pytest.mark.slow) for seed in range(BOOKS))]
)
def test_a_crash_at_every_write_and_sync(tmp_path: Path, seed: int, steps: int) -> None:
    recorder = Recorder()
    disk = Disk(tmp_path / "life", NUM_SLOTS, files=recorder)
    start = recorder.position
    life = live(disk, recorder, seed, steps)
    disk.tier.close()
    assert disk.tier.stats().journal_damage == 0
    chance, directory = random.Random(seed), tmp_path / "crash"
    for position in range(start, recorder.position + 1):
        for kind in ("all", KINDS[1 + position % (len(KINDS) - 1)]):
            write_image(directory, slab_name(), recorder.image(position, chance, kind))
            try:
                check_image(directory, life, position)
            except AssertionError as error:
                raise AssertionError(f"seed {seed}, position {position}, {kind}: {error}") from error


@pytest.mark.slow
def test_a_crash_around_every_checkpoint(tmp_path: Path) -> None:
    """Checkpoints are rare, so every kind of crash is tried around each."""
    recorder = Recorder()
    disk = Disk(tmp_path / "life", NUM_SLOTS, files=recorder)
    layout, start = disk.layout, recorder.position
    life = live(disk, recorder, 7, steps=80)
    disk.tier.close()
    heads = [w for w in recorder.writes if w.begin > start and w.offset < layout.log_offset]
    assert len(heads) >= 3 * 3, "three checkpoints with a group and two heads"
    moments = {position for write in heads for position in range(write.begin - 1, write.end + 8)}
    chance = random.Random(7)
    for position in sorted(moments & set(range(recorder.position + 1))):
        for kind in KINDS * 2:
            write_image(tmp_path / "crash", slab_name(), recorder.image(position, chance, kind))
            check_image(tmp_path / "crash", life, position)


@pytest.mark.parametrize(
    ("seed", "crashes"), [(0, 3), *(pytest.param(seed, 25, marks=pytest.mark.slow) for seed in range(2))]
)
def test_the_tier_works_after_a_crash(tmp_path: Path, seed: int, crashes: int) -> None:
    """After a crash the tier opens with sound accounting, works, and may crash again."""
    recorder = Recorder()
    disk = Disk(tmp_path / "life", NUM_SLOTS, files=recorder)
    start = recorder.position
    live(disk, recorder, 100 + seed, steps=40)
    disk.tier.close()
    chance = random.Random(seed)
    for number in range(crashes):
        position = chance.randint(start, recorder.position)
        directory = tmp_path / f"crash{number}"
        write_image(directory, slab_name(), recorder.image(position, chance, chance.choice(KINDS)))
        second = Recorder()
        survivor = Disk(directory, NUM_SLOTS, files=second)
        second.size_bytes = slab_in(directory).stat().st_size
        survivor.audit()
        stats = survivor.tier.stats()
        assert stats.ready == stats.restored == len(survivor.here(range(NUM_KEYS)))
        assert survivor.slots_in_use() == list(range(NUM_SLOTS + 1))
        here = survivor.here(range(NUM_KEYS))
        job = survivor.tier.submit_read(keys_of(here), survivor.pool, np.arange(len(here)))
        assert survivor.wait(job).all()
        live(survivor, second, 200 + number, steps=10)
        survivor.audit()
        assert survivor.tier.stats().mismatches == 0
        survivor.tier.close()
        with opened(directory) as (slab, recovered):
            assert verify(slab, recovered) == []
            assert len(recovered.contents) == survivor.tier.stats().ready


def test_unsynced_removals_of_a_killed_process_are_synced_before_slots_are_reused(tmp_path: Path) -> None:
    """A process dies with a removal in the log that is not durable, and its successor reuses the slot.

    After a power loss the old block's entry must not name that slot.
    """

    class Medium(Recorder):
        syncs = True

        def sync(self, fd: int) -> None:
            if not self.syncs:
                raise OSError(errno.EIO, "killed first")
            super().sync(fd)

    medium, slots = Medium(), [0, 1, 2, 3]
    killed = Disk(tmp_path / "life", len(slots), files=medium)
    assert killed.write(slots) == slots
    medium.syncs = False
    killed.tier.delete(keys_of([0]))
    assert killed.tier.drain(HANGS_S)
    killed.tier.close()
    medium.syncs, start = True, medium.position
    next_one = Disk(tmp_path / "life", len(slots), files=medium)
    assert next_one.here(slots) == slots[1:], "the page cache survives a kill"
    assert next_one.write([9]) == [9]
    next_one.tier.close()
    chance = random.Random(0)
    for position in range(start, medium.position + 1):
        for kind in KINDS:
            write_image(tmp_path / "crash", slab_name(), medium.image(position, chance, kind))
            with opened(tmp_path / "crash", BufferedFiles()) as (slab, recovered):
                assert (recovered.damaged, verify(slab, recovered)) == (0, []), f"position {position}, {kind}"


def test_a_crash_between_several_groups_leaves_the_first_ones(tmp_path: Path) -> None:
    """Each of several groups is written only after its predecessor is durable."""
    recorder, layout = Recorder(), Layout(512, KEY_BYTES, 300)
    geometry = Geometry(layout, layout.file_bytes + LOCK_FILE_BYTES, "model")
    lock, slab, journal, _ = open_directory(
        tmp_path / "life", geometry, recorder, RateLimitedLog("test"), None
    )
    start = recorder.position
    everything = np.arange(layout.num_slots)
    entries = np.zeros(layout.num_slots, entry_dtype(KEY_BYTES))
    entries["slot"], entries["generation"], entries["key"] = everything, everything + 1, everything[:, None]
    journal.append(everything.astype(np.uint32), entries, np.empty(0, ACCESS), 0)
    journal.sync()
    slab.close()
    lock.release()
    groups = [write for write in recorder.writes if write.begin > start]
    assert len(groups) == 3, "removals, and the entries in two groups"
    sizes, chance = set(), random.Random(0)
    for position in range(start, recorder.position + 1):
        for kind in KINDS:
            write_image(tmp_path / "crash", geometry.slab_name, recorder.image(position, chance, kind))
            with opened(tmp_path / "crash", BufferedFiles()) as (_, recovered):
                assert recovered.damaged == 0, f"position {position}, {kind}"
                sizes.add(len(recovered.contents))
    assert len(sizes) == 3
    assert sizes > {0, layout.num_slots}


@pytest.mark.parametrize("bad", [None, 0, PAGE_BYTES])
def test_a_crash_during_a_superblock_write_leaves_a_complete_one(tmp_path: Path, bad: int | None) -> None:
    """Crash during the repair of a bad superblock and during a reset; unsynced pages are zeroed."""
    path, files = tmp_path / "life" / slab_name(), FailingFiles()
    disk = Disk(path.parent, NUM_SLOTS)
    disk.write([1])
    disk.tier.close()
    if bad is not None:
        with path.open("r+b") as file:
            file.seek(bad)
            file.write(b"bad")
    unsynced, images = set(), []

    def crash(operation: str, offset: int) -> None:
        if operation == "sync":
            unsynced.clear()
        elif operation == "write" and offset <= PAGE_BYTES:
            unsynced.add(offset)
            image = bytearray(path.read_bytes())
            for at in unsynced:
                image[at : at + PAGE_BYTES] = bytes(PAGE_BYTES)
            images.append(tmp_path / f"crash {len(images)}")
            write_image(images[-1], slab_name(), bytes(image))

    files.fail = crash
    disk = Disk(path.parent, NUM_SLOTS, files=files)
    disk.tier.clear()
    assert disk.tier.drain(HANGS_S)
    disk.tier.close()
    assert len(images) >= 2
    for directory in images:
        slab = Slab.open(slab_in(directory), Files(), RateLimitedLog("test"))
        assert isinstance(slab, Slab), f"{directory.name}: {slab}"
        slab.close()


MOTHER = """
import os, random, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from support.disk_blocks import Disk, keys_of

def live(seed):
    disk, chance = Disk(Path(sys.argv[2]), 40), random.Random(seed)
    print("open", os.getpid(), disk.tier.stats().restored, flush=True)
    while True:
        for number in disk.write(chance.sample(range(100), chance.randint(1, 8))):
            print("ack", number, flush=True)
        if chance.random() < 0.3:
            disk.use(chance.sample(range(100), 8))
        if chance.random() < 0.1:
            disk.tier.delete(keys_of(chance.sample(range(100), 3)))

for seed in sys.stdin:
    child = os.fork()
    if child == 0:
        live(int(seed))
    os.waitpid(child, 0)
    print("dead", flush=True)
"""
"""Forks a process for each life, so that modules are imported once."""


@pytest.mark.slow
def test_kill_9_at_random_moments(tmp_path: Path) -> None:
    """A directory whose owners are killed always opens, warm and with sound contents and accounting."""
    seed = random.SystemRandom().randrange(1 << 30)
    print(f"seed {seed}")
    chance, warm = random.Random(seed), 0
    command = [sys.executable, "-c", MOTHER, str(Path(__file__).parents[2]), str(tmp_path)]
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as mother,
        killed_if_it_hangs(mother),
    ):
        assert mother.stdin is not None
        assert mother.stdout is not None
        for life in range(KILLS):
            mother.stdin.write(f"{seed + life}\n")
            mother.stdin.flush()
            _, child, restored = mother.stdout.readline().split()
            warm += int(restored) > 0
            acknowledged = 1 - life % 2
            if acknowledged:  # even on a slow machine every second life must leave a block
                assert mother.stdout.readline().startswith("ack")
            time.sleep(chance.random() * 0.15)
            os.kill(int(child), signal.SIGKILL)
            # The last line of the killed process may be incomplete; the next line then continues it.
            while not (line := mother.stdout.readline()).endswith("dead\n"):
                assert line, f"the mother has ended: seed {seed}, life {life}"
                acknowledged += 1
            with opened(tmp_path) as (slab, recovered):
                assert recovered.damaged == 0, f"seed {seed}, life {life}"
                assert verify(slab, recovered) == [], f"seed {seed}, life {life}"
                assert len(recovered.contents) > 0 or not acknowledged, f"seed {seed}, life {life}"
        mother.stdin.close()
    assert warm >= KILLS // 2, f"seed {seed}"
