"""Assumed queue of an engine: requests that wait while another request is served.

A trace records arrivals but no waiting times, so a fixed number of the next requests is assumed to wait. The
manager expects their blocks (`OffloadingManager.expect`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Annotated, TypeAlias

import msgspec

from kvoffload.core.request import RequestContext
from kvoffload.replay.trace_keys import TraceKeys
from kvoffload.tiering.tiered_manager import AnyManager
from kvoffload.traces.trace import Trace

QueueLength: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=1 << 16)]
"""Number of requests in the engine's queue."""


class EngineQueue:
    """Queue of the next `num_requests` requests of an engine; the manager expects their blocks.

    Args:
        requests: numbers of the engine's requests, in order.
    """

    def __init__(
        self,
        manager: AnyManager,
        trace: Trace,
        keys: TraceKeys,
        num_requests: int,
        requests: Sequence[int],
    ) -> None:
        self._manager, self._trace, self._keys, self._num_requests = manager, trace, keys, num_requests
        self._requests, self._num_served = requests, 0
        self._offsets: list[int] = trace.offsets.tolist()
        self._waiting: deque[RequestContext] = deque()

    def serve(self, request: int) -> RequestContext:
        """Take the request out of the queue and refill the queue; returns the request's context."""
        ctx = self._waiting.popleft() if self._waiting else self._begin(request)
        self._manager.withdraw(ctx)
        self._num_served += 1
        first = self._num_served + len(self._waiting)
        for number in self._requests[first : self._num_served + self._num_requests]:
            self._waiting.append(self._begin(number))
            self._manager.expect(self._waiting[-1])
        return ctx

    def _begin(self, request: int) -> RequestContext:
        first, end = self._offsets[request : request + 2]
        keys, hints = self._keys.of_blocks(self._trace.refs[first:end]), self._trace.hints_of(request)
        return self._manager.begin_request(str(request), keys, hints=hints.at_begin)
