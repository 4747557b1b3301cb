"""A manager's store mode: what differs between a tier that is offered blocks as soon as they are computed and
a victim tier (`on_device_eviction`).

A manager's kernels call compiled policies; its store mode asks whoever is in Python.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from kvoffload.core import kernels
from kvoffload.core.admission import Admission
from kvoffload.core.policy import CompiledPolicy, EvictionPolicy
from kvoffload.core.request import Path, RequestContext
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
            observes a request before its load instead of before its store.
        asks_nobody: whether kernels do all: the policy is compiled and everybody may enter.
    """

    one_prefix: ClassVar[bool] = True
    follows_device: ClassVar[bool] = False

    def __init__(self, policy: EvictionPolicy, admission: Admission | None, cache: Cache) -> None:
        self.policy, self.admission, self.cache = policy, admission, cache
        self._policy_expects = type(policy).expect is not EvictionPolicy.expect
        self._policy_observes = type(policy).observe is not EvictionPolicy.observe
        self._policy_hears_of_ends = type(policy).finished is not EvictionPolicy.finished
        self.asks_nobody = False
        self.bind()

    def bind(self) -> None:
        """Let kernels call a compiled policy. Again when it may have made itself a new state."""
        policy, cache = self.policy, self.cache
        if not isinstance(policy, CompiledPolicy):
            return
        cache.policy, cache.observe = policy.state.address, policy.address_of("observe")
        cache.expect = 0 if self._policy_expects else policy.address_of("expect")
        cache.finished = 0 if self._policy_hears_of_ends else policy.address_of("finished")
        if policy.is_compiled and not self._policy_observes:
            cache.access, cache.remove = policy.address_of("access"), policy.address_of("remove")
            cache.replace = policy.address_of("replace")
            self.asks_nobody = self.admission is None and not self._policy_hears_of_ends

    # ---- requests

    def expect(self, ctx: RequestContext) -> None:
        """Tell the policy which blocks of a waiting request are expected: each once a request."""
        if not (self._policy_expects or self.cache.expect):
            return
        start = kernels.expect(self.cache.memory, ctx.memory)
        stop = Path.over(ctx.memory).foreseen
        if start < stop and self._policy_expects:
            self.policy.expect(ctx.keys()[:stop], start)

    def observe(self, ctx: RequestContext) -> None:
        """Report the request's blocks to policy and admission rule: each once a request."""
        kernels.observe(self.cache.memory, ctx.memory)
        start, stop = ctx.observed, ctx.length
        if start == stop or not (self._policy_observes or self.admission is not None):
            return
        ctx.observed = stop
        ctx.num_observations += 1
        if self._policy_observes:
            slots = np.empty(stop - start, np.int32)
            kernels.resolve(self.cache.memory, ctx.memory, np.arange(start, stop, dtype=np.int32), slots)
            self.policy.observe(ctx.keys(), slots, start, Path.over(ctx.memory).on_device)
        if self.admission is not None:
            self.admission.count(ctx.keys()[start:])

    def used(self, slots: SlotArray, reused: BoolArray) -> None:
        """Tell a policy in Python that a request used these blocks."""
        self.policy.access(slots, reused)

    def finished(self, ctx: RequestContext, num_used: int) -> None:
        """Tell a policy that a request has ended, if it is in Python.

        A compiled one is told by the kernel, but not before it has been told in Python of `num_used` blocks.
        """
        if num_used:
            kernels.finish(self.cache.memory, ctx.memory, True)
        if self._policy_hears_of_ends:
            slots = np.empty(ctx.length, np.int32)
            kernels.resolve(self.cache.memory, ctx.memory, np.arange(ctx.length, dtype=np.int32), slots)
            self.policy.finished(ctx.keys(), slots, ctx.hints)

    # ---- stores

    def store(self, ctx: RequestContext, new: Entering, kept: Entering, enters: bool, admitted: bool) -> int:
        """Store what was found missing; returns as `kernels.prepare_store`.

        Args:
            ctx, new, kept: as for that.
            enters: the policy may refuse none. admitted: the admission rule may refuse none.

        Raises: `PolicyError` when the policy breaks its contract.
        """
        if not self.follows_device:
            self.observe(ctx)
        num_admitted = num_missing = new.num_missing
        if num_missing and self.admission is not None and not admitted:
            num_admitted = self._admit(self.admission, new.keys[:num_missing], new.rows[:num_missing])
        new.count = min(num_admitted, new.count)
        new.num_dropped, new.num_refused = num_admitted - new.count, num_missing - num_admitted
        new.one_prefix, new.admitted = self.one_prefix, enters
        if new.count and not self.cache.replace:
            kernels.give(self.cache.memory, ctx.memory, new.memory)
            self._choose(new, ctx)
        stored: int = kernels.prepare_store(
            self.cache.memory, ctx.memory, [], new.memory, kept.memory, kernels.CHOSEN, enters
        )
        if stored >= 0:
            self.keep(kept, ctx)
        return stored

    def _admit(self, rule: Admission, fresh: U64Matrix, rows: SlotArray) -> int:
        """How many of the new blocks the admission rule admits: those at the front of both arrays."""
        return rule.leading(Keys(fresh, self.policy.index.key_bytes))

    def _choose(self, new: Entering, ctx: RequestContext) -> None:
        """Let a policy in Python name the blocks that leave: fill ``new.slots`` from ``new.num_given`` on.

        What takes an index to check is checked later, as for compiled policies.
        """
        policy, slots = self.policy, new.slots[: new.count]
        given = slots[: new.num_given].copy()
        policy.replace_in(new, self.cache.memory, ctx.memory)
        if not np.array_equal(slots[: new.num_given], given):
            raise PolicyError(f"policy {policy.name!r} changed the slots that it was given")
        refused = slots == REFUSED
        num_refused = int(np.count_nonzero(refused)) if policy.refuses else 0
        if num_refused and new.admitted:
            raise PolicyError(f"policy {policy.name!r} refused blocks that were admitted")
        if num_refused and self.one_prefix and not refused[-num_refused:].all():
            raise PolicyError(f"policy {policy.name!r} refused a block and took one after it")

    def keep(self, kept: Entering, ctx: RequestContext) -> None:
        """Tell a policy in Python that the device has dropped blocks that are still here."""

    def wrong_victim(self, plan: bytearray, row: int) -> PolicyError:
        """What is wrong with the slot that the policy named for this row of a plan."""
        new = Entering.over(plan)
        key = new.keys[row].tobytes()[: self.policy.index.key_bytes]
        return PolicyError(
            f"policy {self.policy.name!r} named slot {new.slots[row]} as the victim for key {key.hex()}: "
            f"it is protected, not in its order, or was named before"
        )

    # ---- forgetting

    def removed(self, slots: SlotArray) -> None:
        """These blocks left without being chosen as victims."""
        self.policy.remove(slots)

    def reset(self) -> None:
        """Forget everything."""
        self.cache.duplicates.clear()
        self.cache.known.clear()
        self.policy.reset()
        self.bind()
