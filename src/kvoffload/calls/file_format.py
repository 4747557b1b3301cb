"""The file of recorded calls: header, frames, end mark (docs/formats.md).

Owns the bytes on disk. Each frame has a length and a checksum, so that readers can cut a torn file after the
last whole frame. All frames of calls share one zstd stream, because requests repeat the keys of earlier
requests.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

import msgspec
import numpy as np
import xxhash
import zstandard

from kvoffload._version import __version__
from kvoffload.core.admission import ADMISSIONS
from kvoffload.core.manager import OffloadingManager
from kvoffload.core.plans import ON_COMPUTE, ON_DEVICE_EVICTION
from kvoffload.core.policy import POLICIES
from kvoffload.errors import TraceError
from kvoffload.settings.registry import Registry
from kvoffload.structures.jit import I32Array
from kvoffload.structures.keys import words_per_key

MAGIC, VERSION, READABLE = b"KVOCALLS", 4, (3, 4)
HASHES, WHOLE = "hashes", "whole"
"""The two forms of keys in a recording. `HASHES`: 64-bit hashes of the keys. `WHOLE`: all bytes of the keys.
"""
HEADER, CALLS, END, STATE = 1, 2, 3, 4
"""Kinds of frames: the header, records of calls, the end mark, the state at the beginning of a part."""
CLOSED, CONTINUED = "closed", "the recording continues in the next part"
"""Reasons in the end mark. `CLOSED`: the manager has closed the recording. `CONTINUED`: the recording
continues in the next part."""
MAX_FRAME_BYTES = 1 << 30
_FRAME = struct.Struct("<4sIIIqQ")
"""Layout of a frame's header: ``KVOF``, kind, number of bytes, number of words, time in ns since 1970,
checksum."""
_FRAME_MAGIC, _CHECKSUM_AT = b"KVOF", 24
_WINDOW_LOG = 24
"""Logarithm (base 2) of the compression window: a record may refer to the previous 16 MiB of records."""


class Header(msgspec.Struct, frozen=True):
    """The configuration of the recorded manager.

    Attributes:
        kvoffload: version of the package.
        keys: `WHOLE` if the file records keys, `HASHES` if it records hashes of keys. Keys are recorded if
            the policy or the admission rule comes from another package, because it may read keys.
        key_bytes: length of the engine's keys in bytes.
        policy, admission, store: as for `OffloadingManager`.
        refuses_unasked: as in `OffloadingManager`. False for RAM with tiers behind it, because the tiers
            would not get the blocks that RAM refuses.
        part: number of this file in its recording, from 1.
        has_state: True if a state follows the header: the manager's state at the beginning of the part.
    """

    kvoffload: str
    keys: str
    key_bytes: int
    capacity_blocks: int
    policy: str
    admission: str
    store: str
    refuses_unasked: bool
    part: int = 1
    has_state: bool = False

    @property
    def key_words(self) -> int:
        """Number of 64-bit words per recorded key; 0 if the file records hashes instead of keys."""
        return words_per_key(self.key_bytes) if self.keys == WHOLE else 0


class End(msgspec.Struct, frozen=True):
    """The end mark of a recording.

    Attributes:
        reason: reason why the recording ended.
        counters: the manager's counters if the reason is `CLOSED`, otherwise empty.
    """

    reason: str
    counters: dict[str, Any] = {}


class Frame(NamedTuple):
    """Records of calls.

    Attributes:
        words: the records, one after the other.
        time_ns: time at which the frame was written, in nanoseconds since 1970.
    """

    words: I32Array
    time_ns: int


def is_recording(path: Path) -> bool:
    """Return True for a file that starts with `MAGIC`. Returns False for pipes and unreadable files."""
    if path.is_fifo():
        return False
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def header_of(manager: OffloadingManager, policy: object, admission: object) -> Header:
    """Return the header for a manager that was created with these arguments `policy` and `admission`."""
    used = [manager.policy, *([manager.admission] if manager.admission is not None else [])]
    return Header(
        kvoffload=__version__,
        keys=HASHES if all(map(is_ours, used)) else WHOLE,
        key_bytes=manager.key_bytes,
        capacity_blocks=manager.capacity_blocks,
        policy=text_of(POLICIES, policy),
        admission=text_of(ADMISSIONS, admission),
        store=ON_DEVICE_EVICTION if manager.store_mode.follows_device else ON_COMPUTE,
        refuses_unasked=manager.refuses_unasked,
    )


def is_ours(rule: object) -> bool:
    """Return True for a policy or admission rule of this package. Our rules read only hashes of keys."""
    return type(rule).__module__.startswith("kvoffload.")


def text_of(registry: Registry[Any], given: object) -> str:
    """Return a text from which `registry` can create the policy or admission rule `given`.

    If `given` is None, which means no admission rule, the text is ``all``.
    """
    if isinstance(given, str):
        return given
    if given is None:
        return "all"
    cls = given if isinstance(given, type) else type(given)
    settings = [
        f",{parameter.name}={getattr(given, parameter.name)}" for parameter in registry.parameters(cls)
    ]
    return f"{cls.__module__}:{cls.__qualname__}{''.join(settings)}"


class FrameWriter:
    """Encodes the frames of a file, in order. Thread: one at a time."""

    def __init__(self) -> None:
        parameters = zstandard.ZstdCompressionParameters.from_level(
            1, window_log=_WINDOW_LOG, enable_ldm=True
        )
        self._stream = zstandard.ZstdCompressor(compression_params=parameters).compressobj()

    def header(self, header: Header) -> bytes:
        """Encode the start of the file: `MAGIC`, `VERSION` and the frame of the header."""
        return MAGIC + struct.pack("<I", VERSION) + _frame(HEADER, msgspec.json.encode(header))

    def state(self, state: bytes) -> bytes:
        """Encode the state of a replay (`calls.state`)."""
        return _frame(STATE, state)

    def calls(self, words: I32Array) -> bytes:
        """Encode records of calls. Releases the GIL while it compresses."""
        body = self._stream.compress(words.data) + self._stream.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
        return _frame(CALLS, body, len(words))

    def end(self, end: End) -> bytes:
        """Encode the end mark."""
        return _frame(END, msgspec.json.encode(end))


def _frame(kind: int, body: bytes, num_words: int = 0) -> bytes:
    head = _FRAME.pack(_FRAME_MAGIC, kind, len(body), num_words, time.time_ns(), 0)
    return head[:_CHECKSUM_AT] + frame_checksum(head, body).to_bytes(8, "little") + body


def frame_checksum(head: bytes, body: bytes) -> int:
    return xxhash.xxh3_64_intdigest(body, xxhash.xxh3_64_intdigest(head[:_CHECKSUM_AT]))


class FrameReader:
    """Reads a file of recorded calls, frame by frame, up to the first incomplete or damaged frame.

    Attributes:
        path: the file.
        header: the configuration.
        state: the encoded state at the beginning of the part; None for a part without a state.
        end: the end mark; None until the reader has read an end mark.
        num_cut: number of bytes after the last whole frame; readers ignore them.

    Raises: `TraceError` for a file that is not a recording, of another format version, or with a damaged
    header or state.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.num_cut = path, 0
        self.end: End | None = None
        self._stream = zstandard.ZstdDecompressor(max_window_size=1 << _WINDOW_LOG).decompressobj()
        self._file = path.open("rb")
        try:
            self.header = self._read_header(self._file)
            self.state = self._read_state() if self.header.has_state else None
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> FrameReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _read_header(self, file: IO[bytes]) -> Header:
        begin = file.read(len(MAGIC) + 4)
        if begin[: len(MAGIC)] != MAGIC:
            raise TraceError(
                f"{self.path}: not a recording of calls: it begins with {begin[:8]!r}, not {MAGIC!r}"
            )
        version = int.from_bytes(begin[len(MAGIC) :], "little")
        if version not in READABLE:
            allowed = " and ".join(map(str, READABLE))
            raise TraceError(
                f"{self.path}: format version {version}; this kvoffload reads versions {allowed}"
            )
        frame = self._next()
        if frame is None or frame[0] != HEADER:
            raise TraceError(f"{self.path}: the header is incomplete or damaged")
        try:
            return msgspec.json.decode(frame[1], type=Header)
        except msgspec.MsgspecError as error:
            raise TraceError(f"{self.path}: the header is invalid: {error}") from None

    def _read_state(self) -> bytes:
        frame = self._next()
        if frame is None or frame[0] != STATE:
            raise TraceError(f"{self.path}: the state at the beginning is incomplete or damaged")
        return frame[1]

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return self.path.stat().st_size

    @property
    def num_read(self) -> int:
        """Number of bytes read so far."""
        return self._file.tell()

    def frames(self) -> Iterator[Frame]:
        """Yield the frames of calls, up to the end mark or the first incomplete or damaged frame."""
        while (frame := self._next()) is not None:
            kind, body, num_words, time_ns = frame
            if kind == END:
                self._read_end(body)
                return
            try:
                words = np.frombuffer(self._stream.decompress(body), np.int32)
            except zstandard.ZstdError as error:
                raise TraceError(f"{self.path}: a frame cannot be decompressed: {error}") from None
            if len(words) != num_words:
                raise TraceError(f"{self.path}: a frame has {len(words)} words instead of {num_words}")
            yield Frame(words, time_ns)

    def _read_end(self, body: bytes) -> None:
        try:
            self.end = msgspec.json.decode(body, type=End)
        except msgspec.MsgspecError as error:
            raise TraceError(f"{self.path}: the end mark is invalid: {error}") from None

    def _next(self) -> tuple[int, bytes, int, int] | None:
        """Read a frame; return its kind, body, number of words and time.

        Return None if the frame is incomplete or damaged.
        """
        begin = self._file.tell()
        head = self._file.read(_FRAME.size)
        if len(head) == _FRAME.size:
            magic, kind, num_bytes, num_words, time_ns, checksum = _FRAME.unpack(head)
            if magic == _FRAME_MAGIC and num_bytes <= MAX_FRAME_BYTES:
                body = self._file.read(num_bytes)
                if len(body) == num_bytes and checksum == frame_checksum(head, body):
                    return kind, body, num_words, time_ns
        self.num_cut = self.num_bytes - begin
        return None
