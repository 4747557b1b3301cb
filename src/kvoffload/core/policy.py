"""The interface of an eviction policy.

A policy keeps slots in the order in which their blocks should be evicted. It owns no bytes, slots, clock or
pins. It may remember keys of evicted blocks. One instance serves one manager, on the manager's thread.
"""

from __future__ import annotations

import contextlib
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Annotated, Any, ClassVar, TypeAlias, TypeVar

from kvoffload.core.hints import Hints
from kvoffload.core.protection import Protected
from kvoffload.core.request import Path, Used, used_blocks
from kvoffload.core.slots import SlotArray
from kvoffload.core.state import REFUSED as REFUSED
from kvoffload.core.state import Cache, Entering, entering
from kvoffload.errors import PolicyError
from kvoffload.settings.registry import Registry
from kvoffload.structures.heap import Heap
from kvoffload.structures.index import Index
from kvoffload.structures.jit import BoolArray, Kernel, by_address, kernel
from kvoffload.structures.keys import Keys
from kvoffload.structures.lists import Lists
from kvoffload.structures.structs import Anything, call_2, call_4

F = TypeVar("F", bound=Callable[..., Any])


class EvictionPolicy(ABC):
    """Base class of the policies that choose a manager's victims. Methods take batches of blocks.

    The manager calls `replace` only if enough blocks are evictable. So `replace` always succeeds, and a
    policy never has to undo a change. The manager checks every victim and raises `PolicyError` for an invalid
    one.

    Attributes:
        name: the name in options.
        good_for: the workloads that profit, in one line.
        paper: the publication.
        index: the manager's index; ``index.keys[slot]`` is the key of a resident block. A victim's key is
            readable until `replace` returns.
        capacity_blocks: number of slots.
        refuses: True if `replace` may refuse new blocks.
        counts_uses: True if the policy reads the argument `reused` of `access`. If False, a victim tier does
            not track uses.
        write_cost: a factor, for policies that refuse blocks: the policy refuses a new block unless the block
            is worth at least ``1 + write_cost`` times as much as its victim. None: the policy's default.

    Every other public attribute with an annotation and a default, except a ``ClassVar``, is a parameter that
    users can set: ``s3fifo,small_share=0.2`` (see `Registry`).
    """

    name: ClassVar[str]
    refuses: ClassVar[bool] = False
    counts_uses: ClassVar[bool] = True
    write_cost: float | None = None
    good_for: ClassVar[str] = ""
    paper: ClassVar[str] = ""

    def __init__(self, index: Index) -> None:
        self.index = index
        self.capacity_blocks = len(index.keys)

    @abstractmethod
    def access(self, slots: SlotArray, reused: BoolArray) -> None:
        """Record that one request used these resident blocks, in prefix order.

        A policy that orders by recency must process the blocks from last to first. Then the first block of a
        prefix is the most recent, and the last block is evicted first.

        A victim tier calls `access` after `replace`, with the blocks that the device has just dropped and
        that are now in RAM. Here `reused` is True for blocks that were used again while the device held them.
        It is False for all blocks if the policy observes all traffic, or if `counts_uses` is False. If no
        block was reused, and the blocks were either all just stored or all in RAM already, the tier omits the
        call.

        Args:
            slots: shape ``(n,)``, int32.
            reused: shape ``(n,)``, bool. True for the request's first access of the block. False if the
                request has accessed or stored the block before; then the policy should reorder the block, but
                count no use.
        """

    @abstractmethod
    def replace(self, keys: Keys, slots: SlotArray, num_free: int, protected: Protected) -> None:
        """Insert the absent blocks `keys`, in prefix order, and choose the victims that make room for them.

        The first `num_free` entries of `slots` are free slots. The policy writes the slots of its victims to
        the other entries, in order of eviction. Then the block ``keys[i]`` enters ``slots[i]``. The policy
        removes the victims from its order and adds the new blocks. If it orders by recency, the head of the
        prefix becomes the most recent block.

        If the policy's attribute `refuses` is True, it may refuse a new block that is worth less than its
        victim: it writes `REFUSED` in place of the victim's slot. If `protected.one_prefix` is True and the
        policy refuses a block, it must also refuse all later blocks, because no request could reach them. If
        `protected.admitted` is True, the policy must not refuse any block.

        Args:
            keys: keys of the new blocks. All are different, and none is in the policy's order.
            slots: shape ``(len(keys),)``, int32; read and written.
            num_free: number of free slots, 0 to ``len(keys)``.
            protected: slots that cannot be victims. Free slots count as protected.
        """

    def replace_in(self, new: Entering, cache: Any, path: Any) -> None:
        """Choose the victims of a store. The manager calls this method, which by default calls `replace`."""
        keys = Keys(new.keys[: new.count], self.index.key_bytes)
        protected = Protected(cache, path, one_prefix=bool(new.one_prefix), admitted=bool(new.admitted))
        self.replace(keys, new.slots[: new.count], new.num_given, protected)

    @abstractmethod
    def remove(self, slots: SlotArray) -> None:
        """Forget blocks that left the cache although the policy did not choose them as victims.

        Called after a failed store and for damaged blocks. In a victim tier, also called when the device
        holds a block again.
        """

    def expect(self, path: Keys, start: int) -> None:  # noqa: B027  (most ignore it)
        """Record that a request in the engine's queue will use these blocks, resident or not.

        Optional, for policies that learn when blocks are used. The policy need not protect the blocks,
        because the manager evicts expected blocks last. A policy that refuses blocks should not refuse
        expected blocks.

        The manager calls `expect` before the request's first `observe`, and again if the request has grown
        and waits again after a preemption. Each block of a request is reported once. If the request is
        aborted in the queue, it does not use its blocks.

        Args:
            path: the first keys of the request, in prefix order.
            start: number of leading keys of `path` that earlier calls reported. This call reports the keys
                from `start` on.
        """

    def observe(  # noqa: B027  (most ignore it)
        self, path: Keys, slots: SlotArray, start: int, on_device: int
    ) -> None:
        """Record that a request refers to these blocks, resident or not.

        Optional, for policies that learn from all traffic. Called before the request's first `access` or
        `replace`, and again when the request has grown.

        Args:
            path: the request's keys so far, in prefix order.
            slots: shape ``(len(path) - start,)``, int32; the slot of each block from `start` on, or -1.
            start: number of leading blocks of the path that earlier calls reported.
            on_device: number of leading blocks that the device holds. They were not looked up in this tier.
        """

    def finished(self, path: Keys, slots: SlotArray, hints: Hints) -> None:  # noqa: B027  (most ignore it)
        """Record the end of a request, with its hints.

        Optional, for policies that learn how useful hints are, or that measure the age of a block from the
        end of a request. Called once for each request, after its last `access`.

        Args:
            path: the request's keys, in prefix order.
            slots: shape ``(len(path),)``, int32; the slot of each block, or -1.
            hints: labels from the engine, which may be wrong.
        """

    def resized(self, usable_blocks: int) -> None:  # noqa: B027  (most ignore it)
        """Record that the manager now uses `usable_blocks` slots, at most `capacity_blocks`.

        Optional, for policies that compare the cache with other caches of the same size. Called on each step
        of a resize, and for a new policy when the change to this policy begins.
        """

    @classmethod
    def observes(cls) -> bool:
        """Return True if the policy observes all traffic, including blocks outside its order."""
        return cls.observe is not EvictionPolicy.observe

    @classmethod
    def needs_returns(cls) -> bool:
        """Return True if a victim tier must record uses of blocks that the device holds, for `access`."""
        return cls.counts_uses and not cls.observes()

    @abstractmethod
    def reset(self) -> None:
        """Forget everything: the order, learned parameters, and the keys of evicted blocks (ghosts)."""

    def stats(self) -> dict[str, float]:
        """Return statistics for reports by name, for example sizes of lists and learned target sizes."""
        return {}

    def order(self) -> list[int] | None:
        """Return the slots of all ordered blocks, roughly from coldest to warmest.

        The default implementation builds the order from `ordered_lists` or `ordered_heap`. It returns None if
        the policy implements neither. Used by audits, tests and reports. Cost: O(blocks).
        """
        if (listed := self.ordered_lists()) is not None:
            lists, numbers = listed
            used = (number for number in numbers if lists.size(number))
            return [slot for number in used for slot in reversed(lists.members(number))]
        heap = self.ordered_heap()
        return None if heap is None else heap.members()

    def ordered_lists(self) -> tuple[Lists, Sequence[int]] | None:
        """Return the policy's lists, and their numbers in eviction order (coldest first); None without lists.

        A policy that keeps its order in lists implements this method. Then a change to another policy reads
        the order in small steps, instead of all at once with `order`, which costs O(blocks).
        """
        return None

    def ordered_heap(self) -> Heap | None:
        """Return the heap that holds the policy's order, or None if the order is not in a heap.

        The rank of a block may change only when the block is used.
        """
        return None


class BlockwisePolicy(EvictionPolicy):
    """Base class for policies in plain Python that handle one block at a time, for research.

    Implement `hit`, `insert`, `victim` and `forget`, and also `refresh` if the order depends on recency. The
    methods for batches call these methods in a loop. A policy in Python takes 10 to 100 times the CPU time of
    a compiled policy. Otherwise the two kinds of policies are equivalent.
    """

    @abstractmethod
    def hit(self, slot: int) -> None:
        """Record a use of the block in `slot`.

        Called for the blocks of a request from the last to the first.
        """

    def refresh(self, slot: int) -> None:
        """Treat the block in `slot` as most recently used, but count no use.

        Called after a request has stored the block, and when the request accesses the block again. The blocks
        of a request are refreshed from last to first, so that the first block becomes the most recent.
        """

    @abstractmethod
    def insert(self, slot: int, key: bytes) -> None:
        """Add the new block in `slot` to the order."""

    @abstractmethod
    def victim(self, key: bytes, protected: Protected) -> int:
        """Choose the block to evict for the new block `key`; remove it from the order and return its slot.

        ``slot in protected`` is True if the block in `slot` cannot be evicted. At least one block can be
        evicted.
        """

    @abstractmethod
    def forget(self, slot: int) -> None:
        """Remove the block in `slot` from the order.

        Called if the block has left the cache although the policy did not choose it as a victim.
        """

    def access(self, slots: SlotArray, reused: BoolArray) -> None:
        for slot, is_reuse in zip(reversed(slots.tolist()), reversed(reused.tolist()), strict=True):
            if is_reuse:
                self.hit(slot)
            else:
                self.refresh(slot)

    def replace(self, keys: Keys, slots: SlotArray, num_free: int, protected: Protected) -> None:
        for row, key in enumerate(keys):
            if row >= num_free:
                slots[row] = self._victim(key, protected)
            slot = int(slots[row])
            protected.entering.add(slot)
            self.insert(slot, key)
        for slot in reversed(slots.tolist()):
            self.refresh(slot)

    def _victim(self, key: bytes, protected: Protected) -> int:
        slot = self.victim(key, protected)
        with contextlib.suppress(TypeError):  # no integer
            if REFUSED <= operator.index(slot) < self.capacity_blocks:
                return operator.index(slot)
        raise PolicyError(
            f"policy {self.name!r}: victim returned {slot!r} for key {key.hex()}; allowed: the number of a "
            f"slot, 0 to {self.capacity_blocks - 1}"
        )

    def remove(self, slots: SlotArray) -> None:
        for slot in slots.tolist():
            self.forget(slot)


class CompiledPolicy(EvictionPolicy):
    """Base class for policies whose compiled functions the manager's kernels call by address.

    The decorator ``@MyPolicy.compiled`` registers a function. Each function does the work of the
    `EvictionPolicy` method with its name. The first three are optional::

        expect(own: State, path: Path)  # if the policy learns from waiting requests
        observe(own: State, path: Path)  # if the policy learns from all traffic
        finished(own: State, path: Path)  # if the policy learns from the end of requests
        access(own: State, used: Used)
        replace(own: State, new: Entering, cache: Cache, path: Path)
        remove(own: State, used: Used)

    `State` is the class of the policy's `state`, a `Struct`. The first three functions receive the path of a
    request, and should process the blocks at these positions of the path:

    - `expect`: from ``path.foreseen`` to ``path.num_expected - 1``
    - `observe`: from ``path.observed`` on; ``path.found`` has the slots of the blocks
    - `finished`: the whole path; ``path.found`` has the slots, and ``path.label`` is the number that `Labels`
      assigned to the request's hints, or 0

    In `replace`, call `state.evictable` to find evictable blocks. Subclasses inherit the functions.

    Attributes:
        state: the argument `own` of the functions, created in the constructor. `reset` clears or replaces it.
        functions: the registered functions by name.
    """

    state: Any
    functions: ClassVar[dict[str, Kernel]] = {}

    @classmethod
    def compiled(cls, function: F) -> F:
        """Register a function of this class for compilation. Used as a decorator."""
        cls.functions = {**cls.functions, function.__name__: by_address(function)}
        return function

    @property
    def is_compiled(self) -> bool:
        """True unless a subclass overrides `access`, `replace` or `remove` in Python."""
        methods = ("access", "replace", "remove")
        return all(getattr(type(self), name) is getattr(CompiledPolicy, name) for name in methods)

    @classmethod
    def address_of(cls, name: str) -> int:
        """Return the address of the compiled function `name`, or 0 if the policy has no such function."""
        return cls.functions[name].address if name in cls.functions else 0

    @classmethod
    def observes(cls) -> bool:
        return super().observes() or cls.address_of("observe") != 0

    def access(self, slots: SlotArray, reused: BoolArray) -> None:
        _call_used(self.address_of("access"), self.state.memory, used_blocks(slots, reused))

    def replace(self, keys: Keys, slots: SlotArray, num_free: int, protected: Protected) -> None:
        new = entering(keys, slots, num_free)
        new.one_prefix, new.admitted = protected.one_prefix, protected.admitted
        CompiledPolicy._replace_in(self, new, protected.cache, protected.path)
        slots[:] = new.slots[: len(slots)]

    def replace_in(self, new: Entering, cache: Any, path: Any) -> None:
        if self.is_compiled:
            self._replace_in(new, cache, path)
        else:
            super().replace_in(new, cache, path)

    def _replace_in(self, new: Entering, cache: Any, path: Any) -> None:
        _call_replace(self.address_of("replace"), self.state.memory, new.memory, cache, path)

    def remove(self, slots: SlotArray) -> None:
        _call_used(self.address_of("remove"), self.state.memory, used_blocks(slots))


@kernel
def _call_used(function: int, own: Anything, used: Used) -> None:
    call_2(function, own, used)


@kernel
def _call_replace(function: int, own: Anything, new: Entering, cache: Cache, path: Path) -> None:
    call_4(function, own, new, cache, path)


POLICIES: Registry[EvictionPolicy] = Registry("policy", EvictionPolicy, "kvoffload.policies")

PolicyName: TypeAlias = Annotated[str, POLICIES]
"""Type of an option whose value is the name of a policy."""

DEFAULT_POLICY = "lru"
FLAGSHIP = "hazard"
"""The recommended policy."""
