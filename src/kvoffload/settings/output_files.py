"""Output files of commands: checks before the work, and atomic replacement at the end."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvoffload.errors import ConfigError


def check_new(field: str, path: Path, *, force: bool) -> None:
    """Raise `ConfigError` if an output file has content, unless `force` is set. Call it before the work.

    Devices and pipes are accepted, and empty files, which an aborted command leaves.
    """
    if path.is_dir():
        raise ConfigError(field, str(path), "allowed: a regular file, or a new one")
    if not force and path.is_file() and path.stat().st_size > 0:
        raise ConfigError(field, str(path), "the file exists; --force replaces it")


def check_regular(field: str, path: Path) -> None:
    """Raise `ConfigError` for a device such as /dev/stdout, which `replaced` would replace by a file."""
    if path.exists() and not path.is_file():
        raise ConfigError(field, str(path), "allowed: a regular file, or a new one")


@contextmanager
def written(field: str, path: Path) -> Iterator[None]:
    """Raise `ConfigError` with the option `field` instead of any `OSError`, also for a full disk."""
    try:
        yield
    except OSError as error:
        raise ConfigError(field, str(path), f"the file cannot be written ({error.strerror})") from None


@contextmanager
def replaced(field: str, path: Path) -> Iterator[Path]:
    """Yield the path of an incomplete file, ``NAME.part``. At the end it replaces `path` atomically.

    After an error the incomplete file is deleted. Raises `ConfigError` as `written`.
    """
    incomplete = path.with_name(path.name + ".part")
    with written(field, path):
        try:
            yield incomplete
            os.replace(incomplete, path)
        except BaseException:
            with suppress(OSError):
                incomplete.unlink(missing_ok=True)
            raise
