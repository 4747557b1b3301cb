"""Maintenance of slabs: report, verify, compact, delete. Only `inspect` accepts a slab that is in use."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kvoffload.errors import ConfigError, UnavailableError
from kvoffload.tiers.disk.files import Files
from kvoffload.tiers.disk.journal import Journal
from kvoffload.tiers.disk.lock import DirectoryLock, is_writable, locked_for_reading, owner_of
from kvoffload.tiers.disk.recovery import Recovered, read_in_chunks, recover
from kvoffload.tiers.disk.slab import REFUSED, SOUND, UNREADABLE, Slab
from kvoffload.tiers.disk.slab_directory import SLABS, slabs_in
from kvoffload.tiers.rate_limited_log import RateLimitedLog


@dataclass(frozen=True)
class SlabReport:
    """Report of a slab. Sizes in bytes, times in seconds since 1970.

    Attributes:
        problem: reason why the slab is unusable; empty for a usable slab. With a problem, only `name` and
            `file_bytes` are set.
        owner: pid of the process that has the directory open, or None. While a process has the directory
            open, the report may be outdated.
        written_at_s: earliest, median and latest write time of the blocks; empty if there are no blocks.
        log_used: used share of the log, 0 to 1.
        journal_damage: number of unreadable parts of the journal.
    """

    name: str
    file_bytes: int
    problem: str = ""
    owner: str | None = None
    fingerprint: str = ""
    created_at_s: int = 0
    capacity_bytes: int = 0
    block_bytes: int = 0
    key_bytes: int = 0
    capacity_blocks: int = 0
    num_blocks: int = 0
    written_at_s: tuple[int, ...] = ()
    log_used: float = 0.0
    epoch: int = 0
    journal_damage: int = 0


class Problem(NamedTuple):
    """A block that fails verification: slot, key in hex, and reason."""

    slot: int
    key: str
    why: str


def find_slabs(path: Path) -> list[Path]:
    """Return the slab at `path`, or the slabs in a directory, most recently opened or written first.

    Raises: `ConfigError` if there is no slab.
    """
    slabs = [path] if path.is_file() else slabs_in(path)[::-1]
    if not slabs:
        allowed = f"allowed: a slab, or the directory of a disk tier, which has files {SLABS}"
        raise ConfigError("path", str(path), allowed)
    return slabs


def inspect(path: Path, files: Files | None = None) -> list[SlabReport]:
    """Report the slab at `path`, or all slabs in a directory, in the order of `find_slabs`.

    Raises: `ConfigError` if there is no slab.
    """
    slabs, reports = find_slabs(path), list[SlabReport]()
    owner = owner_of(slabs[0].parent)
    for slab in slabs:
        # The owner may delete a slab at any moment.
        with contextlib.suppress(FileNotFoundError):
            reports.append(_report(slab, owner, files or Files()))
    return reports


def _report(path: Path, owner: str | None, files: Files) -> SlabReport:
    size = path.stat().st_size
    try:
        slab = Slab.open(path, files, RateLimitedLog("kvoffload.disk"), read_only=True)
    except OSError as error:
        slab = error.strerror or str(error)
    if isinstance(slab, str):
        return SlabReport(path.name, size, problem=slab)
    with contextlib.closing(slab):
        try:
            recovered, layout = recover(slab, salvage=True), slab.layout
        except MemoryError:
            return SlabReport(
                path.name, size, problem="its journal does not fit into the memory of this machine"
            )
    written = np.sort(recovered.contents.written_at_s[recovered.contents.slots()])
    return SlabReport(
        path.name,
        size,
        owner=owner,
        fingerprint=slab.identity.text,
        created_at_s=slab.identity.created_at_s,
        capacity_bytes=slab.capacity_bytes,
        block_bytes=layout.block_bytes,
        key_bytes=layout.key_bytes,
        capacity_blocks=layout.num_blocks,
        num_blocks=len(written),
        written_at_s=(int(written[0]), int(written[len(written) // 2]), int(written[-1]))
        if len(written)
        else (),
        log_used=recovered.log_end / layout.log_bytes,
        epoch=recovered.epoch,
        journal_damage=recovered.damaged,
    )


@contextlib.contextmanager
def opened(
    path: Path, files: Files | None = None, *, read_only: bool = False
) -> Iterator[tuple[Slab, Recovered]]:
    """Open and lock a slab, or a directory with one slab; yield the slab and its recovered journal.

    With `read_only`, the directory may be on a file system that cannot be written.

    Raises: `ConfigError` if there is not exactly one usable slab; `UnavailableError`, for example while an
    engine has the directory open.
    """
    slabs, log = find_slabs(path), RateLimitedLog("kvoffload.disk")
    if len(slabs) > 1:
        raise ConfigError("path", str(path), f"allowed: one of {', '.join(str(slab) for slab in slabs)}")
    (report,) = inspect(slabs[0], files)
    if report.problem:
        raise ConfigError("path", str(slabs[0]), report.problem)
    with contextlib.ExitStack() as undo:
        try:
            if read_only and not is_writable(slabs[0].parent):
                undo.enter_context(locked_for_reading(slabs[0]))
            else:
                lock = DirectoryLock(slabs[0].parent, log, wait_s=0.0)
                undo.callback(lock.release)
                lock.include(slabs[0])
            slab = Slab.open(slabs[0], files or Files(), log, read_only=read_only)
            if isinstance(slab, str):
                raise ConfigError("path", str(slabs[0]), slab)
            undo.callback(slab.close)
            recovered = recover(slab, salvage=True)
        except OSError as error:
            raise UnavailableError("path", str(path), f"it cannot be read ({error.strerror})") from None
        yield slab, recovered


def delete(slabs: list[Path]) -> None:
    """Delete slabs of one directory. The lock file stays, because another process may wait for it.

    Raises:
        ConfigError: a path is a link, or does not have the name of a slab; no file is deleted.
        UnavailableError: a process has the directory open, or the directory cannot be written.
    """
    for slab in slabs:
        if not slab.match(SLABS) or slab.is_symlink():
            raise ConfigError("path", str(slab), f"allowed: a file {SLABS}, or a directory with such files")
    directory = slabs[0].parent
    lock = DirectoryLock(directory, RateLimitedLog("kvoffload.disk"), wait_s=0.0)
    try:
        for slab in slabs:
            slab.unlink(missing_ok=True)
    except OSError as error:
        raise UnavailableError("path", str(directory), f"it cannot be written ({error.strerror})") from None
    finally:
        lock.release()


def verify(
    slab: Slab, recovered: Recovered, progress: Callable[[int, int], None] = lambda done, total: None
) -> list[Problem]:
    """Read and verify every block; returns the blocks that fail.

    Args:
        progress: called with the number of checked blocks and the number of all blocks.
    """
    slots, problems, num_read = recovered.contents.slots(), list[Problem](), 0
    for batch, keys, outcomes, _ in read_in_chunks(slab, recovered.contents, slots):
        for row in np.flatnonzero(outcomes != SOUND).tolist():
            why = "cannot be read" if outcomes[row] in (UNREADABLE, REFUSED) else "has a wrong checksum"
            problems.append(Problem(int(batch[row]), keys[row].hex(), why))
        num_read += len(batch)
        progress(num_read, len(slots))
    return problems


def compact(slab: Slab, recovered: Recovered) -> None:
    """Write a new checkpoint of the readable blocks, and clear the log. Raises `OSError` if this fails."""
    Journal(slab, recovered).checkpoint(recovered.contents)
    # Zeros make unreadable pages of the log readable again.
    slab.write_zeros(slab.layout.log_offset, slab.layout.slots_offset)
    slab.sync()
