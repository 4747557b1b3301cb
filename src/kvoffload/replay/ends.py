"""End times of requests in a replay. A request ends at once, or after an assumed time per generated token.

A trace records arrivals and the number of generated tokens, but no end times. This module determines the
order in which requests end; the replay finishes them.
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
"""An ended request: its number and its context."""


DecodeSpeed: TypeAlias = NotNegative
"""Assumed speed of each request, in generated tokens per second.

0 means that a request ends as soon as it is served.
"""


class EndsAtOnce:
    """Requests end as soon as they are served.

    Attributes:
        are_late: True if a request may end after later requests were served.
    """

    are_late: ClassVar[bool] = False

    def due(self, request: int) -> Iterable[End]:
        """Return the requests that end before request `request` arrives, in the order in which they end."""
        return ()

    def served(self, request: int, ctx: RequestContext) -> Iterable[End]:
        """Record that a request was served; returns the requests that end now."""
        return ((request, ctx),)

    def rest(self) -> Iterable[End]:
        """Return the requests that have not ended yet, in the order in which they will end."""
        return ()


class EndsWhenGenerated(EndsAtOnce):
    """Requests generate their answers from their arrival on, at a constant speed, and then end.

    If a request ends at the time at which another request arrives, the end comes first. If several requests
    end at the same time, they end in the order of their numbers.
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
