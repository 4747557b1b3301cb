"""Readers, which return the blocks of a policy's order in steps. The order changes between the steps.

Each reader class reads one kind of order, from the coldest block on. The caller marks the returned blocks as
taken (`Taken.where`). If a block is used between two steps, it moves, and the reader may return it twice,
late or never. So the caller also records used blocks (`Taken.recent`). The last reader, `SlotSweep`, returns
the blocks that earlier readers missed. Does not know why the order is read.
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
"""Budget of a reader for each requested block, in visits. Passing a block of a list costs 1 visit. Taking a
block from a heap, or reaching the end of a list, costs `_VISITS` visits."""
_COPY_VISITS = _VISITS // 2
"""Cost to copy one rank of a heap, in visits."""
_NO_CURSOR = -1


class Taken(Struct):
    """The blocks that the caller of the readers has taken, and the blocks used since the reading began.

    Attributes:
        where: `NEW` for the blocks that the caller has taken.
        recent: the blocks that were used or stored since the reading began, most recent first.
        stamps: for each slot with a recent block: number of the call that used or stored the block.
        cursor: the last block that the reader has passed, or `_NO_CURSOR`.
        cursor_stamp: the stamp of the block at the cursor; -1 if that block was not recent.
        at_end: 1 if a list has no further block.
        visits_left: number of visits that the readers may still spend. A reader can exceed it by up to
            `_VISITS`.
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
        """Set `visits_left` to the number of visits for `num_blocks` blocks."""
        self.visits_left = _VISITS * num_blocks + 64

    def clear(self) -> None:
        """Forget all blocks."""
        self.where.fill(LEFT)
        self.recent.clear()
        self.cursor = _NO_CURSOR


class Reader(Protocol):
    """Interface for readers of a policy's order."""

    is_done: bool

    def take(self, taken: Taken, cache: Cache, most: int) -> SlotArray:
        """Return the next blocks: at most `most`, within the budget `Taken.visits_left`.

        A reader that returns fewer blocks, or none, may have more blocks: check `is_done`.
        """


class ListsReader:
    """Reads the lists of a policy, each list from the tail.

    If the block at the cursor has moved, the reader starts again at the tail of the list and skips taken
    blocks. The reader cannot detect every move, for example if taken blocks move together with the block at
    the cursor. So a list counts as done only after a complete pass from its tail that finds no further block.
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

    It may copy the ranks in several steps, because the rank of a block changes only when the block is used.
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
    """Returns the blocks of `EvictionPolicy.order`.

    The first `take` calls `order`, and later calls use its result.
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
    """Return the readers for a policy's order. Use them one after another. Cost: O(capacity) for a heap."""
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
    """Return the stamp of a recent block; -1 for other blocks."""
    if taken.recent.links[slot, LIST] == UNLISTED:
        return np.int64(-1)
    return taken.stamps[slot]


@inline
def _has_stayed(taken: Taken, lists: Lists, sentinel: int, slot: int) -> bool:
    """Return True if the block at the cursor is still in its place.

    The reader has passed all colder blocks, and blocks join a list only at its head. So if the next colder
    block is neither taken nor recent, the block at the cursor has moved.
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
    """Write the next blocks of a list to `slots`, except taken and recent blocks; return their number.

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
    """Remove blocks from a heap, lowest rank first; write them to `slots`, except taken and recent blocks.

    Returns the number of written blocks.
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
    """Write the blocks in slots `start` to ``stop - 1`` to `slots`, except taken and recent blocks.

    Returns ``next slot << 32 | number of written blocks``.
    """
    count, slot = np.int64(0), np.int64(start)
    while slot < stop and count < slots.shape[0]:
        if is_left(taken, slot) and is_ordered(cache, slot):
            slots[count] = slot
            count += 1
        slot += 1
    return (slot << 32) | count
