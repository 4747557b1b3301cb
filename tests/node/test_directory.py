"""The directory of a pool: concurrent starts, damage, other versions, rights, a full file system."""

from __future__ import annotations

import contextlib
import errno
import json
import multiprocessing
import os
import random
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvoffload.core.plans import LookupResult
from kvoffload.errors import ConfigError, UnavailableError
from kvoffload.node import pool_directory as directories
from kvoffload.node.node_manager import NodeManager
from kvoffload.node.pool_directory import FACTS, MEMBERS, STATE, PoolDirectory, pools, remove_expired
from kvoffload.testing.audit import audit
from support.node_process import KEYS, KILLS

TEST_FACTS = {"test": "directory"}


class Engine:
    """A member of a pool in this process."""

    def __init__(self, root: Path, name: str, *, capacity: int = 16, keep_s: float = 60.0, **manager: Any):
        self.directory = PoolDirectory.join(TEST_FACTS, name, keep_s=keep_s, root=root, has_keeper=False)
        try:
            self.manager = NodeManager(capacity, directory=self.directory, **manager)
        except BaseException:
            self.directory.close()
            raise

    def store(self, first: int, count: int = 4) -> None:
        plan = self.manager.prepare_store(KEYS[first : first + count])
        assert plan is not None
        self.manager.complete_store(plan)

    def has(self, first: int, count: int = 4) -> bool:
        return bool(self.manager.contains(KEYS[first : first + count]).all())

    def kill(self) -> None:
        """End without leaving."""
        self.directory.close()

    def close(self) -> None:
        self.manager.close()
        self.directory.close()


def path_of(root: Path) -> Path:
    [pool] = pools(root)
    return pool.path


def entries(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


# ---- starts at the same time


def _start_and_report(pipe: Any, root: Path, keep_s: float, name: str) -> None:
    pipe.send("ready")
    pipe.recv()
    try:
        engine = Engine(root, name, keep_s=keep_s)
        engine.store(len(name))
        path = engine.directory.path
        members = os.fstat(engine.directory._fd)
        is_named = os.path.samestat(members, (path / MEMBERS).lstat())
        pipe.send((engine.directory.created, members.st_ino, engine.directory.number, is_named))
        pipe.recv()
        engine.close()
        pipe.send("closed")
    except BaseException as error:
        pipe.send(repr(error))


def double_starts(root: Path, num_rounds: int, keep_s: float = 60.0) -> None:
    warm = Engine(root, "warm", keep_s=0.0)  # loads the kernels, which the processes inherit
    warm.store(0)
    warm.close()
    context = multiprocessing.get_context("fork")
    for number in range(num_rounds):
        pairs = [context.Pipe() for _ in range(2)]
        processes = [
            context.Process(
                target=_start_and_report, args=(child_end, root, keep_s, "ab"[n] * (n + 1)), daemon=True
            )
            for n, (_, child_end) in enumerate(pairs)
        ]
        for process in processes:
            process.start()
        pipes = [parent_end for parent_end, _ in pairs]
        for pipe in pipes:
            assert pipe.recv() == "ready"
        for pipe in random.sample(pipes, 2):
            pipe.send("go")
        first, second = (pipe.recv() for pipe in pipes)
        assert isinstance(first, tuple), first
        assert isinstance(second, tuple), second
        assert sorted([first[0], second[0]]) == [False, True], f"round {number}: two pools"
        assert first[1] == second[1], "two pools"
        assert first[2] != second[2], "two engines have one number"
        assert first[3], "the pool has no name"
        assert second[3], "the pool has no name"
        for pipe in pipes:
            pipe.send("stop")
            assert pipe.recv() == "closed"
        for process in processes:
            process.join()
        for pool in pools(root):
            assert keep_s, "the pool was not removed"
            directories.remove(pool.name, root)
        assert entries(root) == []


def test_two_starts_at_the_same_time_create_one_pool(root: Path) -> None:
    double_starts(root, 10)
    double_starts(root, 5, keep_s=0.0)


@pytest.mark.slow
def test_many_double_starts(root: Path) -> None:
    double_starts(root, KILLS)
    double_starts(root, KILLS, keep_s=0.0)


def _join_and_leave(root: Path, results: Any, seed: int) -> None:
    rng, wrong = random.Random(seed), []
    for number in range(60):
        try:
            engine = Engine(root, f"{os.getpid()}-{number}", keep_s=0.0)
            if not os.path.samestat(
                os.fstat(engine.directory._fd), (engine.directory.path / MEMBERS).lstat()
            ):
                wrong.append("a member of a removed pool")
            engine.store(0) if rng.random() < 0.5 else engine.has(0)
            engine.close()
        except BaseException as error:
            wrong.append(repr(error))
    results.put(wrong)


@pytest.mark.slow
def test_starts_while_the_last_member_removes_the_pool(root: Path) -> None:
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    processes = [context.Process(target=_join_and_leave, args=(root, results, n)) for n in range(4)]
    for process in processes:
        process.start()
    assert [results.get(timeout=120) for _ in processes] == [[]] * 4
    for process in processes:
        process.join()
    assert entries(root) == []


# ---- the end of a pool


def test_the_last_member_removes_a_pool_that_is_not_kept(root: Path) -> None:
    first, second = Engine(root, "a", keep_s=0.0), Engine(root, "b", keep_s=0.0)
    first.close()
    assert len(entries(root)) == 1
    second.close()
    assert entries(root) == []


def test_a_pool_is_kept_after_its_last_member(root: Path) -> None:
    engine = Engine(root, "a")
    engine.store(0)
    engine.close()
    again = Engine(root, "b")
    assert not again.directory.created
    assert again.has(0)
    again.close()


@pytest.mark.parametrize("seconds", [-3600.0, 3600.0])
def test_a_step_of_the_systems_clock_shortens_no_period(
    root: Path, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    """Slots of a dead engine are not reused early; a pool is neither removed early nor kept longer."""
    first, second = Engine(root, "a"), Engine(root, "b")
    passed, stepped = 0.0, 0.0
    clock = SimpleNamespace(time=lambda: time.time() + stepped, monotonic=lambda: time.monotonic() + passed)
    monkeypatch.setattr(directories, "time", clock)
    second.kill()
    assert first.directory.dead() == [1]
    stepped = seconds
    assert first.directory.dead(600.0) == []
    passed = 601.0
    assert first.directory.dead(600.0) == [1]
    first.kill()
    stepped -= seconds
    assert not pools(root)[0].is_expired
    passed += 61.0
    assert pools(root)[0].is_expired


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOMEM])
def test_a_lack_of_handles_or_memory_does_not_remove_a_pool(
    root: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """A file that cannot be opened now is not damaged: the pool may be in use, or kept for later."""

    def no_room(*_: object) -> None:
        raise OSError(number, "no room")

    engine = Engine(root, "a")
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", no_room)
        assert not remove_expired(root), "the pool is in use"
    engine.close()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", no_room)
        assert not remove_expired(root), "the pool is kept for a minute"
    assert not pools(root)[0].problem


def test_members_share_the_reasons_of_missing_blocks(root: Path) -> None:
    """An engine explains misses of blocks that another engine evicted; each counts its own misses."""
    first, second = (Engine(root, name, capacity=4, key_bytes=32, explain_misses=True) for name in ("a", "b"))
    first.store(0)
    first.store(4)
    ctx = second.manager.begin_request("r", KEYS[:6])
    assert second.manager.count_misses(ctx, 0) == 6
    assert second.manager.stats().misses == {"evicted": 4, "behind_a_gap": 2}
    assert first.manager.stats().misses == {}
    first.manager.reset()
    assert second.manager.count_misses(ctx, 4) == 2
    assert second.manager.stats().misses == {"evicted": 4, "behind_a_gap": 2, "reset": 2}
    first.close()
    second.close()


# ---- other versions and damage


def test_a_pool_of_another_version_is_left_alone_while_it_is_used(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise its memory would stay in use without a name, and its engines would restart cold."""
    old = Engine(root, "old")
    old.store(0)
    with monkeypatch.context() as patch:
        later = directories.FORMAT + 1
        patch.setattr(directories, "FORMAT", later)
        patch.setattr("kvoffload.node.state.FORMAT", later)
        new = Engine(root, "new")
        assert new.directory.path != old.directory.path
        assert not new.has(0)
        assert len(pools(root)) == 2
        [other] = [pool for pool in pools(root) if pool.path == old.directory.path]
        assert other.is_used
        assert f"needed: format {later}" in other.problem
        old.close()
        Engine(root, "newer").close()
        assert [pool.path for pool in pools(root)] == [new.directory.path], (
            "an old pool without engines stays"
        )
        new.close()


@pytest.mark.parametrize("other", [{"capacity": 20}, {"policy": "arc"}, {"key_bytes": 36}])
def test_a_member_of_another_geometry(root: Path, other: dict[str, Any]) -> None:
    first = Engine(root, "a", policy="lru")
    first.store(0)
    with pytest.raises(UnavailableError, match="damaged, or of another version"):
        Engine(root, "b", **{"policy": "lru", **other})
    assert first.has(0)
    first.store(4)
    audit(first.manager)
    first.close()
    Engine(root, "c", **{"policy": "lru", **other}).close()


def _spoil(path: Path, how: str) -> None:
    size, rng = path.stat().st_size, random.Random(0)
    if how == "truncated":
        os.truncate(path, size // 2)
    elif how == "empty":
        os.truncate(path, 0)
    elif how == "zeroed":
        path.write_bytes(bytes(size))
    elif how == "garbage":
        path.write_bytes(rng.randbytes(size))
    elif how == "missing":
        path.unlink()


@pytest.mark.parametrize("how", ["truncated", "empty", "zeroed", "garbage", "missing"])
@pytest.mark.parametrize("file", [MEMBERS, STATE, FACTS])
def test_a_damaged_pool_without_processes_is_replaced(root: Path, file: str, how: str) -> None:
    engine = Engine(root, "a")
    engine.store(0)
    engine.kill()
    _spoil(path_of(root) / file, how)
    again = Engine(root, "b")
    assert again.manager.lookup(KEYS[:4]).stopped_by is LookupResult.MISS
    again.store(0)
    assert again.has(0)
    audit(again.manager)
    again.close()
    assert [pool.problem for pool in pools(root)] == [""]


@pytest.mark.parametrize("how", ["zeroed", "garbage", "missing"])
@pytest.mark.parametrize("file", [MEMBERS, STATE, FACTS])
def test_a_pool_that_is_damaged_while_it_is_used(root: Path, file: str, how: str) -> None:
    """The test replaces the file, because a process cannot survive a file that shrinks."""
    engine = Engine(root, "a")
    engine.store(0)
    path = engine.directory.path / file
    copy = path.with_name("copy")
    copy.write_bytes(path.read_bytes())
    _spoil(copy, how)
    if how == "missing":
        path.unlink()
    else:
        os.replace(copy, path)
    with contextlib.suppress(UnavailableError):
        Engine(root, "b").close()
    assert engine.has(0)
    audit(engine.manager)
    engine.close()
    again = Engine(root, "c")
    again.store(8)
    audit(again.manager)
    again.close()


def test_facts_that_are_no_object(root: Path) -> None:
    Engine(root, "a").kill()
    (path_of(root) / FACTS).write_text("[1]")
    assert pools(root)[0].problem
    Engine(root, "b").close()
    assert json.loads((path_of(root) / FACTS).read_text()) == TEST_FACTS


# ---- rights


def test_a_directory_that_others_can_open(root: Path) -> None:
    engine = Engine(root, "a")
    path_of(root).chmod(0o755)
    with pytest.raises(ConfigError, match="only this user can open"):
        Engine(root, "b")
    engine.kill()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a file to another user")
def test_files_of_another_user(root: Path) -> None:
    engine = Engine(root, "a")
    path = engine.directory.path
    os.chown(path / STATE, 12345, -1)
    with pytest.raises(ConfigError, match="12345"):
        Engine(root, "b")
    os.chown(path, 12345, -1)
    with pytest.raises(ConfigError, match="only this user can open"):
        Engine(root, "b")
    os.chown(path, 0, -1)
    os.chown(path / STATE, 0, -1)
    engine.kill()
    os.chown(path / MEMBERS, 12345, -1)
    again = Engine(root, "c")
    assert again.directory.created, "a pool whose members are unknown is replaced"
    again.close()


def test_links_in_place_of_files(root: Path) -> None:
    elsewhere, root = root / "elsewhere", root / "pools"
    elsewhere.mkdir()
    root.mkdir()
    engine = Engine(root, "a")
    path = engine.directory.path
    victim = elsewhere / "victim"
    victim.write_text("mine")
    engine.close()
    for file in (STATE, MEMBERS):
        (path / file).rename(elsewhere / file)
        (path / file).symlink_to(victim)
        with contextlib.suppress(ConfigError):
            Engine(root, "b").kill()
        assert victim.read_text() == "mine"
        if path.exists():
            (path / file).unlink()
            (elsewhere / file).rename(path / file)


@pytest.mark.parametrize("exists", [True, False])
def test_a_link_in_place_of_the_directory(root: Path, exists: bool) -> None:
    elsewhere, root = root / "elsewhere", root / "pools"
    elsewhere.mkdir()
    root.mkdir()
    engine = Engine(root, "a")
    path = engine.directory.path
    engine.close()
    path.rename(elsewhere / "pool")
    path.symlink_to(elsewhere / ("pool" if exists else "nothing"))
    with pytest.raises(ConfigError, match=r"it is not a directory|cannot be created"):
        Engine(root, "b")
    assert entries(root) == [path.name]
    assert (elsewhere / "pool" / STATE).exists()


def test_a_lock_file_of_another_kind(root: Path) -> None:
    path = root / f".{directories.PREFIX}{os.geteuid()}.lock"
    path.symlink_to("/nowhere")
    with pytest.raises(ConfigError, match="lock"):
        Engine(root, "a")
    path.unlink()
    path.mkdir()
    with pytest.raises(ConfigError, match="lock"):
        Engine(root, "a")


def test_a_process_that_is_stopped_while_it_changes_pools(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directories, "LOCK_PATIENCE_S", 0.05)
    held = f"process {os.getpid()} has held the lock of this file for too long"
    with directories.locked(root), pytest.raises(UnavailableError, match=held):
        Engine(root, "a")
    Engine(root, "a").close()


# ---- a full file system


@pytest.fixture
def small(root: Path) -> Iterator[Path]:
    """A file system of 128 pages."""
    path = root / "small"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=512k,mode=0700", "tmpfs", str(path)]
    if os.geteuid() or subprocess.run(command, check=False).returncode:
        pytest.skip("this machine does not allow to mount a file system")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


def test_a_pool_without_room_leaves_nothing_behind(small: Path) -> None:
    with pytest.raises(UnavailableError, match="no room"):
        Engine(small, "a", capacity=1 << 14)
    assert entries(small) == []


@pytest.mark.parametrize("free_pages", [0, 1, 2, 3, 8])
def test_a_full_file_system_leaves_nothing_behind(small: Path, free_pages: int) -> None:
    stat = os.statvfs(small)
    filler = small / "filler"
    filler.write_bytes(bytes((stat.f_bavail - free_pages) * stat.f_bsize))
    with pytest.raises(UnavailableError, match=r"no room|No space"):
        Engine(small, "a", capacity=1 << 10)
    assert entries(small) == ["filler"]
    filler.unlink()
    engine = Engine(small, "a", capacity=1 << 8)
    engine.store(0)
    engine.close()


def test_members_continue_when_a_new_member_has_no_room(small: Path) -> None:
    engine = Engine(small, "a", capacity=1 << 8)
    engine.store(0)
    stat = os.statvfs(small)
    (small / "filler").write_bytes(bytes(stat.f_bavail * stat.f_bsize))
    with pytest.raises(UnavailableError, match="no room"):
        Engine(small, "b", capacity=1 << 8)
    assert engine.has(0)
    engine.store(8)
    audit(engine.manager)
    os.truncate(small / "filler", 0)
    other = Engine(small, "c", capacity=1 << 8)
    assert other.has(0)
    other.close()
    engine.close()
    assert remove_expired(small) == []


def test_a_pool_that_is_removed_during_a_listing_is_left_out(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(root, "one")
    gone = root / f"{directories.PREFIX}{os.geteuid()}-gone"
    glob = Path.glob
    monkeypatch.setattr(Path, "glob", lambda path, pattern: [gone, *glob(path, pattern)])
    assert [pool.path for pool in pools(root)] == [engine.directory.path]
    engine.close()
