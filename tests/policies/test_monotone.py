"""Properties of replays of any trace: LRU's hits grow with the cache, and no policy beats OPT."""

from __future__ import annotations

from itertools import chain, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvoffload.core.manager import OffloadingManager
from kvoffload.core.policy import POLICIES, EvictionPolicy
from kvoffload.replay.optimum import optimum
from kvoffload.testing.audit import audit
from kvoffload.traces.trace import Trace
from support.naive.arc import NaiveARC
from support.naive.lru import NaiveLRU
from support.small_hazard import HazardOfFewKeys

Requests = list[list[int]]

FEWER = settings(max_examples=settings().max_examples // 2)
"""Examples of each policy."""

BUILT_IN = [HazardOfFewKeys if name == "hazard" else name for name in POLICIES.names()]


@st.composite
def chained_requests(draw: st.DrawFn, max_requests: int = 40, max_new: int = 5) -> Requests:
    """Draw requests that follow an earlier request for a while, then continue with new blocks."""
    requests: Requests = []
    blocks = 0
    for _ in range(draw(st.integers(1, max_requests))):
        earlier = draw(st.sampled_from([[], *requests]))
        shared, new = draw(st.integers(0, len(earlier))), draw(st.integers(0, max_new))
        requests.append([*earlier[:shared], *range(blocks, blocks + new)])
        blocks += new
    return requests


def trace_of(requests: Requests) -> Trace:
    return Trace(
        name="test",
        block_tokens=1,
        block_ids=np.arange(1 + max(chain(*requests), default=-1), dtype=np.int64),
        refs=np.array([*chain(*requests)], np.int32),
        offsets=np.cumsum([0, *map(len, requests)], dtype=np.int64),
        timestamps_ms=np.zeros(len(requests), np.int64),
        output_tokens=np.zeros(len(requests), np.int64),
    )


def prefix_hits(
    requests: Requests, capacity: int, policy: str | type[EvictionPolicy] = "lru", admission: str = "all"
) -> list[int]:
    """Return the prefix hits of each request; requests are looked up, stored and finished one at a time."""
    manager = OffloadingManager(capacity, key_bytes=8, policy=policy, admission=admission)
    hits = []
    for number, request in enumerate(requests):
        keys = [block.to_bytes(8, "little") for block in request]
        ctx = manager.begin_request(str(number))
        hits.append(manager.lookup(keys, ctx).num_ready)
        plan = manager.prepare_store(keys, ctx)
        if plan is not None:
            manager.complete_store(plan)
        manager.finish_request(ctx)
    audit(manager)
    return hits


@given(chained_requests())
def test_every_request_hits_no_less_in_a_larger_lru(requests: Requests) -> None:
    by_capacity = [prefix_hits(requests, capacity) for capacity in (1, 2, 3, 5, 8, 12, 16, 24)]
    for smaller, larger in pairwise(by_capacity):
        assert all(few <= many for few, many in zip(smaller, larger, strict=True))


@FEWER
@given(chained_requests(), st.integers(1, 30))
@pytest.mark.parametrize("admission", ["all", "reuse:2"])
@pytest.mark.parametrize("policy", BUILT_IN)
def test_no_policy_exceeds_the_optimum(
    policy: Any, admission: str, requests: Requests, capacity: int
) -> None:
    best = optimum(trace_of(requests), capacity).prefix_hit_blocks
    assert sum(prefix_hits(requests, capacity, policy, admission)) <= best


@FEWER
@given(chained_requests())
@pytest.mark.parametrize("policy", [*BUILT_IN, NaiveLRU, NaiveARC])
def test_a_cache_with_room_for_all_hits_every_known_block(policy: Any, requests: Requests) -> None:
    trace = trace_of(requests)
    hits = sum(prefix_hits(requests, max(1, trace.unique_blocks), policy))
    assert hits == trace.block_refs - trace.unique_blocks


@FEWER
@given(st.integers(1, 8), st.integers(1, 12))
@pytest.mark.parametrize("policy", BUILT_IN)
def test_the_head_of_a_request_that_does_not_fit_is_hit(policy: Any, capacity: int, length: int) -> None:
    request = [*range(length)]
    assert prefix_hits([request] * 3, capacity, policy) == [0] + [min(capacity, length)] * 2
