"""The optimum: against a naive twin, against exhaustive search, and against the golden numbers."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload.errors import ConfigError
from kvoffload.replay.optimum import OptimumResult, infinite, optimum
from kvoffload.traces.format import read_trace
from kvoffload.traces.sessions import generate
from kvoffload.traces.workloads import builtin
from support.naive.optimum import best_of_all
from support.optimum_traces import Requests, chained_requests, trace_of


def naive_optimum(requests: Requests, capacity: int) -> OptimumResult:
    """Compute MIN with bypass, request by request, by a search for the next use."""

    def next_use(block: int, now: int) -> tuple[int, int] | None:
        later = range(now + 1, len(requests))
        return next(((at, requests[at].index(block)) for at in later if block in requests[at]), None)

    resident: set[int] = set()
    hits = written = 0
    for now, request in enumerate(requests):
        num_hits = 0
        while num_hits < len(request) and request[num_hits] in resident:
            num_hits += 1
        uses = [(next_use(block, now), block) for block in resident.union(request)]
        soonest = sorted((use, block) for use, block in uses if use is not None)[:capacity]
        kept = {block for _, block in soonest}
        hits += num_hits
        written += len(kept - resident)
        resident = kept
    return OptimumResult(hits, written)


@given(chained_requests(max_requests=25, max_new=5), st.integers(0, 40))
def test_equals_its_naive_twin(requests: Requests, capacity: int) -> None:
    assert optimum(trace_of(requests), capacity) == naive_optimum(requests, capacity)


@given(chained_requests(max_requests=6, max_new=2), st.integers(0, 4))
def test_equals_the_best_choice_by_exhaustive_search(requests: Requests, capacity: int) -> None:
    assert optimum(trace_of(requests), capacity).prefix_hit_blocks == best_of_all(
        requests, capacity, [(0, request) for request in requests]
    )


@given(chained_requests(max_requests=40, max_new=6))
def test_grows_with_the_capacity_up_to_the_infinite_cache(requests: Requests) -> None:
    trace = trace_of(requests)
    hits = [optimum(trace, capacity).prefix_hit_blocks for capacity in range(trace.unique_blocks + 1)]
    assert hits == sorted(hits)
    assert hits[0] == 0
    assert optimum(trace, trace.unique_blocks) == infinite(trace)


def test_a_worked_example() -> None:
    # Room for two: 1 is replaced by 2, because its next use is last; 3 is never used again and is refused.
    assert optimum(trace_of([[0, 1], [2], [0, 3], [2], [0, 1]]), 2) == OptimumResult(3, 3)
    # If the same request uses all blocks again, the head is kept, not the tail.
    assert optimum(trace_of([[0, 1, 2], [0, 1, 2]]), 2) == OptimumResult(2, 2)
    # A block that is never used again is not written.
    assert optimum(trace_of([[0, 1], [2, 3]]), 100) == OptimumResult(0, 0)


def test_a_negative_capacity_is_refused() -> None:
    with pytest.raises(ConfigError, match="capacity_blocks: -1 is invalid; allowed: 0 or more"):
        optimum(trace_of([[0]]), -1)


def test_a_tree_of_several_levels() -> None:
    trace = generate(builtin("agent", sessions=4))
    requests = [request.tolist() for request in np.split(trace.refs, trace.offsets[1:-1])][:60]
    assert len(list(chain(*requests))) > 64
    for capacity in (3, 100):
        assert optimum(trace_of(requests), capacity) == naive_optimum(requests, capacity)


GOLDEN = {
    "made_up": {62: (0.307765, 4_457), 300: (0.634833, 4_270), 1_247: (0.773657, 2_216)},
    "conversation_first60": {
        1_000: (0.195032, 25_971),
        2_000: (0.259975, 28_305),
        5_000: (0.342897, 25_906),
        10_000: (0.360747, 25_661),
        20_000: (0.360747, 25_661),
    },
    "agentic_12h": {
        1_865: (0.809455, 642_309),
        3_731: (0.920555, 315_904),
        9_327: (0.955938, 177_921),
        18_655: (0.959455, 162_897),
    },
    "agentic_3h": {
        1_865: (0.578304, 966_418),
        3_731: (0.764638, 751_841),
        9_327: (0.919510, 324_203),
        18_655: (0.953630, 187_790),
    },
}


@pytest.mark.trace
@pytest.mark.parametrize("name", GOLDEN)
def test_golden_numbers_of_an_independent_simulator(
    recorded_trace_path: Callable[[str], Path], name: str
) -> None:
    trace = read_trace(recorded_trace_path(name))
    optima = {capacity: optimum(trace, capacity) for capacity in GOLDEN[name]}
    assert {
        capacity: (round(result.prefix_hit_blocks / trace.block_refs, 6), result.blocks_written)
        for capacity, result in optima.items()
    } == GOLDEN[name]


@pytest.mark.trace
@pytest.mark.parametrize(
    ("name", "ratio"),
    [("made_up", 0.7737), ("conversation_first60", 0.3607), ("agentic_12h", 0.9595), ("agentic_3h", 0.9595)],
)
def test_infinite_cache_of_recorded_traces(
    recorded_trace_path: Callable[[str], Path], name: str, ratio: float
) -> None:
    trace = read_trace(recorded_trace_path(name))
    assert round(infinite(trace).prefix_hit_blocks / trace.block_refs, 4) == ratio
