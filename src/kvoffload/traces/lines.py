"""Reads the lines of plain and compressed files, decodes them, and reports bad lines."""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from kvoffload.errors import TraceError
from kvoffload.traces.compressed import DAMAGE, STDIN, decompressing, opened

T = TypeVar("T")

_PROGRESS_LINES = 256
LONGEST_LINE = 256 << 20
"""Largest length of a line in bytes. A request of a million tokens needs about 0.5 MB if the line has ids,
and a few MB if it has text."""


class BadLineError(Exception):
    """A bad line: ``field NAME: reason``. Callers outside this package get a `TraceError`."""


def numbered_lines(
    path: Path, progress: Callable[[float], None] | None = None
) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that are not blank, numbered from 1. Raises `TraceError` for any failure of the file.

    Args:
        progress: called repeatedly with the share of the file that has been read, 0 to 1.
    """
    number = 0
    try:
        with opened(path) as raw:
            size = 0 if path == STDIN else path.stat().st_size  # 0 for a pipe, whose size is unknown
            content = decompressing(raw, path.suffix)
            for number, line in enumerate(iter(lambda: content.readline(LONGEST_LINE + 1), b""), 1):
                if len(line) > LONGEST_LINE:
                    raise TraceError(f"{path}:{number}: longer than {LONGEST_LINE >> 20} MiB; not a trace")
                if number == 1:
                    line = line.removeprefix(codecs.BOM_UTF8)
                if progress is not None and size > 0 and number % _PROGRESS_LINES == 0:
                    progress(raw.tell() / size)
                if not line.isspace():
                    yield number, line
    except DAMAGE as error:
        raise TraceError(f"{path}: damaged or truncated after line {number} ({error})") from None
    except OSError as error:
        raise TraceError(f"{path}: {(error.strerror or str(error)).lower()}") from None
    if progress is not None:
        progress(1.0)


def decoded(decode: Callable[[bytes], T], text: bytes) -> T:
    """Decode a line with a msgspec decoder. Raises `BadLineError` with the name of the field."""
    try:
        text.decode()
        return decode(text)
    except UnicodeDecodeError as error:
        raise BadLineError(f"not UTF-8 (byte {error.start})") from None
    except msgspec.ValidationError as error:
        raise BadLineError(_validation_reason(str(error))) from None
    except msgspec.DecodeError as error:
        raise BadLineError(f"invalid JSON ({error})") from None


def _validation_reason(message: str) -> str:
    """Reword a message of msgspec for users. It is like ``Expected `int`, got `str` - at `$.timestamp```."""
    plain = message.replace("`", "")
    if missing := re.fullmatch(r"Object missing required field (\w+)", plain):
        return f"field {missing[1]}: missing"
    reason, _, place = plain.partition(" - at $.")
    reason = reason[0].lower() + reason[1:]
    return f"field {place}: {reason}" if place else f"line: {reason}"
