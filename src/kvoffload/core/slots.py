"""The slots of a cache and their states.

Owns the pins and versions of slots, the stack of free slots, and the condemned slots. Does not know keys,
eviction orders or requests.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvoffload.structures.jit import BoolArray, I32Array, ReadI32Array, U32Array, inline, kernel
from kvoffload.structures.structs import Struct

SlotArray: TypeAlias = npt.NDArray[np.int32]
"""Slot numbers, shape ``(n,)``."""

FREE, WRITING = -2, -1
"""Values of `Slots.ref_cnt` for a slot without a readable block. For a slot with a readable block,
`ref_cnt` is the number of pins."""


class Slots(Struct):
    """The states of `capacity` slots, which are all free at first. Memory: 13 bytes per slot.

    States of a slot:

    - *free*
    - *writing*: a store is in flight
    - *ready*: the block can be read; it is pinned while a reader uses it
    - *condemned*: the block is forgotten, but a transfer still uses the slot. The slot becomes free when the
      transfer ends. Withheld slots (`withhold`) are condemned, too.
    - *unused*: taken out of use by a resize of the cache

    Attributes:
        ref_cnt: shape ``(capacity,)``, int32: number of pins of a ready block, or `WRITING` or `FREE`.
        version: shape ``(capacity,)``, uint32: increases by one when a block leaves the slot, which
            invalidates the slot hints of requests.
        condemned: shape ``(capacity,)``, bool. Unused slots are also marked True, and their `ref_cnt` is
            `WRITING`.
        stack: int32. The first `num_free` entries are the free slots; entry ``num_free - 1`` is used next.
            The last `num_unused` entries are the unused slots.
        num_free, num_writing, num_condemned, num_unused: number of slots in each of these states.
        num_evictable: number of ready blocks without a pin. Condemned slots do not count.
    """

    ref_cnt: I32Array
    version: U32Array
    condemned: BoolArray
    stack: I32Array
    capacity: int
    num_free: int
    num_writing: int
    num_evictable: int
    num_condemned: int
    num_unused: int

    def __init__(self, capacity: int) -> None:
        # The arrays are written now, so that no later call waits for the system to provide their pages.
        super().__init__(
            ref_cnt=np.full(capacity, FREE, np.int32),
            version=np.full(capacity, 0, np.uint32),
            condemned=np.full(capacity, False, np.bool_),
            # Descending, because slots are popped from the end: the first stores use ascending slots.
            stack=np.arange(capacity - 1, -1, -1, dtype=np.int32),
            capacity=capacity,
            num_free=capacity,
        )

    @property
    def num_ready(self) -> int:
        return self.capacity - self.num_free - self.num_writing - self.num_condemned - self.num_unused

    def free(self) -> list[int]:
        """Return the free slots; the last element is used next. Cost: O(capacity), for audits."""
        return list(map(int, self.stack[: self.num_free]))

    def ready(self) -> SlotArray:
        """Return the slots of all readable blocks. Cost: O(capacity)."""
        return np.flatnonzero((self.ref_cnt >= 0) & ~self.condemned).astype(np.int32)

    def idle(self) -> SlotArray:
        """Return the slots of all readable blocks without a pin. Cost: O(capacity)."""
        return np.flatnonzero((self.ref_cnt == 0) & ~self.condemned).astype(np.int32)

    def filled(self) -> SlotArray:
        """Return the slots of all blocks, readable or in flight. Cost: O(capacity)."""
        return np.flatnonzero((self.ref_cnt != FREE) & ~self.condemned).astype(np.int32)

    def condemn(self, slots: SlotArray) -> None:
        """Forget the ready blocks in these slots.

        Slots without a pin are freed now. Pinned slots stay condemned until `release`.
        """
        idle = self.ref_cnt[slots] == 0
        self.num_evictable -= int(np.count_nonzero(idle))
        self.condemned[slots[~idle]] = True
        self.num_condemned += int(np.count_nonzero(~idle))
        _free(self.memory, slots[idle])

    def withhold(self, count: int) -> SlotArray:
        """Take `count` free slots out of use until `release`; return these slots. They count as condemned.

        Chooses the free slots that would be used last. A `reset` leaves these slots condemned, unless its
        `drop_in_flight` is True.
        """
        taken = self.stack[:count].copy()
        self.stack[: self.num_free - count] = self.stack[count : self.num_free].copy()
        self.num_free -= count
        self.ref_cnt[taken] = WRITING
        self.condemned[taken] = True
        self.num_condemned += count
        return taken

    def release(self, slots: SlotArray) -> int:
        """Free the condemned slots among `slots`, unless they have a pin; return how many were freed."""
        idle = np.fromiter(dict.fromkeys(slots.tolist()), np.int32)
        idle = idle[self.condemned[idle] & (self.ref_cnt[idle] <= 0)]
        self.condemned[idle] = False
        self.num_condemned -= len(idle)
        _free(self.memory, idle)
        return len(idle)

    def unused(self) -> SlotArray:
        """Return the unused slots (a view)."""
        return self.stack[self.capacity - self.num_unused :]

    def reset(self, *, drop_in_flight: bool) -> None:
        """Forget every block.

        Slots that a transfer uses are condemned until the transfer ends or, if `drop_in_flight`, freed at
        once. Unused slots stay unused. Cost: O(capacity).
        """
        in_use, unused = (self.ref_cnt > 0) | (self.ref_cnt == WRITING), self.unused()
        in_use[unused] = False
        self.condemned[:] = in_use & (not drop_in_flight)
        self.ref_cnt[~self.condemned] = FREE
        self.condemned[unused], self.ref_cnt[unused] = True, WRITING
        self.version[:] += np.uint32(1)
        free = np.flatnonzero(self.ref_cnt == FREE)[::-1]
        self.num_free, self.num_condemned = len(free), self.capacity - len(free) - self.num_unused
        self.stack[: len(free)] = free
        self.num_evictable = self.num_writing = 0


@inline
def give_back(slots: Slots, slot: int) -> None:
    """Mark a slot as free, and put it on top of the stack of free slots."""
    slots.ref_cnt[slot] = FREE
    slots.stack[slots.num_free] = slot
    slots.num_free += 1


@inline
def retire_slot(slots: Slots, slot: int) -> None:
    """Mark a slot without a block as unused."""
    slots.ref_cnt[slot], slots.condemned[slot] = WRITING, True
    slots.num_unused += 1
    slots.stack[slots.capacity - slots.num_unused] = slot


@kernel
def retire(slots: Slots, most: int) -> int:
    """Mark up to `most` free slots as unused; return their number."""
    count = min(most, slots.num_free)
    for _ in range(count):
        slots.num_free -= 1
        retire_slot(slots, slots.stack[slots.num_free])
    return count


@kernel
def readmit(slots: Slots, most: int) -> int:
    """Mark up to `most` unused slots as free; return their number."""
    count = min(most, slots.num_unused)
    for _ in range(count):
        slot = slots.stack[slots.capacity - slots.num_unused]
        slots.num_unused -= 1
        slots.condemned[slot] = False
        give_back(slots, slot)
    return count


@kernel
def _free(slots: Slots, numbers: ReadI32Array) -> None:
    for i in range(numbers.shape[0]):
        give_back(slots, numbers[i])
