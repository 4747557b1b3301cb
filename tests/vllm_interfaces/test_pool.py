"""The pool of an engine's processes: discovery, refusals, and removal."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvoffload.core.plans import LookupResult
from kvoffload.errors import ConfigError, UnavailableError
from kvoffload.integrations.vllm.scheduler_side.verification import Checks, Verifier
from kvoffload.integrations.vllm.shared import first_touch
from kvoffload.integrations.vllm.shared.pool import DIFFERENT, EQUAL, FINDING, SharedPool, promised_bytes
from kvoffload.node.pool_directory import SHARED_MEMORY, SLOTS, PoolDirectory, locked
from kvoffload.structures.keys import Keys
from support.letters import keys, make, store
from support.timeouts import HANGS_S


@pytest.fixture
def attach(tmp_path: Path) -> Callable[..., SharedPool]:
    """A function that attaches a member of an engine with two workers."""

    def attach_member(
        member: int, engine: str = "e", node_pool: PoolDirectory | None = None, **changes: Any
    ) -> SharedPool:
        sizes = {"num_parts": 2, "part_bytes": 6000, "capacity_bytes": 10 * 12288}
        if node_pool is not None:
            return SharedPool.attach_shared(node_pool, member=member, **sizes)
        settings = {"num_members": 3, **sizes, "directory": tmp_path, **changes}
        return SharedPool.attach(engine, member=member, **settings)

    return attach_member


def member_of(root: Path, engine: str) -> PoolDirectory:
    return PoolDirectory.join({"test": 1}, engine, keep_s=60.0, root=root, has_keeper=False)


def pools_in(directory: Path) -> list[Path]:
    return list(directory.glob("kvoffload-*"))


def test_members_share_slots_and_the_last_member_removes_the_name(
    attach: Callable[..., SharedPool], tmp_path: Path
) -> None:
    first, second = attach(1), attach(2, part_bytes=5000)
    (file,) = pools_in(tmp_path)
    assert file.stat().st_mode & 0o777 == 0o600
    assert str(os.getpid()) in file.name
    scheduler = attach(0, part_bytes=99999)
    assert not pools_in(tmp_path), "the name is removed once all members have attached"
    assert (scheduler.num_slots, scheduler.part_bytes, scheduler.num_parts) == (10, 6000, 2)
    first.part(0)[3] = 7
    second.part(1)[3] = 9
    assert scheduler.part(0)[3].tolist() == [7] * 6000
    assert scheduler.part(1)[3].tolist() == [9] * 6000
    for pool in (first, second, scheduler):
        pool.close()
        pool.close()


def test_each_failure_is_taken_once(attach: Callable[..., SharedPool]) -> None:
    first, second, scheduler = attach(1), attach(2), attach(0)
    slots = np.array([3, 5, 6], np.int32)
    assert scheduler.take_failed(slots) is None
    first.fail(0, slots[:1])
    second.fail(1, slots[:2])

    class Late:
        """Marks of failures; a worker adds another mark as soon as the scheduler has read them."""

        def __init__(self, marks: Any) -> None:
            self.marks = marks

        def __getitem__(self, at: Any) -> Any:
            marks = self.marks[at].copy()
            first.fail(0, slots[2:])
            return marks

        def __setitem__(self, at: Any, value: int) -> None:
            self.marks[at] = value

    ledger: Any = Late(scheduler.failed)
    scheduler.failed, marks = ledger, scheduler.failed
    assert scheduler.take_failed(slots).tolist() == [True, True, False]
    scheduler.failed = marks
    assert scheduler.take_failed(slots).tolist() == [False, False, True]
    assert scheduler.take_failed(slots).tolist() == [False] * 3


def test_checksums_cover_all_parts_and_the_key(attach: Callable[..., SharedPool]) -> None:
    first, second, scheduler = attach(1), attach(2), attach(0)
    slots, digests = np.array([2, 5], np.int32), Keys.pack([b"a" * 8, b"b" * 8], 8).digests
    first.part(0)[:] = 1
    second.part(1)[:] = 2
    first.seal(0, slots, digests)
    assert scheduler.verify(slots, digests).tolist() == [False, False], "one part is missing"
    second.seal(1, slots, digests)
    assert scheduler.verify(slots, digests).tolist() == [True, True]
    assert scheduler.verify(slots[::-1].copy(), digests).tolist() == [False, False], "digests of other keys"
    second.part(1)[5, 5999] ^= 1
    assert scheduler.verify(slots, digests).tolist() == [True, False]


def test_two_engines_do_not_share(attach: Callable[..., SharedPool]) -> None:
    pool, other = attach(1, "one"), attach(1, "other")
    pool.part(0)[:] = 1
    assert not other.part(0).any()
    with pytest.raises(
        ConfigError, match="another engine with this id is starting; allowed: a different id for each engine"
    ):
        attach(1, "one")
    with pytest.raises(ConfigError, match="more or fewer workers"):
        attach(2, "one", num_parts=1)
    with pytest.raises(ConfigError, match="pipeline stages"):
        attach(2, "one", part_bytes=6001)


def test_a_pool_without_memory_is_refused_at_once(attach: Callable[..., SharedPool], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the size of a block"):
        attach(1, capacity_bytes=1)
    with pytest.raises(ConfigError, match="--shm-size"):
        attach(1, capacity_bytes=2**60)
    assert not pools_in(tmp_path)


@pytest.mark.parametrize("how", ["killed", "ended"])
def test_the_pool_of_a_dead_engine_is_removed(
    attach: Callable[..., SharedPool], tmp_path: Path, how: str
) -> None:
    code = f"""
        import os, signal, sys
        from pathlib import Path
        from kvoffload.integrations.vllm.shared.pool import SharedPool
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
        assert len(pools_in(tmp_path)) == 1, "the dead engine must leave its pool"
        pool = attach(1)
        assert [file.name.split("-")[-1] for file in pools_in(tmp_path)] == [str(os.getpid())]
    else:
        assert child.stdout.readline() == b"up\n"
        pool = attach(1)
        assert len(pools_in(tmp_path)) == 2, "the pool of a living engine remains"
        child.stdin.close()
        assert child.wait() == 0
    pool.close()
    child.stdin.close()
    child.stdout.close()


def test_another_user_cannot_prevent_the_start_of_an_engine(
    attach: Callable[..., SharedPool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user's lock on /dev/shm has no effect; another user's file with our name is reported."""
    holder = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(holder, fcntl.LOCK_EX)
    attach(1).close()
    os.close(holder)
    assert list(tmp_path.glob(".kvoffload*")) == [], "no lock is left behind"
    lock = tmp_path / f".kvoffload-node-{os.geteuid()}.lock"
    precious = tmp_path / "precious"
    precious.write_text("data")
    lock.symlink_to(precious)
    with pytest.raises(ConfigError, match=f"ram: '{lock}'.*symbolic links"):
        attach(1)
    lock.unlink()
    lock.write_text("")
    somebody_else = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: somebody_else)
    lock.rename(tmp_path / f".kvoffload-node-{os.geteuid()}.lock")
    with pytest.raises(ConfigError, match=r"user .* has created this file"):
        attach(1)
    assert precious.read_text() == "data"


def test_a_lock_whose_file_was_removed_is_taken_again(tmp_path: Path) -> None:
    """Two engines start at once: the second waits for a lock file that the first removes."""
    order, waiting = list[str](), threading.Event()

    def second() -> None:
        waiting.set()
        with locked(tmp_path):
            order.append("second")
            (lock,) = tmp_path.iterdir()
            assert lock.stat().st_nlink == 1

    with locked(tmp_path):
        (path,) = tmp_path.iterdir()
        waits_for = os.open(path, os.O_RDWR)
        thread = threading.Thread(target=second)
        thread.start()
        assert waiting.wait(HANGS_S)
        order.append("first")
    # A lock on the removed file is worthless: the name belongs to another file, or to none.
    fcntl.flock(waits_for, fcntl.LOCK_EX)
    assert not path.exists() or not os.path.samestat(os.fstat(waits_for), path.lstat())
    os.close(waits_for)
    thread.join(HANGS_S)
    assert order == ["first", "second"]
    assert list(tmp_path.iterdir()) == []


LOCKERS = """
import sys
from pathlib import Path
from kvoffload.node.pool_directory import locked
directory, inside = Path(sys.argv[1]), Path(sys.argv[2])
for _ in range(100):
    with locked(directory):
        inside.mkdir()
        inside.rmdir()
"""


def test_only_one_of_many_processes_has_the_lock(tmp_path: Path) -> None:
    directory = tmp_path / "shm"
    directory.mkdir()
    command = [sys.executable, "-c", LOCKERS, str(directory), str(tmp_path / "inside")]
    children = [subprocess.Popen(command) for _ in range(3)]
    assert [child.wait(HANGS_S) for child in children] == [0, 0, 0]
    assert list(directory.iterdir()) == []


@pytest.fixture
def shared_memory() -> Iterator[Path]:
    """A new directory in shared memory, where the kernel reports the allocated pages of a file."""
    directory = Path(tempfile.mkdtemp(prefix="of-a-test-", dir=SHARED_MEMORY))
    yield directory
    shutil.rmtree(directory)


PAGE = os.sysconf("SC_PAGE_SIZE")


def taken(pool: SharedPool, directory: Path) -> list[list[int]]:
    """Return, for each page of a slot, the slots in which the kernel has allocated the page."""
    (file,) = pools_in(directory)
    fd = os.open(file, os.O_RDONLY)

    def is_there(at: int) -> bool:
        try:
            return os.lseek(fd, at, os.SEEK_DATA) == at
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            return False

    first = os.fstat(fd).st_size - pool.num_slots * pool.slot_stride
    assert all(is_there(at) for at in range(0, first, PAGE)), "header and ledger"
    slots_of_pages = [
        [slot for slot in range(pool.num_slots) if is_there(first + slot * pool.slot_stride + page)]
        for page in range(0, pool.slot_stride, PAGE)
    ]
    os.close(fd)
    return slots_of_pages


ALL, NONE = [*range(10)], list[int]()


def test_each_worker_takes_the_memory_of_its_own_part(
    attach: Callable[..., SharedPool], shared_memory: Path
) -> None:
    """This puts the memory on the NUMA node of the worker."""
    sizes = {"part_bytes": 2 * PAGE, "capacity_bytes": 40 * PAGE, "directory": shared_memory}
    scheduler = attach(0, **sizes)
    assert taken(scheduler, shared_memory) == [NONE] * 4
    second = attach(2, **sizes)
    assert taken(second, shared_memory) == [NONE, NONE, ALL, ALL]
    second.part(1)[:] = 7
    first = attach(1, **sizes)
    assert scheduler.part(1).all(), "written memory is not allocated again"
    for pool in (scheduler, first, second):
        pool.close()


def test_parts_that_end_within_a_page_are_taken_whole(
    attach: Callable[..., SharedPool], shared_memory: Path
) -> None:
    sizes = {"part_bytes": PAGE + PAGE // 2, "capacity_bytes": 30 * PAGE, "directory": shared_memory}
    second = attach(2, **sizes)
    assert taken(second, shared_memory) == [NONE, ALL, ALL]
    first = attach(1, **sizes)
    assert taken(first, shared_memory) == [ALL] * 3
    for pool in (first, second):
        pool.close()


def test_workers_that_share_a_part_take_a_share_of_the_slots_each(
    attach: Callable[..., SharedPool], shared_memory: Path
) -> None:
    sizes = {"part_bytes": PAGE, "num_parts": 1, "num_members": 4, "directory": shared_memory}
    sizes["capacity_bytes"] = 10 * PAGE
    second = attach(2, **sizes)
    assert taken(second, shared_memory) == [[3, 4, 5]]
    third, first = attach(3, **sizes), attach(1, **sizes)
    assert taken(first, shared_memory) == [ALL]
    for pool in (first, second, third):
        pool.close()


def test_a_kernel_that_cannot_touch_pages_for_us_reserves_them(
    attach: Callable[..., SharedPool], shared_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_touch, "advise", lambda address, num_bytes, advice: errno.EINVAL)
    pool = attach(1, num_members=3, num_parts=1, part_bytes=PAGE, directory=shared_memory)
    (file,) = pools_in(shared_memory)
    # Half of the slots, and one page each of header and ledger.
    assert file.stat().st_blocks * 512 == (pool.num_slots // 2 + 2) * PAGE
    pool.close()


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, threading.Event]]:
    """Make the thread ``slow`` report the beginning of its allocation, and wait for permission."""
    begun, go_on, take = threading.Event(), threading.Event(), first_touch.take

    def wait_and_take(*args: Any) -> None:
        if threading.current_thread().name == "slow":
            begun.set()
            assert go_on.wait(HANGS_S)
        take(*args)

    monkeypatch.setattr(first_touch, "take", wait_and_take)
    yield begun, go_on
    go_on.set()


def test_other_engines_do_not_wait_until_a_large_pool_has_its_memory(
    attach: Callable[..., SharedPool], slow: tuple[threading.Event, threading.Event]
) -> None:
    begun, go_on = slow
    large = threading.Thread(target=lambda: attach(1, "large").close(), name="slow")
    large.start()
    assert begun.wait(HANGS_S)
    attach(1, "small").close()
    go_on.set()
    large.join(HANGS_S)


def test_a_pool_keeps_its_name_and_workers_wait_until_all_have_their_memory(
    attach: Callable[..., SharedPool], tmp_path: Path, slow: tuple[threading.Event, threading.Event]
) -> None:
    begun, go_on = slow
    pools = [attach(1), attach(0)]
    last = threading.Thread(target=lambda: pools.append(attach(2)), name="slow")
    last.start()
    assert begun.wait(HANGS_S)
    assert pools_in(tmp_path), "if the engine is killed now, the next engine must find the pool"
    assert not pools[0].wait_for_workers(0.0)
    go_on.set()
    assert pools[0].wait_for_workers(HANGS_S)
    last.join(HANGS_S)
    assert not pools_in(tmp_path)
    for pool in pools:
        pool.close()


def test_memory_that_runs_out_during_the_allocation_is_reported(
    attach: Callable[..., SharedPool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, take = attach(1), first_touch.take

    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(first_touch, "take", full)
    with pytest.raises(ConfigError, match=r"ram: .*No space left"):
        attach(2)
    assert not pools_in(tmp_path)
    with pytest.raises(ConfigError, match="another worker could not allocate its part of the pool"):
        first.wait_for_workers(HANGS_S)
    first.close()
    monkeypatch.setattr(first_touch, "take", take)
    attach(1).close()


def test_memory_that_another_engine_is_about_to_take_is_not_promised_again(
    attach: Callable[..., SharedPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first engine fits, but only half of its workers have allocated their memory."""
    monkeypatch.setattr("kvoffload.integrations.vllm.shared.pool.available_bytes", lambda: 15 * 12288)
    pool = attach(1, "one", part_bytes=4096, capacity_bytes=10 * 8192)
    monkeypatch.setattr(
        "kvoffload.integrations.vllm.shared.pool.available_bytes", lambda: 15 * 12288 - 5 * 8192
    )
    with pytest.raises(ConfigError, match="of free memory"):
        attach(1, "other", capacity_bytes=10 * 12288)
    attach(2, "one", part_bytes=4096)
    attach(0, "one", part_bytes=4096)
    monkeypatch.setattr("kvoffload.integrations.vllm.shared.pool.available_bytes", lambda: 10 * 12288 + 8192)
    attach(1, "other", capacity_bytes=10 * 12288).close()
    pool.close()


SMALL_MEMORY = """
    import sys
    from pathlib import Path
    from kvoffload.errors import ConfigError
    from kvoffload.integrations.vllm.shared.pool import SharedPool

    directory = Path(sys.argv[1])
    mib = 2**20
    def attach(engine, member, capacity_bytes):
        return SharedPool.attach(engine, member=member, num_members=3, num_parts=2, part_bytes=mib // 2,
                                 capacity_bytes=capacity_bytes, directory=directory)

    running = [attach("running", member, 4 * mib) for member in (1, 2, 0)]
    for part in (0, 1):
        running[1 + part].part(part)[:] = 7
    # Another file takes the memory after this engine has checked the free memory and before it allocates.
    first = attach("unlucky", 1, 8 * mib)
    (directory / "other").write_bytes(bytes(6 * mib))
    try:
        attach("unlucky", 2, 8 * mib)
    except ConfigError as error:
        print("refused:", error)
    assert all((pool.slots == 7).all() for pool in running)
    running[0].part(0)[:] = 9
    first.part(0)[:] = 1
    first.close()
    print("left:", sorted(path.name for path in directory.iterdir() if not path.name.startswith(".")))
"""


def test_full_shared_memory_is_reported_and_kills_no_process(tmp_path: Path) -> None:
    """Uses a small file system in memory, where touching a missing page kills the process."""
    child = [sys.executable, "-c", textwrap.dedent(SMALL_MEMORY), str(tmp_path)]
    script = 'mount -t tmpfs -o size=16m none "$0" && exec "$@"'
    inside = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    may = subprocess.run([*inside, 'mount -t tmpfs none "$0"', str(tmp_path)], capture_output=True, text=True)
    if may.returncode:
        pytest.skip(f"this user may not mount in a namespace of its own: {may.stderr.strip()}")
    done = subprocess.run(
        [*inside, script, str(tmp_path), *child],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"refused: ram: .*No space left", done.stdout), done.stdout
    assert "left: ['other']" in done.stdout


@pytest.mark.parametrize("moment", ["ftruncate", "pwrite"])
@pytest.mark.parametrize("is_shared", [False, True])
def test_a_kill_during_the_creation_leaves_no_unusable_file(
    attach: Callable[..., SharedPool], tmp_path: Path, moment: str, is_shared: bool
) -> None:
    node_pool = member_of(tmp_path, "e") if is_shared else None
    if (child := os.fork()) == 0:
        setattr(os, moment, lambda *args: os.kill(os.getpid(), signal.SIGKILL))
        attach(1, node_pool=node_pool)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    attach(1, node_pool=node_pool).close()
    if node_pool is not None:
        node_pool.close()
    assert not list(tmp_path.glob("**/*.new"))


def test_engines_that_audit_one_slot_keep_their_findings(
    attach: Callable[..., SharedPool], tmp_path: Path
) -> None:
    """Both engines pin the slot, and both workers report before a scheduler reads."""
    slots = np.array([3], np.int32)
    members = [member_of(tmp_path, name) for name in ("one", "two")]
    pools = [[attach(member, node_pool=engine) for member in (0, 1)] for engine in members]
    for (_, worker), result in zip(pools, (DIFFERENT, EQUAL), strict=True):
        worker.findings[:, slots] = np.array((result, 0, 0, 0.5), FINDING)
    assert [int(scheduler.take_findings(slots)["result"][0]) for scheduler, _ in pools] == [DIFFERENT, EQUAL]
    assert [int(scheduler.take_findings(slots)["result"][0]) for scheduler, _ in pools] == [0, 0]
    pools[0][1].findings[:, slots] = np.array((DIFFERENT, 0, 0, 0.5), FINDING)
    successor = attach(0, node_pool=members[0])
    assert int(successor.take_findings(slots)["result"][0]) == 0, "a killed engine has left its findings"
    successor.close()
    for pool in (pool for engine in pools for pool in engine):
        pool.close()
    for engine in members:
        engine.close()


def test_a_stopped_process_does_not_stop_the_start_of_other_engines(
    attach: Callable[..., SharedPool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the start waited without a limit for the process that allocates the memory."""
    monkeypatch.setattr("kvoffload.integrations.vllm.shared.pool.ALLOCATION_S", 0.0)
    first, second = (member_of(tmp_path, name) for name in ("one", "two"))
    attach(0, node_pool=first).close()
    slots = first.path / SLOTS
    if (child := os.fork()) == 0:
        fcntl.flock(os.open(slots, os.O_RDWR), fcntl.LOCK_EX)
        os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(0)
    assert os.WIFSTOPPED(os.waitpid(child, os.WUNTRACED)[1])
    try:
        with pytest.raises(UnavailableError) as error:
            attach(0, node_pool=second)
    finally:
        os.kill(child, signal.SIGCONT)
        assert os.waitpid(child, 0)[1] == 0
    assert str(error.value) == (
        f"ram: '{slots}' cannot be used now: process {child}, which is stopped (continue: kill -CONT "
        f"{child}; end: kill -KILL {child}), has held the lock of this file for too long"
    )
    attach(0, node_pool=second).close()
    for member in (first, second):
        member.close()


def test_no_pool_remains_in_shared_memory() -> None:
    assert SHARED_MEMORY.is_dir()
    names = [file.name for file in SHARED_MEMORY.glob("kvoffload-*") if "-test-" not in file.name]
    abandoned = [name for name in names if not Path(f"/proc/{name.split('-')[-1]}").exists()]
    assert not abandoned, "another test has left pools; pools of running engines do not count"


def test_closing_a_verifier_waits_for_the_running_check() -> None:
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
    assert closing.is_alive(), "close must wait, because it unmaps the memory that the check reads"
    may_end.set()
    closing.join(HANGS_S)
    assert not closing.is_alive()


def test_checks_pin_half_of_the_slots_in_use() -> None:
    class Sound:
        def verify(self, slots: Any, digests: Any) -> Any:
            return np.array([True])

    manager = make("lru", 8)
    manager.begin_resize(4)
    assert not manager.advance_resize()
    store(manager, "abcd")
    pool: Any = Sound()
    verifier, checks, ctx = Verifier(manager, pool, lambda key: None), Checks(), manager.begin_request("r")
    answers = [verifier.lookup(key, checks, ctx) for key in keys("abcd")]
    verifier.close()
    assert [answer is LookupResult.MISS for answer in answers] == [False, False, True, True]


def test_a_file_of_another_user_reserves_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "kvoffload-dead-1"
    with path.open("wb") as file:
        file.truncate(10 * 2**40)
    assert promised_bytes(tmp_path) == 10 * 2**40
    monkeypatch.setattr("os.geteuid", lambda: path.stat().st_uid + 1)
    assert promised_bytes(tmp_path) == 0
