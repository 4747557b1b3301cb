"""The disk tier keeps its contract, its bounds, and the order of its policy."""

from __future__ import annotations

import math
import os
import stat
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvoffload.errors import MisuseError, UnavailableError
from kvoffload.structures.keys import Keys
from kvoffload.tiers.contract import NO_JOB, SecondaryTier
from kvoffload.tiers.disk import DiskTier, committer
from kvoffload.tiers.disk.files import Files
from kvoffload.tiers.disk.inspection import compact, opened
from kvoffload.tiers.disk.slab_layout import Layout
from support.disk_blocks import KEY_BYTES, Disk, capacity_for, keys_of, slab_name
from support.naive.lru import NaiveLRU
from support.recording_files import ShortFiles
from support.refusals import refusal
from support.timeouts import HANGS_S

NUMBERS = list(range(10))
OTHER_POLICIES = ["fifo", "sieve", "slru", "s3fifo", "2q", "lfu", "gdsf"]


def as_tier(tier: DiskTier) -> SecondaryTier:
    """Let mypy check that it is a `SecondaryTier`."""
    return tier


def order_of(disk: Disk) -> list[bytes]:
    """Return keys in the order of the policy, coldest first."""
    manager = disk.manager
    slots = manager.policy.order()
    assert slots is not None
    return list(manager.index.keys_at(np.array(slots, np.int32)))


@pytest.mark.parametrize("block_bytes", [1, 4096, 5000])
def test_written_blocks_are_read_also_after_reopening(tmp_path: Path, block_bytes: int) -> None:
    disk = Disk(tmp_path, 20, block_bytes)
    assert disk.write(NUMBERS) == NUMBERS
    assert disk.write(NUMBERS) == [], "the tier has the blocks"
    assert disk.read(NUMBERS[::-1]) == NUMBERS[::-1]
    disk.tier.close()
    again = Disk(tmp_path, 20, block_bytes)
    again.versions = disk.versions
    assert again.read([*NUMBERS, 99]) == NUMBERS
    stats = again.tier.stats()
    assert (stats.restored, stats.ready, stats.read, stats.mismatches) == (10, 10, 10, 0)
    assert stats.bytes_read == 10 * block_bytes
    assert again.wrong == 0
    again.tier.close()


def test_rows_of_a_pool_with_gaps_and_without_alignment(tmp_path: Path) -> None:
    """Rows that are unaligned, have gaps, and are read into other rows."""
    tier = DiskTier(tmp_path, capacity_for(20, 8192), 8192, key_bytes=KEY_BYTES, fingerprint="model")
    memory = np.random.default_rng(0).integers(0, 256, 20 * 8200 + 7, np.uint8)
    pool = memory[7 : 7 + 20 * 8200].reshape(20, 8200)[:, :8192]
    wanted = pool.copy()
    _, taken = tier.submit_write(keys_of(range(20)), pool, np.arange(20))
    assert taken.all()
    assert tier.drain(HANGS_S)
    tier.finished()
    job = tier.submit_read(keys_of(range(20)), pool, np.arange(20)[::-1])
    assert tier.drain(HANGS_S)
    (result,) = tier.finished()
    assert result.job == job
    assert result.ok.all()
    assert result.seconds > 0
    np.testing.assert_array_equal(pool, wanted[::-1])
    tier.close()


@pytest.mark.parametrize("num_bytes", [100, 5000])
def test_short_reads_and_writes_are_continued(tmp_path: Path, num_bytes: int) -> None:
    """Further calls move the rest of blocks, log, checkpoint and superblocks."""
    few = ShortFiles(num_bytes)
    disk = Disk(tmp_path, 20, 8192, files=few)
    assert disk.write(NUMBERS) == NUMBERS
    disk.tier.clear()
    assert disk.write(NUMBERS[:5], version=1) == NUMBERS[:5]
    disk.tier.close()
    with opened(tmp_path, few) as (slab, recovered):
        compact(slab, recovered)
    for files, anew in ((few, NUMBERS[5:]), (Files(), [])):
        life = Disk(tmp_path, 20, 8192, files=files)
        life.versions = disk.versions | dict.fromkeys(NUMBERS, 1)
        assert life.write(anew, version=1) == anew
        assert life.read(NUMBERS) == NUMBERS
        stats = life.tier.stats()
        assert (life.wrong, stats.mismatches, stats.failed, stats.journal_damage) == (0, 0, 0, 0)
        life.tier.close()


def test_a_call_that_moves_nothing_is_a_failure(tmp_path: Path) -> None:
    """The tier does not retry forever."""
    files = ShortFiles(4096)
    disk = Disk(tmp_path, 20, files=files)
    assert disk.write([1]) == [1]
    files.num_bytes = 0
    assert disk.write([2]) == []
    assert disk.read([1]) == []
    files.num_bytes = 4096
    assert disk.tier.stats().failed == 2
    disk.tier.close()


def test_files_stay_within_the_capacity(tmp_path: Path) -> None:
    for capacity in (400_000, 1_000_001, 5_000_000):
        directory = tmp_path / str(capacity)
        tier = DiskTier(directory, capacity, 4096, key_bytes=32, fingerprint="model", num_threads=1)
        keys = Keys.pack([b"%032d" % n for n in range(300)], 32)
        pool = np.ones((300, 4096), np.uint8)
        for start in range(0, 300, 30):
            tier.submit_write(keys[start : start + 30], pool, np.arange(start, start + 30))
            assert tier.drain(HANGS_S)
            tier.finished()
        tier.close()
        used = sum(path.stat().st_size for path in directory.iterdir())
        slots = tier.stats().capacity
        assert used <= capacity
        assert Layout.holding(4096, 32, slots + 1).file_bytes + 4096 > capacity, "no further slot would fit"


def test_files_are_accessible_to_their_owner_only(tmp_path: Path) -> None:
    disk = Disk(tmp_path / "made", 4)
    disk.tier.close()
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "made").iterdir()}
    assert set(modes.values()) == {0o600}
    assert stat.S_IMODE((tmp_path / "made").stat().st_mode) == 0o700


def test_a_second_owner_is_refused_with_the_first_ones_pid(tmp_path: Path) -> None:
    disk = Disk(tmp_path, 4)
    with pytest.raises(UnavailableError, match=f"process {os.getpid()} has it open"):
        Disk(tmp_path, 4)
    disk.tier.close()
    Disk(tmp_path, 4).tier.close()


def test_a_job_is_not_seen_before_it_ended(tmp_path: Path) -> None:
    disk = Disk(tmp_path, 20)
    _, taken = disk.tier.submit_write(keys_of([1, 2]), disk.pool, np.array([1, 2]))
    assert taken.all()
    assert disk.here([1, 2]) == []
    read = disk.tier.submit_read(keys_of([1, 2]), disk.pool, np.array([3, 4]))
    again, taken = disk.tier.submit_write(keys_of([1, 2]), disk.pool, np.array([1, 2]))
    assert (again, taken.any()) == (NO_JOB, False)
    assert disk.tier.drain(HANGS_S)
    results = {result.job: result.ok.tolist() for result in disk.tier.finished()}
    assert results == {0: [True, True], read: [False, False]}
    assert disk.here([1, 2]) == [1, 2]
    disk.tier.close()


def test_a_block_deleted_while_it_is_read(tmp_path: Path) -> None:
    """The reader gets the old block, and no damage is counted, even if the key is stored again."""
    disk = Disk(tmp_path, 20)
    disk.write([1], version=0)
    disk.tier.submit_read(keys_of([1]), disk.pool, np.array([9]))
    assert disk.tier.delete(keys_of([1, 2])) == 1
    disk.tier.submit_write(keys_of([1]), disk.pool, np.array([5]))
    assert disk.tier.drain(HANGS_S)
    disk.tier.finished()
    assert disk.tier.stats().mismatches == 0
    assert disk.here([1]) == [1]
    disk.audit()
    disk.tier.close()


def test_the_head_of_a_batch_is_taken_when_the_queue_is_small(tmp_path: Path) -> None:
    disk = Disk(tmp_path, 40, queue_bytes=5 * 4096)
    assert disk.write(list(range(12))) == [0, 1, 2, 3, 4]
    assert disk.tier.stats().dropped == 7
    assert disk.write(list(range(12))) == [5, 6, 7, 8, 9], "present blocks need no queue"
    disk.tier.close()


@pytest.mark.parametrize(
    "policy", ["lru", "arc", *(pytest.param(name, marks=pytest.mark.slow) for name in OTHER_POLICIES)]
)
def test_a_reopened_tier_is_warm(tmp_path: Path, policy: str) -> None:
    """A reopened tier has all blocks and, for policies ordered by insertion or use, their exact order."""
    disk, chance = Disk(tmp_path, 30, policy=policy), np.random.default_rng(1)
    for _ in range(40):
        numbers = chance.choice(60, 6, replace=False).tolist()
        request = disk.tier.begin_request("r")
        disk.write(numbers, request=request)
        disk.tier.finish_request(request, keys_of(numbers))
    before = order_of(disk)
    assert disk.tier.drain(HANGS_S)
    disk.kill()
    again = Disk(tmp_path, 30, policy=policy)
    after = order_of(again)
    assert sorted(after) == sorted(before)
    if policy in ("lru", "fifo"):
        assert after == before
    again.audit()
    again.tier.close()


def test_uses_are_known_after_reopening(tmp_path: Path) -> None:
    """Scans do not evict blocks with two uses from ARC."""
    disk = Disk(tmp_path, 20, policy="arc")
    disk.write(NUMBERS)
    disk.use(NUMBERS[:4])
    disk.tier.close()
    again = Disk(tmp_path, 20, policy="arc")
    for start in range(100, 200, 5):
        again.write(list(range(start, start + 5)))
    assert again.here(NUMBERS) == NUMBERS[:4]
    again.tier.close()


def test_accesses_wait_for_the_next_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Accesses alone cause no commit, which would take a page of the log; `drain` commits them."""
    monkeypatch.setattr(committer, "ACCESS_INTERVAL_S", 1e9)
    disk = Disk(tmp_path, 20)
    disk.write(NUMBERS)
    disk.use(NUMBERS)
    commits = disk.committer
    assert disk.tier.drain(HANGS_S)
    assert not commits._pending.accesses
    disk.use(NUMBERS)
    with commits.lock:
        assert commits._pending.accesses, "accesses wait"
        assert not commits._has_work(), "no commit is due"
    disk.tier.close()


def test_a_request_that_wrote_a_block_has_not_used_it_again(tmp_path: Path) -> None:
    disk = Disk(tmp_path, 20, policy="arc")
    request = disk.tier.begin_request("r")
    disk.write(NUMBERS, request=request)
    disk.tier.finish_request(request, keys_of(NUMBERS))
    disk.tier.close()
    again = Disk(tmp_path, 20, policy="arc")
    assert again.manager.policy.stats()["t2_blocks"] == 0
    again.tier.close()


def test_each_tier_has_its_own_admission(tmp_path: Path) -> None:
    disk = Disk(tmp_path, 20, admission="reuse:2")
    assert disk.write(NUMBERS) == []
    assert disk.tier.stats().refused == 10
    disk.use(NUMBERS)
    assert disk.write(NUMBERS) == [], "the first offer had no request and is no reference"
    disk.use(NUMBERS)
    assert disk.write(NUMBERS) == NUMBERS
    disk.tier.close()


def test_accounting_adds_up_over_a_long_life(tmp_path: Path) -> None:
    disk, chance = Disk(tmp_path, 25, 512), np.random.default_rng(3)
    for step in range(150):
        numbers = chance.choice(80, 7, replace=False).tolist()
        disk.write(numbers)
        disk.read(chance.choice(80, 7, replace=False).tolist())
        if step % 10 == 0:
            disk.tier.delete(keys_of(chance.choice(80, 3).tolist()))
    stats = disk.tier.stats()
    disk.audit()
    assert stats.written == stats.ready + stats.evicted + disk.manager.stats().discarded
    assert (disk.wrong, stats.mismatches, stats.failed) == (0, 0, 0)
    assert (stats.bytes_written, stats.bytes_read) == (stats.written * 512, stats.read * 512)
    assert min(stats.written, stats.read) > 100
    assert disk.slots_in_use() == list(range(26))
    disk.tier.close()
    again = Disk(tmp_path, 25, 512)
    assert again.tier.stats().restored == stats.ready
    again.tier.close()


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"num_slots": 0}, "capacity_bytes"),
        ({"block_bytes": 0}, "block_bytes"),
        ({"num_threads": 0}, "num_threads"),
        ({"queue_bytes": 0}, "queue_bytes"),
        ({"fingerprint": ""}, "fingerprint"),
        ({"policy": "nonesuch"}, "policy"),
    ],
)
def test_bad_input_is_one_clear_error(tmp_path: Path, options: dict[str, object], field: str) -> None:
    arguments = {"path": tmp_path / "x", "num_slots": 4, "block_bytes": 4096, **options}
    if "block_bytes" in options:
        with refusal(field):
            DiskTier(tmp_path, 1 << 20, 0, fingerprint="model")
        return
    with refusal(field):
        Disk(**arguments)  # type: ignore[arg-type]
    Disk(tmp_path / "x", 4).tier.close()


@pytest.mark.parametrize(
    "option", ["capacity_bytes", "block_bytes", "key_bytes", "num_threads", "queue_bytes"]
)
@pytest.mark.parametrize("value", [True, 2.5, math.nan, "7", None, 1 << 70])
def test_numbers_must_be_whole_and_possible(tmp_path: Path, option: str, value: object) -> None:
    options: dict[str, Any] = {"capacity_bytes": 1 << 20, "block_bytes": 4096, option: value}
    with refusal(f"^{option}: "):
        DiskTier(tmp_path, fingerprint="model", **options)
    assert not [*tmp_path.iterdir()], "refused before the directory is used"


@pytest.mark.parametrize(
    ("option", "value"),
    [("fingerprint", "\ud800"), ("fingerprint", b"model"), ("path", ""), ("path", "a\0b"), ("path", None)],
)
def test_texts_must_be_usable(tmp_path: Path, option: str, value: object) -> None:
    options: dict[str, Any] = {"path": tmp_path, "fingerprint": "model", option: value}
    with refusal(f"^{option}: "):
        DiskTier(capacity_bytes=1 << 20, block_bytes=4096, **options)


def test_a_capacity_whose_metadata_exceed_the_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvoffload.tiers.disk.disk_tier.available_bytes", lambda: 1 << 20)
    with pytest.raises(
        UnavailableError, match=r"capacity_bytes: .* blocks need .* MiB .*, and 1 MiB are available"
    ):
        DiskTier(tmp_path, 4 << 30, 4096, fingerprint="model")


@pytest.mark.parametrize(
    "pool", [np.zeros((1, 4096)), np.zeros(4096, np.uint8), np.zeros((1, 1, 4096), np.uint8)]
)
def test_a_pool_must_be_rows_of_bytes(tmp_path: Path, pool: Any) -> None:
    tier = Disk(tmp_path, 4).tier
    with pytest.raises(ValueError, match="allowed: bytes"):
        tier.submit_write(keys_of([1]), pool, [0])
    with pytest.raises(ValueError, match="allowed: bytes"):
        tier.submit_read(keys_of([1]), pool, [0])
    tier.close()


class LateFiles(Files):
    """A clock in the year 2286."""

    def time_s(self) -> float:
        return 1e10


def test_blocks_that_were_written_under_a_clock_centuries_ahead_are_kept(tmp_path: Path) -> None:
    disk = Disk(tmp_path, 4, files=LateFiles())
    disk.write([1])
    disk.tier.clear()
    assert disk.write([2, 3]) == [2, 3]
    disk.tier.close()
    disk = Disk(tmp_path, 4)
    assert disk.here([1, 2, 3]) == [2, 3]
    assert disk.write([4]) == [4]
    disk.tier.close()
    assert Disk(tmp_path, 4).here([1, 2, 3, 4]) == [2, 3, 4]


def test_a_path_that_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with refusal("path"):
        Disk(tmp_path / "file", 4)


def test_another_capacity_loses_nothing_that_fits(tmp_path: Path) -> None:
    disk = Disk(tmp_path, 20)
    disk.write(NUMBERS)
    disk.tier.close()
    for num_slots in (30, 20):
        again = Disk(tmp_path, num_slots)
        assert again.here(NUMBERS) == NUMBERS
        assert again.tier.stats().capacity == num_slots
        again.tier.close()


def test_misuse(tmp_path: Path) -> None:
    disk = Disk(tmp_path, 4)
    request = disk.tier.begin_request("r")
    disk.tier.finish_request(request, keys_of([1]))
    with pytest.raises(MisuseError):
        disk.tier.finish_request(request, keys_of([1]))
    other = Disk(tmp_path / "other", 4)
    with pytest.raises(MisuseError, match="this tier has no such request"):
        disk.tier.contains(keys_of([1]), other.tier.begin_request("r"))
    other.tier.close()
    with pytest.raises(IndexError, match="rows"):
        disk.tier.submit_read(keys_of([1]), disk.pool, np.array([64]))
    with pytest.raises(ValueError, match="keys but"):
        disk.tier.submit_write(keys_of([1]), disk.pool, np.array([1, 2]))
    with pytest.raises(ValueError, match="blocks of"):
        disk.tier.submit_read(keys_of([1]), np.zeros((4, 100), np.uint8), np.array([1]))
    disk.tier.close()
    with pytest.raises(MisuseError, match="closed"):
        disk.tier.submit_read(keys_of([1]), disk.pool, np.array([1]))


def test_an_unfinished_slab_of_a_crash_at_its_making_is_replaced(tmp_path: Path) -> None:
    (tmp_path / (slab_name() + ".new")).write_bytes(b"half")
    (tmp_path / "kvoffload-of-another.slab.new").write_bytes(b"half")
    disk = Disk(tmp_path, 4)
    assert sorted(path.name for path in tmp_path.iterdir()) == [slab_name(), "kvoffload.lock"]
    disk.tier.close()


@pytest.mark.parametrize("pause_s", [0.0, 0.002])
def test_clear_also_forgets_blocks_in_flight_for_good(tmp_path: Path, pause_s: float) -> None:
    """After a change of weights no old block is served, now or after reopening."""
    disk = Disk(tmp_path, 40)
    disk.write(NUMBERS)
    pool = np.ones((20, disk.block_bytes), np.uint8)
    before = keys_of(range(20, 40))
    disk.tier.submit_write(before, pool, np.arange(20))
    time.sleep(pause_s)
    disk.tier.clear()
    assert not disk.tier.contains(before).any()
    assert not disk.tier.contains(keys_of(NUMBERS)).any()
    disk.tier.submit_write(keys_of([3, 25]), pool + 1, np.array([3, 5]))
    assert disk.tier.drain(HANGS_S)
    disk.tier.finished()
    assert disk.tier.contains(before).tolist() == [number == 25 for number in range(20, 40)]
    disk.audit()
    disk.tier.close()
    again = Disk(tmp_path, 40)
    assert again.tier.stats().restored == 2
    job = again.tier.submit_read(keys_of([3, 25, 26]), pool, np.arange(3))
    assert again.wait(job).tolist() == [True, True, False]
    assert (pool[:2] == 2).all()
    again.tier.close()


def test_a_policy_that_fails_while_blocks_are_restored_leaves_nothing_locked(tmp_path: Path) -> None:
    disk = Disk(tmp_path, 4)
    disk.write([0, 1, 2])
    disk.tier.close()

    class Fails(NaiveLRU):
        def replace(self, *arguments: object) -> None:
            raise RuntimeError("a bug of a policy")

    with pytest.raises(RuntimeError, match="a bug of a policy"):
        Disk(tmp_path, 4, policy=Fails)
    again = Disk(tmp_path, 4)
    assert again.tier.stats().restored == 3
    again.tier.close()
