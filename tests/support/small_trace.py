"""Traces made from lists of block ids."""

from __future__ import annotations

import numpy as np

from kvoffload.traces.trace import Trace


def trace_of(*requests: list[int]) -> Trace:
    """Make a trace of requests with these block ids."""
    flat = [block for request in requests for block in request]
    ids = list(dict.fromkeys(flat))
    code = {block: number for number, block in enumerate(ids)}
    return Trace(
        "test",
        512,
        np.array(ids, np.int64),
        np.array([code[block] for block in flat], np.int32),
        np.cumsum([0, *map(len, requests)]).astype(np.int64),
        np.zeros(len(requests), np.int64),
        np.zeros(len(requests), np.int64),
    )
