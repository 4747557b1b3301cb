"""Which requests wait in the engine's queue while another one is served.

A trace says when requests came, not how long they waited: so many of the next ones are assumed to wait. Knows
order; what waiting means is the manager's (`OffloadingManager.expect`).
"""

from __future__ import annotations

from collections import deque

from kvoffload.core.manager import OffloadingManager
from kvoffload.core.request import RequestContext
from kvoffload.errors import ConfigError
from kvoffload.replay.keys import TraceKeys
from kvoffload.traces.trace import Trace

MOST_REQUESTS = 1 << 16


def check_queue(num_requests: object) -> int:
    """`num_requests` as an int; 0: nobody waits. Raises `ConfigError` for what is no length of a queue."""
    if isinstance(num_requests, int) and 0 <= num_requests <= MOST_REQUESTS:
        return num_requests
    raise ConfigError("queue", num_requests, f"allowed: 0 to {MOST_REQUESTS} requests")


class EngineQueue:
    """Begins the requests of a trace; the next `num_requests` wait, and their manager expects them."""

    def __init__(self, manager: OffloadingManager, trace: Trace, keys: TraceKeys, num_requests: int) -> None:
        self._manager, self._trace, self._keys, self._num_requests = manager, trace, keys, num_requests
        self._offsets: list[int] = trace.offsets.tolist()
        self._waiting: deque[RequestContext] = deque()

    def serve(self, request: int) -> RequestContext:
        """It is the turn of this request, the next one: it leaves the queue, and others join."""
        ctx = self._waiting.popleft() if self._waiting else self._begin(request)
        self._manager.withdraw(ctx)
        last = min(request + self._num_requests, self._trace.requests - 1)
        for number in range(request + 1 + len(self._waiting), last + 1):
            self._waiting.append(self._begin(number))
            self._manager.expect(self._waiting[-1])
        return ctx

    def _begin(self, request: int) -> RequestContext:
        first, end = self._offsets[request : request + 2]
        keys, hints = self._keys.of_blocks(self._trace.refs[first:end]), self._trace.hints_of(request)
        return self._manager.begin_request(str(request), keys, hints=hints.at_begin)
