"""Compressed files, detected by the suffix ``.gz``, ``.xz`` or ``.zst``, or by their first bytes."""

from __future__ import annotations

import gzip
import io
import lzma
import sys
import zlib
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import IO, cast

import zstandard

_CHUNK_BYTES = 1 << 14

COMPRESSIONS = (".gz", ".xz", ".zst")
_MAGIC = {b"\x1f\x8b": ".gz", b"\xfd7zXZ\x00": ".xz", b"\x28\xb5\x2f\xfd": ".zst"}

STDIN = Path("-")
"""Path of standard input."""

DAMAGE = (EOFError, lzma.LZMAError, gzip.BadGzipFile, zlib.error, zstandard.ZstdError)
"""Exceptions that reads of damaged or truncated files raise."""


def is_stream(path: Path) -> bool:
    """Return True for standard input and pipes, such as ``<(zcat FILE)``, which can be read only once."""
    return path == STDIN or path.is_fifo()


def opened(path: Path) -> AbstractContextManager[io.BufferedReader]:
    """Open a file, or standard input, for reading. Raises `OSError`."""
    if path == STDIN:
        return nullcontext(cast("io.BufferedReader", sys.stdin.buffer))
    return path.open("rb")


def decompressing(raw: io.BufferedReader, suffix: str) -> IO[bytes]:
    """Return a file with the decompressed content of `raw`. Reads of damaged content raise `DAMAGE`."""
    if suffix not in COMPRESSIONS:
        first = raw.peek(8)
        suffix = next((known for magic, known in _MAGIC.items() if first.startswith(magic)), "")
    if suffix == ".gz":
        return cast("IO[bytes]", gzip.GzipFile(fileobj=raw, mode="rb"))
    if suffix == ".xz":
        return lzma.LZMAFile(raw)
    if suffix == ".zst":
        return io.BufferedReader(_WholeZstd(raw), _CHUNK_BYTES)
    return raw


def compressing(raw: IO[bytes], suffix: str) -> IO[bytes]:
    """Return a file that writes compressed content to `raw`. Equal content gives equal bytes."""
    if suffix == ".gz":
        # Without time and name in the header, so that equal content gives equal bytes.
        return cast("IO[bytes]", gzip.GzipFile("", "wb", fileobj=raw, mtime=0))
    if suffix == ".xz":
        return lzma.LZMAFile(raw, "wb")
    if suffix == ".zst":
        return cast("IO[bytes]", zstandard.ZstdCompressor().stream_writer(raw, closefd=False))
    return raw


class _WholeZstd(io.RawIOBase):
    """Decompresses zstd frames. Unlike zstandard's reader, raises `EOFError` for an incomplete last frame."""

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw = raw
        self._frame = zstandard.ZstdDecompressor().decompressobj()
        self._inside_frame = False
        self._content = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        while not self._content:
            chunk = self._raw.read(_CHUNK_BYTES)
            if not chunk:
                if self._inside_frame:
                    raise EOFError("the last frame is incomplete")
                return 0
            self._content = memoryview(self._decompress(chunk))
        count = min(len(buffer), len(self._content))
        buffer[:count], self._content = self._content[:count], self._content[count:]
        return count

    def _decompress(self, chunk: bytes) -> bytes:
        pieces = []
        while chunk:
            pieces.append(self._frame.decompress(chunk))
            chunk, self._inside_frame = self._frame.unused_data, not self._frame.eof
            if self._frame.eof:
                self._frame = zstandard.ZstdDecompressor().decompressobj()
        return b"".join(pieces)
