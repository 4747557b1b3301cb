"""Kernels of the manager's methods. Each kernel processes one batch of a request's keys.

A kernel takes a cache, a request's path and a batch, and returns a number. Kernels decide nothing: the
policy's functions, called by address, choose the victims.
"""

from __future__ import annotations

import numpy as np

from kvoffload.core import miss_record
from kvoffload.core.duplicates import is_duplicate, keep_duplicate, mark_duplicates, reuse_duplicates
from kvoffload.core.expected import num_expected
from kvoffload.core.log import (
    ADMITTED,
    COMPLETE_LOAD,
    COMPLETE_STORE,
    ENDED,
    FINISH,
    LOOKUP,
    PIN,
    PREPARE_LOAD,
    PREPARE_STORE,
    STORE_NUMBERS,
    TOUCH,
    TOUCH_PATH,
    UNPIN,
    Log,
    end_call,
    put_call,
    put_end,
    put_number,
    put_runs,
    put_slots,
    put_word,
)
from kvoffload.core.log import KEEP as LOG_KEEP
from kvoffload.core.miss_record import note, prefetch_set, reason_of
from kvoffload.core.request import ACCESSED, AGAIN, FLAGS, HASH, HINT, SCRATCH, Path, add_batch
from kvoffload.core.returning import note_use, pop_use
from kvoffload.core.slots import WRITING, give_back, retire_slot
from kvoffload.core.state import (
    REFUSED,
    SPARES_EXPECTED,
    SPARES_TENANTS,
    Cache,
    Entering,
    Pinned,
    can_leave,
    evictable,
    may_give,
    note_move,
    tenant_of,
)
from kvoffload.core.tenants import (
    MAX_TENANTS,
    UNSURE,
    Tenants,
    adopt,
    evicts_only_own,
    forget_places,
    largest_part,
    may_learn,
    num_evictable_of,
    room_of_store,
)
from kvoffload.structures.batches import KeyBatch, OneKey
from kvoffload.structures.index import (
    ABSENT,
    Index,
    copy_key,
    find,
    find_key,
    hash_row,
    home_bucket,
    insert,
    position_in,
    remove_hashed,
)
from kvoffload.structures.jit import (
    I32Array,
    I64Array,
    ReadI32Array,
    ReadI64Matrix,
    ReadU64Matrix,
    U32Array,
    U64Matrix,
    inline,
    kernel,
    long_kernel,
    prefetch,
)
from kvoffload.structures.lists import PREV, unlink
from kvoffload.structures.structs import call_2, call_4

NO_ROOM = -1
"""Result of `prepare_store`: no missing block has room."""
END_ROW, ON_DEVICE, ASKED_END, LABEL, END_LABEL, NUM_COLUMNS = 0, 1, 2, 3, 4, 5
"""Columns of `requests` in `live_all`. `END_ROW`: end of the request's rows in the batch. `ON_DEVICE`: number
of leading blocks that are not looked up. `ASKED_END`: end of the looked-up path positions; blocks from there
on are only stored. `LABEL`: number of the hints while the request runs. `END_LABEL`: number of the hints at
its end."""
FIRST_WRONG = -2
"""Result of `prepare_store`: ``FIRST_WRONG - row`` if the policy named an invalid victim for this row."""
ALL, OFFER, CHOSEN, KEEP, SHRINK, SHRINK_CHOSEN = 0, 1, 2, 3, 4, 5
"""Steps of `prepare_store`.

- `ALL`: the whole store, with a compiled policy and no admission rule.
- `OFFER`: count the missing blocks and their room. A policy or rule in Python then decides.
- `CHOSEN`: complete the store after `OFFER`.
- `KEEP`: store nothing, only return duplicates to the policy.
- `SHRINK`: evict a block for each key of the batch, and mark the slots unused. With a policy in Python: only
  count the blocks.
- `SHRINK_CHOSEN`: evict after `SHRINK`, with a policy in Python.
"""
BY_POLICY, BY_ALL = 1, 2
"""Values of `admitted` in `prepare_store`."""
_UNNAMED, _CLAIMED = -2, -3
_PREFETCH_ROWS = 128
_PROBES, _SAMPLED_AFTER, _STRIDE = 32, 32, 8
"""`count_misses` prefetches for `_PROBES` blocks at a time. After `_SAMPLED_AFTER` blocks with one reason, it
looks up every `_STRIDE`-th block."""


# ---- lookup


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
def _record(version: U32Array, records: U64Matrix, position: int, slot: int) -> None:
    records[position, HINT] = (np.uint64(version[slot]) << np.uint64(32)) | np.uint64(slot + 1)


@inline
def _slot_of(cache: Cache, path: Path, position: int) -> int:
    """Return the slot of the key at `position`, or ABSENT."""
    version, records = cache.slots.version, path.records
    slot = _hinted(version, records, position)
    if slot == ABSENT:
        slot = find(cache.index, path.index.keys, position, records[position, HASH])
        if slot != ABSENT:
            _record(version, records, position, slot)
    return slot


@inline
def _prefetch(index: Index, path: Path, count: int, row: int) -> None:
    """Prefetch the cache lines of the next rows of a batch, once every `_PREFETCH_ROWS` rows."""
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
        _prefetch(cache.index, path, count, row)
        slot = _slot_of(cache, path, path.positions[row])
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
        slots[row] = _slot_of(cache, path, positions[row])


@inline
def _code_of(cache: Cache, path: Path, position: int, has_gap: bool) -> int:
    """Return a block's code of `miss_record`. `has_gap`: True if an earlier block of the path is missing."""
    slot = _slot_of(cache, path, position)
    if slot == ABSENT:
        return reason_of(cache.misses, path.records[position, HASH])
    if has_gap:
        return miss_record.BEHIND_A_GAP
    return miss_record.IN_FLIGHT if cache.slots.ref_cnt[slot] == WRITING else miss_record.READY


@inline
def _prefetch_misses(cache: Cache, path: Path, row: int, stride: int, count: int) -> None:
    """Prefetch the cache lines of the next `_PROBES` blocks that `count_misses` looks up."""
    table, records, positions = cache.index.table, path.records, path.positions
    for ahead in range(row + stride - 1, min(row + _PROBES * stride, count), stride):
        h = records[positions[ahead], HASH]
        prefetch(table, home_bucket(table, h))
        prefetch_set(cache.misses, h)


@kernel
def count_misses(cache: Cache, path: Path, first: int, count: int, counts: I64Array) -> int:
    """Count the blocks that cannot be loaded, by reason, in `counts`; return the number of these blocks.

    Writes the code of each block to ``path.found``. Leading blocks that can be loaded are `READY`. Blocks in
    the cache behind a missing block are `BEHIND_A_GAP`. After `_SAMPLED_AFTER` blocks with one reason, only
    every `_STRIDE`-th block is looked up. Where the reason changes, the skipped blocks are looked up, too.

    Args:
        first: path position of the first of `count` blocks; -1 for the blocks of the last batch.
    """
    positions, num_missed, row, run, last, prefetched = path.positions, 0, 0, 0, miss_record.READY, 0
    for i in range(count if first >= 0 else 0):
        positions[i] = first + i
    while row < count:
        stride = _STRIDE if run >= _SAMPLED_AFTER else 1
        if row >= prefetched:
            _prefetch_misses(cache, path, row, stride, count)
            prefetched = row + _PROBES * stride
        stop = min(row + stride, count)
        code = _code_of(cache, path, positions[stop - 1], num_missed > 0)
        kind = miss_record.NEVER_SEEN if code == miss_record.UNKNOWN else code  # neither has an event
        if kind != last and stop > row + 1:
            run = 0
            prefetched = row
            continue
        for i in range(row, stop):
            path.found[i] = code
        if code != miss_record.READY:
            run = run + stop - row if kind == last else stop - row
            counts[code] += stop - row
            num_missed += stop - row
        row, last = stop, kind
    return num_missed


@kernel
def note_absent(cache: Cache, batch: ReadU64Matrix, event: int) -> None:
    """Record why the blocks of `batch` are absent.

    `event`: a code of `miss_record`, the same for all blocks.
    """
    for row in range(batch.shape[0]):
        note(cache.misses, hash_row(batch, row), event)


@inline
def _note_rows(cache: Cache, path: Path, new: Entering, start: int, stop: int, event: int) -> None:
    """Record `event` for the missing blocks `start` to ``stop - 1`` of an offer."""
    records, positions = path.records, path.positions
    if cache.misses.table.shape[0] == 0:
        return
    for i in range(start, stop):
        prefetch_set(cache.misses, records[positions[new.rows[i]], HASH])
    for i in range(start, stop):
        note(cache.misses, records[positions[new.rows[i]], HASH], event)


@inline
def _disown(cache: Cache, slot: int) -> None:
    """Subtract a forgotten block from the counts of the block's owner."""
    if cache.has_tenants:
        tenants = cache.tenants
        tenants.held[tenants.owner[slot]] -= 1
        tenants.evictable[tenants.owner[slot]] -= cache.slots.ref_cnt[slot] == 0
        tenants.moves[slot] += np.uint32(1)


# ---- loads


@inline
def _hold(cache: Cache, slot: int, change: int) -> None:
    """Update this process's count of pins and writes of a slot. Only if processes share the slots."""
    if cache.holds.shape[0] != 0:
        cache.holds[slot] += np.int32(change)


@inline
def _count_evictable(cache: Cache, slot: int, change: int) -> None:
    """Add `change` to the owner's number of evictable blocks. A condemned block has no owner."""
    if not cache.slots.condemned[slot]:
        cache.tenants.evictable[cache.tenants.owner[slot]] += change


@inline
def _log_load(log: Log, path: Path, kind: int, count: int, load: Pinned, result: int) -> None:
    """Append a load to the log: its slots, or `result` if `result` is negative.

    A successful load gets the next number of a plan.
    """
    place = put_call(log, path, kind, count, count + 1)
    if place < 0:
        return
    if result < 0:
        end_call(log, place, put_word(log, place, result))
        return
    log.num_plans += 1
    load.number = log.num_plans
    end_call(log, place, put_slots(log, load.slots, count, place))


@inline
def _adopt_orphans(cache: Cache, path: Path, load: Pinned) -> None:
    """Make the request's tenant the owner of loaded, pinned blocks whose owner no longer exists."""
    tenants, tenant, num_adopted = cache.tenants, tenant_of(cache, path), 0
    for row in range(load.count):
        num_adopted += adopt(tenants, load.slots[row], tenant)
    if num_adopted > 0:
        forget_places(tenants, tenant)


@kernel
def pin(cache: Cache, path: Path, batch: KeyBatch, load: Pinned, is_load: bool) -> int:
    """Pin the blocks of a batch; return their number.

    If a block is not ready, pins nothing and returns ``~row`` of the first such block. Returns `FULL` or
    `WRONG` for a batch that cannot be added to the path.
    """
    result = count = add_batch(path, batch)
    ref_cnt, slots = cache.slots.ref_cnt, load.slots
    for row in range(count):
        slot = _slot_of(cache, path, path.positions[row])
        if slot == ABSENT or ref_cnt[slot] == WRITING:
            result = ~row
            break
        slots[row] = slot
    has_tenants = cache.has_tenants != 0
    for row in range(result):
        cache.slots.num_evictable -= ref_cnt[slots[row]] == 0
        if has_tenants and ref_cnt[slots[row]] == 0:
            _count_evictable(cache, slots[row], -1)
        ref_cnt[slots[row]] += 1
        _hold(cache, slots[row], 1)
    load.count = max(0, result)
    if has_tenants and is_load and cache.tenants.orphans != 0:
        _adopt_orphans(cache, path, load)
    if cache.log.is_open and count >= 0:
        _log_load(cache.log, path, PREPARE_LOAD if is_load else PIN, count, load, result)
    return result


@kernel
def unpin(cache: Cache, load: Pinned, is_load: bool) -> int:
    """Remove one pin from each block; return the cache's number of condemned slots.

    If the number is not 0, the caller must free the load's condemned slots.
    """
    if cache.log.is_open:
        kind = COMPLETE_LOAD if is_load else UNPIN
        put_end(cache.log, kind, load.number, load.slots, load.count, 1)
    slots = cache.slots
    ref_cnt, has_tenants = slots.ref_cnt, cache.has_tenants != 0
    for row in range(load.count):
        ref_cnt[load.slots[row]] -= 1
        slots.num_evictable += ref_cnt[load.slots[row]] == 0
        if has_tenants and ref_cnt[load.slots[row]] == 0:
            _count_evictable(cache, load.slots[row], 1)
        _hold(cache, load.slots[row], -1)
    cache.loaded += load.count if is_load else 0
    return slots.num_condemned


# ---- uses


@inline
def _use(cache: Cache, path: Path, position: int, whole_path: bool) -> None:
    """Mark a block as accessed by the request; if the block is resident, add it to ``path.used``.

    ``used.reused`` is True for the request's first access of the block, and False for later accesses. Later
    accesses are added only if `whole_path` is True.
    """
    records, used = path.records, path.used
    first = records[position, FLAGS] & np.uint64(ACCESSED) == 0
    if not (first or whole_path):
        return
    records[position, FLAGS] |= np.uint64(ACCESSED)
    slot = _slot_of(cache, path, position)
    if first:
        note_use(cache.known, path.index.keys, position, records[position, HASH], slot != ABSENT)
    if slot != ABSENT:
        note_move(cache, slot)
        used.slots[used.count] = slot
        used.reused[used.count] = first
        used.count += 1


@inline
def _find_blocks(cache: Cache, path: Path, start: int) -> None:
    """Write the slots of the path's blocks from position `start` on to ``path.found``, for a policy."""
    for position in range(start, path.length):
        path.found[position] = _slot_of(cache, path, position)
        if path.found[position] != ABSENT:
            note_move(cache, path.found[position])


@inline
def _observe(cache: Cache, path: Path) -> None:
    """Report the new blocks of the path to a compiled policy that observes all traffic."""
    if cache.observe == 0 or path.observed == path.length:
        return
    if path.is_quiet != 0:
        path.observed = path.length
        return
    _find_blocks(cache, path, path.observed)
    call_2(cache.observe, cache.policy, path)
    path.observed = path.length


@inline
def _report_uses(cache: Cache, path: Path) -> int:
    """Report the blocks of ``path.used`` to a compiled policy, as accesses.

    In a victim tier the blocks become duplicates instead, and the policy removes them from its order. Returns
    the number of blocks that the caller must report to a policy in Python; 0 for a compiled policy.
    """
    function = cache.access
    if cache.follows_device:
        function = cache.remove
        mark_duplicates(cache, path.used)
    if path.used.count == 0:
        return 0
    if function == 0:
        return path.used.count
    call_2(function, cache.policy, path.used)
    return 0


@kernel
def expect(cache: Cache, path: Path) -> int:
    """Report newly expected blocks to a compiled policy; return the path position of the first one."""
    start = path.foreseen
    if start < path.num_expected:
        if cache.expect != 0:
            call_2(cache.expect, cache.policy, path)
        path.foreseen = path.num_expected
    return start


@kernel
def observe(cache: Cache, path: Path) -> None:
    """Report the new blocks of the path to an observing policy. Called by store modes."""
    _observe(cache, path)


@kernel
def touch(cache: Cache, path: Path, batch: KeyBatch, whole_path: bool) -> int:
    """Record that a request uses these blocks.

    Returns the number of blocks that the caller must report to a policy in Python; `FULL` or `WRONG` for a
    batch that cannot be added to the path.
    """
    path.used.count = 0
    count = add_batch(path, batch)
    if count < 0:
        return count
    if cache.log.is_open:
        put_number(cache.log, path, TOUCH_PATH if whole_path else TOUCH, count, 0)
    for row in range(count):
        _use(cache, path, path.positions[row], whole_path)
    _observe(cache, path)
    return _report_uses(cache, path)


@kernel
def finish(cache: Cache, path: Path, is_touched: bool) -> int:
    """Record uses of the whole path, unless `is_touched`, and report the request's end to a compiled policy.

    Returns the number of uses that the caller must report to a policy in Python. If the number is not 0, the
    caller reports these uses, then calls `finish` again to report the end.
    """
    if cache.log.is_open and path.recorded != ENDED:
        put_number(cache.log, path, FINISH, 0, 0)
        path.recorded = ENDED
    return _finish(cache, path, is_touched)


@inline
def _finish(cache: Cache, path: Path, is_touched: bool) -> int:
    path.used.count = 0
    for position in range(0 if is_touched else path.length):
        _use(cache, path, position, True)
    _observe(cache, path)
    num_unreported = _report_uses(cache, path)
    if cache.finished != 0 and num_unreported == 0:
        _find_blocks(cache, path, 0)
        call_2(cache.finished, cache.policy, path)
    return num_unreported


@kernel
def loaded(cache: Cache, path: Path, load: Pinned) -> int:
    """Record that the device holds the blocks of a load. For a victim tier.

    Returns the number of blocks that the caller must remove from a policy in Python.
    """
    path.used.count = load.count
    for row in range(load.count):
        slot = load.slots[row]
        path.used.slots[row] = slot
        note_move(cache, slot)
        note_use(cache.known, cache.index.keys, slot, hash_row(cache.index.keys, slot), True)
    return _report_uses(cache, path)


# ---- stores


@inline
def _collect_missing(cache: Cache, path: Path, count: int, new: Entering) -> int:
    """Write each absent key of a batch once to `new`, with its row; return the number of these keys."""
    records, positions, num_missing = path.records, path.positions, 0
    for row in range(count):
        _prefetch(cache.index, path, count, row)
        position = positions[row]
        if records[position, FLAGS] & np.uint64(SCRATCH):
            continue
        if _slot_of(cache, path, position) == ABSENT:
            records[position, FLAGS] |= np.uint64(SCRATCH)
            copy_key(new.keys, num_missing, path.index.keys, position)
            new.rows[num_missing] = row
            num_missing += 1
    for i in range(num_missing):
        records[positions[new.rows[i]], FLAGS] &= ~np.uint64(SCRATCH)
    return num_missing


@inline
def _count_on_path(cache: Cache, path: Path) -> None:
    """Count the evictable blocks on the path by owner. The store must not evict these blocks."""
    tenants, ref_cnt = cache.tenants, cache.slots.ref_cnt
    for position in range(path.length):
        slot = _slot_of(cache, path, position)
        if slot != ABSENT and ref_cnt[slot] == 0:
            tenants.on_path[tenants.owner[slot]] += 1


@inline
def _room_of_tenant(cache: Cache, path: Path, wanted: int) -> int:
    """Return how many of `wanted` new blocks have room under the quotas. Also sets ``tenants.givers``."""
    tenants, num_free = cache.tenants, cache.slots.num_free
    for owner in range(tenants.num_tenants):
        tenants.on_path[owner] = 0
    tenant = tenant_of(cache, path)
    room = room_of_store(tenants, tenant, wanted, num_free, path.length)
    if room == UNSURE:
        _count_on_path(cache, path)
        room = room_of_store(tenants, tenant, wanted, num_free, 0)
    return room


@inline
def _room(cache: Cache, path: Path, wanted: int) -> int:
    """Return how many of `wanted` new blocks fit into free slots and slots of evictable blocks."""
    if cache.has_tenants:
        return _room_of_tenant(cache, path, wanted)
    num_free, possible = cache.slots.num_free, cache.slots.num_evictable
    short = wanted - num_free
    if short > max(0, possible - path.length):
        for position in range(path.length):
            slot = _slot_of(cache, path, position)
            possible -= slot != ABSENT and cache.slots.ref_cnt[slot] == 0
    return wanted if short <= possible else num_free + possible


@inline
def _has_room_without_expected(cache: Cache, path: Path, wanted: int) -> bool:
    """Return True if `wanted` new blocks fit without the slots of expected blocks.

    The store must then spare the expected blocks. Returns False if no block is expected. Cost: O(1) if there
    is ample room, otherwise O(expected keys).
    """
    keys = cache.expected.keys
    if num_expected(cache.expected) == 0:
        return False
    possible = cache.slots.num_evictable + cache.slots.num_free - wanted
    if cache.has_tenants:
        possible = num_evictable_of(cache.tenants) + cache.tenants.usable_free - wanted
    if num_expected(cache.expected) + path.length <= possible:
        return True
    for position in range(path.length):
        slot = _slot_of(cache, path, position)
        possible -= slot != ABSENT and cache.slots.ref_cnt[slot] == 0 and may_give(cache, slot)
    links, batch = keys.lists.links, keys.index.keys
    position = links[keys.lists.num_positions, PREV]
    while position != keys.lists.num_positions and possible >= 0:
        h = hash_row(batch, position)
        slot = find(cache.index, batch, position, h)
        may_leave = slot != ABSENT and can_leave(cache, path, slot) and may_give(cache, slot)
        possible -= may_leave and not is_duplicate(cache, slot)
        position = links[position, PREV]
    return possible >= 0


@inline
def _offer(cache: Cache, path: Path, batch: KeyBatch, new: Entering, no_store: bool, admitted: int) -> int:
    """Collect a batch's missing blocks in `new`; return the number of blocks to store, or an error.

    A block without room is not stored. With `no_store` no block is stored.
    """
    count = add_batch(path, batch)
    return count if count < 0 else _offer_rows(cache, path, count, new, no_store, admitted)


@inline
def _is_cut(cache: Cache, path: Path, new: Entering) -> bool:
    """Return True if all missing blocks of an offer come after a block that the policy refused.

    Returns False if another request has stored the refused block since.
    """
    if path.cut == 0 or new.num_missing == 0 or path.positions[new.rows[0]] < path.cut:
        return False
    return _slot_of(cache, path, path.cut - 1) == ABSENT


@inline
def _offer_rows(cache: Cache, path: Path, count: int, new: Entering, no_store: bool, admitted: int) -> int:
    """Continue `_offer` after the `count` keys of the batch were added to the path."""
    new.num_offered = count
    new.num_missing = _collect_missing(cache, path, count, new)
    if no_store:
        new.count = 0
        return 0
    new.count = _room(cache, path, new.num_missing)
    if new.num_missing > 0 and new.count == 0:
        cache.dropped += new.num_missing
        _note_rows(cache, path, new, 0, new.num_missing, miss_record.NO_ROOM)
        return NO_ROOM
    cache.spares = SPARES_TENANTS if cache.has_tenants else 0
    if cache.has_tenants and new.num_missing > 0:
        tenants, tenant = cache.tenants, tenant_of(cache, path)
        usable = cache.slots.capacity - cache.slots.num_unused
        learns = may_learn(tenants, tenant, new.num_missing, new.count, usable)
        tenants.is_quiet = not learns and evicts_only_own(tenants, tenant)
        path.is_quiet |= not learns
    if _has_room_without_expected(cache, path, new.count):
        cache.spares |= SPARES_EXPECTED
    if admitted == 0 and _is_cut(cache, path, new) and not _is_owed(cache):
        new.count, new.num_refused = 0, new.num_missing
    return new.count


@inline
def _is_owed(cache: Cache) -> bool:
    """Return True if the store fills the minimum of a tenant. The policy must then accept all blocks."""
    return cache.spares & SPARES_TENANTS != 0 and cache.tenants.is_owed != 0


@inline
def _give(cache: Cache, path: Path, new: Entering) -> None:
    """Assign free slots, then slots of duplicates, to the first new blocks.

    The slots of the other new blocks are marked `_UNNAMED`.
    """
    num_free, stack = cache.slots.num_free, cache.slots.stack
    new.num_free = min(new.count, num_free)
    if cache.spares & SPARES_TENANTS != 0:
        new.num_free = min(new.num_free, cache.tenants.usable_free)
    for i in range(new.num_free):
        new.slots[i] = stack[num_free - 1 - i]
    new.num_given = new.num_free
    if cache.follows_device:
        reuse_duplicates(cache, path, new)
    for i in range(new.num_given, new.count):
        new.slots[i] = _UNNAMED


@inline
def _check_victims(cache: Cache, path: Path, new: Entering) -> int:
    """Return 0, or ``FIRST_WRONG - row`` for the first invalid victim. Ends the limits of ``cache.spares``.

    Invalid victims: slots that are protected, also by a quota; slots that are named twice; duplicates.
    """
    ref_cnt, error, checked = cache.slots.ref_cnt, 0, new.count
    for i in range(new.num_free, new.count):
        slot = new.slots[i]
        may_leave = 0 <= slot < ref_cnt.shape[0] and (
            can_leave(cache, path, slot) and may_give(cache, slot)
            if i < new.num_given
            else evictable(cache, path, slot)
        )
        if not may_leave or (i >= new.num_given and is_duplicate(cache, slot)):
            error, checked = FIRST_WRONG - i, i
            break
        ref_cnt[slot] = _CLAIMED
    for i in range(new.num_free, checked):
        ref_cnt[new.slots[i]] = 0
    cache.spares = 0
    return error


@inline
def _has_hole(new: Entering) -> bool:
    """Return True if a policy refused a block of a prefix but accepted a later block, an error.

    The check of victims then reports the refused row.
    """
    if new.one_prefix:
        for i in range(new.num_given + 1, new.count):
            if new.slots[i] != REFUSED and new.slots[i - 1] == REFUSED:
                return True
    return False


@inline
def _leave_out_refused(path: Path, new: Entering) -> None:
    """Remove from the plan the blocks that the policy refused.

    `rows` then lists the stored, the dropped and the refused blocks, in this order.
    """
    slots, rows, refused = new.slots, new.rows, path.used.slots
    stored, num_refused = new.num_given, 0
    for i in range(new.num_given, new.count):
        if slots[i] == REFUSED:
            refused[num_refused] = rows[i]
            num_refused += 1
        else:
            if num_refused > 0:
                copy_key(new.keys, stored, new.keys, i)
                slots[stored], rows[stored] = slots[i], rows[i]
            stored += 1
    if num_refused > 0:
        for i in range(new.num_dropped):
            rows[stored + i] = rows[new.count + i]
        for i in range(num_refused):
            rows[stored + new.num_dropped + i] = refused[i]
        if new.one_prefix:
            path.cut = path.positions[refused[0]] + 1
    new.count = stored
    new.num_refused += num_refused


@inline
def _count_eviction(tenants: Tenants, slot: int) -> None:
    owner = tenants.owner[slot]
    tenants.held[owner] -= 1
    tenants.evictable[owner] -= 1
    tenants.evicted[owner] += 1


@inline
def _change_owners(cache: Cache, path: Path, new: Entering) -> None:
    """Make the request's tenant the owner of a plan's slots; subtract victims from their owners' counts."""
    tenants, tenant = cache.tenants, tenant_of(cache, path)
    for i in range(new.count):
        slot = new.slots[i]
        if i >= new.num_free:
            _count_eviction(tenants, slot)
        tenants.owner[slot] = tenant
        tenants.moves[slot] += np.uint32(1)
    tenants.held[tenant] += new.count


@inline
def _evict_blocks(cache: Cache, new: Entering) -> None:
    """Remove the victims in the slots of a plan; write their keys to ``new.evicted``."""
    index = cache.index
    for i in range(new.num_free, new.count):
        h = hash_row(index.keys, new.slots[i])
        prefetch(index.table, home_bucket(index.table, h))
        prefetch_set(cache.misses, h)
    for i in range(new.num_free, new.count):
        slot = new.slots[i]
        copy_key(new.evicted, i - new.num_free, index.keys, slot)
        if is_duplicate(cache, slot):
            unlink(cache.duplicates.links, slot)
        h = hash_row(index.keys, slot)
        note(cache.misses, h, miss_record.EVICTED)
        remove_hashed(index, slot, h)
        cache.slots.version[slot] += np.uint32(1)


@inline
def _insert_blocks(cache: Cache, path: Path, new: Entering) -> None:
    """Evict the victims of a plan and insert the new blocks into its slots. The new blocks are in flight."""
    index, slots, records, positions = cache.index, cache.slots, path.records, path.positions
    for i in range(new.count):
        prefetch(index.keys, new.slots[i])
        prefetch(index.table, home_bucket(index.table, records[positions[new.rows[i]], HASH]))
    _evict_blocks(cache, new)
    if cache.has_tenants:
        _change_owners(cache, path, new)
    for i in range(new.count):
        slot, position = new.slots[i], positions[new.rows[i]]
        insert(index, path.index.keys, position, records[position, HASH], slot)
        slots.ref_cnt[slot] = WRITING
        _hold(cache, slot, WRITING)
        _record(slots.version, records, position, slot)
        # The store counts as the request's access: `finish_request` must not count a second one.
        records[position, FLAGS] |= np.uint64(ACCESSED)
    num_evicted = new.count - new.num_free
    slots.num_free -= new.num_free
    slots.num_evictable -= num_evicted
    slots.num_writing += new.count
    cache.evicted += num_evicted
    cache.dropped += new.num_dropped
    cache.refused += new.num_refused


@inline
def _collect_returning(cache: Cache, path: Path, new: Entering, kept: Entering) -> None:
    """Move the offered blocks that the victim tier already holds to `kept`.

    Writes the kept and stored blocks to ``path.used``, in the order of the offer, with their reuse flags.
    ``path.used`` is empty if the policy needs no report: no block was reused, and the blocks were either all
    kept or all stored.
    """
    used, records, positions, entered = path.used, path.records, path.positions, 0
    has_reuse = False
    used.count = kept.count = 0
    for row in range(new.num_offered):
        slot = _slot_of(cache, path, positions[row])
        is_new = entered < new.count and new.rows[entered] == row
        is_kept = slot != ABSENT and is_duplicate(cache, slot)
        entered += is_new
        if is_kept:
            keep_duplicate(cache, slot, kept)
        if is_kept or is_new:
            was_used_again = pop_use(
                cache.known, path.index.keys, positions[row], records[positions[row], HASH]
            )
            has_reuse = has_reuse or was_used_again
            note_move(cache, slot)
            used.slots[used.count] = slot
            used.reused[used.count] = was_used_again
            used.count += 1
    if not has_reuse and (kept.count == 0 or new.count == 0):
        used.count = 0
    kept.num_given = kept.count
    cache.kept += kept.count


@inline
def _return(cache: Cache, path: Path, new: Entering, kept: Entering) -> None:
    """Collect the returning blocks and report them to a compiled policy."""
    _collect_returning(cache, path, new, kept)
    if cache.replace == 0:
        return
    if kept.count > 0:
        call_4(cache.replace, cache.policy, kept, cache, path)
    if path.used.count > 0:
        call_2(cache.access, cache.policy, path.used)


@inline
def _store(cache: Cache, path: Path, new: Entering, kept: Entering) -> int:
    """Get victims from a compiled policy, check all victims, and insert the new blocks.

    Returns the number of stored blocks, or ``FIRST_WRONG - row``.
    """
    if new.count > 0 and cache.replace != 0:
        _give(cache, path, new)
        call_4(cache.replace, cache.policy, new, cache, path)
    if new.count > 0 and not new.admitted and not _has_hole(new):
        _leave_out_refused(path, new)
    error = _check_victims(cache, path, new)
    if error < 0:
        return error
    _insert_blocks(cache, path, new)
    if cache.follows_device:
        _return(cache, path, new, kept)
    return new.count


@inline
def _note_left_out(
    cache: Cache, path: Path, new: Entering, num_not_admitted: int, is_unoffered: bool
) -> None:
    """Record in ``cache.misses`` the reasons why missing blocks of an offer were not stored."""
    refused_at, not_admitted_at = new.count + new.num_dropped, new.num_missing - num_not_admitted
    if is_unoffered:
        _note_rows(cache, path, new, 0, new.num_missing, miss_record.NOT_OFFERED)
        return
    _note_rows(cache, path, new, new.count, refused_at, miss_record.NO_ROOM)
    _note_rows(cache, path, new, refused_at, not_admitted_at, miss_record.REFUSED)
    _note_rows(cache, path, new, not_admitted_at, new.num_missing, miss_record.NOT_ADMITTED)


@inline
def _log_store(log: Log, path: Path, new: Entering, kind: int, stored: int) -> None:
    """Append a store to the log.

    A successful store gets the next number of a plan. Its record has counts, slots and missing rows. The
    record of a failed store has only the negative code `stored`.
    """
    if kind == LOG_KEEP:
        put_number(log, path, kind, new.num_offered, new.num_missing)
        return
    most_more = STORE_NUMBERS + max(0, stored) + 2 * new.num_missing
    place = put_call(log, path, kind, new.num_offered, most_more)
    if place < 0:
        return
    if stored < 0:
        end_call(log, place, put_word(log, place, stored))
        return
    log.num_plans += 1
    new.number = log.num_plans
    put_word(log, place, stored)
    put_word(log, place + 1, new.num_missing)
    put_word(log, place + 2, new.num_dropped)
    put_word(log, place + 3, new.num_refused)
    put_word(log, place + 4, new.num_free)
    end = put_slots(log, new.slots, stored, place + STORE_NUMBERS)
    end_call(log, place, put_runs(log, new.rows, new.num_missing, end))


@inline
def _offer_shrink(cache: Cache, path: Path, batch: KeyBatch, new: Entering) -> int:
    """Prepare to evict one block for each key of the batch; return how many blocks may leave, or an error.

    No slot may be free. The policy receives the keys as new blocks, which are removed at once. The policy's
    `observe` is not called. Quotas protect the minimum of each tenant.
    """
    count = add_batch(path, batch)
    if count < 0:
        return count
    new.num_offered = count
    new.num_missing = _collect_missing(cache, path, count, new)
    new.count = min(new.num_missing, cache.slots.num_evictable)
    cache.spares = 0
    if cache.has_tenants:
        tenants = cache.tenants
        for owner in range(tenants.num_tenants):
            tenants.on_path[owner] = 0
        tenants.usable_free = tenants.is_owed = tenants.is_quiet = 0
        new.count = largest_part(tenants, MAX_TENANTS, new.count)
        cache.spares = SPARES_TENANTS
    if _has_room_without_expected(cache, path, new.count):
        cache.spares |= SPARES_EXPECTED
    new.num_dropped = new.num_refused = 0
    new.one_prefix, new.admitted = not cache.follows_device, 1
    return new.count


@inline
def _shrink(cache: Cache, path: Path, new: Entering) -> int:
    """Evict the blocks that the policy has chosen, and mark their slots as unused.

    Returns the number of evicted blocks, or ``FIRST_WRONG - row``.
    """
    error = _check_victims(cache, path, new)
    if error < 0:
        return error
    _evict_blocks(cache, new)
    used = path.used
    used.count = new.count
    for i in range(new.count):
        slot = new.slots[i]
        used.slots[i] = slot
        if cache.has_tenants:
            _count_eviction(cache.tenants, slot)
            cache.tenants.moves[slot] += np.uint32(1)
        retire_slot(cache.slots, slot)
    cache.slots.num_evictable -= new.count
    cache.evicted += new.count
    if new.count > 0 and cache.remove != 0:
        call_2(cache.remove, cache.policy, used)
    return new.count


@kernel
def prepare_store(
    cache: Cache, path: Path, batch: KeyBatch, new: Entering, kept: Entering, step: int, admitted: int
) -> int:
    """Run a step of a store (`ALL`, `OFFER`, ...); return the number of blocks, or an error.

    In a victim tier, writes the duplicates among the offered blocks to `kept`. All steps share one kernel:
    each further kernel would add a second of compilation to the first start.

    Args:
        admitted: `BY_POLICY`: the policy must accept all blocks. `BY_ALL`: policy and admission rule must
            accept all blocks. 0: both may refuse blocks.
    """
    stored = np.int64(0)
    if step == SHRINK:
        stored = _offer_shrink(cache, path, batch, new)
        if stored <= 0 or cache.replace == 0:
            return stored
        _give(cache, path, new)
        call_4(cache.replace, cache.policy, new, cache, path)
    if step >= SHRINK:
        return _shrink(cache, path, new)
    if step != CHOSEN:
        stored = _offer(cache, path, batch, new, step == KEEP, admitted)
        if stored < AGAIN or (step == OFFER and stored >= 0):
            return stored
    if step != CHOSEN and stored >= 0:
        if not cache.follows_device and step != KEEP:
            _observe(cache, path)
        new.num_dropped = 0 if step == KEEP else new.num_missing - new.num_refused - stored
        new.one_prefix, new.admitted = not cache.follows_device, admitted != 0 or _is_owed(cache)
    num_not_admitted = 0 if _is_cut(cache, path, new) else new.num_refused
    if stored >= 0:
        stored = _store(cache, path, new, kept)
    if stored >= 0:
        _note_left_out(cache, path, new, num_not_admitted, step == KEEP)
    if cache.log.is_open:
        kind = PREPARE_STORE | ADMITTED if admitted == BY_ALL else PREPARE_STORE
        _log_store(cache.log, path, new, LOG_KEEP if step == KEEP else kind, stored)
    return stored


@kernel
def give(cache: Cache, path: Path, new: Entering) -> None:
    """Assign the slots that need no victim, before a policy in Python is called."""
    _give(cache, path, new)


@kernel
def become_ready(cache: Cache, new: Entering) -> None:
    """Make the blocks of a plan readable."""
    if cache.log.is_open:
        put_end(cache.log, COMPLETE_STORE, new.number, new.slots, new.count, 1)
    _become_ready(cache, new)


@inline
def _become_ready(cache: Cache, new: Entering) -> None:
    slots = cache.slots
    for i in range(new.count):
        slots.ref_cnt[new.slots[i]] = 0
        _hold(cache, new.slots[i], -WRITING)
    if cache.has_tenants:
        for i in range(new.count):
            _count_evictable(cache, new.slots[i], 1)
    slots.num_writing -= new.count
    slots.num_evictable += new.count
    cache.stored += new.count


@kernel
def abandon(cache: Cache, new: Entering) -> None:
    """Forget the in-flight blocks of a failed store."""
    if cache.log.is_open:
        put_end(cache.log, COMPLETE_STORE, new.number, new.slots, new.count, 0)
    for i in range(new.count):
        h = hash_row(cache.index.keys, new.slots[i])
        note(cache.misses, h, miss_record.FAILED_STORE)
        remove_hashed(cache.index, new.slots[i], h)
        cache.slots.version[new.slots[i]] += np.uint32(1)
        _disown(cache, new.slots[i])
        give_back(cache.slots, new.slots[i])
        _hold(cache, new.slots[i], -WRITING)
    cache.slots.num_writing -= new.count
    cache.store_failed += new.count


# ---- whole requests without bytes


@long_kernel
def live_all(
    cache: Cache,
    path: Path,
    new: Entering,
    batch: ReadU64Matrix,
    requests: ReadI64Matrix,
    num_requests: int,
    missed: I64Array,
) -> int:
    """Run requests from lookup to finish: look up the blocks, store the missing blocks at once, finish.

    Needs a compiled policy, no admission rule and the store mode on-compute. Has the effect of `lookup`,
    `prepare_store`, `become_ready` and `finish` on a new path for each request. Releases the GIL: no other
    thread may use the cache during the call.

    Args:
        path, new: memory for the longest request, reused for every request. ``new.admitted`` is 1 if the
            policy may refuse no block.
        batch: the keys of all requests.
        requests: a row for each request, see `END_ROW` and the columns after it.
        missed: number of missed blocks of each group (`group_of`). A missed block is a looked-up block from
            the request's first missing block on.

    Returns:
        0, or an error of `prepare_store`, which ends the loop.
    """
    start, result = np.int64(0), np.int64(0)
    for number in range(num_requests):
        end = requests[number, END_ROW]
        _begin_path(path, batch, start, end)
        path.on_device, path.label = requests[number, ON_DEVICE], requests[number, LABEL]
        asked, end_label = requests[number, ASKED_END], requests[number, END_LABEL]
        result = _live(cache, path, new, asked, end_label, missed)
        start = end
        if result < 0:
            return result
    return result


@inline
def _begin_path(path: Path, batch: ReadU64Matrix, start: int, end: int) -> None:
    """Replace the keys of a path by the rows `start` to ``end - 1`` of a batch. The keys must all differ."""
    index, records = path.index, path.records
    table, size = index.table, index.table.shape[0]
    for position in range(path.length):
        bucket = home_bucket(table, records[position, HASH])
        # The entry exists, possibly after buckets that this loop has already emptied.
        while position_in(table[bucket]) != position:
            bucket = bucket + 1 if bucket + 1 < size else 0
        table[bucket] = np.uint64(0)
    for position in range(end - start):
        h = hash_row(batch, start + position)
        insert(index, batch, start + position, h, position)
        records[position, HASH] = h
    path.length = end - start


@inline
def _live(cache: Cache, path: Path, new: Entering, asked: int, end_label: int, missed: I64Array) -> int:
    """Run the request on a path from lookup to finish; return 0 or an error.

    Looks up the path positions from ``path.on_device`` to ``asked - 1``. Later blocks are only stored.
    """
    records, count = path.records, path.length
    for position in range(count):
        records[position, HINT] = records[position, FLAGS] = np.uint64(0)
        path.positions[position] = position
    path.observed = path.num_expected = path.foreseen = path.used.count = 0
    path.was_asked, path.is_quiet, path.cut = 1, 0, 0
    end = path.on_device
    while end < asked:
        _prefetch(cache.index, path, asked, end)
        slot = _slot_of(cache, path, end)
        if slot == ABSENT or cache.slots.ref_cnt[slot] == WRITING:
            break
        end += 1
    for position in range(end, asked):
        missed[group_of(records[position, HASH], missed.shape[0])] += 1
    new.num_free = new.num_given = new.num_dropped = new.num_refused = new.number = 0
    stored = _offer_rows(cache, path, count, new, False, 0)
    if stored >= 0:
        _observe(cache, path)
        new.num_dropped, new.one_prefix = new.num_missing - stored, 1
        stored = _store(cache, path, new, new)
    if stored >= 0:
        _become_ready(cache, new)
    elif stored != NO_ROOM:
        return stored
    path.label = end_label
    _finish(cache, path, False)
    return np.int64(0)


@kernel
def count_by_group(batch: ReadU64Matrix, counts: I64Array) -> None:
    """Add the number of keys of each group to `counts`."""
    for row in range(batch.shape[0]):
        counts[group_of(hash_row(batch, row), counts.shape[0])] += 1


@inline
def group_of(h: np.uint64, num_groups: int) -> int:
    """Return the group of a key with hash `h`, 0 to ``num_groups - 1``."""
    mixed = (h ^ (h >> np.uint64(29))) * np.uint64(0x9E3779B97F4A7C15)
    return np.int64(((mixed >> np.uint64(32)) * np.uint64(num_groups)) >> np.uint64(32))


# ---- the log of calls


@kernel
def log_call(cache: Cache, path: Path, kind: int, count: int, result: int) -> None:
    """Append a call to the log. For methods whose kernels do not log."""
    if cache.log.is_open and path.recorded != ENDED:
        put_number(cache.log, path, kind, count, result)


# ---- forgetting


@kernel
def discard(cache: Cache, batch: ReadU64Matrix, slots: I32Array) -> int:
    """Remove the ready blocks of a batch from the index; write their slots to `slots`; return their number.

    On input, ``slots[row]`` is ABSENT or a slot. With a slot, the block is removed only if it is still in
    this slot.
    """
    num_removed = 0
    for row in range(batch.shape[0]):
        h = hash_row(batch, row)
        slot = find(cache.index, batch, row, h)
        wanted = slots[row] < 0 or slots[row] == slot
        if slot != ABSENT and cache.slots.ref_cnt[slot] >= 0 and wanted:
            note(cache.misses, h, miss_record.DAMAGED)
            remove_hashed(cache.index, slot, h)
            cache.slots.version[slot] += np.uint32(1)
            _disown(cache, slot)
            slots[num_removed] = slot
            num_removed += 1
    cache.discarded += num_removed
    return num_removed
