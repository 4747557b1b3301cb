"""The slots of a cache: the state of each, and which are free.

Owns pins, versions, the stack of free slots and the condemned ones. Does not know keys, orders or requests.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvoffload.structures.jit import I32Array, ReadI32Array, kernel

SlotArray: TypeAlias = npt.NDArray[np.int32]
"""Shape ``(n,)``: numbers of slots."""

FREE, WRITING = -2, -1
"""Values of `ref_cnt` for slots without a readable block; for a ready block it is the number of pins."""


class Slots:
    """`capacity` slots, all free at first. Memory: 13 bytes a slot.

    A slot is *free*, *writing* (a store is in flight), *ready* (its block can be read, and is pinned while it
    is read), or *condemned*: its block is forgotten and a transfer still uses the slot, which is free after
    that.

    Attributes:
        ref_cnt: shape ``(capacity,)``, int32: pins of a ready block, `WRITING` or `FREE`.
        version: shape ``(capacity,)``, uint32: grows by one when a block leaves the slot. A hint that a
            request has recorded for that block is then invalid.
        condemned: shape ``(capacity,)``, bool.
        num_free, num_writing, num_condemned: slots in that state.
        num_evictable: ready blocks without a pin, without condemned ones.
    """

    __slots__ = (
        "_free",
        "capacity",
        "condemned",
        "num_condemned",
        "num_evictable",
        "num_free",
        "num_writing",
        "ref_cnt",
        "version",
    )

    def __init__(self, capacity: int) -> None:
        self.capacity = self.num_free = capacity
        self.num_writing = self.num_evictable = self.num_condemned = 0
        # Written now, so that no later call waits for the system to provide the memory.
        self.ref_cnt = np.full(capacity, FREE, np.int32)
        self.version = np.full(capacity, 0, np.uint32)
        self.condemned = np.full(capacity, False, np.bool_)
        # Popped from the end: slots are first used in ascending order, so neighbours stay together.
        self._free = np.arange(capacity - 1, -1, -1, dtype=np.int32)

    @property
    def num_ready(self) -> int:
        """Blocks that can be read."""
        return self.capacity - self.num_free - self.num_writing - self.num_condemned

    def free(self) -> list[int]:
        """The free slots; the next one to be used is last. Cost: O(capacity), for audits."""
        return list(map(int, self._free[: self.num_free]))

    def ready(self) -> SlotArray:
        """The slots of all blocks that can be read. Cost: O(capacity)."""
        return np.flatnonzero((self.ref_cnt >= 0) & ~self.condemned).astype(np.int32)

    def next_free(self, count: int) -> SlotArray:
        """The free slots that are used next. They stay free until `occupy`."""
        return self._free[self.num_free - count : self.num_free][::-1]

    def occupy(self, num_free: int, num_evicted: int) -> None:
        """Blocks are being written into `num_free` slots, and in place of `num_evicted` blocks."""
        self.num_free -= num_free
        self.num_evictable -= num_evicted
        self.num_writing += num_free + num_evicted

    def become_ready(self, slots: SlotArray) -> None:
        """The blocks that were being written into these slots can be read from now on."""
        _become_ready(self.ref_cnt, slots)
        self.num_writing -= len(slots)
        self.num_evictable += len(slots)

    def abandon(self, slots: SlotArray) -> None:
        """Free these slots: the blocks that were being written into them are forgotten."""
        self.num_writing -= len(slots)
        self._give_back(slots)

    def unpin(self, slots: SlotArray) -> None:
        """Remove one pin from each slot; condemned slots without a pin become free."""
        self.num_evictable += _unpin(self.ref_cnt, slots)
        if self.num_condemned:
            self.num_evictable -= self.release(slots)

    def condemn(self, slots: SlotArray) -> None:
        """Forget the ready blocks in these slots: slots without a pin are free at once, the others later."""
        idle = self.ref_cnt[slots] == 0
        self.num_evictable -= int(np.count_nonzero(idle))
        self.condemned[slots[~idle]] = True
        self.num_condemned += int(np.count_nonzero(~idle))
        self._give_back(slots[idle])

    def release(self, slots: SlotArray) -> int:
        """Free those of `slots` that are condemned and have no pin; returns how many."""
        idle = np.fromiter(dict.fromkeys(slots.tolist()), np.int32)
        idle = idle[self.condemned[idle] & (self.ref_cnt[idle] <= 0)]
        self.condemned[idle] = False
        self.num_condemned -= len(idle)
        self._give_back(idle)
        return len(idle)

    def reset(self, *, drop_in_flight: bool) -> None:
        """Forget every block. Slots that a transfer uses are condemned, unless `drop_in_flight`.

        Cost: O(capacity).
        """
        in_use = (self.ref_cnt > 0) | (self.ref_cnt == WRITING)
        self.condemned[:] = in_use & (not drop_in_flight)
        self.ref_cnt[~self.condemned] = FREE
        self.version += np.uint32(1)
        free = np.flatnonzero(self.ref_cnt == FREE)[::-1]
        self.num_free, self.num_condemned = len(free), self.capacity - len(free)
        self._free[: len(free)] = free
        self.num_evictable = self.num_writing = 0

    def _give_back(self, slots: SlotArray) -> None:
        self.ref_cnt[slots] = FREE
        self._free[self.num_free : self.num_free + len(slots)] = slots
        self.num_free += len(slots)


@kernel
def _become_ready(ref_cnt: I32Array, slots: ReadI32Array) -> None:
    for i in range(slots.shape[0]):
        ref_cnt[slots[i]] = 0


@kernel
def _unpin(ref_cnt: I32Array, slots: ReadI32Array) -> int:
    """Returns how many have no pin left."""
    released = 0
    for i in range(slots.shape[0]):
        ref_cnt[slots[i]] -= 1
        released += ref_cnt[slots[i]] == 0
    return released
