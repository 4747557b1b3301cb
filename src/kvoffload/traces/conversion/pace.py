"""Assumed arrival times, for recordings without times."""

from __future__ import annotations

import heapq
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from random import Random
from typing import Annotated

import msgspec

from kvoffload.errors import ConfigError
from kvoffload.traces.conversion.source import Given, Missing, Request, Source
from kvoffload.traces.lines import BadLineError
from kvoffload.traces.sessions import draw
from kvoffload.traces.workloads import LogNormal

THINK_TIME_S = LogNormal(140, 1.0)
"""Seconds from a turn to the next turn, as in the built-in workload `chat`."""


class Pace:
    """Assigns arrival times to conversations, so that they begin at a constant rate in the file's order.

    One conversation begins in each interval of ``60 / per_minute`` seconds, at a random time within the
    interval. The gaps between its turns are drawn from `THINK_TIME_S`. The times are equal on every machine.

    Memory: the pending turns of open conversations.
    """

    def __init__(self, per_minute: float) -> None:
        self._random, self._spacing_s = Random(0).random, 60 / per_minute
        self._num_begun = self._num_turns = 0
        self._pending: list[tuple[float, int, Request]] = []

    def begin(self, turns: Sequence[Request]) -> Iterator[Request]:
        """Schedule a conversation. Yields all scheduled turns that arrive before the next interval."""
        time_s = (self._num_begun + self._random()) * self._spacing_s
        self._num_begun += 1
        for turn in turns:
            heapq.heappush(self._pending, (time_s, self._num_turns, replace(turn, time_s=time_s)))
            self._num_turns += 1
            time_s += draw(self._random, THINK_TIME_S, unit=1000) / 1000
        while self._pending and self._pending[0][0] < self._num_begun * self._spacing_s:
            yield heapq.heappop(self._pending)[2]

    def rest(self) -> Iterable[Request]:
        """Yield the remaining scheduled turns, after the last conversation."""
        while self._pending:
            yield heapq.heappop(self._pending)[2]


class PacedSource(Source):
    """A source whose records all have times, or all lack times. A `Pace` assigns missing times."""

    per_minute: Annotated[float, msgspec.Meta(ge=0)] = 0.0

    def __init__(self, given: Given) -> None:
        super().__init__(given)
        self._pace: Pace | None = None
        self._has_times = False

    @property
    def assumed(self) -> str:
        """The assumed rate; empty if the file has times."""
        return f"paced-{self.per_minute:g}-per-minute" if self._pace else ""

    @abstractmethod
    def has_time(self, record: bytes) -> bool:
        """Return True if a record has an arrival time. Raises `BadLineError` for a bad record."""

    def missing(self, record: bytes) -> list[Missing]:
        try:
            has_time = self.has_time(record)
        except BadLineError:
            return []
        return [] if has_time or self.per_minute else [Missing(self._no_rate(), "--from", "per_minute=60")]

    def _no_rate(self) -> ConfigError:
        allowed = f"give the number of conversations per minute: {self.name},per_minute=60"
        return ConfigError("from", self.name, f"the file has no arrival times; {allowed}")

    def arriving(self, time_s: float | None, turns: Sequence[Request]) -> Iterable[Request]:
        """Return the requests to write next.

        If the record has an arrival time (`time_s`), returns its `turns`. Otherwise schedules `turns`, and
        returns the scheduled turns that are now due (`Pace.begin`).
        """
        if time_s is not None:
            if self._pace is not None:
                raise BadLineError("field timestamp: earlier records have no time")
            self._has_times = True
            return turns
        if self._has_times:
            raise BadLineError("field timestamp: missing")
        if self._pace is None:
            if not self.per_minute:
                raise self._no_rate()
            self._pace = Pace(self.per_minute)
        return self._pace.begin(turns)

    def rest(self) -> Iterable[Request]:
        return self._pace.rest() if self._pace else ()
