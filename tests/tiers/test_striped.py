"""A stripe of tiers behaves like one tier, for any kinds of tiers and any order in which their jobs end."""

from __future__ import annotations

import errno
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvoffload.core.tenants import Quota
from kvoffload.errors import MisuseError
from kvoffload.tiers.contract import NO_JOB
from kvoffload.tiers.disk import DiskTier
from kvoffload.tiers.disk.files import Buffers
from kvoffload.tiers.simulated import SimulatedTier
from kvoffload.tiers.striped import StripedTier
from support.disk_blocks import KEY_BYTES, Disk, Driver, capacity_for, keys_of
from support.recording_files import FailingFiles
from support.refusals import refusal
from support.scripted_tier import ScriptedJob, ScriptedSharedTier, ScriptedTier
from support.timeouts import HANGS_S

BLOCK_BYTES, NUM_KEYS = 4, 24
NUMBERS = st.lists(st.integers(0, NUM_KEYS - 1), min_size=0, max_size=12, unique=True)


def scripted(count: int, *, immediate: bool = False) -> list[ScriptedTier]:
    """Return tiers with the identities 1, 2, ..."""
    return [ScriptedTier(BLOCK_BYTES, identity=n + 1, immediate=immediate) for n in range(count)]


def homes_of(identities: list[int], count: int) -> list[int]:
    """Return the identity of the tier of each of the first keys."""
    tier = StripedTier([ScriptedTier(BLOCK_BYTES, identity=identity) for identity in identities])
    return [identities[number] for number in tier.homes(keys_of(range(count))).tolist()]


# ---- the tier of a key


def test_the_tier_of_a_key_never_changes() -> None:
    """A version with another assignment would start with a cold cache."""
    expected = [0, 1, 1, 2, 1, 2, 0, 0, 0, 0, 0, 2, 0, 1, 2, 0]
    assert homes_of([1, 2, 3], 16) == [home + 1 for home in expected]


@pytest.mark.parametrize("number", range(1, 7))
@pytest.mark.parametrize("seed", [None, 0, 1])
def test_a_new_tier_takes_its_share_and_no_other_key_moves(number: int, seed: int | None) -> None:
    """Tried with small and random identities, in any order."""
    count = 4000
    identities = [*range(number + 1)]
    if seed is not None:
        identities = np.random.default_rng([number, seed]).integers(0, 2**64, number + 1, np.uint64).tolist()
    before, after = homes_of(identities[:-1], count), homes_of(identities[::-1], count)
    moved = [new for old, new in zip(before, after, strict=True) if old != new]
    assert set(moved) == {identities[-1]}
    share = count / (number + 1)
    assert abs(len(moved) - share) < 5 * share**0.5
    assert all(abs(after.count(identity) - share) < 5 * share**0.5 for identity in identities)


# ---- one answer


class StripedMachine(RuleBasedStateMachine):
    """A stripe compared with a dict. Jobs of its tiers end in any order, and may fail."""

    @initialize(count=st.integers(1, 4))
    def open(self, count: int) -> None:
        self.parts = scripted(count)
        self.tier = StripedTier(self.parts)
        self.model: dict[bytes, bytes] = {}
        self.under_way: dict[int, tuple[list[bytes], np.ndarray, bool]] = {}
        self.ended: dict[int, dict[bytes, bytes | None]] = {}
        self.next_value = 0

    @rule(numbers=NUMBERS, busy=st.sets(st.integers(0, 3)))
    def write(self, numbers: list[int], busy: set[int]) -> None:
        keys = keys_of(numbers)
        pool = np.zeros((len(numbers) + 1, BLOCK_BYTES), np.uint8)
        self.next_value += 1
        pool[1:, 0], pool[1:, 1] = numbers, self.next_value % 256
        for number, member in enumerate(self.parts):
            member.takes = number not in busy
        job, taken = self.tier.submit_write(keys, pool, np.arange(len(numbers)) + 1)
        free = [member.identity for member in self.parts if member.takes]
        homes = homes_of([member.identity for member in self.parts], NUM_KEYS)
        wanted = [
            key not in self.model and homes[number] in free for key, number in zip(keys, numbers, strict=True)
        ]
        assert taken.tolist() == wanted
        assert (job == NO_JOB) == (not any(wanted))
        if job != NO_JOB:
            self.begin(job, list(keys.take(taken)), pool, is_read=False)

    @rule(numbers=NUMBERS)
    def read(self, numbers: list[int]) -> None:
        keys = keys_of(numbers)
        pool = np.zeros((len(numbers), BLOCK_BYTES), np.uint8)
        job = self.tier.submit_read(keys, pool, np.arange(len(numbers)))
        self.begin(job, list(keys), pool, is_read=True)

    def begin(self, job: int, keys: list[bytes], pool: np.ndarray, *, is_read: bool) -> None:
        assert job not in self.under_way
        self.under_way[job], self.ended[job] = (keys, pool, is_read), {}

    @rule(choice=st.randoms(use_true_random=False), fails=st.booleans())
    def end(self, choice: object, fails: bool) -> None:
        """End a job of one of the tiers."""
        jobs = [(member, job) for member in self.parts for job in member.jobs]
        if not jobs:
            return
        member, job = choice.choice(jobs)  # type: ignore[attr-defined]
        number = next(n for n, (_, pool, _) in self.under_way.items() if pool is job.pool)
        if fails:
            job.fail = {job.keys[0]}
        self.ended[number].update(self.expected(job))
        member.end(job)

    def expected(self, job: ScriptedJob) -> dict[bytes, bytes | None]:
        """Apply a job to the model; None for a block that fails."""
        result: dict[bytes, bytes | None] = {}
        for key, row in zip(job.keys, job.rows.tolist(), strict=True):
            value = self.model.get(key) if job.is_read else job.pool[row].tobytes()
            result[key] = None if key in job.fail else value
            if result[key] is None:
                self.model.pop(key, None)
            elif not job.is_read and not job.void:
                self.model[key] = value or b""
        return result

    @rule()
    def collect(self) -> None:
        for result in self.tier.finished():
            keys, pool, is_read = self.under_way.pop(result.job)
            ended = self.ended.pop(result.job)
            assert set(ended) == set(keys), "a job ends with the job of its last tier"
            assert result.ok.tolist() == [ended[key] is not None for key in keys]
            for row, key in enumerate(keys):
                if is_read and ended[key] is not None:
                    assert pool[row].tobytes() == ended[key]
        assert not [n for n, (keys, _, _) in self.under_way.items() if set(self.ended[n]) == set(keys)]

    @rule(numbers=NUMBERS)
    def delete(self, numbers: list[int]) -> None:
        keys = keys_of(numbers)
        assert self.tier.delete(keys) == sum(self.model.pop(key, None) is not None for key in keys)

    @rule()
    def clear(self) -> None:
        self.tier.clear()
        self.model.clear()

    @rule()
    def drain(self) -> None:
        assert self.tier.drain(0.0) == (not any(member.jobs for member in self.parts))

    @invariant()
    def the_same_blocks(self) -> None:
        if hasattr(self, "tier"):
            keys = keys_of(range(NUM_KEYS))
            assert self.tier.contains(keys).tolist() == [key in self.model for key in keys]
            assert self.tier.stats().ready == len(self.model)


TestStriped = StripedMachine.TestCase


def test_an_empty_read_ends() -> None:
    tier = StripedTier(scripted(2))
    job = tier.submit_read(keys_of([]), np.zeros((1, BLOCK_BYTES), np.uint8), np.arange(0))
    ((number, ok, *_),) = tier.finished()
    assert (number, len(ok)) == (job, 0)
    assert tier.finished() == []


def test_the_slowest_tier_sets_the_duration_of_a_job() -> None:
    parts = scripted(3)
    tier = StripedTier(parts)
    tier.submit_read(keys_of(range(20)), np.zeros((20, BLOCK_BYTES), np.uint8), np.arange(20))
    for seconds, member in zip((0.5, 2.5, 1.0), parts, strict=True):
        (job,) = member.jobs
        job.seconds = seconds
        member.end(job)
    (result,) = tier.finished()
    assert result.seconds == 2.5


def test_each_tier_gets_its_share_of_a_finished_path() -> None:
    parts = scripted(3)
    tier, path = StripedTier(parts), keys_of(range(20))
    request, idle = tier.begin_request("r"), tier.begin_request("idle")
    tier.contains(path, request)
    tier.submit_write(path, np.zeros((20, BLOCK_BYTES), np.uint8), np.arange(20), request)
    tier.finish_request(request, path)
    shares = [member.used[0] for member in parts]
    assert sorted(key for share in shares for key in share) == list(path)
    assert all(share == sorted(share) and share for share in shares), "in prefix order"
    tier.finish_request(idle, path[:1])
    assert [len(member.open_requests) for member in parts] == [0, 0, 0], (
        "closed also in tiers that the request has not used"
    )
    with pytest.raises(MisuseError, match="this tier has no such request"):
        tier.finish_request(parts[0].begin_request("r"), path)


def test_each_tier_has_its_own_record_of_a_request() -> None:
    """Two requests admit a block; repeated lookups of one request count once."""
    parts = [SimulatedTier(20, key_bytes=KEY_BYTES, identity=n, admission="reuse:2") for n in (1, 2)]
    tier, path, pool = StripedTier(parts), keys_of(range(10)), np.zeros((10, 0), np.uint8)
    for expected in ("nothing", "everything"):
        request = tier.begin_request("r")
        for _ in range(3):
            tier.contains(path, request)
            _, taken = tier.submit_write(path, pool, np.arange(10), request)
            assert taken.all() == (expected == "everything"), expected
            if expected == "everything":
                break
            assert not taken.any()
        tier.finish_request(request, path)


def test_blocks_of_a_request_are_not_evicted_for_its_writes() -> None:
    parts = [SimulatedTier(4, key_bytes=KEY_BYTES, identity=n) for n in (1, 2)]
    tier, pool = StripedTier(parts), np.zeros((40, 0), np.uint8)
    tier.submit_write(keys_of(range(40)), pool, np.arange(40))
    held = [number for number in range(40) if tier.contains(keys_of([number]))[0]]
    assert len(held) == 8
    request = tier.begin_request("r")
    assert tier.contains(keys_of(held), request).all()
    _, taken = tier.submit_write(keys_of(range(100, 140)), pool, np.arange(40), request)
    assert not taken.any()
    assert tier.contains(keys_of(held)).all()


def test_stored_bytes_are_the_largest_of_the_tiers() -> None:
    parts = scripted(2)
    parts[0].stored_bytes = 4096
    assert StripedTier(parts).stored_bytes == StripedTier(parts[::-1]).stored_bytes == 4096


def test_bad_rows_begin_no_job() -> None:
    parts = scripted(2)
    tier, pool = StripedTier(parts), np.zeros((4, BLOCK_BYTES), np.uint8)
    with pytest.raises(IndexError, match="rows"):
        tier.submit_write(keys_of(range(5)), pool, np.arange(5))
    with pytest.raises(ValueError, match="keys but"):
        tier.submit_read(keys_of(range(3)), pool, np.arange(2))
    with pytest.raises(ValueError, match="blocks of"):
        tier.submit_read(keys_of(range(4)), np.zeros((4, 5), np.uint8), np.arange(4))
    assert not any(member.jobs for member in parts)


def broken(*_: object) -> Any:
    raise OSError("out of order")


def end_all(parts: list[ScriptedTier]) -> None:
    for member in parts:
        while member.jobs:
            member.end(member.jobs[0])


def test_a_tier_that_raises_loses_only_its_share_of_a_job() -> None:
    """The other tiers use the rows of the pool until the job ends, so the call must not raise."""
    parts = scripted(2)
    tier, keys, pool = StripedTier(parts), keys_of(range(8)), np.ones((8, BLOCK_BYTES), np.uint8)
    is_in_first = tier.homes(keys) == 0
    assert 0 < is_in_first.sum() < 8
    parts[1].submit_write = parts[1].submit_read = broken  # type: ignore[method-assign]
    job, taken = tier.submit_write(keys, pool, np.arange(8))
    assert taken.tolist() == is_in_first.tolist()
    end_all(parts)
    (result,) = tier.finished()
    assert (result.job, result.ok.tolist()) == (job, [True] * int(is_in_first.sum()))
    job = tier.submit_read(keys, pool, np.arange(8))
    end_all(parts)
    (result,) = tier.finished()
    assert (result.job, result.ok.tolist()) == (job, is_in_first.tolist())
    assert tier.stats().failed == 2 * int((~is_in_first).sum())


def test_if_every_tier_raises_no_block_is_written_or_read() -> None:
    parts = scripted(2)
    tier, keys, pool = StripedTier(parts), keys_of(range(8)), np.ones((8, BLOCK_BYTES), np.uint8)
    for part in parts:
        part.submit_write = part.submit_read = broken  # type: ignore[method-assign]
    job, taken = tier.submit_write(keys, pool, np.arange(8))
    assert (job, taken.any()) == (NO_JOB, False)
    job = tier.submit_read(keys, pool, np.arange(8))
    [result] = tier.finished()
    assert (result.job, result.ok.any()) == (job, False)
    assert (tier.stats().failed, tier.stats().errors) == (16, 4)


@pytest.mark.parametrize("method", ["begin_request", "contains", "finish_request", "delete", "queue_room"])
def test_a_tier_that_raises_in_any_call_loses_only_its_blocks(method: str) -> None:
    parts = scripted(2)
    tier, keys = StripedTier(parts), keys_of(range(8))
    tier.submit_write(keys, np.ones((8, BLOCK_BYTES), np.uint8), np.arange(8))
    end_all(parts)
    tier.finished()

    def raise_in(called: str) -> None:
        if called == method:
            raise OSError("out of order")

    parts[1].on_call = raise_in
    request = tier.begin_request("r")
    assert tier.contains(keys, request)[tier.homes(keys) == 0].all()
    tier.finish_request(request, keys)
    assert tier.queue_room > 0
    assert tier.delete(keys[:4]) >= int((tier.homes(keys[:4]) == 0).sum())
    assert len(parts[0].used) == 1


@pytest.mark.parametrize("failing", [0, 1])
def test_tenants_are_counted_without_a_tier_that_fails(failing: int) -> None:
    parts = [SimulatedTier(20, key_bytes=KEY_BYTES, identity=identity) for identity in (1, 2)]
    tier = StripedTier(parts)
    tier.set_tenants({"a": Quota(10)}, lambda keys: "a")
    assert tier.tenants()["a"].min == 10
    parts[failing].tenants = broken  # type: ignore[method-assign]
    assert tier.tenants()["a"].min == 5


def test_quotas_that_one_tier_refuses_change_no_tier() -> None:
    parts = [SimulatedTier(capacity, key_bytes=KEY_BYTES, identity=capacity) for capacity in (100, 10)]
    tier = StripedTier(parts)
    tier.set_tenants({"a": Quota(10)}, lambda keys: "a")
    before = tier.tenants()
    with refusal("capacity of 10"):
        tier.set_tenants({"a": Quota(10), "b": Quota(30)}, lambda keys: "a")
    assert tier.tenants() == before


@pytest.mark.parametrize("hanging", [0, 1, 2])
def test_a_tier_that_hangs_does_not_stop_the_others_from_draining_and_closing(hanging: int) -> None:
    parts = scripted(3)
    tier, keys = StripedTier(parts), keys_of(range(20))
    tier.submit_write(keys, np.ones((20, BLOCK_BYTES), np.uint8), np.arange(20))
    healthy = [member for number, member in enumerate(parts) if number != hanging]
    for member in healthy:
        member.end(member.jobs[0])
    assert not tier.drain(0.0)
    assert all(member.durable == member.blocks and member.blocks for member in healthy)
    assert tier.finished() == [], "the result waits for the last tier"
    parts[hanging].close = lambda: 1 // 0  # type: ignore[method-assign,assignment]
    tier.close()
    assert all(member.closed for member in healthy)


def test_counters_are_sums() -> None:
    parts = [SimulatedTier(capacity, key_bytes=KEY_BYTES, identity=capacity) for capacity in (40, 60)]
    tier = StripedTier(parts)
    _, taken = tier.submit_write(keys_of(range(20)), np.zeros((20, 0), np.uint8), np.arange(20))
    assert taken.all()
    tier.submit_read(keys_of(range(30)), np.zeros((30, 0), np.uint8), np.arange(30))
    (written, read) = tier.finished()
    assert written.ok.tolist() == [True] * 20
    assert read.ok.tolist() == [True] * 20 + [False] * 10
    stats = tier.stats()
    assert (stats.capacity, stats.ready, stats.free, stats.written, stats.read) == (100, 20, 80, 20, 20)
    assert stats.write_budget_bytes is None
    assert all(member.stats().ready > 3 for member in parts)


@pytest.mark.parametrize(
    ("tiers", "problem"),
    [
        ([], "one tier or more"),
        ([ScriptedTier(4, identity=1), ScriptedTier(8, identity=2)], r"\[4, 8\].*one size"),
        ([ScriptedTier(4, identity=1), ScriptedTier(4, identity=1)], r"\[1, 1\].*each tier once"),
        ([ScriptedTier(4, identity=1), ScriptedSharedTier(4, identity=2)], "scripted.*use a cluster"),
    ],
)
def test_impossible_stripes_are_refused(tiers: list[ScriptedTier], problem: str) -> None:
    with refusal(problem):
        StripedTier(tiers)


# ---- disks


def disks(paths: list[Path], num_slots: int, block_bytes: int = 4096, **options: object) -> Driver:
    """A stripe of directories of this many blocks."""
    return Driver(StripedTier([Disk(path, num_slots, block_bytes, **options).tier for path in paths]))


@pytest.fixture
def same_identities(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw slabs until each directory has several keys; slab numbers are random."""
    numbers = iter(range(1, 100))
    random = SimpleNamespace(randbits=lambda bits: next(numbers))
    monkeypatch.setattr("kvoffload.tiers.disk.slab_directory.secrets", random)


@pytest.mark.usefixtures("same_identities")
def test_several_directories(tmp_path: Path) -> None:
    """Most keys keep their directory when one is added or moved."""
    paths, numbers = [tmp_path / name for name in "ab"], list(range(60))
    two = disks(paths, 100, 512)
    assert two.write(numbers) == numbers
    assert two.write(numbers) == [], "the directories have the blocks"
    assert two.tier.drain(HANGS_S)
    two.tier.close()
    three = disks([tmp_path / "c", *paths], 100, 512)
    three.versions = two.versions
    kept = three.read(numbers)
    assert 30 <= len(kept) <= 50, "about two thirds of the keys"
    assert (three.wrong, three.tier.name) == (0, "disk")
    three.tier.close()
    again = disks(paths[::-1], 100, 512)
    again.versions = two.versions
    assert again.read(numbers) == numbers
    assert again.tier.stats().restored == 60
    again.tier.close()


@pytest.mark.usefixtures("same_identities")
def test_a_directory_that_fails_loses_its_own_blocks(tmp_path: Path) -> None:
    class Bad(FailingFiles):
        def read(self, fd: int, buffers: Buffers, offset: int) -> int:
            if fd == failing:
                raise OSError(errno.EIO, "gone")
            return super().read(fd, buffers, offset)

    failing = -1
    both = disks([tmp_path / "a", tmp_path / "b"], 16, files=Bad())
    assert sorted(both.write(list(range(20)))) == list(range(20))
    bad, good = (tier.inner for tier in both.tier._tiers)
    shares = bad.stats().ready, good.stats().ready
    assert min(shares) > 3
    failing = bad._slab._fd
    assert len(both.read(list(range(20)))) == shares[1]
    assert both.tier.stats().failed == shares[0]
    both.tier.close()


def test_a_disk_beside_another_kind(tmp_path: Path) -> None:
    path = tmp_path / "disk"
    disk = DiskTier(path, capacity_for(50, 4096), 4096, key_bytes=KEY_BYTES, fingerprint="model")
    other = ScriptedTier(4096, identity=disk.identity ^ 1, name="remote", immediate=True)
    driver = Driver(StripedTier([disk, other]))
    assert driver.tier.name == "disk+remote"
    assert driver.write(list(range(30))) == list(range(30))
    assert driver.read(list(range(40))) == list(range(30))
    assert other.blocks
    assert len(other.blocks) + disk.stats().ready == 30
    driver.tier.close()
    assert other.closed


@pytest.mark.parametrize("tiers", [None, 5, [5], "ab"])
def test_members_must_be_tiers(tiers: Any) -> None:
    with refusal(r"^tiers: .*SecondaryTier"):
        StripedTier(tiers)
