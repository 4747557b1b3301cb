"""Opens a directory for one owner: takes its lock, and opens or makes its slab.

A slab of another producer or of another format is set aside under another name: never served, never deleted.
Does not know what the blocks are used for.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path
from typing import NamedTuple

from kvoffload.errors import ConfigError
from kvoffload.tiers.disk.files import Files
from kvoffload.tiers.disk.format import Identity, fingerprint_of
from kvoffload.tiers.disk.journal import Journal
from kvoffload.tiers.disk.layout import Layout
from kvoffload.tiers.disk.lock import DirectoryLock
from kvoffload.tiers.disk.recovery import Contents, Progress, recover
from kvoffload.tiers.disk.slab import SLAB_NAME, Slab, now_s
from kvoffload.tiers.rate_limited_log import RateLimitedLog


class Geometry(NamedTuple):
    """What a directory must hold: the caller's options, already checked against each other."""

    layout: Layout
    capacity_bytes: int
    fingerprint: str


class Opened(NamedTuple):
    """A locked directory, its slab and journal, and what the journal says is there."""

    lock: DirectoryLock
    slab: Slab
    journal: Journal
    contents: Contents


def open_directory(
    directory: Path, geometry: Geometry, files: Files, log: RateLimitedLog, progress: Progress | None
) -> Opened:
    """Lock a directory, making it if it is absent, and open its slab and journal.

    Waits up to half a minute for the lock of another process. Raises `ConfigError`; then nothing is locked or
    open.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError("path", str(directory), f"a directory ({error.strerror})") from None
    with contextlib.ExitStack() as undo:
        lock = DirectoryLock(directory, log)
        undo.callback(lock.release)
        slab = open_slab(directory, geometry, files, log)
        undo.callback(slab.close)
        found = recover(slab, progress)
        try:
            journal = Journal(slab, found)
        except OSError as error:
            why = f"its journal cannot be written ({error.strerror})"
            raise ConfigError("path", str(directory), why) from None
        undo.pop_all()
    return Opened(lock, slab, journal, found.contents)


def open_slab(directory: Path, geometry: Geometry, files: Files, log: RateLimitedLog) -> Slab:
    """The slab of a directory, made if there is none. One of another producer or format is set aside.

    Raises `ConfigError`, also if it is of this producer and has another size.
    """
    path = directory / SLAB_NAME
    layout, capacity_bytes, text = geometry
    fingerprint = fingerprint_of(text)
    if path.exists():
        try:
            found = Slab.open(path, files, log)
        except OSError as error:
            raise ConfigError(
                "path", str(directory), f"its slab cannot be opened ({error.strerror})"
            ) from None
        reason = found if isinstance(found, str) else _difference(found, layout, fingerprint)
        if isinstance(found, Slab) and not reason:
            if found.layout.num_slots != layout.num_slots:
                found.close()
                raise ConfigError(
                    "capacity_bytes", capacity_bytes,
                    f"the slab in {directory} was made for {found.capacity_bytes}: "
                    "give that, or delete it (it is only a cache)",
                )  # fmt: skip
            try:
                found.complete()
            except OSError as error:
                found.close()
                raise ConfigError(
                    "path", str(directory), f"a file system with room ({error.strerror})"
                ) from None
            return found
        if isinstance(found, Slab):
            found.close()
        set_aside(path, reason, log)
    identity = Identity(secrets.randbits(64), fingerprint, text, now_s())
    return Slab.create(path, layout, identity, capacity_bytes, files, log)


def _difference(slab: Slab, layout: Layout, fingerprint: bytes) -> str:
    """Why this slab counts as another producer's; empty if it does not."""
    if slab.identity.fingerprint != fingerprint:
        return f"it holds blocks of another producer ({slab.identity.text})"
    if (slab.layout.block_bytes, slab.layout.key_bytes) != (layout.block_bytes, layout.key_bytes):
        return f"it has blocks of {slab.layout.block_bytes} bytes and keys of {slab.layout.key_bytes}"
    return ""


def set_aside(path: Path, reason: str, log: RateLimitedLog) -> Path:
    """Rename a slab that may not be used, so that another can take its place; returns the new name."""
    number = 1
    while (target := path.with_name(f"{path.name}.set-aside-{number}")).exists():
        number += 1
    os.rename(path, target)
    log.warn(
        f"aside {target}", "disk tier: set aside %s as %s: %s. "
        "It is not used; delete it to free its space", path, target.name, reason,
    )  # fmt: skip
    return target
