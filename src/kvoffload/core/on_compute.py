"""A manager's store mode: how it uses its policy when blocks are stored as soon as they are computed.

`on_device_eviction` is the same for a victim tier. A manager calls its store mode, which calls the policy.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from kvoffload.core.admission import Admission
from kvoffload.core.policy import EvictionPolicy
from kvoffload.core.request import RequestContext
from kvoffload.core.slots import SlotArray
from kvoffload.core.state import REFUSED, Cache, Entering
from kvoffload.errors import PolicyError
from kvoffload.structures.jit import BoolArray, U64Matrix
from kvoffload.structures.keys import Keys


class OnCompute:
    """Blocks are offered as soon as the device has computed them, in prefix order: the tier holds what the
    device holds, and more. The policy orders every block.

    Attributes:
        one_prefix: whether the blocks of a store follow one another in one request.
        follows_device: whether the mode keeps account of which blocks the device holds. Then the policy
            observes a request before its load instead of before its store, and `loaded` and `keep` have an
            effect; otherwise every store and use goes to the policy as it is.
    """

    one_prefix: ClassVar[bool] = True
    follows_device: ClassVar[bool] = False

    def __init__(self, policy: EvictionPolicy, cache: Cache) -> None:
        self.policy, self._cache = policy, cache

    @property
    def num_duplicates(self) -> int:
        """Number of ready blocks that the device holds as well, if the mode knows them; else 0."""
        return 0

    def admit(self, rule: Admission, fresh: U64Matrix, rows: SlotArray) -> int:
        """How many of the new blocks the admission rule admits: those at the front of both arrays."""
        return rule.leading(Keys(fresh, self.policy.index.key_bytes))

    def used(self, slots: SlotArray, reused: BoolArray) -> None:
        """A request used these blocks."""
        self.policy.access(slots, reused)

    def loaded(self, slots: SlotArray) -> None:
        """The device holds these blocks from now on."""

    def choose(self, new: Entering, ctx: RequestContext) -> None:
        """Let the policy name the blocks that leave: fill ``new.slots`` from ``new.num_free`` on. What it
        refuses ends up after the others, and is left out. Its answer is checked; `kernels.store` checks what
        needs the index.

        Raises: `PolicyError` when the policy breaks its contract.
        """
        self._ask(new, new.num_free, ctx)

    def _ask(self, new: Entering, num_given: int, ctx: RequestContext) -> None:
        """As `choose`, where the first `num_given` slots are given."""
        policy, count = self.policy, new.count
        keys, slots, rows = new.keys[:count], new.slots[:count], new.rows
        given = slots[:num_given].copy()
        num_free, new.num_free = new.num_free, num_given
        try:
            policy.replace_in(new, self._cache.memory, ctx.memory)
        finally:
            new.num_free = num_free
        if num_given and not np.array_equal(slots[:num_given], given):
            raise PolicyError(f"policy {policy.name!r} changed the free slots that it was given")
        if not policy.refuses:
            return
        refused = slots == REFUSED
        num_refused = int(np.count_nonzero(refused))
        if num_refused and new.admitted:
            raise PolicyError(f"policy {policy.name!r} refused blocks that were admitted")
        if num_refused and not refused[-num_refused:].all():
            if self.one_prefix:
                raise PolicyError(f"policy {policy.name!r} refused a block and took one after it")
            order = np.argsort(refused, kind="stable")
            keys[:], slots[:], rows[:count] = keys[order], slots[order], rows[:count][order]
        new.count -= num_refused
        new.num_refused += num_refused
        behind = rows[new.count : count + new.num_dropped]
        behind[:] = np.roll(behind, -num_refused)

    def evicted(self, slots: SlotArray) -> None:
        """The blocks that `choose` named in these slots have left."""

    def keep(self, ctx: RequestContext, positions: SlotArray, held: SlotArray, stored: SlotArray) -> int:
        """Take back the offered blocks that are still here; returns how many."""
        return 0

    def removed(self, slots: SlotArray) -> None:
        """These blocks left without being chosen as victims."""
        self.policy.remove(slots)

    def reset(self) -> None:
        """Forget everything."""
        self.policy.reset()
