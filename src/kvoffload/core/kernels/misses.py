"""Kernels that record and count the reasons why blocks are absent.

Owns the sampling of long paths, and the reason of each block that a store leaves out. Does not know the
layout of the record (`core.miss_record`).
"""

from __future__ import annotations

from kvoffload.core import miss_record
from kvoffload.core.kernels.lookups import slot_of
from kvoffload.core.miss_record import note, prefetch_set, reason_of
from kvoffload.core.request import HASH, Path
from kvoffload.core.slots import WRITING
from kvoffload.core.state import Cache, Entering
from kvoffload.structures.index import ABSENT, hash_row, home_bucket
from kvoffload.structures.jit import I64Array, ReadU64Matrix, inline, kernel, prefetch

_PROBES, _SAMPLED_AFTER, _STRIDE = 32, 32, 8
"""`_PROBES`: number of blocks that `count_misses` prefetches together. The other two constants save time in
long runs of blocks with one reason: after `_SAMPLED_AFTER` such blocks, `count_misses` looks up only every
`_STRIDE`-th block."""


@inline
def _code_of(cache: Cache, path: Path, position: int, has_gap: bool) -> int:
    """Return the code of a block's state (`miss_record`). `has_gap` is True if an earlier block of the path
    is missing.
    """
    slot = slot_of(cache, path, position)
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
    the cache behind a missing block are `BEHIND_A_GAP`. To save time, after `_SAMPLED_AFTER` blocks with one
    reason only every `_STRIDE`-th block is looked up. If such a block has another reason, the skipped blocks
    before it are looked up, too.

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
    """Record `event`, a code of `miss_record`, as the reason why the blocks of `batch` are absent."""
    for row in range(batch.shape[0]):
        note(cache.misses, hash_row(batch, row), event)


@inline
def note_rows(cache: Cache, path: Path, new: Entering, start: int, stop: int, event: int) -> None:
    """Record `event` as the reason why the missing blocks `start` to ``stop - 1`` of an offer are absent."""
    records, positions = path.records, path.positions
    if cache.misses.table.shape[0] == 0:
        return
    for i in range(start, stop):
        prefetch_set(cache.misses, records[positions[new.rows[i]], HASH])
    for i in range(start, stop):
        note(cache.misses, records[positions[new.rows[i]], HASH], event)


@inline
def note_left_out(cache: Cache, path: Path, new: Entering, num_not_admitted: int, is_unoffered: bool) -> None:
    """Record in ``cache.misses`` the reasons why missing blocks of an offer were not stored."""
    refused_at, not_admitted_at = new.count + new.num_dropped, new.num_missing - num_not_admitted
    if is_unoffered:
        note_rows(cache, path, new, 0, new.num_missing, miss_record.NOT_OFFERED)
        return
    note_rows(cache, path, new, new.count, refused_at, miss_record.NO_ROOM)
    note_rows(cache, path, new, refused_at, not_admitted_at, miss_record.REFUSED)
    note_rows(cache, path, new, not_admitted_at, new.num_missing, miss_record.NOT_ADMITTED)
