"""Several instances of an engine with a shared tier: equality with single replays, and gains of sharing."""

from __future__ import annotations

import json
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from kvoffload.errors import ConfigError
from kvoffload.replay.config import ReplayConfig
from kvoffload.replay.instances import SharedReplay, replay_of
from kvoffload.replay.replay import Replay
from kvoffload.replay.routing import RANDOM, ROUTINGS, SESSION, route
from kvoffload.tiers.spec import parse_tiers
from kvoffload.traces.sessions import generate
from kvoffload.traces.statistics import turns
from kvoffload.traces.trace import Trace
from kvoffload.traces.workloads import builtin
from support.run_cli import kvoffload
from support.small_trace import trace_of

NO_PART_OF_A_RESULT = {"control_plane_s", "data_plane_s", "decisions_sha256", "policy_state", "routing"}


@pytest.fixture(scope="module")
def trace() -> Trace:
    return generate(builtin("chat", sessions=150))


def config(instances: int, tiers: str = "none", routing: str = SESSION, **more: object) -> ReplayConfig:
    behind_ram = parse_tiers("tiers", tiers)
    return ReplayConfig(60, tiers=behind_ram, instances=instances, routing=routing, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("tiers", ["none", "300", "100+400,admission=reuse:2"])
@pytest.mark.parametrize(
    "options", [{}, {"device_blocks": 40}, {"decode_tokens_per_s": 30.0, "queue_requests": 5}]
)
def test_one_instance_is_the_plain_replay(trace: Trace, tiers: str, options: dict[str, object]) -> None:
    plain, shared = (
        Replay(trace, config(1, tiers, **options)),
        SharedReplay(trace, config(1, tiers, **options)),
    )
    actual, expected = (msgspec.structs.asdict(run.run()) for run in (shared, plain))
    differing = {name for name in expected if actual[name] != expected[name]} - NO_PART_OF_A_RESULT
    assert differing <= ({"optimum_hit_ratio"} if options.get("device_blocks") else set())
    assert np.array_equal(shared.hits_per_request, plain.hits_per_request)
    assert isinstance(replay_of(trace, config(1, tiers)), Replay)


@pytest.mark.parametrize("routing", ROUTINGS)
def test_instances_without_shared_tiers_equal_separate_replays(trace: Trace, routing: str) -> None:
    together = SharedReplay(trace, config(3, routing=routing)).run()
    instance_of = route(trace, 3, routing)
    alone = [
        Replay(trace.of_requests(np.flatnonzero(instance_of == number)), config(1)).run()
        for number in range(3)
    ]
    assert together.prefix_hit_blocks == sum(report.prefix_hit_blocks for report in alone)
    assert together.blocks_written == sum(report.blocks_written for report in alone)
    assert together.requests == trace.requests
    assert together.hit_blocks_of_others == 0
    assert together.prefix_hit_ratio <= together.optimum_hit_ratio


def test_a_write_limit_with_engines_that_get_one_request_or_none() -> None:
    few = replace(trace_of([1, 2], [3, 4], [5, 6]), timestamps_ms=np.array([0, 1000, 2000]))
    limited = "simulated:9,per_engine=true,max_write_blocks_per_day=1e9"
    report = SharedReplay(few, config(4, limited, routing="round-robin")).run()
    # The limit grows with time from 0, and each of three engines has its only request at its time 0.
    assert (report.requests, report.tiers[1].blocks_written) == (3, 0)
    assert SharedReplay(few, config(2, limited, routing="round-robin")).run().tiers[1].blocks_written == 2
    without_times = replace(few, timestamps_ms=np.zeros(3, np.int64))
    with pytest.raises(ConfigError, match="the recording has no times"):
        SharedReplay(without_times, config(4, limited, routing="round-robin"))


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("instances", [2, 5])
def test_with_room_for_all_blocks_instances_hit_as_much_as_one(
    trace: Trace, instances: int, routing: str
) -> None:
    """Blocks that do not fit into RAM are hits for neither."""
    run, single = (
        SharedReplay(trace, config(instances, "1000000", routing)),
        Replay(trace, config(1, "1000000")),
    )
    report = run.run()
    assert report.prefix_hit_blocks == single.run().prefix_hit_blocks == run.hits_per_request.sum() > 0
    assert 0 < report.hit_blocks_of_others <= report.tiers[1].hit_blocks
    assert report.instances == instances


def test_moving_sessions_hit_more_blocks_of_other_instances(trace: Trace) -> None:
    stay, move = (SharedReplay(trace, config(4, "1000000", routing)).run() for routing in (SESSION, RANDOM))
    assert stay.hit_blocks_of_others < move.hit_blocks_of_others
    apart = SharedReplay(trace, config(4, routing=RANDOM)).run()
    assert apart.prefix_hit_ratio < move.prefix_hit_ratio


def test_only_the_last_tier_is_shared(trace: Trace) -> None:
    report = SharedReplay(trace, config(2, "200+2000", RANDOM)).run()
    assert [tier.name for tier in report.tiers] == ["ram", "simulated 1", "simulated 2"]
    assert sum(tier.hit_blocks for tier in report.tiers) == report.offload_hit_blocks
    assert report.tiers[2].blocks_written < report.tiers[1].blocks_written, (
        "the shared tier writes each block once"
    )


@pytest.mark.parametrize("shared_ram", [False, True])
def test_a_shared_tier_has_its_label(trace: Trace, shared_ram: bool) -> None:
    given = config(2, "200,label=near+2000,label=far", shared_ram=shared_ram)
    report = replay_of(trace, given).run()
    assert [tier.name for tier in report.tiers] == ["ram", "near", "far"]


def test_sessions_are_routed_round_robin(trace: Trace) -> None:
    instance_of, session_of = route(trace, 4), turns(trace).session_of
    for session in range(int(session_of.max()) + 1):
        assert set(instance_of[session_of == session].tolist()) == {session % 4}
    assert set(route(trace, 4, RANDOM).tolist()) == {0, 1, 2, 3}


@pytest.mark.slow
def test_the_command() -> None:
    arguments = (
        "sweep",
        "chat",
        "--policies",
        "lru",
        "--capacities",
        "1%",
        "--tiers",
        "20%",
        "--quiet",
        "--jobs",
        "1",
    )
    done = kvoffload(*arguments, "--instances", "3", "--routing", "random", "--format", "json")
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)
    assert (row["instances"], row["routing"]) == (3, "random")
    assert 0 < row["others_hit_ratio"] <= row["tier_hit_ratio"] < row["prefix_hit_ratio"]
    done = kvoffload(*arguments, "--instances", "3")
    assert "3 instances have RAM of this size each; requests go by session" in done.stdout
    assert "hit what another instance had written" in done.stdout


@pytest.mark.parametrize(("field", "value"), [("instances", 0), ("instances", 5000), ("routing", "nearest")])
def test_invalid_options_are_refused(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{field}: .* is invalid; allowed: "):
        ReplayConfig(1, **{field: value})  # type: ignore[arg-type]
