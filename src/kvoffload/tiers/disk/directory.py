"""A directory of slabs, one for each producer, and its opening for one owner.

Owns the names of slabs, and which of them makes way for which. A slab is found again when its producer comes
back, and all of them together take no more than the capacity. Does not know what the blocks are used for.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import stat
from pathlib import Path
from typing import NamedTuple

from kvoffload.errors import ConfigError, UnavailableError
from kvoffload.tiers.disk.files import Files
from kvoffload.tiers.disk.format import FORMAT_VERSION, Identity, fingerprint_of
from kvoffload.tiers.disk.journal import Journal
from kvoffload.tiers.disk.layout import Layout
from kvoffload.tiers.disk.lock import DirectoryLock
from kvoffload.tiers.disk.recovery import Contents, Found, Progress, recover
from kvoffload.tiers.disk.room import Room, by_last_use
from kvoffload.tiers.disk.slab import UNFINISHED, Slab, now_s
from kvoffload.tiers.rate_limited_log import RateLimitedLog

SLABS = "kvoffload*.slab*"
"""Pattern of the names of slabs, also of those that cannot be used."""
DAMAGED = ".damaged"
"""Ends the name of a slab that cannot be used by its producer any more. It goes before all others."""


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
    """The slabs of a directory, whoever's they are, by name; not those whose making a crash interrupted."""
    found = sorted(directory.glob(SLABS))
    return [path for path in found if path.suffix != UNFINISHED and _is_file(path)]


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
    except OSError as error:
        raise UnavailableError("path", str(directory), f"it cannot be made ({error.strerror})") from None
    check_private(directory)
    with contextlib.ExitStack() as undo:
        lock = DirectoryLock(directory, log)
        undo.callback(lock.release)
        try:
            slab, found = _open_slab(directory, geometry, files, log, progress, lock)
        except OSError as error:
            why = f"its slab cannot be opened ({error.strerror})"
            raise UnavailableError("path", str(directory), why) from None
        undo.callback(slab.close)
        try:
            journal = Journal(slab, found)
        except OSError as error:
            why = f"its journal cannot be written ({error.strerror})"
            raise UnavailableError("path", str(directory), why) from None
        undo.pop_all()
    return Opened(lock, slab, journal, found.contents)


def _open_slab(
    directory: Path,
    geometry: Geometry,
    files: Files,
    log: RateLimitedLog,
    progress: Progress | None,
    lock: DirectoryLock,
) -> tuple[Slab, Found]:
    """The producer's slab, made if there is none, and what its journal says. Raises `OSError`."""
    path = directory / geometry.slab_name
    for unfinished in directory.glob(SLABS + UNFINISHED):
        unfinished.unlink()
    if path.is_symlink() or path.exists():
        check_private(path)
        lock.include(path)
        slab = _existing(path, geometry, files, log)
        if slab is not None:
            with contextlib.ExitStack() as undo:
                undo.callback(slab.close)
                found = recover(slab, progress)
                slab.room = _room(directory, geometry, path, files, log)
                _settle(slab, found, log)
                undo.pop_all()
            return slab, found
    room = _room(directory, geometry, path, files, log)
    identity = Identity(
        secrets.randbits(64), fingerprint_of(geometry.fingerprint), geometry.fingerprint, now_s()
    )
    slab = Slab.create(path, geometry.layout, identity, geometry.capacity_bytes, files, log, room)
    lock.include(path)
    return slab, recover(slab)


def _existing(path: Path, geometry: Geometry, files: Files, log: RateLimitedLog) -> Slab | None:
    """The slab at this path; None if it cannot be used, and has got another name. Raises `OSError`."""
    slab = Slab.open(path, files, log)
    reason = slab if isinstance(slab, str) else _difference(slab, geometry)
    if isinstance(slab, Slab):
        if not reason and slab.layout.num_slots == geometry.layout.num_slots:
            return slab
        slab.close()
        if not reason:
            raise ConfigError(
                "capacity_bytes",
                geometry.capacity_bytes,
                f"{path} was made for {slab.capacity_bytes}: give that, or delete it (it is only a cache)",
            )
    damaged = path.with_name(path.name + DAMAGED)
    os.replace(path, damaged)
    log.warn(
        f"damaged {path}", "disk tier: %s cannot be used: %s. It is kept as %s until its room is needed",
        path, reason, damaged.name,
    )  # fmt: skip
    return None


def _difference(slab: Slab, geometry: Geometry) -> str:
    """Why this slab is not the one that its name says; empty if it is."""
    layout = geometry.layout
    if slab.identity.fingerprint != fingerprint_of(geometry.fingerprint):
        return f"it holds blocks of another producer ({slab.identity.text})"
    if (slab.layout.block_bytes, slab.layout.key_bytes) != (layout.block_bytes, layout.key_bytes):
        return f"it has blocks of {slab.layout.block_bytes} bytes and keys of {slab.layout.key_bytes}"
    return ""


def _settle(slab: Slab, found: Found, log: RateLimitedLog) -> None:
    """Give the slab as much of the directory's room as there is, and at least what its blocks need."""
    room, slots = slab.room, found.contents.slots()
    assert room is not None
    num_needed = int(slots[-1]) + 1 if len(slots) else 1
    if num_needed > slab.num_reserved:
        log.warn("short", "disk tier: the slab was cut short: blocks in the missing part are lost")
    while slab.file_bytes > room.own_bytes and room.make():
        pass
    slab.reserve(max(num_needed, slab.num_reserved))
    slab.mend()
    slab.used_now()


def _room(directory: Path, geometry: Geometry, own: Path, files: Files, log: RateLimitedLog) -> Room:
    """The room of a directory, after slabs of others have given back what they only reserve."""
    others = by_last_use([path for path in slabs_in(directory) if path != own])
    # Those that nobody can use go first.
    others.sort(key=lambda path: path.suffix != DAMAGED)
    for path in others:
        _trim(path, files, log)
    return Room(geometry.capacity_bytes, others, log)


def _trim(path: Path, files: Files, log: RateLimitedLog) -> None:
    """Give back the room behind the last block of a slab that has no owner.

    Cost: its journal is read as when it is opened, 80 bytes a block.
    """
    before = path.stat()
    try:
        slab = Slab.open(path, files, log)
        if isinstance(slab, str):
            return
        with contextlib.closing(slab):
            slots = recover(slab).contents.slots()
            if slab.num_reserved > (num_needed := int(slots[-1]) + 1 if len(slots) else 1):
                slab.trim(num_needed)
        # Nobody has used it.
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    except OSError as error:
        log.warn(f"trim {path}", "disk tier: %s cannot be shortened: %s", path, error.strerror)


def check_private(path: Path) -> None:
    """Refuse a directory, or a file in it, that other users of the machine could change.

    Raises: `ConfigError` with the command that mends it.
    """
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode) and path.is_dir():
        status = path.stat()
    elif stat.S_ISLNK(status.st_mode):
        raise ConfigError("path", str(path), "it is a link that leads out of the directory: delete it")
    if status.st_mode & stat.S_IWOTH:
        raise ConfigError(
            "path",
            str(path),
            f"every user of this machine may write there: chmod o-w {path}, or name a directory in it",
        )
    own = os.geteuid()
    if own != 0 and status.st_uid not in (0, own):
        raise ConfigError(
            "path",
            str(path),
            f"it belongs to user {status.st_uid}, and this is user {own}: chown {own} {path}",
        )


def _is_file(path: Path) -> bool:
    return stat.S_ISREG(path.lstat().st_mode)
