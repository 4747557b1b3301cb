"""The decision log: what the manager decided, in order, as text that `diff` and `sha256sum` understand.

One line for each kind of decision of each request, in the order in which they were taken::

    17 hit 3 12          request 17: 3 blocks from the device, 12 more from the tier
    17 evict 12 13       these left RAM for blocks that a tier behind it has
    17 promote 871 872   and these came up from there
    17 damaged 881       block 881 was not what had been stored, and is forgotten
    17 admit 5           the admission rule let 5 of the missing blocks in
    17 refuse 904 905    and these not
    17 evict 12 13       these left
    17 store 899 900     these came, in prefix order
    17 drop 901          there was no room for these
    17 full 3            there was no room for any of the 3 missing blocks

A request is named by its number in the trace, a block by its id in the trace. A kind without blocks has
no line. The log is a pure function of trace and configuration: equal on every run, machine and Python.
"""

from __future__ import annotations

import hashlib
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from kvoffload.structures.jit import ReadI64Array, U8Array, inline, kernel
from kvoffload.structures.structs import Struct

_MAX_DIGITS = 21
_BUFFER_BYTES = 1 << 16
_SHORT_LINE_BYTES = 128
_FULL = -1


class _Lines(Struct):
    """Lines that are not yet hashed: the first `used` bytes of a buffer."""

    buffer: U8Array
    used: int


class DecisionLog:
    """Hashes every line, and writes it to `file` at once if there is one. Cost: about 10 ns a block named.

    Kernels and not `str`: a replay of millions of references spends a third of its time here otherwise.
    """

    def __init__(self, file: BinaryIO | None = None) -> None:
        self._sha256 = hashlib.sha256()
        self._file = file
        self._lines = _Lines(buffer=np.empty(_BUFFER_BYTES, np.uint8))

    def numbers(self, request: int, kind: str, first: int, second: int = -1) -> None:
        """A line that ends in one number, or in two; they are not negative."""
        while _numbers(self._lines.memory, request, kind.encode(), first, second) == _FULL:
            self._make_room(_SHORT_LINE_BYTES)
        if self._file is not None:
            self._flush()

    def blocks(self, request: int, kind: str, ids: npt.NDArray[np.int64]) -> None:
        """A line that ends in block ids; nothing if there are none."""
        if len(ids) == 0:
            return
        while _blocks(self._lines.memory, request, kind.encode(), ids) == _FULL:
            self._make_room(_SHORT_LINE_BYTES + len(ids) * _MAX_DIGITS)
        if self._file is not None:
            self._flush()

    def hexdigest(self) -> str:
        """SHA-256 of the log so far: what ``sha256sum`` says of the file."""
        self._flush()
        return self._sha256.hexdigest()

    def _make_room(self, needed: int) -> None:
        self._flush()
        if needed > len(self._lines.buffer):
            self._lines = _Lines(buffer=np.empty(2 * needed, np.uint8))

    def _flush(self) -> None:
        lines = self._lines.buffer[: self._lines.used]
        self._lines.used = 0
        self._sha256.update(lines.data)
        if self._file is not None:
            self._file.write(lines.tobytes())


@inline
def _put(out: npt.NDArray[np.uint8], at: int, number: int) -> int:
    """Write a number; returns where it ends."""
    if number < 0:
        out[at] = 45
        at += 1
    # Also right for the smallest integer, which has no positive twin.
    rest = np.uint64(-number) if number < 0 else np.uint64(number)
    digits = 1
    power = np.uint64(10)
    while digits < 20 and rest >= power:
        digits += 1
        power *= np.uint64(10)
    for place in range(at + digits - 1, at - 1, -1):
        out[place] = 48 + np.uint8(rest % np.uint64(10))
        rest //= np.uint64(10)
    return at + digits


@inline
def _begin(out: npt.NDArray[np.uint8], at: int, request: int, kind: bytes) -> int:
    """Write ``"{request} {kind}"``."""
    at = _put(out, at, request)
    out[at] = 32
    at += 1
    for i in range(len(kind)):
        out[at + i] = kind[i]
    return at + len(kind)


@kernel
def _numbers(lines: _Lines, request: int, kind: bytes, first: int, second: int) -> int:
    out, at = lines.buffer, lines.used
    if out.shape[0] - at < _SHORT_LINE_BYTES:
        return _FULL
    at = _begin(out, at, request, kind)
    out[at] = 32
    at = _put(out, at + 1, first)
    if second >= 0:
        out[at] = 32
        at = _put(out, at + 1, second)
    out[at] = 10
    lines.used = at + 1
    return lines.used


@kernel
def _blocks(lines: _Lines, request: int, kind: bytes, ids: ReadI64Array) -> int:
    out, at = lines.buffer, lines.used
    if out.shape[0] - at < _SHORT_LINE_BYTES + ids.shape[0] * _MAX_DIGITS:
        return _FULL
    at = _begin(out, at, request, kind)
    for i in range(ids.shape[0]):
        out[at] = 32
        at = _put(out, at + 1, ids[i])
    out[at] = 10
    lines.used = at + 1
    return lines.used
