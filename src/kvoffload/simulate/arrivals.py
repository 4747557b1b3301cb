"""When requests come: at their recorded times, with sessions packed closer, or so many at once.

A request that continues another one never comes before that has ended, however slow the machine is: a turn of
a conversation needs the answer before it. Sessions are inferred (`traces.statistics.turns`).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvoffload.simulate.events import Events
from kvoffload.traces.statistics import turns
from kvoffload.traces.trace import Trace


def session_times_s(trace: Trace, load: float) -> npt.NDArray[np.float64]:
    """When each request would come, shape ``(requests,)``: sessions begin `load` times as densely as
    recorded, and what is between the requests of one session stays as it was. The first comes at 0."""
    recorded_s = trace.timestamps_ms / 1000.0
    if not trace.requests:
        return np.zeros(0)
    session_of = turns(trace).session_of
    begins_s = np.full(int(session_of.max()) + 1, np.inf)
    np.minimum.at(begins_s, session_of, recorded_s)
    first_s = begins_s.min()
    own_s = begins_s[session_of]
    times_s: npt.NDArray[np.float64] = (own_s - first_s) / load + (recorded_s - own_s)
    return times_s


class Recorded:
    """Requests come at their times; a next turn when the one before has ended, if that is later."""

    def __init__(self, trace: Trace, load: float) -> None:
        self._times_s: list[float] = session_times_s(trace, load).tolist()
        self._previous: list[int] = turns(trace).previous_turn.tolist()
        self._next: dict[int, list[int]] = {}
        for request, previous in enumerate(self._previous):
            if previous >= 0:
                self._next.setdefault(previous, []).append(request)

    def begin(self, events: Events, arrive: Callable[[int], None]) -> None:
        """Announce those that wait for none."""
        self._events, self._arrive = events, arrive
        order = sorted(range(len(self._times_s)), key=self._times_s.__getitem__)
        for request in order:
            if self._previous[request] < 0:
                self._announce(request)

    def ended(self, request: int) -> None:
        """A request has ended: those that continue it may come."""
        for following in self._next.get(request, ()):
            self._announce(following)

    def _announce(self, request: int) -> None:
        self._events.at(self._times_s[request], lambda: self._arrive(request))


class AtOnce:
    """Clients keep so many requests under way, in the order of the trace, whatever its times."""

    def __init__(self, trace: Trace, num_requests: int) -> None:
        self._rest = iter(range(trace.requests))
        self._num_requests = num_requests

    def begin(self, events: Events, arrive: Callable[[int], None]) -> None:
        """Send the first ones."""
        self._events, self._arrive = events, arrive
        for _ in range(self._num_requests):
            self.ended(-1)

    def ended(self, request: int) -> None:
        """A request has ended: send the next."""
        if (following := next(self._rest, None)) is not None:
            self._events.at(self._events.now, lambda: self._arrive(following))
