"""A victim tier: it stores what the device drops, and its policy orders what the tier alone holds.

To the policy a block leaves when the device holds it again, and enters when the device drops it.
"""

from __future__ import annotations

import numpy as np

from kvoffload.core.admission import Admission
from kvoffload.core.duplicates import Duplicates
from kvoffload.core.on_compute import OnCompute
from kvoffload.core.policy import EvictionPolicy
from kvoffload.core.request import RequestContext
from kvoffload.core.slots import SlotArray
from kvoffload.core.state import Cache, Entering, entering
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
    one_prefix = False
    follows_device = True

    def __init__(self, policy: EvictionPolicy, cache: Cache) -> None:
        super().__init__(policy, cache)
        self.duplicates = Duplicates(cache.slots.capacity)

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
        held = self._cache.slots
        if held.num_condemned:
            slots = slots[~held.condemned[slots]]
        added = self.duplicates.add(slots, held.ref_cnt)
        if len(added):
            self.policy.remove(added)

    def choose(self, new: Entering, ctx: RequestContext) -> None:
        """Duplicates leave first, then the blocks that the policy names."""
        num_given = new.num_free
        if num_given < new.count:
            leaving = self.duplicates.choose(new.count - num_given, self._cache, ctx)
            new.slots[num_given : num_given + len(leaving)] = leaving
            num_given += len(leaving)
        self._ask(new, num_given, ctx)
        named = new.slots[num_given : new.count]
        if self.duplicates.holds_any(named[(named >= 0) & (named < self._cache.slots.capacity)]):
            raise PolicyError(f"policy {self.policy.name!r} named blocks that had been removed from it")

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
        new = entering(ctx.keys().take(positions[kept]), held[kept], len(kept))
        self.policy.replace_in(new, self._cache.memory, ctx.memory)
        if len(stored):
            batch = held[np.sort(np.concatenate((kept, stored)))]
            self.policy.access(batch, np.zeros(len(batch), np.bool_))
        return len(kept)

    def removed(self, slots: SlotArray) -> None:
        self.policy.remove(slots[self.duplicates.drop(slots)[1]])

    def reset(self) -> None:
        self.duplicates.clear()
        super().reset()
