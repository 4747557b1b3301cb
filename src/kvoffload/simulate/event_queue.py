"""Simulated time: an event queue, and links that move bytes. Knows no blocks and no engine."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from kvoffload.simulate.report import LinkReport


class Events:
    """Queue of events, ordered by time. Events for the same time run in the order of scheduling.

    Attributes:
        now: the current time, in seconds since the simulation began. A timed replay has no other clock.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._num_scheduled = 0

    def at(self, when: float, call: Callable[[], None]) -> None:
        """Schedule `call` for the time `when` or, if this is in the past, for the current time.

        Cost: O(log n).
        """
        self._num_scheduled += 1
        heapq.heappush(self._heap, (max(when, self.now), self._num_scheduled, call))

    def run(self) -> None:
        while self._heap:
            self.now, _, call = heapq.heappop(self._heap)
            call()


class Link:
    """A bus or disk that moves bytes in one direction. Jobs run one after another.

    Args:
        name: name of the link in reports.
        bytes_per_s, latency_s: a job takes ``latency_s + bytes / bytes_per_s`` seconds. It begins when the
            previous job has ended.
    """

    def __init__(self, events: Events, name: str, bytes_per_s: float, latency_s: float) -> None:
        self._events, self.name = events, name
        self._bytes_per_s, self._latency_s = bytes_per_s, latency_s
        self._free_at = self._busy_s = self._waited_s = 0.0
        self._jobs = self._bytes_moved = self._bytes_waiting = self._most_bytes_waiting = 0

    def submit(self, num_bytes: int, done: Callable[[], None]) -> None:
        """Queue a job that moves `num_bytes` bytes. When the job ends, `done` is called."""
        begins = max(self._events.now, self._free_at)
        takes = self._latency_s + num_bytes / self._bytes_per_s
        self._free_at = begins + takes
        self._jobs += 1
        self._busy_s += takes
        self._waited_s += begins - self._events.now
        self._bytes_waiting += num_bytes
        self._most_bytes_waiting = max(self._most_bytes_waiting, self._bytes_waiting)

        def end() -> None:
            self._bytes_moved += num_bytes
            self._bytes_waiting -= num_bytes
            done()

        self._events.at(self._free_at, end)

    @property
    def seconds_waiting(self) -> float:
        """Time until all queued jobs will have ended, in seconds."""
        return max(0.0, self._free_at - self._events.now)

    def report(self) -> LinkReport:
        """Return the counters since the start of the simulation."""
        seconds = self._events.now
        busy_s = max(0.0, self._busy_s - self.seconds_waiting)  # not less, because both are rounded
        return LinkReport(
            name=self.name,
            jobs=self._jobs,
            bytes_moved=self._bytes_moved,
            busy_s=busy_s,
            busy_share=busy_s / seconds if seconds else 0.0,
            waited_s=self._waited_s,
            most_bytes_waiting=self._most_bytes_waiting,
            bytes_left=self._bytes_waiting,
        )
