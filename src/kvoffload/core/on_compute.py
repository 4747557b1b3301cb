"""Store mode ``on-compute``, and the base class of the store mode ``on-device-eviction``.

A policy or admission rule that is written in Python is called here. A compiled policy is called by kernels:
this module only passes the addresses of its functions to them.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from kvoffload.core.admission import Admission
from kvoffload.core.kernels import lookups, stores, uses, victims
from kvoffload.core.policy import CompiledPolicy, EvictionPolicy
from kvoffload.core.request import Path, RequestContext
from kvoffload.core.slots import SlotArray
from kvoffload.core.state import REFUSED, SPARES_TENANTS, Cache, Entering
from kvoffload.errors import PolicyError
from kvoffload.structures.jit import BoolArray, U64Matrix
from kvoffload.structures.keys import Keys


class OnCompute:
    """Store mode in which the engine offers blocks as soon as the device has computed them, in prefix order.

    The policy orders every block of the tier, including blocks that the device also holds.

    Attributes:
        one_prefix: True if the blocks of a store follow one another in the prefix of one request.
        follows_device: True if the mode tracks which blocks the device holds. If True, the policy observes a
            request before its load, otherwise before its store.
        is_compiled: True if kernels do all the work: the policy is compiled, and no admission rule is set.
        num_not_admitted: number of blocks of the last offer that the admission rule refused. Blocks that the
            policy refused do not count.
    """

    one_prefix: ClassVar[bool] = True
    follows_device: ClassVar[bool] = False

    def __init__(self, policy: EvictionPolicy, admission: Admission | None, cache: Cache) -> None:
        self.admission, self.cache = admission, cache
        self.num_not_admitted = 0
        self.decide_by(policy)

    def decide_by(self, policy: EvictionPolicy) -> None:
        """Use this policy for all later calls."""
        self.policy, self.is_compiled = policy, False
        # Methods that the policy implements in Python.
        self._has_expect = type(policy).expect is not EvictionPolicy.expect
        self._has_observe = type(policy).observe is not EvictionPolicy.observe
        self._has_finished = type(policy).finished is not EvictionPolicy.finished
        for name in ("policy", "expect", "observe", "finished", "access", "replace", "remove"):
            setattr(self.cache, name, 0)
        self.bind()

    def bind(self) -> None:
        """Write the addresses of a compiled policy's functions and state to `Cache`, for the kernels.

        Call `bind` again after the policy has replaced its state.
        """
        policy, cache = self.policy, self.cache
        if not isinstance(policy, CompiledPolicy):
            return
        cache.policy, cache.observe = policy.state.address, policy.address_of("observe")
        cache.expect = 0 if self._has_expect else policy.address_of("expect")
        cache.finished = 0 if self._has_finished else policy.address_of("finished")
        if policy.is_compiled and not self._has_observe:
            cache.access, cache.remove = policy.address_of("access"), policy.address_of("remove")
            cache.replace = policy.address_of("replace")
            self.is_compiled = self.admission is None and not self._has_finished

    # ---- requests

    def expect(self, ctx: RequestContext) -> None:
        """Report a waiting request's expected blocks to the policy, each block once per request."""
        if not (self._has_expect or self.cache.expect):
            return
        start = uses.expect(self.cache.memory, ctx.memory)
        stop = Path.over(ctx.memory).foreseen
        if start < stop and self._has_expect:
            self.policy.expect(ctx.keys()[:stop], start)

    def observe(self, ctx: RequestContext) -> None:
        """Report a request's blocks to policy and admission rule, each block once per request."""
        uses.observe(self.cache.memory, ctx.memory)
        start, stop = ctx.observed, ctx.length
        if start == stop or not (self._has_observe or self.admission is not None):
            return
        ctx.observed = stop
        ctx.num_observations += 1
        if self._has_observe and not ctx.is_quiet:
            slots = np.empty(stop - start, np.int32)
            lookups.resolve(self.cache.memory, ctx.memory, np.arange(start, stop, dtype=np.int32), slots)
            self.policy.observe(ctx.keys(), slots, start, Path.over(ctx.memory).on_device)
        if self.admission is not None:
            self.admission.count(ctx.keys()[start:])

    def used(self, slots: SlotArray, reused: BoolArray) -> None:
        """Call the `access` method of a policy written in Python with the blocks that a request used."""
        self.policy.access(slots, reused)

    def finished(self, ctx: RequestContext, num_used: int) -> None:
        """Report the end of a request to the policy.

        Args:
            num_used: result of `uses.finish`, which the caller has called before. If it is 0, that kernel has
                already called the policy's compiled function `finished`. Otherwise this method does.
        """
        if num_used:
            uses.finish(self.cache.memory, ctx.memory, True)
        if self._has_finished:
            slots = np.empty(ctx.length, np.int32)
            lookups.resolve(self.cache.memory, ctx.memory, np.arange(ctx.length, dtype=np.int32), slots)
            self.policy.finished(ctx.keys(), slots, ctx.hints)

    # ---- stores

    def store(self, ctx: RequestContext, new: Entering, kept: Entering, enters: int, admitted: bool) -> int:
        """Store the missing blocks of an offer; return the number of stored blocks, or a negative error.

        Args:
            ctx: the request.
            new: the offer. The method fills in the slots and victims.
            kept: receives the offered blocks that are already in RAM, if the tier is a victim tier.
            enters: 0 if the policy may refuse blocks; otherwise the policy must accept all of them. Passed to
                `stores.prepare_store` as the argument `admitted`.
            admitted: True to store the blocks without asking the admission rule.

        Raises: `PolicyError` if the policy breaks its contract.
        """
        if not self.follows_device:
            self.observe(ctx)
        num_admitted = num_missing = new.num_missing
        num_cut = new.num_refused  # blocks after a refused block, see `Path.cut`
        if num_missing and self.admission is not None and not (admitted or num_cut):
            num_admitted = self.admit(self.admission, new.keys[:num_missing], new.rows[:num_missing])
        new.count = min(num_admitted, new.count)
        self.num_not_admitted = num_missing - num_admitted
        new.num_dropped = num_admitted - num_cut - new.count
        new.num_refused = num_cut + self.num_not_admitted
        is_owed = self.cache.spares & SPARES_TENANTS and self.cache.tenants.is_owed
        new.one_prefix, new.admitted = self.one_prefix, bool(enters or is_owed)
        if new.count and not self.cache.replace:
            victims.give(self.cache.memory, ctx.memory, new.memory)
            self.choose(new, ctx)
        stored: int = stores.prepare_store(
            self.cache.memory, ctx.memory, [], new.memory, kept.memory, stores.CHOSEN, enters
        )
        if stored >= 0:
            self.keep(kept, ctx)
        return stored

    def admit(self, rule: Admission, fresh: U64Matrix, rows: SlotArray) -> int:
        """Move the blocks that the admission rule accepts to the front of `fresh` and `rows`.

        Returns the number of these blocks.
        """
        return rule.leading(Keys(fresh, self.policy.index.key_bytes))

    def choose(self, new: Entering, ctx: RequestContext) -> None:
        """Call the `replace` method of a policy written in Python to choose victims.

        The policy writes the slots of its victims to ``new.slots``, from index ``num_given`` on. A kernel
        checks these slots later.

        Raises: `PolicyError` if the policy has changed free slots, or has refused blocks that it must accept.
        """
        policy, slots = self.policy, new.slots[: new.count]
        given = slots[: new.num_given].copy()
        policy.replace_in(new, self.cache.memory, ctx.memory)
        if not np.array_equal(slots[: new.num_given], given):
            raise PolicyError(f"policy {policy.name!r} changed the free slots that it received")
        refused = slots == REFUSED
        num_refused = int(np.count_nonzero(refused)) if policy.refuses else 0
        if num_refused and new.admitted:
            raise PolicyError(f"policy {policy.name!r} refused blocks that it must accept")
        if num_refused and self.one_prefix and not refused[-num_refused:].all():
            raise PolicyError(
                f"policy {policy.name!r} refused a block and accepted a later block of the prefix"
            )

    def keep(self, kept: Entering, ctx: RequestContext) -> None:
        """Do nothing. `OnDeviceEviction` overrides this method to return blocks to the policy's order: the
        blocks that the device has dropped and that are already in RAM (`kept`).
        """

    def wrong_victim(self, plan: bytearray, row: int) -> PolicyError:
        """Create the error for the invalid victim in row `row` of a plan."""
        new = Entering.over(plan)
        key = new.keys[row].tobytes()[: self.policy.index.key_bytes]
        return PolicyError(
            f"policy {self.policy.name!r} named slot {new.slots[row]} as the victim for key {key.hex()}: "
            f"the slot is protected, not in the policy's order, or was already named"
        )

    # ---- forgetting

    def removed(self, slots: SlotArray) -> None:
        """Report to the policy that blocks which it did not choose as victims have left the cache."""
        self.policy.remove(slots)

    def reset(self) -> None:
        """Forget the duplicates, the recorded uses (`returning`) and the policy's state."""
        self.cache.duplicates.clear()
        self.cache.known.clear()
        self.policy.reset()
        self.bind()
