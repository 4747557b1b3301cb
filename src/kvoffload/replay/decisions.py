"""The decision log: what the manager decided, in order, as text that `diff` and `sha256sum` understand.

One line for each kind of decision of each request, in the order in which they were taken::

    17 hit 3 12          request 17: 3 blocks from the device, 12 more from the tier
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

from kvoffload.core.jit import I64, READONLY_I64_ARRAY, U8_ARRAY, kernel

_MAX_DIGITS = 21


class DecisionLog:
    """Hashes every line, and writes it to `file` if there is one. Cost: about 10 ns a block named.

    Kernels and not `str`: a replay of millions of references spends a third of its time here otherwise.
    """

    def __init__(self, file: BinaryIO | None = None) -> None:
        self._sha256 = hashlib.sha256()
        self._file = file
        self._buffer = np.empty(1 << 16, np.uint8)

    def numbers(self, request: int, kind: str, *numbers: int) -> None:
        """A line that ends in `numbers`."""
        self._write(f"{request} {kind} {' '.join(map(str, numbers))}\n".encode())

    def blocks(self, request: int, kind: str, ids: npt.NDArray[np.int64]) -> None:
        """A line that ends in block ids; nothing if there are none."""
        if len(ids) == 0:
            return
        if len(ids) * _MAX_DIGITS > len(self._buffer):
            self._buffer = np.empty(2 * len(ids) * _MAX_DIGITS, np.uint8)
        used = _format(ids, self._buffer)
        self._write(f"{request} {kind}".encode() + self._buffer[:used].tobytes() + b"\n")

    def hexdigest(self) -> str:
        """SHA-256 of the log so far: what ``sha256sum`` says of the file."""
        return self._sha256.hexdigest()

    def _write(self, line: bytes) -> None:
        self._sha256.update(line)
        if self._file is not None:
            self._file.write(line)


@kernel(I64(READONLY_I64_ARRAY, U8_ARRAY))
def _format(ids: npt.NDArray[np.int64], out: npt.NDArray[np.uint8]) -> int:
    """Write ``" {id}"`` for each id; returns the number of bytes."""
    at = 0
    for i in range(ids.shape[0]):
        out[at] = 32
        at += 1
        if ids[i] < 0:
            out[at] = 45
            at += 1
        # Also right for the smallest integer, which has no positive twin.
        rest = np.uint64(-ids[i]) if ids[i] < 0 else np.uint64(ids[i])
        digits = 1
        power = np.uint64(10)
        while digits < 20 and rest >= power:
            digits += 1
            power *= np.uint64(10)
        for place in range(at + digits - 1, at - 1, -1):
            out[place] = 48 + np.uint8(rest % np.uint64(10))
            rest //= np.uint64(10)
        at += digits
    return at
