"""Slots of a store: free slots, slots of duplicates, and the victims that the policy names.

Owns the check of the victims, and the handling of blocks that the policy refuses. Evicts nothing.
"""

from __future__ import annotations

from kvoffload.core.duplicates import is_duplicate, reuse_duplicates
from kvoffload.core.request import Path
from kvoffload.core.state import REFUSED, SPARES_TENANTS, Cache, Entering, can_leave, evictable, may_give
from kvoffload.structures.index import copy_key
from kvoffload.structures.jit import inline, kernel

FIRST_WRONG = -2
"""Result of `prepare_store`: ``FIRST_WRONG - row`` if the policy named an invalid victim for the new block in
`row`."""
_UNNAMED, _CLAIMED = -2, -3


@inline
def give_slots(cache: Cache, path: Path, new: Entering) -> None:
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


@kernel
def give(cache: Cache, path: Path, new: Entering) -> None:
    """Assign the slots that need no victim, before a policy in Python is called."""
    give_slots(cache, path, new)


@inline
def check_victims(cache: Cache, path: Path, new: Entering) -> int:
    """Return 0, or ``FIRST_WRONG - row`` for the first invalid victim.

    A victim is invalid if the store may not evict it (`state.evictable`), if the policy has named the slot
    twice, or if the block is a duplicate. Clears ``cache.spares``, the limits of this store, because no
    victim is chosen after this check.
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
def has_hole(new: Entering) -> bool:
    """Return True if a policy refused a block of a prefix but accepted a later block.

    This is an error of the policy. The check of victims then reports the refused row.
    """
    if new.one_prefix:
        for i in range(new.num_given + 1, new.count):
            if new.slots[i] != REFUSED and new.slots[i - 1] == REFUSED:
                return True
    return False


@inline
def leave_out_refused(path: Path, new: Entering) -> None:
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
