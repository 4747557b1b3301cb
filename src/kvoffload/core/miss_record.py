"""A bounded record of the reasons why blocks are absent, for `OffloadingManager.count_misses`.

Owns a table of the last events of absent blocks. The table has hashes instead of keys and affects no
decision. So a wrong entry can only make an explanation wrong.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvoffload.core import miss_reasons as reasons
from kvoffload.structures.jit import U32Array, inline, prefetch
from kvoffload.structures.structs import Struct

READY, EVICTED, NOT_ADMITTED, REFUSED, NO_ROOM, DAMAGED, FAILED_STORE, RESET = range(8)
NOT_OFFERED, TIER_GAVE_UP, NEVER_SEEN, UNKNOWN, BEHIND_A_GAP, IN_FLIGHT, BUSY = range(8, 15)
"""Codes of the states of a block. The codes from `EVICTED` to `TIER_GAVE_UP` are events, which the record can
hold."""

REASON_OF = (
    *("", reasons.EVICTED, reasons.NOT_ADMITTED, reasons.REFUSED, reasons.NO_ROOM, reasons.DAMAGED),
    *(reasons.FAILED_STORE, reasons.RESET, reasons.NOT_OFFERED, reasons.TIER_GAVE_UP, reasons.NEVER_SEEN),
    *(reasons.UNKNOWN, reasons.BEHIND_A_GAP, reasons.IN_FLIGHT, reasons.BUSY),
)
"""The reason for each code, by index; an empty text for `READY`."""

NUM_CODES = len(REASON_OF)
CountArray: TypeAlias = npt.NDArray[np.int64]
"""Number of blocks with each code, shape ``(NUM_CODES,)``."""

ENTRIES_PER_SLOT = 2
WAYS = 8
"""Number of entries in a set of the table. A set has 32 bytes and lies in one CPU cache line."""
_EVENT = 15


class MissRecord(Struct):
    """A set-associative table of the last events of absent blocks, with about two entries for each slot.

    An entry consists of an event and 28 bits of the key's hash. The newest entry of a set comes first. In a
    full set a new entry replaces the oldest entry. On average an entry is replaced after `num_entries` new
    entries.

    Two blocks of a set may have the same 28 bits. Then a block without an entry gets the event of the other
    block. This happens in one of 33 million lookups.

    Memory: 8 bytes per slot, rounded up to whole sets.

    Attributes:
        table: uint32 entries. Each set is `WAYS` consecutive entries. An empty entry is 0.
        num_entered: number of entries added so far. If a key already has an entry, its next event replaces
            this entry and is not counted.
    """

    table: U32Array
    num_entered: int

    def __init__(self, num_slots: int) -> None:
        num_entries = -(-num_slots * ENTRIES_PER_SLOT // WAYS) * WAYS
        raw = np.zeros(num_entries + 2 * WAYS, np.uint32)
        start = -raw.ctypes.data % 64 // 4
        super().__init__(table=raw[start : start + num_entries])
        self.table.fill(0)  # the first touch of a page delays a request

    @property
    def num_entries(self) -> int:
        """Capacity of the table, in entries; 0 if the manager records no misses."""
        return len(self.table)


def by_reason(counts: CountArray) -> dict[str, int]:
    """Convert counts by code to counts by reason. Reasons with a count of 0 are left out."""
    return {REASON_OF[code]: count for code, count in enumerate(counts.tolist()) if count}


@inline
def _first_of(table: U32Array, h: np.uint64) -> int:
    """Return the index in `table` of the first entry of the set that `h`, the hash of a key, selects."""
    num_sets = np.uint64(table.shape[0] // WAYS)
    return np.int64(((h >> np.uint64(32)) * num_sets) >> np.uint64(32)) * WAYS


@inline
def _tag_of(h: np.uint64) -> np.uint32:
    """Return the 28 bits of a hash that an entry stores: bits 4 to 31.

    Bits 32 to 63 select the set. The lowest four bits of an entry hold the event.
    """
    return np.uint32(h & np.uint64(0xFFFFFFF0))


@inline
def prefetch_set(record: MissRecord, h: np.uint64) -> None:
    """Prefetch the set that `h`, the hash of a key, selects. Does nothing if the table is empty."""
    if record.table.shape[0] != 0:
        prefetch(record.table, _first_of(record.table, h))


@inline
def note(record: MissRecord, h: np.uint64, event: int) -> None:
    """Record an event of the absent key with the hash `h`. Does nothing if the table is empty."""
    table = record.table
    if table.shape[0] == 0:
        return
    first, tag = _first_of(table, h), _tag_of(h)
    entry = tag | np.uint32(event)
    is_new = 1
    for place in range(first, first + WAYS):
        older = table[place]
        table[place] = entry
        if older == 0:
            break
        if older ^ tag <= np.uint32(_EVENT):
            is_new = 0
            break
        entry = older
    record.num_entered += is_new


@inline
def reason_of(record: MissRecord, h: np.uint64) -> int:
    """Return the last event of the absent key with the hash `h`.

    If the key has no entry and its set is full, returns `UNKNOWN`, because the key's entry may have been
    replaced. If the key has no entry and its set is not full, returns `NEVER_SEEN`. An empty table gives
    `UNKNOWN`.
    """
    table, tag = record.table, _tag_of(h)
    if table.shape[0] == 0:
        return UNKNOWN
    first = _first_of(table, h)
    match = np.uint32(0)
    for place in range(first, first + WAYS):  # without a branch: at most one entry has the tag
        entry = table[place]
        match |= entry if entry ^ tag <= np.uint32(_EVENT) else np.uint32(0)
    if match != 0:
        return np.int64(match & np.uint32(_EVENT))
    return NEVER_SEEN if table[first + WAYS - 1] == 0 else UNKNOWN
