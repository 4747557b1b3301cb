"""What an eviction policy is.

A policy orders slots. It owns no bytes, no slots, no clock and no pins; it may remember keys of blocks that
have left. One instance serves one manager, on the manager's thread.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, TypeAlias, TypeVar

from kvoffload.core.hints import Hints
from kvoffload.core.protection import Protected
from kvoffload.core.request import Path, Used, used_blocks
from kvoffload.core.slots import SlotArray
from kvoffload.core.state import REFUSED as REFUSED
from kvoffload.core.state import Cache, Entering, entering
from kvoffload.settings.registry import Registry
from kvoffload.structures.index import Index
from kvoffload.structures.jit import BoolArray, Kernel, by_address, kernel
from kvoffload.structures.keys import Keys
from kvoffload.structures.structs import Anything, call_2, call_4

F = TypeVar("F", bound=Callable[..., Any])


class EvictionPolicy(ABC):
    """Decides which blocks leave when others enter: the batch contract that the manager calls.

    The manager calls `replace` only when it can succeed: at least as many blocks may leave as must. So a
    policy cannot fail and has nothing to roll back; when there is no room the manager does not call it, and
    its state stays as it was. The manager still checks every victim that a policy names (`PolicyError`).

    Attributes:
        name: what users type.
        good_for: where it is worth trying, in one line.
        paper: where it was published.
        index: the manager's index; ``index.keys[slot]`` is the key of a resident block, readable in
            `replace` until it returns.
        capacity_blocks: number of slots.
        refuses: whether `replace` may refuse new blocks.
        counts_uses: whether `reused` makes a difference to it. If not, a victim tier saves itself the work.
        write_cost: for a policy that weighs blocks: by which fraction a new block must be worth more than the
            block that would leave, to be worth its write. None: the policy's own choice.

    Every other public attribute that has an annotation and a default and is not a ``ClassVar`` is a parameter
    that users may set: ``s3fifo,small_share=0.2`` (see `Registry`).
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
        """One request used these resident blocks, in prefix order.

        A policy that orders by recency goes from the last to the first, so that the head of a prefix ends as
        the most recent block and a prefix is lost from its tail.

        In a victim tier no use is told when it happens: the device then holds the block. It is told here when
        the device has dropped blocks and `replace` has taken them in: all blocks of the offer, in its order,
        and `reused` is True for those that *return*, which were used again while they were not in the order.
        Not to a policy that `observes`, which knows, nor to one to which uses do not count.

        Args:
            slots: shape ``(n,)``, int32.
            reused: shape ``(n,)``, bool. True where this is the request's one access of the block. False
                where the request accessed it before, or stored it itself: the block takes its place in the
                order, and nothing is counted.
        """

    @abstractmethod
    def replace(self, keys: Keys, slots: SlotArray, num_free: int, protected: Protected) -> None:
        """Take in the absent blocks `keys`, in prefix order; name the victims that leave for them.

        The first `num_free` entries of `slots` are free slots. The policy fills the others with its
        victims, in the order in which they leave: ``keys[i]`` enters ``slots[i]``. It removes the victims
        from its order and adds the new blocks; if it orders by recency, their head is the most recent.

        A policy whose `refuses` is True may write `REFUSED` in place of a victim: the new block is worth
        less than the one that would leave for it. Of one request's prefix (`protected.one_prefix`) it then
        also refuses all following blocks, because they could not be reached. It refuses nothing if
        `protected.admitted`.

        Args:
            keys: keys of the new blocks, all different, none of them in the policy's order.
            slots: shape ``(len(keys),)``, int32; in and out.
            num_free: number of free slots; 0 to ``len(keys)``.
            protected: slots that may not be named as victims. Free slots count as protected.
        """

    def replace_in(self, new: Entering, cache: Any, path: Any) -> None:
        """`replace`, for the blocks of a store and with the manager's memory: what a manager calls."""
        keys = Keys(new.keys[: new.count], self.index.key_bytes)
        protected = Protected(cache, path, one_prefix=bool(new.one_prefix), admitted=bool(new.admitted))
        self.replace(keys, new.slots[: new.count], new.num_given, protected)

    @abstractmethod
    def remove(self, slots: SlotArray) -> None:
        """These blocks left without being chosen as victims: a store failed, a block was damaged, or, in a
        victim tier, the device holds the block again."""

    def expect(self, path: Keys, start: int) -> None:  # noqa: B027  (most ignore it)
        """A request that waits in the engine's queue will refer to these blocks, resident or not: for
        policies that learn when blocks are used. Until it is served others leave before them, and they are
        not refused.

        Called once for each block of a request, before `observe`. The request may never be served.

        Args:
            path: the head of the request's keys, as far as it is expected.
            start: number of blocks of the path in earlier calls.
        """

    def observe(  # noqa: B027  (most ignore it)
        self, path: Keys, slots: SlotArray, start: int, on_device: int
    ) -> None:
        """A request refers to these blocks, resident or not: for policies that learn from all traffic.

        Called once a request, before its first `access` or `replace`, and again when the request has grown.

        Args:
            path: the request's keys so far, in prefix order.
            slots: shape ``(len(path) - start,)``, int32; the slot of each block from `start` on, or -1.
            start: number of blocks of the path in earlier calls.
            on_device: number of blocks at the head of the path that the device has: this tier is not asked
                for them, as far as lookups tell.
        """

    def finished(self, path: Keys, slots: SlotArray, hints: Hints) -> None:  # noqa: B027  (most ignore it)
        """A request has ended, and this is what the engine knows of it: for policies that learn what such
        labels are worth, or count ages from the end of a request.

        Called once a request, after its last `access`.

        Args:
            path: the request's keys, in prefix order.
            slots: shape ``(len(path),)``, int32; the slot of each, or -1.
            hints: never to be obeyed blindly: they may be wrong, or lies.
        """

    @classmethod
    def observes(cls) -> bool:
        """Whether it learns from all traffic, and so knows blocks also while it does not order them."""
        return cls.observe is not EvictionPolicy.observe

    @classmethod
    def is_told_of_returns(cls) -> bool:
        """Whether a victim tier tells it which blocks return (see `access`)."""
        return cls.counts_uses and not cls.observes()

    @abstractmethod
    def reset(self) -> None:
        """Forget everything, including adaptive state and ghosts."""

    def stats(self) -> dict[str, float]:
        """State worth showing to people (sizes of lists, adaptive targets)."""
        return {}

    def order(self) -> list[int] | None:
        """The slot of every block that the policy knows, each once, roughly from the coldest to the warmest.

        For audits, tests and reports. None: the policy has no such order. Cost: O(blocks).
        """
        return None


class BlockwisePolicy(EvictionPolicy):
    """A policy written one block at a time, in plain Python: the short way, for research.

    Implement `hit`, `insert`, `victim` and `forget`, and `refresh` if recency matters; the batch methods loop
    over them. One to two orders of magnitude slower than kernels, otherwise equal.
    """

    @abstractmethod
    def hit(self, slot: int) -> None:
        """The block in `slot` was used. Called from the tail of a request to its head."""

    def refresh(self, slot: int) -> None:
        """The block in `slot` takes its place in the order of its request's path; not a second use.

        Called for the blocks of a path from the last to the first: after they have been inserted, and when
        their request finishes.
        """

    @abstractmethod
    def insert(self, slot: int, key: bytes) -> None:
        """A new block is in `slot`."""

    @abstractmethod
    def victim(self, key: bytes, protected: Protected) -> int:
        """Choose the block that leaves for `key`, remove it from the order and return its slot.

        ``slot in protected`` is True for blocks that may not leave; at least one other block may.
        """

    @abstractmethod
    def forget(self, slot: int) -> None:
        """The block in `slot` left without being chosen as a victim."""

    def access(self, slots: SlotArray, reused: BoolArray) -> None:
        for slot, is_reuse in zip(reversed(slots.tolist()), reversed(reused.tolist()), strict=True):
            if is_reuse:
                self.hit(slot)
            else:
                self.refresh(slot)

    def replace(self, keys: Keys, slots: SlotArray, num_free: int, protected: Protected) -> None:
        for row, key in enumerate(keys):
            if row >= num_free:
                slots[row] = self.victim(key, protected)
            slot = int(slots[row])
            protected.entering.add(slot)
            self.insert(slot, key)
        for slot in reversed(slots.tolist()):
            self.refresh(slot)

    def remove(self, slots: SlotArray) -> None:
        for slot in slots.tolist():
            self.forget(slot)


class CompiledPolicy(EvictionPolicy):
    """A policy whose work is done by compiled functions, which the manager's kernels call by address.

    The functions are given with ``@MyPolicy.compiled``, and are called as the methods of the same names::

        expect(own: State, path: Path)  # if it learns from requests that wait
        observe(own: State, path: Path)  # if it learns from all traffic
        finished(own: State, path: Path)  # if it learns from how requests end
        access(own: State, used: Used)
        replace(own: State, new: Entering, cache: Cache, path: Path)
        remove(own: State, used: Used)

    `State` is a `Struct` of the policy's own, the class of its `state`. `expect` finds the blocks from
    ``path.foreseen`` to ``path.num_expected`` new. `observe` finds the blocks that are
    new to it on the path, from ``path.observed`` on, and their slots in ``path.found``; `finished` the whole
    path, and what is known of the request as a number, ``path.label``. `replace` asks
    `state.evictable` which blocks may leave. A function that does what another policy's does is inherited
    with the class.

    Attributes:
        state: what the functions work on. It is made in the constructor; `reset` clears it in place, or makes
            a new one.
        functions: by name.
    """

    state: Any
    functions: ClassVar[dict[str, Kernel]] = {}

    @classmethod
    def compiled(cls, function: F) -> F:
        """Compile one of the functions of this class."""
        cls.functions = {**cls.functions, function.__name__: by_address(function)}
        return function

    @property
    def is_compiled(self) -> bool:
        """Whether no subclass has written one of these methods in Python again: then it is called."""
        mine, methods = type(self), ("access", "replace", "remove")
        return all(getattr(mine, name) is getattr(CompiledPolicy, name) for name in methods)

    @classmethod
    def address_of(cls, name: str) -> int:
        """Where a function is; 0 if there is none."""
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
"""What users type for a policy."""

DEFAULT_POLICY = "lru"
"""The policy if the user names none."""

FLAGSHIP = "hazard"
"""The policy that we recommend."""
