"""The lock of a directory: processes wait for a dying owner, and an error names a living one."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvoffload.errors import UnavailableError
from kvoffload.tiers.disk.inspection import opened
from kvoffload.tiers.disk.lock import LOCK_NAME, LOCK_WAIT_S, DirectoryLock
from kvoffload.tiers.rate_limited_log import RateLimitedLog
from support.disk_blocks import Disk
from support.recording_files import FailingFiles

HOLDER = """
import sys
from pathlib import Path
from kvoffload.tiers.disk.lock import DirectoryLock
from kvoffload.tiers.rate_limited_log import RateLimitedLog
held = DirectoryLock(Path(sys.argv[1]), RateLimitedLog("holder"))
print("held", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def held_by_another(directory: Path) -> Iterator[subprocess.Popen[str]]:
    """Run a process that holds the lock; kill it at the end."""
    command = [sys.executable, "-c", HOLDER, str(directory)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def no_sleep(seconds: float) -> None:
    raise AssertionError("the lock must not wait")


class NoSleep(FailingFiles):
    """Fails if a lock waits."""

    def sleep(self, seconds: float) -> None:
        no_sleep(seconds)


def take(directory: Path, sleep: Callable[[float], None] = no_sleep) -> DirectoryLock:
    return DirectoryLock(directory, RateLimitedLog("kvoffload.disk"), sleep=sleep)


def test_the_lock_waits_for_an_owner_that_dies(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with held_by_another(tmp_path) as owner:
        sleeps: list[float] = []

        def kill_at_the_third(seconds: float) -> None:
            sleeps.append(seconds)
            if len(sleeps) == 3:
                owner.kill()
                owner.wait()

        with caplog.at_level(logging.WARNING, "kvoffload.disk"):
            taken = take(tmp_path, kill_at_the_third)
        assert len(sleeps) == 3
        assert len(caplog.messages) == 1
        assert f"process {owner.pid}" in caplog.text
        assert str(tmp_path) in caplog.text
        assert (tmp_path / LOCK_NAME).read_text() == f"{os.getpid()}\n"
        taken.release()


def test_the_error_names_the_owner_and_the_time_waited(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sleeps: list[float] = []
    with held_by_another(tmp_path) as owner:
        with pytest.raises(
            UnavailableError, match=f"process {owner.pid} has it open.*waited {LOCK_WAIT_S:g} s"
        ):
            take(tmp_path, sleeps.append)
        assert sum(sleeps) == pytest.approx(LOCK_WAIT_S)
        assert min(sleeps) >= 0.1
        assert len(caplog.messages) == 1


@pytest.mark.parametrize("opening", [lambda path: Disk(path, 4, files=NoSleep()), take])
def test_a_lock_of_this_process_is_not_waited_for(tmp_path: Path, opening: Callable[[Path], object]) -> None:
    held = take(tmp_path)
    with pytest.raises(UnavailableError, match=f"process {os.getpid()} has it open"):
        opening(tmp_path)
    held.release()
    held.release()
    take(tmp_path).release()


def test_a_process_of_another_container_with_the_same_pid_is_waited_for(tmp_path: Path) -> None:
    """A restarted container reuses the pids of its predecessor."""
    sleeps: list[float] = []
    with held_by_another(tmp_path):
        (tmp_path / LOCK_NAME).write_text(f"{os.getpid()}\n")
        with pytest.raises(UnavailableError, match=f"process {os.getpid()} has it open"):
            take(tmp_path, sleeps.append)
    assert sleeps


def test_a_tier_waits_and_a_command_does_not(tmp_path: Path) -> None:
    Disk(tmp_path, 4).tier.close()
    files = FailingFiles()
    with held_by_another(tmp_path) as owner:
        with pytest.raises(UnavailableError, match=f"process {owner.pid} has it open"):
            Disk(tmp_path, 4, files=files)
        assert files.sleep_calls
        with (
            pytest.raises(UnavailableError, match=f"process {owner.pid} has it open"),
            opened(tmp_path, NoSleep()),
        ):
            pass
    with opened(tmp_path):
        pass


def test_a_file_system_without_locks_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(UnavailableError, match="cannot lock files"):
        take(tmp_path)
