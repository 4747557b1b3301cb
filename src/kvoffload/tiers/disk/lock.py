"""One owner for a directory: a second process waits for a while, and then gets the pid of the first.

The lock is the system's (`flock`) and ends with the process, however that ends; the pid in the file is only
information. Does not know slabs.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path
from time import sleep

from kvoffload.errors import ConfigError
from kvoffload.tiers.rate_limited_log import RateLimitedLog

LOCK_NAME = "kvoffload.lock"

LOCK_WAIT_S = 30.0
"""How long a tier waits: a process that was killed keeps its locks until its memory is released, which takes
seconds for hundreds of pinned GiB, and it is often restarted at once."""

_RETRY_S = 0.25

# The locks of this process: device and inode of their files. The pid in the file is not enough, because a
# restarted container gives its processes the same pids again.
_held: set[tuple[int, int]] = set()


class DirectoryLock:
    """A lock held from construction to `release`.

    It waits for the lock of another process, with one line in the log. It does not wait for a lock of this
    process: the thread that would have to release it is the one that waits.

    Args:
        wait_s: how long to wait at most; 0 tries once.

    Raises: `ConfigError` with the owner's pid if it is locked, or for a directory that cannot be locked.
    Thread: any.
    """

    def __init__(self, directory: Path, log: RateLimitedLog, *, wait_s: float = LOCK_WAIT_S) -> None:
        try:
            self._fd = os.open(directory / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(
                "path", str(directory), f"a directory that can be written ({error.strerror})"
            ) from None
        status = os.fstat(self._fd)
        self._file = status.st_dev, status.st_ino
        try:
            self._take(directory, log, 0.0 if self._file in _held else wait_s)
        except BaseException:
            os.close(self._fd)
            raise
        _held.add(self._file)
        # On a full disk the lock is valid all the same; only its owner's pid cannot be read.
        with contextlib.suppress(OSError):
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, b"%d\n" % os.getpid(), 0)

    def _take(self, directory: Path, log: RateLimitedLog, wait_s: float) -> None:
        waited_s = 0.0
        while True:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                pass
            except OSError as error:
                why = f"a directory that can be locked ({error.strerror})"
                raise ConfigError("path", str(directory), why) from None
            if waited_s >= wait_s:
                why = f"process {_owner(self._fd)} has it open: one owner at a time"
                why += f" (waited {waited_s:g} s for it to end)" if waited_s else ""
                raise ConfigError("path", str(directory), why)
            if not waited_s:
                log.warn("lock", "disk tier: process %s has %s open: waiting up to %g s for it to end",
                             _owner(self._fd), directory, wait_s)  # fmt: skip
            sleep(_RETRY_S)
            waited_s += _RETRY_S

    def release(self) -> None:
        """Release the lock. Idempotent."""
        if self._fd >= 0:
            # In this order: once the file is closed another thread may take the lock and add it to the set.
            _held.discard(self._file)
            os.close(self._fd)
            self._fd = -1


def owner_of(directory: Path) -> str | None:
    """The pid of the process that has this directory open, as text; None if there is none."""
    try:
        fd = os.open(directory / LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return _owner(fd)
    finally:
        os.close(fd)
    return None


def _owner(fd: int) -> str:
    return os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
