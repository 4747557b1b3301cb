"""Where compiled kernels are kept, so that only the first start compiles.

In ``NUMBA_CACHE_DIR`` if that is set, else in the package's own ``__pycache__`` directories; where they
cannot be written, as in a container with a read-only file system, in the user's cache, or in a directory of
this process alone. Kernels that were compiled when the image was built are taken from the package.
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numba

COMPILING = logging.getLogger("kvoffload.compiling")
"""Says, at level INFO, when a start will take long."""
_USUAL_S = 20
_config: Any = numba.config
_PACKAGE = Path(__file__).resolve().parent.parent


def prepare() -> bool:
    """Choose the place, once, before anything is compiled; whether there is one. Raises: nothing."""
    in_package = _PACKAGE / "structures" / "__pycache__"
    digest = _digest_of_sources()
    for home in (_config.CACHE_DIR, None if _can_write(in_package) else _users_cache()):
        place = Path(home) / f"kvoffload-{digest[:16]}" if home else None
        if place is not None and _can_write(place):
            break
    else:
        _config.CACHE_DIR = ""
        if _can_write(in_package):
            _drop_stale_kernels(in_package / "kernels.stamp", digest)
            return True
        try:
            place = Path(tempfile.mkdtemp(prefix="kvoffload-kernels-"))
        except OSError:
            COMPILING.warning(
                "kvoffload: kernels are compiled at every start: no directory can be written; set "
                "NUMBA_CACHE_DIR to one"
            )
            return False
        atexit.register(shutil.rmtree, place, ignore_errors=True)
    _config.CACHE_DIR = str(place)
    for directory, kept in _places():
        for kernel in directory.glob("__pycache__/*.nb[ic]"):
            if not (kept / kernel.name).exists():
                kept.mkdir(exist_ok=True)
                shutil.copyfile(kernel, kept / kernel.name)
    return True


def say_that_it_takes_long() -> None:
    """Once, if no kernel has been kept."""
    if not any(any(kept.glob("*.nbi")) for _, kept in _places()):
        COMPILING.info("kvoffload: compiling kernels, once for this installation (about %d s) ...", _USUAL_S)


def _places() -> Iterator[tuple[Path, Path]]:
    """Every directory of the package, and where numba keeps the kernels of its files."""
    for directory in {source.parent for source in _PACKAGE.rglob("*.py")}:
        if _config.CACHE_DIR:
            # As numba names it: without that they are compiled once more, and kept.
            digest = hashlib.sha1(str(directory).encode()).hexdigest()
            yield directory, Path(_config.CACHE_DIR) / f"{directory.name}_{digest}"
        else:
            yield directory, directory / "__pycache__"


def _users_cache() -> Path | None:
    home = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    return home if home.is_absolute() else None


def _can_write(directory: Path) -> bool:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=directory).close()
    except OSError:
        return False
    return True


def _digest_of_sources() -> str:
    """Of the times of all files that have kernels, or helpers that are compiled into them.

    numba checks only the file that has the kernel: after an edit of `lists.py`, or an upgrade, a policy would
    keep running the old code.
    """
    sources = sorted(path for path in _PACKAGE.rglob("*.py") if b"kvoffload.structures" in path.read_bytes())
    state = "\n".join(f"{path.relative_to(_PACKAGE)} {path.stat().st_mtime_ns}" for path in sources)
    return hashlib.sha256(state.encode()).hexdigest()


def _drop_stale_kernels(stamp: Path, digest: str) -> None:
    """Delete the kernels in the package if they are of other sources. (Other places have the digest.)"""
    if stamp.exists() and stamp.read_text() == digest:
        return
    for cached in _PACKAGE.rglob("__pycache__/*.nb[ic]"):
        cached.unlink(missing_ok=True)
    stamp.write_text(digest)
