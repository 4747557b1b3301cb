"""Where blocks are in a slab: the slab's slot for each slot of the manager.

Owns the metadata of the block in each of the manager's slots, and the *reserve*: the slab has more slots than
the manager, and empty ones queue for reuse, so that a block is written at once and need not wait until the
removal of another is durable. Does no I/O; the committer knows what is durable.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvoffload.core.manager import OffloadingManager
from kvoffload.core.policy import EvictionPolicy
from kvoffload.core.slots import SlotArray
from kvoffload.tiers.contract import Checksums
from kvoffload.tiers.disk.format import SlabSlots
from kvoffload.tiers.disk.layout import Layout
from kvoffload.tiers.disk.recovery import Contents
from kvoffload.tiers.disk.slab import Positions

_RESTORE_BLOCKS = 65536
_RESTORED_REQUEST = 1024
"""Uses are restored in batches of this many blocks: for some policies a long batch takes long."""


class Placement:
    """Arrays indexed by the manager's slot: the slab's slot, and the metadata of its block.

    The *gate* of a slab's slot is the number of removals that must be durable before it is written again.

    Args:
        layout: of the slab; its slots that the manager has no use for are the reserve.
        next_generation: greater than any in the slab.

    Attributes:
        generation: of the block in each slot: a number that no other write to this slab has. 0: no block.
        checksum: of its header and bytes.
        next_generation: generation of the next block to be written.

    Memory: 24 bytes a block, 8 a slot. Thread: one, the scheduler's.
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
        """Give an empty manager the blocks that were found; returns the slab's slots of those not taken.

        They are stored in the order of their writing, and then used in the order of their uses: so policies
        that order by insertion and policies that order by use both get their order back.
        """
        found, num_blocks = contents.newest_slots(), len(self._place)
        # Only a damaged journal has more blocks than fit.
        if len(found) > num_blocks:
            found = found[np.argsort(contents.stamp[found], kind="stable")][-num_blocks:]
        by_age = found[np.argsort(contents.generation[found], kind="stable")]
        slot_of = np.full(len(self._gate), -1, np.int32)
        for start in range(0, len(by_age), _RESTORE_BLOCKS):
            batch = by_age[start : start + _RESTORE_BLOCKS]
            plan = manager.prepare_store(contents.keys(batch), admitted=True)
            assert plan is not None, "an empty cache has room for the blocks that it held"
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
        """How many of the manager's slots `confine` has taken out of use."""
        return len(self._withheld)

    def confine(self, end: int, manager: OffloadingManager) -> None:
        """Use only the slab's slots before `end` from now on: the file is not long enough for the others.

        The manager has as many slots fewer, and evicts inside the rest. Blocks and writes stay where they
        are.
        Cost: O(slots).
        """
        slots = manager.slots
        slots.release(self._withheld)
        line = np.concatenate([self._reserve, self._beyond])
        free = slots.stack[: slots.num_free].copy()
        within, beyond = (np.concatenate([self._place[free], line]) for _ in range(2))
        within, beyond = within[within < end], beyond[beyond >= end]
        num_reserve = min(len(line), len(within) * len(line) // max(1, len(within) + len(beyond)))
        num_used = min(len(free), len(within) - num_reserve)
        if not len(beyond):
            num_used = len(free)
        self._withheld = slots.withhold(len(free) - num_used)
        used = slots.stack[: slots.num_free][::-1]
        # The slots that are used next get neighbours, as at the beginning.
        within = np.concatenate([np.sort(within[: len(used)]), within[len(used) :]])
        self._place[used], self._reserve = within[: len(used)], within[len(used) :]
        self._place[self._withheld] = beyond[: len(self._withheld)]
        self._beyond = beyond[len(self._withheld) :]

    def places(self, slots: SlotArray) -> Positions:
        """The slab's slots for these slots of the manager."""
        return self._place[slots]

    def renew(self, slots: SlotArray) -> None:
        """Give each of these slots, which are about to be written, a new generation."""
        generations = np.arange(len(slots), dtype=np.uint64) + np.uint64(self.next_generation)
        self.generation[slots] = generations
        self.next_generation += len(slots)

    def empty(self, slots: SlotArray) -> SlabSlots:
        """The blocks in these slots have left; returns the slab's slots that are now empty."""
        self.generation[slots] = 0
        return self._place[slots].astype(np.uint32)

    def rotate(self, slots: SlotArray) -> None:
        """Give these slots, just emptied, the slots of the slab that have been empty for the longest."""
        line = np.concatenate([self._reserve, self._place[slots]])
        self._place[slots], self._reserve = line[: len(slots)], line[len(slots) :]

    def set_gate(self, places: SlabSlots, gate: int) -> None:
        """Removals from these slots of the slab are durable once `gate` removals are."""
        self._gate[places] = gate

    def gate(self, slots: SlotArray) -> int:
        """Number of removals that must be durable before all of these slots may be written."""
        return int(self._gate[self._place[slots]].max())


def _restore_uses(policy: EvictionPolicy, slots: SlotArray, used: npt.NDArray[np.bool_]) -> None:
    """Report the uses of restored blocks, given with the most recently used first, to a policy; `used` says
    which were used after they had been stored."""
    again, size = slots[used], _RESTORED_REQUEST
    for batch, is_use in ((again, True), (slots, False)):
        for start in reversed(range(0, len(batch), size)):
            part = batch[start : start + size]
            policy.access(part, np.full(len(part), is_use))
