"""The elements of a JSON array of any length, one at a time. Does not know what they mean."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterator
from pathlib import Path

from kvoffload.errors import TraceError
from kvoffload.traces.compressed import DAMAGE, STDIN, decompressing, opened
from kvoffload.traces.lines import numbered_lines

_CHUNK_BYTES = 1 << 16
_LARGEST_ELEMENT = 1 << 28
"""Characters: what is not JSON is not read to its end."""
_BETWEEN = " \t\r\n,"


def is_array(path: Path) -> bool:
    """Whether a file is one array over several lines or of objects, and not an array on each line."""
    first = next((text.strip() for _, text in numbered_lines(path)), b"")
    return first.startswith(b"[") and (first == b"[" or first[1:].lstrip().startswith(b"{"))


def elements(path: Path, progress: Callable[[float], None] | None = None) -> Iterator[tuple[int, bytes]]:
    """The elements of the array that a file is, each as JSON, numbered from 1.

    Memory: that of the largest element. Raises `TraceError` for what cannot be read.
    """
    number = 0
    try:
        with opened(path) as raw:
            size = 0 if path == STDIN else path.stat().st_size
            file = decompressing(raw, path.suffix)
            decoder, text = codecs.getincrementaldecoder("utf-8-sig")(), ""
            parse, wanted, is_first = json.JSONDecoder().raw_decode, _CHUNK_BYTES, True
            while True:
                chunk = file.read(wanted)
                text += decoder.decode(chunk, not chunk)
                start = 0
                if is_first:
                    start, is_first = text.find("[") + 1, False
                while True:
                    while start < len(text) and text[start] in _BETWEEN:
                        start += 1
                    if text[start : start + 1] == "]":
                        return
                    try:
                        _, end = parse(text, start)
                    except json.JSONDecodeError as error:
                        reason = error.msg
                        break
                    number += 1
                    yield number, text[start:end].encode()
                    start = end
                text = text[start:]
                # An element that is cut off here is parsed again from its start: twice as much at a time.
                wanted = max(_CHUNK_BYTES, len(text))
                if progress is not None and size > 0:
                    progress(raw.tell() / size)
                if not chunk or len(text) > _LARGEST_ELEMENT:
                    raise TraceError(f"{path}: element {number + 1}: invalid JSON ({reason.lower()})")
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}: element {number + 1}: not UTF-8 ({error.reason})") from None
    except DAMAGE as error:
        raise TraceError(f"{path}: damaged or truncated after element {number} ({error})") from None
    except OSError as error:
        raise TraceError(f"{path}: {(error.strerror or str(error)).lower()}") from None
