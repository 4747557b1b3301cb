"""Our events in vLLM's form. vLLM's connector turns them into those that its publisher sends."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from vllm.v1.kv_offload import base

from kvoffload.integrations.vllm.versions import event as vllm_event
from kvoffload.types import OffloadingEvent


def to_vllm(events: Iterable[OffloadingEvent]) -> Iterator[Any]:
    """The same events, in order."""
    for event in events:
        yield vllm_event(base, list(event.keys), event.removed)
