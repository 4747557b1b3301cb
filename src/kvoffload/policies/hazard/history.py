"""The history of keys, resident or not: how often and how regularly they are used.

Owns the history of one policy. Does not know slots, nor what a class is worth.
"""

from __future__ import annotations

import numpy as np

from kvoffload.structures.index import ABSENT, find, hash_row
from kvoffload.structures.jit import (
    F64Array,
    I32Array,
    I32Matrix,
    I64Array,
    ReadU64Matrix,
    U64Array,
    U64Matrix,
    inline,
    kernel,
)
from kvoffload.structures.keylists import KeyLists, forget_coldest, remember
from kvoffload.structures.keys import Keys
from kvoffload.structures.lists import LIST, move_to_head

NUM_COUNT_CLASSES, NUM_GAP_CLASSES = 5, 10
NUM_CLASSES = NUM_COUNT_CLASSES * NUM_GAP_CLASSES
_UNKNOWN = -1.0


class History:
    """The keys used last: how often each was used, and its typical gap between two uses.

    A key's *class* is what its past predicts: how often it was used (1, 2, 3-4, 5-9, 10 and more) and, in
    octaves, its typical gap. A new block takes the gap of the block before it on its path, because its
    request is a turn of the same session. Times are numbers of block references so far.

    Args:
        capacity: number of keys, kept by recency; a path is forgotten from its tail.
        gap_unit: gaps below it count as one octave.

    Memory: 52 bytes a key, and the key. Cost: one index probe a key and a few writes.
    """

    def __init__(self, capacity: int, key_bytes: int, gap_unit: int) -> None:
        self.gap_unit = gap_unit
        self.keys = KeyLists(capacity, key_bytes, 1)
        self._counts = np.zeros(capacity, np.int32)
        self._gaps = np.zeros(capacity, np.float64)
        self._last = np.zeros(capacity, np.int64)

    def observe(self, path: Keys, start: int, now: int, places: I32Array, classes: I32Array) -> None:
        """A request uses the blocks of `path` from `start` on at time `now`; fills in the class of each.

        `places` is scratch; both have shape ``(len(path) - start,)``, int32.
        """
        index, links = self.keys.index, self.keys.lists.links
        _observe(
            path.words,
            start,
            now,
            index.table,
            index.keys,
            links,
            self._counts,
            self._gaps,
            self._last,
            self.gap_unit,
            places,
            classes,
        )

    def classify(self, keys: Keys, now: int, classes: I32Array, last: I64Array) -> None:
        """Fill in the class and the time of the last use of each key; an unknown key is new and used now."""
        index = self.keys.index
        _classify(
            keys.words, now, index.table, index.keys, self._counts, self._gaps, self._last, classes, last
        )

    def clear(self) -> None:
        """Forget every key. Cost: O(capacity)."""
        self.keys.clear()


@inline
def _octaves(x: int) -> float:
    """Base-2 logarithm of `x` >= 1, linear between powers of two: the same number on every machine."""
    octave, rest = 0, x
    while rest >= 2:
        rest >>= 1
        octave += 1
    return octave + (x / (1 << octave) - 1.0)


@inline
def _class_of(count: int, gap: float) -> int:
    by_count = 0
    if count >= 10:
        by_count = 4
    elif count >= 5:
        by_count = 3
    elif count >= 3:
        by_count = 2
    elif count == 2:
        by_count = 1
    by_gap = 0
    if gap >= 0.0:
        by_gap = min(1 + int(gap), NUM_GAP_CLASSES - 1)
    return by_count * NUM_GAP_CLASSES + by_gap


@inline
def _mean_gap(count: int, gap: float, age: int, unit: int) -> float:
    """Moving average of the gaps of a block used `count` times, after one more gap of `age`."""
    octaves = _octaves(age + unit) - _octaves(unit)
    if gap < 0.0 or count < 2:
        return octaves
    return 0.5 * gap + 0.5 * octaves


@kernel
def _observe(
    path: ReadU64Matrix,
    start: int,
    now: int,
    table: U64Array,
    keys: U64Matrix,
    links: I32Matrix,
    counts: I32Array,
    gaps: F64Array,
    last: I64Array,
    unit: int,
    places: I32Array,
    classes: I32Array,
) -> int:
    known_list, spare = links.shape[0] - 2, links.shape[0] - 1
    # Of a request longer than the history only the head is remembered.
    length = min(path.shape[0] - start, keys.shape[0])
    # Known keys move to the front first, so that new keys never displace them.
    for i in range(length - 1, -1, -1):
        row = start + i
        places[i] = find(table, keys, path, row, hash_row(path, row))
        if places[i] != ABSENT:
            move_to_head(links, known_list, places[i])
    leading = 0
    while leading < length and places[leading] != ABSENT:
        leading += 1
    inherited = _UNKNOWN
    if leading > 0:
        turn = places[leading - 1]
        inherited = _mean_gap(counts[turn], gaps[turn], now - last[turn], unit)
    elif start > 0:
        before = find(table, keys, path, start - 1, hash_row(path, start - 1))
        if before != ABSENT:
            inherited = gaps[before]
    for i in range(length - 1, -1, -1):
        place = places[i]
        if place == ABSENT:
            if links[spare, LIST] == 0:
                forget_coldest(table, keys, links, known_list)
            row = start + i
            place = remember(table, keys, links, known_list, path, row, hash_row(path, row))
            counts[place] = 1
            gaps[place] = inherited
        else:
            move_to_head(links, known_list, place)
            gaps[place] = _mean_gap(counts[place], gaps[place], now - last[place], unit)
            counts[place] += 1
        last[place] = now
        classes[i] = _class_of(counts[place], gaps[place])
    for i in range(length, path.shape[0] - start):
        classes[i] = _class_of(1, inherited)
    return length


@kernel
def _classify(
    batch: ReadU64Matrix,
    now: int,
    table: U64Array,
    keys: U64Matrix,
    counts: I32Array,
    gaps: F64Array,
    last: I64Array,
    classes: I32Array,
    last_used: I64Array,
) -> int:
    for row in range(batch.shape[0]):
        place = find(table, keys, batch, row, hash_row(batch, row))
        if place == ABSENT:
            classes[row], last_used[row] = 0, now
        else:
            classes[row], last_used[row] = _class_of(counts[place], gaps[place]), last[place]
    return batch.shape[0]
