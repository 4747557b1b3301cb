"""Types of the manager's return values: lookup results, plans, events and statistics."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvoffload.core.request import RequestContext
from kvoffload.core.slots import SlotArray, Slots
from kvoffload.core.state import Cache, Entering, Pinned, blank_load, blank_store
from kvoffload.core.tenants import TenantStats
from kvoffload.errors import MisuseError
from kvoffload.structures.keys import Keys

Rows: TypeAlias = npt.NDArray[np.integer]

StoreName: TypeAlias = Literal["on-compute", "on-device-eviction"]
ON_COMPUTE: Final = "on-compute"
ON_DEVICE_EVICTION: Final = "on-device-eviction"
STORES = (ON_COMPUTE, ON_DEVICE_EVICTION)
"""Store modes. `ON_COMPUTE`: the engine offers blocks as soon as they are computed. `ON_DEVICE_EVICTION`: the
engine offers blocks when the device drops them."""


class LookupResult(Enum):
    """The state of one block. The members have the same names as in vLLM."""

    MISS = auto()
    """The block is absent: compute it."""
    HIT = auto()
    """The block is ready. `prepare_load` succeeds in this step."""
    HIT_PENDING = auto()
    """Another request is storing the block. Look it up again in the next step, or compute it."""
    RETRY = auto()
    """The block is being promoted from another tier. Look it up again in the next step."""


class PrefixLookup(NamedTuple):
    """The number of ready blocks before the first block that is not ready, and the state of that block.

    If all blocks are ready, the state is `HIT`.
    """

    num_ready: int
    stopped_by: LookupResult


ALL_READY, THEN_MISS = (
    tuple(PrefixLookup(count, result) for count in range(65))
    for result in (LookupResult.HIT, LookupResult.MISS)
)
"""Prepared results of `lookup`; the index is the number of ready blocks, 0 to 64. Use `ALL_READY` if all
blocks are ready, and `THEN_MISS` if the next block is absent. Created in advance, because creating a
result takes as long as a lookup."""


class _Plan:
    __slots__ = ("completed", "epoch", "memory", "request")

    def __init__(self, request: RequestContext, memory: Any, epoch: int) -> None:
        self.request, self.memory, self.epoch = request, memory, epoch
        self.completed = False

    @property
    def request_id(self) -> str:
        """Id of the plan's request; empty if the plan belongs to no request."""
        return self.request.request_id


def complete(plan: LoadPlan | StorePlan, call: str) -> None:
    """Mark a plan as completed. Raises `MisuseError` if it is completed already; the message names `call`."""
    if plan.completed:
        raise misuse(plan, call, "is completed")
    plan.completed = True


def _rows_of_parts(plan: LoadPlan | StorePlan, parts: Iterable[Rows] | None) -> Iterable[Rows]:
    """Mark a plan as completed, because parts replace it; return the rows of each part.

    Without `parts`, each block becomes a part.
    """
    complete(plan, "split")
    return np.arange(len(plan))[:, np.newaxis] if parts is None else parts


def misuse(plan: LoadPlan | StorePlan, call: str, reason: str) -> MisuseError:
    """Create the error of a `call` that is not allowed for this plan; `reason` ends its message."""
    key = plan.keys[0].hex() if len(plan) else "none"
    return MisuseError(f"{call} of a plan that {reason}: request {plan.request_id!r}, key {key}")


class LoadPlan(_Plan):
    """Pinned blocks to load: ``slots[i]`` holds the block ``keys[i]`` until `complete_load`.

    The plan refers to the caller's list of keys. The caller may append to the list, but must not change its
    elements.

    Attributes:
        request: the request of the load.
        memory: a `Pinned`, for the manager's kernels.
        completed: True once the plan was completed or split.
    """

    __slots__ = ("_offered",)

    def __init__(self, request: RequestContext, offered: Sequence[bytes], memory: Any, epoch: int) -> None:
        super().__init__(request, memory, epoch)
        self._offered = offered

    def __len__(self) -> int:
        return _number(self.memory, _NUM_PINNED)

    @property
    def keys(self) -> Keys:
        if not isinstance(self._offered, Keys):
            return Keys.pack(self._offered[: len(self)], self.request.key_bytes)
        return self._offered

    @property
    def slots(self) -> SlotArray:
        """Slot of each key: shape ``(len(keys),)``, int32. A view."""
        return Pinned.array(self.memory, "slots", len(self))

    def split(self, parts: Iterable[Rows] | None = None) -> list[LoadPlan]:
        """Replace this plan by several plans, one for each element of `parts`.

        Args:
            parts: for each new plan an array with the rows of its blocks in this plan. None: each block
                becomes a plan.

        Raises: `MisuseError` for a plan that was completed or split.
        """
        return [self._part(rows) for rows in _rows_of_parts(self, parts)]

    def _part(self, rows: Rows) -> LoadPlan:
        offered = self._offered = self.keys  # packed once for all parts
        slots = self.slots[rows]
        memory = blank_load(len(slots))
        pinned = Pinned.over(memory)
        pinned.slots[: len(slots)], pinned.count = slots, len(slots)
        pinned.number = -abs(Pinned.over(self.memory).number)
        return LoadPlan(self.request, offered.take(rows), memory, self.epoch)


class StorePlan(_Plan):
    """Blocks to store: copy ``keys[i]`` into ``slots[i]``, then call `complete_store`.

    Attributes that are arrays or keys are views of `memory`; each access creates a new view.

    Attributes:
        request: the request of the store.
        memory: an `Entering`, for the manager's kernels.
        completed: True once the plan was completed or split.
    """

    __slots__ = ("num_stored",)

    def __init__(self, request: RequestContext, memory: Any, num_stored: int, epoch: int) -> None:
        super().__init__(request, memory, epoch)
        self.num_stored = num_stored

    def __len__(self) -> int:
        return self.num_stored

    @property
    def keys(self) -> Keys:
        """Keys of the blocks to store, in the order in which they were offered. May be empty."""
        return Keys(Entering.array(self.memory, "keys", self.num_stored), self.request.key_bytes)

    @property
    def slots(self) -> SlotArray:
        """Slot of each key: shape ``(len(keys),)``, int32.

        The last ``len(evicted)`` of these slots held the evicted blocks before the store, in the order of
        `evicted`.
        """
        return Entering.array(self.memory, "slots", self.num_stored)

    @property
    def missing_rows(self) -> npt.NDArray[np.int32]:
        """Positions, in the offered batch, of the blocks that were absent from the cache: int32.

        First the blocks to store, then the dropped blocks, for which there was no room, then the refused
        blocks.
        """
        return Entering.array(self.memory, "rows", _number(self.memory, _NUM_MISSING))

    @property
    def rows(self) -> npt.NDArray[np.int32]:
        """Position of each key in the offered batch: shape ``(len(keys),)``, int32."""
        return Entering.array(self.memory, "rows", self.num_stored)

    @property
    def evicted(self) -> Keys:
        """Keys of the evicted blocks, which can no longer be read: this plan's blocks reuse their slots."""
        return Keys(Entering.array(self.memory, "evicted", self.num_evicted), self.request.key_bytes)

    @property
    def num_evicted(self) -> int:
        return self.num_stored - _number(self.memory, _NUM_FREE)

    @property
    def num_dropped(self) -> int:
        """Number of offered keys that were admitted but had no room."""
        return _number(self.memory, _NUM_DROPPED)

    @property
    def num_refused(self) -> int:
        """Number of offered keys that the admission rule or the policy refused."""
        return _number(self.memory, _NUM_REFUSED)

    def split(self, parts: Iterable[Rows] | None = None) -> list[StorePlan]:
        """Replace this plan by several plans, one for each element of `parts` (see `LoadPlan.split`)."""
        return [self._part(rows) for rows in _rows_of_parts(self, parts)]

    def _part(self, rows: Rows) -> StorePlan:
        memory = blank_store(len(rows), self.request.key_bytes)
        new, count = Entering.over(memory), len(self.rows[rows])
        for name in ("keys", "slots", "rows"):
            getattr(new, name)[:count] = Entering.array(self.memory, name, self.num_stored)[rows]
        new.count = new.num_free = new.num_missing = count
        new.number = -abs(Entering.over(self.memory).number)
        return StorePlan(self.request, memory, count, self.epoch)


_NUM_PINNED = 8 * Pinned.fields["count"].at
_NUM_FREE, _NUM_MISSING, _NUM_DROPPED, _NUM_REFUSED = (
    8 * Entering.fields[name].at for name in ("num_free", "num_missing", "num_dropped", "num_refused")
)


def _number(memory: bytearray, at: int) -> int:
    return int.from_bytes(memory[at : at + 8], "little")


@dataclass(frozen=True)
class OffloadingEvent:
    """Blocks that became readable in a medium (`removed` False) or left the medium (`removed` True).

    `block_size` is the number of tokens in a block, or 0 if unknown. If `is_reset` is True, every block left
    the medium, and `keys` is empty. Only pools that several processes share set `is_reset`.
    """

    keys: Keys
    block_size: int
    medium: str
    removed: bool
    is_reset: bool = False


COUNTERS = ("stored", "store_failed", "loaded", "evicted", "refused", "dropped", "kept", "discarded")
"""Names of the counters that both `Cache` and `ManagerStats` have."""


@dataclass
class ManagerStats:
    """Numbers of blocks: counters since the manager's creation, and how many slots are now in each state.

    Invariants: ``free + writing + ready + condemned == capacity``, and
    ``stored == ready + evicted + discarded``.
    """

    capacity: int = 0
    """Number of slots in use, see `OffloadingManager.begin_resize`."""
    free: int = 0
    writing: int = 0
    ready: int = 0
    evictable: int = 0
    duplicates: int = 0
    """Ready blocks that the device also holds. A victim tier evicts them first; other tiers do not count
    them."""
    condemned: int = 0
    """Slots whose block was forgotten while a transfer was using it. They become free when the transfer
    ends."""
    stored: int = 0
    store_failed: int = 0
    loaded: int = 0
    evicted: int = 0
    refused: int = 0
    """Blocks that the admission rule did not admit, or that the policy refused."""
    dropped: int = 0
    """Admitted blocks for which there was no room, because all slots held pinned blocks, blocks in flight or
    protected blocks."""
    kept: int = 0
    """Blocks that were offered to a victim tier but need not be copied, because RAM already had them."""
    discarded: int = 0
    """Blocks removed without an eviction: damaged blocks, and blocks that `discard` or `reset` forgot."""
    expected: int = 0
    """Keys that waiting requests expect."""
    misses: dict[str, int] = field(default_factory=dict)
    """Missing blocks that `count_misses` has counted, for each reason. In a pool that several engines
    share, only the misses of this engine."""
    policy: dict[str, float] = field(default_factory=dict)
    tenants: dict[str, TenantStats] = field(default_factory=dict)
    """Counts of each tenant with a quota, and the counts of all other tenants together as ``other``.

    Empty without quotas.
    """

    @classmethod
    def of(cls, cache: Cache, slots: Slots) -> ManagerStats:
        """Read the statistics of a manager's cache."""
        stats = cls(slots.capacity - slots.num_unused, slots.num_free, slots.num_writing, slots.num_ready)
        stats.evictable, stats.condemned = slots.num_evictable, slots.num_condemned
        stats.duplicates, stats.expected = cache.duplicates.size(0), cache.expected.keys.lists.size(0)
        for name in COUNTERS:
            setattr(stats, name, getattr(cache, name))
        return stats
