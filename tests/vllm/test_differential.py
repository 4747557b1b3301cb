"""Differential test of our manager and vLLM's: equal calls give equal answers, except for named differences.

Needs an environment with vLLM (``make vllm-env``); ``make test-vllm`` runs it there.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvoffload.testing.audit import audit
from kvoffload.traces.format import read_trace
from support.vllm_managers import Ours, Theirs, key, random_paths
from support.vllm_needs import COUNTS_OF_OFFERS, ORDER, VERSION, needs


@needs(*ORDER)
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("threshold", [1, 2])
def test_lru_decides_as_vllm_does(seed: int, threshold: int) -> None:
    """For whole paths that fit: equal hits, stores, ordered evictions and contents. The name has the seed."""
    vllm_side, our_side = Theirs(64, "lru", threshold), Ours(64, "lru", threshold)
    paths = random_paths(seed, 600, 20)
    for number, path in enumerate(paths):
        assert our_side.serve(str(number), path) == vllm_side.serve(str(number), path), f"request {number}"
        assert our_side.evicted == vllm_side.evicted, f"request {number}"
    everything = {item for path in paths for item in path}
    assert [our_side.holds(item) for item in everything] == [vllm_side.holds(item) for item in everything]
    assert our_side.evicted, "the test must evict"
    audit(our_side.manager)


@needs(*ORDER)
@pytest.mark.trace
@pytest.mark.parametrize(
    ("capacity", "threshold", "ratio", "written"),
    [(1_000, 1, 0.045878, 156_935), (5_000, 1, 0.123662, 144_141), (5_000, 2, 0.166135, 31_837)],
)
def test_both_managers_reproduce_the_golden_numbers(
    recorded_trace_path: Callable[[str], Path], capacity: int, threshold: int, ratio: float, written: int
) -> None:
    trace = read_trace(recorded_trace_path("conversation_first60"))
    keys = [key(number) for number in range(trace.unique_blocks)]
    for manager in (Theirs(capacity, "lru", threshold), Ours(capacity, "lru", threshold)):
        hits = stored = 0
        for request in range(trace.requests):
            codes = trace.refs[trace.offsets[request] : trace.offsets[request + 1]]
            result, new = manager.serve(str(request), [keys[code] for code in codes])
            hits, stored = hits + result, stored + len(new)
        assert (round(hits / trace.block_refs, 6), stored) == (ratio, written), type(manager).__name__


# Intended differences. Each test shows the behaviour of both managers.


def test_difference_head_first_partial_store() -> None:
    vllm_side, our_side = Theirs(4, "lru"), Ours(4, "lru")
    path = [key(number) for number in range(6)]
    assert vllm_side.serve("r", path) == (0, []), "all or nothing"
    assert our_side.serve("r", path) == (0, path[:4]), "as many leading blocks as fit"


@needs(*COUNTS_OF_OFFERS)
def test_difference_retries_count_once() -> None:
    vllm_side, our_side = Theirs(4, "lru", 2), Ours(4, "lru", 2)
    rig = [key(1)]
    ctx = vllm_side.begin("r", rig)
    assert [len(vllm_side.manager.prepare_store(rig, ctx).keys_to_store) for _ in range(2)] == [0, 1]
    context = our_side.manager.begin_request("r", rig)
    plans = [our_side.manager.prepare_store(rig, context) for _ in range(3)]
    assert [len(plan.keys) for plan in plans if plan is not None] == [0, 0, 0]


def test_difference_ghost_hits_enter_t2() -> None:
    vllm_side, our_side = Theirs(2, "arc"), Ours(2, "arc")
    for manager in (vllm_side, our_side):
        manager.serve("a", [key(1)])
        manager.serve("a again", [key(1)])
        manager.serve("b", [key(2)])
        manager.serve("c", [key(3)])  # 2 leaves T1 and is remembered
        manager.serve("b again", [key(2)])
    assert key(2) in vllm_side.manager._policy.t1
    assert key(2) not in vllm_side.manager._policy.t2
    t1, t2, _, _ = our_side.manager.policy.lists()  # type: ignore[attr-defined]
    assert key(2) in {our_side.manager.index.key_at(slot) for slot in t2}
    assert key(2) not in {our_side.manager.index.key_at(slot) for slot in t1}


@needs(*ORDER)
def test_difference_a_hit_refreshes_the_blocks_served_by_the_device() -> None:
    """The head is on the device, the tail in RAM: vLLM's manager sees only the tail and evicts the head."""
    head, tail, new = [key(1), key(2)], [key(3)], [key(9)]
    vllm_side, our_side = Theirs(4, "lru"), Ours(4, "lru")
    for manager in (vllm_side, our_side):
        manager.serve("first", head + tail)
        manager.serve("other", [key(8)])
    ctx = vllm_side.begin("turn 2", tail)
    vllm_side.manager.prepare_load(tail, ctx)
    vllm_side.manager.complete_load(tail, ctx)
    vllm_side.manager.on_request_finished(ctx)
    context = our_side.manager.begin_request("turn 2", head + tail)
    assert our_side.manager.lookup(tail, context).num_ready == 1
    our_side.manager.complete_load(our_side.manager.prepare_load(tail, context))
    our_side.manager.finish_request(context)
    vllm_side.serve("new", new)
    our_side.serve("new", new)
    assert not vllm_side.holds(head[1])
    assert [our_side.holds(item) for item in head + tail] == [True, True, True]


def test_difference_a_request_does_not_evict_its_own_head() -> None:
    """A request stored in two pieces, as with chunked prefill: vLLM protects only the keys of the call.

    Since 0.33 it evicts the tail of the first piece before the head; blocks behind the gap are unreachable.
    """
    vllm_side, our_side = Theirs(3, "lru"), Ours(3, "lru")
    path = [key(number) for number in range(5)]
    ctx = vllm_side.begin("r", path)
    for piece in (path[:3], path[3:]):
        output = vllm_side.manager.prepare_store(piece, ctx)
        vllm_side.manager.complete_store(output.keys_to_store, ctx)
    evicts_tail_first = VERSION >= (0, 33)
    kept = [True, False, False, True, True] if evicts_tail_first else [False, False, True, True, True]
    assert [vllm_side.holds(item) for item in path] == kept
    context = our_side.manager.begin_request("r", path)
    first = our_side.manager.prepare_store(path[:3], context)
    assert first is not None
    our_side.manager.complete_store(first)
    assert our_side.manager.prepare_store(path[3:], context) is None
    assert [our_side.holds(item) for item in path] == [True, True, True, False, False]
