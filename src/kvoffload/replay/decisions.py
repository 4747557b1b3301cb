"""Decision log of a replay: a text with the manager's decisions, for comparison by `diff` or `sha256sum`.

Each line starts with the request's position in the trace and the kind of decision; counts of blocks or block
ids follow. The lines of a request are in the order in which the manager decided::

    17 hit 3 12          the device served 3 blocks, RAM and lower tiers the next 12
    17 evict 12 13       evicted from RAM, to make room for a promotion
    17 promote 871 872   promoted from a lower tier to RAM
    17 damaged 881       removed, because the checksum was wrong
    17 admit 5           number of missing blocks that admission rule and policy accepted
    17 refuse 904 905    refused by the admission rule or the policy
    17 evict 14 15       evicted from RAM, to make room for the store
    17 store 899 900     stored, in prefix order
    17 drop 901          not stored, because there was no room
    17 full 3            number of missing blocks; this line means that none of them had room

The ids are the block ids of the trace. A line of ids that would have no ids is left out; every request has a
``hit`` line. Equal traces and configurations give equal logs on every machine and with every version of
Python.
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
    """Buffer for lines that are not hashed yet. Its first `used` bytes are filled."""

    buffer: U8Array
    used: int


class DecisionLog:
    """Formats the lines of the log and hashes them. If there is a `file`, each line is written to it at once.

    Cost: 10 ns per block.
    """

    # Kernels format the numbers, because `str` would take a third of the time of a replay.

    def __init__(self, file: BinaryIO | None = None) -> None:
        self._sha256 = hashlib.sha256()
        self._file = file
        self._lines = _Lines(buffer=np.empty(_BUFFER_BYTES, np.uint8))

    def numbers(self, request: int, kind: str, first: int, second: int = -1) -> None:
        """Append a line that ends with one number, or with two if `second` is given. Both are 0 or more."""
        while _numbers(self._lines.memory, request, kind.encode(), first, second) == _FULL:
            self._make_room(_SHORT_LINE_BYTES)
        if self._file is not None:
            self._flush()

    def blocks(self, request: int, kind: str, ids: npt.NDArray[np.int64]) -> None:
        """Append a line that ends with block ids. Appends nothing if `ids` is empty."""
        if len(ids) == 0:
            return
        while _blocks(self._lines.memory, request, kind.encode(), ids) == _FULL:
            self._make_room(_SHORT_LINE_BYTES + len(ids) * _MAX_DIGITS)
        if self._file is not None:
            self._flush()

    def hexdigest(self) -> str:
        """Return the SHA-256 of the log so far, equal to ``sha256sum`` of the file."""
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
    """Write the digits of `number` to `out`, from position `at`. Returns the position after the digits."""
    if number < 0:
        out[at] = 45
        at += 1
    # Converted to unsigned, because the smallest int64 has no positive counterpart in int64.
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
    """Write ``"{request} {kind}"`` to `out`, from position `at`. Returns the position after this text."""
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
