"""The on-disk cache of compiled kernels, which makes sure that only the first start compiles them.

The cache is in the first of these places that is usable: ``NUMBA_CACHE_DIR``, the package's ``__pycache__``
directories, the user's cache directory, or a temporary directory of this process. If it is outside the
package, for example because a container is read-only, it begins as a copy of the compiled kernels in the
package.

Cached kernels are machine code that runs unchecked. Therefore, outside the package, kernels are loaded only
from directories that this user owns and no other user can write.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
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
"""Logger for messages about compilation. A message of level INFO says that compilation delays the start."""
_USUAL_S = 20
_config: Any = numba.config
_PACKAGE = Path(__file__).resolve().parent.parent
_OTHERS = stat.S_IWGRP | stat.S_IWOTH
"""Bits of a file's mode that let other users write."""
_STAMP = _PACKAGE / "structures" / "__pycache__" / "kernels.stamp"


def prepare(*, is_needed: bool = True) -> bool:
    """Choose the cache directory. Call this once, before the first compilation.

    Returns False if no directory is usable; then kernels are not cached.

    Args:
        is_needed: False if this package's kernels need no cache, because the wheel contains them. Then no
            warning is logged if no directory is usable.
    """
    digest, configured = digest_of_sources(), _config.CACHE_DIR
    _config.CACHE_DIR = ""
    if configured and (place := trusted_directory(Path(configured).absolute(), digest)):
        _use(place, digest)
        return True
    if _prepare_package(digest):
        return True
    home = _users_cache()
    place = trusted_directory(home, digest) if home is not None else None
    if place is None:
        try:
            place = Path(tempfile.mkdtemp(prefix="kvoffload-kernels-"))
        except OSError:
            if is_needed:
                COMPILING.warning(
                    "kvoffload: kernels are compiled at every start, because no cache directory is writable "
                    "by this user only; set NUMBA_CACHE_DIR to such a directory"
                )
            return False
        atexit.register(shutil.rmtree, place, ignore_errors=True)
    _use(place, digest)
    return True


def announce_compilation(reason: str = "") -> None:
    """Log that compilation delays this start, for this reason. Logs nothing if there are cached kernels."""
    if not any(any(kept.glob("*.nbi")) for _, kept in _places()):
        because = f", because {reason}" if reason else ""
        COMPILING.info(
            "kvoffload: compiling kernels, once for this installation (about %d s)%s ...", _USUAL_S, because
        )


def forget(function: Callable[..., Any]) -> None:
    """Delete a kernel's cache files, which an interrupted write may have damaged.

    Raises: `OSError` if a file cannot be deleted.
    """
    source = Path(function.__code__.co_filename).resolve()
    for directory, kept in _places():
        if directory == source.parent:
            for path in kept.glob(f"{source.stem}.{function.__qualname__}-*.nb[ic]"):
                path.unlink(missing_ok=True)


def _use(place: Path, digest: str) -> None:
    """Make `place` the cache directory, and copy the package's compiled kernels to it if they are current."""
    _config.CACHE_DIR = str(place)
    with contextlib.suppress(OSError):
        if _STAMP.read_text() != digest:
            return
        for directory, kept in _places():
            # The index files (nbi) are copied last, because numba looks up a kernel by its index file.
            for pattern in ("*.nbc", "*.nbi"):
                for kernel in directory.glob(f"__pycache__/{pattern}"):
                    if not (kept / kernel.name).exists():
                        _copy(kernel, kept)


def _copy(kernel: Path, kept: Path) -> None:
    """Copy a file to the directory `kept`, atomically, because other processes may be reading it."""
    kept.mkdir(mode=0o700, exist_ok=True)
    unfinished = kept / f".{kernel.name}.{os.getpid()}"
    try:
        shutil.copyfile(kernel, unfinished)
        os.replace(unfinished, kept / kernel.name)
    finally:
        unfinished.unlink(missing_ok=True)


def _places() -> Iterator[tuple[Path, Path]]:
    """Yield each directory of the package together with the directory in which numba caches its kernels."""
    for directory in sorted({source.parent for source in _PACKAGE.rglob("*.py")}):
        if _config.CACHE_DIR:
            # numba's naming scheme. If it changes, the kernels are compiled and cached again.
            digest = hashlib.sha1(str(directory).encode()).hexdigest()
            yield directory, Path(_config.CACHE_DIR) / f"{directory.name}_{digest}"
        else:
            yield directory, directory / "__pycache__"


def _users_cache() -> Path | None:
    home = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    return home if home.is_absolute() else None


def trusted_directory(home: Path, digest: str) -> Path | None:
    """Create or find a directory below `home` that only this user can write or replace; None on failure."""
    if not _is_safe(home):
        return None
    place = home / f"kvoffload-{digest[:16]}"
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        inside = [place, *(path for path in place.iterdir() if path.is_dir())]
    except OSError:
        return None
    return place if all(map(_is_own, inside)) and _can_write(place) else None


def _is_own(directory: Path) -> bool:
    """Return True if this user owns the directory and no other user can write it."""
    status = directory.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & _OTHERS


def _is_safe(home: Path) -> bool:
    """Return True if no other user can create the directory `home`, or replace directories in it."""
    place = home
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        status = place.stat()
    except OSError:
        return False
    is_sticky = status.st_mode & stat.S_ISVTX
    return status.st_uid in (0, os.geteuid()) and bool(not status.st_mode & _OTHERS or is_sticky)


def _can_write(directory: Path) -> bool:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=directory).close()
    except OSError:
        return False
    return True


@functools.cache
def digest_of_sources() -> str:
    """Hash all source files that contain kernels, or helpers that are compiled into kernels.

    numba notices only changes in the kernel's own file. If a helper in another file changes, by an edit or an
    upgrade, a cached kernel would run old code. This hash makes sure that the kernel is then compiled again.
    """
    digest = hashlib.sha256()
    for path in sorted(_PACKAGE.rglob("*.py")):
        content = path.read_bytes()
        if b"kvoffload.structures" in content:
            digest.update(f"{path.relative_to(_PACKAGE)} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def _prepare_package(digest: str) -> bool:
    """Delete outdated cached kernels of the package. Returns False if the package is not writable."""
    if not _can_write(_STAMP.parent):
        return False
    try:
        if not (_STAMP.exists() and _STAMP.read_text() == digest):
            for cached in _PACKAGE.rglob("__pycache__/*.nb[ic]"):
                cached.unlink(missing_ok=True)
            _STAMP.write_text(digest)
    except OSError:
        # Another user, such as root, has compiled here.
        return False
    return True
