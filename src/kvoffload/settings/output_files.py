"""Output files of commands: checks before the work, and atomic replacement at the end."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvoffload.errors import ConfigError


def check_new(field: str, path: Path, *, force: bool) -> None:
    """Raise `ConfigError` if an output file already has content, unless `force` is set.

    Call this function before the work, so that a user does not wait for a result that cannot be written. It
    also refuses directories, and ``-``, because users of ``-`` mean standard output, not a file of this name.
    Devices and pipes are accepted. Empty files are accepted, too, because an aborted command may leave them.
    """
    if str(path) == "-":
        raise ConfigError(field, "-", "allowed: the path of a file, or /dev/stdout for standard output")
    if path.is_dir():
        raise ConfigError(field, str(path), "allowed: a regular file, or a new one")
    if not force and path.is_file() and path.stat().st_size > 0:
        raise ConfigError(field, str(path), "the file exists; --force replaces it")


def check_regular(field: str, path: Path) -> None:
    """Raise `ConfigError` unless `path` is a regular file or does not exist yet.

    Call this before `replaced`, which would otherwise replace a device such as /dev/stdout by a file.
    """
    if path.exists() and not path.is_file():
        raise ConfigError(field, str(path), "allowed: a regular file, or a new one")


@contextmanager
def written(field: str, path: Path) -> Iterator[None]:
    """Context manager that converts any `OSError` to a `ConfigError` that names the option `field`."""
    try:
        yield
    except OSError as error:
        raise ConfigError(field, str(path), f"the file cannot be written ({error.strerror})") from None


@contextmanager
def replaced(field: str, path: Path) -> Iterator[Path]:
    """Context manager: the caller writes a temporary file, ``NAME.part``, which then replaces `path`.

    Yields the path of the temporary file. The replacement is atomic, so `path` never has incomplete content.
    If the body of the ``with`` fails, the temporary file is deleted. An `OSError` becomes a `ConfigError`, as
    in `written`.
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
