"""What a block is called in a shared engine, and the header that binds its bytes to that name.

Owns the bytes that docs/formats.md describes. Does no I/O.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple, TypeAlias

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
"""Shape ``(n,)``, of `HEADER`."""

_REST = b"+"
_ADDED_BYTES = 64
"""What a server adds to a value, at most."""
_LEAST_CUT, _MOST_LOST = 16 << 10, 0.1


@cache
def head_bytes(block_bytes: int) -> int:
    """How many bytes of a block stand behind its header in a server; the others, if any, are a value of their
    own (`names_of_rests`).

    Servers take memory in jemalloc's classes, four to each doubling, and a block of a power of two with its
    header is just above one: a quarter would be lost. So a block that would lose more than a tenth is cut,
    such that the second value just fits into the largest class that it fills.
    """
    whole = HEADER_BYTES + block_bytes + _ADDED_BYTES
    if block_bytes < _LEAST_CUT or _class_above(whole) <= (1 + _MOST_LOST) * block_bytes:
        return block_bytes
    return block_bytes + _ADDED_BYTES - _class_below(block_bytes + _ADDED_BYTES)


def names_of_rests(names: list[bytes]) -> list[bytes]:
    """What the second values of blocks with these names are called."""
    return [name + _REST for name in names]


def is_rest(name: bytes) -> bool:
    """Whether it is the name of a second value."""
    return name.endswith(_REST)


def _class_below(num_bytes: int) -> int:
    """The largest of jemalloc's classes that is not larger: (4 + k) * 2^m, k from 0 to 3."""
    step = 1 << (num_bytes.bit_length() - 3)
    return num_bytes // step * step


def _class_above(num_bytes: int) -> int:
    below = _class_below(num_bytes)
    return below if below == num_bytes else below + (1 << (num_bytes.bit_length() - 3))


class Asked(NamedTuple):
    """Where it is written in which epoch some blocks are.

    Attributes:
        names: under which names. numbers: what must be there, None where that is not known.
        of: for each block, the row of its epoch.
    """

    names: list[bytes]
    numbers: Sequence[int | None]
    of: npt.NDArray[np.intp]


class Naming(ABC):
    """What blocks are called, and the headers that bind their bytes to it, while no reset comes between."""

    producer: bytes

    @abstractmethod
    def names(self, keys: Keys) -> list[bytes]:
        """What each block is called; all names have one length."""

    @abstractmethod
    def asked(self, keys: Keys) -> Asked:
        """What must still be as it was for these names to be valid."""

    @abstractmethod
    def _numbers_and_seeds(self, digests: Checksums) -> tuple[Any, Any]:
        """The number of each block's epoch, and what its checksum is seeded with besides its key."""

    def headers(self, keys: Keys, addresses: npt.NDArray[np.int64], block_bytes: int) -> Headers:
        """The headers of the blocks at these addresses. Cost: reads each byte once. Thread: any."""
        headers, seeds = self._without_checksums(keys, block_bytes)
        headers["checksum"] = block_checksums(addresses, block_bytes, seeds)
        return headers

    def sound(self, keys: Keys, headers: Headers, addresses: npt.NDArray[np.int64], block_bytes: int) -> Mask:
        """Which of these blocks are what was stored under their keys, in this place. Cost: as `headers`."""
        expected = self.headers(keys, addresses, block_bytes)
        sound: Mask = (_words(headers) == _words(expected)).all(axis=1)
        return sound

    def _without_checksums(self, keys: Keys, block_bytes: int) -> tuple[Headers, Checksums]:
        """The headers, and what the checksums are seeded with."""
        digests = keys.digests
        numbers, seeds = self._numbers_and_seeds(digests)
        headers = np.zeros(len(keys), HEADER)
        headers["magic"], headers["version"] = _MAGIC, _VERSION
        headers["header_bytes"], headers["block_bytes"] = HEADER_BYTES, block_bytes
        headers["producer"] = np.frombuffer(self.producer, np.uint8)
        headers["epoch"], headers["key"] = numbers, digests
        return headers, digests ^ seeds


@dataclass(frozen=True)
class Epoch(Naming):
    """A place for blocks: those of one producer in one namespace, between two resets.

    Attributes:
        namespace: letters, digits, and ``._-``; an access rule of the engine can fence it.
        producer: 16 bytes that say who computes the blocks.
        number: 64 random bits. Numbers are never counted up: an engine that loses one gives out a new one,
            and what was stored under the lost one is never found again.
    """

    namespace: str
    producer: bytes
    number: int

    @cached_property
    def prefix(self) -> bytes:
        """What the names of its blocks begin with."""
        return f"{place_of(self.namespace, self.producer)}:{self.number:016x}:".encode()

    @cached_property
    def seed(self) -> np.uint64:
        """What its checksums are seeded with, besides the block's key."""
        return seed_of(self.namespace, self.producer, self.number)

    def names(self, keys: Keys) -> list[bytes]:
        """What each block is called: 72 hexadecimal digits of the key for vLLM's keys, behind the prefix."""
        return [self.prefix + digits for digits in hexadecimal(keys)]

    def asked(self, keys: Keys) -> Asked:
        return Asked([epoch_name(self.namespace, self.producer)], [self.number], np.zeros(len(keys), np.intp))

    def _numbers_and_seeds(self, digests: Checksums) -> tuple[Any, Any]:
        return np.uint64(self.number), self.seed


def _words(headers: Headers) -> npt.NDArray[np.uint64]:
    return headers.view(np.uint64).reshape(-1, HEADER_BYTES // 8)


def hexadecimal(keys: Keys) -> list[bytes]:
    """Each key, two digits a byte."""
    size, digits = 2 * keys.key_bytes, b"".join(keys).hex().encode()
    return [digits[at : at + size] for at in range(0, len(keys) * size, size)]


def seed_of(namespace: str, producer: bytes, number: int) -> np.uint64:
    """What checksums of an epoch are seeded with, besides the block's key."""
    text = f"{FORMAT}\0{namespace}\0".encode() + producer
    seed: np.uint64 = np.uint64(xxhash.xxh3_64_intdigest(text, number))
    return seed


def place_of(namespace: str, producer: bytes) -> str:
    """What the names of all epochs of a producer begin with."""
    return f"{FORMAT}:{namespace}:{producer.hex()}"


def epoch_name(namespace: str, producer: bytes) -> bytes:
    """Where an engine keeps the number of the present epoch, as 16 hexadecimal digits."""
    return f"{place_of(namespace, producer)}:epoch".encode()


def about_name(epoch: bytes) -> bytes:
    """The name of a producer's text, which only ``inspect`` reads, beside an epoch of that name."""
    place, _, tag = epoch.rpartition(b":epoch")
    return place + b":about" + tag


def producer_of(fingerprint: str) -> bytes:
    """The 16 bytes that stand for a producer."""
    return hashlib.sha256(fingerprint.encode()).digest()[:16]
