"""Where compiled kernels are kept, so that only the first start compiles.

In ``NUMBA_CACHE_DIR`` if that is set, else in the package's own ``__pycache__`` directories; where they
cannot be written, as in a container with a read-only file system, in the user's cache, or in a directory of
this process alone. Kernels that were compiled when the image was built are taken from the package.

A kernel is machine code and runs as it is found: outside of the package it is taken only from directories
that are this user's, and that nobody else can write.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numba

COMPILING = logging.getLogger("kvoffload.compiling")
"""Says, at level INFO, when a start will take long."""
_USUAL_S = 20
_config: Any = numba.config
_PACKAGE = Path(__file__).resolve().parent.parent
_STAMP = _PACKAGE / "structures" / "__pycache__" / "kernels.stamp"


def prepare() -> bool:
    """Choose the place, once, before anything is compiled; whether there is one. Raises: nothing."""
    digest, given = _digest_of_sources(), _config.CACHE_DIR
    _config.CACHE_DIR = ""
    if given and _is_safe(Path(given)) and (place := _own_place(Path(given), digest)):
        _use(place, digest)
        return True
    if _is_kept_in_package(digest):
        return True
    home = _users_cache()
    place = _own_place(home, digest) if home is not None and _is_safe(home) else None
    if place is None:
        try:
            place = Path(tempfile.mkdtemp(prefix="kvoffload-kernels-"))
        except OSError:
            COMPILING.warning(
                "kvoffload: kernels are compiled at every start: no directory of this user alone can be "
                "written; set NUMBA_CACHE_DIR to one"
            )
            return False
        atexit.register(shutil.rmtree, place, ignore_errors=True)
    _use(place, digest)
    return True


def say_that_it_takes_long() -> None:
    """Once, if no kernel has been kept."""
    if not any(any(kept.glob("*.nbi")) for _, kept in _places()):
        COMPILING.info("kvoffload: compiling kernels, once for this installation (about %d s) ...", _USUAL_S)


def forget(function: Callable[..., Any]) -> None:
    """Delete what is kept of a kernel that cannot be read: a write was cut off. Raises `OSError`."""
    source = Path(function.__code__.co_filename).resolve()
    for directory, kept in _places():
        if directory == source.parent:
            for path in kept.glob(f"{source.stem}.{function.__qualname__}-*.nb[ic]"):
                path.unlink(missing_ok=True)


def _use(place: Path, digest: str) -> None:
    """Keep kernels in this directory from now on; take those of the package there, if they are of these
    sources. What cannot be taken is compiled."""
    _config.CACHE_DIR = str(place)
    with contextlib.suppress(OSError):
        if _STAMP.read_text() != digest:
            return
        for directory, kept in _places():
            # numba finds a kernel by its index, so the index comes last.
            for pattern in ("*.nbc", "*.nbi"):
                for kernel in directory.glob(f"__pycache__/{pattern}"):
                    if not (kept / kernel.name).exists():
                        _copy(kernel, kept)


def _copy(kernel: Path, kept: Path) -> None:
    """All of it or nothing: other processes of the same engine start at this moment."""
    kept.mkdir(mode=0o700, exist_ok=True)
    unfinished = kept / f".{kernel.name}.{os.getpid()}"
    try:
        shutil.copyfile(kernel, unfinished)
        os.replace(unfinished, kept / kernel.name)
    finally:
        unfinished.unlink(missing_ok=True)


def _places() -> Iterator[tuple[Path, Path]]:
    """Every directory of the package, and where numba keeps the kernels of its files."""
    for directory in sorted({source.parent for source in _PACKAGE.rglob("*.py")}):
        if _config.CACHE_DIR:
            # As numba names it: without that they are compiled once more, and kept.
            digest = hashlib.sha1(str(directory).encode()).hexdigest()
            yield directory, Path(_config.CACHE_DIR) / f"{directory.name}_{digest}"
        else:
            yield directory, directory / "__pycache__"


def _users_cache() -> Path | None:
    home = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    return home if home.is_absolute() else None


def _own_place(home: Path, digest: str) -> Path | None:
    """A directory below `home` that only this user can write; None if it cannot be had."""
    place = home / f"kvoffload-{digest[:16]}"
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return None
    inside = [place, *(path for path in place.iterdir() if path.is_dir())]
    return place if all(map(_is_own, inside)) and _can_write(place) else None


def _is_own(directory: Path) -> bool:
    """Whether it is a directory of this user that nobody else can write."""
    status = directory.lstat()
    others_write = stat.S_IMODE(status.st_mode) & (stat.S_IWGRP | stat.S_IWOTH)
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not others_write


def _is_safe(home: Path) -> bool:
    """Whether nobody else can put another directory in the place of one in here, or make this one."""
    place = home
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        status = place.stat()
    except OSError:
        return False
    others_write = stat.S_IMODE(status.st_mode) & (stat.S_IWGRP | stat.S_IWOTH)
    is_sticky = status.st_mode & stat.S_ISVTX
    return status.st_uid in (0, os.geteuid()) and bool(not others_write or is_sticky)


def _can_write(directory: Path) -> bool:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=directory).close()
    except OSError:
        return False
    return True


def _digest_of_sources() -> str:
    """Of all files that have kernels, or helpers that are compiled into them.

    numba checks only the file that has the kernel: after an edit of `lists.py`, or an upgrade, a policy would
    keep running the old code.
    """
    digest = hashlib.sha256()
    for path in sorted(_PACKAGE.rglob("*.py")):
        content = path.read_bytes()
        if b"kvoffload.structures" in content:
            digest.update(f"{path.relative_to(_PACKAGE)} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def _is_kept_in_package(digest: str) -> bool:
    """Whether the package can be written. Then kernels in it that are of other sources are deleted."""
    if not _can_write(_STAMP.parent):
        return False
    try:
        if not (_STAMP.exists() and _STAMP.read_text() == digest):
            for cached in _PACKAGE.rglob("__pycache__/*.nb[ic]"):
                cached.unlink(missing_ok=True)
            _STAMP.write_text(digest)
    except OSError:
        # Somebody else has compiled here, as with sudo.
        return False
    return True
