"""A manager's store mode: what differs between a tier that is offered blocks as soon as they are computed and
a victim tier (`on_device_eviction`). A manager calls its store mode, which calls a policy in Python.
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
from kvoffload.structures.lists import Lists


class OnCompute:
    """Blocks are offered as soon as the device has computed them, in prefix order: the tier holds what the
    device holds, and more. The policy orders every block.

    Attributes:
        one_prefix: whether the blocks of a store follow one another in one request.
        follows_device: whether the mode keeps account of which blocks the device holds. Then the policy
            observes a request before its load instead of before its store.
        duplicates: one list: the slots whose block the device holds as well, if the mode follows it.
    """

    one_prefix: ClassVar[bool] = True
    follows_device: ClassVar[bool] = False

    def __init__(self, policy: EvictionPolicy, capacity_blocks: int) -> None:
        self.policy = policy
        self.duplicates = Lists(capacity_blocks if self.follows_device else 0, 1)

    def admit(self, rule: Admission, fresh: U64Matrix, rows: SlotArray) -> int:
        """How many of the new blocks the admission rule admits: those at the front of both arrays."""
        return rule.leading(Keys(fresh, self.policy.index.key_bytes))

    def used(self, slots: SlotArray, reused: BoolArray) -> None:
        """Tell a policy in Python that a request used these blocks."""
        self.policy.access(slots, reused)

    def choose(self, new: Entering, cache: Cache, ctx: RequestContext) -> None:
        """Let a policy in Python name the blocks that leave: fill ``new.slots`` from ``new.num_given`` on.

        Raises: `PolicyError` when the policy breaks its contract, as far as that takes no index.
        """
        policy, slots = self.policy, new.slots[: new.count]
        given = slots[: new.num_given].copy()
        policy.replace_in(new, cache.memory, ctx.memory)
        if not np.array_equal(slots[: new.num_given], given):
            raise PolicyError(f"policy {policy.name!r} changed the slots that it was given")
        refused = slots == REFUSED
        num_refused = int(np.count_nonzero(refused)) if policy.refuses else 0
        if num_refused and new.admitted:
            raise PolicyError(f"policy {policy.name!r} refused blocks that were admitted")
        if num_refused and self.one_prefix and not refused[-num_refused:].all():
            raise PolicyError(f"policy {policy.name!r} refused a block and took one after it")

    def keep(self, kept: Entering, cache: Cache, ctx: RequestContext) -> None:
        """Tell a policy in Python that the device has dropped blocks that are still here."""

    def removed(self, slots: SlotArray) -> None:
        """These blocks left without being chosen as victims."""
        self.policy.remove(slots)

    def reset(self) -> None:
        """Forget everything."""
        self.duplicates.clear()
        self.policy.reset()
