"""Kernels of lookups: they find the slots of a request's keys.

Owns the recorded slots of a path's keys, which are hints for later lookups. Does not know policies and plans.
Changes no block.
"""

from __future__ import annotations

import numpy as np

from kvoffload.core.log import LOOKUP, put_number
from kvoffload.core.request import AGAIN, HASH, HINT, Path, add_batch
from kvoffload.core.slots import WRITING
from kvoffload.core.state import Cache
from kvoffload.structures.batches import KeyBatch, OneKey
from kvoffload.structures.index import ABSENT, Index, find, find_key, home_bucket, position_in
from kvoffload.structures.jit import I32Array, ReadI32Array, U32Array, U64Matrix, inline, kernel, prefetch

_PREFETCH_ROWS = 128


@inline
def _hinted(version: U32Array, records: U64Matrix, position: int) -> int:
    """Return the recorded slot of the key at `position`.

    Returns ABSENT if no slot is recorded, or if the block has left the recorded slot.
    """
    hint = records[position, HINT]
    if hint != 0:
        slot = position_in(hint)
        if np.uint64(version[slot]) == hint >> np.uint64(32):
            return slot
    return np.int64(ABSENT)


@inline
def record_slot(version: U32Array, records: U64Matrix, position: int, slot: int) -> None:
    """Record the slot of the key at `position`, as a hint for later lookups."""
    records[position, HINT] = (np.uint64(version[slot]) << np.uint64(32)) | np.uint64(slot + 1)


@inline
def slot_of(cache: Cache, path: Path, position: int) -> int:
    """Return the slot of the key at `position`, or ABSENT."""
    version, records = cache.slots.version, path.records
    slot = _hinted(version, records, position)
    if slot == ABSENT:
        slot = find(cache.index, path.index.keys, position, records[position, HASH])
        if slot != ABSENT:
            record_slot(version, records, position, slot)
    return slot


@inline
def prefetch_rows(index: Index, path: Path, count: int, row: int) -> None:
    """Prefetch the cache lines of the next `_PREFETCH_ROWS` rows of a batch.

    Callers call this for every `row`. It does nothing unless `row` is a multiple of `_PREFETCH_ROWS`.
    """
    if row % _PREFETCH_ROWS or count < 4:
        return
    table, positions, records = index.table, path.positions, path.records
    stop = min(row + _PREFETCH_ROWS, count)
    for ahead in range(row, stop):
        prefetch(table, home_bucket(table, records[positions[ahead], HASH]))
    for ahead in range(row, stop):
        h = records[positions[ahead], HASH]
        entry = table[home_bucket(table, h)]
        if entry >> np.uint64(32) == h >> np.uint64(32):
            prefetch(index.keys, position_in(entry))


@kernel
def lookup(cache: Cache, path: Path, batch: KeyBatch) -> int:
    """Return the number of leading ready blocks; ``~number`` if the next block is in flight."""
    result = count = add_batch(path, batch)
    if path.was_asked == 0 and count >= 0:
        path.was_asked, path.on_device = 1, path.positions[0] if count > 0 else path.length
    for row in range(count):
        prefetch_rows(cache.index, path, count, row)
        slot = slot_of(cache, path, path.positions[row])
        if slot == ABSENT:
            result = row
            break
        if cache.slots.ref_cnt[slot] == WRITING:
            result = ~row
            break
    if cache.log.is_open and count >= 0:
        put_number(cache.log, path, LOOKUP, count, result)
    return result


@kernel
def state_of_key(cache: Cache, key: OneKey) -> int:
    """Return the state of one key: 0 absent, 1 ready, 2 in flight; AGAIN for a key of another length."""
    if key.size != cache.index.key_bytes:
        return AGAIN
    slot = find_key(cache.index, key.address)
    if slot == ABSENT:
        return 0
    return 2 if cache.slots.ref_cnt[slot] == WRITING else 1


@kernel
def resolve(cache: Cache, path: Path, positions: ReadI32Array, slots: I32Array) -> None:
    """Write the slot of the block at each of these path positions to `slots`; ABSENT for an absent block.

    A block in flight has a slot, too.
    """
    for row in range(positions.shape[0]):
        slots[row] = slot_of(cache, path, positions[row])
