"""The kernel of stores. It processes the offer, gets victims, inserts the new blocks, and in a victim tier
reports the blocks that the device has dropped.

Owns the order of these steps. Does not know admission rules, or policies in Python.
"""

from __future__ import annotations

import numpy as np

from kvoffload.core.duplicates import is_duplicate, keep_duplicate
from kvoffload.core.kernels.blocks import insert_blocks
from kvoffload.core.kernels.call_log import log_store
from kvoffload.core.kernels.lookups import slot_of
from kvoffload.core.kernels.misses import note_left_out
from kvoffload.core.kernels.offers import is_cut, is_owed, offer_batch
from kvoffload.core.kernels.shrinking import offer_shrink, shrink
from kvoffload.core.kernels.uses import observe_path
from kvoffload.core.kernels.victims import check_victims, give_slots, has_hole, leave_out_refused
from kvoffload.core.log import ADMITTED, PREPARE_STORE
from kvoffload.core.log import KEEP as LOG_KEEP
from kvoffload.core.request import AGAIN, HASH, Path
from kvoffload.core.returning import pop_use
from kvoffload.core.state import Cache, Entering, note_move
from kvoffload.structures.batches import KeyBatch
from kvoffload.structures.index import ABSENT
from kvoffload.structures.jit import inline, kernel
from kvoffload.structures.structs import call_2, call_4

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
"""Values of `admitted` in `prepare_store`. `BY_POLICY`: the policy must accept all blocks. `BY_ALL`: policy
and admission rule must accept all blocks."""


@inline
def _collect_returning(cache: Cache, path: Path, new: Entering, kept: Entering) -> None:
    """Move the duplicates among the offered blocks to `kept`.

    Also writes the kept and stored blocks to ``path.used``, in the order of the offer, and flags the blocks
    that were used again while the device held them (`returning`). The policy needs no report if no block was
    used again and the blocks were either all kept or all stored. Then ``path.used`` is empty.
    """
    used, records, positions, entered = path.used, path.records, path.positions, 0
    has_reuse = False
    used.count = kept.count = 0
    for row in range(new.num_offered):
        slot = slot_of(cache, path, positions[row])
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
    """Collect the kept and the new blocks of a victim tier, and report them to a compiled policy."""
    _collect_returning(cache, path, new, kept)
    if cache.replace == 0:
        return
    if kept.count > 0:
        call_4(cache.replace, cache.policy, kept, cache, path)
    if path.used.count > 0:
        call_2(cache.access, cache.policy, path.used)


@inline
def store_offered(cache: Cache, path: Path, new: Entering, kept: Entering) -> int:
    """Get victims from a compiled policy, check all victims, and insert the new blocks.

    Returns the number of stored blocks, or ``FIRST_WRONG - row``.
    """
    if new.count > 0 and cache.replace != 0:
        give_slots(cache, path, new)
        call_4(cache.replace, cache.policy, new, cache, path)
    if new.count > 0 and not new.admitted and not has_hole(new):
        leave_out_refused(path, new)
    error = check_victims(cache, path, new)
    if error < 0:
        return error
    insert_blocks(cache, path, new)
    if cache.follows_device:
        _return(cache, path, new, kept)
    return new.count


@kernel
def prepare_store(
    cache: Cache, path: Path, batch: KeyBatch, new: Entering, kept: Entering, step: int, admitted: int
) -> int:
    """Run a step of a store (`ALL`, `OFFER`, ...); return the number of blocks, or an error.

    In a victim tier, writes the duplicates among the offered blocks to `kept`. All steps share one kernel:
    each further kernel would add a second of compilation to the first start.

    Args:
        admitted: `BY_POLICY` or `BY_ALL`, or 0 if policy and admission rule may refuse blocks.
    """
    stored = np.int64(0)
    if step == SHRINK:
        stored = offer_shrink(cache, path, batch, new)
        if stored <= 0 or cache.replace == 0:
            return stored
        give_slots(cache, path, new)
        call_4(cache.replace, cache.policy, new, cache, path)
    if step >= SHRINK:
        return shrink(cache, path, new)
    if step != CHOSEN:
        stored = offer_batch(cache, path, batch, new, step == KEEP, admitted)
        if stored < AGAIN or (step == OFFER and stored >= 0):
            return stored
    if step != CHOSEN and stored >= 0:
        if not cache.follows_device and step != KEEP:
            observe_path(cache, path)
        new.num_dropped = 0 if step == KEEP else new.num_missing - new.num_refused - stored
        new.one_prefix, new.admitted = not cache.follows_device, admitted != 0 or is_owed(cache)
    num_not_admitted = 0 if is_cut(cache, path, new, admitted) else new.num_refused
    if stored >= 0:
        stored = store_offered(cache, path, new, kept)
    if stored >= 0:
        note_left_out(cache, path, new, num_not_admitted, step == KEEP)
    if cache.log.is_open:
        kind = PREPARE_STORE | ADMITTED if admitted == BY_ALL else PREPARE_STORE
        log_store(cache.log, path, new, LOG_KEEP if step == KEEP else kind, stored)
    return stored
