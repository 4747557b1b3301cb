"""The optimum behind a device: against a naive twin, exhaustive search, real policies and golden numbers."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from pathlib import Path

import numba
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload.core.manager import OffloadingManager
from kvoffload.errors import ConfigError
from kvoffload.replay.config import ReplayConfig
from kvoffload.replay.device_cache import Device, run_device
from kvoffload.replay.optimum import STORES, OptimumResult, infinite, optimum
from kvoffload.replay.replay import Replay
from kvoffload.replay.trace_keys import KEY_BYTES, TraceKeys
from kvoffload.traces.format import read_trace
from kvoffload.traces.sessions import generate
from kvoffload.traces.workloads import builtin
from support.naive.optimum import best_of_all, naive_device, naive_optimum
from support.optimum_traces import Requests, chained_requests, trace_of


@given(chained_requests(max_requests=30, max_new=5), st.integers(0, 20))
def test_the_device_equals_its_naive_twin(requests: Requests, device_blocks: int) -> None:
    trace = trace_of(requests)
    run = run_device(trace, device_blocks)
    offers = naive_device(requests, device_blocks, "on-device-eviction")
    assert run.served.tolist() == [served for served, _ in offers]
    ids = trace.block_ids[trace.refs[run.dropped]]
    dropped = [blocks.tolist() for blocks in np.split(ids, run.offsets[1:])][: len(requests)]
    assert dropped == [offered for _, offered in offers]


@given(chained_requests(max_requests=30, max_new=5), st.integers(1, 20))
def test_the_device_equals_a_manager_request_by_request(requests: Requests, device_blocks: int) -> None:
    trace = trace_of(requests)
    device, keys = Device(trace, run_device(trace, device_blocks)), TraceKeys(trace)
    manager = OffloadingManager(device_blocks, key_bytes=KEY_BYTES)
    every, held = np.arange(trace.unique_blocks, dtype=np.int32), np.zeros(device_blocks, np.int32)
    for request in range(trace.requests):
        codes = trace.refs[trace.offsets[request] : trace.offsets[request + 1]]
        ctx = manager.begin_request("")
        assert device.served(request) == manager.lookup(keys.of_blocks(codes), ctx).num_ready
        dropped = device.serve(request)
        evicted: list[int] = []
        if (plan := manager.prepare_store(keys.of_blocks(codes), ctx)) is not None:
            evicted = held[plan.slots[len(plan.slots) - plan.num_evicted :]][::-1].tolist()
            held[plan.slots] = codes[plan.rows]
            manager.complete_store(plan)
        manager.finish_request(ctx)
        assert dropped.tolist() == evicted
        assert device.contains(every).tolist() == manager.contains(keys.of_blocks(every)).tolist()


@given(
    chained_requests(max_requests=25, max_new=5),
    st.integers(0, 25),
    st.integers(0, 12),
    st.sampled_from(STORES),
)
def test_equals_its_naive_twin(requests: Requests, capacity: int, device_blocks: int, store: str) -> None:
    offers = naive_device(requests, device_blocks, store)
    result = optimum(trace_of(requests), capacity, device_blocks, store)
    assert result.prefix_hit_blocks == naive_optimum(requests, capacity, offers)
    assert result.device_hit_blocks == sum(served for served, _ in offers)
    assert result.blocks_written >= (result.prefix_hit_blocks > result.device_hit_blocks)


@given(
    chained_requests(max_requests=7, max_new=2), st.integers(0, 3), st.integers(0, 4), st.sampled_from(STORES)
)  # fmt: skip
def test_equals_the_best_choice_by_exhaustive_search(
    requests: Requests, capacity: int, device_blocks: int, store: str
) -> None:
    offers = naive_device(requests, device_blocks, store)
    result = optimum(trace_of(requests), capacity, device_blocks, store)
    assert result.prefix_hit_blocks == best_of_all(requests, capacity, offers)


@given(chained_requests(max_requests=30, max_new=6), st.integers(0, 12), st.sampled_from(STORES))
def test_grows_with_the_capacity_up_to_the_infinite_cache(
    requests: Requests, device_blocks: int, store: str
) -> None:
    trace = trace_of(requests)
    results = [optimum(trace, c, device_blocks, store) for c in range(trace.unique_blocks + 1)]
    hits = [result.prefix_hit_blocks for result in results]
    assert hits == sorted(hits)
    assert (hits[0], results[0].blocks_written) == (results[0].device_hit_blocks, 0)
    assert hits[-1] == infinite(trace).prefix_hit_blocks


@given(chained_requests(max_requests=30, max_new=6), st.integers(0, 20))
def test_without_a_device_both_store_modes_are_equal(requests: Requests, capacity: int) -> None:
    trace = trace_of(requests)
    assert optimum(trace, capacity, 0, STORES[0]) == optimum(trace, capacity, 0, STORES[1])


@given(
    chained_requests(max_requests=25, max_new=6),
    st.integers(1, 25),
    st.integers(0, 12),
    st.sampled_from(["lru", "arc"]),
    st.sampled_from(["all", "reuse:2"]),
)
def test_no_policy_exceeds_the_optimum(
    requests: Requests, capacity: int, device_blocks: int, policy: str, admission: str
) -> None:
    trace = trace_of(requests)
    if trace.unique_blocks:
        report = Replay(trace, ReplayConfig(capacity, policy, admission, device_blocks)).run()
        assert report.prefix_hit_ratio <= report.optimum_hit_ratio


def test_worked_examples() -> None:
    # A device of one block: the tier holds 0 while the device holds 1, and vice versa.
    trace = trace_of([[0], [1], [0], [1]])
    for store in STORES:
        assert optimum(trace, 1, 1, store).prefix_hit_blocks == 1 + (store == "on-device-eviction")
    # The device serves the second use of 0, so the tier holds 2 until then, and 0 afterwards.
    requests = [[0], [2], [0], [2], [3], [0]]
    assert optimum(trace_of(requests), 1, 2) == OptimumResult(3, 1, 2)


def test_impossible_arguments_are_refused() -> None:
    with pytest.raises(ConfigError, match="device_blocks: -1 is invalid; allowed: 0 or more"):
        optimum(trace_of([[0]]), 1, -1)
    with pytest.raises(ConfigError, match="store: 'never' is invalid; allowed: on-compute, on-device-ev"):
        optimum(trace_of([[0]]), 1, 1, "never")


@pytest.mark.parametrize("workload", ["chat", "rag"])
def test_storing_on_eviction_has_a_higher_optimum(workload: str) -> None:
    """A victim tier and a device of similar size hold different blocks."""
    trace = generate(builtin(workload, sessions=200))
    size = trace.unique_blocks // 20
    on_compute, on_eviction = (optimum(trace, size, size, store) for store in STORES)
    alone = optimum(trace, size)
    assert alone.prefix_hit_blocks <= on_compute.prefix_hit_blocks < on_eviction.prefix_hit_blocks


# ---- golden numbers of an independent simulator

GOLDEN_ON_COMPUTE = {
    ("conversation_first60", 1_000): {
        1_000: (0.1951, 0.1492, 25_861),
        4_000: (0.3259, 0.2801, 26_303),
        8_000: (0.3607, 0.3149, 25_600),
    },
    ("agentic_3h", 2_000): {
        2_000: (0.6233, 0.3522, 945_643),
        4_000: (0.7858, 0.5147, 697_053),
        8_000: (0.9039, 0.6328, 366_942),
    },
}
"""Belady's rule by the next use of the tier: prefix-hit ratio, its share from the tier, blocks written."""

GOLDEN_ON_EVICTION = {
    ("conversation_first60", 1_000): {1_000: 0.207, 4_000: 0.332},
    ("conversation_first60", 4_000): {4_000: 0.347},
    ("agentic_3h", 2_000): {2_000: 0.738, 4_000: 0.853, 8_000: 0.924},
    ("agentic_3h", 4_000): {4_000: 0.895},
    ("agentic_12h", 2_000): {2_000: 0.921},
}


@numba.njit
def _by_next_use_of_the_tier(refs, offsets, served, next_use, capacity):  # type: ignore[no-untyped-def]
    """Replay the golden simulator's OPT: keep the blocks that are next requested from the tier."""
    held = np.full(refs.max() + 1, -1)
    was_held = np.zeros(refs.max() + 1, np.bool_)
    furthest = [(0, np.int64(0))][1:]
    hits = written = resident = 0
    for request in range(len(offsets) - 1):
        begin, end = offsets[request], offsets[request + 1]
        run = True
        for position in range(begin, end):
            block = refs[position]
            was_held[block] = held[block] >= 0
            if position >= begin + served[request]:
                run = run and was_held[block]
                hits += run
                resident -= was_held[block]
                held[block] = -1
        # Resident blocks are accessed first, then the others are stored.
        for storing in (False, True):
            for position in range(begin, end):
                block, use = np.int64(refs[position]), next_use[position]
                if was_held[block] == storing or use < 0 or held[block] == use:
                    continue
                while furthest and held[furthest[0][1]] != -furthest[0][0]:
                    heapq.heappop(furthest)
                if resident == capacity:
                    if -furthest[0][0] < use:
                        continue
                    held[heapq.heappop(furthest)[1]] = -1
                    resident -= 1
                held[block] = use
                resident += 1
                heapq.heappush(furthest, (-use, block))
                written += storing
    return hits, written


@numba.njit
def _next_uses_of_the_tier(refs, offsets, served):  # type: ignore[no-untyped-def]
    next_use, result = np.full(refs.max() + 1, -1), np.full(len(refs), -1)
    for request in range(len(offsets) - 2, -1, -1):
        for position in range(offsets[request + 1] - 1, offsets[request] - 1, -1):
            result[position] = next_use[refs[position]]
            if position >= offsets[request] + served[request]:
                next_use[refs[position]] = position
    return result


@pytest.mark.slow
def test_the_golden_rule_is_not_optimal() -> None:
    """The rule keeps 3 although the device serves its next use and offers it again, and has no room for 0."""
    requests = [[3], [0], [2], [3], [2], [3], [4], [2], [0]]
    trace, device_blocks, capacity = trace_of(requests), 2, 2
    served = run_device(trace, device_blocks).served
    next_use = _next_uses_of_the_tier(trace.refs, trace.offsets, served)
    hits, _ = _by_next_use_of_the_tier(trace.refs, trace.offsets, served, next_use, capacity)
    best = best_of_all(requests, capacity, naive_device(requests, device_blocks, "on-compute"))
    assert served.sum() + hits == best - 1
    assert optimum(trace, capacity, device_blocks).prefix_hit_blocks == best


@pytest.mark.trace
@pytest.mark.parametrize(("name", "device_blocks"), GOLDEN_ON_COMPUTE)
def test_golden_numbers_are_reproduced_and_slightly_below_the_optimum(
    recorded_trace_path: Callable[[str], Path], name: str, device_blocks: int
) -> None:
    """The golden OPT keeps a block until the tier serves it, even if the device would offer it again."""
    trace = read_trace(recorded_trace_path(name))
    refs, offsets, served = trace.refs, trace.offsets, run_device(trace, device_blocks).served
    next_use = _next_uses_of_the_tier(refs, offsets, served)
    for capacity, golden in GOLDEN_ON_COMPUTE[name, device_blocks].items():
        hits, written = _by_next_use_of_the_tier(refs, offsets, served, next_use, capacity)
        on_device = served.sum()
        both, added = (round(n / trace.block_refs, 4) for n in (on_device + hits, hits))
        assert (both, added, written) == golden
        best = optimum(trace, capacity, device_blocks)
        assert best.device_hit_blocks == on_device
        assert on_device + hits <= best.prefix_hit_blocks <= on_device + hits + 0.005 * trace.block_refs


@pytest.mark.trace
@pytest.mark.parametrize(("name", "device_blocks"), GOLDEN_ON_EVICTION)
def test_golden_numbers_of_a_victim_tier(
    recorded_trace_path: Callable[[str], Path], name: str, device_blocks: int
) -> None:
    trace = read_trace(recorded_trace_path(name))
    for capacity, ratio in GOLDEN_ON_EVICTION[name, device_blocks].items():
        result = optimum(trace, capacity, device_blocks, "on-device-eviction")
        assert round(result.prefix_hit_blocks / trace.block_refs, 3) == ratio
