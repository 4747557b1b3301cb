"""Which blocks lie in one object, and what the object is called. Knows no network.

A path is cut into groups of so many blocks, from its beginning; what is left at its end is in none. Who knows
the path knows the groups: nothing has to be looked up.
"""

from __future__ import annotations

import hashlib
from itertools import repeat
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvoffload.structures.jit import U64Array
from kvoffload.structures.keys import Keys
from kvoffload.tiers.contract import Mask

_GENERATION = 1 << 17
_NAME_BYTES = 16


class Part(NamedTuple):
    """Blocks of a batch that lie in one object.

    Attributes:
        name: of the object: 32 hexadecimal digits.
        rows: shape ``(n,)``: where the blocks are in the batch.
        at: shape ``(n,)``: where they are in the object, ascending.
    """

    name: str
    rows: npt.NDArray[np.int64]
    at: npt.NDArray[np.int64]


class Places:
    """The groups of the paths that were told of late.

    A group's name is a digest of the keys of all its blocks, in order. So it is the same wherever the same
    blocks stand side by side, and no other group has it, also where keys are not chained.

    Args:
        group_blocks: blocks in an object; 1 for an object each: then no path has to be told.

    Attributes:
        generation: what was added in this one or the one before is known.

    Memory: 200 bytes a block, of the last 130,000 to 260,000 blocks. Cost: 0.2 µs a block. Thread: one.
    """

    def __init__(self, group_blocks: int) -> None:
        self.group_blocks = group_blocks
        self.generation = 0
        # Digest of a block's key -> its object, and where in it.
        self._young: dict[int, tuple[str, int]] = {}
        self._old: dict[int, tuple[str, int]] = {}

    def add(self, keys: Keys) -> None:
        """These are whole groups, one after the other."""
        size = self.group_blocks
        digests, joined, width = keys.digests.tolist(), b"".join(keys), size * keys.key_bytes
        for number, start in enumerate(range(0, len(keys), size)):
            name = _name(joined[number * width : (number + 1) * width])
            self._young.update(
                zip(digests[start : start + size], zip(repeat(name), range(size)), strict=False)
            )
        if len(self._young) >= _GENERATION:
            self._old, self._young = self._young, {}
            self.generation += 1

    def known(self, digests: U64Array) -> Mask:
        """Which blocks are in a group."""
        if self.group_blocks == 1:
            return np.ones(len(digests), np.bool_)
        young, old = self._young, self._old
        return np.array([digest in young or digest in old for digest in digests.tolist()], np.bool_)

    def ends(self, keys: Keys) -> Mask:
        """Which blocks are the last of their group."""
        last, young, old = self.group_blocks - 1, self._young, self._old
        places = [young.get(digest) or old.get(digest) for digest in keys.digests.tolist()]
        return np.array([place is not None and place[1] == last for place in places], np.bool_)

    def parts(self, keys: Keys) -> list[Part]:
        """The objects of these blocks, as far as they are known."""
        if self.group_blocks == 1:
            zero = np.zeros(1, np.int64)
            return [Part(_name(key), np.array([row]), zero) for row, key in enumerate(keys)]
        rows: dict[str, list[tuple[int, int]]] = {}
        for row, digest in enumerate(keys.digests.tolist()):
            place = self._young.get(digest) or self._old.get(digest)
            if place is not None:
                rows.setdefault(place[0], []).append((place[1], row))
        found = []
        for name, places in rows.items():
            at, numbers = zip(*sorted(places), strict=True)
            found.append(Part(name, np.array(numbers), np.array(at)))
        return found

    def whole(self, keys: Keys) -> list[Part]:
        """The objects all of whose blocks are among these."""
        return [part for part in self.parts(keys) if len(part.rows) == self.group_blocks]


def _name(keys: bytes) -> str:
    return hashlib.sha256(keys).digest()[:_NAME_BYTES].hex()
