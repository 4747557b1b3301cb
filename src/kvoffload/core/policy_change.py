"""The change of a running manager to another eviction policy.

The new policy adopts the resident blocks in the order of the old policy. Meanwhile the old policy still
chooses the victims. Any thread may create a `PolicyChange`. `OffloadingManager.begin_policy_change` begins
the change. Each call of `OffloadingManager.advance_policy_change` reads a part of the old policy's order
(`resident_order`), until the new policy has every block and takes over.
"""

from __future__ import annotations

from typing import TypeGuard

import numpy as np

from kvoffload.core.policy import CompiledPolicy, EvictionPolicy
from kvoffload.core.request import Path, RequestContext, Used, used_blocks
from kvoffload.core.resident_order import (
    LEFT,
    NEW,
    Reader,
    Taken,
    is_left,
    is_ordered,
    readers_of,
)
from kvoffload.core.returning import known_keys
from kvoffload.core.slots import SlotArray
from kvoffload.core.state import Cache, Entering, blank_store
from kvoffload.structures.index import copy_key
from kvoffload.structures.jit import BoolArray, I32Array, ReadI32Array, compile_all, inline, kernel
from kvoffload.structures.keylists import KeyLists
from kvoffload.structures.lists import LIST, PREV, UNLISTED, move_to_head, push_head, unlink
from kvoffload.structures.structs import Struct, call_2, call_4

_CHUNK = 256
"""Largest number of blocks that one call of the new policy adopts."""
_CALL_BLOCKS = 16
"""Minimum cost of a call of the new policy. The unit is one block of the budget of `PolicyChange.advance`."""


class State(Struct):
    """The state of a `Handover`.

    Attributes:
        taken: ``taken.where`` is `NEW` for blocks that the new policy has adopted. ``taken.recent`` lists the
            blocks that were used or stored since the change began. The new policy adopts these blocks last.
        reused: True for blocks that were used again since the change began.
        num_calls: number of calls of `access` and `replace` since the change began.
        removed: blocks that the new policy must remove, collected so that one call removes many blocks.
        old, new: addresses of the two policies' states.
        old_expect, new_expect, ...: addresses of the two policies' functions, or 0.
    """

    taken: Taken
    reused: BoolArray
    num_calls: int
    removed: Used
    old: int
    new: int
    old_expect: int
    new_expect: int
    old_observe: int
    new_observe: int
    old_finished: int
    new_finished: int
    old_access: int
    old_replace: int
    new_replace: int
    old_remove: int
    new_remove: int


class Handover(CompiledPolicy):
    """The policy of a manager while it changes from `old` to `new`: `old` decides, and `new` learns.

    Both policies observe all traffic. The new policy first adopts the resident blocks that were not used
    since the change began. It adopts the other blocks last, because they are the most recent.

    Attributes:
        old, new: the policies.
    """

    name = ""

    def __init__(self, old: CompiledPolicy, new: CompiledPolicy) -> None:
        super().__init__(old.index)
        self.old, self.new, capacity = old, new, old.capacity_blocks
        self.name, self.refuses, self.write_cost = old.name, old.refuses, old.write_cost  # type: ignore[misc]
        removed = Used.over(used_blocks(np.zeros(_CHUNK, np.int32)))
        removed.count = 0
        self.state = State(taken=Taken(capacity), reused=np.full(capacity, False, np.bool_), removed=removed)
        self.bind()

    def bind(self) -> None:
        """Write the addresses of both policies' states and functions to the `State`.

        Call `bind` again when the state of a policy may have moved: after the policy's `reset`, and after
        unpickling.
        """
        for which, policy in (("old", self.old), ("new", self.new)):
            setattr(self.state, which, policy.state.address)
            for name in ("expect", "observe", "finished", "access", "replace", "remove"):
                if f"{which}_{name}" in State.fields:
                    setattr(self.state, f"{which}_{name}", policy.address_of(name))

    def reset(self) -> None:
        self.old.reset()
        self.new.reset()
        self.bind()
        self.state.taken.clear()

    def stats(self) -> dict[str, float]:
        return self.old.stats()

    def order(self) -> list[int] | None:
        return self.old.order()


@inline
def _forget(own: State, slot: int) -> None:
    """Record that a block has left the old policy's order; queue its removal from the new policy."""
    taken = own.taken
    if taken.where[slot] == NEW:
        own.removed.slots[own.removed.count] = slot
        own.removed.count += 1
    taken.where[slot] = LEFT
    if taken.recent.links[slot, LIST] != UNLISTED:
        unlink(taken.recent.links, slot)
    if own.removed.count == own.removed.slots.shape[0]:
        _remove_collected(own)


@inline
def _remove_collected(own: State) -> None:
    if own.removed.count > 0:
        call_2(own.new_remove, own.new, own.removed)
    own.removed.count = 0


@inline
def _note_use(own: State, slot: int, is_reused: bool) -> None:
    """Move a block to the head of the recent blocks."""
    links, sentinel = own.taken.recent.links, own.taken.recent.num_positions
    own.taken.stamps[slot] = own.num_calls
    if links[slot, LIST] == UNLISTED:
        push_head(links, sentinel, slot)
        own.reused[slot] = is_reused
    else:
        move_to_head(links, sentinel, slot)
        own.reused[slot] = own.reused[slot] or is_reused


@Handover.compiled
def expect(own: State, path: Path) -> None:
    if own.old_expect != 0:
        call_2(own.old_expect, own.old, path)
    if own.new_expect != 0:
        call_2(own.new_expect, own.new, path)


@Handover.compiled
def observe(own: State, path: Path) -> None:
    if own.old_observe != 0:
        call_2(own.old_observe, own.old, path)
    if own.new_observe != 0:
        call_2(own.new_observe, own.new, path)


@Handover.compiled
def finished(own: State, path: Path) -> None:
    if own.old_finished != 0:
        call_2(own.old_finished, own.old, path)
    if own.new_finished != 0:
        call_2(own.new_finished, own.new, path)


@Handover.compiled
def access(own: State, used: Used) -> None:
    call_2(own.old_access, own.old, used)
    own.num_calls += 1
    for i in range(used.count - 1, -1, -1):
        _note_use(own, used.slots[i], used.reused[i])


@Handover.compiled
def replace(own: State, new: Entering, cache: Cache, path: Path) -> None:
    call_4(own.old_replace, own.old, new, cache, path)
    capacity = own.taken.where.shape[0]
    for i in range(new.num_given, new.count):
        if 0 <= new.slots[i] < capacity:
            _forget(own, new.slots[i])
    _remove_collected(own)
    own.num_calls += 1
    for i in range(new.count - 1, -1, -1):
        if 0 <= new.slots[i] < capacity:
            own.taken.where[new.slots[i]] = LEFT
            _note_use(own, new.slots[i], False)


@Handover.compiled
def remove(own: State, used: Used) -> None:
    call_2(own.old_remove, own.old, used)
    for i in range(used.count):
        _forget(own, used.slots[i])
    _remove_collected(own)


@kernel
def _take_coldest(own: State, slots: I32Array, reused: BoolArray) -> int:
    """Remove the coldest blocks from the list of recent blocks, and write their slots to `slots`.

    Takes at most ``len(slots)`` blocks, and only blocks that one call of `access` or `replace` used or
    stored. Fills `slots` from the end, so that the coldest block is last. Returns the number of blocks.
    """
    links, sentinel, stamps = own.taken.recent.links, own.taken.recent.num_positions, own.taken.stamps
    count, room = 0, slots.shape[0]
    slot = links[sentinel, PREV]
    while count < room and slot != sentinel:
        if count > 0 and stamps[slot] != stamps[slots[room - 1]]:
            break
        warmer = links[slot, PREV]
        unlink(links, slot)
        count += 1
        slots[room - count], reused[room - count] = slot, own.reused[slot]
        slot = warmer
    return count


@kernel
def _adopt(own: State, slots: ReadI32Array, new: Entering, cache: Cache, path: Path) -> None:
    """Add the blocks in `slots` to the new policy, except recent blocks and blocks that it already has."""
    for i in range(slots.shape[0]):
        slot = slots[i]
        if is_left(own.taken, slot) and is_ordered(cache, slot):
            own.taken.where[slot] = NEW
            copy_key(new.keys, 0, cache.index.keys, slot)
            new.slots[0] = slot
            new.count = new.num_given = new.num_free = 1
            call_4(own.new_replace, own.new, new, cache, path)


class PolicyChange:
    """A new policy for a manager, and how many of the manager's blocks it has adopted.

    Created by `OffloadingManager.prepare_policy_change`, in any thread. The constructor compiles the new
    policy's kernels and allocates memory, which can take seconds.

    Attributes:
        spec: the new policy, as the caller specified it.
        old, new: the policies.
        handover: the manager's policy during the change. None if one of the policies is in Python, because
            then the new policy adopts all blocks as soon as the change begins.
        known: empty lists in which a victim tier will record used keys for the new policy (`returning`).
    """

    def __init__(
        self,
        spec: str | type[EvictionPolicy],
        old: EvictionPolicy,
        new: EvictionPolicy,
        follows_device: bool,
    ) -> None:
        self.spec, self.old, self.new = spec, old, new
        self.follows_device = follows_device
        self.handover = Handover(old, new) if _has_only_kernels(old) and _has_only_kernels(new) else None
        self.known: KeyLists = known_keys(new.index, follows_device and new.needs_returns())
        self._readers: list[Reader] = readers_of(old) if self.handover is not None else []
        self._num_calls = 0
        self._path = RequestContext("", new.index.key_bytes).memory
        compile_all()

    def bind(self) -> None:
        """Update the addresses that kernels call (`Handover.bind`), if both policies are compiled."""
        if self.handover is not None:
            self.handover.bind()

    def adopt_all(self, cache: Cache, ordered: SlotArray) -> None:
        """Add all blocks to the new policy at once. Used if one of the two policies is in Python.

        Args:
            ordered: slots of all blocks that the old policy orders, used if the policy's `order` returns
                None.
        """
        order = self.old.order()
        self._adopt(cache, ordered if order is None else np.array(order, np.int32))

    def advance(self, cache: Cache, num_blocks: int) -> bool:
        """Add about `num_blocks` blocks to the new policy, coldest first.

        Returns True if the new policy has all blocks.
        """
        assert self.handover is not None
        state = self.handover.state
        num_blocks = self._advance_readers(state.taken, cache, num_blocks)
        recent = state.taken.recent
        # Two groups for each call since the last `advance`, so that the change ends under any traffic.
        num_calls, self._num_calls = self._num_calls, state.num_calls
        num_groups = 0 if self._readers else 2 * (self._num_calls - num_calls)
        while not self._readers and recent.size(0) and (num_blocks > 0 or num_groups > 0):
            num_blocks -= self._give_recent(state, cache)
            num_groups -= 1
        return not self._readers and not recent.size(0)

    def _advance_readers(self, taken: Taken, cache: Cache, num_blocks: int) -> int:
        """Add blocks that no request has used since the change began; return the rest of the budget."""
        taken.allow(num_blocks)
        while num_blocks > 0 and taken.visits_left > 0 and self._readers:
            slots = self._readers[0].take(taken, cache, min(num_blocks, _CHUNK))
            if len(slots):
                self._adopt(cache, slots)
                num_blocks -= max(len(slots), _CALL_BLOCKS)
            if self._readers[0].is_done:
                del self._readers[0]
        return num_blocks

    def _adopt(self, cache: Cache, slots: SlotArray) -> None:
        """Add the blocks in `slots` to the new policy. The first block is the coldest.

        Calls `replace` for one block at a time, so that the new policy gets the blocks in this order.
        """
        new = Entering.over(blank_store(1, self.new.index.key_bytes))
        new.one_prefix, new.admitted = not self.follows_device, True
        if self.handover is not None:
            _adopt(self.handover.state.memory, slots, new.memory, cache.memory, self._path)
            return
        for slot in slots.tolist():
            new.keys[0], new.slots[0] = self.new.index.keys[slot], slot
            new.count = new.num_given = new.num_free = 1
            self.new.replace_in(new, cache.memory, self._path)

    def _give_recent(self, state: State, cache: Cache) -> int:
        """Add the blocks that `_take_coldest` returns to the new policy; return the cost, in blocks."""
        slots, reused = np.empty(_CHUNK, np.int32), np.empty(_CHUNK, np.bool_)
        count = _take_coldest(state.memory, slots, reused)
        slots, reused = slots[_CHUNK - count :], reused[_CHUNK - count :]
        self._adopt(cache, np.ascontiguousarray(slots[::-1]))
        self.new.access(slots, reused)
        return max(count, _CALL_BLOCKS)


def _has_only_kernels(policy: EvictionPolicy) -> TypeGuard[CompiledPolicy]:
    methods = ("expect", "observe", "finished")
    return (
        isinstance(policy, CompiledPolicy)
        and policy.is_compiled
        and all(getattr(type(policy), name) is getattr(EvictionPolicy, name) for name in methods)
    )
