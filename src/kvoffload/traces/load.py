"""Transformations of a trace: a higher or lower request rate, or a sample of the sessions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kvoffload.settings.read import Positive, convert
from kvoffload.traces.statistics import turns
from kvoffload.traces.trace import Trace


def at_load(trace: Trace, load: float) -> Trace:
    """Multiply the arrival rate of sessions by `load`.

    The gaps between the requests of a session do not change, because users do not think faster under load.
    Therefore, if `load` is above 1, the recording becomes shorter, but at most by the factor `load`. Sessions
    are defined as in `statistics.describe`. Cost: 0.2 s per million block references.
    """
    if convert("load", load, Positive) == 1 or not trace.requests:
        return trace
    sessions, times = turns(trace).session_of, trace.timestamps_ms
    begins = np.full(int(sessions.max()) + 1, np.iinfo(np.int64).max)
    np.minimum.at(begins, sessions, times)
    first = int(times.min())
    earlier_ms = np.round((begins - first) * (1 - 1 / load)).astype(np.int64)
    moved = replace(trace, timestamps_ms=times - earlier_ms[sessions])
    return moved.of_requests(np.argsort(moved.timestamps_ms, kind="stable"))


def one_session_in(trace: Trace, number: int) -> Trace:
    """Keep every `number`-th session, in the order of the sessions' first requests.

    Sessions are defined as in `statistics.describe`. Cost: 0.2 s per million block references.
    """
    if number == 1 or not trace.requests:
        return trace
    sessions = turns(trace).session_of
    _, first = np.unique(sessions, return_index=True)
    chosen = np.zeros(len(first), np.bool_)
    chosen[np.argsort(first, kind="stable")[::number]] = True
    return trace.of_requests(np.flatnonzero(chosen[sessions]))
