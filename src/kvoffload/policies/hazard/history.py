"""The history of keys, resident or not: how often and how regularly they are used.

Owns the history of one policy. Does not know slots, nor what a class is worth.
"""

from __future__ import annotations

import numpy as np

from kvoffload.structures.index import ABSENT, find, hash_row, same_key
from kvoffload.structures.jit import F64Array, I32Array, I64Array, U64Matrix, inline
from kvoffload.structures.keylists import KeyLists, forget_coldest, remember
from kvoffload.structures.lists import LIST, PREV, move_to_head
from kvoffload.structures.structs import Struct

NUM_COUNT_CLASSES, NUM_GAP_CLASSES = 5, 10
NUM_CLASSES = NUM_COUNT_CLASSES * NUM_GAP_CLASSES
_UNKNOWN = -1.0


class History(Struct):
    """The keys used last: how often each was used, and its typical gap between two uses.

    A key's *class* is what its past predicts: how often it was used (1, 2, 3-4, 5-9, 10 and more) and, in
    octaves, its typical gap. A new block takes the gap of the block before it on its path, because its
    request is a turn of the same session. Times are numbers of block references so far.

    A request is observed by `begin_path`, and then `use_key` for each of its blocks, from the last to the
    first: so a path is forgotten from its tail.

    Args:
        capacity: number of keys, kept by recency.
        gap_unit: gaps below it count as one octave.

    Attributes:
        keys: one list, most recent first.
        counts, gaps, last: of each position: uses, typical gap in octaves (below 0: not known), time of the
            last use.
        inherited: the gap that new blocks of the request at hand take.
        end: the row of its path from which on there is no room for its blocks.
        next_known: position of its last block that was known before and has not been used yet.

    Memory: 52 bytes a key, and the key. Cost: one index probe a key and a few writes.
    """

    keys: KeyLists
    counts: I32Array
    gaps: F64Array
    last: I64Array
    gap_unit: int
    inherited: float
    end: int
    next_known: int

    def __init__(self, capacity: int, key_bytes: int, gap_unit: int) -> None:
        super().__init__(
            keys=KeyLists(capacity, key_bytes, 1),
            counts=np.zeros(capacity, np.int32),
            gaps=np.zeros(capacity, np.float64),
            last=np.zeros(capacity, np.int64),
            gap_unit=gap_unit,
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
def _gap_now(history: History, place: int, now: int) -> float:
    """Moving average of the gaps of a known key that is used now."""
    gap, unit = history.gaps[place], history.gap_unit
    octaves = _octaves(now - history.last[place] + unit) - _octaves(unit)
    if gap < 0.0 or history.counts[place] < 2:
        return octaves
    return 0.5 * gap + 0.5 * octaves


@inline
def begin_path(history: History, path: U64Matrix, start: int, now: int) -> None:
    """A request uses the blocks of `path` from `start` on; no key is there twice. The known ones move to the
    front now, so that new ones never displace them."""
    index, links, recent = history.keys.index, history.keys.lists.links, history.keys.lists.num_positions
    # Of a request longer than the history only the head is remembered.
    history.end = min(path.shape[0], start + recent)
    history.next_known = recent
    last_leading, is_leading = ABSENT, False
    for row in range(history.end - 1, start - 1, -1):
        place = find(index, path, row, hash_row(path, row))
        if place != ABSENT:
            move_to_head(links, recent, place)
            if history.next_known == recent:
                history.next_known = place
            if not is_leading:
                last_leading = place
        is_leading = place != ABSENT
    history.inherited = _UNKNOWN
    if is_leading:
        history.inherited = _gap_now(history, last_leading, now)
    elif start > 0:
        before = find(index, path, start - 1, hash_row(path, start - 1))
        if before != ABSENT:
            history.inherited = history.gaps[before]


@inline
def use_key(history: History, path: U64Matrix, row: int, h: np.uint64, now: int) -> int:
    """The request uses the next block, ``path[row]``, whose hash is `h`; returns its class."""
    if row >= history.end:
        return _class_of(1, history.inherited)
    keys, links, counts, gaps = history.keys, history.keys.lists.links, history.counts, history.gaps
    recent, place = keys.lists.num_positions, history.next_known
    # What was known stands in the list in the order of the path: no index is needed to find it again.
    if place < recent and same_key(keys.index.keys, place, path, row):
        history.next_known = links[place, PREV]
        move_to_head(links, recent, place)
        gaps[place] = _gap_now(history, place, now)
        counts[place] += 1
    else:
        if links[recent + 1, LIST] == 0:
            forget_coldest(keys, recent)
        place = remember(keys, recent, path, row, h)
        gaps[place] = history.inherited
        counts[place] = 1
    history.last[place] = now
    return _class_of(counts[place], gaps[place])


@inline
def classify(history: History, keys: U64Matrix, row: int, now: int) -> tuple[int, int]:
    """The class of the key ``keys[row]`` and the time of its last use; an unknown key is new and used now."""
    place = find(history.keys.index, keys, row, hash_row(keys, row))
    if place == ABSENT:
        return np.int64(0), np.int64(now)
    return np.int64(_class_of(history.counts[place], history.gaps[place])), history.last[place]
