"""Several engines with one RAM pool: against one manager and several devices driven by the test."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload.core.manager import OffloadingManager
from kvoffload.core.plans import ON_COMPUTE, ON_DEVICE_EVICTION
from kvoffload.errors import CombinedConfigError, ConfigError
from kvoffload.replay.config import ReplayConfig, slots_needed
from kvoffload.replay.data import DataPlane
from kvoffload.replay.device_cache import run_device, run_devices
from kvoffload.replay.faults import parse_injection
from kvoffload.replay.instances import SharedReplay, replay_of
from kvoffload.replay.optimum import infinite, optimum
from kvoffload.replay.replay import Replay
from kvoffload.replay.routing import RANDOM, ROUND_ROBIN, ROUTINGS, SESSION, route
from kvoffload.tiers.spec import parse_tiers
from kvoffload.traces.format import read_trace
from kvoffload.traces.sessions import generate
from kvoffload.traces.trace import Trace
from kvoffload.traces.workloads import builtin
from support.naive.optimum import Offers, best_of_all, naive_device, naive_optimum
from support.optimum_traces import Requests, chained_requests, trace_of
from support.pool_by_hand import check, members
from support.run_cli import kvoffload


@pytest.fixture(scope="module")
def trace() -> Trace:
    return generate(builtin("chat", sessions=150))


def shared(instances: int, capacity: int = 60, **more: Any) -> ReplayConfig:
    return ReplayConfig(capacity, instances=instances, shared_ram=True, **more)


@pytest.mark.slow
@given(
    chained_requests(max_requests=40, max_new=5),
    st.integers(2, 5),
    st.integers(1, 6),
    st.integers(1, 10),
    st.sampled_from(["lru", "hazard"]),
)
def test_equals_one_manager_and_several_devices_driven_by_hand(
    requests: Requests, instances: int, capacity: int, device: int, policy: str
) -> None:
    trace = trace_of(requests)
    config = shared(instances, capacity, policy=policy, device_blocks=device, routing=ROUND_ROBIN)
    num_slots = slots_needed(trace, config.pool_blocks)
    manager = OffloadingManager(num_slots, **config.manager_options(num_slots))
    check(trace, config, [manager] * instances)


@pytest.mark.parametrize("queue", [0, 1, 7])
@pytest.mark.parametrize("admission", ["all", "reuse:2", "tinylfu"])
@pytest.mark.parametrize("policy", ["lru", "hazard"])
def test_decides_as_the_engines_of_a_pool(trace: Trace, policy: str, admission: str, queue: int) -> None:
    """With 7 waiting requests, each engine expects more blocks than its share of the pool."""
    config = shared(4, policy=policy, admission=admission, device_blocks=80, queue_requests=queue,
                    routing=ROUND_ROBIN)  # fmt: skip
    with members(trace, config) as managers:
        report = check(trace, config, managers)
    assert report.prefix_hit_blocks > report.device_hit_blocks > 0
    assert report.hit_blocks_of_others > 0
    assert (report.blocks_refused > 0) == (admission != "all" or policy == "hazard")


@pytest.mark.slow
@pytest.mark.trace
@pytest.mark.parametrize("policy", ["lru", "hazard,write_cost=0.5"])
def test_a_recording_equals_the_engines_of_a_pool(
    recorded_trace_path: Callable[[str], Path], policy: str
) -> None:
    trace = read_trace(recorded_trace_path("conversation_first60"))
    config = shared(8, 1000, policy=policy, device_blocks=500, queue_requests=4, routing=ROUND_ROBIN)
    with members(trace, config) as managers:
        assert check(trace, config, managers).hit_blocks_of_others > 10_000


# ---- devices


def offers_of(requests: Requests, device_blocks: int, instances: int) -> Offers:
    """Compute the offers of each engine's device separately, in the order of all requests, on compute."""
    offers: Offers = [(0, [])] * len(requests)
    for engine in range(instances):
        offers[engine::instances] = naive_device(requests[engine::instances], device_blocks, ON_COMPUTE)
    return offers


@given(chained_requests(max_requests=30, max_new=5), st.integers(0, 12), st.integers(1, 4))
def test_devices_of_several_engines_equal_separate_devices(
    requests: Requests, device_blocks: int, instances: int
) -> None:
    trace = trace_of(requests)
    engine_of = route(trace, instances, ROUND_ROBIN)
    together = run_devices(trace, device_blocks, engine_of)
    dropped = np.split(trace.block_ids[trace.refs[together.dropped]], together.offsets[1:])
    for engine in range(instances):
        own = np.flatnonzero(engine_of == engine)
        engine_trace = trace.of_requests(own)
        alone = run_device(engine_trace, device_blocks)
        assert together.served[own].tolist() == alone.served.tolist()
        of_alone = np.split(engine_trace.block_ids[engine_trace.refs[alone.dropped]], alone.offsets[1:])
        assert [dropped[n].tolist() for n in own] == [blocks.tolist() for blocks in of_alone[: len(own)]]


# ---- the optimum


@given(chained_requests(25, 5), st.integers(0, 25), st.integers(0, 12), st.integers(1, 4))
def test_the_optimum_equals_its_naive_twin(
    requests: Requests, capacity: int, device_blocks: int, instances: int
) -> None:
    trace, offers = trace_of(requests), offers_of(requests, device_blocks, instances)
    best = optimum(trace, capacity, device_blocks, engine_of=route(trace, instances, ROUND_ROBIN))
    assert best.prefix_hit_blocks == naive_optimum(requests, capacity, offers)


@given(chained_requests(7, 2), st.integers(0, 3), st.integers(0, 4), st.integers(1, 3))
def test_the_optimum_equals_the_best_choice_by_exhaustive_search(
    requests: Requests, capacity: int, device_blocks: int, instances: int
) -> None:
    trace, offers = trace_of(requests), offers_of(requests, device_blocks, instances)
    best = optimum(trace, capacity, device_blocks, engine_of=route(trace, instances, ROUND_ROBIN))
    assert best.prefix_hit_blocks == best_of_all(requests, capacity, offers)


@pytest.mark.parametrize("routing", ROUTINGS)
def test_no_policy_exceeds_the_optimum(trace: Trace, routing: str) -> None:
    for policy in ("lru", "arc", "hazard"):
        config = shared(4, policy=policy, device_blocks=40, routing=routing)
        report = Replay(trace, config).run()
        assert report.device_hit_blocks < report.prefix_hit_blocks
        assert report.prefix_hit_ratio <= report.optimum_hit_ratio < report.infinite_hit_ratio


# ---- one pool and separate pools


@pytest.mark.parametrize("routing", ROUTINGS)
def test_without_devices_one_pool_is_one_engine_with_all_ram(trace: Trace, routing: str) -> None:
    pool, single = Replay(trace, shared(4, routing=routing)), Replay(trace, ReplayConfig(240))
    report, expected = pool.run(), single.run()
    assert report.decisions_sha256 == expected.decisions_sha256
    assert report.optimum_hit_ratio == expected.optimum_hit_ratio
    assert (report.capacity_blocks, report.instances, report.shared_ram) == (60, 4, True)
    hits = pool.hits_of_instances
    assert len(hits) == 4
    assert sum(int(own.sum()) for own in hits) == report.prefix_hit_blocks


def test_a_pool_with_room_for_all_loses_nothing(trace: Trace) -> None:
    config = shared(4, trace.unique_blocks, device_blocks=30, routing=RANDOM)
    assert Replay(trace, config).run().prefix_hit_blocks == infinite(trace).prefix_hit_blocks


def test_moving_sessions_gain_most_from_a_pool(trace: Trace) -> None:
    gains = {}
    for routing in (SESSION, ROUND_ROBIN):
        config = shared(4, 120, device_blocks=60, routing=routing)
        pool, alone = replay_of(trace, config), replay_of(trace, replace(config, shared_ram=False))
        assert isinstance(pool, Replay)
        assert isinstance(alone, SharedReplay)
        gains[routing] = pool.run().prefix_hit_ratio - alone.run().prefix_hit_ratio
    assert gains[ROUND_ROBIN] > gains[SESSION] > 0


def test_ends_of_requests_are_ordered_by_time_across_engines(trace: Trace) -> None:
    config = shared(4, decode_tokens_per_s=30.0)
    single = Replay(trace, ReplayConfig(240, decode_tokens_per_s=30.0)).run()
    assert Replay(trace, config).run().decisions_sha256 == single.decisions_sha256


def test_one_tier_behind_the_pool_serves_all(trace: Trace) -> None:
    tiers = parse_tiers("tiers", "500")
    report = Replay(trace, shared(4, tiers=tiers, routing=RANDOM)).run()
    single = Replay(trace, ReplayConfig(240, tiers=tiers)).run()
    assert report.decisions_sha256 == single.decisions_sha256
    assert 0 < report.hit_blocks_of_others < report.offload_hit_blocks


# ---- bytes


def test_bytes_of_another_engine_are_verified(trace: Trace) -> None:
    config = shared(3, 120, device_blocks=30, routing=ROUND_ROBIN)
    data = DataPlane(slots_needed(trace, config.pool_blocks), 64)
    report = Replay(trace, config, data).run()
    data.close()
    assert report.blocks_verified == report.offload_hit_blocks >= report.hit_blocks_of_others > 0
    assert report.mismatches_served == report.mismatches_caught == 0
    assert report.decisions_sha256 == Replay(trace, config).run().decisions_sha256


@pytest.mark.parametrize("inject", [None, "bitflip:5e-2"])
def test_bytes_of_separate_pools_are_verified(trace: Trace, inject: str | None) -> None:
    config = ReplayConfig(200, device_blocks=30, instances=3)
    planes = [
        DataPlane(slots_needed(trace, 200), 64, parse_injection(inject, seed) if inject else None)
        for seed in range(3)
    ]
    report = SharedReplay(trace, config, planes).run()
    for plane in planes:
        plane.close()
    assert report.mismatches_served == 0
    assert report.bytes_stored == 64 * report.blocks_written == report.tiers[0].bytes_written
    assert report.bytes_loaded == report.tiers[0].bytes_read
    assert report.mismatches_caught == report.tiers[0].mismatches_caught
    assert (report.damage_injected > 0) == (report.mismatches_caught > 0) == (inject is not None)
    if inject is None:
        assert report.blocks_verified == report.offload_hit_blocks
        assert report.decisions_sha256 == SharedReplay(trace, config).run().decisions_sha256


# ---- options


def test_invalid_pools_are_refused() -> None:
    with pytest.raises(ConfigError, match="shared-ram: True is invalid; it needs several engines"):
        ReplayConfig(1, shared_ram=True)
    with pytest.raises(
        ConfigError, match="store: 'on-device-eviction' is invalid; with shared-ram allowed: on-c"
    ):
        shared(2, store=ON_DEVICE_EVICTION, device_blocks=1)
    with pytest.raises(CombinedConfigError, match=r"shared-ram: (.|\n)*store: "):
        ReplayConfig(1, shared_ram=True, store=ON_DEVICE_EVICTION, device_blocks=1)


def test_round_robin_deals_out_requests(trace: Trace) -> None:
    assert route(trace, 3, ROUND_ROBIN)[:7].tolist() == [0, 1, 2, 0, 1, 2, 0]


@pytest.mark.slow
def test_the_replay_command(tmp_path: Path) -> None:
    arguments = ("replay", "chat", "--capacity", "1%", "--device-blocks", "1x", "--instances", "4", "--quiet",
                 "--block-bytes", "64", "--routing", "round-robin")  # fmt: skip
    alone, pool = (
        json.loads(kvoffload(*arguments, *option, "--format", "json").stdout)
        for option in ((), ["--shared-ram"])
    )
    assert (alone["instances"], alone["shared_ram"]) == (4, False)
    assert (pool["instances"], pool["shared_ram"], pool["routing"]) == (4, True, "round-robin")
    assert alone["capacity_blocks"] == pool["capacity_blocks"] > 0
    assert alone["prefix_hit_ratio"] < pool["prefix_hit_ratio"]
    assert pool["blocks_verified"] == pool["offload_hit_blocks"] > pool["hit_blocks_of_others"] > 0
    log = tmp_path / "decisions.txt"
    done = kvoffload(*arguments, "--shared-ram", "--decisions", str(log))
    assert f"one pool of {4 * pool['capacity_blocks']:,} blocks" in done.stdout
    assert "4 engines have one pool of RAM, 4 times the given size; requests go by round-robin" in done.stdout
    assert log.stat().st_size > 0
    done = kvoffload(*arguments)
    assert f"{pool['capacity_blocks']:,} blocks each" in done.stdout
    assert "4 engines have RAM of the given size each; requests go by round-robin." in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--shared-ram"],
            "shared-ram: True is invalid; it needs several engines: set instances to 2 or more",
        ),
        (
            ["--instances", "2", "--decisions", "log"],
            "decisions: 'log' is invalid; instances with separate RAM",
        ),
        (
            ["--instances", "2", "--tier", "simulated:10%"],
            "instances: 2 is invalid; with separate RAM the tiers",
        ),
        (
            ["--instances", "2", "--no-data", "--tier", "valkey://host/kv"],
            "with several instances allowed: simulated:CAPACITY",
        ),
    ],
)
def test_invalid_options_are_a_one_line_error(arguments: list[str], message: str) -> None:
    done = kvoffload("replay", "chat", *arguments)
    assert done.returncode == 2
    assert message in done.stderr


@pytest.mark.slow
def test_the_sweep_command() -> None:
    arguments = ("sweep", "chat", "--policies", "lru", "--capacities", "1%", "--device-blocks", "1x",
                 "--instances", "4", "--shared-ram", "--quiet", "--jobs", "1")  # fmt: skip
    done = kvoffload(*arguments, "--format", "json")
    alone, pool = json.loads(done.stdout)
    assert (alone["shared_ram"], pool["shared_ram"]) == (False, True)
    assert alone["others_hit_ratio"] == 0 < pool["others_hit_ratio"]
    assert alone["prefix_hit_ratio"] < pool["prefix_hit_ratio"]
    assert alone["among_best"] is False
    assert [row["baseline"] for row in (alone, pool)] == ["lru, all"] * 2
    assert pool["verdict"] == "at 1%, shared RAM: lru; nothing else was measured"
    done = kvoffload(*arguments)
    assert "lru, separate RAM" in done.stdout
    assert "lru, shared RAM" in done.stdout
    together = " ".join(done.stdout.split())
    assert (
        "4 instances have RAM of this size each, or one pool of 4 times this size (shared RAM);" in together
    )
    few = ("sweep", "chat", "--policies", "lru", "--capacities", "1%", "--quiet", "--jobs", "1")
    done = kvoffload(*few, "--instances", "2", "--shared-ram", "--tiers", "1%+10%", "--format", "json")
    assert [row["shared_ram"] for row in json.loads(done.stdout)] == [False, True]
    done = kvoffload(*few, "--instances", "2", "--shared-ram", "--device-blocks", "1x", "--format", "json",
                     "--stores", "on-compute,on-device-eviction")  # fmt: skip
    assert "1 combinations left out: with shared-ram allowed: on-compute, because" in done.stderr
    assert len(json.loads(done.stdout)) == 3
