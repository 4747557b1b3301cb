"""Blocks of a victim tier that the device holds as well: they give up their slots first.

One list of the slots of these *duplicates*. Its head became one last and is given up first, because the
device keeps it longest. Does not know policies: no policy orders a duplicate until the device drops it.
"""

from __future__ import annotations

from kvoffload.core.request import Path, Used
from kvoffload.core.state import Cache, Entering, can_leave
from kvoffload.structures.index import copy_key
from kvoffload.structures.jit import ReadI32Array, inline, kernel
from kvoffload.structures.lists import LIST, NEXT, UNLISTED, Lists, move_to_head, push_head, unlink


@inline
def is_duplicate(cache: Cache, slot: int) -> bool:
    """Whether the device holds this block too."""
    return cache.follows_device != 0 and cache.duplicates.links[slot, LIST] != UNLISTED


@inline
def hold(cache: Cache, used: Used) -> None:
    """The device holds these blocks too, those in flight aside. Leaves in `used` the new duplicates."""
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
def give_up(cache: Cache, path: Path, new: Entering) -> None:
    """Blocks that enter get the slots of duplicates that can leave, as far as there are any: also of those
    that waiting requests will ask for, since the device has them."""
    links, sentinel = cache.duplicates.links, cache.duplicates.num_positions
    slot = links[sentinel, NEXT]
    while new.num_given < new.count and slot != sentinel:
        if can_leave(cache, path, slot):
            new.slots[new.num_given] = slot
            new.num_given += 1
        slot = links[slot, NEXT]


@inline
def take_back(cache: Cache, slot: int, kept: Entering) -> None:
    """The device has dropped this duplicate: it is one of the blocks that enter the policy's order again."""
    unlink(cache.duplicates.links, slot)
    copy_key(kept.keys, kept.count, cache.index.keys, slot)
    kept.slots[kept.count] = slot
    kept.count += 1


@kernel
def forget(duplicates: Lists, slots: ReadI32Array) -> None:
    """These blocks are duplicates no more, if they were."""
    for i in range(slots.shape[0]):
        if duplicates.links[slots[i], LIST] != UNLISTED:
            unlink(duplicates.links, slots[i])
