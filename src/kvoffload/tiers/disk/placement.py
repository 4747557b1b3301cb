"""The mapping from the manager's slots to the slab's slots, called *places*. Owns the metadata of each block.

The slab has more places than the manager has slots; the difference is the *reserve*. A write gets the places
that have been empty longest, so that it need not wait until the removal of evicted blocks is durable. Does no
I/O.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvoffload.core.manager import OffloadingManager
from kvoffload.core.policy import EvictionPolicy
from kvoffload.core.slots import SlotArray
from kvoffload.tiers.contract import Checksums
from kvoffload.tiers.disk.recovery import Contents
from kvoffload.tiers.disk.slab import Positions
from kvoffload.tiers.disk.slab_format import SlabSlots
from kvoffload.tiers.disk.slab_layout import Layout

_RESTORE_BLOCKS = 65536
_RESTORED_REQUEST = 1024
"""Number of blocks in one call of the policy while blocks are restored.

With longer batches some policies are slow.
"""


class Placement:
    """Place (position in the slab) and metadata of the block in each slot of the manager.

    The *gate* of a place is the number of removals that must be durable before the place may be written
    (`Committer.remove`).

    Args:
        layout: layout of the slab. The manager has `Layout.num_blocks` slots; the slab's other usable slots
            form the reserve.
        next_generation: a number above every generation in the slab.

    Attributes:
        generation: generation of the block in each of the manager's slots; 0 marks an empty slot.
        checksum: checksum, over header and bytes, of the block in each of the manager's slots.
        next_generation: generation of the next block to be written.

    Memory: 24 bytes a block and 8 bytes a place. Thread: the scheduler's.
    """

    def __init__(self, layout: Layout, next_generation: int) -> None:
        num_blocks = layout.num_blocks
        self.generation = np.zeros(num_blocks, np.uint64)
        self.checksum: Checksums = np.zeros(num_blocks, np.uint64)
        self.next_generation = next_generation
        self._usable = np.arange(layout.first_slot, layout.num_slots)
        self._place: Positions = self._usable[:num_blocks].copy()
        self._reserve: Positions = self._usable[num_blocks:]
        self._gate = np.zeros(layout.num_slots, np.int64)
        self._withheld, self._beyond = np.empty(0, np.int32), np.empty(0, np.int64)

    def restore(self, contents: Contents, manager: OffloadingManager) -> SlabSlots:
        """Store the recovered blocks in an empty manager.

        Returns the slab's slots whose blocks the manager has no room for.

        Stores the blocks in the order of their writes, then reports the uses in the order of use. Therefore
        each policy restores its order, whether it orders blocks by insertion or by use.
        """
        newest, num_blocks = contents.newest_slots(), len(self._place)
        # Only a damaged journal has more blocks than fit.
        if len(newest) > num_blocks:
            newest = newest[np.argsort(contents.stamp[newest], kind="stable")][-num_blocks:]
        by_age = newest[np.argsort(contents.generation[newest], kind="stable")]
        slot_of = np.full(len(self._gate), -1, np.int32)
        for start in range(0, len(by_age), _RESTORE_BLOCKS):
            batch = by_age[start : start + _RESTORE_BLOCKS]
            plan = manager.prepare_store(contents.keys(batch), admitted=True)
            assert plan is not None, "an empty manager has room for all recovered blocks"
            slot_of[batch[plan.rows]] = plan.slots
            manager.complete_store(plan)
        restored, empty = np.flatnonzero(slot_of >= 0), self._usable[slot_of[self._usable] < 0]
        vacant = np.ones(num_blocks, np.bool_)
        vacant[slot_of[restored]] = False
        num_vacant = int(np.count_nonzero(vacant))
        self._place[slot_of[restored]] = restored
        self._place[vacant], self._reserve = empty[:num_vacant], empty[num_vacant:]
        self.generation[slot_of[restored]] = contents.generation[restored]
        self.checksum[slot_of[restored]] = contents.checksum[restored]
        by_use = restored[np.argsort(contents.stamp[restored], kind="stable")[::-1]]
        _restore_uses(manager.policy, slot_of[by_use], contents.uses[by_use] > 0)
        return empty[contents.generation[empty] > 0].astype(np.uint32)

    @property
    def num_withheld(self) -> int:
        """Number of the manager's slots that `confine` withholds."""
        return len(self._withheld)

    def confine(self, end: int, manager: OffloadingManager) -> None:
        """Use only places before `end`, because the file is too short for later places.

        Withholds as many of the manager's free slots as there are missing places. Blocks and writes in flight
        keep their places. Cost: O(slots).
        """
        slots = manager.slots
        slots.release(self._withheld)
        queue = np.concatenate([self._reserve, self._beyond])
        free = slots.stack[: slots.num_free].copy()
        empty = np.concatenate([self._place[free], queue])
        within, beyond = empty[empty < end], empty[empty >= end]
        num_reserve = min(len(queue), len(within) * len(queue) // max(1, len(empty)))
        num_used = min(len(free), len(within) - num_reserve)
        if not len(beyond):
            num_used = len(free)
        self._withheld = slots.withhold(len(free) - num_used)
        used = slots.stack[: slots.num_free][::-1]
        # Slots that are used consecutively get neighbouring places, as in a new slab.
        within = np.concatenate([np.sort(within[: len(used)]), within[len(used) :]])
        self._place[used], self._reserve = within[: len(used)], within[len(used) :]
        self._place[self._withheld] = beyond[: len(self._withheld)]
        self._beyond = beyond[len(self._withheld) :]

    def places(self, slots: SlotArray) -> Positions:
        """Return the slab's slot for each of these slots of the manager."""
        return self._place[slots]

    def renew(self, slots: SlotArray) -> None:
        """Assign the next generations to slots before a write."""
        generations = np.arange(len(slots), dtype=np.uint64) + np.uint64(self.next_generation)
        self.generation[slots] = generations
        self.next_generation += len(slots)

    def empty(self, slots: SlotArray) -> SlabSlots:
        """Mark slots of the manager as empty; return their slots in the slab."""
        self.generation[slots] = 0
        return self._place[slots].astype(np.uint32)

    def rotate(self, slots: SlotArray) -> None:
        """Exchange the places of emptied slots for the places that have been empty longest."""
        queue = np.concatenate([self._reserve, self._place[slots]])
        self._place[slots], self._reserve = queue[: len(slots)], queue[len(slots) :]

    def set_gate(self, places: SlabSlots, gate: int) -> None:
        """Set the gate of these places."""
        self._gate[places] = gate

    def gate(self, slots: SlotArray) -> int:
        """Return the largest gate of these slots."""
        return int(self._gate[self._place[slots]].max())


def _restore_uses(policy: EvictionPolicy, slots: SlotArray, used: npt.NDArray[np.bool_]) -> None:
    """Report the uses of restored blocks to a policy.

    Args:
        slots: slots of all restored blocks, the most recently used first.
        used: True for blocks that were used after their write.
    """
    size = _RESTORED_REQUEST
    for ordered, is_use in ((slots[used], True), (slots, False)):
        for start in reversed(range(0, len(ordered), size)):
            batch = ordered[start : start + size]
            policy.access(batch, np.full(len(batch), is_use))
