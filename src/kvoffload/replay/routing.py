"""Which of several instances of an engine serves each request of a trace. Serves none."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvoffload.errors import ConfigError
from kvoffload.traces.statistics import turns
from kvoffload.traces.trace import Trace

SESSION, RANDOM = "session", "random"
ROUTINGS = (SESSION, RANDOM)
MOST_INSTANCES = 1024
_SEED = 0


def check_instances(num_instances: object) -> int:
    """`num_instances` as an int. Raises `ConfigError` for what is no number of instances."""
    if isinstance(num_instances, int) and 1 <= num_instances <= MOST_INSTANCES:
        return num_instances
    raise ConfigError("instances", num_instances, f"allowed: 1 to {MOST_INSTANCES}")


def check_routing(routing: object) -> str:
    """`routing`, if there is one of that name. Raises `ConfigError`."""
    if isinstance(routing, str) and routing in ROUTINGS:
        return routing
    raise ConfigError("routing", routing, f"allowed: {', '.join(ROUTINGS)}")


def route(
    trace: Trace, num_instances: int, routing: str = SESSION, seed: int = _SEED
) -> npt.NDArray[np.int64]:
    """The instance of each request, shape ``(requests,)``.

    Args:
        routing: ``session``: a session stays where it began, and sessions are dealt out in turn; they are
            inferred (`traces.statistics.turns`). ``random``: each request anywhere.
        seed: of ``random``.
    """
    if check_routing(routing) == RANDOM:
        found: npt.NDArray[np.int64] = np.random.default_rng(seed).integers(0, num_instances, trace.requests)
        return found
    dealt: npt.NDArray[np.int64] = turns(trace).session_of % num_instances
    return dealt
