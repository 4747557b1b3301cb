"""A directory of slabs, one for each producer. One process at a time has the directory open.

Owns the names of slabs, and decides which slab shrinks to make space for another slab. A slab stays in the
directory for the next start of its producer. All slabs together take at most the capacity.
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
from kvoffload.tiers.disk.journal import Journal
from kvoffload.tiers.disk.lock import DirectoryLock, lock_file, unlock_file
from kvoffload.tiers.disk.recovery import Contents, Progress, Recovered, recover
from kvoffload.tiers.disk.resize import rearrange, resize
from kvoffload.tiers.disk.room import Room
from kvoffload.tiers.disk.slab import UNFINISHED, Slab
from kvoffload.tiers.disk.slab_format import FORMAT_VERSION, Identity
from kvoffload.tiers.disk.slab_layout import Layout
from kvoffload.tiers.producer_text import producer_of
from kvoffload.tiers.rate_limited_log import RateLimitedLog

SLABS = "kvoffload*.slab"
"""Glob pattern of slab names."""
SMALLEST_SHARE = 16
"""When a slab must shrink, it gives up a margin, too, so that it need not shrink again at once. The margin is
at most 1/16 of the slab's usable slots. A slab whose file has no more slots than this is deleted instead."""


class Geometry(NamedTuple):
    """Options of a directory, after they were checked."""

    layout: Layout
    capacity_bytes: int
    fingerprint: str

    @property
    def slab_name(self) -> str:
        """File name of the slab: a hash of producer, format version, and sizes of blocks and keys."""
        layout, text = self.layout, hashlib.sha256(self.fingerprint.encode())
        text.update(b"%d %d %d" % (FORMAT_VERSION, layout.block_bytes, layout.key_bytes))
        return f"kvoffload-{text.hexdigest()[:16]}.slab"


class Opened(NamedTuple):
    """A locked directory, its slab and journal, and the recovered contents."""

    lock: DirectoryLock
    slab: Slab
    journal: Journal
    contents: Contents


def slabs_in(directory: Path) -> list[Path]:
    """Return the slabs of all producers in a directory, least recently opened or written first."""
    slabs = []
    for path in sorted(directory.glob(SLABS)):
        with contextlib.suppress(FileNotFoundError):
            status = path.lstat()
            if stat.S_ISREG(status.st_mode):
                slabs.append((status.st_mtime_ns, path))
    return [path for _, path in sorted(slabs)]


def open_directory(
    directory: Path, geometry: Geometry, files: Files, log: RateLimitedLog, progress: Progress | None
) -> Opened:
    """Create the directory if it does not exist, lock it, and open the producer's slab and journal.

    Waits up to `LOCK_WAIT_S` while another process has the directory locked.

    Raises:
        UnavailableError: the directory cannot be used now.
        ConfigError: the user must change the directory's owner, mode or contents, or the capacity.

    After an error nothing is locked or open, and the producer's slab keeps its blocks.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_private(directory)
    except (FileExistsError, NotADirectoryError) as error:
        raise ConfigError("path", str(directory), f"allowed: a directory ({error.strerror})") from None
    except OSError as error:
        raise UnavailableError("path", str(directory), f"it cannot be created ({error.strerror})") from None
    with contextlib.ExitStack() as undo:
        lock = DirectoryLock(directory, log, sleep=files.sleep)
        undo.callback(lock.release)
        opening = _Opening(directory, geometry, files, log, lock)
        try:
            slab, recovered = opening.slab(progress)
        except (OSError, MemoryError) as error:
            why = getattr(error, "strerror", None) or "its journal does not fit into memory"
            raise UnavailableError("path", str(directory), f"its slab cannot be opened ({why})") from None
        undo.callback(slab.close)
        try:
            journal = Journal(slab, recovered)
        except OSError as error:
            why = f"its journal cannot be written ({error.strerror})"
            raise UnavailableError("path", str(directory), why) from None
        undo.pop_all()
    return Opened(lock, slab, journal, recovered.contents)


class _Opening:
    """Opens the producer's slab in a locked directory.

    `Room` calls `shrink_other` during the opening, and later when the slab grows. All methods raise `OSError`
    if the medium fails or is full.
    """

    def __init__(
        self, directory: Path, geometry: Geometry, files: Files, log: RateLimitedLog, lock: DirectoryLock
    ) -> None:
        self._directory, self._geometry, self._path = directory, geometry, directory / geometry.slab_name
        self._files, self._log, self._lock = files, log, lock

    def slab(self, progress: Progress | None) -> tuple[Slab, Recovered]:
        """Open the producer's slab, or create it; returns the slab and its recovered journal."""
        for unfinished in self._directory.glob(SLABS + UNFINISHED):
            _check_is_file(unfinished)
            unfinished.unlink()
        with contextlib.ExitStack() as undo:
            slab = self._open_existing() if os.path.lexists(self._path) else None
            recovered = self._prepare(slab, progress) if slab is not None else None
            if slab is not None and recovered is not None:
                undo.callback(slab.close)
                self._fit_into_room(slab, recovered)
            else:
                slab = self._create()
                undo.callback(slab.close)
                self._lock.include(self._path)
                recovered = recover(slab)
            undo.pop_all()
        return slab, recovered

    def shrink_other(self, path: Path, num_bytes: int) -> int:
        """Shrink another slab by at least `num_bytes`, or delete it; returns its new size, 0 if deleted.

        The coldest blocks are lost. Cost: 160 bytes of journal I/O per block, and at most one block copy per
        removed slot.
        """
        if not path.exists():
            return 0
        with self._open_other(path) as slab:
            keep = _slots_to_keep(slab, num_bytes) if isinstance(slab, Slab) else 0
            if isinstance(slab, Slab) and keep:
                first, before = slab.layout.first_slot, slab.file_bytes
                rearrange(slab, recover(slab), first, first + keep, keep)
                slab.trim(first + keep)
                self._log.warn(
                    f"shrink {path}", "disk tier: %s shrinks by %d MiB to %d MiB for another producer: its "
                    "coldest blocks are lost", path, (before - slab.file_bytes) >> 20, slab.file_bytes >> 20,
                )  # fmt: skip
                return slab.file_bytes
        path.unlink()
        self._log.warn(f"delete {path}", "disk tier: deleted %s: another producer needs the space", path)
        return 0

    def _open_existing(self) -> Slab | None:
        """Open the producer's slab. If this version cannot use the slab, delete it and return None."""
        path, geometry = self._path, self._geometry
        check_private(path)
        _check_is_file(path)
        self._lock.include(path)
        slab = Slab.open(path, self._files, self._log)
        if isinstance(slab, str):
            self._log.warn(f"lost {path}", "disk tier: %s is unusable and is replaced: %s", path, slab)
            self._lock.exclude()
            path.unlink()
            return None
        if slab.identity.fingerprint != producer_of(geometry.fingerprint):
            slab.close()
            why = f"it holds blocks of another producer ({slab.identity.text}): delete it"
            raise ConfigError("path", str(path), why)
        sizes = slab.layout.block_bytes, slab.layout.key_bytes
        if sizes != (geometry.layout.block_bytes, geometry.layout.key_bytes):
            slab.close()
            raise ConfigError("path", str(path), "it holds blocks or keys of another size: delete it")
        return slab

    def _prepare(self, slab: Slab, progress: Progress | None) -> Recovered | None:
        """Recover a slab and resize it to the capacity; returns its contents.

        If the capacity is too small for the slab's journal, closes and deletes the slab and returns None. An
        exception closes the slab, too.
        """
        with contextlib.ExitStack() as undo:
            undo.callback(slab.close)
            recovered = recover(slab, progress)
            # Before any write, because a stale superblock may name a journal where blocks will be. The newer
            # copy is synced first, because a killed process may have left it in the page cache.
            slab.sync()
            slab.repair_superblocks()
            if self._forget_cut_blocks(slab, recovered):
                # Durable before the file grows again, because keys of lost blocks may then get new entries.
                Journal(slab, recovered)
                recovered = recover(slab)
            slab.room = self._room()
            if slab.capacity_bytes != self._geometry.capacity_bytes or slab.layout.is_moving:
                resized = self._resize(slab, recovered)
                if resized is None:
                    self._lock.exclude()
                    self._path.unlink()
                    return None
                recovered = resized
            undo.pop_all()
        return recovered

    def _resize(self, slab: Slab, recovered: Recovered) -> Recovered | None:
        """Resize a slab to the configured capacity if possible. Returns None if the journal does not fit."""
        before, wanted = slab.capacity_bytes, self._geometry.capacity_bytes
        if slab.layout.is_moving and before < wanted:
            # The slots of the interrupted change end where the moved journal begins.
            target = slab.layout.with_capacity(before)
            recovered = (resize(slab, recovered, target, before) if target is not None else None) or recovered
        target, num_blocks = slab.layout.with_capacity(wanted), len(recovered.contents)
        resized = resize(slab, recovered, target, wanted) if target is not None else None
        if target is None:
            outcome = "its journal does not fit, so the slab is replaced"
        elif resized is None:
            outcome = "no space for a longer journal now; the old capacity stays until the next start"
        else:
            outcome = f"{len(resized.contents)} of {num_blocks} blocks are kept"
        self._log.warn(
            "resize", "disk tier: capacity of %s changes from %d to %d bytes: %s", self._path, before, wanted,
            outcome,
        )  # fmt: skip
        return recovered if resized is None and target is not None else resized

    def _create(self) -> Slab:
        text, geometry = self._geometry.fingerprint, self._geometry
        identity = Identity(secrets.randbits(64), producer_of(text), text, max(0, int(self._files.time_s())))
        return Slab.create(
            self._path,
            geometry.layout,
            identity,
            geometry.capacity_bytes,
            self._files,
            self._log,
            self._room(),
        )

    def _forget_cut_blocks(self, slab: Slab, recovered: Recovered) -> bool:
        """Forget blocks behind the end of a truncated file; returns True if blocks were forgotten."""
        missing = np.flatnonzero(recovered.contents.generation[slab.num_reserved :]) + slab.num_reserved
        if len(missing):
            self._log.warn(
                "short", "disk tier: %s was truncated: %d blocks are lost", self._path, len(missing)
            )
            recovered.contents.forget(missing)
            recovered.corrected = True
        return len(missing) > 0

    def _fit_into_room(self, slab: Slab, recovered: Recovered) -> None:
        """Fit the producer's slab into the directory's space.

        Other slabs shrink only if the slab's blocks need the space.
        """
        slab.trim(slab.num_reserved)
        room = slab.room
        assert room is not None
        if slab.file_bytes > room.own_bytes:
            # First release space without blocks, then drop blocks of other producers.
            slab.trim(_end_of_blocks(slab, recovered))
        while (lacking := slab.file_bytes - room.own_bytes) > 0 and room.make(lacking):
            pass
        slab.reserve(slab.layout.first_slot + 1)
        slab.touch()

    def _room(self) -> Room:
        """Trim the slabs of other producers; return the `Room` for this producer's slab."""
        other_paths = [path for path in slabs_in(self._directory) if path != self._path]
        for path in other_paths:
            self._trim_other(path)
        return Room(self._geometry.capacity_bytes, other_paths, self.shrink_other)

    def _trim_other(self, path: Path) -> None:
        """Cut off the unused space behind the last block of another producer's slab.

        An unreadable slab stays unchanged.

        Cost: reads the slab's journal, 80 bytes a block.
        """
        try:
            with self._open_other(path) as slab:
                if isinstance(slab, str) or slab.layout.is_moving:
                    return
                needed = _end_of_blocks(slab, recover(slab))
                if slab.num_reserved > needed:
                    # A killed process may have left removals in the page cache. Without these removals, the
                    # blocks behind the new end would count as lost.
                    slab.sync()
                    slab.trim(needed)
        except (OSError, MemoryError) as error:
            self._log.warn(f"trim {path}", "disk tier: %s keeps its size: %s", path, error)

    @contextlib.contextmanager
    def _open_other(self, path: Path) -> Iterator[Slab | str]:
        """Lock and open another producer's slab; yields the slab, or the reason why it is unusable.

        Restores the slab's mtime afterwards.
        """
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
            why = f"{path} cannot be read ({error.strerror}), and its space is needed"
            raise OSError(error.errno or errno.EIO, f"{why}: if this persists, delete it") from None
        finally:
            unlock_file(fd)


def _end_of_blocks(slab: Slab, recovered: Recovered) -> int:
    """Return the number of slots from slot 0 up to and including the last block.

    If the slab has no blocks, returns the number of slots below the first usable slot.
    """
    slots = recovered.contents.slots()
    return 1 + (int(slots[-1]) if len(slots) else slab.layout.first_slot)


def _slots_to_keep(slab: Slab, num_bytes: int) -> int:
    """Return the number of slots to keep if a slab shrinks by `num_bytes`; 0 to delete the slab.

    The slab gives up a margin in addition to `num_bytes`, so that it need not shrink again at once.
    """
    layout, num_slots = slab.layout, slab.num_reserved - slab.layout.first_slot
    share = layout.num_usable // SMALLEST_SHARE
    margin = max(1, min(share, num_slots // 4))
    if layout.is_moving or num_slots <= share:
        return 0
    return max(0, num_slots - margin - -(-num_bytes // layout.slot_bytes))


def _check_is_file(path: Path) -> None:
    """Raise `ConfigError` if the path is a directory, named pipe, socket or device."""
    mode = path.lstat().st_mode
    if stat.S_ISREG(mode) or stat.S_ISLNK(mode):
        return
    kinds = {stat.S_IFDIR: "a directory", stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket"}
    kind = kinds.get(stat.S_IFMT(mode), "a device")
    raise ConfigError("path", str(path), f"it is {kind} with the name of a slab: move it or delete it")


def check_private(path: Path) -> None:
    """Raise `ConfigError` if other users could change a directory or file. The error names the remedy.

    Raises `OSError` if the path's status cannot be read.
    """
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode) and path.is_dir():
        status = path.stat()
    elif stat.S_ISLNK(status.st_mode):
        raise ConfigError("path", str(path), "it is a symbolic link to a file elsewhere: delete it")
    if status.st_mode & stat.S_IWOTH:
        why = f"every user of this machine may write there: chmod o-w {path}, or use a directory in it"
        raise ConfigError("path", str(path), why)
    own = os.geteuid()
    if own != 0 and status.st_uid not in (0, own):
        why = f"it belongs to user {status.st_uid}, and this is user {own}: chown {own} {path}"
        raise ConfigError("path", str(path), why)
