"""The keeper keeps a pool after its last process, and removes the pool in time without other processes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvoffload.node import keeper
from kvoffload.node.pool_directory import STATE, PoolDirectory, pools

KEEP_S = 0.4


def join(root: Path, name: str, keep_s: float = KEEP_S) -> PoolDirectory:
    directory = PoolDirectory.join({"test": "keeper"}, name, keep_s=keep_s, root=root)
    (directory.path / STATE).touch()
    return directory


def wait_for(is_so: Callable[[], object]) -> None:
    until = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < until, "not in time"
        time.sleep(0.02)


def keepers(root: Path) -> list[int]:
    """Return the processes whose command line names this directory and the keeper."""
    numbers = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if len(command) > 4 and command[3].endswith(b"keeper.py") and command[4].startswith(bytes(root)):
            numbers.append(int(process.name))
    return numbers


@pytest.fixture(autouse=True)
def _check_that_no_keeper_remains(root: Path) -> Iterator[None]:
    yield
    for pool in pools(root):
        (pool.path / keeper.MEMBERS).unlink()
    wait_for(lambda: not keepers(root))


def killed_member(root: Path, keep_s: float) -> int:
    """Let a process join; return its number, for a kill."""
    ready, child_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            join(root, f"child-{os.getpid()}", keep_s)
            os.write(child_end, b"1")
            while True:
                time.sleep(60)
        finally:
            os._exit(1)
    os.close(child_end)
    assert os.read(ready, 1) == b"1"
    os.close(ready)
    return pid


def test_a_pool_is_removed_after_its_time(root: Path) -> None:
    directory = join(root, "a")
    wait_for(lambda: keepers(root))
    time.sleep(0.6)
    assert directory.path.exists(), "removed while a process uses the pool"
    closed = time.monotonic()
    directory.close()
    assert directory.path.exists() or time.monotonic() - closed >= KEEP_S
    wait_for(lambda: not directory.path.exists())
    assert list(root.iterdir()) == []


def test_a_killed_member_counts_from_its_end(root: Path) -> None:
    """Its last call may be long ago, but the keeper sees that the process runs."""
    pid = killed_member(root, 1.0)
    wait_for(lambda: keepers(root))
    time.sleep(1.2)
    killed = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    time.sleep(0.3)
    is_kept = [pool.is_expired for pool in pools(root)] == [False]
    assert is_kept or time.monotonic() - killed >= 1.0
    wait_for(lambda: not pools(root))


def test_a_member_that_joins_in_time_keeps_the_pool(root: Path) -> None:
    first = join(root, "a")
    closed = time.monotonic()
    first.close()
    second = join(root, "b")
    assert not second.created or time.monotonic() - closed >= KEEP_S
    time.sleep(1.0)
    assert second.path.exists()
    second.close()


def test_a_stopped_process_keeps_the_pool(root: Path) -> None:
    pid = killed_member(root, 0.3)
    os.kill(pid, signal.SIGSTOP)
    time.sleep(1.0)
    assert pools(root)[0].is_used
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    wait_for(lambda: not pools(root))


def test_a_killed_keeper_is_replaced_by_the_next_member(root: Path) -> None:
    first = join(root, "a")
    wait_for(lambda: keepers(root))
    [pid] = keepers(root)
    os.kill(pid, signal.SIGKILL)
    # A process that dies loses its command line before its lock.
    with (first.path / keeper.MEMBERS).open("rb") as file:
        wait_for(lambda: not keeper.is_locked(file.fileno(), keeper.MAX_MEMBERS))
    second = join(root, "b")
    wait_for(lambda: keepers(root))
    first.close()
    second.close()
    wait_for(lambda: not pools(root))


def test_a_second_keeper_ends(root: Path) -> None:
    directory = join(root, "a")
    wait_for(lambda: keepers(root))
    [pid] = keepers(root)
    keeper.keep(str(directory.path), 0.01)
    assert keepers(root) == [pid]
    directory.close()
    wait_for(lambda: not pools(root))


def test_a_keeper_is_small_and_not_a_child(root: Path) -> None:
    directory = join(root, "a")
    wait_for(lambda: keepers(root))
    [pid] = keepers(root)
    assert os.getsid(pid) == pid != os.getsid(0)
    files = {os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir()}
    assert files == {"/dev/null", str(directory.path / keeper.MEMBERS)}
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    resident = int(status["VmRSS"].split()[0]) / 1024
    print(f"resident memory of a keeper: {resident:.1f} MiB")
    assert resident < 16
    assert status["PPid"].strip() != str(os.getpid()), "members must not have children"
    directory.close()


def test_without_an_executable_the_pool_works(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    directory = join(root, "a")
    assert "keeper cannot be started" in caplog.text
    directory.close()
    time.sleep(0.5)
    assert join(root, "b").created, "the next start removes the pool"
