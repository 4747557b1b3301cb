"""Store mode ``on-device-eviction``: RAM is a victim tier, which stores the blocks that the device drops.

The policy orders only the blocks that the device does not hold. When the device loads a block, the block
leaves the policy's order. When the device drops the block, the block returns to the policy's order, with a
flag that is True if requests used the block again while the device held it (`returning`).
"""

from __future__ import annotations

import numpy as np

from kvoffload.core.admission import Admission
from kvoffload.core.duplicates import forget
from kvoffload.core.on_compute import OnCompute
from kvoffload.core.request import Path, RequestContext
from kvoffload.core.slots import SlotArray
from kvoffload.core.state import Entering
from kvoffload.structures.jit import BoolArray, U64Matrix
from kvoffload.structures.keys import Keys
from kvoffload.structures.lists import LIST, UNLISTED


class OnDeviceEviction(OnCompute):
    """The store mode in which the engine offers a block when the device drops it.

    Blocks are offered independently, not as a prefix. When the device loads a block, the copy in RAM becomes
    a *duplicate*: it leaves the policy's order, and its slot is reused before any other block is evicted.
    """

    # The policy must see a hit before the load, because the load takes the blocks out of the policy's order.
    one_prefix = False
    follows_device = True

    def used(self, slots: SlotArray, reused: BoolArray) -> None:
        """Remove used blocks from the order of a policy in Python, because they have become duplicates."""
        self.policy.remove(slots)

    def admit(self, rule: Admission, fresh: U64Matrix, rows: SlotArray) -> int:
        allowed = rule.admit(Keys(fresh, self.policy.index.key_bytes))
        order = np.argsort(~allowed, kind="stable")
        fresh[:], rows[:] = fresh[order], rows[order]
        return int(np.count_nonzero(allowed))

    def keep(self, kept: Entering, ctx: RequestContext) -> None:
        if self.cache.replace:
            return
        if kept.count:
            self.policy.replace_in(kept, self.cache.memory, ctx.memory)
        if in_order := Path.over(ctx.memory).used.count:
            self.policy.access(*ctx.used(in_order))

    def removed(self, slots: SlotArray) -> None:
        duplicates = self.cache.duplicates
        ordered = slots[duplicates.links[slots, LIST] == UNLISTED]
        forget(duplicates.memory, slots)
        self.policy.remove(ordered)
