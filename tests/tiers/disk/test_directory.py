"""Directories with several producers, failing media, forks, links and wrong clocks."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from kvoffload.errors import MisuseError, UnavailableError
from kvoffload.tiers.disk import lock
from kvoffload.tiers.disk import slab_directory as directories
from kvoffload.tiers.disk.files import PAGE_BYTES
from kvoffload.tiers.disk.inspection import compact, opened, verify
from kvoffload.tiers.disk.lock import LOCK_NAME, DirectoryLock
from kvoffload.tiers.disk.slab_directory import slabs_in
from kvoffload.tiers.disk.slab_layout import Layout
from kvoffload.tiers.rate_limited_log import RateLimitedLog
from kvoffload.tiers.write_budget import WriteBudget
from support.disk_blocks import Disk, Driver, capacity_for, keys_of, slab_in
from support.recording_files import FailingFiles, raises, works
from support.refusals import refusal
from support.timeouts import HANGS_S, killed_if_it_hangs

NUM_BLOCKS = 60
CAPACITY = capacity_for(NUM_BLOCKS, 4096)
LAYOUT = Layout.holding(4096, 12, NUM_BLOCKS)
NUMBERS = list(range(10))


def opened_by(directory: Path, producer: str = "model", **options: object) -> Disk:
    return Disk(directory, NUM_BLOCKS, fingerprint=producer, **options)


def used_bytes(directory: Path) -> int:
    """Return the lengths of all files, without the file system's own metadata."""
    return sum(path.stat().st_size for path in directory.iterdir())


# ---- one slab for each producer


def test_producers_that_take_turns_find_their_blocks_again(tmp_path: Path) -> None:
    for turn in range(4):
        for number, producer in enumerate(["llama", "mistral"]):
            disk = opened_by(tmp_path, producer)
            numbers = list(range(10 * number, 10 * number + 5))
            disk.versions = dict.fromkeys(numbers, 0)
            assert disk.read(numbers) == (numbers if turn else [])
            assert disk.write(numbers) == ([] if turn else numbers)
            assert used_bytes(tmp_path) <= CAPACITY
            disk.tier.close()
    assert len(slabs_in(tmp_path)) == 2


def on_the_medium(directory: Path) -> int:
    """Return the bytes in use on the file system, including deleted open files."""
    status = os.statvfs(directory)
    return (status.f_blocks - status.f_bfree) * status.f_frsize


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A separate file system with little more space than the capacity."""
    mount = ["mount", "-t", "tmpfs", "-o", f"size={CAPACITY + 64 * 1024},mode=0700", "tmpfs", str(tmp_path)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only root can mount a tmpfs")
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_the_space_of_an_unusable_slab_is_free_at_once(small_disk: Path) -> None:
    disk = opened_by(small_disk)
    disk.write(NUMBERS)
    disk.tier.close()
    with slab_in(small_disk).open("r+b") as file:
        file.write(bytes(2 * PAGE_BYTES))
    disk = opened_by(small_disk)
    assert disk.write(NUMBERS) == NUMBERS
    assert on_the_medium(small_disk) <= CAPACITY
    disk.tier.close()


def test_a_full_slab_loses_only_as_many_blocks_as_another_producer_needs(tmp_path: Path) -> None:
    """Blocks are spread over the whole slab, so that no end can be cut off."""
    disk = opened_by(tmp_path)
    for number in range(3 * NUM_BLOCKS):
        disk.write([number])
    here = disk.here(range(3 * NUM_BLOCKS))
    assert len(here) == NUM_BLOCKS
    disk.tier.close()
    opened_by(tmp_path, "a look with another model").tier.close()
    again = opened_by(tmp_path)
    again.versions = dict.fromkeys(here, 0)
    kept = again.read(here)
    assert NUM_BLOCKS // 3 < len(kept) < 2 * NUM_BLOCKS // 3
    assert again.wrong == again.tier.stats().mismatches == 0
    assert again.write(list(range(1000, 1020))) == list(range(1000, 1020))
    again.tier.close()
    with opened(tmp_path / name_of("model")) as (slab, recovered):
        assert verify(slab, recovered) == []


def test_a_reset_reaches_the_slabs_of_others(tmp_path: Path) -> None:
    """After a reset by the new version, a rolled-back old version has no old blocks."""
    disk = opened_by(tmp_path, "version 1")
    disk.write(NUMBERS)
    disk.tier.close()
    disk = opened_by(tmp_path, "version 2")
    disk.tier.clear()
    assert disk.tier.drain(HANGS_S)
    disk.tier.close()
    assert opened_by(tmp_path, "version 1").here(NUMBERS) == []


def test_a_reset_does_not_delete_a_slab_that_is_shrinking(tmp_path: Path) -> None:
    """A writer thread shrinks the other slab while the committer would delete it."""
    disk = opened_by(tmp_path, "other")
    disk.write([1])
    disk.tier.close()
    disk = opened_by(tmp_path)
    with disk.slab._growing:
        disk.tier.clear()
        assert not disk.tier.drain(0.2)
        assert len(slabs_in(tmp_path)) == 2
    assert disk.tier.drain(HANGS_S)
    assert len(slabs_in(tmp_path)) == 1
    disk.tier.close()


def test_a_full_disk_costs_no_other_producer_its_blocks(small_disk: Path) -> None:
    """On a full disk slabs do not grow to the capacity, but keep their blocks and work."""
    for producer in ("first", "second"):
        disk = opened_by(small_disk, producer)
        disk.write(NUMBERS)
        disk.tier.close()
    free = os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize
    with (small_disk / "filler").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, free - 2 * PAGE_BYTES)
    for producer in ("first", "second", "first"):
        disk = opened_by(small_disk, producer)
        disk.versions = dict.fromkeys(NUMBERS, 0)
        assert disk.read(NUMBERS) == NUMBERS
        disk.tier.delete(keys_of([1, 2]))
        disk.tier.drain(HANGS_S)
        assert len(disk.write([1, 2])) == 2
        disk.tier.close()


def test_a_producer_whose_slab_cannot_be_read_now_loses_nothing_to_another(tmp_path: Path) -> None:
    disk = opened_by(tmp_path, "first")
    disk.write(NUMBERS)
    disk.tier.close()
    files = FailingFiles()
    files.fail = metadata(LOG)
    with pytest.raises(
        UnavailableError, match=f"{name_of('first')} cannot be read .* if this persists, delete it"
    ):
        opened_by(tmp_path, "second", files=files)
    assert opened_by(tmp_path, "first").here(NUMBERS) == NUMBERS


def test_a_slab_grows_into_the_room_of_the_others_the_oldest_first(tmp_path: Path) -> None:
    for number, producer in enumerate(["first", "second", "third"]):
        disk = opened_by(tmp_path, producer)
        disk.write([number])
        disk.tier.close()
    disk = opened_by(tmp_path, "third")
    names = {path.name for path in slabs_in(tmp_path)}
    deleted = []
    for number in range(100, 100 + NUM_BLOCKS - 1):
        assert disk.write([number]) == [number]
        assert used_bytes(tmp_path) <= CAPACITY
        remaining = {path.name for path in slabs_in(tmp_path)}
        deleted += sorted(names - remaining)
        names = remaining
    assert disk.tier.stats().ready == NUM_BLOCKS, "the slab finally has the whole capacity"
    assert disk.tier.stats().failed == 0
    disk.tier.close()
    assert deleted == [name_of("first"), name_of("second")]
    assert opened_by(tmp_path, "third").tier.stats().restored == NUM_BLOCKS


def name_of(producer: str) -> str:
    return directories.Geometry(LAYOUT, CAPACITY, producer).slab_name


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_any_order_of_producers_and_capacities_keeps_the_bound(tmp_path: Path, seed: int) -> None:
    """Recovered blocks have the last version; a smaller capacity takes effect at the opening."""
    chance, written, found_again = random.Random(seed), dict[str, dict[int, int]](), 0
    for step in range(40):
        producer = chance.choice("abcd")
        num_blocks = 30 if producer == "d" else NUM_BLOCKS
        disk = Disk(tmp_path, num_blocks, fingerprint=producer, policy="fifo")
        disk.versions = written.setdefault(producer, {})
        known = list(range(20))
        # Other producers may have taken half of its blocks, or all.
        read = disk.read(known)
        assert len(read) == disk.tier.stats().restored, f"seed {seed}, step {step}"
        assert set(read) <= set(disk.versions)
        for lost in set(disk.versions) - set(read):
            del disk.versions[lost]
        found_again += len(read)
        for _ in range(chance.randrange(4)):
            numbers = chance.sample(known, 4)
            disk.tier.delete(keys_of(numbers))
            disk.tier.drain(HANGS_S)
            assert disk.write(numbers, version=step) == numbers
        assert (disk.wrong, disk.tier.stats().failed) == (0, 0)
        assert used_bytes(tmp_path) <= capacity_for(num_blocks, 4096), f"seed {seed}, step {step}"
        disk.tier.close()
    assert found_again > 20


def test_another_producer_gets_the_unused_space_of_a_killed_tier(tmp_path: Path) -> None:
    """A killed tier has reserved the capacity; another producer takes the space without blocks."""
    disk = opened_by(tmp_path, "killed")
    assert disk.write(NUMBERS) == NUMBERS
    disk.kill()
    other = opened_by(tmp_path, "other")
    assert other.write([50]) == [50]
    assert used_bytes(tmp_path) <= CAPACITY
    other.tier.close()
    again = opened_by(tmp_path, "killed")
    again.versions = dict.fromkeys(NUMBERS, 0)
    assert again.read(NUMBERS) == NUMBERS
    again.tier.close()


def test_older_slabs_shrink_when_another_program_takes_space(tmp_path: Path) -> None:
    disk = opened_by(tmp_path, "older")
    disk.write([1])
    disk.tier.close()
    files, refused = FailingFiles(), []

    def full_while_the_other_is_there(operation: str, offset: int) -> None:
        if operation == "allocate" and (tmp_path / name_of("older")).exists():
            refused.append(operation)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    files.fail = full_while_the_other_is_there
    disk = opened_by(tmp_path, "newer", files=files)
    assert refused
    assert disk.write([1]) == [1]
    disk.tier.close()
    assert [path.name for path in slabs_in(tmp_path)] == [name_of("newer")]


class ForkingFiles(FailingFiles):
    """Forks a process whenever another producer's slab is opened; the process keeps running."""

    def __init__(self, other: str, children: contextlib.ExitStack) -> None:
        super().__init__()
        self._other, self._children = other, children

    def open(self, path: Path, flags: int) -> int:
        if path.name == self._other:
            self._children.enter_context(a_child_that_lives_on())
        return super().open(path, flags)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_while_another_slab_is_trimmed_does_not_keep_it_locked(tmp_path: Path) -> None:
    disk = opened_by(tmp_path, "first")
    disk.write(NUMBERS)
    disk.tier.close()
    with contextlib.ExitStack() as children:
        opened_by(tmp_path, "second", files=ForkingFiles(name_of("first"), children)).tier.close()
        disk = opened_by(tmp_path, "first")
        assert disk.here(NUMBERS) == NUMBERS
        disk.tier.close()


def test_the_journal_of_another_slab_is_durable_before_it_is_trimmed(tmp_path: Path) -> None:
    """Otherwise a power loss could revive removed entries of blocks behind the new end."""
    disk = opened_by(tmp_path, "killed")
    disk.write(NUMBERS)
    disk.kill()
    files, calls = FailingFiles(), list[str]()
    files.fail = lambda operation, offset: calls.append(operation)
    files.shorten = lambda fd, num_bytes: (calls.append("shorten"), os.ftruncate(fd, num_bytes))[0]  # type: ignore[method-assign, func-returns-value]
    opened_by(tmp_path, "other", files=files).tier.close()
    assert calls[calls.index("shorten") - 1] == "sync"


def test_a_slab_that_cannot_grow_any_more_reads_on(tmp_path: Path) -> None:
    for producer in ("other", "model"):
        disk = opened_by(tmp_path, producer)
        disk.write([1])
        disk.tier.close()
    files = FailingFiles()
    disk = opened_by(tmp_path, files=files)
    disk.versions = {1: 0}
    files.fail = raises(errno.EIO, "allocate")
    last = -1
    for number in range(100, 100 + NUM_BLOCKS):
        if disk.write([number]) != [number]:
            break
        last = number
    assert 100 <= last < 100 + NUM_BLOCKS - 1, "until the other slab would have to shrink"
    assert disk.read([1, last]) == [1, last]
    assert disk.tier.stats().failed == 1
    disk.tier.close()


def test_growth_works_after_another_slab_was_deleted(tmp_path: Path) -> None:
    for producer in ("other", "model"):
        disk = opened_by(tmp_path, producer)
        disk.write([1])
        disk.tier.close()
    disk = opened_by(tmp_path)
    (tmp_path / name_of("other")).unlink()
    numbers = list(range(100, 100 + NUM_BLOCKS - 1))
    for number in numbers:
        assert disk.write([number]) == [number]
    assert disk.tier.stats().ready == NUM_BLOCKS
    disk.tier.close()


# ---- a medium that does not answer for a while


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    disk = opened_by(tmp_path)
    assert disk.write(NUMBERS) == NUMBERS
    disk.tier.close()
    return tmp_path


def metadata(*regions: tuple[int, int]) -> Callable[[str, int], None]:
    """Make reads fail that begin in these regions."""

    def fail(operation: str, offset: int) -> None:
        if operation == "read" and any(first <= offset < end for first, end in regions):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    return fail


LOG = (LAYOUT.log_offset, LAYOUT.slots_offset)
CHECKPOINT = (LAYOUT.checkpoint_offset(0), LAYOUT.checkpoint_offset(1))


@pytest.mark.parametrize("region", [(0, 2 * PAGE_BYTES), LOG, CHECKPOINT], ids=["superblocks", "log", "head"])
def test_a_read_error_at_the_opening_changes_nothing(filled: Path, region: tuple[int, int]) -> None:
    before, files = slab_in(filled).read_bytes(), FailingFiles()
    files.fail = metadata(region)
    with pytest.raises(UnavailableError, match="cannot be used now: its slab cannot be opened"):
        opened_by(filled, files=files)
    assert slab_in(filled).read_bytes() == before
    files.fail = works
    disk = opened_by(filled, files=files)
    disk.versions = dict.fromkeys(NUMBERS, 0)
    assert disk.read(NUMBERS) == NUMBERS
    disk.tier.close()


def test_a_damaged_superblock_beside_an_unreadable_one_loses_nothing(filled: Path) -> None:
    with slab_in(filled).open("r+b") as file:
        file.seek(40)
        file.write(b"damage")
    files = FailingFiles()
    files.fail = metadata((PAGE_BYTES, 2 * PAGE_BYTES))
    with pytest.raises(UnavailableError):
        opened_by(filled, files=files)
    assert opened_by(filled).here(NUMBERS) == NUMBERS


@pytest.mark.parametrize("page", [3, LAYOUT.log_bytes // PAGE_BYTES - 1], ids=["used", "never used"])
def test_compact_repairs_an_unreadable_journal(tmp_path: Path, page: int) -> None:
    """`kvoffload disk compact` keeps the readable blocks. Writing a bad sector makes it readable."""
    disk = opened_by(tmp_path)
    for number in NUMBERS:
        disk.write([number])
    disk.tier.close()
    files, bad = FailingFiles(), {LAYOUT.log_offset + page * PAGE_BYTES}

    def fail(operation: str, offset: int) -> None:
        whole_log = offset == LAYOUT.log_offset and bool(bad)
        if operation == "write":
            # Pages are written one by one, or the whole log at once.
            bad.difference_update([*bad] if offset == LAYOUT.log_offset and compacting else [offset])
        elif operation == "read" and (offset in bad or (whole_log and next(tries) % 2 == 0)):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    tries, compacting = itertools.count(), False
    files.fail = fail
    with pytest.raises(UnavailableError, match=r"1 pages of its journal cannot be read: .* disk compact"):
        opened_by(tmp_path, files=files)
    tries = itertools.count()
    with opened(tmp_path, files) as (slab, recovered):
        compacting = True
        compact(slab, recovered)
    disk = opened_by(tmp_path, files=files)
    disk.versions = dict.fromkeys(NUMBERS, 0)
    assert len(disk.read(NUMBERS)) == (9 if page == 3 else 10)
    assert disk.tier.stats().journal_damage == 0
    disk.tier.close()


def test_an_unreadable_journal_with_a_full_log_is_not_overwritten(tmp_path: Path) -> None:
    files = FailingFiles()
    disk = opened_by(tmp_path, files=files)
    disk.write(NUMBERS)
    files.fail = metadata(LOG)
    for number in range(100, 200):
        if not disk.tier.accepts_writes:
            break
        disk.write([number])
        disk.tier.delete(keys_of([number]))
    assert not disk.tier.accepts_writes, "the journal is broken"
    disk.versions = dict.fromkeys(NUMBERS, 0)
    assert disk.read(NUMBERS) == NUMBERS
    files.fail = works
    disk.tier.close()
    again = opened_by(tmp_path)
    assert again.here(NUMBERS) == NUMBERS
    again.tier.close()


# ---- locks and forks

FORKING = """
import os, sys, time
from pathlib import Path
from support.disk_blocks import Disk
disk = Disk(Path(sys.argv[1]), 60)
disk.write([1])
child = os.fork()
if child == 0:
    time.sleep(600)
print(os.getpid(), child, flush=True)
time.sleep(600)
"""


def test_an_owner_that_is_killed_leaves_no_lock_with_its_children(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])}
    command = [sys.executable, "-c", FORKING, str(tmp_path)]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as owner,
        killed_if_it_hangs(owner),
    ):
        assert owner.stdout is not None
        _, child = map(int, owner.stdout.readline().split())
        owner.kill()
        owner.wait()
        try:
            os.kill(child, 0)
            disk = opened_by(tmp_path)
            assert disk.here([1]) == [1]
            disk.tier.close()
        finally:
            os.kill(child, 9)


def in_a_fork(act: Callable[[], bool]) -> bool:
    """Return the result of `act` in a forked process."""
    child = os.fork()
    if child == 0:
        answer = False
        try:
            answer = act()
        finally:
            os._exit(0 if answer else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@contextlib.contextmanager
def a_child_that_lives_on() -> Iterator[None]:
    """Run a forked process until the end of the context."""
    (read_end, write_end), (ready_read, ready_write) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write_end)
        os.write(ready_write, b"!")
        os.read(read_end, 1)
        os._exit(0)
    os.read(ready_read, 1)
    yield
    for end in (write_end, read_end, ready_read, ready_write):
        os.close(end)
    os.waitpid(child, 0)


def test_a_process_forked_during_the_wait_does_not_hold_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = RateLimitedLog("test")
    first = DirectoryLock(tmp_path, log)
    # As if another process held the lock, since a lock of this process is not waited for.
    monkeypatch.setattr(lock, "_held", {})
    with contextlib.ExitStack() as children:

        def fork_and_let_go(seconds: float) -> None:
            children.enter_context(a_child_that_lives_on())
            first.release()

        second = DirectoryLock(tmp_path, log, sleep=fork_and_let_go)
        # The owner dies: its files are closed, not unlocked.
        while second._fds:
            os.close(second._fds.pop())
        DirectoryLock(tmp_path, log, wait_s=0.0).release()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process_cannot_use_the_tier(tmp_path: Path) -> None:
    disk = opened_by(tmp_path)
    disk.write([1])

    def refused() -> bool:
        try:
            disk.tier.submit_read(keys_of([1]), disk.pool, np.array([1]))
        except MisuseError as error:
            disk.tier.close()
            return "fork" in str(error)
        return False

    assert in_a_fork(refused)
    assert disk.read([1]) == [1], "the parent's tier still works"
    with pytest.raises(UnavailableError, match="has it open"):
        opened_by(tmp_path)
    with a_child_that_lives_on():
        disk.tier.close()
        opened_by(tmp_path).tier.close()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("call", ["drain", "clear", "delete", "finish_request", "finished"])
def test_calls_in_a_forked_process_do_not_block(tmp_path: Path, call: str) -> None:
    disk = opened_by(tmp_path)
    disk.write([1])
    request = disk.tier.begin_request("r")

    def refused() -> bool:
        signal.alarm(round(HANGS_S))
        calls: dict[str, Callable[[], object]] = {
            "drain": lambda: disk.tier.drain(HANGS_S),
            "clear": disk.tier.clear,
            "delete": lambda: disk.tier.delete(keys_of([1])),
            "finish_request": lambda: disk.tier.finish_request(request, keys_of([1])),
            "finished": disk.tier.finished,
        }
        try:
            calls[call]()
        except MisuseError as error:
            disk.tier.close()
            return "fork" in str(error)
        return False

    with disk.committer.lock:
        assert in_a_fork(refused)
    assert disk.read([1]) == [1]
    disk.tier.finish_request(request, keys_of([1]))
    assert disk.tier.delete(keys_of([1])) == 1
    disk.tier.clear()
    assert disk.tier.drain(HANGS_S)
    disk.tier.close()
    assert disk.tier.finished() == [], "only forked processes are refused"
    assert disk.tier.drain(HANGS_S)


def test_the_lock_ends_when_a_hang_does(tmp_path: Path) -> None:
    files, answers, is_called = FailingFiles(), threading.Event(), threading.Event()
    disk = opened_by(tmp_path, files=files)
    disk.tier.close_timeout_s = 0.1

    def hang(operation: str, offset: int) -> None:
        is_called.set()
        answers.wait(HANGS_S)

    files.fail = hang
    disk.tier.submit_write(keys_of([1]), disk.pool, np.array([1]))
    assert is_called.wait(HANGS_S)
    disk.tier.close()
    with pytest.raises(UnavailableError, match="has it open"):
        opened_by(tmp_path)
    answers.set()
    until = time.monotonic() + HANGS_S
    while disk.tier._lock.held:
        assert time.monotonic() < until
        time.sleep(0.01)
    again = opened_by(tmp_path)
    assert again.here([1]) == [1]
    again.tier.close()


def open_files(directory: Path) -> list[str]:
    """Return the files of a directory that this process has open."""
    names = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            names.append(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            continue
    return sorted(name for name in names if name.startswith(str(directory)))


@pytest.mark.parametrize("num_started", [0, 1, 3])
def test_threads_that_cannot_be_started_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_started: int
) -> None:
    start, started = threading.Thread.start, []

    def limited(thread: threading.Thread) -> None:
        if len(started) == num_started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    with pytest.raises(UnavailableError, match="num_threads: 6 cannot be used now"):
        opened_by(tmp_path, num_threads=6)
    monkeypatch.undo()
    assert not any(thread.is_alive() for thread in started)
    assert open_files(tmp_path) == []
    opened_by(tmp_path).tier.close()


@pytest.mark.parametrize(
    "options",
    [
        {"policy": "nonesuch"},
        {"admission": "nonesuch"},
        {"files": "log"},
        {"files": "superblocks"},
        {"files": "sync"},
    ],
    ids=str,
)
def test_an_opening_that_fails_leaves_no_file_open(filled: Path, options: dict[str, object]) -> None:
    files = FailingFiles()
    failures = {"log": metadata(LOG), "superblocks": metadata((0, 8192)), "sync": raises(errno.EIO, "sync")}
    if "files" in options:
        files.fail = failures[str(options["files"])]
        options = {"files": files}
    arguments = {"num_slots": NUM_BLOCKS, **options}
    for _ in range(3):
        with pytest.raises(UnavailableError) if "files" in options else refusal():
            Disk(filled, **arguments)  # type: ignore[arg-type]
    assert open_files(filled) == []
    assert opened_by(filled).here(NUMBERS) == NUMBERS


# ---- other users on the same machine


def test_links_are_not_followed(filled: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    precious = elsewhere / "precious"
    precious.write_text("data")
    (elsewhere / LOCK_NAME).symlink_to(precious)
    with refusal("is a link: delete it"):
        opened_by(elsewhere)
    assert precious.read_text() == "data"
    (elsewhere / LOCK_NAME).unlink()
    (elsewhere / name_of("model")).symlink_to(slab_in(filled))
    with refusal("symbolic link to a file elsewhere"):
        opened_by(elsewhere)
    (elsewhere / name_of("model")).unlink()
    (elsewhere / (name_of("model") + ".new")).symlink_to(precious)
    opened_by(elsewhere).tier.close()
    assert precious.read_text() == "data"


def test_one_slab_under_two_names_has_one_owner(
    filled: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    os.link(slab_in(filled), elsewhere / name_of("model"))
    disk = opened_by(filled)
    with pytest.raises(UnavailableError, match="open under another name"):
        opened_by(elsewhere)
    with pytest.raises(UnavailableError, match="open under another name"), opened(elsewhere):
        pass
    disk.tier.close()
    assert opened_by(elsewhere).here(NUMBERS) == NUMBERS


def test_a_world_writable_directory_is_refused_with_a_remedy(filled: Path) -> None:
    filled.chmod(0o777)
    with refusal(f"chmod o-w {filled}, or use a directory in it"):
        opened_by(filled)
    filled.chmod(0o770)
    slab_in(filled).chmod(0o666)
    with refusal(f"chmod o-w {slab_in(filled)}"):
        opened_by(filled)
    slab_in(filled).chmod(0o600)
    assert opened_by(filled).here(NUMBERS) == NUMBERS


def test_a_directory_of_another_user_is_refused(filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a directory to another user")
    os.chown(filled, 12345, -1)
    monkeypatch.setattr(directories, "os", SimpleNamespace(geteuid=lambda: 54321))
    with refusal("belongs to user 12345, and this is user 54321: chown 54321"):
        directories.check_private(filled)
    monkeypatch.setattr(directories, "os", SimpleNamespace(geteuid=lambda: 12345))
    directories.check_private(filled)
    os.chown(filled, 0, -1)
    directories.check_private(filled)


@pytest.mark.parametrize(
    ("make", "kind"),
    [(os.mkdir, "a directory"), (os.mkfifo, "a named pipe"), (lambda path: bind(path), "a socket")],
    ids=["directory", "pipe", "socket"],
)
@pytest.mark.parametrize("end", ["", ".new"])
def test_a_name_of_a_slab_that_is_not_a_file_is_refused(
    tmp_path: Path, make: Callable[[Path], None], kind: str, end: str
) -> None:
    path = tmp_path / (name_of("model") + end)
    make(path)
    before = path.lstat()
    with refusal(f"{path.name}.* it is {kind} .*move it or delete it"):
        opened_by(tmp_path)
    assert path.lstat().st_ino == before.st_ino
    assert open_files(tmp_path) == []
    other = opened_by(tmp_path, "another model") if not end else None
    if other is not None:
        assert other.write([1]) == [1]
        other.tier.close()


def bind(path: Path) -> None:
    """Create a socket by a relative name, since the absolute path may be too long."""
    with socket.socket(socket.AF_UNIX) as made:
        before = os.getcwd()
        os.chdir(path.parent)
        made.bind(path.name)
        os.chdir(before)


# ---- clocks


@pytest.mark.parametrize(
    "checkpoints", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)]
)
def test_a_reset_is_permanent_although_the_clock_is_set_back(tmp_path: Path, checkpoints: int) -> None:
    """Deleted blocks of old weights stay away if the group with the removals or a checkpoint is damaged."""
    files = FailingFiles(2e9)
    disk = opened_by(tmp_path, files=files)
    disk.write(NUMBERS)
    disk.tier.drain(HANGS_S)
    disk.tier.delete(keys_of(NUMBERS))
    disk.tier.close()
    for _ in range(checkpoints):
        with opened(tmp_path, files) as (slab, recovered):
            compact(slab, recovered)
    files.clock_s = 2e9 - 86400
    disk = opened_by(tmp_path, files=files)
    disk.tier.clear()
    assert disk.tier.drain(HANGS_S)
    floor = disk.slab.void_before
    assert floor > 2e18, "above every generation, although the clock was set back"
    disk.tier.close()
    whole = slab_in(tmp_path).read_bytes()
    for offset in range(LAYOUT.checkpoint_offset(0), LAYOUT.slots_offset, PAGE_BYTES):
        damaged = bytearray(whole)
        damaged[offset + 20] ^= 1
        slab_in(tmp_path).write_bytes(bytes(damaged))
        disk = opened_by(tmp_path, files=files)
        assert disk.here(NUMBERS) == []
        disk.tier.close()


def test_a_clock_before_1970(tmp_path: Path) -> None:
    files = FailingFiles(-1000.0)
    disk = opened_by(tmp_path, files=files)
    assert disk.write(NUMBERS) == NUMBERS
    disk.tier.close()
    disk = opened_by(tmp_path, files=files)
    disk.versions = dict.fromkeys(NUMBERS, 0)
    assert disk.read(NUMBERS) == NUMBERS
    assert disk.write([20]) == [20]
    disk.tier.close()
    with opened(tmp_path) as (slab, recovered):
        assert verify(slab, recovered) == []


def test_blocks_written_in_future_hours_count_in_the_present_hour(tmp_path: Path) -> None:
    files = FailingFiles(3e9)
    disk = opened_by(tmp_path, files=files)
    disk.write(NUMBERS)
    disk.tier.close()
    now_s = 2e9
    for hours in range(3):
        files.clock_s = now_s + hours * 3600
        disk = opened_by(tmp_path, files=files)
        assert disk.tier.written_before == {int(now_s) // 3600: 10}
        disk.tier.close()
        with opened(tmp_path, files) as (slab, recovered):
            compact(slab, recovered)


def test_a_clock_ahead_at_one_start_costs_one_day_of_budgeted_writes(
    tmp_path: Path,
) -> None:
    """Only the first opening after the clock was wrong moves future hours to the present hour."""

    def written(day: float) -> int:
        """Return the number of blocks that a tier may write on this day within its budget."""
        files = FailingFiles(2e9 + day * 86400)
        budget = WriteBudget(20 * PAGE_BYTES, files.time_s)
        driver = Driver(opened_by(tmp_path, files=files, write_budget=budget).tier)
        count = len(driver.write([int(day) * 100 + n for n in range(25)]))
        driver.tier.close()
        return count

    assert written(300) == 20
    assert written(0) == 0, "the blocks may have been written a moment ago"
    assert [written(day) for day in (2, 4, 10, 100, 250, 299)] == [20] * 6
    assert written(299.5) == 0
