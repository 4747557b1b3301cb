"""The directory of a pool: its name, the processes that use it, and its removal.

A pool is a directory ``kvoffload-node-USER-NAME`` in ``/dev/shm`` with these files:

- ``members``: a header and a record for each engine. Each process of engine ``i`` holds a shared lock on
  byte ``i`` of the file. The kernel releases the lock when the process ends, even if it is killed.
- ``state``: the manager's state (`state`).
- ``slots``: the bytes of the blocks and their checksums. The integration owns this file.
- ``findings-I``: the results of the audits of engine ``I``. The integration owns these files.

Owns ``members``. Each user has one lock for all of the user's pool directories. A process holds this lock
while it changes any of these directories, so that engines that start at the same time never create two pools.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import mmap
import os
import shutil
import stat
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvoffload.errors import ConfigError, UnavailableError
from kvoffload.node import keeper
from kvoffload.node.keeper import MAX_MEMBERS, MEMBERS, is_locked, is_named, lock
from kvoffload.text import size

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "kvoffload-node-"
FORMAT = 5
"""Version of a pool's files. Increment this number whenever the layout of a file changes."""
STATE, SLOTS, FACTS = "state", "slots", "facts.json"
_MAGIC = 0x6B766F66_6E6F6465
_MAGIC_AT, _FORMAT_AT, _LAST_USED_AT, _KEEP_AT, _FIRST_RECORD = 0, 1, keeper.LAST_USED_AT, keeper.KEEP_AT, 8
_RECORD_WORDS = 8
_ENGINE, _PID, _JOINED, _DEAD_SINCE, _HAS_MANAGER = range(5)
"""Positions of words in an engine's record in the file ``members``.

- `_ENGINE`: digest of the engine's id, or 0 for a free record.
- `_PID`: pid of the engine's first process.
- `_JOINED`: time when the engine joined, in seconds since 1970.
- `_DEAD_SINCE`: time (`time.monotonic`) when the engine's end was first noticed, or 0.
- `_HAS_MANAGER`: 1 if the engine has or had a manager.
"""
_NUM_WORDS = _FIRST_RECORD + MAX_MEMBERS * _RECORD_WORDS
_NUM_BYTES = -(-8 * _NUM_WORDS // mmap.PAGESIZE) * mmap.PAGESIZE
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EMFILE, errno.ENFILE, errno.ENOMEM)
LOCK_PATIENCE_S = 30.0
ALLOCATION_S = 600.0
"""Longest wait for another process that allocates the memory of the slots, in seconds."""
logger = logging.getLogger("kvoffload.node")


def pool_name(facts: Mapping[str, Any]) -> str:
    """Return the name of the pool for engines with these facts. Different facts give different names."""
    text = json.dumps({"format": FORMAT, **facts}, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class PoolDirectory:
    """The membership of an engine in a pool, for one of the engine's processes.

    Attributes:
        path: the directory.
        number: number of the engine in the pool, from 0 to `MAX_MEMBERS` - 1. All processes of the engine
            have the same number.
        created: True if this process created the pool.

    Thread: any.
    """

    def __init__(self, path: Path, fd: int, number: int, *, created: bool) -> None:
        self.path, self._fd, self.number, self.created = path, fd, number, created
        self._map = mmap.mmap(fd, _NUM_BYTES)
        self._words = np.frombuffer(self._map, np.uint64, _NUM_WORDS)
        self._times = self._words.view(np.float64)
        self._pid = os.getpid()

    @classmethod
    def join(
        cls,
        facts: Mapping[str, Any],
        engine_id: str,
        *,
        keep_s: float,
        root: Path = SHARED_MEMORY,
        has_keeper: bool = True,
    ) -> PoolDirectory:
        """Find or create the pool for these facts, and join the pool as a process of this engine.

        All processes of an engine get the pool that the engine's first process has joined.

        Args:
            facts: settings that must be equal in all engines of the pool. Values are texts or numbers.
            engine_id: equal in all processes of an engine, different in other engines.
            keep_s: seconds for which the pool stays after its last process has ended.
            has_keeper: True to start a `keeper` process, unless one runs. The keeper removes the pool after
                `keep_s`. Without a keeper, the first engine that starts after `keep_s` removes the pool.

        Raises:
            ConfigError: another user has created a file with this pool's name.
            UnavailableError: the pool has `MAX_MEMBERS` engines, or has another format.
        """
        path = root / f"{PREFIX}{os.geteuid()}-{pool_name(facts)}"
        with locked(root):
            remove_expired(root)
            path = _pool_of(engine_id, root) or path
            created = not path.exists()
            if created:
                _create(path, facts, keep_s)
            fd = _open_members(path)
            try:
                self = cls(path, fd, _claim(fd, engine_id), created=created)
            except BaseException:
                os.close(fd)
                raise
            self._times[_KEEP_AT] = keep_s
            self.note_use()
            self.dead()
        if has_keeper:
            self._start_keeper()
        return self

    def note_use(self) -> None:
        """Record that the pool is in use now. Call it every few seconds."""
        self._times[_LAST_USED_AT] = time.monotonic()

    def is_alive(self, number: int) -> bool:
        """Return True if this engine has a process that has not ended. Cost: a system call."""
        return number == self.number or is_locked(self._fd, number)

    def has_others(self) -> bool:
        """Return True if another engine has a process that has not ended."""
        return any(is_locked(self._fd, number) for number in range(MAX_MEMBERS) if number != self.number)

    @property
    def num_members(self) -> int:
        """Number of engines with a record: live engines, and dead engines whose record `bury` has not yet
        removed."""
        return sum(self.is_member(number) for number in range(MAX_MEMBERS))

    def is_member(self, number: int) -> bool:
        """Return True if the engine with this number, live or dead, has a record."""
        return bool(self._record(number)[_ENGINE])

    def dead(self, for_s: float = 0.0) -> list[int]:
        """Return the numbers of dead engines that still have a record.

        An engine is dead if all its processes have ended.

        Args:
            for_s: leave out engines whose end was first noticed less than `for_s` seconds ago.

        Cost: a system call for each engine.
        """
        now, dead = time.monotonic(), []
        for number in range(MAX_MEMBERS):
            record = self._record(number)
            if not record[_ENGINE] or self.is_alive(number):
                continue
            times = record.view(np.float64)
            times[_DEAD_SINCE] = times[_DEAD_SINCE] or now
            if now - times[_DEAD_SINCE] >= for_s:
                dead.append(number)
        return dead

    def begin_manager(self) -> None:
        """Record that this process has the engine's manager.

        The caller must hold `locked`. Raises: `ConfigError` if the engine has or had a manager.
        """
        if self._record(self.number)[_HAS_MANAGER]:
            why = "an engine with this id, or its workers, runs; allowed: a different id for each engine"
            raise ConfigError("engine_id", self.path.name, why)
        self._record(self.number)[_HAS_MANAGER] = 1

    def end_manager(self) -> None:
        """Undo `begin_manager`. Call this if the manager could not start."""
        self._record(self.number)[_HAS_MANAGER] = 0

    def bury(self, number: int) -> None:
        """Free the record of a dead engine. The engine's blocks and pins must have been released."""
        self._record(number)[:] = 0

    def close(self) -> None:
        """End the membership of this process. Idempotent.

        The last process removes the pool if `keep_s` is 0. The last process also removes a pool without a
        state file, which a failed first start leaves behind.
        """
        if self._fd < 0:
            return
        if os.getpid() != self._pid:  # a forked process, whose parent is still a member
            os.close(self._fd)
            self._fd = -1
            return
        self.note_use()
        is_short_lived = self._times[_KEEP_AT] <= 0 or not (self.path / STATE).exists()
        del self._words, self._times
        with contextlib.suppress(BufferError):
            self._map.close()
        fd, self._fd = self._fd, -1
        try:
            if is_short_lived:
                self._remove_if_last(fd)
        finally:
            os.close(fd)

    def _remove_if_last(self, fd: int) -> None:
        try:
            with locked(self.path.parent):
                if not is_locked(fd, 0, MAX_MEMBERS) and is_named(fd, self.path / MEMBERS):
                    shutil.rmtree(self.path, ignore_errors=True)
        except ConfigError as error:
            logger.warning("kvoffload: the pool %s is removed later: %s", self.path.name, error)

    def _start_keeper(self) -> None:
        try:
            keeper.start(self.path, self._fd)
        except (OSError, subprocess.SubprocessError) as error:
            logger.warning(
                "kvoffload: the pool %s is removed at an engine's next start, not when its time is over: "
                "its keeper cannot be started (%s)", self.path.name, error
            )  # fmt: skip

    def _record(self, number: int) -> Any:
        start = _FIRST_RECORD + number * _RECORD_WORDS
        return self._words[start : start + _RECORD_WORDS]


# ---- all pools of a user, for commands and starts


class PoolStatus:
    """A snapshot of a pool for the command line, read without joining the pool.

    Attributes:
        path: the pool's directory.
        name: last part of the directory's name.
        is_used: True if a process uses the pool, even a process of another version.
        pids: pid of the first process of each live engine.
        num_bytes: allocated memory.
        facts: as in `PoolDirectory.join`.
        idle_s: seconds since the last use; 0 while an engine runs.
        keep_s: as in `PoolDirectory.join`.
        problem: the reason why the pool is unusable; empty for a usable pool.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, path.name.rsplit("-", 1)[-1]
        self.pids: list[int] = []
        self.is_used, self.problem = False, ""
        self.facts, self.idle_s, self.keep_s = dict[str, Any](), 0.0, 0.0
        self.num_bytes = sum(512 * file.stat().st_blocks for file in path.iterdir() if file.is_file())
        try:
            self._read()
        except (OSError, ValueError) as error:
            self.problem = str(error)
            # Without a file handle or memory the pool cannot be examined, so it counts as used.
            cause = error if isinstance(error, OSError) else error.__context__
            self.is_used |= getattr(cause, "errno", 0) in _NO_ROOM

    def _read(self) -> None:
        fd = open_own(self.path / MEMBERS, os.O_RDWR)
        try:
            self.is_used = is_locked(fd, 0, MAX_MEMBERS)
            _check_members(self.path, fd)
            records = _records(fd)
            self.pids = [int(records[n, _PID]) for n in range(MAX_MEMBERS) if is_locked(fd, n)]
            times = np.frombuffer(os.pread(fd, 8 * _FIRST_RECORD, 0), np.float64)
            self.keep_s = float(times[_KEEP_AT])
            self.idle_s = 0.0 if self.is_used else max(0.0, time.monotonic() - float(times[_LAST_USED_AT]))
        finally:
            os.close(fd)
        try:
            facts = json.loads((self.path / FACTS).read_text())
        except (OSError, ValueError) as error:
            raise ValueError(f"its file {FACTS} cannot be read ({error})") from error
        if not isinstance(facts, dict):
            raise ValueError(f"its file {FACTS} is not a JSON object")
        self.facts = facts

    @property
    def is_expired(self) -> bool:
        return not self.is_used and (bool(self.problem) or self.idle_s >= self.keep_s)


def pools(root: Path = SHARED_MEMORY) -> list[PoolStatus]:
    """Return the pools of this user."""
    statuses = []
    for path in sorted(root.glob(f"{PREFIX}{os.geteuid()}-*")):
        with contextlib.suppress(FileNotFoundError):  # removed meanwhile
            status = path.lstat()
            if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid():
                statuses.append(PoolStatus(path))
    return statuses


def log_other_pools(pool: PoolDirectory, facts: Mapping[str, Any], log: logging.Logger) -> None:
    """Log each pool of other engines, with the names of the settings that differ from `facts`."""
    for other in pools(pool.path.parent):
        differing = [name for name, value in facts.items() if other.facts.get(name) != value]
        if other.path != pool.path and other.pids and differing:
            log.info(
                "kvoffload: RAM is not shared with the pool %s: %s differs",
                other.name,
                " and ".join(differing),
            )


def find(name: str, root: Path = SHARED_MEMORY) -> PoolStatus:
    """Return the pool with this name. Raises: `ConfigError` for an unknown name."""
    known = {pool.name: pool for pool in pools(root)}
    if name not in known:
        raise ConfigError("name", name, f"allowed: {', '.join(known) or 'none, there is no pool'}")
    return known[name]


def remove_expired(root: Path) -> list[str]:
    """Remove unused pools that are damaged or past their `keep_s`; returns their names.

    The caller must hold `locked`.
    """
    expired = [pool for pool in pools(root) if pool.is_expired]
    for pool in expired:
        shutil.rmtree(pool.path, ignore_errors=True)
    return [pool.name for pool in expired]


def remove(name: str, root: Path = SHARED_MEMORY) -> int:
    """Remove a pool that no process uses; returns the freed bytes.

    Raises: `ConfigError` for an unknown name; `UnavailableError` while a process uses the pool.
    """
    with locked(root):
        pool = find(name, root)
        if pool.is_used:
            raise UnavailableError("name", name, f"processes use the pool: {', '.join(map(str, pool.pids))}")
        shutil.rmtree(pool.path)
    return pool.num_bytes


@contextlib.contextmanager
def locked(root: Path) -> Iterator[None]:
    """Hold the lock of this user's pools, so that no other process creates, joins or removes pools meanwhile.

    Raises: `UnavailableError` if the lock is not free in 30 s, probably because its owner is suspended
    (SIGSTOP).
    """
    path = root / f".{PREFIX}{os.geteuid()}.lock"
    until = time.monotonic() + LOCK_PATIENCE_S
    while True:
        fd = open_own(path, os.O_RDWR | os.O_CREAT)
        try:
            wait_for_lock(fd, path, until)
            if not is_named(fd, path):  # the last owner has deleted the file
                continue
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return
        finally:
            os.close(fd)


def open_own(path: Path, flags: int) -> int:
    """Open a file of this user.

    Raises:
        ConfigError: this user cannot open the file, or another user has created it.
        UnavailableError: disk space, memory or file handles are used up.
    """
    try:
        fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise _unavailable(path, error) from None
        raise ConfigError("ram", str(path), f"this user cannot open the file ({error.strerror})") from None
    status = os.fstat(fd)
    if status.st_uid != os.geteuid() or not stat.S_ISREG(status.st_mode):
        os.close(fd)
        why = f"user {status.st_uid} has created this file; delete it, or ask that user to delete it"
        raise ConfigError("ram", str(path), why)
    return fd


def wait_for_lock(fd: int, path: Path, until: float) -> None:
    """Lock an open file. Raises `UnavailableError` if the file is still locked at the time `until`."""
    while True:
        try:
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                why = f"{_holder_of(fd)} has held the lock of this file for too long"
                raise UnavailableError("ram", str(path), why) from None
            time.sleep(0.002)


def _holder_of(fd: int) -> str:
    """Describe, for a message, the owner of a lock: ``process 17, which is stopped (kill -CONT 17),``."""
    file, pid = os.fstat(fd), 0
    place = f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}:{file.st_ino}"
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/locks").read_text().splitlines():
            # 1: FLOCK  ADVISORY  WRITE 17 00:1a:5678 0 EOF; waiting processes have -> after the number
            fields = line.split()
            if fields[1] == "FLOCK" and fields[5] == place:
                pid = int(fields[4])
    if pid <= 0:  # unknown, or in another container
        return "another process, which may be stopped,"
    with contextlib.suppress(OSError, IndexError):
        # The state follows the name, which is in parentheses and may contain spaces.
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt":
            return f"process {pid}, which is stopped (continue: kill -CONT {pid}; end: kill -KILL {pid}),"
    return f"process {pid}"


# ---- the members file


def _create(path: Path, facts: Mapping[str, Any], keep_s: float) -> None:
    """Create the directory of a pool under a temporary name, and rename the complete directory."""
    new = path.with_name(f".{path.name}.new")
    shutil.rmtree(new, ignore_errors=True)
    header = np.zeros(_NUM_BYTES // 8, np.uint64)
    header[_MAGIC_AT], header[_FORMAT_AT] = _MAGIC, FORMAT
    header.view(np.float64)[[_LAST_USED_AT, _KEEP_AT]] = time.monotonic(), keep_s
    try:
        os.mkdir(new, 0o700)
        (new / FACTS).write_text(json.dumps(dict(facts), default=str))
        with open(os.open(new / MEMBERS, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
            file.write(header.tobytes())
        os.rename(new, path)
    except OSError as error:
        shutil.rmtree(new, ignore_errors=True)
        raise _unavailable(path, error) from None


def _unavailable(path: Path, error: OSError) -> UnavailableError:
    return UnavailableError("ram", str(path), f"the pool cannot be created ({error.strerror})")


def _open_members(path: Path) -> int:
    """Open the members file of a pool. Raises `UnavailableError` if the pool has another format."""
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise ConfigError("ram", str(path), "it is not a directory that only this user can open; delete it")
    fd = open_own(path / MEMBERS, os.O_RDWR)
    try:
        _check_members(path, fd)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _check_members(path: Path, fd: int) -> None:
    words = np.frombuffer(os.pread(fd, 16, 0).ljust(16, b"\0"), np.uint64)
    num_bytes = os.fstat(fd).st_size
    if num_bytes != _NUM_BYTES or list(words) != [_MAGIC, FORMAT]:
        why = f"its file {MEMBERS} has {size(num_bytes)} and format {int(words[1])}; needed: format {FORMAT}"
        raise UnavailableError("ram", str(path), why)


def _digest(engine_id: str) -> int:
    return int.from_bytes(hashlib.sha256(engine_id.encode()).digest()[:8], "little") | 1


def _records(fd: int) -> npt.NDArray[np.uint64]:
    words = np.frombuffer(os.pread(fd, 8 * _NUM_WORDS, 0), np.uint64)
    return words[_FIRST_RECORD:].reshape(MAX_MEMBERS, _RECORD_WORDS)


def _living_record(fd: int, engine_id: str) -> int | None:
    """Return the number of this engine, or None if no live process of the engine has joined."""
    for number in np.flatnonzero(_records(fd)[:, _ENGINE] == _digest(engine_id)).tolist():
        if is_locked(fd, number):
            return int(number)
    return None


def _pool_of(engine_id: str, root: Path) -> Path | None:
    """Return the directory of the pool that another process of this engine has joined, or None."""
    for pool in pools(root):
        if pool.pids:
            fd = _open_members(pool.path)
            try:
                if _living_record(fd, engine_id) is not None:
                    return pool.path
            finally:
                os.close(fd)
    return None


def _claim(fd: int, engine_id: str) -> int:
    """Lock the byte of this engine's record for this process; returns the number of the record.

    The first process of an engine takes a free record.
    """
    number = _living_record(fd, engine_id)
    if number is not None:
        lock(fd, number)
        return number
    records = _records(fd)
    free = np.flatnonzero(records[:, _ENGINE] == 0)
    if not len(free):
        raise UnavailableError(
            "ram", "shared", f"{MAX_MEMBERS} engines use or used the pool; wait, or remove it"
        )
    number = int(free[0])
    record = np.zeros(_RECORD_WORDS, np.uint64)
    record[_ENGINE], record[_PID] = _digest(engine_id), os.getpid()
    record.view(np.float64)[_JOINED] = time.time()
    lock(fd, number)
    os.pwrite(fd, record.tobytes(), 8 * (_FIRST_RECORD + number * _RECORD_WORDS))
    return number
