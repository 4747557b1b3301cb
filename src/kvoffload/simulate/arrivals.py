"""Arrivals of requests in a timed replay: at recorded times, or from a fixed number of busy clients.

With recorded times, a turn of a conversation arrives only after the session's previous turn has ended,
because it contains the previous answer. The recording names the sessions; if it does not, they are inferred
(`traces.statistics.turns`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from kvoffload.simulate.event_queue import Events
from kvoffload.traces.statistics import turns
from kvoffload.traces.trace import Trace


def session_times_s(trace: Trace, load: float) -> npt.NDArray[np.float64]:
    """Compute the arrival time of each request, in seconds since the beginning of the first session.

    Sessions begin at `load` times the recorded rate, but the times between the requests of a session stay as
    recorded.
    """
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
    """Arrivals at recorded times. A turn arrives only after the previous turn of its session has ended."""

    def __init__(self, trace: Trace, load: float) -> None:
        self._times_s: list[float] = session_times_s(trace, load).tolist()
        self._previous: list[int] = turns(trace).previous_turn.tolist()
        self._next: dict[int, list[int]] = {}
        for request, previous in enumerate(self._previous):
            if previous >= 0:
                self._next.setdefault(previous, []).append(request)

    def begin(self, events: Events, arrive: Callable[[int], None]) -> None:
        """Schedule the first turns of all sessions."""
        self._events, self._arrive = events, arrive
        order = sorted(range(len(self._times_s)), key=self._times_s.__getitem__)
        for request in order:
            if self._previous[request] < 0:
                self._schedule(request)

    def ended(self, request: int) -> None:
        """Record that `request` has ended, and schedule the turns that follow it in its session."""
        for turn in self._next.get(request, ()):
            self._schedule(turn)

    def _schedule(self, request: int) -> None:
        self._events.at(self._times_s[request], lambda: self._arrive(request))


class AtOnce:
    """Arrivals from clients that keep `num_requests` requests in progress, in the order of the trace.

    `num_requests` requests arrive at the start. Whenever a request ends, the next request arrives.
    """

    def __init__(self, trace: Trace, num_requests: int) -> None:
        self._remaining = iter(range(trace.requests))
        self._num_requests = num_requests

    def begin(self, events: Events, arrive: Callable[[int], None]) -> None:
        """Schedule the first `num_requests` requests for the current time."""
        self._events, self._arrive = events, arrive
        for _ in range(self._num_requests):
            self.ended(-1)

    def ended(self, request: int) -> None:
        """Record that a request has ended, and schedule the next request for the current time."""
        if (next_request := next(self._remaining, None)) is not None:
            self._events.at(self._events.now, lambda: self._arrive(next_request))


class Shares:
    """Divides arrivals among several engines that each have their own trace.

    Args:
        whole: arrivals of all requests.
        requests_of: for each engine, the positions of its requests in the whole trace, in order.

    Attributes:
        of_engines: for each engine, a source of its arrivals, which numbers requests as in the engine's own
            trace. Call `begin` of each source before `begin` of `Shares`.
    """

    def __init__(self, whole: Recorded | AtOnce, requests_of: Sequence[Sequence[int]]) -> None:
        self._whole = whole
        self.of_engines = [_Share(whole, requests) for requests in requests_of]
        self._place = {
            request: (share, number)
            for share, requests in zip(self.of_engines, requests_of, strict=True)
            for number, request in enumerate(requests)
        }

    def begin(self, events: Events) -> None:
        """Schedule the first requests."""
        self._whole.begin(events, self._arrive)

    def _arrive(self, request: int) -> None:
        share, number = self._place[request]
        share.arrive(number)


class _Share:
    """Source of the arrivals at one engine; belongs to a `Shares`."""

    def __init__(self, whole: Recorded | AtOnce, requests: Sequence[int]) -> None:
        self._whole, self._requests = whole, requests

    def begin(self, events: Events, arrive: Callable[[int], None]) -> None:
        self.arrive = arrive

    def ended(self, request: int) -> None:
        self._whole.ended(self._requests[request])
