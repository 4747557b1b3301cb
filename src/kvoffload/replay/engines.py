"""Engines that share one RAM in a replay: their assumed queues, and the engine that stored each block.

A trace records arrivals but no waiting times, so it is assumed that a fixed number of the next requests
always waits in an engine's queue. The manager expects their blocks (`OffloadingManager.expect`). Knows
requests and blocks, but no devices, slots or bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Annotated, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from kvoffload.core.admission import create_admission
from kvoffload.core.expected import most_expected
from kvoffload.core.request import RequestContext
from kvoffload.replay.trace_keys import TraceKeys
from kvoffload.tiering.tiered_manager import AnyManager, TieredManager
from kvoffload.traces.trace import Trace

QueueLength: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=1 << 16)]
"""Number of requests that are assumed to wait in an engine's queue."""


class EngineQueue:
    """Queue of an engine: always holds its next `num_requests` requests, whose blocks the manager expects.

    Args:
        requests: positions in the trace of the engine's requests, in order.
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
        """Take this request, the next one, out of the queue, and refill the queue; returns its context."""
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


class EngineParts:
    """The admission rules and queues of engines that share one manager of RAM, as in a `NodeManager`.

    Each engine has its own admission rule, which sees only this engine's requests, and its own queue of
    waiting requests. The manager can expect at most `most_expected` blocks; each queue gets an equal share of
    this number.
    """

    def __init__(self, manager: AnyManager, admission: str, num_engines: int) -> None:
        ram = manager.ram_manager if isinstance(manager, TieredManager) else manager
        capacity = len(ram.index.keys)
        self._manager = ram
        self._rules = [create_admission(admission, ram.key_bytes, capacity) for _ in range(num_engines)]
        share = most_expected(capacity) // num_engines
        self._queues = [ram.new_queue(lambda: share) for _ in range(num_engines)]

    def switch_to(self, engine: int) -> None:
        """Make the manager of RAM use this engine's admission rule and queue, until the next call."""
        self._manager.admission = self._manager.store_mode.admission = self._rules[engine]
        self._manager.queue = self._queues[engine]


class Engines:
    """The engines that share one RAM, each with its own queue of `num_waiting` requests.

    Args:
        managers: the manager of each engine. All of them use the same manager of RAM.
        engine_of: for each request, the number of its engine. None: one engine serves all requests.
        admission: name of the admission rule (`EngineParts`).

    Attributes:
        hit_blocks_of_others: number of block references that an engine loaded after another engine had stored
            the block.
    """

    def __init__(
        self,
        managers: Sequence[AnyManager],
        trace: Trace,
        keys: TraceKeys,
        num_waiting: int,
        engine_of: npt.NDArray[np.int32] | None,
        admission: str,
    ) -> None:
        self._managers = managers
        self._parts: EngineParts | None = None
        self.hit_blocks_of_others = 0
        self._writers: npt.NDArray[np.int32] | None = None
        if engine_of is None:
            self._queues = [EngineQueue(managers[0], trace, keys, num_waiting, range(trace.requests))]
            self._engine_of = [0] * trace.requests
            return
        self._queues = [
            EngineQueue(manager, trace, keys, num_waiting, np.flatnonzero(engine_of == engine).tolist())
            for engine, manager in enumerate(managers)
        ]
        self._engine_of = engine_of.tolist()
        self._parts = EngineParts(managers[0], admission, len(managers))
        self._writers = np.full(trace.unique_blocks, -1, np.int32)

    def serve(self, request: int) -> RequestContext:
        """Take a request out of its engine's queue; returns the request's context.

        The request must be its engine's next one. Call `switch_to` with this engine first.
        """
        return self._queues[self._engine_of[request]].serve(request)

    def number_of(self, request: int) -> int:
        """Return the number of this request's engine."""
        return self._engine_of[request]

    def switch_to(self, engine: int) -> AnyManager:
        """Make the manager of RAM use this engine's rule and queue; returns the engine's own manager."""
        if self._parts is not None:
            self._parts.switch_to(engine)
        return self._managers[engine]

    def stored(self, request: int, codes: npt.NDArray[np.int32]) -> None:
        """Record that the request's engine stored these blocks in RAM."""
        if self._writers is not None:
            self._writers[codes] = self._engine_of[request]

    def loaded(self, request: int, codes: npt.NDArray[np.int32]) -> None:
        """Count in `hit_blocks_of_others` the blocks in `codes` that another engine stored.

        `codes` are the blocks that `request` loaded. Call `loaded` before `stored`.
        """
        if self._writers is not None:
            own = self._engine_of[request]
            self.hit_blocks_of_others += int(np.count_nonzero(self._writers[codes] != own))
