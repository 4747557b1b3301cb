"""One owner for a directory: others wait a little for one that is dying, and are told who it is."""

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

from kvoffload.errors import ConfigError
from kvoffload.tiers.disk import lock
from kvoffload.tiers.disk.inspection import opened
from kvoffload.tiers.disk.lock import LOCK_NAME, LOCK_WAIT_S, DirectoryLock
from kvoffload.tiers.rate_limited_log import RateLimitedLog
from support.disk_blocks import Disk

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
    """A process that has the lock, until its input ends or it is killed."""
    command = [sys.executable, "-c", HOLDER, str(directory)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def take(directory: Path, wait_s: float = LOCK_WAIT_S) -> DirectoryLock:
    return DirectoryLock(directory, RateLimitedLog("kvoffload.disk"), wait_s=wait_s)


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long the lock has slept between tries; in truth it does not sleep at all."""
    slept: list[float] = []
    monkeypatch.setattr(lock, "sleep", slept.append)
    return slept


def no_pause(seconds: float) -> None:
    raise AssertionError("nobody will let go")


def test_an_owner_that_dies_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with held_by_another(tmp_path) as owner:
        tries: list[float] = []

        def killed_meanwhile(seconds: float) -> None:
            tries.append(seconds)
            if len(tries) == 3:
                owner.kill()
                owner.wait()

        monkeypatch.setattr(lock, "sleep", killed_meanwhile)
        with caplog.at_level(logging.WARNING, "kvoffload.disk"):
            taken = take(tmp_path)
        assert len(tries) == 3
        assert len(caplog.messages) == 1
        assert f"process {owner.pid}" in caplog.text
        assert str(tmp_path) in caplog.text
        assert (tmp_path / LOCK_NAME).read_text() == f"{os.getpid()}\n"
        taken.release()


def test_an_owner_that_lives_is_named_and_how_long_it_was_waited_for(
    tmp_path: Path, pauses: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    with held_by_another(tmp_path) as owner:
        with pytest.raises(ConfigError, match=f"process {owner.pid} has it open.*waited {LOCK_WAIT_S:g} s"):
            take(tmp_path)
        assert sum(pauses) == pytest.approx(LOCK_WAIT_S)
        assert min(pauses) >= 0.1, "no spinning"
        assert len(caplog.messages) == 1


@pytest.mark.parametrize("opening", [lambda path: Disk(path, 4), take])
def test_the_own_lock_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opening: Callable[[Path], object]
) -> None:
    monkeypatch.setattr(lock, "sleep", no_pause)
    held = take(tmp_path)
    with pytest.raises(ConfigError, match=f"process {os.getpid()} has it open"):
        opening(tmp_path)
    held.release()
    held.release()
    take(tmp_path).release()


def test_a_process_of_another_container_with_our_number_is_waited_for(
    tmp_path: Path, pauses: list[float]
) -> None:
    """A container that is started again numbers its processes as the one before."""
    with held_by_another(tmp_path):
        (tmp_path / LOCK_NAME).write_text(f"{os.getpid()}\n")
        with pytest.raises(ConfigError, match=f"process {os.getpid()} has it open"):
            take(tmp_path)
    assert pauses


def test_a_tier_waits_and_a_command_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pauses: list[float]
) -> None:
    Disk(tmp_path, 4).tier.close()
    with held_by_another(tmp_path) as owner:
        with pytest.raises(ConfigError, match=f"process {owner.pid} has it open"):
            Disk(tmp_path, 4)
        assert pauses
        monkeypatch.setattr(lock, "sleep", no_pause)
        with pytest.raises(ConfigError, match=f"process {owner.pid} has it open"), opened(tmp_path):
            pass
    with opened(tmp_path):
        pass


def test_a_file_system_without_locks_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(lock, "sleep", no_pause)
    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(ConfigError, match="cannot lock files"):
        take(tmp_path)
