"""A victim tier: it stores what the device drops, and its policy orders what the tier alone holds.

To the policy a block leaves when the device holds it again, and enters when the device drops it. It is then
told whether the block was used again meanwhile.
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
    """Blocks are offered when the device drops them, each on its own. A block that the device holds again is
    a *duplicate*: the policy does not order it, and it gives up its slot first.
    """

    # After a load the tier no longer holds its blocks alone, so the policy forgets them: it must observe the
    # hit before that.
    one_prefix = False
    follows_device = True

    def used(self, slots: SlotArray, reused: BoolArray) -> None:
        """Tell a policy in Python that the device holds these blocks too, from now on."""
        self.policy.remove(slots)

    def _admit(self, rule: Admission, fresh: U64Matrix, rows: SlotArray) -> int:
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
        alone = slots[duplicates.links[slots, LIST] == UNLISTED]
        forget(duplicates.memory, slots)
        self.policy.remove(alone)
