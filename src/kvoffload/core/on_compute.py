"""A manager's store mode: how it uses its policy when blocks are stored as soon as they are computed.

`on_device_eviction` is the same for a victim tier. A manager calls its store mode, which calls the policy.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from kvoffload.core.admission import Admission
from kvoffload.core.policy import REFUSED, EvictionPolicy
from kvoffload.core.protection import Protected
from kvoffload.core.request import RequestContext
from kvoffload.core.slots import SlotArray, Slots
from kvoffload.errors import PolicyError
from kvoffload.structures.jit import BoolArray, U64Matrix
from kvoffload.structures.keys import Keys


class OnCompute:
    """Blocks are offered as soon as the device has computed them, in prefix order: the tier holds what the
    device holds, and more. The policy orders every block.

    Attributes:
        learns_at_load: whether the policy observes a request before its load instead of before its store.
        one_prefix: whether the blocks of a store follow one another in one request.
        takes_back: whether `keep` has an effect.
    """

    learns_at_load: ClassVar[bool] = False
    one_prefix: ClassVar[bool] = True
    takes_back: ClassVar[bool] = False

    def __init__(self, policy: EvictionPolicy, slots: Slots) -> None:
        self.policy, self._slots = policy, slots

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

    def choose(
        self, rows: SlotArray, fresh: U64Matrix, slots: SlotArray, num_free: int, protected: Protected
    ) -> int:
        """Let the policy name the blocks that leave: fill `slots` from `num_free` on. Its answer is checked;
        `kernels.place` checks what needs the index.

        Returns: how many of the new blocks it refuses; those end up after the others, in all three arrays.
        Raises: `PolicyError` when the policy breaks its contract.
        """
        policy = self.policy
        given = slots[:num_free].copy() if num_free else slots[:0]
        policy.replace(Keys(fresh, policy.index.key_bytes), slots, num_free, protected)
        if num_free and not np.array_equal(slots[:num_free], given):
            raise PolicyError(f"policy {policy.name!r} changed the free slots that it was given")
        if not policy.refuses:
            return 0
        refused = slots == REFUSED
        num_refused = int(np.count_nonzero(refused))
        if num_refused and protected.admitted:
            raise PolicyError(f"policy {policy.name!r} refused blocks that were admitted")
        if num_refused and not refused[-num_refused:].all():
            if protected.one_prefix:
                raise PolicyError(f"policy {policy.name!r} refused a block and took one after it")
            order = np.argsort(refused, kind="stable")
            fresh[:], slots[:], rows[: len(slots)] = fresh[order], slots[order], rows[order]
        return num_refused

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
