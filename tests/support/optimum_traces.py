"""Random traces for the optimum."""

from __future__ import annotations

from itertools import chain

import numpy as np
from hypothesis import strategies as st

from kvoffload.traces.trace import Trace

Requests = list[list[int]]


def trace_of(requests: Requests) -> Trace:
    codes: dict[int, int] = {}
    refs = [codes.setdefault(block, len(codes)) for block in chain(*requests)]
    return Trace(
        name="test",
        block_tokens=1,
        block_ids=np.array(list(codes), np.int64),
        refs=np.array(refs, np.int32),
        offsets=np.cumsum([0, *map(len, requests)], dtype=np.int64),
        timestamps_ms=np.zeros(len(requests), np.int64),
        output_tokens=np.zeros(len(requests), np.int64),
    )


@st.composite
def chained_requests(draw: st.DrawFn, max_requests: int, max_new: int) -> Requests:
    """Draw requests that share a prefix with an earlier request, then continue with new blocks."""
    requests: Requests = []
    blocks = 0
    for _ in range(draw(st.integers(0, max_requests))):
        earlier = draw(st.sampled_from([[], *requests]))
        shared, new = draw(st.integers(0, len(earlier))), draw(st.integers(0, max_new))
        requests.append([*earlier[:shared], *range(blocks, blocks + new)])
        blocks += new
    return requests
