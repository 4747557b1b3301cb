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


class Queue:
    """The next `num_requests` of a trace wait, and their manager expects them."""

    def __init__(self, manager: OffloadingManager, trace: Trace, keys: TraceKeys, num_requests: int) -> None:
        self._manager, self._trace, self._keys, self._num_requests = manager, trace, keys, num_requests
        self._waiting: deque[RequestContext] = deque()
        self._next = 0

    def serve(self, request: int) -> None:
        """It is the turn of this request, the next one: it leaves the queue, and others join."""
        if self._waiting:
            self._manager.withdraw(self._waiting.popleft())
        self._next = max(self._next, request + 1)
        while len(self._waiting) < self._num_requests and self._next < self._trace.requests:
            first, end = self._trace.offsets[self._next : self._next + 2]
            keys = self._keys.of_blocks(self._trace.refs[first:end])
            ctx = self._manager.begin_request(f"{self._next} waits", keys)
            self._manager.expect(ctx)
            self._waiting.append(ctx)
            self._next += 1
