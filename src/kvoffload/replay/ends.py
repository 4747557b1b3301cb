"""When the requests of a replay end: as soon as they are served, or when they have generated their answers.

A trace says when a request came and how many tokens it generated, not when it ended: the time for a token is
assumed. Knows times and order; what an end means is for the replay.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator
from typing import ClassVar

from kvoffload.core.request import RequestContext
from kvoffload.errors import ConfigError
from kvoffload.traces.trace import Trace

End = tuple[int, RequestContext]
"""A request that ends: its number and its record."""


def check_decode_speed(tokens_per_s: object) -> float:
    """`tokens_per_s` as a number, 0 for "at once". Raises `ConfigError` for what is no speed."""
    if isinstance(tokens_per_s, (int, float)) and 0 <= tokens_per_s < math.inf:
        return float(tokens_per_s)
    raise ConfigError(
        "decode-tokens-per-s", tokens_per_s, "allowed: tokens per second, or 0: requests end when served"
    )


class EndsAtOnce:
    """Requests end as soon as they are served.

    Attributes:
        are_late: whether other requests may come between.
    """

    are_late: ClassVar[bool] = False

    def due(self, request: int) -> Iterable[End]:
        """Those that end before this one comes, in the order in which they end."""
        return ()

    def served(self, request: int, ctx: RequestContext) -> Iterable[End]:
        """This one is served; those that end now."""
        return ((request, ctx),)

    def rest(self) -> Iterable[End]:
        """Those that have not ended yet."""
        return ()


class EndsWhenGenerated(EndsAtOnce):
    """Requests end when they have generated their answers, each at the same speed, from when they came.

    An end is told before the first request that comes at its time or later; ends of one time in the order of
    the requests.
    """

    are_late = True

    def __init__(self, trace: Trace, tokens_per_s: float) -> None:
        self._comes_ms: list[int] = trace.timestamps_ms.tolist()
        self._takes_ms: list[float] = (trace.output_tokens * (1000.0 / tokens_per_s)).tolist()
        # No two requests have one number, so records are never compared.
        self._ends: list[tuple[float, int, RequestContext]] = []

    def due(self, request: int) -> Iterator[End]:
        return self._until(self._comes_ms[request])

    def served(self, request: int, ctx: RequestContext) -> Iterable[End]:
        heapq.heappush(self._ends, (self._comes_ms[request] + self._takes_ms[request], request, ctx))
        return ()

    def rest(self) -> Iterator[End]:
        return self._until(math.inf)

    def _until(self, now_ms: float) -> Iterator[End]:
        while self._ends and self._ends[0][0] <= now_ms:
            _, request, ctx = heapq.heappop(self._ends)
            yield request, ctx
