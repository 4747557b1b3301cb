"""One owner for a directory: whoever comes second is told who came first.

The lock is the system's (`flock`) and goes with the process, however it ends; the number in the file only
says whose it is.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from kvoffload.errors import ConfigError

LOCK_NAME = "kvoffload.lock"


class DirectoryLock:
    """Held from its making to `release`. Raises `ConfigError` with the owner's pid if somebody has it."""

    def __init__(self, directory: Path) -> None:
        try:
            self._fd = os.open(directory / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(
                "path", str(directory), f"a directory that can be written ({error.strerror})"
            ) from None
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            owner = os.pread(self._fd, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(self._fd)
            raise ConfigError(
                "path", str(directory), f"process {owner} has it open: one owner at a time"
            ) from None
        # On a full disk the lock holds all the same; only its owner's number is not there to read.
        with contextlib.suppress(OSError):
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, b"%d\n" % os.getpid(), 0)

    def release(self) -> None:
        """Let others in."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def owner_of(directory: Path) -> str | None:
    """The pid of the process that has this directory open, as text; None if nobody has."""
    try:
        fd = os.open(directory / LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
    finally:
        os.close(fd)
    return None
