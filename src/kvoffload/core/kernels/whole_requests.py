"""Kernel that processes many whole requests in one call, without the bytes of blocks.

Owns the steps of a request, and the groups by which misses are counted. Does not know samples (`whatif`).
"""

from __future__ import annotations

import numpy as np

from kvoffload.core.kernels.blocks import make_ready
from kvoffload.core.kernels.lookups import prefetch_rows, slot_of
from kvoffload.core.kernels.offers import NO_ROOM, offer_rows
from kvoffload.core.kernels.stores import store_offered
from kvoffload.core.kernels.uses import finish_path, observe_path
from kvoffload.core.request import FLAGS, HASH, HINT, Path
from kvoffload.core.slots import WRITING
from kvoffload.core.state import Cache, Entering
from kvoffload.structures.index import ABSENT, hash_row, home_bucket, insert, position_in
from kvoffload.structures.jit import I64Array, ReadI64Matrix, ReadU64Matrix, inline, kernel, long_kernel

END_ROW, ON_DEVICE, ASKED_END, LABEL, END_LABEL, NUM_COLUMNS = 0, 1, 2, 3, 4, 5
"""Columns of `requests` in `live_all`. `END_ROW`: end of the request's rows in the batch. `ON_DEVICE`: number
of leading blocks that are not looked up. `ASKED_END`: end of the looked-up path positions; blocks from
there on are only stored. `LABEL`: number that stands for the request's hints while the request runs.
`END_LABEL`: the same for the hints at its end."""


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

    For each request the effect is that of `lookup`, `prepare_store`, `become_ready` and `finish` on a new
    path. The policy must be compiled, the store mode must be on-compute, and there must be no admission rule.
    The call releases the GIL. No other thread may use the cache during the call.

    Args:
        path, new: memory for the longest request, reused for every request. ``new.admitted`` is 1 if the
            policy may refuse no block.
        batch: the keys of all requests.
        requests: a row for each request, see `END_ROW` and the columns after it.
        missed: for each group of keys (`group_of`), the number of missed blocks, to which this call adds. The
            first missing block of a request and all looked-up blocks after it are missed.

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
    """Run one request, whose keys `path` has, from lookup to finish; return 0 or an error.

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
        prefetch_rows(cache.index, path, asked, end)
        slot = slot_of(cache, path, end)
        if slot == ABSENT or cache.slots.ref_cnt[slot] == WRITING:
            break
        end += 1
    for position in range(end, asked):
        missed[group_of(records[position, HASH], missed.shape[0])] += 1
    new.num_free = new.num_given = new.num_dropped = new.num_refused = new.number = 0
    stored = offer_rows(cache, path, count, new, False, 0)
    if stored >= 0:
        observe_path(cache, path)
        new.num_dropped, new.one_prefix = new.num_missing - stored, 1
        stored = store_offered(cache, path, new, new)
    if stored >= 0:
        make_ready(cache, new)
    elif stored != NO_ROOM:
        return stored
    path.label = end_label
    finish_path(cache, path, False)
    return np.int64(0)


@kernel
def count_by_group(batch: ReadU64Matrix, counts: I64Array) -> None:
    """Count the keys of each group (`group_of`), and add the numbers to `counts`."""
    for row in range(batch.shape[0]):
        counts[group_of(hash_row(batch, row), counts.shape[0])] += 1


@inline
def group_of(h: np.uint64, num_groups: int) -> int:
    """Return the group of a key with hash `h`, 0 to ``num_groups - 1``."""
    mixed = (h ^ (h >> np.uint64(29))) * np.uint64(0x9E3779B97F4A7C15)
    return np.int64(((mixed >> np.uint64(32)) * np.uint64(num_groups)) >> np.uint64(32))
