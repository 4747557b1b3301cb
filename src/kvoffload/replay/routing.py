"""Which of several engines gets a request: the routers that stand in front of replicas, in a few lines each.

Knows requests and engines; no caches of engines.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvoffload.errors import ConfigError, check_integer
from kvoffload.structures.draws import whole_numbers
from kvoffload.traces.statistics import turns
from kvoffload.traces.trace import Trace

PREFIX, SESSION, RANDOM = "prefix", "session", "random"
ROUTINGS = (PREFIX, SESSION, RANDOM)
MOST_INSTANCES = 4096

_ALIKE = 0.5
"""The part of a first turn that an engine must have been asked before, for `PREFIX` to send it there."""
_MOST_LOAD = 1.5
"""An engine that was asked more than so many times the mean gets no new session from `PREFIX`."""

_Instances = npt.NDArray[np.int32]


def check_instances(instances: object, field: str = "instances") -> int:
    """`instances` as an int. Raises `ConfigError` for what is no number of instances."""
    return check_integer(field, instances, MOST_INSTANCES)


def check_routing(routing: object) -> str:
    """`routing`, if there is one of that name. Raises `ConfigError`."""
    if isinstance(routing, str) and routing in ROUTINGS:
        return routing
    raise ConfigError("routing", routing, f"allowed: {', '.join(ROUTINGS)}")


def route(trace: Trace, instances: int, routing: str = SESSION) -> _Instances:
    """The engine of each request, shape ``(requests,)``, 0 to `instances` - 1. Deterministic.

    - `SESSION`: sessions in turns, the first to the first engine; a session stays where it began.
    - `PREFIX`: as `SESSION`, but a session begins at the engine that was last asked for the beginning of its
      first prompt, if that is half of the prompt or more and the engine is not asked too much; else at that
      which was asked least. As the cache-aware router of SGLang; without the loads that a router sees.
    - `RANDOM`: each request for itself, whatever came before: a balancer that knows no sessions.

    What a session is, is inferred (`statistics.describe`). Cost: O(1) per reference, 20 us a request.
    """
    check_routing(routing)
    if check_instances(instances) == 1:
        return np.zeros(trace.requests, np.int32)
    if routing == RANDOM:
        return whole_numbers(trace.requests, instances, seed=0).astype(np.int32)
    found = turns(trace)
    if routing == SESSION:
        return (found.session_of % instances).astype(np.int32)
    return _by_prefix(trace, instances, found.session_of.tolist())


def _by_prefix(trace: Trace, instances: int, session_of: list[int]) -> _Instances:
    last_asked = np.full(trace.unique_blocks, -1, np.int32)
    refs_of, offsets = [0] * instances, trace.offsets.tolist()
    home: dict[int, int] = {}
    chosen = np.empty(trace.requests, np.int32)
    for request, session in enumerate(session_of):
        codes = trace.refs[offsets[request] : offsets[request + 1]]
        if session not in home:
            engine = refs_of.index(min(refs_of))
            known = int(np.count_nonzero(last_asked[codes] >= 0))
            if known >= _ALIKE * len(codes) > 0:
                alike = int(last_asked[codes[known - 1]])
                if refs_of[alike] * instances <= _MOST_LOAD * sum(refs_of):
                    engine = alike
            home[session] = engine
        chosen[request] = home[session]
        last_asked[codes] = home[session]
        refs_of[home[session]] += len(codes)
    return chosen
