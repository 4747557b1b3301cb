"""Iterates over the elements of a JSON array. The memory does not depend on the array's length."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from kvoffload.errors import TraceError
from kvoffload.traces.compressed import DAMAGE, STDIN, decompressing, is_stream, opened
from kvoffload.traces.lines import numbered_lines

_CHUNK_BYTES = 1 << 16
LARGEST_ELEMENT = 1 << 28
"""Largest length of an element in characters. A longer element counts as invalid JSON."""
_SEPARATORS = re.compile(r"[ \t\r\n,]*")


def is_array(path: Path) -> bool:
    """Return True if a file is a JSON array of objects, that is, if its first line is ``[`` or ``[{...``."""
    first = next((text.strip() for _, text in numbered_lines(path)), b"")
    return first.startswith(b"[") and (first == b"[" or first[1:].lstrip().startswith(b"{"))


def records(path: Path, progress: Callable[[float], None] | None = None) -> Iterator[tuple[int, bytes]]:
    """Yield the elements of a file that is a JSON array, or the lines of any other file, numbered from 1.

    A stream is always read as lines, because it cannot be read twice.
    """
    has_elements = not is_stream(path) and is_array(path)
    return elements(path, progress) if has_elements else numbered_lines(path, progress)


def elements(
    path: Path, progress: Callable[[float], None] | None = None, largest: int = LARGEST_ELEMENT
) -> Iterator[tuple[int, bytes]]:
    """Yield the elements of the array in a file, as (number from 1, JSON text).

    Memory: proportional to the largest element. Raises: `TraceError` for an unreadable or invalid file.
    """
    buffer = _Buffer(largest)
    try:
        with opened(path) as raw:
            size = 0 if path == STDIN else path.stat().st_size
            file = decompressing(raw, path.suffix)
            while buffer.fill(file.read(buffer.wanted_bytes)):
                yield from buffer.elements()
                if progress is not None and size > 0:
                    progress(raw.tell() / size)
    except json.JSONDecodeError as error:
        reason = error.msg.lower()
        raise TraceError(f"{path}: element {buffer.number + 1}: invalid JSON ({reason})") from None
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}: element {buffer.number + 1}: not UTF-8 ({error.reason})") from None
    except DAMAGE as error:
        raise TraceError(f"{path}: damaged or truncated after element {buffer.number} ({error})") from None
    except OSError as error:
        raise TraceError(f"{path}: {(error.strerror or str(error)).lower()}") from None


class _Buffer:
    """The unparsed text of an array.

    Attributes:
        number: number of elements read so far.
    """

    def __init__(self, largest: int) -> None:
        self.number = 0
        self._largest, self._text, self._is_begun, self._is_over = largest, "", False, False
        self._decode = codecs.getincrementaldecoder("utf-8-sig")().decode
        self._parse = json.JSONDecoder().raw_decode
        self._error: json.JSONDecodeError | None = None

    @property
    def wanted_bytes(self) -> int:
        """Number of bytes to read next, which doubles the buffer.

        After each read, the parser starts again at the beginning of the element. If all reads had the same
        size, the time would therefore grow with the square of the element's length.
        """
        return max(_CHUNK_BYTES, len(self._text))

    def fill(self, chunk: bytes) -> bool:
        """Append a chunk, which is empty at the end of the file. Returns False if the array has ended.

        Raises: `json.JSONDecodeError` if the file ends within an element.
        """
        if self._is_over:
            return False
        self._text += self._decode(chunk, not chunk)
        if self._error is not None and not chunk:
            raise self._error
        if not self._is_begun:
            self._text, self._is_begun = self._text[self._text.find("[") + 1 :], True
        return True

    def elements(self) -> Iterator[tuple[int, bytes]]:
        """Yield the elements that are complete. Raises `json.JSONDecodeError` if an element is too large."""
        text, start = self._text, _skip_separators(self._text, 0)
        while text[start : start + 1] != "]":
            try:
                _, end = self._parse(text, start)
            except json.JSONDecodeError as error:
                self._text, self._error = text[start:], error
                if len(self._text) > self._largest:
                    raise
                return
            self.number += 1
            yield self.number, text[start:end].encode()
            start = _skip_separators(text, end)
        self._is_over = True


def _skip_separators(text: str, start: int) -> int:
    match = _SEPARATORS.match(text, start)
    assert match is not None
    return match.end()
