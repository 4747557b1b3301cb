"""Distribution of blocks over a cluster: 256 divisions, each with one hash slot and one epoch.

The epoch of a division is stored in the same hash slot as the division's blocks, so one node has both.
Therefore, if a node fails, only the blocks of its divisions are misses. If the whole cluster had a single
epoch, all blocks would be misses while the node that stores it is down. Does no I/O.
"""

from __future__ import annotations

from binascii import crc_hqx
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from kvoffload.structures.keys import Keys
from kvoffload.tiers.contract import Checksums
from kvoffload.tiers.shared.identity import Epoch, EpochKeys, hexadecimal, producer_prefix, seed_of

NUM_SLOTS, NUM_DIVISIONS = 16384, 256
_SLOTS_BETWEEN = NUM_SLOTS // NUM_DIVISIONS


def slot_of(name: bytes) -> int:
    """Return the hash slot of a name: CRC16 of its hash tag in braces, else of the whole name, mod 16,384."""
    begin = name.find(b"{")
    end = name.find(b"}", begin + 1)
    return crc_hqx(name[begin + 1 : end] if begin >= 0 and end > begin + 1 else name, 0) % NUM_SLOTS


def divisions_between(first: int, last: int) -> range:
    """Return the divisions whose hash slots are in the range from `first` to `last`, both included."""
    return range(-(-first // _SLOTS_BETWEEN), last // _SLOTS_BETWEEN + 1)


@cache
def tags() -> list[str]:
    """Return the hash tag of each division. A name with this tag belongs to the division's hash slot.

    The hash slot of division `n` is 64 * `n`. Its tag is the smallest number, written in at least five
    hexadecimal digits, that hashes to this slot. Cost: 50 ms, once.
    """
    tags_of: dict[int, str] = {}
    number = 0
    while len(tags_of) < NUM_DIVISIONS:
        tag = f"{number:05x}"
        slot = crc_hqx(tag.encode(), 0) % NUM_SLOTS
        if slot % _SLOTS_BETWEEN == 0:
            tags_of.setdefault(slot // _SLOTS_BETWEEN, tag)
        number += 1
    return [tags_of[division] for division in range(NUM_DIVISIONS)]


def division_of(keys: Keys) -> npt.NDArray[np.intp]:
    """Return the division of each block, which is the first eight bits of its key's digest."""
    divisions: npt.NDArray[np.intp] = (keys.digests >> np.uint64(56)).astype(np.intp)
    return divisions


def epoch_names(namespace: str, producer: bytes, divisions: Sequence[int]) -> list[bytes]:
    """Return the names of the epoch keys of these divisions."""
    place, names = producer_prefix(namespace, producer), tags()
    return [f"{place}:epoch:{{{names[division]}}}".encode() for division in divisions]


@dataclass(frozen=True)
class DividedEpoch(Epoch):
    """The epochs of some of the 256 divisions of the blocks. Blocks of other divisions have no epoch.

    Attributes:
        namespace, producer: both are part of every name.
        divisions: the divisions, each from 0 to 255.
        numbers: epoch number of each division in `divisions`; None if the epoch number is unknown.
    """

    namespace: str
    producer: bytes
    divisions: tuple[int, ...]
    numbers: tuple[int | None, ...]

    @cached_property
    def _table(self) -> tuple[list[bytes], npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
        """Block-name prefix, epoch number (0 if unknown) and checksum seed of each of the 256 divisions."""
        names, place, known = tags(), producer_prefix(self.namespace, self.producer), self._known
        numbers = [known.get(division) or 0 for division in range(NUM_DIVISIONS)]
        seeds = [seed_of(self.namespace, self.producer, number) for number in numbers]
        prefixes = [f"{place}:{number:016x}:{{{names[at]}}}:".encode() for at, number in enumerate(numbers)]
        return prefixes, np.array(numbers, np.uint64), np.array(seeds, np.uint64)

    @cached_property
    def _epoch_names(self) -> list[bytes]:
        return epoch_names(self.namespace, self.producer, range(NUM_DIVISIONS))

    @cached_property
    def _known(self) -> dict[int, int | None]:
        return dict(zip(self.divisions, self.numbers, strict=True))

    def names(self, keys: Keys) -> list[bytes]:
        prefixes = self._table[0]
        divisions = division_of(keys).tolist()
        return [prefixes[at] + digits for at, digits in zip(divisions, hexadecimal(keys), strict=True)]

    def epoch_keys(self, keys: Keys) -> EpochKeys:
        divisions, row_of = np.unique(division_of(keys), return_inverse=True)
        known, at = self._known, divisions.tolist()
        names = [self._epoch_names[division] for division in at]
        return EpochKeys(names, [known.get(division) for division in at], row_of)

    def numbers_and_seeds(self, digests: Checksums) -> tuple[Any, Any]:
        at = digests >> np.uint64(56)
        return self._table[1][at], self._table[2][at]


@dataclass(frozen=True)
class DividedKeyspace:
    """A keyspace with one epoch for each division in `divisions`."""

    namespace: str
    producer: bytes
    divisions: tuple[int, ...]

    @cached_property
    def epoch_keys(self) -> list[bytes]:
        return epoch_names(self.namespace, self.producer, self.divisions)

    def epoch(self, numbers: Sequence[int | None]) -> DividedEpoch:
        return DividedEpoch(self.namespace, self.producer, self.divisions, tuple(numbers))
