"""The slots of a cache: the state of each, and which are free.

Owns pins, versions, the stack of free slots and the condemned ones. Does not know keys, orders or requests.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvoffload.structures.jit import BoolArray, I32Array, ReadI32Array, U32Array, inline, kernel
from kvoffload.structures.structs import Struct

SlotArray: TypeAlias = npt.NDArray[np.int32]
"""Shape ``(n,)``: numbers of slots."""

FREE, WRITING = -2, -1
"""Values of `ref_cnt` for slots without a readable block; for a ready block it is the number of pins."""


class Slots(Struct):
    """`capacity` slots, all free at first. Memory: 13 bytes a slot.

    A slot is *free*, *writing* (a store is in flight), *ready* (its block can be read, and is pinned while it
    is read), or *condemned*: its block is forgotten and a transfer still uses the slot, which is free after
    that; or the slot is withheld.

    Attributes:
        ref_cnt: shape ``(capacity,)``, int32: pins of a ready block, `WRITING` or `FREE`.
        version: shape ``(capacity,)``, uint32: grows by one when a block leaves the slot. A hint that a
            request has recorded for that block is then invalid.
        condemned: shape ``(capacity,)``, bool.
        stack: int32: the first `num_free` are the free slots; the next one to be used is the last of them.
        num_free, num_writing, num_condemned: slots in that state.
        num_evictable: ready blocks without a pin, without condemned ones.
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

    def __init__(self, capacity: int) -> None:
        # Written now, so that no later call waits for the system to provide the memory.
        super().__init__(
            ref_cnt=np.full(capacity, FREE, np.int32),
            version=np.full(capacity, 0, np.uint32),
            condemned=np.full(capacity, False, np.bool_),
            # Popped from the end: slots are first used in ascending order, so neighbours stay together.
            stack=np.arange(capacity - 1, -1, -1, dtype=np.int32),
            capacity=capacity,
            num_free=capacity,
        )

    @property
    def num_ready(self) -> int:
        """Blocks that can be read."""
        return self.capacity - self.num_free - self.num_writing - self.num_condemned

    def free(self) -> list[int]:
        """The free slots; the next one to be used is last. Cost: O(capacity), for audits."""
        return list(map(int, self.stack[: self.num_free]))

    def ready(self) -> SlotArray:
        """The slots of all blocks that can be read. Cost: O(capacity)."""
        return np.flatnonzero((self.ref_cnt >= 0) & ~self.condemned).astype(np.int32)

    def condemn(self, slots: SlotArray) -> None:
        """Forget the ready blocks in these slots: slots without a pin are free at once, the others later."""
        idle = self.ref_cnt[slots] == 0
        self.num_evictable -= int(np.count_nonzero(idle))
        self.condemned[slots[~idle]] = True
        self.num_condemned += int(np.count_nonzero(~idle))
        _free(self.memory, slots[idle])

    def withhold(self, count: int) -> SlotArray:
        """Take so many free slots out of use, those that would be used last, until they are released.

        They count as condemned: a `reset` leaves them out of use too.
        """
        taken = self.stack[:count].copy()
        self.stack[: self.num_free - count] = self.stack[count : self.num_free].copy()
        self.num_free -= count
        self.ref_cnt[taken] = WRITING
        self.condemned[taken] = True
        self.num_condemned += count
        return taken

    def release(self, slots: SlotArray) -> int:
        """Free those of `slots` that are condemned and have no pin; returns how many."""
        idle = np.fromiter(dict.fromkeys(slots.tolist()), np.int32)
        idle = idle[self.condemned[idle] & (self.ref_cnt[idle] <= 0)]
        self.condemned[idle] = False
        self.num_condemned -= len(idle)
        _free(self.memory, idle)
        return len(idle)

    def reset(self, *, drop_in_flight: bool) -> None:
        """Forget every block. Slots that a transfer uses are condemned, unless `drop_in_flight`.

        Cost: O(capacity).
        """
        in_use = (self.ref_cnt > 0) | (self.ref_cnt == WRITING)
        self.condemned[:] = in_use & (not drop_in_flight)
        self.ref_cnt[~self.condemned] = FREE
        self.version[:] += np.uint32(1)
        free = np.flatnonzero(self.ref_cnt == FREE)[::-1]
        self.num_free, self.num_condemned = len(free), self.capacity - len(free)
        self.stack[: len(free)] = free
        self.num_evictable = self.num_writing = 0


@inline
def give_back(slots: Slots, slot: int) -> None:
    """A slot is free from now on."""
    slots.ref_cnt[slot] = FREE
    slots.stack[slots.num_free] = slot
    slots.num_free += 1


@kernel
def _free(slots: Slots, numbers: ReadI32Array) -> None:
    for i in range(numbers.shape[0]):
        give_back(slots, numbers[i])
