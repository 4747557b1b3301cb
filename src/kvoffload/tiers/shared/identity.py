"""Names of blocks on a shared server, and the header that binds a block's bytes to its name.

Owns the formats of names and headers (docs/formats.md). Does no I/O.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from kvoffload.structures.keys import Keys
from kvoffload.tiers.contract import Checksums, Mask, block_checksums

FORMAT = "kvo1"
_MAGIC, _VERSION = b"KVOBLOCK", 1

HEADER = np.dtype(
    [
        ("magic", "S8"),
        ("version", "<u4"),
        ("header_bytes", "<u4"),
        ("block_bytes", "<u8"),
        ("producer", "u1", 16),
        ("epoch", "<u8"),
        ("key", "<u8"),
        ("checksum", "<u8"),
    ]
)
HEADER_BYTES = HEADER.itemsize

Headers: TypeAlias = npt.NDArray[Any]
"""Headers of `n` blocks: shape ``(n,)``, record type `HEADER`."""

_EPOCH = re.compile(rb"[0-9a-f]{16}")
_REST = b"+"
_ADDED_BYTES = 64
"""Largest overhead of a server for one value, in bytes."""
_LEAST_CUT, _MOST_LOST = 16 << 10, 0.1


@cache
def head_bytes(block_bytes: int) -> int:
    """Return how many bytes of a block belong in its first value on the server, after the header.

    If these are not all bytes, a second value (`rest_names`) holds the rest. This saves memory, because
    servers allocate in jemalloc's size classes (`_class_below`). For example, a block of 2^n bytes and its
    header together would need the class of ``1.25 * 2^n`` bytes. If a single value would waste more than a
    tenth of the block's size, the block is split so that the second value exactly fills a smaller class.
    """
    whole = HEADER_BYTES + block_bytes + _ADDED_BYTES
    if block_bytes < _LEAST_CUT or _class_above(whole) <= (1 + _MOST_LOST) * block_bytes:
        return block_bytes
    return block_bytes + _ADDED_BYTES - _class_below(block_bytes + _ADDED_BYTES)


def rest_names(names: list[bytes]) -> list[bytes]:
    """Return the name of each block's second value, which holds the rest of the block."""
    return [name + _REST for name in names]


def is_rest(name: bytes) -> bool:
    """Return True if `name` is the name of a block's second value (see `head_bytes`)."""
    return name.endswith(_REST)


def _class_below(num_bytes: int) -> int:
    """Return jemalloc's largest size class up to `num_bytes`: a size (4 + k) * 2^m, with k from 0 to 3."""
    step = 1 << (num_bytes.bit_length() - 3)
    return num_bytes // step * step


def _class_above(num_bytes: int) -> int:
    below = _class_below(num_bytes)
    return below if below == num_bytes else below + (1 << (num_bytes.bit_length() - 3))


class EpochKeys(NamedTuple):
    """The epoch keys that cover a batch of blocks. The server stores an epoch number under each epoch key.

    Attributes:
        names: names of the epoch keys.
        numbers: for each entry of `names`, the epoch number that the client expects; None if unknown.
        row_of: for each block of the batch, the index in `names` of its epoch key.
    """

    names: list[bytes]
    numbers: Sequence[int | None]
    row_of: npt.NDArray[np.intp]


class Epoch(ABC):
    """Computes the names and headers of blocks in one epoch.

    Each reset begins a new epoch, with other names and headers, so that earlier blocks are not found.
    """

    producer: bytes

    @abstractmethod
    def names(self, keys: Keys) -> list[bytes]:
        """Return the name of each block. All names have equal lengths."""

    @abstractmethod
    def epoch_keys(self, keys: Keys) -> EpochKeys:
        """Return the epoch keys that cover these blocks.

        A block is valid only while the server has the expected number under the block's epoch key.
        """

    @abstractmethod
    def numbers_and_seeds(self, digests: Checksums) -> tuple[Any, Any]:
        """Return, for each block, its epoch number, and the seed that its epoch adds to its checksum."""

    def headers(self, keys: Keys, addresses: npt.NDArray[np.int64], block_bytes: int) -> Headers:
        """Compute the headers of the blocks at these addresses. Cost: reads each byte once. Thread: any."""
        digests = keys.digests
        numbers, seeds = self.numbers_and_seeds(digests)
        headers = np.zeros(len(keys), HEADER)
        headers["magic"], headers["version"] = _MAGIC, _VERSION
        headers["header_bytes"], headers["block_bytes"] = HEADER_BYTES, block_bytes
        headers["producer"] = np.frombuffer(self.producer, np.uint8)
        headers["epoch"], headers["key"] = numbers, digests
        headers["checksum"] = block_checksums(addresses, block_bytes, digests ^ seeds)
        return headers

    def sound(self, keys: Keys, headers: Headers, addresses: npt.NDArray[np.int64], block_bytes: int) -> Mask:
        """Return a mask of the blocks whose headers and bytes match their keys. Cost: like `headers`."""
        expected = self.headers(keys, addresses, block_bytes)
        sound: Mask = (_words(headers) == _words(expected)).all(axis=1)
        return sound


@dataclass(frozen=True)
class SingleEpoch(Epoch):
    """Epoch of a single server or bucket, where all blocks of a producer have one epoch number.

    Attributes:
        namespace: letters, digits, and ``._-``. An access rule can restrict a user to a namespace.
        producer: 16 bytes that identify the producer of the blocks.
        number: 64 random bits, never reused. If the server loses the number, the blocks of this epoch are
            never found again.
    """

    namespace: str
    producer: bytes
    number: int

    @cached_property
    def prefix(self) -> bytes:
        """Prefix of the names of the epoch's blocks."""
        return f"{producer_prefix(self.namespace, self.producer)}:{self.number:016x}:".encode()

    @cached_property
    def seed(self) -> np.uint64:
        """The part of a checksum's seed that is equal for all blocks of the epoch."""
        return seed_of(self.namespace, self.producer, self.number)

    def names(self, keys: Keys) -> list[bytes]:
        """Return the name of each block: the prefix, and the key in hexadecimal digits."""
        return [self.prefix + digits for digits in hexadecimal(keys)]

    def epoch_keys(self, keys: Keys) -> EpochKeys:
        name = epoch_name(self.namespace, self.producer)
        return EpochKeys([name], [self.number], np.zeros(len(keys), np.intp))

    def numbers_and_seeds(self, digests: Checksums) -> tuple[Any, Any]:
        return np.uint64(self.number), self.seed


class Keyspace(Protocol):
    """The epoch keys that a producer of blocks uses on one server."""

    @property
    def epoch_keys(self) -> Sequence[bytes]: ...
    def epoch(self, numbers: Sequence[int | None]) -> Epoch:
        """Return the epoch whose numbers, in the order of `epoch_keys`, are `numbers`."""


@dataclass(frozen=True)
class SingleKeyspace:
    """A keyspace with one epoch, for a single server or a bucket."""

    namespace: str
    producer: bytes
    epoch_keys: Sequence[bytes]

    def epoch(self, numbers: Sequence[int | None]) -> SingleEpoch:
        (number,) = numbers
        assert number is not None
        return SingleEpoch(self.namespace, self.producer, number)


def _words(headers: Headers) -> npt.NDArray[np.uint64]:
    return headers.view(np.uint64).reshape(-1, HEADER_BYTES // 8)


def hexadecimal(keys: Keys) -> list[bytes]:
    """Return each key as text, two digits a byte."""
    size, digits = 2 * keys.key_bytes, b"".join(keys).hex().encode()
    return [digits[at : at + size] for at in range(0, len(keys) * size, size)]


def seed_of(namespace: str, producer: bytes, number: int) -> np.uint64:
    """Return the part of a checksum's seed that is equal for all blocks of an epoch."""
    text = f"{FORMAT}\0{namespace}\0".encode() + producer
    seed: np.uint64 = np.uint64(xxhash.xxh3_64_intdigest(text, number))
    return seed


def producer_prefix(namespace: str, producer: bytes) -> str:
    """Return the prefix of all names of a producer."""
    return f"{FORMAT}:{namespace}:{producer.hex()}"


def epoch_name(namespace: str, producer: bytes) -> bytes:
    """Return the epoch key of a single server. The value under the key is 16 hexadecimal digits."""
    return f"{producer_prefix(namespace, producer)}:epoch".encode()


def about_name(epoch: bytes) -> bytes:
    """Return the name under which the text about the producer is stored, beside the epoch key `epoch`."""
    prefix, _, tag = epoch.rpartition(b":epoch")
    return prefix + b":about" + tag


def epoch_number(reply: object) -> int | None:
    """Parse an epoch number, 16 hexadecimal digits in lower case. Return None for anything else."""
    return int(reply, 16) if isinstance(reply, bytes) and _EPOCH.fullmatch(reply) else None
