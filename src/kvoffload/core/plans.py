"""What the manager returns: outcomes, plans, events, statistics. Values without behaviour."""

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
from kvoffload.structures.keys import Keys

Parts: TypeAlias = "Iterable[npt.NDArray[np.integer]] | None"
"""The rows of a plan, divided into parts: each row is in exactly one."""

StoreName: TypeAlias = Literal["on-compute", "on-device-eviction"]
ON_COMPUTE: Final = "on-compute"
ON_DEVICE_EVICTION: Final = "on-device-eviction"
STORES = (ON_COMPUTE, ON_DEVICE_EVICTION)
"""When a block is offered to a tier: as soon as it is computed, or when the device drops it."""


class LookupResult(Enum):
    """What the manager knows of one block; the names are vLLM's."""

    MISS = auto()
    """Not here: compute it."""
    HIT = auto()
    """Ready. `prepare_load` is guaranteed to succeed in this step."""
    HIT_PENDING = auto()
    """Being stored by another request: ask again in the next step, or compute it."""
    RETRY = auto()
    """Being promoted from a tier behind: ask again in the next step."""


class PrefixLookup(NamedTuple):
    """How much of a prefix is ready.

    `num_ready` leading blocks are ready; `stopped_by` is the state of the block after them (`HIT` if there
    is none).
    """

    num_ready: int
    stopped_by: LookupResult


ALL_READY, THEN_MISS = (
    tuple(PrefixLookup(count, result) for count in range(65))
    for result in (LookupResult.HIT, LookupResult.MISS)
)
"""What `lookup` mostly answers, made ahead: to make it takes as long as to find it."""


class _Plan:
    """What every plan has: the request that it was made for, memory for the manager's kernels, and an end."""

    __slots__ = ("completed", "epoch", "memory", "request")

    def __init__(self, request: RequestContext, memory: Any, epoch: int) -> None:
        self.request, self.memory, self.epoch = request, memory, epoch
        self.completed = False

    @property
    def request_id(self) -> str:
        """Id of the request that the plan was made for; empty if there is none."""
        return self.request.request_id

    @property
    def owner(self) -> object:
        """The manager."""
        return self.request.owner


class LoadPlan(_Plan):
    """Blocks that are pinned until `complete_load`: copy `slots[i]` to where `keys[i]` belongs.

    Its arrays are made when they are asked for.

    Attributes:
        request: the request that it was made for.
        memory: its `Pinned`, for the manager's kernels.
        completed: whether it was completed, or split.
    """

    __slots__ = ("_offered",)

    def __init__(self, request: RequestContext, offered: Sequence[bytes], memory: Any, epoch: int) -> None:
        super().__init__(request, memory, epoch)
        self._offered = offered

    def __len__(self) -> int:
        return _number(self.memory, _NUM_PINNED)

    @property
    def keys(self) -> Keys:
        """The blocks."""
        offered = self._offered
        return offered if isinstance(offered, Keys) else Keys.pack(offered, self.request.key_bytes)

    @property
    def slots(self) -> SlotArray:
        """Shape ``(len(keys),)``, int32 (a view)."""
        return Pinned.array(self.memory, "slots", len(self))

    def split(self, parts: Parts = None) -> list[LoadPlan]:
        """Plans to complete instead of this one: one for each part of its rows, or one for each block."""
        self.completed = True
        keys, slots = self.keys, self.slots
        return [self._part(keys.take(rows), slots[rows]) for rows in _parts(parts, len(slots))]

    def _part(self, keys: Keys, slots: SlotArray) -> LoadPlan:
        memory = blank_load(len(slots))
        part = Pinned.over(memory)
        part.slots[: len(slots)], part.count = slots, len(slots)
        return LoadPlan(self.request, keys, memory, self.epoch)


class StorePlan(_Plan):
    """Blocks to copy: ``keys[i]`` into ``slots[i]``; in flight until `complete_store`.

    Its arrays and keys are made when they are asked for; they are views.

    Attributes:
        request: the request that it was made for.
        memory: its `Entering`, for the manager's kernels.
        completed: whether it was completed, or split.
    """

    __slots__ = ("num_stored",)

    def __init__(self, request: RequestContext, memory: Any, num_stored: int, epoch: int) -> None:
        super().__init__(request, memory, epoch)
        self.num_stored = num_stored

    def __len__(self) -> int:
        return self.num_stored

    @property
    def keys(self) -> Keys:
        """The offered keys that are stored, in the order of the offer. Empty if all are here already, or none
        was admitted."""
        return Keys(Entering.array(self.memory, "keys", self.num_stored), self.request.key_bytes)

    @property
    def slots(self) -> SlotArray:
        """Shape ``(len(keys),)``, int32. The last ``len(evicted)`` are those of the evicted blocks, in that
        order."""
        return Entering.array(self.memory, "slots", self.num_stored)

    @property
    def missing_rows(self) -> npt.NDArray[np.int32]:
        """int32; the rows of the offered batch that were not here: first those that are stored, then those
        that were dropped, then those that were refused."""
        return Entering.array(self.memory, "rows", _number(self.memory, _NUM_MISSING))

    @property
    def rows(self) -> npt.NDArray[np.int32]:
        """Shape ``(len(keys),)``, int32; the row of each key in the offered batch."""
        return Entering.array(self.memory, "rows", self.num_stored)

    @property
    def evicted(self) -> Keys:
        """Keys of the evicted blocks. Their slots are reused at once: a block that is being read is pinned,
        and a pinned block is never evicted."""
        return Keys(Entering.array(self.memory, "evicted", self.num_evicted), self.request.key_bytes)

    @property
    def num_evicted(self) -> int:
        """How many blocks leave."""
        return self.num_stored - _number(self.memory, _NUM_FREE)

    @property
    def num_dropped(self) -> int:
        """Offered keys that were admitted but found no room."""
        return _number(self.memory, _NUM_DROPPED)

    @property
    def num_refused(self) -> int:
        """Offered keys that the admission rule or the policy refused."""
        return _number(self.memory, _NUM_REFUSED)

    def split(self, parts: Parts = None) -> list[StorePlan]:
        """Plans to complete instead of this one: one for each part of its rows, or one for each block."""
        self.completed = True
        return [self._part(rows) for rows in _parts(parts, self.num_stored)]

    def _part(self, rows: npt.NDArray[np.integer]) -> StorePlan:
        memory = blank_store(len(rows), self.request.key_bytes)
        part, count = Entering.over(memory), len(self.rows[rows])
        for name in ("keys", "slots", "rows"):
            getattr(part, name)[:count] = Entering.array(self.memory, name, self.num_stored)[rows]
        part.count = part.num_free = part.num_missing = count
        return StorePlan(self.request, memory, count, self.epoch)


_NUM_PINNED = 8 * Pinned.fields["count"].at
_NUM_FREE, _NUM_MISSING, _NUM_DROPPED, _NUM_REFUSED = (
    8 * Entering.fields[name].at for name in ("num_free", "num_missing", "num_dropped", "num_refused")
)


def _number(memory: bytearray, at: int) -> int:
    return int.from_bytes(memory[at : at + 8], "little")


def _parts(parts: Parts, count: int) -> Iterable[npt.NDArray[np.integer]]:
    return np.arange(count)[:, np.newaxis] if parts is None else parts


@dataclass(frozen=True)
class OffloadingEvent:
    """Blocks became readable in a medium (`removed` is False), or left it.

    `block_size` is the number of tokens in a block, 0 if the manager does not know it.
    """

    keys: Keys
    block_size: int
    medium: str
    removed: bool


_COUNTERS = ("stored", "store_failed", "loaded", "evicted", "refused", "dropped", "kept", "discarded")
"""Fields of both `Cache` and `ManagerStats`."""


@dataclass
class ManagerStats:
    """Counters since the manager was made, and how its slots are used now. All in blocks.

    At all times ``free + writing + ready + condemned == capacity`` and
    ``stored == ready + evicted + discarded``.
    """

    capacity: int = 0
    free: int = 0
    writing: int = 0
    ready: int = 0
    evictable: int = 0
    duplicates: int = 0
    """In a victim tier: ready blocks that the device holds as well. They leave first."""
    condemned: int = 0
    """Slots whose block is forgotten while a transfer still uses them: free when it ends."""
    stored: int = 0
    store_failed: int = 0
    loaded: int = 0
    evicted: int = 0
    refused: int = 0
    """Not admitted, or worth less than the block that would have left."""
    dropped: int = 0
    """Admitted, but without room: all other blocks were pinned, in flight, or the request's own."""
    kept: int = 0
    """In a victim tier: offered while still here as duplicates, so kept without a copy."""
    discarded: int = 0
    """Removed without being evicted: damaged, or forgotten by `reset`."""
    expected: int = 0
    """Keys that waiting requests will ask for."""
    policy: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, cache: Cache, slots: Slots) -> ManagerStats:
        """What a manager has counted, and how its slots are used."""
        stats = cls(len(slots.ref_cnt), slots.num_free, slots.num_writing, slots.num_ready)
        stats.evictable, stats.condemned = slots.num_evictable, slots.num_condemned
        stats.duplicates, stats.expected = cache.duplicates.size(0), cache.expected.keys.lists.size(0)
        for name in _COUNTERS:
            setattr(stats, name, getattr(cache, name))
        return stats
