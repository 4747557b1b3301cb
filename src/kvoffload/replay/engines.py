"""Engines that use one manager in a replay: their queues, and the origin of the blocks that they load.

Knows requests and blocks; no devices, slots or bytes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvoffload.core.request import RequestContext
from kvoffload.replay.keys import TraceKeys
from kvoffload.replay.queue import EngineQueue
from kvoffload.tiering.manager import AnyManager
from kvoffload.traces.trace import Trace


class Engines:
    """The engines of one manager, each with its own queue of `num_waiting` requests.

    Args:
        engine_of: shape ``(requests,)``; engine of each request. None: one engine serves all requests.

    Attributes:
        hit_blocks_of_others: loaded block references whose block another engine computed and stored.
    """

    def __init__(
        self,
        manager: AnyManager,
        trace: Trace,
        keys: TraceKeys,
        num_waiting: int,
        engine_of: npt.NDArray[np.int32] | None = None,
    ) -> None:
        self.hit_blocks_of_others = 0
        self._writers: npt.NDArray[np.int32] | None = None
        if engine_of is None:
            self._queues = [EngineQueue(manager, trace, keys, num_waiting, range(trace.requests))]
            self._engine_of = [0] * trace.requests
            return
        self._queues = [
            EngineQueue(manager, trace, keys, num_waiting, np.flatnonzero(engine_of == engine).tolist())
            for engine in range(int(engine_of.max(initial=0)) + 1)
        ]
        self._engine_of = engine_of.tolist()
        self._writers = np.full(trace.unique_blocks, -1, np.int32)

    def serve(self, request: int) -> RequestContext:
        """Take the next request out of its engine's queue; returns the request's context."""
        return self._queues[self._engine_of[request]].serve(request)

    def stored(self, request: int, codes: npt.NDArray[np.int32]) -> None:
        """Record that the request's engine stored these blocks in RAM."""
        if self._writers is not None:
            self._writers[codes] = self._engine_of[request]

    def loaded(self, request: int, codes: npt.NDArray[np.int32]) -> None:
        """Count the loaded blocks of other engines. Call it before the request's own blocks are stored."""
        if self._writers is not None:
            own = self._engine_of[request]
            self.hit_blocks_of_others += int(np.count_nonzero(self._writers[codes] != own))
