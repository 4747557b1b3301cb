"""The contract of trace formats, and `read_trace`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

from kvoffload.errors import ConfigError
from kvoffload.settings.registry import Registry
from kvoffload.traces.compressed import COMPRESSIONS
from kvoffload.traces.trace import Trace


class TraceFormat(ABC):
    """A format of trace files. Each format has a file in `formats` with a subclass.

    Attributes:
        name: name of the format, for users.
        suffixes: lower-case suffixes of files in this format, without a suffix such as ``.gz``.
    """

    name: ClassVar[str]
    suffixes: ClassVar[tuple[str, ...]]

    @abstractmethod
    def read(
        self,
        path: Path,
        *,
        block_tokens: int | None,
        skip_bad_lines: bool,
        progress: Callable[[float], None] | None,
    ) -> Trace:
        """Read a file of this format. Arguments, result and errors are those of `read_trace`.

        `block_tokens` is None or at least 1.
        """


FORMATS: Registry[TraceFormat] = Registry("trace format", TraceFormat, "kvoffload.traces.formats")

DEFAULT_FORMAT = "mooncake"
"""Name of the format that is assumed for files with an unknown suffix."""


def format_of(path: Path) -> TraceFormat:
    """Detect the format of a file by its suffix."""
    suffixes = [suffix.lower() for suffix in path.suffixes if suffix not in COMPRESSIONS]
    for name in FORMATS.names():
        kind = FORMATS.find(name)
        if suffixes and suffixes[-1] in kind.suffixes:
            return kind()
    return FORMATS.find(DEFAULT_FORMAT)()


def read_trace(
    path: str | Path,
    *,
    block_tokens: int | None = None,
    skip_bad_lines: bool = False,
    progress: Callable[[float], None] | None = None,
) -> Trace:
    """Read a trace, compressed if its suffix is ``.gz``, ``.xz`` or ``.zst``.

    Blank lines are ignored.

    Args:
        block_tokens: tokens in one block. If it is None, the number in the file's header is used, or 512 if
            there is no header.
        skip_bad_lines: skip bad lines and count them in `Trace.skipped_lines`. A truncated file or a file
            without requests is still an error.
        progress: called repeatedly with the share of the file that has been read, 0 to 1.

    Cost: about 0.3 s per million block references.

    Raises:
        TraceError: the file is unusable. The message is one line with file, line number, field and reason.
        ConfigError: `block_tokens` is less than 1.
    """
    if block_tokens is not None and block_tokens < 1:
        raise ConfigError("block_tokens", block_tokens, "allowed: 1 or more")
    path = Path(path)
    return format_of(path).read(
        path, block_tokens=block_tokens, skip_bad_lines=skip_bad_lines, progress=progress
    )
