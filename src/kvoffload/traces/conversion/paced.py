"""Sources whose records may have no times."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated

import msgspec

from kvoffload.errors import ConfigError
from kvoffload.traces.conversion.pace import Pace
from kvoffload.traces.conversion.source import Given, Request, Source
from kvoffload.traces.lines import BadLineError


class PacedSource(Source):
    """A source whose records have times, all of them, or get them from a `Pace` that the user has chosen."""

    per_minute: Annotated[float, msgspec.Meta(ge=0)] = 0.0

    def __init__(self, given: Given) -> None:
        super().__init__(given)
        self._pace: Pace | None = None
        self._has_times = False

    @property
    def assumed(self) -> str:
        """When conversations begin, if the file does not say it."""
        return f"paced-{self.per_minute:g}-per-minute" if self._pace else ""

    def arriving(self, time_s: float | None, turns: Sequence[Request]) -> Iterable[Request]:
        """The requests of one record: now, if it has a time, and otherwise when their turn comes."""
        if time_s is not None:
            if self._pace is not None:
                raise BadLineError("field timestamp: those before have none")
            self._has_times = True
            return turns
        if self._has_times:
            raise BadLineError("field timestamp: missing")
        if self._pace is None:
            if not self.per_minute:
                raise ConfigError(
                    "from",
                    self.name,
                    "it does not tell when requests came: say how many conversations begin in a minute; "
                    f"allowed: {self.name},per_minute=60",
                )
            self._pace = Pace(self.per_minute)
        return self._pace.begin(turns)

    def rest(self) -> Iterable[Request]:
        """Turns that are to come."""
        return self._pace.rest() if self._pace else ()
