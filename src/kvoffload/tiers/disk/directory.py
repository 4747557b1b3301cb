"""A directory of slabs, one for each producer, and its opening for one owner.

Owns the names of slabs, and which of them makes way for which. A slab is found again when its producer comes
back, and all of them together take no more than the capacity. Does not know what the blocks are used for.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kvoffload.errors import ConfigError, UnavailableError
from kvoffload.tiers.disk.files import Files
from kvoffload.tiers.disk.format import FORMAT_VERSION, Identity, fingerprint_of
from kvoffload.tiers.disk.journal import Journal
from kvoffload.tiers.disk.layout import Layout
from kvoffload.tiers.disk.lock import DirectoryLock, lock_file
from kvoffload.tiers.disk.recovery import Contents, Found, Progress, recover
from kvoffload.tiers.disk.resize import rearrange, resize
from kvoffload.tiers.disk.room import Room
from kvoffload.tiers.disk.slab import UNFINISHED, Slab, now_s
from kvoffload.tiers.rate_limited_log import RateLimitedLog

SLABS = "kvoffload*.slab"
"""Pattern of the names of slabs."""
SMALLEST_SHARE = 16
"""A slab that makes way gives up this part of its slots more than needed; one that has no more goes."""


class Geometry(NamedTuple):
    """What a directory must hold: the caller's options, already checked against each other."""

    layout: Layout
    capacity_bytes: int
    fingerprint: str

    @property
    def slab_name(self) -> str:
        """The name of the file for these blocks: of this producer, format, and sizes of blocks and keys."""
        layout, text = self.layout, hashlib.sha256(self.fingerprint.encode())
        text.update(b"%d %d %d" % (FORMAT_VERSION, layout.block_bytes, layout.key_bytes))
        return f"kvoffload-{text.hexdigest()[:16]}.slab"


class Opened(NamedTuple):
    """A locked directory, its slab and journal, and what the journal says is there."""

    lock: DirectoryLock
    slab: Slab
    journal: Journal
    contents: Contents


def slabs_in(directory: Path) -> list[Path]:
    """The slabs of a directory, whoever's they are; the one opened or written least recently first."""
    found = []
    for path in sorted(directory.glob(SLABS)):
        with contextlib.suppress(FileNotFoundError):
            status = path.lstat()
            if stat.S_ISREG(status.st_mode):
                found.append((status.st_mtime_ns, path))
    return [path for _, path in sorted(found)]


def open_directory(
    directory: Path, geometry: Geometry, files: Files, log: RateLimitedLog, progress: Progress | None
) -> Opened:
    """Lock a directory, making it if it is absent, and open the producer's slab and journal in it.

    Waits up to half a minute for the lock of another process. Raises `UnavailableError` if the directory
    cannot be used now, and `ConfigError` if its owner or mode, or the capacity, must be changed. Then nothing
    is locked or open, and the producer's slab is as it was.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_private(directory)
    except (FileExistsError, NotADirectoryError) as error:
        raise ConfigError("path", str(directory), f"allowed: a directory ({error.strerror})") from None
    except OSError as error:
        raise UnavailableError("path", str(directory), f"it cannot be made ({error.strerror})") from None
    with contextlib.ExitStack() as undo:
        lock = DirectoryLock(directory, log)
        undo.callback(lock.release)
        opening = _Opening(directory, geometry, files, log, lock)
        try:
            slab, found = opening.slab(progress)
        except (OSError, MemoryError) as error:
            why = getattr(error, "strerror", None) or "its journal does not fit into memory"
            raise UnavailableError("path", str(directory), f"its slab cannot be opened ({why})") from None
        undo.callback(slab.close)
        try:
            journal = Journal(slab, found)
        except OSError as error:
            why = f"its journal cannot be written ({error.strerror})"
            raise UnavailableError("path", str(directory), why) from None
        undo.pop_all()
    return Opened(lock, slab, journal, found.contents)


class _Opening:
    """The opening of a locked directory. All but `make_way` only at that time; that also when a slab grows.

    Its methods raise `OSError` if the medium does not answer, or has no room.
    """

    def __init__(
        self, directory: Path, geometry: Geometry, files: Files, log: RateLimitedLog, lock: DirectoryLock
    ) -> None:
        self._directory, self._geometry, self._path = directory, geometry, directory / geometry.slab_name
        self._files, self._log, self._lock = files, log, lock

    def slab(self, progress: Progress | None) -> tuple[Slab, Found]:
        """The producer's slab, made if there is none, and what its journal says."""
        for unfinished in self._directory.glob(SLABS + UNFINISHED):
            _check_is_file(unfinished)
            unfinished.unlink()
        with contextlib.ExitStack() as undo:
            slab = self._existing() if os.path.lexists(self._path) else None
            found = self._prepared(slab, progress) if slab is not None else None
            if slab is not None and found is not None:
                undo.callback(slab.close)
                self._settle(slab, found)
            else:
                slab = self._new()
                undo.callback(slab.close)
                self._lock.include(self._path)
                found = recover(slab)
            undo.pop_all()
        return slab, found

    def make_way(self, path: Path, num_bytes: int) -> int:
        """Take so many bytes or more from another slab, its coldest blocks first, or delete it; returns its
        size then.

        Cost: its journal is read and written, 160 bytes a block, and no more blocks are copied than leave.
        """
        if not path.exists():
            return 0
        with self._other(path) as slab:
            left = _slots_left(slab, num_bytes) if isinstance(slab, Slab) else 0
            if isinstance(slab, Slab) and left:
                first, before = slab.layout.first_slot, slab.file_bytes
                rearrange(slab, recover(slab), first, first + left, left)
                slab.trim(first + left)
                self._log.warn(
                    f"way {path}", "disk tier: %s gives up %d MiB for another producer, its coldest blocks "
                    "first, and keeps %d MiB", path, (before - slab.file_bytes) >> 20, slab.file_bytes >> 20,
                )  # fmt: skip
                return slab.file_bytes
        path.unlink()
        self._log.warn(f"gone {path}", "disk tier: deleted %s, blocks of another producer, for room", path)
        return 0

    def _existing(self) -> Slab | None:
        """The slab that is there; None if nobody can use it: then it is deleted."""
        path, geometry = self._path, self._geometry
        check_private(path)
        _check_is_file(path)
        self._lock.include(path)
        slab = Slab.open(path, self._files, self._log)
        if isinstance(slab, str):
            self._log.warn(f"lost {path}", "disk tier: %s cannot be used: %s. It is made anew", path, slab)
            self._lock.exclude()
            path.unlink()
            return None
        if slab.identity.fingerprint != fingerprint_of(geometry.fingerprint):
            slab.close()
            why = f"it holds blocks of another producer ({slab.identity.text}) under this name: delete it"
            raise ConfigError("path", str(path), why)
        sizes = slab.layout.block_bytes, slab.layout.key_bytes
        if sizes != (geometry.layout.block_bytes, geometry.layout.key_bytes):
            slab.close()
            raise ConfigError("path", str(path), "it holds blocks of another size under this name: delete it")
        return slab

    def _prepared(self, slab: Slab, progress: Progress | None) -> Found | None:
        """What a slab holds that has been given the capacity; None if it cannot hold a block in so little:
        then it is deleted. Closes the slab unless it returns its contents."""
        with contextlib.ExitStack() as undo:
            undo.callback(slab.close)
            found = recover(slab, progress)
            # Before anything is written: an older copy may name a journal where blocks will be. The newer
            # superblock is made durable first, since a process that was killed may have left it in memory.
            slab.sync()
            slab.mend()
            if self._is_cut(slab, found):
                # Durable before the file is long again: keys of what was cut may get new entries then.
                Journal(slab, found)
                found = recover(slab)
            slab.room = self._room()
            if slab.capacity_bytes != self._geometry.capacity_bytes or slab.layout.is_moving:
                resized = self._resized(slab, found)
                if resized is None:
                    self._lock.exclude()
                    self._path.unlink()
                    return None
                found = resized
            undo.pop_all()
        return found

    def _resized(self, slab: Slab, found: Found) -> Found | None:
        """What a slab holds that has been given the capacity, as far as possible; None if it is too small."""
        before, wanted = slab.capacity_bytes, self._geometry.capacity_bytes
        if slab.layout.is_moving and before < wanted:
            # Before the journal there is room only for the slots of the interrupted change.
            target = slab.layout.with_capacity(before)
            found = (resize(slab, found, target, before) if target is not None else None) or found
        target, num_blocks = slab.layout.with_capacity(wanted), len(found.contents)
        resized = resize(slab, found, target, wanted) if target is not None else None
        if target is None:
            why = "its journal alone does not fit: it is made anew"
        elif resized is None:
            why = (
                "there is no room for a longer journal now: the capacity stays as it was until the next start"
            )
        else:
            why = f"{len(resized.contents)} of {num_blocks} blocks are kept"
        self._log.warn(
            "resize", "disk tier: %s had a capacity of %d bytes and is to have %d: %s", self._path, before,
            wanted, why,
        )  # fmt: skip
        return found if resized is None and target is not None else resized

    def _new(self) -> Slab:
        text, geometry = self._geometry.fingerprint, self._geometry
        identity = Identity(secrets.randbits(64), fingerprint_of(text), text, now_s())
        return Slab.create(
            self._path,
            geometry.layout,
            identity,
            geometry.capacity_bytes,
            self._files,
            self._log,
            self._room(),
        )

    def _is_cut(self, slab: Slab, found: Found) -> bool:
        """Forget blocks behind the end of the file; returns whether there were any."""
        missing = np.flatnonzero(found.contents.generation[slab.num_reserved :]) + slab.num_reserved
        if len(missing):
            self._log.warn(
                "short", "disk tier: %s was cut short: %d blocks are lost", self._path, len(missing)
            )
            found.contents.forget(missing)
            found.corrected = True
        return len(missing) > 0

    def _settle(self, slab: Slab, found: Found) -> None:
        """Give the slab as much of the directory's room as there is without others' blocks."""
        slab.trim(slab.num_reserved)
        room = slab.room
        assert room is not None
        if slab.file_bytes > room.own_bytes:
            # Its own room without blocks goes before blocks of others.
            slab.trim(_end_of_blocks(slab, found))
        while (lacking := slab.file_bytes - room.own_bytes) > 0 and room.make(lacking):
            pass
        slab.reserve(slab.layout.first_slot + 1)
        slab.used_now()

    def _room(self) -> Room:
        """The room of the directory, after slabs of others have given back what they only reserve."""
        others = [path for path in slabs_in(self._directory) if path != self._path]
        for path in others:
            self._trim(path)
        return Room(self._geometry.capacity_bytes, others, self.make_way)

    def _trim(self, path: Path) -> None:
        """Give back the room behind the last block of another slab. It counts as it is if it cannot be read.

        Cost: its journal is read, 80 bytes a block.
        """
        try:
            with self._other(path) as slab:
                if isinstance(slab, str) or slab.layout.is_moving:
                    return
                needed = _end_of_blocks(slab, recover(slab))
                if slab.num_reserved > needed:
                    slab.trim(needed)
        except (OSError, MemoryError) as error:
            self._log.warn(f"trim {path}", "disk tier: %s stays as it is: %s", path, error)

    @contextlib.contextmanager
    def _other(self, path: Path) -> Iterator[Slab | str]:
        """The slab of another producer, which counts as not used; or why nobody can use it."""
        before, fd = path.stat(), lock_file(path)
        try:
            slab = Slab.open(path, self._files, self._log)
            if isinstance(slab, str):
                yield slab
                return
            with contextlib.closing(slab):
                yield slab
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        except OSError as error:
            why = (
                f"{path} cannot be read ({error.strerror}), and its room is needed: delete it if it stays so"
            )
            raise OSError(error.errno or errno.EIO, why) from None
        finally:
            os.close(fd)


def _end_of_blocks(slab: Slab, found: Found) -> int:
    """The slot behind the last block, but behind the first slot at the least."""
    slots = found.contents.slots()
    return 1 + (int(slots[-1]) if len(slots) else slab.layout.first_slot)


def _slots_left(slab: Slab, num_bytes: int) -> int:
    """How many slots a slab keeps that gives up so many bytes and a margin; 0 if it is hardly worth keeping.

    The margin is a part of the slots that it could have, so that it is not asked again at once.
    """
    layout, num_slots = slab.layout, slab.num_reserved - slab.layout.first_slot
    share = layout.num_usable // SMALLEST_SHARE
    margin = max(1, min(share, num_slots // 4))
    if layout.is_moving or num_slots <= share:
        return 0
    return max(0, num_slots - margin - -(-num_bytes // layout.slot_bytes))


def _check_is_file(path: Path) -> None:
    """Refuse a directory, named pipe, socket or device under the name of a slab. Raises `ConfigError`."""
    mode = path.lstat().st_mode
    if stat.S_ISREG(mode) or stat.S_ISLNK(mode):
        return
    kinds = {stat.S_IFDIR: "a directory", stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket"}
    what = kinds.get(stat.S_IFMT(mode), "a device")
    raise ConfigError("path", str(path), f"it is {what} under the name of a slab: move it away, or delete it")


def check_private(path: Path) -> None:
    """Refuse a directory, or a file in it, that other users of the machine could change.

    Raises: `ConfigError` with the command that mends it; `OSError`.
    """
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode) and path.is_dir():
        status = path.stat()
    elif stat.S_ISLNK(status.st_mode):
        raise ConfigError("path", str(path), "it is a link that leads out of the directory: delete it")
    if status.st_mode & stat.S_IWOTH:
        why = f"every user of this machine may write there: chmod o-w {path}, or name a directory in it"
        raise ConfigError("path", str(path), why)
    own = os.geteuid()
    if own != 0 and status.st_uid not in (0, own):
        why = f"it belongs to user {status.st_uid}, and this is user {own}: chown {own} {path}"
        raise ConfigError("path", str(path), why)
