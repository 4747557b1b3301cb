"""Our policies inside vLLM's own manager."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.vllm_needs import NAMED_POLICIES, ORDER, VERSION, lacks, needs

if reason := lacks(*NAMED_POLICIES):
    pytest.skip(reason, allow_module_level=True)
from vllm.v1.kv_offload.base import ReqContext
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.kv_offload.cpu.policies.factory import CachePolicyFactory

from kvoffload.core.policy import POLICIES
from kvoffload.errors import ConfigError
from kvoffload.integrations.vllm import policies
from kvoffload.testing.audit import audit
from kvoffload.traces.format import read_trace
from support.vllm_managers import Ours, Theirs, key, random_paths

MODULE = "kvoffload.integrations.vllm.policies"
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "my_policy.py"


class Inside(Theirs):
    """vLLM's manager with one of our policies, made by vLLM."""

    def __init__(self, capacity: int, policy: str, threshold: int = 1) -> None:
        self.manager: Any = CPUOffloadingManager(
            capacity, policy, store_threshold=threshold, cache_policy_module_path=MODULE
        )
        self.evicted: list[bytes] = []


def agree(inside: Any) -> None:
    """Check that vLLM's manager and our manager behind its policy have the same blocks in the same states."""
    policy = inside.manager._policy
    assert isinstance(policy, policies.VLLMPolicy)
    our_side = policy._manager
    assert our_side is not None
    audit(our_side)
    resident = {
        our_side.index.key_at(slot)
        for slot in range(our_side.capacity_blocks)
        if our_side.slots.ref_cnt[slot] >= -1
    }
    assert resident == set(policy.chunks)
    counted = vars(inside.manager)[f"_num_evictable_cache_{'chunks' if VERSION >= (0, 30) else 'blocks'}"]
    assert our_side.stats().evictable == counted == len(policy._evictable)
    assert not policy._expected


@needs(*ORDER)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("threshold", [1, 2])
def test_our_lru_decides_as_vllms(seed: int, threshold: int) -> None:
    """For whole paths that fit: equal hits, stores, ordered evictions and contents. The name has the seed."""
    vllm_side, our_side = Theirs(64, "lru", threshold), Inside(64, "kvoffload-lru", threshold)
    paths = random_paths(seed, 500, 20)
    for number, path in enumerate(paths):
        assert our_side.serve(str(number), path) == vllm_side.serve(str(number), path), f"request {number}"
        assert our_side.evicted == vllm_side.evicted, f"request {number}"
    everything = {item for path in paths for item in path}
    assert [our_side.holds(item) for item in everything] == [vllm_side.holds(item) for item in everything]
    assert our_side.evicted, "the test must evict"
    agree(our_side)


def _that_refuses_none(policy: str) -> str:
    return "hazard,write_cost=-1" if policy == "hazard" else policy


@needs(*ORDER)
@pytest.mark.parametrize("policy", POLICIES.names())
def test_every_policy_decides_as_in_our_manager(policy: str) -> None:
    """For paths that fit, both managers decide equally, unless the policy refuses blocks."""
    inside, our_side = Inside(64, f"kvoffload-{policy}"), Ours(64, _that_refuses_none(policy))
    for number, path in enumerate(random_paths(7, 500, 20)):
        assert inside.serve(str(number), path) == our_side.serve(str(number), path), f"request {number}"
        assert inside.evicted == our_side.evicted, f"request {number}"
    assert inside.evicted
    agree(inside)


def test_names() -> None:
    assert CachePolicyFactory.get_cache_policy_cls("hazard", MODULE).policy == "hazard"
    assert CachePolicyFactory.get_cache_policy_cls("kvoffload-arc", MODULE).policy == "arc"
    assert CachePolicyFactory.get_cache_policy_cls("arc", MODULE).__module__.startswith("vllm.")
    inside = Inside(8, f"{EXAMPLE}:MyPolicy")
    inside.serve("r", [key(number) for number in range(20)][:8])
    agree(inside)
    with pytest.raises(ConfigError, match="did you mean hazard"):
        CachePolicyFactory.get_cache_policy_cls("hazzard", MODULE)


def test_pins_failures_and_resets() -> None:
    inside = Inside(4, "s3fifo")
    path = [key(number) for number in range(4)]
    ctx = inside.begin("r", path)
    output = inside.manager.prepare_store(path, ctx)
    inside.manager.complete_store(output.keys_to_store[2:], ctx, success=False)
    inside.manager.complete_store(output.keys_to_store[:2], ctx)
    agree(inside)
    assert [inside.holds(item) for item in path] == [True, True, False, False]
    reader = inside.begin("reader", path)
    for _ in range(2):
        inside.manager.prepare_load(path[:2], reader)
    agree(inside)
    other = [key(number) for number in range(10, 14)]
    writer = inside.begin("writer", other)
    assert inside.manager.prepare_store(other, writer) is None, "two are pinned"
    agree(inside)
    for _ in range(2):
        inside.manager.complete_load(path[:2], reader)
    agree(inside)
    output = inside.manager.prepare_store(other, writer)
    assert output.keys_to_store == other
    assert sorted(output.evicted_keys) == sorted(path[:2])
    agree(inside)
    inside.manager.reset_cache()
    agree(inside)
    for item in (reader, writer, ctx):
        inside.manager.on_request_finished(item)
    inside.serve("after", path)
    agree(inside)


def test_a_smaller_offer_after_a_refusal_leaks_nothing() -> None:
    inside = Inside(3, "lirs")
    held = [key(number) for number in range(3)]
    inside.serve("held", held)
    reader = inside.begin("reader", held)
    inside.manager.prepare_load(held, reader)
    new = [key(number) for number in range(10, 13)]
    ctx = inside.begin("r", new)
    assert inside.manager.prepare_store(new, ctx) is None
    inside.manager.complete_load(held, reader)
    assert inside.manager.prepare_store(new[:1], ctx).keys_to_store == new[:1]
    agree(inside)
    assert inside.manager.prepare_store(new[:2], ctx).keys_to_store == new[1:2]
    agree(inside)


def test_a_smaller_offer_into_free_slots_evicts_nothing() -> None:
    """A block that has left the sliding window since a refused offer gets no slot."""
    inside = Inside(4, "kvoffload-lru")
    ready, flight, new = (
        [key(10 * row + number) for number in range(count)] for row, count in enumerate((2, 2, 3))
    )
    inside.serve("ready", ready)
    other, ctx = inside.begin("other", flight), inside.begin("r", new)
    storing = inside.manager.prepare_store(flight, other).keys_to_store
    assert inside.manager.prepare_store(new, ctx) is None
    inside.manager.complete_store(storing, other, success=False)
    stored = inside.manager.prepare_store(new[1:], ctx)
    assert (stored.keys_to_store, stored.evicted_keys) == (new[1:], [])
    inside.manager.complete_store(new[1:], ctx)
    reader = inside.begin("reader", ready)
    inside.manager.prepare_load(ready, reader)
    inside.manager.complete_load(ready, reader)
    agree(inside)


def test_slots_that_vllm_does_not_use_are_freed() -> None:
    policy = policies.__getattr__("lru")(4)
    ctx = ReqContext("r")
    names = [key(number) for number in range(4)]
    assert [policy.get(item) for item in names] == [None] * 4
    policy.on_store_miss(names, ctx)
    policy.insert(names[0], "chunk 0")
    assert policy._expected == set(names[1:])
    policy.insert(key(9), "chunk 1")
    assert policy._manager is not None
    assert policy._manager.stats().writing == 2
    audit(policy._manager)


@pytest.mark.parametrize("version", ["0.27", "0.33"])
def test_calls_of_other_versions(version: str) -> None:
    """vLLM 0.27 reports neither misses nor ends of requests; 0.33 passes the request to `insert`."""
    policy = policies.__getattr__("arc")(2)
    for number in range(6):
        rig, ctx = key(number), ReqContext(str(number))
        assert policy.get(rig) is None
        if version == "0.33":
            policy.on_store_miss([rig], ctx)
        if len(policy.chunks) == 2:
            ((evicted_key, chunk),) = policy.evict(1, {rig})
            assert chunk == evicted_key.hex()
        policy.insert(rig, rig.hex(), **({"req_context": ctx} if version == "0.33" else {}))
        policy.mark_evictable(rig)
        if version == "0.27":
            policy.touch([rig], ctx)
    assert len(policy.chunks) == 2
    audit(policy._manager)


@pytest.mark.parametrize("policy", ["lru", "arc", "2q"])
def test_repeated_touches_of_vllm_are_one_use(policy: str) -> None:
    """Before 0.31 vLLM's connector touches the whole path of a request at lookups and at stores."""
    rig = policies.__getattr__(policy)(4)
    for number in range(3):
        path, ctx = [key(2 * number), key(2 * number + 1)], ReqContext(str(number))
        assert [rig.get(name) for name in path] == [None, None]
        rig.touch(path, ctx)
        for evicted_key, _ in rig.evict(2, set(path)) if number == 2 else ():
            assert evicted_key in {key(0), key(1)}
        for name in path:
            rig.insert(name, name.hex())
            rig.mark_evictable(name)
        rig.touch(path, ctx)
    assert rig._manager is not None
    audit(rig._manager)
    if policy == "arc":
        t1, t2, _, _ = rig._manager.policy.lists()  # type: ignore[attr-defined]
        assert (len(t1), len(t2)) == (4, 0), "each was used once"


@pytest.mark.trace
@pytest.mark.parametrize("policy", POLICIES.names())
def test_hit_ratios_on_a_real_trace(recorded_trace_path: Callable[[str], Path], policy: str) -> None:
    """Hits of 1,500 requests that fit into 1,000 blocks are equal; before 0.31 one in a hundred may differ.

    Excluded are requests that do not fit, because vLLM stores no block of such a request, and policies that
    refuse blocks: hazard does so in our manager, but cannot in vLLM's.
    """
    trace = read_trace(recorded_trace_path("conversation_first60"))
    keys = [key(number) for number in range(trace.unique_blocks)]
    inside, our_side = Inside(1_000, f"kvoffload-{policy}"), Ours(1_000, _that_refuses_none(policy))
    hits = [0, 0]
    for row in range(1_500):
        path = [keys[code] for code in trace.refs[slice(*trace.offsets[row : row + 2])]]
        result, expected = inside.serve(str(row), path), our_side.serve(str(row), path)
        hits = [hits[0] + result[0], hits[1] + expected[0]]
        assert result == expected or lacks(*ORDER), f"request {row}"
    assert abs(hits[0] - hits[1]) <= hits[1] / 100
    agree(inside)


def test_difference_vllm_stores_all_of_an_offer_or_nothing() -> None:
    inside, our_side = Inside(4, "kvoffload-lru"), Ours(4, "lru")
    path = [key(number) for number in range(6)]
    assert inside.serve("r", path) == (0, [])
    assert our_side.serve("r", path) == (0, path[:4])
    agree(inside)
