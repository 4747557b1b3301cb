"""Kernels that report a request to the policy: expected blocks, observed blocks, uses, and the request's end.

Owns the rule that a request counts as one access of a block, however often it uses the block. Does not know
loads and stores.
"""

from __future__ import annotations

import numpy as np

from kvoffload.core.duplicates import mark_duplicates
from kvoffload.core.kernels.lookups import slot_of
from kvoffload.core.log import ENDED, FINISH, TOUCH, TOUCH_PATH, put_number
from kvoffload.core.request import ACCESSED, FLAGS, HASH, Path, add_batch
from kvoffload.core.returning import note_use
from kvoffload.core.state import Cache, note_move
from kvoffload.structures.batches import KeyBatch
from kvoffload.structures.index import ABSENT
from kvoffload.structures.jit import inline, kernel
from kvoffload.structures.structs import call_2


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
    slot = slot_of(cache, path, position)
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
        path.found[position] = slot_of(cache, path, position)
        if path.found[position] != ABSENT:
            note_move(cache, path.found[position])


@inline
def observe_path(cache: Cache, path: Path) -> None:
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
def report_used(cache: Cache, path: Path) -> int:
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
    """Report newly expected blocks to a compiled policy.

    Returns the path position of the first newly expected block.
    """
    start = path.foreseen
    if start < path.num_expected:
        if cache.expect != 0:
            call_2(cache.expect, cache.policy, path)
        path.foreseen = path.num_expected
    return start


@kernel
def observe(cache: Cache, path: Path) -> None:
    """Report the new blocks of the path to a compiled policy that observes all traffic. Called by store
    modes.
    """
    observe_path(cache, path)


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
    observe_path(cache, path)
    return report_used(cache, path)


@kernel
def finish(cache: Cache, path: Path, is_touched: bool) -> int:
    """Record uses of the whole path, unless `touch` has done so (`is_touched`). Report the request's end to a
    compiled policy.

    Returns the number of uses that the caller must report to a policy in Python. If the number is not 0, the
    caller reports these uses, then calls `finish` again to report the end.
    """
    if cache.log.is_open and path.recorded != ENDED:
        put_number(cache.log, path, FINISH, 0, 0)
        path.recorded = ENDED
    return finish_path(cache, path, is_touched)


@inline
def finish_path(cache: Cache, path: Path, is_touched: bool) -> int:
    """Do the work of `finish`, without a record in the log."""
    path.used.count = 0
    for position in range(0 if is_touched else path.length):
        _use(cache, path, position, True)
    observe_path(cache, path)
    num_unreported = report_used(cache, path)
    if cache.finished != 0 and num_unreported == 0:
        _find_blocks(cache, path, 0)
        call_2(cache.finished, cache.policy, path)
    return num_unreported
