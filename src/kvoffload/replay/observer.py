"""Interface of an observer of a replay.

An observer receives each decision of the replay, and can query which tier holds a block. Blocks are
identified by their codes in the trace.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvoffload.core.plans import OffloadingEvent, StorePlan
from kvoffload.replay.device_cache import Device
from kvoffload.replay.trace_keys import TraceKeys
from kvoffload.structures.keys import Keys
from kvoffload.tiering.tiered_manager import AnyManager, TieredManager
from kvoffload.traces.trace import Trace

Codes = npt.NDArray[np.int32]


class Decision(IntEnum):
    """Kinds of decisions about blocks that a replay reports to its observer."""

    STORED = 1
    PROMOTED = 2
    EVICTED = 3
    NOT_ADMITTED = 4
    """The admission rule refused the blocks."""
    REFUSED = 5
    """The policy refused the blocks."""
    NO_ROOM = 6
    DAMAGED = 7


NOWHERE, ON_DEVICE, IN_RAM, IN_TIER = 0, 1, 2, 3
"""Places of a block. The place ``IN_TIER + i`` is tier number `i` behind RAM, counted from 0."""


class Places:
    """Finds the places of blocks during a replay: the device, RAM and the tiers of one engine.

    Args:
        device: the device cache. None: there is no device cache.
    """

    def __init__(self, manager: AnyManager, keys: TraceKeys, device: Device | None) -> None:
        self._manager, self._keys, self._device = manager, keys, device
        self._tiered = manager if isinstance(manager, TieredManager) else None

    def switch_to(self, manager: TieredManager) -> None:
        """From now on, look into the tiers of `manager`: another engine that uses the same RAM."""
        self._manager = self._tiered = manager

    @property
    def num_tiers(self) -> int:
        """Number of tiers behind RAM."""
        return len(self._tiered.lanes) if self._tiered is not None else 0

    @property
    def tier_mismatches(self) -> int:
        """Number of damaged blocks that the tiers behind RAM have found so far."""
        return 0 if self._tiered is None else sum(stats.mismatches for stats in self._tiered.tier_stats())

    def of(self, codes: Codes) -> npt.NDArray[np.int8]:
        """Return, for each block, the fastest place that holds it.

        The call does not count as a use of the blocks.

        Cost: an index probe for each block in RAM and in each tier.
        """
        keys, places = self._keys.of_blocks(codes), np.full(len(codes), NOWHERE, np.int8)
        if self._tiered is not None:
            for lane in reversed(self._tiered.lanes):
                places[lane.tier.contains(keys)] = IN_TIER + lane.row
        places[self._manager.contains(keys)] = IN_RAM
        if self._device is not None:
            places[self._device.contains(codes)] = ON_DEVICE
        return places

    def slowest_tiers(self, codes: Codes) -> npt.NDArray[np.int8]:
        """Return, for each block, the number of the slowest tier behind RAM that holds it.

        Tiers are counted from 1. 0 means that no tier behind RAM holds the block.
        """
        numbers = np.zeros(len(codes), np.int8)
        if self._tiered is not None:
            keys = self._keys.of_blocks(codes)
            for lane in self._tiered.lanes:
                numbers[lane.tier.contains(keys)] = lane.row + 1
        return numbers


class Observer(Protocol):
    """Receives the decisions of a replay, in their order. A replay does not depend on its observer."""

    def arrives(self, request: int, codes: Codes, places: Places) -> None:
        """Called before the blocks of a request are looked up."""

    def served(self, request: int, codes: Codes, num_hits: int, places: Places) -> None:
        """Called when a request's leading `num_hits` blocks are loaded, before other blocks are stored."""

    def decided(self, request: int, decision: Decision, codes: Codes) -> None:
        """Called for each decision while a request is served. The decision is about the blocks `codes`."""

    def ended(self, codes: Codes, places: Places) -> None:
        """Called when the tiers' jobs have ended.

        `codes` are blocks that may have been offered to the tiers by these jobs.
        """


class Watch:
    """Translates the plans and events of a replay into calls of its observer.

    Args:
        device: the device cache; None if there is none.

    Attributes:
        observer: receives the decisions.
        places: finds the current places of blocks.
    """

    def __init__(
        self, observer: Observer, trace: Trace, manager: AnyManager, keys: TraceKeys, device: Device | None
    ) -> None:
        self.observer, self.places = observer, Places(manager, keys, device)
        self._manager, self._keys, self._block_ids = manager, keys, trace.block_ids
        self._by_id = np.argsort(trace.block_ids)
        self._offered: list[Codes] = []

    def decided(self, request: int, decision: Decision, codes: Codes) -> None:
        """Report a decision about the blocks `codes`, unless `codes` is empty."""
        if len(codes):
            self.observer.decided(request, decision, codes)

    def stored(self, request: int, missing: Codes, plan: StorePlan) -> None:
        """Report the decisions of a store. `missing`: offered blocks that were not in RAM, in plan order."""
        stored, num_admitted = len(plan), len(missing) - plan.num_refused
        # In `missing`, blocks that the policy refused come before blocks that the admission rule refused.
        num_passed = len(missing) - self._manager.store_mode.num_not_admitted
        self.decided(request, Decision.NO_ROOM, missing[stored:num_admitted])
        self.decided(request, Decision.REFUSED, missing[num_admitted:num_passed])
        self.decided(request, Decision.NOT_ADMITTED, missing[num_passed:])
        self.decided(request, Decision.EVICTED, self._codes(plan.evicted))
        self.decided(request, Decision.STORED, missing[:stored])

    def not_stored(self, request: int, codes: Codes, num_dropped: int) -> None:
        """Report that the blocks `codes` were offered, and that none of them was stored.

        Of the blocks that RAM does not hold, the first `num_dropped` were admitted, but there was no room for
        them. The others were refused by the admission rule.
        """
        missing = codes[~self._manager.contains(self._keys.of_blocks(codes))]
        self.decided(request, Decision.NO_ROOM, missing[:num_dropped])
        self.decided(request, Decision.NOT_ADMITTED, missing[num_dropped:])

    def events(self, request: int, events: Iterable[OffloadingEvent]) -> None:
        """Report the promotions to RAM, and the evictions from RAM that make room for them."""
        for event in events:
            if event.medium == self._manager.medium:
                decision = Decision.EVICTED if event.removed else Decision.PROMOTED
                self.decided(request, decision, self._codes(event.keys))

    def offered(self, codes: Codes) -> None:
        """Record blocks that may have been offered to the tiers; `settled` will report them."""
        self._offered.append(codes)

    def settled(self) -> None:
        """Report the blocks that `offered` recorded. Call this when all jobs of the tiers have ended."""
        for codes in self._offered:
            self.observer.ended(codes, self.places)
        self._offered.clear()

    def _codes(self, keys: Keys) -> Codes:
        at = np.searchsorted(self._block_ids, self._keys.ids(keys), sorter=self._by_id)
        return self._by_id[at].astype(np.int32)
