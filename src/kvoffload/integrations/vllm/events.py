"""Our events in vLLM's form. vLLM's connector turns them into those that its publisher sends."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from vllm.v1.kv_offload.base import Medium
from vllm.v1.kv_offload.base import OffloadingEvent as VLLMEvent

from kvoffload.types import OffloadingEvent


def to_vllm(events: Iterable[OffloadingEvent]) -> Iterator[VLLMEvent]:
    """The same events, in order."""
    for event in events:
        yield VLLMEvent(keys=list(event.keys), medium=Medium(event.medium), removed=event.removed)
