"""The pool that processes share: how they find it, what they refuse, and that nothing is left of it."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hangs import HANGS_S
from kvoffload.core.plans import LookupResult
from kvoffload.errors import ConfigError
from kvoffload.integrations.vllm.pool import SHARED_MEMORY, SharedPool
from kvoffload.integrations.vllm.verification import Checks, Verifier
from kvoffload.structures.keys import Keys
from kvoffload.tiers.base import key_digests
from letters import keys, make, store


@pytest.fixture
def attach(tmp_path: Path) -> Callable[..., SharedPool]:
    """A function that attaches one member of an engine of two workers."""

    def one(member: int, engine: str = "e", **changes: Any) -> SharedPool:
        settings = {
            "num_members": 3,
            "num_parts": 2,
            "part_bytes": 6000,
            "capacity_bytes": 10 * 12288,
            "directory": tmp_path,
        } | changes
        return SharedPool.attach(engine, member=member, **settings)

    return one


def pools_in(directory: Path) -> list[Path]:
    return list(directory.glob("kvoffload-*"))


def test_members_share_slots_and_the_name_goes_with_the_last(
    attach: Callable[..., SharedPool], tmp_path: Path
) -> None:
    first, second = attach(1), attach(2, part_bytes=5000)
    (file,) = pools_in(tmp_path)
    assert file.stat().st_mode & 0o777 == 0o600
    assert str(os.getpid()) in file.name
    scheduler = attach(0, part_bytes=99999)
    assert not pools_in(tmp_path), "nothing has a name once all are there"
    assert (scheduler.num_slots, scheduler.part_bytes, scheduler.num_parts) == (10, 6000, 2)
    first.part(0)[3] = 7
    second.part(1)[3] = 9
    assert scheduler.part(0)[3].tolist() == [7] * 6000
    assert scheduler.part(1)[3].tolist() == [9] * 6000
    second.failed[1, 3] = 1
    assert scheduler.failed[:, 3].tolist() == [0, 1]
    for pool in (first, second, scheduler):
        pool.close()
        pool.close()


def test_checksums_are_of_all_parts_and_of_this_key(attach: Callable[..., SharedPool]) -> None:
    first, second, scheduler = attach(1), attach(2), attach(0)
    slots, digests = np.array([2, 5], np.int32), key_digests(Keys.pack([b"a" * 8, b"b" * 8], 8))
    first.part(0)[:] = 1
    second.part(1)[:] = 2
    first.seal(0, slots, digests)
    assert scheduler.verify(slots, digests).tolist() == [False, False], "one part is missing"
    second.seal(1, slots, digests)
    assert scheduler.verify(slots, digests).tolist() == [True, True]
    assert scheduler.verify(slots[::-1].copy(), digests).tolist() == [False, False], "of other keys"
    second.part(1)[5, 5999] ^= 1
    assert scheduler.verify(slots, digests).tolist() == [True, False]


def test_two_engines_do_not_share(attach: Callable[..., SharedPool]) -> None:
    one, other = attach(1, "one"), attach(1, "other")
    one.part(0)[:] = 1
    assert not other.part(0).any()
    with pytest.raises(ConfigError, match="allowed: a name that no other engine has; one is starting"):
        attach(1, "one")
    with pytest.raises(ConfigError, match="of another shape"):
        attach(2, "one", num_parts=1)
    with pytest.raises(ConfigError, match="pipeline stages"):
        attach(2, "one", part_bytes=6001)


def test_what_cannot_be_had_is_refused_at_once(attach: Callable[..., SharedPool], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="which one block takes"):
        attach(1, capacity_bytes=1)
    with pytest.raises(ConfigError, match="--shm-size"):
        attach(1, capacity_bytes=2**60)
    assert not pools_in(tmp_path)


@pytest.mark.parametrize("how", ["killed", "left"])
def test_what_a_dead_engine_leaves_is_removed(
    attach: Callable[..., SharedPool], tmp_path: Path, how: str
) -> None:
    code = f"""
        import os, signal, sys
        from pathlib import Path
        from kvoffload.integrations.vllm.pool import SharedPool
        pool = SharedPool.attach("dead", member=1, num_members=2, num_parts=1, part_bytes=100,
                                 capacity_bytes=10000, directory=Path({str(tmp_path)!r}))
        if {how!r} == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        print("up", flush=True)
        sys.stdin.read()
    """
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert child.stdin is not None
    assert child.stdout is not None
    if how == "killed":
        assert child.wait() == -signal.SIGKILL
        assert len(pools_in(tmp_path)) == 1, "the test must leave something"
        pool = attach(1)
        assert [file.name.split("-")[-1] for file in pools_in(tmp_path)] == [str(os.getpid())]
    else:
        assert child.stdout.readline() == b"up\n"
        pool = attach(1)
        assert len(pools_in(tmp_path)) == 2, "that of a living engine stays"
        child.stdin.close()
        assert child.wait() == 0
    pool.close()
    child.stdin.close()
    child.stdout.close()


def test_nobody_else_can_keep_an_engine_from_starting(
    attach: Callable[..., SharedPool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any user may lock a directory like /dev/shm, which is no harm, or take a name there, which is said."""
    holder = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(holder, fcntl.LOCK_EX)
    attach(1).close()
    os.close(holder)
    (lock,) = tmp_path.glob(".kvoffload-*.lock")
    assert lock.stat().st_mode & 0o777 == 0o600
    lock.unlink()
    precious = tmp_path / "precious"
    precious.write_text("data")
    lock.symlink_to(precious)
    with pytest.raises(ConfigError, match=f"ram: '{lock}'.*symbolic links"):
        attach(1)
    lock.unlink()
    lock.write_text("")
    somebody_else = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: somebody_else)
    lock.rename(tmp_path / f".kvoffload-{os.geteuid()}.lock")
    with pytest.raises(ConfigError, match=r"another user .* has made it"):
        attach(1)
    assert precious.read_text() == "data"


def test_other_engines_do_not_wait_until_a_large_pool_has_its_memory(
    attach: Callable[..., SharedPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on, allocate = threading.Event(), threading.Event(), os.posix_fallocate

    def slow(fd: int, start: int, num_bytes: int) -> None:
        if threading.current_thread() is large:
            begun.set()
            go_on.wait(HANGS_S)
        allocate(fd, start, num_bytes)

    monkeypatch.setattr(os, "posix_fallocate", slow)
    large = threading.Thread(target=lambda: attach(1, "large").close())
    large.start()
    assert begun.wait(HANGS_S)
    attach(1, "small").close()
    go_on.set()
    large.join(HANGS_S)


def test_memory_that_is_gone_when_it_is_taken_is_said(
    attach: Callable[..., SharedPool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, start: int, num_bytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ConfigError, match=r"ram: .*No space left"):
        attach(1)
    assert not pools_in(tmp_path)


def test_shared_memory_is_where_it_should_be() -> None:
    assert SHARED_MEMORY.is_dir()
    found = [file.name for file in SHARED_MEMORY.glob("kvoffload-*")]
    left = [name for name in found if not Path(f"/proc/{name.split('-')[-1]}").exists()]
    assert not left, "by another test; those of engines that run are theirs"


def test_a_verifier_is_closed_when_the_check_under_way_has_ended() -> None:
    begun, may_end = threading.Event(), threading.Event()

    class Slow:
        def verify(self, slots: Any, digests: Any) -> Any:
            begun.set()
            may_end.wait(HANGS_S)
            return np.array([True])

    manager = make("lru", 4)
    store(manager, "a")
    pool: Any = Slow()
    verifier = Verifier(manager, pool, lambda key: None)
    ctx = manager.begin_request("r", keys("a"))
    assert verifier.lookup(b"a", Checks(), ctx) is LookupResult.RETRY
    assert begun.wait(HANGS_S)
    closing = threading.Thread(target=verifier.close)
    closing.start()
    closing.join(0.05)
    assert closing.is_alive(), "what it reads is unmapped next"
    may_end.set()
    closing.join(HANGS_S)
    assert not closing.is_alive()
