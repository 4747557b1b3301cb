"""A victim tier: it stores what the device drops, and its policy orders what the tier alone holds.

To the policy a block leaves when the device holds it again, and enters when the device drops it.
"""

from __future__ import annotations

import numpy as np

from kvoffload.core.admission import Admission
from kvoffload.core.duplicates import Duplicates
from kvoffload.core.on_compute import OnCompute
from kvoffload.core.policy import EvictionPolicy
from kvoffload.core.protection import Protected
from kvoffload.core.request import RequestContext
from kvoffload.core.slots import SlotArray, Slots
from kvoffload.errors import PolicyError
from kvoffload.structures.index import ABSENT
from kvoffload.structures.jit import BoolArray, U64Matrix
from kvoffload.structures.keys import Keys


class OnDeviceEviction(OnCompute):
    """Blocks are offered when the device drops them, each on its own. A block that the device holds again is
    a *duplicate*: the policy does not order it, and it gives up its slot first.

    Attributes:
        duplicates: blocks that the device holds as well.
    """

    # After a load the tier no longer holds its blocks alone, so the policy forgets them: it must observe the
    # hit before that.
    learns_at_load = True
    one_prefix = False
    takes_back = True

    def __init__(self, policy: EvictionPolicy, slots: Slots) -> None:
        super().__init__(policy, slots)
        self.duplicates = Duplicates(slots.capacity)

    @property
    def num_duplicates(self) -> int:
        return len(self.duplicates)

    def admit(self, rule: Admission, fresh: U64Matrix, rows: SlotArray) -> int:
        allowed = rule.admit(Keys(fresh, self.policy.index.key_bytes))
        order = np.argsort(~allowed, kind="stable")
        fresh[:], rows[:] = fresh[order], rows[order]
        return int(np.count_nonzero(allowed))

    def used(self, slots: SlotArray, reused: BoolArray) -> None:
        """The device holds every block that a request uses."""
        self.loaded(slots)

    def loaded(self, slots: SlotArray) -> None:
        if self._slots.num_condemned:
            slots = slots[~self._slots.condemned[slots]]
        added = self.duplicates.add(slots, self._slots.ref_cnt)
        if len(added):
            self.policy.remove(added)

    def choose(
        self, rows: SlotArray, fresh: U64Matrix, slots: SlotArray, num_free: int, protected: Protected
    ) -> int:
        """Duplicates leave first, then the blocks that the policy names."""
        num_given = num_free
        if num_free < len(slots):
            leaving = self.duplicates.choose(len(slots) - num_free, self.policy.index, protected)
            num_given += len(leaving)
            slots[num_free:num_given] = leaving
        num_refused = super().choose(rows, fresh, slots, num_given, protected)
        named = slots[num_given:]
        if self.duplicates.holds_any(named[(named >= 0) & (named < self._slots.capacity)]):
            raise PolicyError(f"policy {self.policy.name!r} named blocks that had been removed from it")
        return num_refused

    def evicted(self, slots: SlotArray) -> None:
        self.duplicates.drop(slots)

    def keep(self, ctx: RequestContext, positions: SlotArray, held: SlotArray, stored: SlotArray) -> int:
        """Blocks that are still here as duplicates enter the policy's order again; nothing is copied.

        Args:
            ctx: the request that the blocks belong to.
            positions, held: path position and slot of every block that the device drops; ABSENT if not here.
            stored: rows of the blocks that have just entered; they are put in order with the others.
        """
        here = np.flatnonzero(held != ABSENT)
        rows, _ = self.duplicates.drop(held[here])
        if len(rows) == 0:
            return 0
        kept = here[rows]
        index = self.policy.index
        keys = Keys(ctx.path.keys[positions[kept]], index.key_bytes)
        protected = Protected(self._slots.ref_cnt, index, ctx, one_prefix=False)
        self.policy.replace(keys, held[kept], len(kept), protected)
        if len(stored):
            batch = held[np.sort(np.concatenate((kept, stored)))]
            self.policy.access(batch, np.zeros(len(batch), np.bool_))
        return len(kept)

    def removed(self, slots: SlotArray) -> None:
        self.policy.remove(slots[self.duplicates.drop(slots)[1]])

    def reset(self) -> None:
        self.duplicates.clear()
        super().reset()
