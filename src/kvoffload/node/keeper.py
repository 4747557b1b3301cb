"""The keeper of a pool: a small process that removes the pool when it has been unused for its keep time.

Runs as a script. Imports neither this package nor numpy, so that the process needs only 9 MiB. Command-line
arguments: the pool's directory, and the seconds between two checks.

In the pool's file ``members``, this module also owns the byte locks, and the two words for the keep time.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import struct
import subprocess
import sys
import time
from pathlib import Path

MEMBERS = "members"
MAX_MEMBERS = 64
"""Limit of engines that use a pool at the same time. Each engine locks a byte of the file `MEMBERS`."""
LAST_USED_AT, KEEP_AT = 2, 3
"""Positions of two float64 words in the file `MEMBERS`: the time of the pool's last use
(`time.monotonic`), and the pool's keep time, which is the number of seconds from the last use to the
removal."""
_KEEPER_BYTE = MAX_MEMBERS
_LONGEST_INTERVAL_S = 5.0
_FLOCK = "hhqqi4x"
"""The C library's ``struct flock``: type, whence, start, length, pid."""


def lock(fd: int, byte: int, *, kind: int = fcntl.F_RDLCK) -> None:
    """Lock a byte for this open file. Raises `OSError` if another open file has a conflicting lock."""
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack(_FLOCK, kind, os.SEEK_SET, byte, 1, 0))


def is_locked(fd: int, byte: int, count: int = 1) -> bool:
    """Return True if another open file has locked one of these bytes."""
    wanted = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, byte, count, 0)
    conflict = struct.unpack(_FLOCK, fcntl.fcntl(fd, fcntl.F_OFD_GETLK, wanted))
    return bool(conflict[0] != fcntl.F_UNLCK)


def is_named(fd: int, path: str | Path) -> bool:
    """Return True if this path leads to this open file. False if the file was deleted or replaced."""
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    except OSError:
        return False


def start(pool: Path, fd: int) -> None:
    """Start the keeper of a pool, unless it runs. Cost: about 30 ms.

    Args:
        pool: directory of the pool.
        fd: the pool's open file `MEMBERS`.

    Raises: `OSError` if no process can be started.
    """
    if is_locked(fd, _KEEPER_BYTE):
        return
    if not sys.executable:
        raise OSError("this Python has no executable")
    interval_s = min(_LONGEST_INTERVAL_S, max(0.05, _number(fd, KEEP_AT) / 10))
    # The first process forks and ends at once, so that no member has a child.
    subprocess.run(
        [sys.executable, "-I", "-S", __file__, str(pool), str(interval_s)],
        check=True, cwd="/", env={}, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip


def keep(pool: str, interval_s: float) -> None:
    """Wait until the pool has been unused for its keep time, then remove it.

    Returns early if the pool is gone, or has another keeper.
    """
    members = os.path.join(pool, MEMBERS)
    with contextlib.suppress(OSError):
        fd = os.open(members, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        lock(fd, _KEEPER_BYTE, kind=fcntl.F_WRLCK)
        while is_named(fd, members):
            if is_locked(fd, 0, MAX_MEMBERS):
                os.pwrite(fd, struct.pack("d", time.monotonic()), 8 * LAST_USED_AT)
            elif _is_over(fd) and _remove(pool, fd):
                break
            time.sleep(interval_s)


def _number(fd: int, at: int) -> float:
    return float(struct.unpack("d", os.pread(fd, 8, 8 * at))[0])


def _is_over(fd: int) -> bool:
    return time.monotonic() - _number(fd, LAST_USED_AT) >= _number(fd, KEEP_AT)


def _remove(pool: str, fd: int) -> bool:
    """Remove the pool; return False if the pool is in use or the lock of all pools is held."""
    root, name = os.path.split(pool)
    path = os.path.join(root, f".{name.rsplit('-', 1)[0]}.lock")
    lock_fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not is_named(lock_fd, path):
            return False
        try:
            is_over = not is_locked(fd, 0, MAX_MEMBERS) and _is_over(fd)
            if is_over and is_named(fd, os.path.join(pool, MEMBERS)):
                shutil.rmtree(pool, ignore_errors=True)
        finally:
            os.unlink(path)
        return is_over
    except BlockingIOError:
        return False
    finally:
        os.close(lock_fd)


def _main() -> None:
    pool, interval_s = sys.argv[1], float(sys.argv[2])
    if os.fork() == 0:
        os.setsid()
        keep(pool, interval_s)


if __name__ == "__main__":
    _main()
