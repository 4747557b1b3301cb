"""Several engines in simulated time, with separate RAM or with one pool."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from kvoffload.errors import ConfigError
from kvoffload.replay.config import ReplayConfig
from kvoffload.replay.instances import replay_of
from kvoffload.replay.replay import Replay
from kvoffload.replay.routing import ROUND_ROBIN, SESSION, route
from kvoffload.simulate.report import TimedOutcome
from kvoffload.simulate.timed import replay_in_time, run_in_time
from kvoffload.tiers.spec import parse_tiers
from kvoffload.traces.sessions import generate
from kvoffload.traces.trace import Trace
from kvoffload.traces.workloads import builtin
from support.run_cli import kvoffload
from support.simulated_machine import BLOCK_BYTES, INSTANT, QUICK, alone, config, machine, timing, trace_of


def engines(ram: int, device: int, instances: int = 2, **options: Any) -> ReplayConfig:
    given = {"shared_ram": True, "routing": ROUND_ROBIN, **options}
    return config(ram, device, instances=instances, **given)


def stored(done: TimedOutcome) -> float:
    """Return the number of blocks whose copies to RAM have begun."""
    return (done.links[1].bytes_moved + done.links[1].bytes_left) / BLOCK_BYTES


@pytest.fixture(scope="module")
def small() -> Trace:
    return generate(builtin("chat", sessions=120))


# ---- by hand: computing, storing and loading a block take a second each


def test_a_block_of_another_engine_is_loaded() -> None:
    trace = trace_of((0, "abc"), (9, "abc"))
    pool = run_in_time(trace, timing(), 9, engines(9, 9))
    assert pool.offload_hit_blocks == 2, "the last block is always computed"
    assert (pool.ttft_s.mean, pool.loading_s.mean) == (3, 1)
    assert pool.seconds == 12
    apart = run_in_time(trace, timing(), 9, engines(9, 9, shared_ram=False))
    assert (apart.offload_hit_blocks, apart.ttft_s.mean) == (0, 3)
    fast = timing(machine(load_bytes_per_s=INSTANT))
    assert run_in_time(trace, fast, 9, engines(9, 9)).ttft_s.mean == 2, "3 and 1"


def test_a_request_waits_for_a_store_of_another_engine() -> None:
    # Computed at 3, stored at 6. The second engine is idle until 6, loads until 8 and computes until 9.
    pool = run_in_time(trace_of((0, "abc"), (4, "abc")), timing(), 9, engines(9, 9))
    assert pool.seconds == 9
    assert pool.waiting_s.mean == 1, "0 and 2"


def test_engines_compute_at_the_same_time() -> None:
    trace = trace_of((0, "abc"), (0, "def"))
    assert run_in_time(trace, timing(), 9).seconds == 6
    two = run_in_time(trace, timing(), 9, instances=2, routing=ROUND_ROBIN)
    assert (two.seconds, two.prefill_s, two.device_busy_share) == (3, 6, 1)


def test_a_turn_waits_for_the_previous_turn_on_another_engine() -> None:
    two = run_in_time(trace_of((0, "ab"), (1, "abc")), timing(), 9, instances=2, routing=ROUND_ROBIN)
    assert two.seconds == 5, "the next turn arrives at 2, not at 1"


def test_an_engine_without_requests_is_idle() -> None:
    trace = trace_of((0, "ab"), (5, "cd"))
    for fleet in (engines(9, 9, 4), engines(9, 9, 4, shared_ram=False)):
        done = run_in_time(trace, timing(), 9, fleet)
        assert (done.requests, stored(done)) == (2, 4)
        assert [link.jobs for link in done.links] == [0, 2]
        assert done.device_busy_share == pytest.approx(4 / (4 * done.seconds))


# ---- against a replay without a clock


@given(
    st.lists(st.text("ab", max_size=6), max_size=30),
    st.sampled_from(["lru", "arc", "s3fifo"]),
    st.integers(1, 8),
    st.integers(8, 20),
    st.integers(2, 4),
    st.booleans(),
    st.sampled_from(["all", "reuse:2"]),
)
def test_one_request_at_a_time_hits_as_in_a_replay(
    paths: list[str], policy: str, ram: int, device: int, instances: int, is_shared: bool, admission: str
) -> None:
    trace = alone([*paths, "a"])
    given = engines(ram, device, instances, policy=policy, admission=admission, shared_ram=is_shared)
    plain = replay_of(trace, given).run()
    instant = machine(load_bytes_per_s=INSTANT, store_bytes_per_s=INSTANT)
    done = run_in_time(trace, timing(instant, at_once=1), device, given)
    counts = done.device_hit_blocks, done.offload_hit_blocks, stored(done)
    assert counts == (plain.device_hit_blocks, plain.offload_hit_blocks, plain.blocks_written)


def test_separate_engines_equal_single_engines(small: Trace) -> None:
    device, on = 2 * small.longest_request, timing(QUICK)
    given = engines(device, device, 3, shared_ram=False, routing=SESSION)
    together = run_in_time(small, on, device, given)
    engine_of = route(small, 3, SESSION)
    engine_traces = [small.of_requests(np.flatnonzero(engine_of == number)) for number in range(3)]
    single = replace(given, instances=1)
    runs = [run_in_time(engine_trace, on, device, single) for engine_trace in engine_traces]
    assert together.prefill_s == pytest.approx(sum(run.prefill_s for run in runs))
    assert together.offload_hit_blocks == sum(run.offload_hit_blocks for run in runs) > 0
    assert together.device_hit_blocks == sum(run.device_hit_blocks for run in runs)
    waits = sum(run.ttft_s.mean * run.requests for run in runs) / small.requests
    assert together.ttft_s.mean == pytest.approx(waits)
    assert together.most_waiting == max(run.most_waiting for run in runs)
    assert together.tiers[0].written == sum(run.tiers[0].written for run in runs)
    assert [link.bytes_moved for link in together.links] == [
        sum(run.links[number].bytes_moved for run in runs) for number in range(2)
    ]


@pytest.mark.parametrize(
    ("admission", "tiers"),
    [
        ("tinylfu", "none"),
        pytest.param("all", "simulated:2000", marks=pytest.mark.slow),
        pytest.param("all", "simulated:2000,per_engine=true", marks=pytest.mark.slow),
        pytest.param("reuse:2", "simulated:500+2000", marks=pytest.mark.slow),
    ],
)
def test_a_pool_adds_up_and_is_deterministic(small: Trace, admission: str, tiers: str) -> None:
    device = small.longest_request + 50
    given = engines(device, device, 3, admission=admission, tiers=parse_tiers("tiers", tiers))
    updates = list[int]()
    report = replay_in_time(small, given, timing(QUICK), updates.append)
    assert report.to_json() == replay_in_time(small, given, timing(QUICK)).to_json()
    assert updates == sorted(updates)
    assert updates[-1] == 2 * small.requests
    for done in (report.with_offload, report.without):
        hits = done.device_hit_blocks + done.offload_hit_blocks
        assert done.prefill_tokens == (small.block_refs - hits) * small.block_tokens
        assert 0 < done.device_busy_share <= 1
    done = report.with_offload
    assert done.offload_hit_blocks == sum(tier.hit_blocks for tier in done.tiers) > 0
    assert done.links[0].bytes_moved == done.offload_hit_blocks * BLOCK_BYTES
    assert done.hit_ratio > report.without.hit_ratio
    apart = run_in_time(small, timing(QUICK), device, replace(given, shared_ram=False, tiers=()))
    assert apart.hit_ratio < done.hit_ratio
    assert (report.instances, report.routing, report.shared_ram) == (3, ROUND_ROBIN, True)


@pytest.mark.slow
def test_engines_of_a_pool_have_separate_disks(small: Trace) -> None:
    device = small.longest_request + 50
    given = engines(device // 3, device, 3)
    done = {
        tiers: run_in_time(small, timing(QUICK), device, replace(given, tiers=parse_tiers("tiers", tiers)))
        for tiers in (
            "simulated:9000",
            "simulated:9000,per_engine=true",
            "simulated:9000,per_engine=true+9000",
        )
    }
    shared, own, both = done.values()
    assert [link.name for link in own.links] == ["load", "store", "simulated read", "simulated write"]
    assert [link.name for link in both.links[4:]] == ["simulated 2 read", "simulated 2 write"]
    for outcome in done.values():
        for tier, link in zip(outcome.tiers[1:], outcome.links[3::2], strict=True):
            assert tier.written * BLOCK_BYTES == link.bytes_moved + link.bytes_left
    # Each engine writes its own disk, whose blocks serve only this engine.
    assert own.tiers[1].written > shared.tiers[1].written
    assert own.offload_hit_blocks < shared.offload_hit_blocks
    assert both.tiers[2].hit_blocks > 0


# ---- options


def test_tiers_of_separate_engines_are_refused() -> None:
    given = engines(9, 9, shared_ram=False, tiers=parse_tiers("tiers", "simulated:9"))
    with pytest.raises(ConfigError, match="instances: 2 is invalid; tiers behind separate RAM need a single"):
        replay_in_time(trace_of((0, "ab")), given, timing())
    assert Replay(trace_of((0, "ab")), engines(9, 9)).run().instances == 2


@pytest.mark.slow
def test_the_command(chat: str) -> None:
    arguments = ("simulate", chat, "--bytes-per-token", "128KiB", "--capacity", "8GiB", "--quiet",
                 "--device-blocks", "20GiB", "--instances", "4", "--routing", "round-robin")  # fmt: skip
    done = kvoffload(*arguments, "--shared-ram")
    together = " ".join(done.stdout.split())
    assert "4 engines have one pool of 512 blocks of RAM; requests go by round-robin." in together
    assert "in each engine" in together
    assert "4 engines have 128 blocks of RAM each" in " ".join(kvoffload(*arguments).stdout.split())
    shown = json.loads(kvoffload(*arguments, "--shared-ram", "--format", "json").stdout)
    assert (shown["instances"], shown["shared_ram"], shown["capacity_blocks"]) == (4, True, 128)
    done = kvoffload(*arguments, "--tiers", "1TiB")
    assert "instances: 4 is invalid; tiers behind separate RAM need a single engine" in done.stderr
    done = kvoffload("simulate", chat, "--bytes-per-token", "128KiB", "--shared-ram")
    assert "shared-ram: True is invalid; it needs several engines" in done.stderr
