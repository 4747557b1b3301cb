"""What is different in a victim tier: it is offered what the device drops, and its policy orders what it
alone holds.

Tells the policy that a block has gone when the device holds it again, and that a new one has come when the
device drops it. Owns the duplicates; does not know slots that are free, nor what is pinned for whom.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from kvoffload.core.duplicates import Duplicates
from kvoffload.core.policy import EvictionPolicy
from kvoffload.core.protection import Protected
from kvoffload.core.request import RequestContext
from kvoffload.structures.index import ABSENT, Index
from kvoffload.structures.jit import I32Array
from kvoffload.structures.keys import Keys


class VictimTier:
    """Between a manager and its policy, where blocks are stored when the device evicts them.

    Attributes:
        policy: the manager's.
        duplicates: blocks that the device holds as well; in no order of the policy.
    """

    __slots__ = ("_index", "_ref_cnt", "duplicates", "policy")

    def __init__(self, policy: EvictionPolicy, index: Index, ref_cnt: I32Array) -> None:
        self.duplicates = Duplicates(len(ref_cnt))
        self.policy, self._index, self._ref_cnt = policy, index, ref_cnt

    def duplicate(self, slots: I32Array, condemned: Collection[int]) -> None:
        """The device holds these blocks as well; `condemned` slots hold none any more."""
        if condemned:
            slots = slots[[slot not in condemned for slot in slots.tolist()]]
        added = self.duplicates.add(slots, self._ref_cnt)
        if len(added):
            self.policy.remove(added)

    def keep(self, ctx: RequestContext, positions: I32Array, slots: I32Array, stored: I32Array) -> int:
        """Of the blocks that the device drops, take those back that are here already: nothing is copied.

        Args:
            ctx: whose path the blocks are on.
            positions, slots: of every block that the device drops; a slot is ABSENT where it is not here.
            stored: rows of those that have just entered: all of them together are put in order.

        Returns: how many are taken back.
        """
        here = np.flatnonzero(slots != ABSENT)
        rows, _ = self.duplicates.drop(slots[here])
        if len(rows) == 0:
            return 0
        kept = here[rows]
        keys = Keys(ctx.path.keys[positions[kept]], self._index.key_bytes)
        protected = Protected(self._ref_cnt, self._index, ctx, one_prefix=False)
        self.policy.replace(keys, slots[kept], len(kept), protected)
        if len(stored):
            batch = slots[np.sort(np.concatenate((kept, stored)))]
            self.policy.access(batch, np.zeros(len(batch), np.bool_))
        return len(kept)
