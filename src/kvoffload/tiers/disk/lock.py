"""A lock for a directory. A second process waits for a while, and then gets an error with the owner's pid.

Uses `flock`, so the system releases the lock when the process ends for any reason. The pid in the lock file
is only for messages.

A forked process closes its copies of the parent's locks at once. Otherwise the lock would outlive the parent.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

from kvoffload.errors import ConfigError, UnavailableError
from kvoffload.tiers.rate_limited_log import RateLimitedLog

LOCK_NAME = "kvoffload.lock"

LOCK_WAIT_S = 30.0
"""Longest wait of a tier for the lock of its directory, in seconds. A killed process keeps its locks until
the system has released its memory, which takes seconds for hundreds of pinned GiB."""

_RETRY_S = 0.25

# The locks of this process, by device and inode. The pid in the file does not identify this process, because
# a restarted container reuses pids.
_held: dict[tuple[int, int], DirectoryLock] = {}
# Includes locks that a thread still waits for, because a forked process closes its copies of these, too.
_open_locks: weakref.WeakSet[DirectoryLock] = weakref.WeakSet()


class DirectoryLock:
    """A lock of a directory, held from construction to `release`.

    While another process holds the lock, the constructor logs one line and waits. If this process itself
    holds the lock, the constructor fails at once, because the thread that waits could be the thread that must
    release the lock.

    Args:
        wait_s: longest wait in seconds; 0 for a single attempt.
        sleep: function for the pause between two attempts; for tests.

    Attributes:
        is_inherited: True in a process that was forked from the owner.

    Raises:
        UnavailableError: the directory is locked (the text names the owner's pid) or cannot be locked.
        ConfigError: the lock file is a link or no regular file. The link's target stays unchanged.

    Thread: any.
    """

    def __init__(
        self,
        directory: Path,
        log: RateLimitedLog,
        *,
        wait_s: float = LOCK_WAIT_S,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.is_inherited, self._sleep = False, sleep
        self._fds = [_open(directory, os.O_RDWR | os.O_CREAT)]
        _open_locks.add(self)
        status = os.fstat(self._fds[0])
        self._file = status.st_dev, status.st_ino
        try:
            self._acquire(directory, log, 0.0 if self._file in _held else wait_s)
        except BaseException:
            os.close(self._fds.pop())
            raise
        _held[self._file] = self
        # The lock is valid even if the disk is full and the pid cannot be written.
        with contextlib.suppress(OSError):
            os.ftruncate(self._fds[0], 0)
            os.pwrite(self._fds[0], b"%d\n" % os.getpid(), 0)

    @property
    def held(self) -> bool:
        """True until `release`; always False in a process forked from the owner."""
        return bool(self._fds) and self._file in _held

    def include(self, path: Path) -> None:
        """Lock a file of the directory, too: a hard link in another directory may lead to the same file.

        Raises: `OSError` if the file cannot be opened, or another process has locked it.
        """
        self._fds.append(lock_file(path))

    def exclude(self) -> None:
        """Unlock and close the included files. Needed before a deletion, to free the files' disk space."""
        while len(self._fds) > 1:
            unlock_file(self._fds.pop())

    def release(self) -> None:
        """Release the lock, even if a forked process has a copy of the descriptor. Idempotent."""
        if self._fds:
            # Before the lock is released, because another thread may then acquire it and record itself.
            _held.pop(self._file, None)
            while self._fds:
                unlock_file(self._fds.pop())

    def _acquire(self, directory: Path, log: RateLimitedLog, wait_s: float) -> None:
        fd, waited_s = self._fds[0], 0.0
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                pass
            except OSError as error:
                why = f"its file system cannot lock files ({error.strerror}): use a directory on a local disk"
                raise UnavailableError("path", str(directory), why) from None
            if waited_s >= wait_s:
                why = f"process {_owner(fd)} has it open, and a directory has one owner at a time"
                why += f" (waited {waited_s:g} s for it to end)" if waited_s else ""
                raise UnavailableError("path", str(directory), why)
            if not waited_s:
                log.warn("lock", "disk tier: process %s has %s open: waiting up to %g s for it to end",
                         _owner(fd), directory, wait_s)  # fmt: skip
            self._sleep(_RETRY_S)
            waited_s += _RETRY_S

    def _abandon(self) -> None:
        """Close this forked process's copies of the descriptors. The parent keeps its locks."""
        self.is_inherited = True
        while self._fds:
            os.close(self._fds.pop())


@contextlib.contextmanager
def locked_for_reading(slab: Path) -> Iterator[None]:
    """Hold shared locks that keep writers away from a slab, in a directory that cannot be written.

    The locks are needed because a read-only directory can have a writer: its file system may be mounted
    twice, and only one of the mounts is read-only.

    Raises: `UnavailableError` if a process has the directory open; `OSError` if a file cannot be locked.
    """
    if owner := owner_of(slab.parent):
        raise UnavailableError("path", str(slab.parent), f"process {owner} has it open")
    with contextlib.ExitStack() as undo:
        for path in (slab.parent / LOCK_NAME, slab):
            if path.exists():  # a copy of a slab may lack the lock file
                undo.callback(unlock_file, lock_file(path, shared=True))
        yield


def is_writable(directory: Path) -> bool:
    """Return True if this process can write the lock file of a directory, or create the lock file."""
    path = directory / LOCK_NAME
    return os.access(path if path.exists() else directory, os.W_OK)


def lock_file(path: Path, *, shared: bool = False) -> int:
    """Lock a file without waiting; returns the descriptor for `unlock_file`.

    If `shared` is True, the file is opened for reading, and several processes can hold the lock. Raises
    `OSError` if the file cannot be opened, or another process has locked it.
    """
    flags, kind = (os.O_RDONLY, fcntl.LOCK_SH) if shared else (os.O_RDWR, fcntl.LOCK_EX)
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise OSError(errno.EBUSY, f"{path} is open under another name, in another directory") from None
    except BaseException:
        os.close(fd)
        raise
    return fd


def unlock_file(fd: int) -> None:
    """Unlock and close a file, even if a forked process has a copy of the descriptor."""
    fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


def owner_of(directory: Path) -> str | None:
    """Return the pid of the process that has this directory open, as text; None if no process has."""
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
        raise ConfigError("path", str(directory), f"{path} is not a regular file: delete it")
    return fd


def _owner(fd: int) -> str:
    return os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"


def _abandon_all() -> None:
    for lock in _open_locks:
        lock._abandon()
    _held.clear()


os.register_at_fork(after_in_child=_abandon_all)
