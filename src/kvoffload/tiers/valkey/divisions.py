"""How blocks are spread over a cluster: 256 divisions, each in one hash slot, with an epoch of its own.

A node of a cluster answers for its slots alone. One epoch for all would stand in another node than most of
the blocks, which may be dead while they are there, or know of a reset that they do not. So there is one
beside them: in the same slot, which moves, fails over and is lost as a whole. Does no I/O.
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
from kvoffload.tiers.shared.identity import Asked, Naming, hexadecimal, place_of, seed_of

NUM_SLOTS, NUM_DIVISIONS = 16384, 256
_SLOTS_BETWEEN = NUM_SLOTS // NUM_DIVISIONS


def slot_of(name: bytes) -> int:
    """The hash slot of a name: CRC16 of what stands in its first braces, or of all of it."""
    begin = name.find(b"{")
    end = name.find(b"}", begin + 1)
    return crc_hqx(name[begin + 1 : end] if begin >= 0 and end > begin + 1 else name, 0) % NUM_SLOTS


def divisions_between(first: int, last: int) -> range:
    """The divisions whose slots are these, or between them."""
    return range(-(-first // _SLOTS_BETWEEN), last // _SLOTS_BETWEEN + 1)


@cache
def tags() -> list[str]:
    """What stands in braces in the names of each division: the smallest number whose slot is 64 times the
    division.

    Cost: 50 ms, once.
    """
    found: dict[int, str] = {}
    number = 0
    while len(found) < NUM_DIVISIONS:
        tag = f"{number:05x}"
        slot = crc_hqx(tag.encode(), 0) % NUM_SLOTS
        if slot % _SLOTS_BETWEEN == 0:
            found.setdefault(slot // _SLOTS_BETWEEN, tag)
        number += 1
    return [found[division] for division in range(NUM_DIVISIONS)]


def division_of(keys: Keys) -> npt.NDArray[np.intp]:
    """The division of each block: the first eight bits of its key's digest."""
    found: npt.NDArray[np.intp] = (keys.digests >> np.uint64(56)).astype(np.intp)
    return found


def epoch_names(namespace: str, producer: bytes, divisions: Sequence[int]) -> list[bytes]:
    """Where an engine keeps the epochs of these divisions."""
    place, names = place_of(namespace, producer), tags()
    return [f"{place}:epoch:{{{names[division]}}}".encode() for division in divisions]


@dataclass(frozen=True)
class DividedEpoch(Naming):
    """The epochs of some divisions. Blocks of other divisions are in none of them.

    Attributes:
        numbers: of each of the divisions; None where it is not known.
    """

    namespace: str
    producer: bytes
    divisions: tuple[int, ...]
    numbers: tuple[int | None, ...]

    @cached_property
    def _table(self) -> tuple[list[bytes], npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
        """Of every division what its blocks' names begin with, its number, and its seed."""
        names, place, known = tags(), place_of(self.namespace, self.producer), self._known
        numbers = [known.get(division) or 0 for division in range(NUM_DIVISIONS)]
        seeds = [seed_of(self.namespace, self.producer, number) for number in numbers]
        begins = [f"{place}:{number:016x}:{{{names[at]}}}:".encode() for at, number in enumerate(numbers)]
        return begins, np.array(numbers, np.uint64), np.array(seeds, np.uint64)

    @cached_property
    def _epoch_names(self) -> list[bytes]:
        return epoch_names(self.namespace, self.producer, range(NUM_DIVISIONS))

    @cached_property
    def _known(self) -> dict[int, int | None]:
        return dict(zip(self.divisions, self.numbers, strict=True))

    def names(self, keys: Keys) -> list[bytes]:
        begins = self._table[0]
        divisions = division_of(keys).tolist()
        return [begins[at] + digits for at, digits in zip(divisions, hexadecimal(keys), strict=True)]

    def asked(self, keys: Keys) -> Asked:
        divisions, of = np.unique(division_of(keys), return_inverse=True)
        known, at = self._known, divisions.tolist()
        names = [self._epoch_names[division] for division in at]
        return Asked(names, [known.get(division) for division in at], of)

    def _numbers_and_seeds(self, digests: Checksums) -> tuple[Any, Any]:
        at = digests >> np.uint64(56)
        return self._table[1][at], self._table[2][at]
