"""One owner for a directory: a second process waits for a while, and then gets the pid of the first.

The lock is the system's (`flock`) and ends with the process, however that ends; the pid in the file is only
information. Does not know slabs.

A forked process shares its parent's locks without wanting to: it gives them up at once, so that they end when
the parent releases them, or dies.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import weakref
from pathlib import Path
from time import sleep

from kvoffload.errors import ConfigError, UnavailableError
from kvoffload.tiers.rate_limited_log import RateLimitedLog

LOCK_NAME = "kvoffload.lock"

LOCK_WAIT_S = 30.0
"""How long a tier waits: a process that was killed keeps its locks until its memory is released, which takes
seconds for hundreds of pinned GiB, and it is often restarted at once."""

_RETRY_S = 0.25

# The locks of this process, by device and inode of their files. The pid in the file is not enough, because a
# restarted container gives its processes the same pids again.
_held: dict[tuple[int, int], DirectoryLock] = {}
# Also those that are being waited for: a forked process gives up its copies of all.
_open_locks: weakref.WeakSet[DirectoryLock] = weakref.WeakSet()


class DirectoryLock:
    """A lock held from construction to `release`.

    It waits for the lock of another process, with one line in the log. It does not wait for a lock of this
    process: the thread that would have to release it is the one that waits.

    Args:
        wait_s: how long to wait at most; 0 tries once.

    Attributes:
        is_of_parent: this process was forked from the one that has made it.

    Raises: `UnavailableError` with the owner's pid if it is locked, or for a directory that cannot be locked;
    `ConfigError` for a lock file that is a link: what it points to is not touched.
    Thread: any.
    """

    def __init__(self, directory: Path, log: RateLimitedLog, *, wait_s: float = LOCK_WAIT_S) -> None:
        self.is_of_parent = False
        self._fds = [_open(directory, os.O_RDWR | os.O_CREAT)]
        _open_locks.add(self)
        status = os.fstat(self._fds[0])
        self._file = status.st_dev, status.st_ino
        try:
            self._take(directory, log, 0.0 if self._file in _held else wait_s)
        except BaseException:
            os.close(self._fds.pop())
            raise
        _held[self._file] = self
        # On a full disk the lock is valid all the same; only its owner's pid cannot be read.
        with contextlib.suppress(OSError):
            os.ftruncate(self._fds[0], 0)
            os.pwrite(self._fds[0], b"%d\n" % os.getpid(), 0)

    @property
    def held(self) -> bool:
        """False after `release`, and in a process that was forked from the owner."""
        return bool(self._fds) and self._file in _held

    def include(self, path: Path) -> None:
        """Lock a file of the directory too, until `release`: another directory may have it under a link.

        Raises: `OSError`.
        """
        self._fds.append(lock_file(path))

    def exclude(self) -> None:
        """Unlock what was included, and let go of it: a file takes room as long as somebody has it open."""
        while len(self._fds) > 1:
            _unlock(self._fds.pop())

    def release(self) -> None:
        """Release the lock, also if a forked process has a copy of it. Idempotent."""
        if self._fds:
            # In this order: once the file is unlocked another thread may take the lock and record it.
            _held.pop(self._file, None)
            while self._fds:
                _unlock(self._fds.pop())

    def _take(self, directory: Path, log: RateLimitedLog, wait_s: float) -> None:
        fd, waited_s = self._fds[0], 0.0
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                pass
            except OSError as error:
                why = (
                    f"its file system cannot lock files ({error.strerror}): take a directory on a local disk"
                )
                raise UnavailableError("path", str(directory), why) from None
            if waited_s >= wait_s:
                why = f"process {_owner(fd)} has it open: one owner at a time"
                why += f" (waited {waited_s:g} s for it to end)" if waited_s else ""
                raise UnavailableError("path", str(directory), why)
            if not waited_s:
                log.warn("lock", "disk tier: process %s has %s open: waiting up to %g s for it to end",
                         _owner(fd), directory, wait_s)  # fmt: skip
            sleep(_RETRY_S)
            waited_s += _RETRY_S

    def _abandon(self) -> None:
        """Close the copies that a forked process has got: that unlocks nothing for the parent."""
        self.is_of_parent = True
        while self._fds:
            os.close(self._fds.pop())


def lock_file(path: Path) -> int:
    """Lock a file without waiting; returns what has to be closed. Raises `OSError`."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise OSError(errno.EBUSY, f"{path} is open under another name, in another directory") from None
    except BaseException:
        os.close(fd)
        raise
    return fd


def _unlock(fd: int) -> None:
    fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


def owner_of(directory: Path) -> str | None:
    """The pid of the process that has this directory open, as text; None if there is none."""
    try:
        fd = _open(directory, os.O_RDONLY)
    except ConfigError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return _owner(fd)
    finally:
        os.close(fd)
    return None


def _open(directory: Path, flags: int) -> int:
    path = directory / LOCK_NAME
    try:
        fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ConfigError("path", str(directory), f"{path} is a link: delete it") from None
        why = f"its lock file cannot be opened ({error.strerror})"
        raise UnavailableError("path", str(directory), why) from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise ConfigError("path", str(directory), f"{path} is no file: delete it")
    return fd


def _owner(fd: int) -> str:
    return os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"


def _abandon_all() -> None:
    for lock in _open_locks:
        lock._abandon()
    _held.clear()


os.register_at_fork(after_in_child=_abandon_all)
