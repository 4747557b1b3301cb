"""Parsing of times in recordings."""

from __future__ import annotations

import math
import re
from datetime import datetime, timezone

from kvoffload.traces.lines import BadLineError

_CALENDAR = re.compile(r"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d:\d\d)(?:[.,](\d+))?\s*(Z|[+-]\d\d:?\d\d)?")
_MS_FROM, _MS_UNTIL = 1e11, 1e14
"""Range of numbers that are read as milliseconds since 1970. If they were seconds, they would be times after
the year 5138."""


def seconds_of(field: str, value: object) -> float:
    """Convert a time to seconds. The time is a number of seconds, milliseconds since 1970, or ISO 8601 text.

    A text without a time zone is read as UTC. Raises `BadLineError` if the time is none of these.
    """
    if isinstance(value, str):
        if match := _CALENDAR.fullmatch(value.strip()):
            date, time, fraction, zone = match.groups()
            zone = "+00:00" if zone in (None, "Z") else zone if ":" in zone else f"{zone[:3]}:{zone[3:]}"
            try:
                moment = datetime.fromisoformat(f"{date}T{time}{zone}")
            except ValueError as error:
                raise BadLineError(f"field {field}: {value!r} is not a time ({error})") from None
            epoch = datetime(1970, 1, 1, tzinfo=timezone.utc)
            return (moment - epoch).total_seconds() + float(f"0.{fraction or 0}")
        try:
            value = float(value)
        except ValueError:
            raise BadLineError(f"field {field}: {value!r} is neither seconds nor ISO 8601") from None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise BadLineError(f"field {field}: {value!r} is not a time")
    if value >= _MS_UNTIL:
        allowed = "seconds, milliseconds since 1970, or ISO 8601"
        raise BadLineError(f"field {field}: {value!r} is too large (microseconds?); allowed: {allowed}")
    return value / 1000 if value >= _MS_FROM else float(value)
