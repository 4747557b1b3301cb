"""The use history of keys, resident or not: their use counts and the gaps between their uses.

From this history, each key gets a class (`History`). Does not know slots, or the worth of a class.
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
"""Kinds of the request that used a key last: its label, 0 while it runs without a label, or `ENDED` if it
has ended without a label."""
NUM_CLASSES = NUM_COUNT_CLASSES * NUM_GAP_CLASSES * NUM_KINDS
_UNKNOWN = -1.0


class History(Struct):
    """The most recently used keys, each with its use count and the typical gap between its uses.

    The *class* of a key combines three properties:

    - use count: 1, 2, 3-4, 5-9, 10 and more
    - typical gap between uses, in octaves. A new block has no gap yet. It inherits the gap of the last block
      in the known prefix of its path, because its request continues the session of that block.
    - label of the last request that used the key (`hints.Labels`), or `ENDED`

    Times are numbers of block references. For each request, call `begin_path`, then `use_key` for each block
    of the request, from the last block to the first, so that the tail of a path is forgotten first.

    Args:
        capacity: number of keys.
        key_bytes: length of a key.
        gap_unit: gaps below this number of references form the first octave.
        capacity_blocks: capacity of the cache.

    Attributes:
        keys: one list, most recent first. The next four arrays have an element for each of its positions.
        counts: use count.
        gaps: typical gap, in octaves; negative if unknown.
        last: time of the last use.
        labels: label of the last request that used the key.
        label: label of the current request.
        shadow: the keys that LRU would hold.
        inherited: the gap for new blocks of the current request.
        start, end: rows `start` to ``end - 1`` of the current path are recorded; `capacity` limits `end`.
        places: for each recorded row, the position that its key had before this request, or ABSENT.

    Memory: 72 bytes plus the key for each key. Cost: one index probe and a few writes per key.
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
    """Approximate log2 of `x` >= 1, linearly between powers of two.

    Unlike log2, the result is equal on every machine.
    """
    octave, shifted = 0, x
    while shifted >= 2:
        shifted >>= 1
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
    """Return the typical gap of a known key, in octaves, after a use at time `now` (a moving average)."""
    gap, unit = history.gaps[place], history.gap_unit
    octaves = _octaves(now - history.last[place] + unit) - _octaves(unit)
    if gap < 0.0 or history.counts[place] < 2:
        return octaves
    return 0.5 * gap + 0.5 * octaves


@inline
def begin_path(history: History, path: U64Matrix, start: int, label: int, now: int) -> None:
    """Begin a request that uses the blocks of `path` from row `start` on. All keys of `path` differ."""
    index, places = history.keys.index, history.places
    history.label = label
    # If a request is longer than the history, only its head is remembered.
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
    """Record a use of the block ``path[row]`` with hash `h`.

    Returns the position of the block's key, or ABSENT for rows from ``history.end`` on.
    """
    if row >= history.end:
        return np.int64(ABSENT)
    keys, links = history.keys, history.keys.lists.links
    recent, place = keys.lists.num_positions, history.places[row - history.start]
    # A new block of this request may have replaced a known key at this position.
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
    """Record the end of a request that used the block ``path[row]``.

    Returns the position of the block's key, or ABSENT.
    """
    place = find(history.keys.index, path, row, h)
    if place != ABSENT:
        history.last[place], history.labels[place] = now, label
    return np.int64(place)


@inline
def is_used_at(history: History, path: U64Matrix, row: int, now: int) -> bool:
    """Return True if the last use of the block ``path[row]`` was at time `now`."""
    place = find(history.keys.index, path, row, hash_row(path, row))
    return place != ABSENT and history.last[place] == now


@inline
def class_at(history: History, place: int) -> int:
    """Return the class of the key at a position.

    If `place` is ABSENT, return the class of a new block of the current request.
    """
    if place == ABSENT:
        return np.int64(_class_of(1, history.inherited, history.label))
    return np.int64(_class_of(history.counts[place], history.gaps[place], history.labels[place]))


@inline
def classify(history: History, keys: U64Matrix, row: int, now: int) -> tuple[int, int]:
    """Return the class and last use of ``keys[row]``. An unknown key counts as new and as used now."""
    place = find(history.keys.index, keys, row, hash_row(keys, row))
    if place == ABSENT:
        return np.int64(0), np.int64(now)
    return class_at(history, place), history.last[place]
