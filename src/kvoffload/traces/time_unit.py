"""The unit of a recording's times. If neither the file nor the user states it, ms is assumed and checked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from kvoffload.errors import ConfigError, TraceError
from kvoffload.text import duration
from kvoffload.traces.statistics import turns
from kvoffload.traces.trace import SECONDS, Trace

_MOST_REQUESTS_PER_S = 1000
"""Highest plausible rate of a recording, in requests per second. Busy fleets have hundreds."""
_MOST_TOKENS_PER_S = 1000
"""Highest plausible median of the tokens of an answer, divided by the seconds to the next turn. Recordings
have medians of 2 to 14. If ms is assumed for times in seconds, the medians are 2,000 to 14,000."""
_FEWEST_TURNS = 20
_LONGEST_S = 3600
"""Duration, read as ms, up to which a recording is checked, in seconds. If the unit really is s, this is 41
days."""


def in_unit(trace: Trace, unit: str | None, name_or_path: str | Path) -> Trace:
    """Convert the times of a trace whose file does not state their unit. Returns the converted trace.

    `unit` is the unit that the user states. If it is None, ms is assumed, and `TraceError` is raised if the
    times would then be implausible. If the file states the unit, the trace is returned unchanged.

    Cost: a call of `turns` if the unit is assumed. Raises: `TraceError`; `ConfigError` if the file states
    another unit than the user.
    """
    if unit is not None and trace.time_unit not in ("", unit):
        raise ConfigError("time-unit", unit, f"the times of {name_or_path} are in {trace.time_unit}")
    if trace.time_unit:
        return trace
    if unit is not None:
        per_unit = 1000 if unit == SECONDS else 1
        return replace(trace, timestamps_ms=per_unit * trace.timestamps_ms, time_unit=unit)
    if why := _implausible(trace):
        raise TraceError(
            f"{name_or_path}: read as ms, {why}; give --time-unit s if the times are in seconds, or "
            "--time-unit ms if this is right"
        )
    return trace


def _implausible(trace: Trace) -> str:
    """Return the reason why the times cannot be in ms; empty if they can be in ms."""
    seconds = trace.duration_s
    if not 0 < seconds < _LONGEST_S:
        return ""
    if trace.requests > _MOST_REQUESTS_PER_S * max(seconds, 0.1):
        rate = f"{trace.requests / seconds:,.0f}"
        return f"{trace.requests:,} requests in {duration(seconds)} are {rate} a second"
    num_turns, speed = _speed_of_answers(trace)
    if num_turns >= _FEWEST_TURNS and speed > _MOST_TOKENS_PER_S:
        return (
            f"conversations go on so soon that answers are generated at {speed:,.0f} tokens a second (median "
            f"of {num_turns:,} turns)"
        )
    return ""


def _speed_of_answers(trace: Trace) -> tuple[int, float]:
    """Return the number of next turns, and the median speed of the answers before these turns.

    A next turn is a request that begins with all blocks of an earlier request and adds blocks. Therefore it
    arrived after the answer to the earlier request. The speed of this answer is its number of tokens divided
    by the time between the two requests.
    """
    previous = turns(replace(trace, sessions=None)).previous_turn
    lengths = np.diff(trace.offsets)
    following = np.flatnonzero(previous >= 0)
    following = following[lengths[following] > lengths[previous[following]]]
    before = previous[following]
    gaps_ms = np.maximum(1, trace.timestamps_ms[following] - trace.timestamps_ms[before])
    speeds = 1000 * trace.output_tokens[before] / gaps_ms
    return len(speeds), float(np.median(speeds)) if len(speeds) else 0.0
