"""Our events in vLLM's form, which its connector turns into those that its publisher sends."""

from __future__ import annotations

from typing import Any

from vllm.v1.kv_offload import base

from kvoffload.core.manager import OffloadingManager
from kvoffload.core.plans import LookupResult
from kvoffload.integrations.vllm.versions import event as vllm_event


class Events:
    """The events between two calls of vLLM's.

    After a reset all blocks have left. vLLM describes a block by the record that it made at the offer, and
    deletes the record when the block leaves, even if the block is stored again before vLLM asks. So for such
    a block only the return is an event.
    """

    def __init__(self) -> None:
        self._left: set[bytes] = set()

    def reset(self, manager: OffloadingManager) -> None:
        """The manager has been reset."""
        for event in manager.take_events():
            self._left.update(event.keys)

    def take(self, manager: OffloadingManager) -> list[Any]:
        """Events since the last call, in order."""
        taken = []
        if self._left:
            states = {key: manager.lookup_key(key) for key in self._left}
            gone = [key for key, state in states.items() if state is LookupResult.MISS]
            self._left = {key for key, state in states.items() if state is LookupResult.HIT_PENDING}
            if gone:
                taken.append(vllm_event(base, gone, True))
        since = manager.take_events()
        return taken + [vllm_event(base, list(event.keys), event.removed) for event in since]
