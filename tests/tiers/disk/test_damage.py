"""The disk tier on a medium that flips, swaps, zeroes, cuts, fails, fills up, slows down or hangs.

In each case the tier serves no wrong bytes, raises nothing, and counts the failure.
"""

from __future__ import annotations

import errno
import logging
import os
import queue
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from kvoffload.errors import UnavailableError
from kvoffload.testing.audit import audit
from kvoffload.tiers.contract import NO_JOB
from kvoffload.tiers.disk import DiskTier, committer
from kvoffload.tiers.disk.disk_tier import REFUSED_READS_S
from kvoffload.tiers.disk.files import PAGE_BYTES, Files
from kvoffload.tiers.disk.inspection import Problem, compact, opened, verify
from kvoffload.tiers.disk.slab import FIRST_PAUSE_S, LONGEST_PAUSE_S, MISMATCH, SOUND, Scratch
from kvoffload.tiers.disk.slab_directory import Geometry, open_directory, slabs_in
from kvoffload.tiers.disk.slab_layout import LOCK_FILE_BYTES, Layout
from kvoffload.tiers.producer_text import producer_of
from kvoffload.tiers.rate_limited_log import RateLimitedLog
from support.disk_blocks import KEY_BYTES, Disk, block_of, keys_of, slab_in
from support.recording_files import FailingFiles, raises, works
from support.timeouts import HANGS_S

NUM_SLOTS, BLOCK_BYTES = 16, 8192
NUMBERS = list(range(10))
LAYOUT = Layout.holding(BLOCK_BYTES, KEY_BYTES, NUM_SLOTS)


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    """A closed directory with ten blocks."""
    disk = Disk(tmp_path, NUM_SLOTS, BLOCK_BYTES)
    assert disk.write(NUMBERS) == NUMBERS
    disk.tier.close()
    return tmp_path


def reopened(directory: Path, **options: object) -> Disk:
    """Reopen a directory, with the versions of the blocks in `filled`."""
    disk = Disk(directory, NUM_SLOTS, BLOCK_BYTES, **options)
    disk.versions = dict.fromkeys(NUMBERS, 0)
    return disk


def flip(directory: Path, offset: int) -> None:
    """Flip a bit of the slab."""
    with slab_in(directory).open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


def read_slot(directory: Path, slot: int) -> bytes:
    with slab_in(directory).open("rb") as file:
        file.seek(LAYOUT.slot_offset(slot))
        return file.read(LAYOUT.slot_bytes)


def write_slot(directory: Path, slot: int, content: bytes) -> None:
    with slab_in(directory).open("r+b") as file:
        file.seek(LAYOUT.slot_offset(slot))
        file.write(content)


@pytest.mark.parametrize("byte", [0, 1, PAGE_BYTES - 1, PAGE_BYTES, BLOCK_BYTES - 1])
def test_a_flipped_bit_in_a_block(filled: Path, byte: int, caplog: pytest.LogCaptureFixture) -> None:
    flip(filled, LAYOUT.slot_offset(3) + byte)
    disk = reopened(filled)
    with caplog.at_level(logging.WARNING, "kvoffload.disk"):
        served = disk.read(NUMBERS)
    assert (disk.wrong, len(served)) == (0, 9)
    assert disk.tier.stats().mismatches == 1
    lost = set(NUMBERS) - set(served)
    assert keys_of(sorted(lost))[0].hex() in caplog.text
    assert set(disk.here(NUMBERS)) == set(served)
    assert disk.write(sorted(lost), version=1) == sorted(lost)
    assert disk.read(sorted(lost)) == sorted(lost)
    assert disk.wrong == 0
    disk.tier.close()
    with opened(filled) as (slab, recovered):
        assert verify(slab, recovered) == []


def test_verify_lists_damaged_blocks(filled: Path) -> None:
    flip(filled, LAYOUT.slot_offset(3) + 17)
    flip(filled, LAYOUT.slot_offset(5) + PAGE_BYTES)
    with opened(filled) as (slab, recovered):
        assert [problem.slot for problem in verify(slab, recovered)] == [3, 5]


def test_verify_reports_blocks_and_reasons(filled: Path) -> None:
    flip(filled, LAYOUT.slot_offset(3) + 17)
    bad, steps = LAYOUT.slot_offset(5), []

    def fail(operation: str, offset: int) -> None:
        # The whole run fails first, and then this block alone.
        if operation == "read" and offset in (LAYOUT.slot_offset(0), bad):
            raise OSError(errno.EIO, "unreadable sector")

    files = FailingFiles()
    with opened(filled, files) as (slab, recovered):
        slab.chunk_blocks = 6  # the first run is slots 0 to 5
        files.fail = fail
        problems = verify(slab, recovered, lambda done, total: steps.append((done, total)))
    # Slot 0 has failed in the run, and alone.
    keys = keys_of(NUMBERS)
    assert problems == [
        Problem(0, keys[0].hex(), "cannot be read"),
        Problem(3, keys[3].hex(), "has a wrong checksum"),
        Problem(5, keys[5].hex(), "cannot be read"),
    ]
    assert steps == [(6, 10), (10, 10)]


@pytest.mark.parametrize("where", [0, 53, 318, 530])
def test_a_flipped_bit_in_the_log(filled: Path, where: int) -> None:
    flip(filled, LAYOUT.log_offset + where)
    disk = reopened(filled)
    served = disk.read(NUMBERS)
    assert disk.wrong == 0
    assert disk.tier.stats().restored == len(served) == 0, "all ten are in one group"
    disk.tier.close()


def test_a_flipped_bit_amid_the_log_costs_one_group(tmp_path: Path) -> None:
    disk = Disk(tmp_path, NUM_SLOTS, BLOCK_BYTES)
    for number in NUMBERS:
        disk.write([number])
    disk.tier.close()
    flip(tmp_path, LAYOUT.log_offset + 4 * PAGE_BYTES + 100)
    disk = reopened(tmp_path)
    assert len(disk.read(NUMBERS)) == 9
    assert (disk.wrong, disk.tier.stats().journal_damage) == (0, 1)
    disk.tier.close()
    with opened(tmp_path) as (_, recovered):
        assert recovered.damaged == 0, "a damaged journal starts a new epoch"


@pytest.mark.parametrize("copies", [1, 2])
def test_a_flipped_bit_in_a_checkpoint(filled: Path, copies: int) -> None:
    with opened(filled) as (slab, recovered):
        compact(slab, recovered)
    start = LAYOUT.checkpoint_offset(recovered.epoch + 1)
    for offset in (start + 40, start + LAYOUT.checkpoint_bytes - PAGE_BYTES + 40)[:copies]:
        flip(filled, offset)
    disk = reopened(filled)
    served = disk.read(NUMBERS)
    assert disk.wrong == 0
    if copies == 1:
        assert served == NUMBERS, "the head of a checkpoint has a copy"
    disk.tier.close()


def test_a_lost_checkpoint_does_not_cost_the_log_behind_it(filled: Path) -> None:
    with opened(filled) as (slab, recovered):
        compact(slab, recovered)
    disk = reopened(filled)
    assert disk.write([20, 21]) == [20, 21]
    disk.tier.close()
    start = LAYOUT.checkpoint_offset(recovered.epoch + 1)
    for offset in (start + 40, start + LAYOUT.checkpoint_bytes - PAGE_BYTES + 40):
        flip(filled, offset)
    disk = reopened(filled)
    disk.versions |= {20: 0, 21: 0}
    assert disk.read([*NUMBERS, 20, 21]) == [20, 21]
    assert (disk.wrong, disk.tier.stats().journal_damage) == (0, 1)
    disk.tier.close()
    with opened(filled) as (_, recovered):
        assert recovered.damaged == 0, "a damaged journal starts a new epoch"
        assert len(recovered.contents.slots()) == 2


def test_a_flipped_bit_in_the_entries_of_a_checkpoint(filled: Path) -> None:
    with opened(filled) as (slab, recovered):
        compact(slab, recovered)
    flip(filled, LAYOUT.checkpoint_offset(recovered.epoch + 1) + PAGE_BYTES + 200)
    disk = reopened(filled)
    assert disk.read(NUMBERS) == []
    assert disk.tier.stats().journal_damage == 1
    disk.tier.close()


@pytest.mark.parametrize("copies", [1, 2])
def test_a_flipped_bit_in_the_superblock(filled: Path, copies: int, caplog: pytest.LogCaptureFixture) -> None:
    for copy in range(copies):
        flip(filled, copy * PAGE_BYTES + 40)
    disk = reopened(filled)
    assert disk.wrong == 0
    assert disk.read(NUMBERS) == (NUMBERS if copies == 1 else [])
    assert len(slabs_in(filled)) == 1, "the unusable slab is replaced"
    assert copies == 1 or "its superblock is damaged" in caplog.text
    disk.tier.close()


def test_swapped_slots(filled: Path) -> None:
    second, seventh = read_slot(filled, 2), read_slot(filled, 7)
    write_slot(filled, 2, seventh)
    write_slot(filled, 7, second)
    disk = reopened(filled)
    assert len(disk.read(NUMBERS)) == 8
    assert (disk.wrong, disk.tier.stats().mismatches) == (0, 2)
    disk.tier.close()
    with opened(filled) as (slab, recovered):
        assert verify(slab, recovered) == [], "detected blocks are forgotten for good"


def test_a_zeroed_slot_and_a_zeroed_slab(filled: Path) -> None:
    write_slot(filled, 4, bytes(LAYOUT.slot_bytes))
    disk = reopened(filled)
    assert len(disk.read(NUMBERS)) == 9
    assert (disk.wrong, disk.tier.stats().mismatches) == (0, 1)
    disk.tier.close()
    for slot in range(NUM_SLOTS):
        write_slot(filled, slot, bytes(LAYOUT.slot_bytes))
    disk = reopened(filled)
    assert disk.read(NUMBERS) == []
    assert disk.tier.stats().mismatches == 9
    disk.tier.close()
    slab_in(filled).write_bytes(bytes(LAYOUT.file_bytes))
    disk = reopened(filled)
    assert disk.read(NUMBERS) == []
    disk.tier.close()


def test_a_truncated_slab(filled: Path, caplog: pytest.LogCaptureFixture) -> None:
    os.truncate(slab_in(filled), LAYOUT.slot_offset(5) + 100)
    disk = reopened(filled)
    assert len(disk.read(NUMBERS)) == 5
    assert (disk.wrong, disk.tier.stats().mismatches, disk.tier.stats().restored) == (0, 0, 5)
    assert "truncated: 5 blocks are lost" in caplog.text
    disk.tier.close()
    os.truncate(slab_in(filled), 100)
    disk = reopened(filled)
    assert disk.read(NUMBERS) == []
    disk.tier.close()


def test_a_slot_of_an_earlier_generation(tmp_path: Path) -> None:
    """The disk lost an acknowledged write and still has the old block of the same key."""
    disk = Disk(tmp_path, 1, BLOCK_BYTES)
    disk.write([1], version=0)
    disk.tier.drain(5)
    old = read_slot_of(tmp_path, Layout.holding(BLOCK_BYTES, KEY_BYTES, 1))
    disk.tier.delete(keys_of([1]))
    disk.write([1], version=1)
    disk.tier.close()
    put_slot_of(tmp_path, Layout.holding(BLOCK_BYTES, KEY_BYTES, 1), old)
    disk = Disk(tmp_path, 1, BLOCK_BYTES)
    disk.versions = {1: 1}
    assert disk.read([1]) == []
    assert (disk.wrong, disk.tier.stats().mismatches) == (0, 1)
    disk.tier.close()


def read_slot_of(directory: Path, layout: Layout) -> bytes:
    return slab_in(directory).read_bytes()[layout.slot_offset(0) :]


def put_slot_of(directory: Path, layout: Layout, content: bytes) -> None:
    with slab_in(directory).open("r+b") as file:
        file.seek(layout.slot_offset(0))
        file.write(content)


def test_a_slot_of_another_producer_is_not_served(
    filled: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Slots of another model, with equal keys and slots, were copied over the slab."""
    other = tmp_path_factory.mktemp("other")
    disk = Disk(other, NUM_SLOTS, BLOCK_BYTES, fingerprint="another model")
    assert disk.write(NUMBERS, version=1) == NUMBERS
    assert disk.read(NUMBERS) == NUMBERS
    disk.tier.close()
    for slot in range(NUM_SLOTS):
        write_slot(filled, slot, read_slot(other, slot))
    disk = reopened(filled)
    assert disk.read(NUMBERS) == []
    assert disk.tier.stats().mismatches == 10
    disk.tier.close()


@pytest.mark.parametrize("changed", ["nothing", "key", "slot", "generation", "producer", "checksum", "bytes"])
def test_a_block_is_bound_to_every_field_of_its_header(tmp_path: Path, changed: str) -> None:
    """Write a block, then read it with one field changed."""
    geometry = Geometry(LAYOUT, LAYOUT.file_bytes + LOCK_FILE_BYTES, "model")
    lock, slab, _, _ = open_directory(tmp_path, geometry, Files(), RateLimitedLog("test"), None)
    scratch, pool = Scratch(slab), np.stack([block_of(3, 0, BLOCK_BYTES)] * 2)
    slot, generation = np.array([4]), np.array([9], np.uint64)
    keys, row = keys_of([3]), np.array([0])
    written, sums = slab.write_blocks(keys, slot, generation, pool, row, scratch)
    assert written.all()
    wanted, expected = SOUND if changed == "nothing" else MISMATCH, sums
    if changed == "slot":
        slab.write_pages(LAYOUT.slot_offset(5), slab.read_pages(LAYOUT.slot_offset(4), LAYOUT.slot_bytes)[0])
        slot = np.array([5])
    elif changed == "generation":
        generation = generation + np.uint64(1)
    elif changed == "producer":
        slab.identity = slab.identity._replace(fingerprint=producer_of("another model"))
    elif changed == "checksum":
        expected = sums ^ np.uint64(1)
    elif changed == "bytes":
        flip(tmp_path, LAYOUT.slot_offset(4) + 100)
    read_keys = keys_of([2 if changed == "key" else 3])
    outcomes = slab.read_blocks(read_keys, slot, generation, expected, pool, np.array([1]), scratch)
    assert outcomes.tolist() == [wanted]
    slab.close()
    lock.release()


def test_another_format_version_is_not_read(filled: Path, caplog: pytest.LogCaptureFixture) -> None:
    for page in (0, PAGE_BYTES):
        with slab_in(filled).open("r+b") as file:
            file.seek(page + 16)
            file.write((99).to_bytes(4, "little"))
    disk = reopened(filled)
    assert disk.here(NUMBERS) == []
    assert "format version is 99" in caplog.text
    disk.tier.close()


# ---- a medium that fails


@pytest.fixture
def failing(filled: Path) -> Iterator[tuple[Disk, FailingFiles]]:
    files = FailingFiles()
    disk = reopened(filled, files=files)
    yield disk, files
    files.fail = works
    assert disk.wrong == 0
    disk.tier.close()


def test_a_sector_that_cannot_be_read(failing: tuple[Disk, FailingFiles]) -> None:
    disk, files = failing
    bad = LAYOUT.slot_offset(6)

    def fail(operation: str, offset: int) -> None:
        # The whole run fails first, and then this block alone.
        if operation == "read" and offset <= bad < offset + LAYOUT.slot_bytes * (10 if offset < bad else 1):
            raise OSError(errno.EIO, "unreadable sector")

    files.fail = fail
    served = disk.read(NUMBERS)
    assert len(served) >= 1
    assert disk.tier.stats().failed == 10 - len(served) >= 1
    assert set(disk.here(NUMBERS)) == set(served)


@pytest.mark.parametrize("number", [errno.ENOMEM, errno.ESTALE, errno.ENOSPC, errno.EIO])
def test_a_run_whose_read_fails_once_is_read_block_by_block(
    failing: tuple[Disk, FailingFiles], number: int
) -> None:
    disk, files = failing
    failed = list[int]()

    def once(operation: str, offset: int) -> None:
        if operation == "read" and not failed:
            failed.append(offset)
            raise OSError(number, os.strerror(number))

    files.fail = once
    assert disk.read(NUMBERS) == NUMBERS
    assert failed
    assert disk.tier.stats().failed == 0


@pytest.mark.parametrize("number", [errno.ENOMEM, errno.ESTALE, errno.ENOSPC])
def test_reads_that_the_system_refuses_for_a_while_lose_no_block(
    failing: tuple[Disk, FailingFiles], number: int
) -> None:
    disk, files = failing
    files.fail = raises(number, "read")
    assert disk.read(NUMBERS) == []
    assert disk.tier.stats().failed == 10
    files.passed_s += REFUSED_READS_S - 10
    assert disk.read(NUMBERS) == []
    assert disk.here(NUMBERS) == NUMBERS, "the blocks remain"
    files.fail = works
    assert disk.read(NUMBERS[:5]) == NUMBERS[:5]
    files.fail = raises(number, "read")
    files.passed_s += 10
    assert disk.read(NUMBERS) == []
    assert disk.here(NUMBERS) == NUMBERS[:5], "the system has refused the other blocks for a minute"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO, errno.ENODEV])
def test_blocks_that_cannot_be_written(failing: tuple[Disk, FailingFiles], number: int) -> None:
    """Stored blocks stay while the medium takes no data; writes are tried again after a pause."""
    disk, files = failing
    files.fail = raises(number, "write", above=LAYOUT.slots_offset)
    assert disk.write([20, 21]) == []
    assert disk.tier.stats().failed == 2
    assert disk.here([20, 21]) == []
    assert disk.write([22]) == []
    assert disk.tier.stats().dropped == 1, "no write and no eviction for a while"
    assert disk.read(NUMBERS) == NUMBERS
    files.fail = works
    files.passed_s += 2 * FIRST_PAUSE_S
    assert disk.write([23]) == [23]
    assert disk.read([23]) == [23]


def test_a_partly_failed_batch_keeps_its_other_blocks(failing: tuple[Disk, FailingFiles]) -> None:
    disk, files = failing
    bad: list[int] = []

    def fail(operation: str, offset: int) -> None:
        # The run fails, and then its first block alone.
        if operation == "write" and offset >= LAYOUT.slots_offset and offset == (bad or [offset])[0]:
            bad.append(offset)
            raise OSError(errno.EIO, "bad sector")

    files.fail = fail
    stored = disk.write([20, 21, 22])
    assert len(stored) == 2
    assert disk.tier.stats().failed == 1
    manager = disk.manager
    audit(manager)
    assert manager.stats().writing == 0, "no block is in flight"
    assert disk.here([20, 21, 22]) == stored
    assert disk.read(stored) == stored


@pytest.mark.parametrize(
    ("number", "numbers", "tries"),
    [(errno.EIO, [20, 21], 3), (errno.EIO, [20], 1), (errno.ENOSPC, [20, 21], 1)],
)
def test_only_a_run_with_a_bad_sector_is_tried_again_block_by_block(
    failing: tuple[Disk, FailingFiles], number: int, numbers: list[int], tries: int
) -> None:
    disk, files = failing
    tried = []

    def fail(operation: str, offset: int) -> None:
        if operation == "write" and offset >= LAYOUT.slots_offset:
            tried.append(offset)
            raise OSError(number, os.strerror(number))

    files.fail = fail
    assert disk.write(numbers) == []
    assert len(tried) == tries


def test_pauses_after_writes_that_fail_double_until_one_succeeds(
    tmp_path: Path,
) -> None:
    files = FailingFiles()
    disk = Disk(tmp_path, NUM_SLOTS, BLOCK_BYTES, files=files)
    numbers = iter(range(20, 100))

    def pauses(seconds: float) -> bool:
        """Return True if a failed write stops writes for exactly this time."""
        files.fail = raises(errno.ENOSPC, "write", above=LAYOUT.slots_offset)
        assert disk.write([next(numbers)]) == []
        files.fail = works
        files.passed_s += seconds - 0.5
        before = disk.tier.accepts_writes
        files.passed_s += 0.5
        return not before and disk.tier.accepts_writes

    seconds = FIRST_PAUSE_S
    while seconds < LONGEST_PAUSE_S:
        assert pauses(seconds)
        seconds *= 2
    assert pauses(LONGEST_PAUSE_S)
    assert pauses(LONGEST_PAUSE_S)
    assert len(disk.write([next(numbers)])) == 1
    assert pauses(FIRST_PAUSE_S)


@pytest.mark.parametrize("operation", ["write", "sync"])
def test_a_journal_that_cannot_be_written(failing: tuple[Disk, FailingFiles], operation: str) -> None:
    """No write is acknowledged or started; stored blocks are still read."""
    disk, files = failing
    files.fail = raises(errno.EIO, operation)
    if operation == "write":
        in_log = raises(errno.EIO, "write")
        files.fail = lambda op, offset: in_log(op, offset) if offset < LAYOUT.slots_offset else None
    assert disk.write([20]) == []
    files.fail = works
    assert disk.write([21]) == []
    stats = disk.tier.stats()
    assert (stats.failed, stats.dropped) == (1, 1)
    assert disk.read(NUMBERS) == NUMBERS
    assert disk.tier.drain(HANGS_S)


def test_a_journal_that_fails_while_writes_wait_for_it(filled: Path) -> None:
    files = FailingFiles()
    disk = reopened(filled, files=files)
    disk.write(list(range(10, 16)))
    files.fail = raises(errno.EIO, "sync")
    assert disk.write([30, 31, 32]) == [], (
        "all three would replace blocks whose removal never becomes durable"
    )
    assert disk.tier.drain(HANGS_S)
    files.fail = works
    disk.tier.close()
    with opened(filled) as (slab, recovered):
        assert verify(slab, recovered) == []


def test_a_slab_that_is_deleted_while_open(filled: Path) -> None:
    disk = reopened(filled)
    slab_in(filled).unlink()
    assert disk.read(NUMBERS) == NUMBERS
    assert disk.write([20]) == [20]
    disk.tier.close()
    assert reopened(filled).here(NUMBERS) == []


def test_a_full_file_system_refuses_the_tier_at_once(tmp_path: Path) -> None:
    files = FailingFiles()
    files.fail = raises(errno.ENOSPC, "allocate")
    with pytest.raises(UnavailableError, match=r"capacity_bytes: .*has not enough space"):
        Disk(tmp_path, NUM_SLOTS, files=files)
    assert [path.name for path in tmp_path.iterdir()] == ["kvoffload.lock"]
    Disk(tmp_path, NUM_SLOTS).tier.close()


def test_a_small_tmpfs(tmp_path: Path) -> None:
    """A real file system that is too small, without direct I/O on older kernels."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=1M,mode=0700", "tmpfs", str(tmp_path)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only root can mount a tmpfs")
    try:
        with pytest.raises(UnavailableError, match="capacity_bytes"):
            DiskTier(tmp_path, 16 << 20, BLOCK_BYTES, key_bytes=KEY_BYTES, fingerprint="model")
        disk = Disk(tmp_path, NUM_SLOTS, BLOCK_BYTES)
        assert disk.write(NUMBERS) == NUMBERS
        filler = tmp_path / "filler"
        with pytest.raises(OSError, match="No space"):
            filler.write_bytes(bytes(1 << 20))
        assert disk.write([20, 21]) == [20, 21], "the room was reserved"
        assert disk.read([*NUMBERS, 20, 21]) == [*NUMBERS, 20, 21]
        assert disk.wrong == 0
        disk.tier.close()
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


# ---- a medium that crawls or hangs


class Gate:
    """Blocks operations until it is opened."""

    def __init__(self, *operations: str) -> None:
        self._operations, self.opened, self.waiting = operations, threading.Event(), threading.Semaphore(0)

    def __call__(self, operation: str, offset: int) -> None:
        if operation in self._operations:
            self.waiting.release()
            self.opened.wait(HANGS_S)


def test_a_write_into_a_full_slab_waits_for_no_removal_while_there_is_a_reserve(tmp_path: Path) -> None:
    """With 17 slots, one of them empty, the first write starts at once; the second waits for a removal."""
    files, data = FailingFiles(), threading.Semaphore(0)
    disk = Disk(tmp_path, NUM_SLOTS, BLOCK_BYTES, files=files)
    numbers = list(range(NUM_SLOTS))
    assert disk.write(numbers) == numbers
    assert disk.tier.drain(HANGS_S)
    held = Gate("sync")

    def watch(operation: str, offset: int) -> None:
        if operation == "write" and offset >= LAYOUT.slots_offset:
            data.release()
        held(operation, offset)

    files.fail = watch
    for number in (20, 21):
        disk.pool[number] = block_of(number, 0, BLOCK_BYTES)
        disk.tier.submit_write(keys_of([number]), disk.pool, np.array([number]))
    assert data.acquire(timeout=HANGS_S), "the first write uses the reserve"
    assert held.waiting.acquire(timeout=HANGS_S)
    assert not data.acquire(timeout=0.2), "the removal from the second write's slot is not durable"
    held.opened.set()
    assert data.acquire(timeout=HANGS_S)
    assert disk.tier.drain(HANGS_S)
    assert all(result.ok.all() for result in disk.tier.finished())
    disk.versions.update({20: 0, 21: 0})
    assert disk.read([20, 21]) == [20, 21]
    disk.tier.close()
    with opened(tmp_path) as (slab, recovered):
        assert verify(slab, recovered) == []


def test_a_drain_waits_for_the_commit_in_flight(
    failing: tuple[Disk, FailingFiles],
) -> None:
    disk, files = failing
    files.fail = held = Gate("sync")
    assert disk.tier.delete(keys_of([3])) == 1
    assert held.waiting.acquire(timeout=HANGS_S)
    assert not disk.tier.drain(0.05), "a crash would revive the block"
    held.opened.set()
    assert disk.tier.drain(HANGS_S)


def test_a_write_that_waits_for_a_removal_does_not_wait_for_other_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The journal pauses while blocks are written, and a write that waits for a removal ends the pause."""
    files, begun, writes, first_may_end = FailingFiles(), threading.Semaphore(0), count(), threading.Event()
    disk = Disk(tmp_path, NUM_SLOTS, BLOCK_BYTES, files=files, num_threads=3)
    assert len(disk.write(list(range(NUM_SLOTS - 1)))) == NUM_SLOTS - 1
    assert disk.tier.drain(HANGS_S)
    commits, asleep = disk.committer, queue.SimpleQueue[int]()
    wait_for = commits._wake.wait_for

    def pause(is_over: Callable[[], bool], seconds: float) -> bool:
        def noted() -> bool:
            over = is_over()
            if not over:
                # The journal's thread holds the lock from here until it sleeps.
                asleep.put(commits._num_removals)
            return over

        return wait_for(noted, 60)

    def delete_while_the_journal_pauses(number: int) -> None:
        disk.tier.delete(keys_of([number]))
        while asleep.get(timeout=HANGS_S) < commits._num_removals:
            pass

    def watch(operation: str, offset: int) -> None:
        if operation == "write" and offset >= LAYOUT.slots_offset:
            begun.release()
            if next(writes) == 0:
                first_may_end.wait(HANGS_S)

    monkeypatch.setattr(commits._wake, "wait_for", pause)
    files.fail = watch
    disk.tier.submit_write(keys_of([20]), disk.pool, np.array([20]))
    assert begun.acquire(timeout=HANGS_S)
    delete_while_the_journal_pauses(0)
    delete_while_the_journal_pauses(1)
    disk.tier.submit_write(keys_of([21, 22]), disk.pool, np.array([21, 22]))
    assert begun.acquire(timeout=HANGS_S), "no other slot is free, and the second removal is not durable yet"
    first_may_end.set()
    assert disk.tier.drain(HANGS_S)
    assert [result.ok.all() for result in disk.tier.finished()] == [True, True]
    disk.tier.close()


@pytest.mark.parametrize("operation", ["write", "sync"])
def test_writes_in_flight_end_after_a_close_that_does_not_wait(tmp_path: Path, operation: str) -> None:
    """Threads end only when no work is left: a write that hangs or waits for a removal finds all threads."""
    files = FailingFiles()
    disk = Disk(tmp_path, NUM_SLOTS, BLOCK_BYTES, files=files, num_threads=3)
    numbers = list(range(NUM_SLOTS - 2 if operation == "write" else NUM_SLOTS))
    assert disk.write(numbers) == numbers
    assert disk.tier.drain(HANGS_S)
    files.fail = gate = Gate(operation)
    # In a full slab the reserve would have room for one of the two writes.
    job, _ = disk.tier.submit_write(keys_of([20, 21]), disk.pool, np.arange(2))
    assert gate.waiting.acquire(timeout=HANGS_S)
    disk.tier.close_timeout_s = 0.1
    disk.tier.close()
    gate.opened.set()
    for thread in (*disk.tier._pipeline._threads, disk.committer.thread):
        thread.join(20)
    assert disk.tier._pipeline.close(0.0), "all threads have ended"
    disk.tier.close()
    assert [(result.job, result.ok.tolist()) for result in disk.tier.finished()] == [(job, [True, True])]
    again = Disk(tmp_path, NUM_SLOTS, BLOCK_BYTES)
    assert again.here([20, 21]) == [20, 21]
    again.tier.close()


@pytest.mark.parametrize("mended", [True, False])
@pytest.mark.parametrize("bad", [0, PAGE_BYTES])
def test_a_superblock_that_differs_from_its_copy(filled: Path, bad: int, mended: bool) -> None:
    """A bad superblock is repaired and the sound one stays; the slab works even if the repair fails."""
    flip(filled, bad + 40)
    files, written = FailingFiles(), []

    def watch(operation: str, offset: int) -> None:
        if operation == "write" and offset <= PAGE_BYTES:
            written.append(offset)
            if offset == bad and not mended:
                raise OSError(errno.EIO, "a bad sector")

    files.fail = watch
    disk = reopened(filled, files=files)
    assert written == [bad]
    assert disk.read(NUMBERS) == NUMBERS
    disk.tier.clear()
    assert disk.tier.drain(HANGS_S), "one superblock is enough"
    assert written[1] == bad, "the bad superblock is written first"
    disk.tier.close()
    flip(filled, (PAGE_BYTES - bad if mended else bad) + 40)
    disk = reopened(filled)
    assert disk.read(NUMBERS) == []
    disk.tier.close()


@pytest.mark.parametrize(
    "failing",
    [["journal"], ["superblocks"], ["journal", "superblocks"]],
    ids=["the journal had failed", "the superblocks fail for a while", "both"],
)
def test_a_reset_becomes_durable_despite_failures(
    filled: Path, failing: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(committer, "VOID_RETRY_S", 0.05)
    files = FailingFiles()
    disk = reopened(filled, files=files)
    if "journal" in failing:
        files.fail = raises(errno.EIO, "sync")
        assert disk.write([20]) == []
        files.fail = works
    if "superblocks" in failing:
        refuse = raises(errno.EIO, "write")
        files.fail = lambda operation, offset: refuse(operation, offset) if offset <= PAGE_BYTES else None
    disk.tier.clear()
    if "superblocks" in failing:
        assert not disk.tier.drain(0.1), "the reset is not durable yet"
        files.fail = works
    assert disk.tier.drain(HANGS_S)
    disk.tier.close()
    disk = reopened(filled)
    assert disk.here(NUMBERS) == []
    assert disk.slab.void_before > 0
    disk.tier.close()


def test_a_reset_voids_blocks_of_every_life_despite_journal_damage(filled: Path) -> None:
    """The void generation exceeds all earlier generations, even if all blocks had been deleted."""
    disk = reopened(filled)
    assert disk.tier.delete(keys_of(NUMBERS)) == len(NUMBERS)
    disk.tier.close()
    disk = reopened(filled)
    disk.tier.clear()
    assert disk.tier.drain(HANGS_S)
    disk.tier.close()
    flip(filled, LAYOUT.log_offset + PAGE_BYTES + 72)
    disk = reopened(filled)
    assert disk.tier.stats().journal_damage == 1, "the group with the deletions"
    assert disk.read(NUMBERS) == []
    disk.tier.close()


def test_generations_grow_although_the_clock_is_wrong(filled: Path) -> None:
    newest = [0]
    for number in (20, 21, 22):
        disk = reopened(filled, files=FailingFiles(0.0))
        assert disk.write([number]) == [number]
        disk.tier.close()
        with opened(filled) as (_, recovered):
            newest.append(int(recovered.contents.generation.max()))
    assert newest == sorted({*newest})


def test_slots_emptied_by_a_reset_are_written_only_after_it_is_durable(filled: Path) -> None:
    """A crash before that would revive their blocks."""
    files, written = FailingFiles(), threading.Event()
    disk = reopened(filled, files=files)

    def fail(operation: str, offset: int) -> None:
        if operation == "write" and offset >= LAYOUT.slots_offset:
            written.set()
        elif operation == "write" and offset < 2 * PAGE_BYTES:
            early.append(written.wait(0.1))

    early: list[bool] = []
    files.fail = fail
    disk.tier.clear()
    assert disk.write([20, 21]) == [20, 21]
    assert early == [False, False], "both superblocks, and then blocks"
    disk.tier.close()


def test_a_journal_that_fails_amid_evictions(tmp_path: Path) -> None:
    """Every job ends if the sync of a batch fails while another batch waits."""
    files = FailingFiles()
    disk = Disk(tmp_path, NUM_SLOTS, BLOCK_BYTES, files=files)
    assert len(disk.write(list(range(NUM_SLOTS)))) == NUM_SLOTS
    disk.tier.drain(20)
    refuse, appending = raises(errno.EIO, "sync"), threading.Event()

    def fail(operation: str, offset: int) -> None:
        refuse(operation, offset)
        if operation == "write" and offset < LAYOUT.slots_offset:
            appending.set()
            time.sleep(0.1)

    files.fail = fail
    jobs = [disk.tier.submit_write(keys_of([20, 21]), disk.pool, np.arange(2))[0]]
    assert appending.wait(HANGS_S), "the first batch is written and not synced"
    jobs.append(disk.tier.submit_write(keys_of([22, 23]), disk.pool, np.arange(2))[0])
    assert NO_JOB not in jobs
    assert disk.tier.drain(HANGS_S)
    assert disk.committer.broken
    assert sorted(result.job for result in disk.tier.finished()) == jobs
    files.fail = works
    disk.tier.close()
    with opened(tmp_path) as (slab, recovered):
        assert verify(slab, recovered) == []


def test_a_slow_disk_drops_writes_and_delays_no_call(filled: Path) -> None:
    files = FailingFiles()
    disk = reopened(filled, files=files, queue_bytes=3 * LAYOUT.slot_bytes)
    files.fail = gate = Gate("write")
    jobs, dropped = {}, 0
    for number in range(20, 30):
        disk.pool[number] = block_of(number, 0, BLOCK_BYTES)
        job, taken = disk.tier.submit_write(keys_of([number]), disk.pool, np.array([number]))
        dropped += not taken.any()
        if job != NO_JOB:
            jobs[job] = number
    assert (len(jobs), dropped, disk.tier.stats().dropped) == (3, 7, 7)
    assert disk.tier.finished() == []
    assert disk.here(list(jobs.values())) == [], "blocks appear after their write"
    assert not disk.tier.drain(0.01)
    read = disk.tier.submit_read(keys_of(NUMBERS[:5]), disk.pool, np.arange(5))
    assert disk.wait(read).all(), "reads do not wait behind writes"
    gate.opened.set()
    assert disk.tier.drain(HANGS_S)
    assert sorted(result.job for result in disk.tier.finished()) == sorted(jobs)
    assert disk.write([31]) == [31]
    disk.tier.close()


@pytest.mark.parametrize("operation", ["read", "write", "sync"])
def test_a_disk_that_hangs_does_not_hang_the_engine(
    filled: Path, operation: str, caplog: pytest.LogCaptureFixture
) -> None:
    files = FailingFiles()
    disk = reopened(filled, files=files)
    disk.tier.close_timeout_s = 0.2
    files.fail = gate = Gate(operation)
    disk.tier.submit_read(keys_of(NUMBERS), disk.pool, np.arange(10))
    disk.tier.submit_write(keys_of([40]), disk.pool, np.array([40]))
    assert gate.waiting.acquire(timeout=HANGS_S)
    assert not disk.tier.drain(0.05)
    disk.tier.close()
    disk.tier.close()
    assert "does not answer" in caplog.text
    with pytest.raises(UnavailableError, match=f"process {os.getpid()} has it open"):
        reopened(filled)
    gate.opened.set()
    disk.tier.close_timeout_s = HANGS_S
    disk.tier.close()
    with opened(filled) as (slab, recovered):
        assert verify(slab, recovered) == []


def test_a_bug_in_a_thread_is_a_failed_block(filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = reopened(filled)
    broken: Callable[..., object] = lambda *arguments: 1 // 0  # noqa: E731
    monkeypatch.setattr(disk.slab, "read_blocks", broken)
    assert disk.read(NUMBERS) == []
    assert disk.tier.stats().failed == 10
    disk.tier.close()
