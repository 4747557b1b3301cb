"""When requests arrive whose recording does not say it: an assumption, and named as one."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from random import Random

from kvoffload.traces.conversion.source import Request
from kvoffload.traces.sessions import draw
from kvoffload.traces.workloads import LogNormal

THINK_TIME_S = LogNormal(140, 1.0)
"""From a turn to the next, as in the built-in `chat`."""


class Pace:
    """Lets conversations begin in the order of the file, so many a minute, and their turns follow.

    One begins at random in each ``60 / per_minute`` seconds; a turn follows the one before after a time that
    is drawn from `THINK_TIME_S`. Equal files and rates give equal times on every machine.

    Memory: the turns that are to come of the conversations that have begun.
    """

    def __init__(self, per_minute: float) -> None:
        self._random, self._spacing_s = Random(0).random, 60 / per_minute
        self._num_begun = self._num_turns = 0
        self._to_come: list[tuple[float, int, Request]] = []

    def begin(self, turns: Sequence[Request]) -> Iterator[Request]:
        """A conversation begins; yields what arrives before any later one can."""
        time_s = (self._num_begun + self._random()) * self._spacing_s
        self._num_begun += 1
        for turn in turns:
            heapq.heappush(self._to_come, (time_s, self._num_turns, replace(turn, time_s=time_s)))
            self._num_turns += 1
            time_s += draw(self._random, THINK_TIME_S, unit=1000) / 1000
        while self._to_come and self._to_come[0][0] < self._num_begun * self._spacing_s:
            yield heapq.heappop(self._to_come)[2]

    def rest(self) -> Iterable[Request]:
        """What is to come of the conversations that have begun."""
        while self._to_come:
            yield heapq.heappop(self._to_come)[2]
