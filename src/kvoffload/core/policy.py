"""What an eviction policy is.

A policy orders slots. It owns no bytes, no slots, no clock and no counters of pins; it may remember keys
of blocks that have gone. One instance serves one manager, on the manager's thread.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Annotated, ClassVar, TypeAlias

from kvoffload.core.protection import Protected
from kvoffload.core.slots import SlotArray
from kvoffload.plugins import Registry
from kvoffload.structures.index import Index
from kvoffload.structures.jit import BoolArray
from kvoffload.structures.keys import Keys

REFUSED = -1
"""What `EvictionPolicy.replace` writes in place of a victim: the new block may not enter."""


class EvictionPolicy(ABC):
    """Decides which blocks leave when others come: the batch contract that the manager calls.

    The manager asks only for what can be had: when `replace` is called, at least as many blocks may
    leave as must. So a policy has no way to fail and nothing to roll back, and a refusal, which the
    manager decides before, leaves no trace in it. What a policy names is checked all the same
    (`PolicyError`).

    Attributes:
        name: what users type.
        good_for: where it is worth trying, in a line.
        paper: where it was published.
        index: the manager's index; ``index.keys[slot]`` is the key of a resident block, readable in
            `replace` until it returns.
        capacity_blocks: number of slots.
        refuses: whether `replace` may refuse new blocks.
        write_cost: of a policy that weighs blocks: how much better than the block that would leave a new one
            must be to be worth its write, as a fraction. None: the policy's own choice.

    Every other public attribute with an annotation and a default, which is not a ``ClassVar``, is a parameter
    that users may set: ``s3fifo,small_share=0.2`` (see `Registry`).
    """

    name: ClassVar[str]
    refuses: ClassVar[bool] = False
    write_cost: float | None = None
    good_for: ClassVar[str] = ""
    paper: ClassVar[str] = ""

    def __init__(self, index: Index) -> None:
        self.index = index
        self.capacity_blocks = len(index.keys)

    @abstractmethod
    def access(self, slots: SlotArray, reused: BoolArray) -> None:
        """One request used these resident blocks, in prefix order.

        A policy for which order matters goes from the last to the first, so that the head of a prefix
        ends as the most recent block and a prefix is lost from its tail.

        Args:
            slots: shape ``(n,)``, int32.
            reused: shape ``(n,)``, bool. True where this is the request's one access of the block. False
                where the request had accessed it before, or stored it itself: the block takes its place
                in the order, and counts for nothing else.
        """

    @abstractmethod
    def replace(self, keys: Keys, slots: SlotArray, num_free: int, protected: Protected) -> None:
        """Take in the absent blocks `keys`, in prefix order; name who leaves for them.

        The first `num_free` entries of `slots` are free slots. The policy fills the others with its
        victims, in the order in which they leave: ``keys[i]`` enters ``slots[i]``. It drops the victims
        from its order and adds the new blocks; where recency matters, their head is the most recent.

        A policy whose `refuses` is True may write `REFUSED` in place of a victim: the block is not
        worth who would leave for it. Of one request's prefix (`protected.one_prefix`) it then refuses
        all that follows as well, which could not be reached. It refuses nothing that is
        `protected.admitted`.

        Args:
            keys: keys of the new blocks, all different, none of them in the policy's order.
            slots: shape ``(len(keys),)``, int32; in and out.
            num_free: how many slots are free; 0 to ``len(keys)``.
            protected: slots that may not be named. Free slots count as protected.
        """

    @abstractmethod
    def remove(self, slots: SlotArray) -> None:
        """These blocks have gone without being chosen: a store failed, a block was damaged, or, in a
        victim tier, the device holds it again."""

    def observe(self, path: Keys, slots: SlotArray, start: int) -> None:  # noqa: B027  (most have no use for it)
        """A request refers to these blocks, wherever they are: for policies that learn from all traffic.

        Told once a request, before its first `access` or `replace`; again when the request has grown.

        Args:
            path: the request's keys so far, in prefix order.
            slots: shape ``(len(path) - start,)``, int32; where the blocks from `start` on are, or -1.
            start: how many blocks of the path were told before.
        """

    @abstractmethod
    def reset(self) -> None:
        """Forget everything, adaptive state and ghosts included."""

    def stats(self) -> dict[str, float]:
        """State worth showing to people (sizes of lists, adaptive targets)."""
        return {}

    def order(self) -> list[int] | None:
        """The slot of every block that the policy knows, each once, roughly the coldest first.

        For audits, tests and reports. None: the policy does not tell. Cost: O(blocks).
        """
        return None


class BlockwisePolicy(EvictionPolicy):
    """A policy written one block at a time, in plain Python: the short way, for research.

    Implement `hit`, `insert`, `victim` and `forget`, and `refresh` if recency matters; the batches are
    loops over them. Slower than kernels by one to two orders of magnitude, and otherwise equal.
    """

    @abstractmethod
    def hit(self, slot: int) -> None:
        """The block in `slot` was used. Called from the tail of a request to its head."""

    def refresh(self, slot: int) -> None:
        """The block in `slot` takes its place in the order of its request's path; no second use.

        Called for the blocks of a path from the last to the first: when they have been inserted, and when
        their request finishes.
        """

    @abstractmethod
    def insert(self, slot: int, key: bytes) -> None:
        """A new block is in `slot`."""

    @abstractmethod
    def victim(self, key: bytes, protected: Protected) -> int:
        """Choose the block that leaves for `key`, drop it and return its slot.

        ``slot in protected`` tells who may not leave; someone else always may.
        """

    @abstractmethod
    def forget(self, slot: int) -> None:
        """The block in `slot` has gone without being chosen."""

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


POLICIES: Registry[EvictionPolicy] = Registry("policy", EvictionPolicy, "kvoffload.policies")

PolicyName: TypeAlias = Annotated[str, POLICIES]
"""What users type for a policy."""

DEFAULT_POLICY = "lru"
"""What is used if the user says nothing."""

FLAGSHIP = "hazard"
"""What we would use ourselves."""
