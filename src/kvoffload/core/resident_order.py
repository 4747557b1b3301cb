"""Readers, which return the blocks of a policy's order in steps, while the order changes between the steps.

A reader begins with the coldest block. There is a reader class for each kind of order. The caller marks the
blocks that it has received as taken (`Taken.where`). A block that is used between two steps moves in the
order, so that a reader may return it twice, late or never. Therefore the caller also records the used blocks
(`Taken.recent`), which readers skip. The last reader, `SlotSweep`, returns the blocks that earlier readers
missed. The module does not know why the order is read.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from kvoffload.core.duplicates import is_duplicate
from kvoffload.core.policy import EvictionPolicy
from kvoffload.core.slots import FREE, SlotArray
from kvoffload.core.state import Cache
from kvoffload.structures.heap import RANK, STAMP, Heap, insert_again, take_out
from kvoffload.structures.jit import I32Array, I64Array, inline, kernel
from kvoffload.structures.lists import LIST, NEXT, PREV, UNLISTED, Lists
from kvoffload.structures.structs import Struct

LEFT, NEW = 0, 1
"""Values of `Taken.where`: not taken, and taken."""
_VISITS = 16
"""Number of visits that a reader may spend for each requested block. A visit is the unit of cost: to pass
a block of a list costs 1 visit; to take a block from a heap, or to reach the end of a list, costs
`_VISITS` visits."""
_COPY_VISITS = _VISITS // 2
"""Cost to copy one rank of a heap, in visits (`_VISITS`)."""
_NO_CURSOR = -1


class Taken(Struct):
    """The blocks that the caller of the readers has taken, and the blocks used since the reading began.

    Attributes:
        where: `NEW` for the blocks that the caller has taken.
        recent: the blocks that were used or stored since the reading began, most recent first.
        stamps: for each slot with a recent block, the number of the call that used or stored the block.
        cursor: the last block that the reader of a list has passed, or `_NO_CURSOR`.
        cursor_stamp: stamp of the cursor's block when the reader passed it; -1 if it was not recent then.
        at_end: 1 if a list has no further block.
        visits_left: number of visits (`_VISITS`) that the readers may still spend. A reader can exceed it by
            up to `_VISITS`.
    """

    where: I32Array
    recent: Lists
    stamps: I64Array
    cursor: int
    cursor_stamp: int
    at_end: int
    visits_left: int

    def __init__(self, capacity: int) -> None:
        super().__init__(
            where=np.full(capacity, LEFT, np.int32),
            recent=Lists(capacity, 1),
            stamps=np.full(capacity, 0, np.int64),
            cursor=_NO_CURSOR,
        )

    def allow(self, num_blocks: int) -> None:
        """Set `visits_left` so that the readers can return about `num_blocks` blocks."""
        self.visits_left = _VISITS * num_blocks + 64

    def clear(self) -> None:
        """Forget the taken and the recent blocks."""
        self.where.fill(LEFT)
        self.recent.clear()
        self.cursor = _NO_CURSOR


class Reader(Protocol):
    """Interface for readers of a policy's order."""

    is_done: bool

    def take(self, taken: Taken, cache: Cache, most: int) -> SlotArray:
        """Return the slots of the next blocks, at most `most`, as far as ``taken.visits_left`` allows.

        The result may be shorter, or empty, although the reader has more blocks. The reader has returned all
        blocks only when `is_done` is True.
        """


class ListsReader:
    """Reads the lists of a policy, each list from the tail, where its coldest block is.

    The reader continues at the cursor, the last block that it has passed. If the block at the cursor has
    moved meanwhile, the reader starts again at the tail and skips taken blocks. It cannot detect every move,
    for example if taken blocks move together with the block at the cursor. Therefore a list counts as done
    only after a complete pass from its tail that finds no further block.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy, self._at = policy, 0
        self._has_found = False  # in this pass over the list
        self.is_done = False

    def take(self, taken: Taken, cache: Cache, most: int) -> SlotArray:
        order = self._policy.ordered_lists()  # each time, because a reset may replace them
        assert order is not None
        lists, numbers = order
        slots, count = np.empty(most, np.int32), 0
        while count == 0 and taken.visits_left > 0 and not self.is_done:
            taken.at_end = 0
            count = _walk(taken.memory, cache.memory, lists.memory, lists.sentinel(numbers[self._at]), slots)
            self._has_found = self._has_found or count > 0
            if taken.at_end:
                taken.cursor = _NO_CURSOR
                taken.visits_left -= _VISITS
                self._at += not self._has_found
                self._has_found = False
                self.is_done = self._at == len(numbers)
        return slots[:count]


class HeapReader:
    """Reads the heap of a policy: first copies all ranks, then returns the blocks in ascending order of rank.

    The copy may take several steps. A rank cannot change between the steps unless the block is used, and used
    blocks are skipped.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy, self._copied = policy, 0
        self._heap = Heap(policy.capacity_blocks)
        self.is_done = False

    def take(self, taken: Taken, cache: Cache, most: int) -> SlotArray:
        slots, heap = np.empty(most, np.int32), self._policy.ordered_heap()
        assert heap is not None
        if self._copied < self._policy.capacity_blocks:
            most_copied = max(taken.visits_left // _COPY_VISITS, 1)
            stop = min(self._copied + most_copied, self._policy.capacity_blocks)
            taken.visits_left -= _COPY_VISITS * (stop - self._copied)
            _copy_ranks(taken.memory, cache.memory, heap.memory, self._heap.memory, self._copied, stop)
            self._copied = stop
            return slots[:0]
        count = _take_least(taken.memory, cache.memory, self._heap.memory, slots)
        self.is_done = self._heap.size == 0
        return slots[:count]


class ListedReader:
    """Returns the blocks of `EvictionPolicy.order`, for policies without lists or a heap.

    The first `take` calls `order`, which costs O(blocks). Later calls return the rest of its result.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._coldest_last: list[int] | None = None
        self.is_done = False

    def take(self, taken: Taken, cache: Cache, most: int) -> SlotArray:
        if self._coldest_last is None:
            self._coldest_last = (self._policy.order() or [])[::-1]
        chunk = np.array(self._coldest_last[: -most - 1 : -1], np.int32)
        del self._coldest_last[-most:]
        self.is_done = not self._coldest_last
        return chunk


class SlotSweep:
    """Returns all blocks that are neither taken nor recent, in ascending order of their slots."""

    def __init__(self, capacity: int) -> None:
        self._capacity, self._at = capacity, 0
        self.is_done = False

    def take(self, taken: Taken, cache: Cache, most: int) -> SlotArray:
        slots = np.empty(most, np.int32)
        start, stop = self._at, min(self._at + taken.visits_left, self._capacity)
        found = _sweep(taken.memory, cache.memory, start, stop, slots)
        self._at, count = divmod(found, 1 << 32)
        taken.visits_left -= self._at - start
        self.is_done = self._at == self._capacity
        return slots[:count]


def readers_of(policy: EvictionPolicy) -> list[Reader]:
    """Return the readers for a policy's order, to be used one after another. Cost: O(capacity) for a heap."""
    reader: Reader = ListedReader(policy)
    if policy.ordered_lists() is not None:
        reader = ListsReader(policy)
    elif policy.ordered_heap() is not None:
        reader = HeapReader(policy)
    return [reader, SlotSweep(policy.capacity_blocks)]


@inline
def is_left(taken: Taken, slot: int) -> bool:
    """Return True if a block is neither taken nor recent."""
    return taken.where[slot] != NEW and taken.recent.links[slot, LIST] == UNLISTED


@inline
def is_ordered(cache: Cache, slot: int) -> bool:
    """Return True if the slot has a block that the policy orders."""
    slots = cache.slots
    return slots.ref_cnt[slot] != FREE and not slots.condemned[slot] and not is_duplicate(cache, slot)


@inline
def _stamp_of(taken: Taken, slot: int) -> int:
    """Return the number of the call that last used or stored a recent block; -1 for any other block."""
    if taken.recent.links[slot, LIST] == UNLISTED:
        return np.int64(-1)
    return taken.stamps[slot]


@inline
def _has_stayed(taken: Taken, lists: Lists, sentinel: int, slot: int) -> bool:
    """Return True if the block at the cursor is still in its place in the list.

    The reader passed all colder blocks before it, so these blocks are taken or recent. Blocks join a list
    only at the head. So if the next colder block is neither taken nor recent, the block at the cursor has
    moved.
    """
    if (
        slot == _NO_CURSOR
        or lists.links[slot, LIST] != sentinel
        or _stamp_of(taken, slot) != taken.cursor_stamp
    ):
        return False
    colder = lists.links[slot, NEXT]
    return colder == sentinel or not is_left(taken, colder)


@kernel
def _walk(taken: Taken, cache: Cache, lists: Lists, sentinel: int, slots: I32Array) -> int:
    """Write the slots of a list's next blocks, except taken and recent blocks, to `slots`; return how many.

    Sets ``taken.at_end`` to 1 at the end of the list.
    """
    links, count, slot = lists.links, 0, taken.cursor
    if not _has_stayed(taken, lists, sentinel, slot):
        slot = sentinel
    while count < slots.shape[0] and taken.visits_left > 0:
        taken.visits_left -= 1
        slot = links[slot, PREV]
        if slot == sentinel:
            taken.at_end = 1
            return count
        taken.cursor, taken.cursor_stamp = slot, _stamp_of(taken, slot)
        if is_left(taken, slot) and is_ordered(cache, slot):
            slots[count] = slot
            count += 1
    return count


@kernel
def _copy_ranks(taken: Taken, cache: Cache, heap: Heap, copy: Heap, start: int, stop: int) -> None:
    """Copy the ranks of slots `start` to ``stop - 1`` to `copy`, except for taken and recent blocks."""
    for slot in range(start, stop):
        if is_left(taken, slot) and is_ordered(cache, slot):
            copy.order[slot, RANK], copy.order[slot, STAMP] = heap.order[slot, RANK], heap.order[slot, STAMP]
            insert_again(copy, slot)


@kernel
def _take_least(taken: Taken, cache: Cache, heap: Heap, slots: I32Array) -> int:
    """Remove the blocks with the lowest ranks from a heap; write their slots, in ascending order of rank, to
    `slots`.

    Taken and recent blocks are removed, but not written. Returns the number of slots written.
    """
    count = 0
    while heap.size > 0 and count < slots.shape[0] and taken.visits_left > 0:
        taken.visits_left -= _VISITS
        slot = heap.firsts[0]
        take_out(heap, slot)
        if is_left(taken, slot) and is_ordered(cache, slot):
            slots[count] = slot
            count += 1
    return count


@kernel
def _sweep(taken: Taken, cache: Cache, start: int, stop: int, slots: I32Array) -> int:
    """Write the slots from `start` to ``stop - 1`` whose blocks are neither taken nor recent to `slots`.

    Returns two numbers in one: ``next slot << 32 | number of written slots``.
    """
    count, slot = np.int64(0), np.int64(start)
    while slot < stop and count < slots.shape[0]:
        if is_left(taken, slot) and is_ordered(cache, slot):
            slots[count] = slot
            count += 1
        slot += 1
    return (slot << 32) | count
