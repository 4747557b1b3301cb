"""Our events in vLLM's form, which its connector turns into those that its publisher sends."""

from __future__ import annotations

from typing import Any

from vllm.v1.kv_offload import base

from kvoffload.core.plans import LookupResult, OffloadingEvent
from kvoffload.integrations.vllm.shared.versions import RAM, events
from kvoffload.tiering.manager import AnyManager


class Events:
    """The events between two calls of vLLM's.

    After a reset all blocks have left. vLLM describes a block by the record that it made at the offer, and
    deletes the record when the block leaves, even if the block is stored again before vLLM asks. So for such
    a block only the return is an event.
    """

    def __init__(self) -> None:
        self._left: set[bytes] = set()
        self._of_tiers: list[OffloadingEvent] = []

    def reset(self, manager: AnyManager) -> None:
        """The manager has been reset."""
        for event in manager.take_events():
            if event.medium == RAM:
                self._left.update(event.keys)
            else:
                self._of_tiers.append(event)

    def take(self, manager: AnyManager) -> list[Any]:
        """Events since the last call, in order."""
        taken = []
        if self._left:
            states = {key: manager.lookup_key(key) for key in self._left}
            gone = [key for key, state in states.items() if state is LookupResult.MISS]
            self._left = {key for key, state in states.items() if state is LookupResult.HIT_PENDING}
            if gone:
                taken += events(base, gone, True)
        of_tiers, self._of_tiers = self._of_tiers, []
        for event in of_tiers + manager.take_events():
            taken += events(base, list(event.keys), event.removed, event.medium)
        return taken
