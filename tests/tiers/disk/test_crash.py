"""A crash of the disk tier at every write and every sync, by the book, and `kill -9` at random moments."""

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

from kvoffload.tiers.disk.directory import Geometry, open_directory
from kvoffload.tiers.disk.files import PAGE_BYTES, Files, aligned
from kvoffload.tiers.disk.inspection import opened, verify
from kvoffload.tiers.disk.layout import ACCESS, LOCK_FILE_BYTES, Layout, entry_dtype
from kvoffload.tiers.disk.slab import SOUND, Scratch, Slab
from kvoffload.tiers.rate_limited_log import RateLimitedLog
from support.disk_blocks import KEY_BYTES, Disk, block_of, keys_of, slab_in, slab_name
from support.recording_files import KINDS, BufferedFiles, FailingFiles, Recorder, write_image
from support.timeouts import HANGS_S, killed_if_it_hangs

NUM_SLOTS, NUM_KEYS = 16, 36
KILLS = int(os.environ.get("KVOFFLOAD_KILLS", "60"))
BOOKS = int(os.environ.get("KVOFFLOAD_CRASH_SEEDS", "2"))


class Life:
    """What a tier was told, and what it promised: by block, version and position in the record.

    Clears are a step, and the position from which on it is durable.
    """

    def __init__(self) -> None:
        self.written: dict[int, list[tuple[int, int]]] = {}
        self.promises: dict[int, list[list[int]]] = {}
        self.clears: list[tuple[int, int]] = []

    def submitted(self, number: int, version: int, position: int) -> None:
        self.written.setdefault(number, []).append((version, position))

    def acknowledged(self, number: int, version: int, position: int) -> None:
        self.promises.setdefault(number, []).append([version, position, 1 << 60])

    def gone(self, number: int, position: int) -> None:
        """It may be forgotten from here on."""
        for promise in self.promises.get(number, []):
            promise[2] = min(promise[2], position)

    def owed(self, position: int) -> dict[int, int]:
        """Blocks that a crash here must not lose, and the version that each has."""
        return {
            number: version
            for number, promises in self.promises.items()
            for version, since, until in promises
            if since <= position < until
        }

    def allowed(self, number: int, position: int) -> set[int]:
        """Versions that a block may have after a crash here.

        By steps, as versions are: a clear of what is empty writes nothing, and what is stored after it has
        the same position.
        """
        forgotten = max((step for step, durable in self.clears if durable <= position), default=-1)
        return {v for v, since in self.written.get(number, []) if v > forgotten and since <= position}


def live(disk: Disk, recorder: Recorder, seed: int, steps: int) -> Life:
    """Write, use, delete, overwrite and clear, now one job at a time and now several at once."""
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
            life.gone(number, before)
        if chance.random() < 0.4:
            settle()
    settle()
    return life


def check_image(directory: Path, life: Life, position: int) -> None:
    """Every entry verifies, nothing that was promised is missing, and what is there is what was written."""
    with opened(directory, BufferedFiles()) as (slab, found):
        assert found.damaged == 0
        slots = found.contents.slots()
        numbers = [int(key[3:]) for key in found.contents.keys(slots)]
        assert len(set(numbers)) == len(numbers)
        scratch, pool = Scratch(slab), aligned(slab.layout.block_bytes).reshape(1, -1)
        held = {}
        for slot, number in zip(slots.tolist(), numbers, strict=True):
            at, row = np.array([slot]), np.zeros(1, np.int64)
            generation, expected = found.contents.generation[at], found.contents.checksum[at]
            outcomes = slab.read_blocks(keys_of([number]), at, generation, expected, pool, row, scratch)
            assert outcomes[0] == SOUND
            allowed = life.allowed(number, position)
            versions = [v for v in allowed if np.array_equal(pool[0], block_of(number, v, pool.shape[1]))]
            assert versions, f"block {number} holds what was never written under its key"
            held[number] = versions[0]
        for number, version in life.owed(position).items():
            assert number in held, f"block {number} was acknowledged and is lost"
            assert held[number] >= version, f"block {number} is older than what was acknowledged"


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
def test_life_goes_on_after_a_crash(tmp_path: Path, seed: int, crashes: int) -> None:
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
        with opened(directory) as (slab, found):
            assert verify(slab, found) == []
            assert len(found.contents) == survivor.tier.stats().ready


def test_a_life_rests_on_nothing_that_a_killed_one_left_unsynced(tmp_path: Path) -> None:
    """A removal is in the log and not durable when the process dies. The next one reads it, and writes into
    the slot: were the power to fail then, the slot must not be named by the entry of its old block."""

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
    assert next_one.here(slots) == slots[1:], "the system lives, and so does what it was given"
    assert next_one.write([9]) == [9]
    next_one.tier.close()
    chance = random.Random(0)
    for position in range(start, medium.position + 1):
        for kind in KINDS:
            write_image(tmp_path / "crash", slab_name(), medium.image(position, chance, kind))
            with opened(tmp_path / "crash", BufferedFiles()) as (slab, found):
                assert (found.damaged, verify(slab, found)) == (0, []), f"position {position}, {kind}"


def test_a_crash_amid_more_than_a_group_takes_leaves_a_beginning_of_it(tmp_path: Path) -> None:
    """It is written as several groups, and none of them before the one in front of it is durable."""
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
    assert len(groups) == 3, "removals, and the entries in two parts"
    sizes, chance = set(), random.Random(0)
    for position in range(start, recorder.position + 1):
        for kind in KINDS:
            write_image(tmp_path / "crash", geometry.slab_name, recorder.image(position, chance, kind))
            with opened(tmp_path / "crash", BufferedFiles()) as (_, found):
                assert found.damaged == 0, f"position {position}, {kind}"
                sizes.add(len(found.contents))
    assert len(sizes) == 3
    assert sizes > {0, layout.num_slots}


@pytest.mark.parametrize("bad", [None, 0, PAGE_BYTES])
def test_a_crash_amid_the_writing_of_a_superblock_leaves_one_that_is_whole(
    tmp_path: Path, bad: int | None
) -> None:
    """At the mending of a bad one, and at a reset after it. What no sync has covered is lost at its worst."""
    path, files = tmp_path / "life" / slab_name(), FailingFiles()
    disk = Disk(path.parent, NUM_SLOTS)
    disk.write([1])
    disk.tier.close()
    if bad is not None:
        with path.open("r+b") as file:
            file.seek(bad)
            file.write(b"bad")
    unsynced, left = set(), []

    def crash(operation: str, offset: int) -> None:
        if operation == "sync":
            unsynced.clear()
        elif operation == "write" and offset <= PAGE_BYTES:
            unsynced.add(offset)
            image = bytearray(path.read_bytes())
            for at in unsynced:
                image[at : at + PAGE_BYTES] = bytes(PAGE_BYTES)
            left.append(tmp_path / f"crash {len(left)}")
            write_image(left[-1], slab_name(), bytes(image))

    files.fail = crash
    disk = Disk(path.parent, NUM_SLOTS, files=files)
    disk.tier.clear()
    assert disk.tier.drain(HANGS_S)
    disk.tier.close()
    assert len(left) >= 2
    for directory in left:
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
"""Forks a process for each life, so that only the first one waits for imports."""


@pytest.mark.slow
def test_kill_9_at_random_moments(tmp_path: Path) -> None:
    """One directory, killed again and again: it always opens, warm, sound, and with its books in order."""
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
            time.sleep(chance.random() * 0.15)
            os.kill(int(child), signal.SIGKILL)
            acknowledged = 0
            # The last line of the killed process may lack its end: then the next one follows in it.
            while not (line := mother.stdout.readline()).endswith("dead\n"):
                assert line, f"the mother has ended: seed {seed}, life {life}"
                acknowledged += 1
            with opened(tmp_path) as (slab, found):
                assert found.damaged == 0, f"seed {seed}, life {life}"
                assert verify(slab, found) == [], f"seed {seed}, life {life}"
                assert len(found.contents) > 0 or not acknowledged, f"seed {seed}, life {life}"
        mother.stdin.close()
    assert warm >= KILLS // 2
