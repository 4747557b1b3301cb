"""Upper bound of hits within a write budget: against exhaustive search, real policies and the optimum."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload.core.plans import STORES
from kvoffload.errors import ConfigError
from kvoffload.replay.config import ReplayConfig
from kvoffload.replay.device_cache import run_device
from kvoffload.replay.optimum import infinite, optimum
from kvoffload.replay.replay import Replay
from kvoffload.replay.write_bound import bound_within_writes, oracle_within_writes
from kvoffload.tiers.kinds.simulated import SimulatedOptions
from kvoffload.tiers.write_budget import DAY_S
from kvoffload.traces.sources import load_trace
from kvoffload.traces.trace import Trace
from support.naive.optimum import Offers
from support.naive.write_bound import most_hits
from support.optimum_traces import Requests, chained_requests, trace_of


def offers_of(trace: Trace, requests: Requests, device_blocks: int, store: str) -> Offers:
    """Return the offers of each request, with the block numbers of `requests`."""
    if not device_blocks:
        return [(0, request) for request in requests]
    device = run_device(trace, device_blocks)
    offers = []
    for number, request in enumerate(requests):
        dropped = device.dropped[device.offsets[number] : device.offsets[number + 1]]
        victims = trace.block_ids[trace.refs[dropped]].tolist()
        offers.append((int(device.served[number]), request if store == "on-compute" else victims))
    return offers


@given(
    chained_requests(max_requests=5, max_new=1),
    st.integers(0, 1),
    st.integers(0, 2),
    st.integers(0, 2),
    st.integers(0, 2),
    st.sampled_from(STORES),
)
def test_no_choice_of_blocks_exceeds_the_bound(
    requests: Requests, capacity: int, tier: int, max_writes: int, device: int, store: str
) -> None:
    trace = trace_of(requests)
    bound = bound_within_writes(trace, capacity, tier, max_writes, device, store)
    offers = offers_of(trace, requests, device, store)
    assert most_hits(requests, offers, capacity, tier, max_writes) <= bound


def test_by_hand() -> None:
    """Two conversations of one block, with 3 and 2 later uses: one write gives 3 hits, two writes give 5."""
    requests = [[1], [2], [1], [2], [1], [2], [1]]
    trace = trace_of(requests)
    assert [bound_within_writes(trace, 0, 9, writes) for writes in range(4)] == [0, 3, 5, 5]
    assert most_hits(requests, [(0, request) for request in requests], 0, 9, 1) == 3
    # The slot of RAM holds the other block.
    assert bound_within_writes(trace, 1, 9, 1) == 5


@given(chained_requests(12, 3), st.integers(0, 6), st.integers(0, 3), st.sampled_from(STORES))
def test_the_bound_grows_from_rams_optimum_to_the_optimum_of_both(
    requests: Requests, capacity: int, device: int, store: str
) -> None:
    trace = trace_of(requests)
    alone = optimum(trace, capacity, device, store).prefix_hit_blocks
    assert bound_within_writes(trace, capacity, 100, 0, device, store) == alone
    bounds = [bound_within_writes(trace, capacity, 100, writes, device, store) for writes in range(8)]
    assert bounds == sorted(bounds), "more writes never lower the bound"
    everything = bound_within_writes(trace, capacity, 100, trace.unique_blocks, device, store)
    assert everything == infinite(trace).prefix_hit_blocks


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("admission", ["all", "reuse:2"])
def test_no_replay_exceeds_the_bound(chat: str, store: str, admission: str) -> None:
    trace = load_trace(chat)
    trace = dataclasses.replace(trace, timestamps_ms=np.arange(trace.requests) * 1000)
    duration_s, device, ram, tier_blocks = trace.requests - 1, 50, 60, 500
    for max_writes in (0, 30, 300):
        tier = SimulatedOptions(
            capacity=str(tier_blocks),
            admission=admission,
            max_write_blocks_per_day=(max_writes + 0.5) * DAY_S / duration_s,
        )
        report = Replay(trace, ReplayConfig(ram, "hazard", "all", device, store, (tier,))).run()
        assert report.tiers[1].blocks_written <= max_writes
        bound = bound_within_writes(trace, ram, tier_blocks, max_writes, device, store)
        assert report.prefix_hit_blocks <= bound <= report.optimum_hit_ratio * trace.block_refs + 1e-6


def test_an_oracle_behind_caches_by_hand() -> None:
    """RAM of one block hits block 1 once. Block 2 has two later uses, block 1 two further uses."""
    trace = trace_of([[1], [1], [2], [1], [2], [1], [2]])
    replay = Replay(trace, ReplayConfig(1))
    replay.run()
    assert replay.hits_per_request.tolist() == [0, 1, 0, 0, 0, 0, 0]
    hits = [oracle_within_writes(trace, replay.hits_per_request, writes) for writes in range(4)]
    assert hits == [1, 3, 5, 5]
    with pytest.raises(ConfigError, match="max_writes: -1"):
        oracle_within_writes(trace, replay.hits_per_request, -1)


def test_a_negative_number_of_writes_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_writes: -1"):
        bound_within_writes(trace_of([[1]]), 1, 1, -1)
