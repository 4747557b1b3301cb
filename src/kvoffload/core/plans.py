"""What the manager returns: outcomes, plans, events, statistics. Plain values without behaviour."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvoffload.core.request import RequestContext
from kvoffload.core.slots import SlotArray
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


@dataclass(eq=False)
class LoadPlan:
    """Blocks that are pinned until `complete_load`: copy `slots[i]` to where `keys[i]` belongs.

    `slots` has shape ``(len(keys),)``, int32.
    """

    request: RequestContext = field(repr=False)
    keys: Keys
    slots: SlotArray
    owner: object = field(repr=False)
    epoch: int
    completed: bool = False

    @property
    def request_id(self) -> str:
        """Id of the request that the plan was made for; empty if there is none."""
        return self.request.request_id

    def split(self, parts: Parts = None) -> list[LoadPlan]:
        """Plans to complete instead of this one: one for each part of its rows, or one for each block."""
        self.completed = True
        return [
            LoadPlan(self.request, self.keys.take(rows), self.slots[rows], self.owner, self.epoch)
            for rows in _parts(parts, len(self.slots))
        ]


@dataclass(eq=False)
class StorePlan:
    """Blocks to copy: ``keys[i]`` into ``slots[i]``; in flight until `complete_store`.

    Attributes:
        keys: the offered keys that are stored, in the order of the offer. Empty if all are here already, or
            none was admitted.
        slots: shape ``(len(keys),)``, int32. The last ``len(evicted)`` are those of the evicted blocks,
            in that order.
        missing_rows: int32; the rows of the offered batch that were not here: first those that are
            stored, then those that were dropped, then those that were refused.
        evicted: keys of the evicted blocks. Their slots are reused at once: a block that is being read is
            pinned, and a pinned block is never evicted.
        num_dropped: offered keys that were admitted but found no room.
        num_refused: offered keys that the admission rule or the policy refused.
    """

    request: RequestContext = field(repr=False)
    keys: Keys
    slots: SlotArray
    missing_rows: npt.NDArray[np.int32]
    evicted: Keys
    num_dropped: int
    num_refused: int
    owner: object = field(repr=False)
    epoch: int
    completed: bool = False

    @property
    def rows(self) -> npt.NDArray[np.int32]:
        """Shape ``(len(keys),)``, int32; the row of each key in the offered batch."""
        return self.missing_rows[: len(self.slots)]

    @property
    def request_id(self) -> str:
        """Id of the request that the plan was made for; empty if there is none."""
        return self.request.request_id

    def split(self, parts: Parts = None) -> list[StorePlan]:
        """Plans to complete instead of this one: one for each part of its rows, or one for each block."""
        self.completed = True
        return [
            StorePlan(
                self.request,
                self.keys.take(rows),
                self.slots[rows],
                self.missing_rows[rows],
                self.evicted[:0],
                0,
                0,
                self.owner,
                self.epoch,
            )
            for rows in _parts(parts, len(self.slots))
        ]


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
    policy: dict[str, float] = field(default_factory=dict)
