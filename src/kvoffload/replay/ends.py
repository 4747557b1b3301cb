"""End times of requests in a replay.

A trace records arrivals and the number of generated tokens, but no end times. So a request is assumed to end
as soon as it is served, or after a fixed time per generated token. This module determines the order in which
requests end; the replay finishes them.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator
from typing import ClassVar, TypeAlias

from kvoffload.core.request import RequestContext
from kvoffload.settings.read import NotNegative
from kvoffload.traces.trace import Trace

End = tuple[int, RequestContext]
"""An ended request: its position in the trace, and its context."""


DecodeSpeed: TypeAlias = NotNegative
"""Speed at which each request is assumed to generate its tokens, in tokens per second.

0 means that a request ends as soon as it is served.
"""


class EndsAtOnce:
    """Assumes that each request ends as soon as it is served.

    Attributes:
        are_late: True if requests may end after a request that arrived later was served.
    """

    are_late: ClassVar[bool] = False

    def due(self, request: int) -> Iterable[End]:
        """Return the requests that end before this request arrives, in the order in which they end."""
        return ()

    def served(self, request: int, ctx: RequestContext) -> Iterable[End]:
        """Record that a request was served. Returns the requests that end immediately."""
        return ((request, ctx),)

    def rest(self) -> Iterable[End]:
        """Return the requests that have not ended yet, in the order in which they will end."""
        return ()


class EndsWhenGenerated(EndsAtOnce):
    """Assumes that each request generates its answer at a constant speed, from its arrival on, and then ends.

    If a request ends at the same time at which another request arrives, the end comes first. Requests that
    end at the same time are returned in the order of their positions in the trace.
    """

    are_late = True

    def __init__(self, trace: Trace, tokens_per_s: float) -> None:
        self._arrivals_ms: list[int] = trace.timestamps_ms.tolist()
        self._durations_ms: list[float] = (trace.output_tokens * (1000.0 / tokens_per_s)).tolist()
        # Request numbers are unique, so the heap never compares contexts.
        self._ends: list[tuple[float, int, RequestContext]] = []

    def due(self, request: int) -> Iterator[End]:
        return self._until(self._arrivals_ms[request])

    def served(self, request: int, ctx: RequestContext) -> Iterable[End]:
        heapq.heappush(self._ends, (self._arrivals_ms[request] + self._durations_ms[request], request, ctx))
        return ()

    def rest(self) -> Iterator[End]:
        return self._until(math.inf)

    def _until(self, now_ms: float) -> Iterator[End]:
        while self._ends and self._ends[0][0] <= now_ms:
            _, request, ctx = heapq.heappop(self._ends)
            yield request, ctx
