"""Translates kvoffload's events to vLLM's form. vLLM's connector publishes them."""

from __future__ import annotations

from typing import Any

from vllm.v1.kv_offload import base

from kvoffload.core.plans import LookupResult, OffloadingEvent
from kvoffload.integrations.vllm.shared.logs import logger
from kvoffload.integrations.vllm.shared.versions import RAM, events
from kvoffload.tiering.tiered_manager import AnyManager


class Events:
    """Events that vLLM has not taken yet.

    vLLM keeps a record of each block from its offer until its removal is reported. A problem arises if a
    block is removed by a reset, and stored again before vLLM takes the events: the report of the removal
    would delete the new record. Therefore a removal by a reset is reported only if the block is absent when
    vLLM takes the events.
    """

    def __init__(self) -> None:
        self._removed_by_reset: set[bytes] = set()
        self._of_tiers: list[OffloadingEvent] = []

    def reset(self, manager: AnyManager) -> None:
        """Collect the events that a reset of the manager has caused. Called after the reset."""
        for event in manager.take_events():
            if event.medium == RAM:
                self._removed_by_reset.update(event.keys)
            else:
                self._of_tiers.append(event)

    def take(self, manager: AnyManager) -> list[Any]:
        """Return the events since the last call, in vLLM's form, in order. Removals by a reset come first."""
        taken = []
        if self._removed_by_reset:
            states = {key: manager.lookup_key(key) for key in self._removed_by_reset}
            missing = [key for key, state in states.items() if state is LookupResult.MISS]
            self._removed_by_reset = {
                key for key, state in states.items() if state is LookupResult.HIT_PENDING
            }
            if missing:
                taken += events(base, missing, True)
        of_tiers, self._of_tiers = self._of_tiers, []
        for event in of_tiers + manager.take_events():
            if event.is_reset:
                logger.warning(
                    "kvoffload: events of other engines were lost; indexes of this engine are too large"
                )
                continue
            taken += events(base, list(event.keys), event.removed, event.medium)
        return taken
