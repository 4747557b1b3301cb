"""Rules that assign requests to engines. Knows requests, but no caches."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from kvoffload.settings.read import OneOf, convert
from kvoffload.structures.draws import whole_numbers
from kvoffload.traces.statistics import turns
from kvoffload.traces.trace import Trace

PREFIX, SESSION, ROUND_ROBIN, RANDOM = "prefix", "session", "round-robin", "random"
ROUTINGS = (PREFIX, SESSION, ROUND_ROBIN, RANDOM)
Routing: TypeAlias = Annotated[str, OneOf(ROUTINGS)]
Instances: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=4096)]

_ALIKE = 0.5
"""`PREFIX` chooses an engine by prompt only if at least this share of the prompt was served before."""
_MOST_LOAD = 1.5
"""An engine is overloaded if its load exceeds the mean load of all engines by this factor.

`PREFIX` does not choose an overloaded engine, even if this engine has served the same prompt.
"""

_Instances = npt.NDArray[np.int32]


def route(trace: Trace, instances: int, routing: str = SESSION) -> _Instances:
    """Assign each request to an engine; returns the engines' numbers, from 0, with shape ``(requests,)``.

    The result is deterministic. The rules:

    - `SESSION`: each new session goes to the next engine, round robin. All requests of a session go to the
      same engine.
    - `PREFIX`: all requests of a session go to the same engine, which is chosen by the session's first
      prompt: a block of the prompt is *known* if an engine has served it before. If at least half of the
      prompt's blocks are known, the engine that most recently served the last known block is chosen. If fewer
      are known, or if this engine is overloaded, the engine with the lowest load is chosen. The source is
      SGLang's cache-aware router. Unlike there, the load of an engine is the number of block references that
      it has received, because a trace has no observed loads.
    - `ROUND_ROBIN`: each request goes to the next engine.
    - `RANDOM`: each request goes to a random engine, as with a load balancer that ignores sessions.

    Sessions are recognised as in `statistics.describe`. Cost: O(1) per block reference, 20 us per request.
    """
    convert("routing", routing, Routing)
    if convert("instances", instances, Instances) == 1:
        return np.zeros(trace.requests, np.int32)
    if routing == ROUND_ROBIN:
        return (np.arange(trace.requests) % instances).astype(np.int32)
    if routing == RANDOM:
        return whole_numbers(trace.requests, instances, seed=0).astype(np.int32)
    session_of = turns(trace).session_of
    if routing == SESSION:
        return (session_of % instances).astype(np.int32)
    return _by_prefix(trace, instances, session_of.tolist())


def _by_prefix(trace: Trace, instances: int, session_of: list[int]) -> _Instances:
    last_engine = np.full(trace.unique_blocks, -1, np.int32)
    refs_of, offsets = [0] * instances, trace.offsets.tolist()
    home: dict[int, int] = {}
    chosen = np.empty(trace.requests, np.int32)
    for request, session in enumerate(session_of):
        codes = trace.refs[offsets[request] : offsets[request + 1]]
        if session not in home:
            engine = refs_of.index(min(refs_of))
            known = int(np.count_nonzero(last_engine[codes] >= 0))
            if known >= _ALIKE * len(codes) > 0:
                alike = int(last_engine[codes[known - 1]])
                if refs_of[alike] * instances <= _MOST_LOAD * sum(refs_of):
                    engine = alike
            home[session] = engine
        chosen[request] = home[session]
        last_engine[codes] = home[session]
        refs_of[home[session]] += len(codes)
    return chosen
