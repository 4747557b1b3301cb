"""The list of duplicates. In a victim tier, a *duplicate* is a resident block that the device also holds. New
blocks take the slots of duplicates first.

The newest duplicate is at the head of the list and is evicted first. The reason: RAM needs a duplicate only
when the device has dropped the block, and the device will drop the newest block last. Does not know policies:
a policy does not order a duplicate until the device drops the block.
"""

from __future__ import annotations

from kvoffload.core.request import Path, Used
from kvoffload.core.state import Cache, Entering, can_leave, may_give
from kvoffload.structures.index import copy_key
from kvoffload.structures.jit import ReadI32Array, inline, kernel
from kvoffload.structures.lists import LIST, NEXT, UNLISTED, Lists, move_to_head, push_head, unlink


@inline
def is_duplicate(cache: Cache, slot: int) -> bool:
    """Return True if the device also holds the block in `slot`."""
    return cache.follows_device != 0 and cache.duplicates.links[slot, LIST] != UNLISTED


@inline
def mark_duplicates(cache: Cache, used: Used) -> None:
    """Add the used blocks to the duplicates, except blocks in flight.

    On return, `used` has only the blocks that were no duplicates before.
    """
    lists, slots, ref_cnt = cache.duplicates, used.slots, cache.slots.ref_cnt
    first = used.count
    for i in range(used.count - 1, -1, -1):
        slot = slots[i]
        if ref_cnt[slot] < 0 or cache.slots.condemned[slot]:
            continue
        if lists.links[slot, LIST] == UNLISTED:
            push_head(lists.links, lists.num_positions, slot)
            first -= 1
            slots[first] = slot
        else:
            move_to_head(lists.links, lists.num_positions, slot)
    used.count -= first
    for i in range(used.count):
        slots[i] = slots[first + i]


@inline
def reuse_duplicates(cache: Cache, path: Path, new: Entering) -> None:
    """Assign the slots of evictable duplicates to new blocks, until duplicates or new blocks run out.

    A duplicate may be evicted even if a waiting request expects it, because the device also holds it. Quotas
    protect duplicates, too.
    """
    links, sentinel = cache.duplicates.links, cache.duplicates.num_positions
    slot = links[sentinel, NEXT]
    while new.num_given < new.count and slot != sentinel:
        if may_give(cache, slot) and can_leave(cache, path, slot):
            new.slots[new.num_given] = slot
            new.num_given += 1
        slot = links[slot, NEXT]


@inline
def keep_duplicate(cache: Cache, slot: int, kept: Entering) -> None:
    """Remove a block from the duplicates and add it to `kept`, because the device drops the block.

    From now on, the block is a normal block: the caller passes the blocks of `kept` to the policy, which
    orders them again.
    """
    unlink(cache.duplicates.links, slot)
    copy_key(kept.keys, kept.count, cache.index.keys, slot)
    kept.slots[kept.count] = slot
    kept.count += 1


@kernel
def forget(duplicates: Lists, slots: ReadI32Array) -> None:
    """Remove these slots from the list of duplicates, if they are listed."""
    for i in range(slots.shape[0]):
        if duplicates.links[slots[i], LIST] != UNLISTED:
            unlink(duplicates.links, slots[i])
