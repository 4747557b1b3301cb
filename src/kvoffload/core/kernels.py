"""The loops of the manager: each kernel is one step of the life-cycle, on one batch of a request's path.

A batch is an array of positions on the path, whose keys are already hashed. Nothing here decides anything:
`manager` decides which step runs when.

An argument's name has one meaning everywhere: `table`, `keys` the manager's index; `ref_cnt`, `version` the
state of its slots; `path_table`, `path_keys`, `records` the request's path; `positions` the batch.
"""

from __future__ import annotations

import numpy as np

from kvoffload.core.protection import evictable
from kvoffload.core.request import ACCESSED, FLAGS, HASH, HINT, SCRATCH
from kvoffload.core.slots import WRITING
from kvoffload.structures.index import (
    ABSENT,
    copy_key,
    find,
    find_bytes,
    hash_row,
    home_bucket,
    insert,
    position_in,
    remove,
)
from kvoffload.structures.jit import (
    BoolArray,
    I32Array,
    ReadI32Array,
    U32Array,
    U64Array,
    U64Matrix,
    inline,
    kernel,
    prefetch,
)

_CLAIMED = -3
_PREFETCH_ROWS = 128


@inline
def _hinted(version: U32Array, records: U64Matrix, position: int) -> int:
    """Slot of a key that was found before and has stayed there since, or ABSENT."""
    hint = records[position, HINT]
    if hint != 0:
        slot = position_in(hint)
        if np.uint64(version[slot]) == hint >> np.uint64(32):
            return slot
    return np.int64(ABSENT)


@inline
def _record(version: U32Array, records: U64Matrix, position: int, slot: int) -> None:
    records[position, HINT] = (np.uint64(version[slot]) << np.uint64(32)) | np.uint64(slot + 1)


@inline
def _resolve(
    table: U64Array,
    keys: U64Matrix,
    version: U32Array,
    path_keys: U64Matrix,
    records: U64Matrix,
    position: int,
) -> int:
    """Slot of the key at `position`, or ABSENT."""
    slot = _hinted(version, records, position)
    if slot == ABSENT:
        slot = find(table, keys, path_keys, position, records[position, HASH])
        if slot != ABSENT:
            _record(version, records, position, slot)
    return slot


@inline
def _prefetch(table: U64Array, keys: U64Matrix, records: U64Matrix, positions: I32Array, start: int) -> None:
    """Ask for the cache lines that resolving the next `_PREFETCH_ROWS` rows will need."""
    stop = min(start + _PREFETCH_ROWS, positions.shape[0])
    for row in range(start, stop):
        prefetch(table, home_bucket(table, records[positions[row], HASH]))
    for row in range(start, stop):
        h = records[positions[row], HASH]
        entry = table[home_bucket(table, h)]
        if entry >> np.uint64(32) == h >> np.uint64(32):
            prefetch(keys, position_in(entry))


@kernel
def leading_ready(
    table: U64Array,
    keys: U64Matrix,
    ref_cnt: I32Array,
    version: U32Array,
    path_keys: U64Matrix,
    records: U64Matrix,
    positions: ReadI32Array,
) -> int:
    """Length of the leading run of ready blocks; its complement (``~n``) if a block in flight ends it."""
    for row in range(positions.shape[0]):
        if row % _PREFETCH_ROWS == 0:
            _prefetch(table, keys, records, positions, row)
        slot = _resolve(table, keys, version, path_keys, records, positions[row])
        if slot == ABSENT:
            return row
        if ref_cnt[slot] == WRITING:
            return ~row
    return positions.shape[0]


@kernel
def state_of_key(table: U64Array, keys: U64Matrix, ref_cnt: I32Array, key: bytes) -> int:
    """State of one key that is not packed: 0 absent, 1 ready, 2 in flight."""
    slot = find_bytes(table, keys, key)
    if slot == ABSENT:
        return 0
    return 2 if ref_cnt[slot] == WRITING else 1


@kernel
def pin(
    table: U64Array,
    keys: U64Matrix,
    ref_cnt: I32Array,
    version: U32Array,
    path_keys: U64Matrix,
    records: U64Matrix,
    positions: ReadI32Array,
    slots: I32Array,
) -> int:
    """Pin a batch; returns how many blocks had no pin before, or ``~row`` of one that is not ready."""
    for row in range(positions.shape[0]):
        slot = _resolve(table, keys, version, path_keys, records, positions[row])
        if slot == ABSENT or ref_cnt[slot] == WRITING:
            return ~row
        slots[row] = slot
    newly_pinned = 0
    for row in range(positions.shape[0]):
        newly_pinned += ref_cnt[slots[row]] == 0
        ref_cnt[slots[row]] += 1
    return newly_pinned


@kernel
def access(
    table: U64Array,
    keys: U64Matrix,
    version: U32Array,
    path_keys: U64Matrix,
    records: U64Matrix,
    positions: ReadI32Array,
    whole_path: bool,
    slots: I32Array,
    reused: BoolArray,
) -> int:
    """Mark a batch as accessed by its request; collects the slots of the blocks that are here.

    `reused` is True for blocks that the request had not accessed before. The others are collected only if
    `whole_path`.
    """
    found = 0
    for row in range(positions.shape[0]):
        position = positions[row]
        first = records[position, FLAGS] & np.uint64(ACCESSED) == 0
        if not (first or whole_path):
            continue
        records[position, FLAGS] |= np.uint64(ACCESSED)
        slot = _resolve(table, keys, version, path_keys, records, position)
        if slot != ABSENT:
            slots[found] = slot
            reused[found] = first
            found += 1
    return found


@kernel
def resolve(
    table: U64Array,
    keys: U64Matrix,
    version: U32Array,
    path_keys: U64Matrix,
    records: U64Matrix,
    positions: ReadI32Array,
    slots: I32Array,
) -> int:
    """The slot of each block of a batch, in flight or ready, or ABSENT; returns how many are here."""
    found = 0
    for row in range(positions.shape[0]):
        if row % _PREFETCH_ROWS == 0:
            _prefetch(table, keys, records, positions, row)
        slots[row] = _resolve(table, keys, version, path_keys, records, positions[row])
        found += slots[row] != ABSENT
    return found


@kernel
def missing(
    table: U64Array,
    keys: U64Matrix,
    version: U32Array,
    path_keys: U64Matrix,
    records: U64Matrix,
    positions: ReadI32Array,
    fresh: U64Matrix,
    rows: I32Array,
) -> int:
    """Collect the keys of a batch that are absent, each once, and their rows in the batch."""
    found = 0
    for row in range(positions.shape[0]):
        if row % _PREFETCH_ROWS == 0:
            _prefetch(table, keys, records, positions, row)
        position = positions[row]
        if records[position, FLAGS] & np.uint64(SCRATCH):
            continue
        if _resolve(table, keys, version, path_keys, records, position) == ABSENT:
            records[position, FLAGS] |= np.uint64(SCRATCH)
            copy_key(fresh, found, path_keys, position)
            rows[found] = row
            found += 1
    for i in range(found):
        records[positions[rows[i]], FLAGS] &= ~np.uint64(SCRATCH)
    return found


@kernel
def own_evictable(
    table: U64Array,
    keys: U64Matrix,
    ref_cnt: I32Array,
    version: U32Array,
    path_keys: U64Matrix,
    records: U64Matrix,
    length: int,
) -> int:
    """Number of blocks of a request's path that are here without a pin."""
    found = 0
    for position in range(length):
        slot = _resolve(table, keys, version, path_keys, records, position)
        found += slot != ABSENT and ref_cnt[slot] == 0
    return found


@inline
def _first_wrong_victim(
    ref_cnt: I32Array,
    path_table: U64Array,
    path_keys: U64Matrix,
    keys: U64Matrix,
    slots: I32Array,
    num_free: int,
) -> int:
    """Row of the first victim that may not leave or is named twice, or -1: no policy is trusted."""
    wrong = -1
    checked = slots.shape[0]
    for i in range(num_free, slots.shape[0]):
        slot = slots[i]
        if not (0 <= slot < keys.shape[0] and evictable(ref_cnt, path_table, path_keys, keys, slot)):
            wrong = i
            checked = i
            break
        ref_cnt[slot] = _CLAIMED
    for i in range(num_free, checked):
        ref_cnt[slots[i]] = 0
    return wrong


@kernel
def place(
    table: U64Array,
    keys: U64Matrix,
    ref_cnt: I32Array,
    version: U32Array,
    path_table: U64Array,
    path_keys: U64Matrix,
    records: U64Matrix,
    positions: ReadI32Array,
    rows: ReadI32Array,
    slots: ReadI32Array,
    num_free: int,
    evicted: U64Matrix,
) -> int:
    """Put some rows of a batch into `slots`, in flight; collects the keys of the evicted blocks.

    The slots from `num_free` on are the policy's victims. If one of them is wrong, returns its index and
    changes nothing; otherwise returns -1.
    """
    wrong = _first_wrong_victim(ref_cnt, path_table, path_keys, keys, slots, num_free)
    if wrong >= 0:
        return wrong
    for i in range(slots.shape[0]):
        prefetch(keys, slots[i])
        prefetch(table, home_bucket(table, records[positions[rows[i]], HASH]))
    for i in range(num_free, slots.shape[0]):
        prefetch(table, home_bucket(table, hash_row(keys, slots[i])))
    for i in range(num_free, slots.shape[0]):
        slot = slots[i]
        copy_key(evicted, i - num_free, keys, slot)
        remove(table, keys, slot)
        version[slot] += np.uint32(1)
    for i in range(slots.shape[0]):
        slot, position = slots[i], positions[rows[i]]
        insert(table, keys, path_keys, position, records[position, HASH], slot)
        ref_cnt[slot] = WRITING
        _record(version, records, position, slot)
        # The store counts as the request's access: `finish_request` must not count a second one.
        records[position, FLAGS] |= np.uint64(ACCESSED)
    return -1


@kernel
def abandon(table: U64Array, keys: U64Matrix, version: U32Array, slots: ReadI32Array) -> None:
    """Forget blocks in flight: remove their keys from the index."""
    for i in range(slots.shape[0]):
        remove(table, keys, slots[i])
        version[slots[i]] += np.uint32(1)


@kernel
def discard(
    table: U64Array,
    keys: U64Matrix,
    ref_cnt: I32Array,
    version: U32Array,
    path_keys: U64Matrix,
    records: U64Matrix,
    positions: ReadI32Array,
    slots: I32Array,
) -> int:
    """Remove the ready blocks of a batch from the index; collects their slots.

    An entry of `slots` that is not negative restricts its row to the block in that slot: a key that has been
    stored again since is in another slot, and stays.
    """
    found = 0
    for row in range(positions.shape[0]):
        slot = _resolve(table, keys, version, path_keys, records, positions[row])
        wanted = slots[row] < 0 or slots[row] == slot
        if slot != ABSENT and ref_cnt[slot] >= 0 and wanted:
            remove(table, keys, slot)
            version[slot] += np.uint32(1)
            slots[found] = slot
            found += 1
    return found
