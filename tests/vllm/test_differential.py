"""Our manager beside vLLM's real one: the same calls, and where the answers must be equal, and where not.

Needs an environment with vLLM (``make vllm-env``); ``make test-vllm`` runs this there.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvoffload.testing.audit import audit
from kvoffload.traces.format import read_trace
from support.vllm_managers import Ours, Theirs, key, random_paths
from support.vllm_needs import COUNTS_OF_OFFERS, ORDER, needs


@needs(*ORDER)
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("threshold", [1, 2])
def test_lru_decides_as_vllm_does(seed: int, threshold: int) -> None:
    """Whole paths that fit: equal hits, stores, evictions in order, and contents. The seed is in the name."""
    theirs, ours = Theirs(64, "lru", threshold), Ours(64, "lru", threshold)
    paths = random_paths(seed, 600, 20)
    for number, path in enumerate(paths):
        assert ours.serve(str(number), path) == theirs.serve(str(number), path), f"request {number}"
        assert ours.evicted == theirs.evicted, f"request {number}"
    everything = {one for path in paths for one in path}
    assert [ours.holds(one) for one in everything] == [theirs.holds(one) for one in everything]
    assert ours.evicted, "the test must evict"
    audit(ours.manager)


@needs(*ORDER)
@pytest.mark.trace
@pytest.mark.parametrize(
    ("capacity", "threshold", "ratio", "written"),
    [(1_000, 1, 0.045878, 156_935), (5_000, 1, 0.123662, 144_141), (5_000, 2, 0.166135, 31_837)],
)
def test_both_give_the_golden_numbers(
    recorded_trace_path: Callable[[str], Path], capacity: int, threshold: int, ratio: float, written: int
) -> None:
    trace = read_trace(recorded_trace_path("conversation_first60"))
    keys = [key(number) for number in range(trace.unique_blocks)]
    for manager in (Theirs(capacity, "lru", threshold), Ours(capacity, "lru", threshold)):
        hits = stored = 0
        for request in range(trace.requests):
            codes = trace.refs[trace.offsets[request] : trace.offsets[request + 1]]
            found, new = manager.serve(str(request), [keys[code] for code in codes])
            hits, stored = hits + found, stored + len(new)
        assert (round(hits / trace.block_refs, 6), stored) == (ratio, written), type(manager).__name__


# Where we differ on purpose. Each test shows what both do.


def test_difference_head_first_partial_store() -> None:
    theirs, ours = Theirs(4, "lru"), Ours(4, "lru")
    path = [key(number) for number in range(6)]
    assert theirs.serve("r", path) == (0, []), "all or nothing"
    assert ours.serve("r", path) == (0, path[:4]), "as much of the head as there is room for"


@needs(*COUNTS_OF_OFFERS)
def test_difference_retries_count_once() -> None:
    theirs, ours = Theirs(4, "lru", 2), Ours(4, "lru", 2)
    one = [key(1)]
    ctx = theirs.begin("r", one)
    assert [len(theirs.manager.prepare_store(one, ctx).keys_to_store) for _ in range(2)] == [0, 1]
    context = ours.manager.begin_request("r", one)
    plans = [ours.manager.prepare_store(one, context) for _ in range(3)]
    assert [len(plan.keys) for plan in plans if plan is not None] == [0, 0, 0]


def test_difference_ghost_hits_enter_t2() -> None:
    theirs, ours = Theirs(2, "arc"), Ours(2, "arc")
    for manager in (theirs, ours):
        manager.serve("a", [key(1)])
        manager.serve("a again", [key(1)])
        manager.serve("b", [key(2)])
        manager.serve("c", [key(3)])  # 2 leaves T1 and is remembered
        manager.serve("b again", [key(2)])
    assert key(2) in theirs.manager._policy.t1
    assert key(2) not in theirs.manager._policy.t2
    t1, t2, _, _ = ours.manager.policy.lists()  # type: ignore[attr-defined]
    assert key(2) in {ours.manager.index.key_at(slot) for slot in t2}
    assert key(2) not in {ours.manager.index.key_at(slot) for slot in t1}


@needs(*ORDER)
def test_difference_a_hit_refreshes_what_the_device_served() -> None:
    """Head on the device, tail here: vLLM's manager hears only of the tail and evicts the head."""
    head, tail, new = [key(1), key(2)], [key(3)], [key(9)]
    theirs, ours = Theirs(4, "lru"), Ours(4, "lru")
    for manager in (theirs, ours):
        manager.serve("first", head + tail)
        manager.serve("other", [key(8)])
    ctx = theirs.begin("turn 2", tail)
    theirs.manager.prepare_load(tail, ctx)
    theirs.manager.complete_load(tail, ctx)
    theirs.manager.on_request_finished(ctx)
    context = ours.manager.begin_request("turn 2", head + tail)
    assert ours.manager.lookup(tail, context).num_ready == 1
    ours.manager.complete_load(ours.manager.prepare_load(tail, context))
    ours.manager.finish_request(context)
    theirs.serve("new", new)
    ours.serve("new", new)
    assert not theirs.holds(head[1])
    assert [ours.holds(one) for one in head + tail] == [True, True, True]


def test_difference_a_request_does_not_evict_its_own_head() -> None:
    """Stored in two pieces, as chunked prefill does: vLLM protects only the keys of the call."""
    theirs, ours = Theirs(3, "lru"), Ours(3, "lru")
    path = [key(number) for number in range(5)]
    ctx = theirs.begin("r", path)
    for piece in (path[:3], path[3:]):
        output = theirs.manager.prepare_store(piece, ctx)
        theirs.manager.complete_store(output.keys_to_store, ctx)
    assert [theirs.holds(one) for one in path] == [False, False, True, True, True]
    context = ours.manager.begin_request("r", path)
    first = ours.manager.prepare_store(path[:3], context)
    assert first is not None
    ours.manager.complete_store(first)
    assert ours.manager.prepare_store(path[3:], context) is None
    assert [ours.holds(one) for one in path] == [True, True, True, False, False]
