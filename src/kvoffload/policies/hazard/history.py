"""The history of keys, resident or not: how often and how regularly they are used.

Owns the history of one policy. Does not know slots, nor what a class is worth.
"""

from __future__ import annotations

import numpy as np

from kvoffload.core.hints import NUM_LABELS
from kvoffload.policies.hazard.shadow import ShadowLRU, leave_shadow
from kvoffload.structures.index import ABSENT, find, hash_row, same_key
from kvoffload.structures.jit import F64Array, I32Array, I64Array, U64Matrix, inline
from kvoffload.structures.keylists import KeyLists, forget_coldest, remember
from kvoffload.structures.lists import LIST, PREV, move_to_head
from kvoffload.structures.structs import Struct

NUM_COUNT_CLASSES, NUM_GAP_CLASSES = 5, 10
ENDED, NUM_KINDS = NUM_LABELS, NUM_LABELS + 1
"""What is known of the last request: a label, or only that it has ended."""
NUM_CLASSES = NUM_COUNT_CLASSES * NUM_GAP_CLASSES * NUM_KINDS
_UNKNOWN = -1.0


class History(Struct):
    """The keys used last: how often each was used, and its typical gap between two uses.

    A key's *class* is what its past predicts: how often it was used (1, 2, 3-4, 5-9, 10 and more), its
    typical gap in octaves, and the label of the request that used it last (`hints.Labels`), or `ENDED`. A new
    block takes the gap of the block before it on its path, because its request is a turn of the same session.
    Times are numbers of block references so far.

    A request is observed by `begin_path`, and then `use_key` for each of its blocks, from the last to the
    first: so a path is forgotten from its tail.

    Args:
        capacity: number of keys, kept by recency.
        gap_unit: gaps below it count as one octave.
        capacity_blocks: of the cache.

    Attributes:
        keys: one list, most recent first.
        counts, gaps, last: of each position: uses, typical gap in octaves (below 0: not known), time of the
            last use. labels: that of the last request; label: of the one at hand.
        shadow: which of them LRU would hold.
        inherited: the gap that new blocks of the request at hand take.
        places: where the blocks of its path were, from row `start` to row `end`, or ABSENT; for those after
            that there is no room.

    Memory: 72 bytes a key, and the key. Cost: one index probe a key and a few writes.
    """

    keys: KeyLists
    counts: I32Array
    gaps: F64Array
    last: I64Array
    labels: I32Array
    label: int
    shadow: ShadowLRU
    gap_unit: int
    inherited: float
    places: I32Array
    start: int
    end: int

    def __init__(self, capacity: int, key_bytes: int, gap_unit: int, capacity_blocks: int) -> None:
        super().__init__(
            keys=KeyLists(capacity, key_bytes, 1),
            counts=np.zeros(capacity, np.int32),
            gaps=np.zeros(capacity, np.float64),
            last=np.zeros(capacity, np.int64),
            labels=np.zeros(capacity, np.int32),
            places=np.zeros(capacity, np.int32),
            shadow=ShadowLRU(capacity, capacity_blocks),
            gap_unit=gap_unit,
        )

    def clear(self) -> None:
        """Forget every key. Cost: O(capacity)."""
        self.keys.clear()
        self.shadow.clear()


@inline
def _octaves(x: int) -> float:
    """Base-2 logarithm of `x` >= 1, linear between powers of two: the same number on every machine."""
    octave, rest = 0, x
    while rest >= 2:
        rest >>= 1
        octave += 1
    return octave + (x / (1 << octave) - 1.0)


@inline
def _class_of(count: int, gap: float, label: int) -> int:
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
    return (by_count * NUM_GAP_CLASSES + by_gap) * NUM_KINDS + label


@inline
def _gap_now(history: History, place: int, now: int) -> float:
    """Moving average of the gaps of a known key that is used now."""
    gap, unit = history.gaps[place], history.gap_unit
    octaves = _octaves(now - history.last[place] + unit) - _octaves(unit)
    if gap < 0.0 or history.counts[place] < 2:
        return octaves
    return 0.5 * gap + 0.5 * octaves


@inline
def begin_path(history: History, path: U64Matrix, start: int, label: int, now: int) -> None:
    """A request uses the blocks of `path` from `start` on; no key is there twice."""
    index, places = history.keys.index, history.places
    history.label = label
    # Of a request longer than the history only the head is remembered.
    history.start, history.end = start, min(path.shape[0], start + places.shape[0])
    last_leading, is_leading = ABSENT, False
    for row in range(history.end - 1, start - 1, -1):
        place = find(index, path, row, hash_row(path, row))
        places[row - start] = place
        if place != ABSENT and not is_leading:
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
    """The request uses the next block, ``path[row]``, whose hash is `h`; returns its position, or ABSENT if
    there is no room for it."""
    if row >= history.end:
        return np.int64(ABSENT)
    keys, links = history.keys, history.keys.lists.links
    recent, place = keys.lists.num_positions, history.places[row - history.start]
    # New blocks of this request may have taken the place of a known one that was nearly forgotten.
    if place != ABSENT and same_key(keys.index.keys, place, path, row):
        move_to_head(links, recent, place)
        history.gaps[place] = _gap_now(history, place, now)
        history.counts[place] += 1
    else:
        if links[recent + 1, LIST] == 0:
            leave_shadow(history.shadow, links[recent, PREV])
            forget_coldest(keys, recent)
        place = remember(keys, recent, path, row, h)
        history.gaps[place] = history.inherited
        history.counts[place] = 1
    history.last[place], history.labels[place] = now, history.label
    return np.int64(place)


@inline
def end_use(history: History, path: U64Matrix, row: int, h: np.uint64, label: int, now: int) -> int:
    """A request that used the block ``path[row]`` has ended; returns as `use_key`."""
    place = find(history.keys.index, path, row, h)
    if place != ABSENT:
        history.last[place], history.labels[place] = now, label
    return np.int64(place)


@inline
def is_used_at(history: History, path: U64Matrix, row: int, now: int) -> bool:
    """Whether the block ``path[row]`` was used last, or the request that used it ended, at this time."""
    place = find(history.keys.index, path, row, hash_row(path, row))
    return place != ABSENT and history.last[place] == now


@inline
def class_at(history: History, place: int) -> int:
    """The class of the key at a position; of a block of the request at hand for which there was no room."""
    if place == ABSENT:
        return np.int64(_class_of(1, history.inherited, history.label))
    return np.int64(_class_of(history.counts[place], history.gaps[place], history.labels[place]))


@inline
def classify(history: History, keys: U64Matrix, row: int, now: int) -> tuple[int, int]:
    """The class of the key ``keys[row]`` and the time of its last use; an unknown key is new and used now."""
    place = find(history.keys.index, keys, row, hash_row(keys, row))
    if place == ABSENT:
        return np.int64(0), np.int64(now)
    return class_at(history, place), history.last[place]
