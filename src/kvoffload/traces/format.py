"""What a format of trace files is, and which one a file has."""

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
    """Reads one kind of trace files. A format is a file in `formats` with a class derived from this one.

    Attributes:
        name: what users call it.
        suffixes: of its files, in lower case, the suffix of a compression left out.
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
        """As `read_trace`, for a file of this format; `block_tokens` is at least 1, if given."""


FORMATS: Registry[TraceFormat] = Registry("trace format", TraceFormat, "kvoffload.traces.formats")

DEFAULT_FORMAT = "mooncake"
"""Of files with a suffix that no format claims."""


def format_of(path: Path) -> TraceFormat:
    """The format of a file, by its suffix."""
    suffixes = [suffix.lower() for suffix in path.suffixes if suffix not in COMPRESSIONS]
    for name in FORMATS.names():
        found = FORMATS.find(name)
        if suffixes and suffixes[-1] in found.suffixes:
            return found()
    return FORMATS.find(DEFAULT_FORMAT)()


def read_trace(
    path: str | Path,
    *,
    block_tokens: int | None = None,
    skip_bad_lines: bool = False,
    progress: Callable[[float], None] | None = None,
) -> Trace:
    """Read a trace; the suffix ``.gz``, ``.xz`` or ``.zst`` determines the compression.

    The order of the file is the order of arrival, whatever the timestamps are. Blank lines are ignored.

    Args:
        block_tokens: Tokens in one block of the file. None: what its header says, or 512.
        skip_bad_lines: Leave bad lines out and count them in `Trace.skipped_lines`. A file that cannot
            be read to its end, or has no good line, is still an error.
        progress: Called from time to time with the share of the file that has been read, 0 to 1.

    Cost: about 0.3 s per million block references.
    Raises: `TraceError`, one line: file, line number, field, reason. `ConfigError` for `block_tokens`.
    """
    if block_tokens is not None and block_tokens < 1:
        raise ConfigError("block_tokens", block_tokens, "allowed: 1 or more")
    path = Path(path)
    return format_of(path).read(
        path, block_tokens=block_tokens, skip_bad_lines=skip_bad_lines, progress=progress
    )
