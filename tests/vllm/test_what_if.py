"""`what_if` in the plug-in: shadows beside the serving manager, their gauges, and their failures."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest

from kvoffload.errors import ConfigError
from kvoffload.integrations.vllm.shared.options import parse_options
from kvoffload.settings import watched
from support.vllm_traffic import PATIENCE_S, note_position
from support.vllm_world import World, base, key

pytestmark = [pytest.mark.filterwarnings("ignore")]
PREFIX = "vllm:kvoffload_"
CAPACITY = 64
SETTINGS = [{"policy": "hazard"}, {"capacity": 4.0}]


def reported(manager: Any) -> dict[str, dict[str, float]]:
    """Return the gauges of the next report: name -> setting -> value."""
    manager.metrics.interval_s, manager.what_if._reported_s = 0.0, -1e9
    manager.what_if.settle()
    values = vars(manager.get_stats())["data"]["data"]
    return {
        name: {labels[0]: value for labels, value in values.get(f"{PREFIX}{name}", {}).items()}
        for name in ("what_if_hit_ratio", "what_if_hit_ratio_error", "what_if_gain", "what_if_gain_error")
    }


def serve(rig: World, name: str, keys: list[bytes], *, at_once: bool) -> int:
    """Serve a request; return its hits."""
    ctx = rig.request(name, keys)
    hits = rig.manager.lookup_prefix(keys, ctx)[0] if at_once else rig.hits(ctx, keys)
    if hits:
        rig.manager.prepare_load(keys[:hits], ctx)
    rig.manager.on_schedule_end(base.ScheduleEndContext([name], []))
    rig.manager.complete_load({*keys[:hits]}, ctx)
    output = rig.store(ctx, keys[hits:]) if hits < len(keys) else None
    rig.manager.complete_store({*(output.keys_to_store if output else ())}, ctx)
    rig.manager.on_request_finished(ctx)
    return hits


def traffic(rig: World, *, at_once: bool, count: int = 150) -> float:
    """Serve requests of sessions; return the share of hits."""
    rng, hits, looked_up = random.Random(1), 0, 0
    sessions = [[session * 1000] for session in range(12)]
    for number in range(count):
        session = rng.choice(sessions)
        session.append(session[-1] + 1)
        if len(session) > 20:
            session[:] = [session[-1] + 1]
        hits += serve(rig, f"{number}", [*map(key, session)], at_once=at_once)
        looked_up += len(session)
    return hits / looked_up


@pytest.mark.parametrize("at_once", [False, True], ids=["key by key", "prefix"])
def test_the_current_setting_is_estimated_exactly_without_sampling(tmp_path: Path, at_once: bool) -> None:
    rig = World(tmp_path, CAPACITY, what_if=SETTINGS, what_if_sample=1)
    share = traffic(rig, at_once=at_once)
    gauges = reported(rig.manager)
    assert 0.1 < share < 0.9
    assert gauges["what_if_hit_ratio"]["current"] == pytest.approx(share, abs=1e-4)
    assert gauges["what_if_hit_ratio"]["capacity=4"] > share
    assert gauges["what_if_gain"]["capacity=4"] > gauges["what_if_gain_error"]["capacity=4"]
    assert set(gauges["what_if_hit_ratio"]) == {"current", "policy=hazard", "capacity=4"}
    assert all(0 < error < 1 for error in gauges["what_if_hit_ratio_error"].values())


def test_blocks_that_are_only_stored_are_not_looked_up(tmp_path: Path) -> None:
    """Two requests look up 10 blocks and store 40, including 30 generated blocks."""
    rig = World(tmp_path, CAPACITY, what_if=SETTINGS, what_if_sample=1)
    for session in (0, 1000):
        for name in ("first", "again"):
            keys = [key(session + number) for number in range(40)]
            ctx = rig.request(f"{name}{session}", keys[:10])
            if hits := rig.manager.lookup_prefix(keys[:10], ctx)[0]:
                rig.manager.prepare_load(keys[:hits], ctx)
            rig.manager.on_schedule_end(base.ScheduleEndContext([ctx.req_id], []))
            rig.manager.complete_load({*keys[:hits]}, ctx)
            for position, block_key in enumerate(keys[10:], 11):
                note_position(ctx, block_key, position)
            output = rig.store(ctx, keys)
            rig.manager.complete_store({*output.keys_to_store}, ctx)
            rig.manager.on_request_finished(ctx)
    assert reported(rig.manager)["what_if_hit_ratio"]["current"] == 0.5
    assert rig.manager.what_if.shadows.num_looked_up == 40


def test_several_groups_look_up_the_blocks_of_the_path_before_they_run(tmp_path: Path) -> None:
    rig = World(tmp_path, CAPACITY, what_if=SETTINGS, what_if_sample=1)
    groups = [[key(number, group) for number in range(10)] for group in (0, 1)]
    ctx = rig.request("a", [*groups[0], *groups[1]], groups=2)
    assert [rig.manager.lookup_prefix(keys, ctx)[0] for keys in groups] == [0, 0]
    rig.manager.on_schedule_end(base.ScheduleEndContext(["a"], []))
    output = rig.store(ctx, [*groups[0], *groups[1], *(key(number) for number in range(10, 20))])
    rig.manager.complete_store({*output.keys_to_store}, ctx)
    rig.manager.on_request_finished(ctx)
    assert reported(rig.manager)["what_if_hit_ratio"]["current"] == 0.0
    assert rig.manager.what_if.shadows.num_looked_up == 20


def test_shadows_follow_a_change_of_the_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched, "INTERVAL_S", 0.0)
    path = tmp_path / "live.json"
    rig = World(tmp_path, CAPACITY, what_if=SETTINGS, what_if_sample=1, live_settings=str(path))
    traffic(rig, at_once=True, count=20)
    path.write_text('{"policy": "sieve"}')
    deadline, before = time.monotonic() + PATIENCE_S, rig.manager.what_if.shadows
    while rig.manager.what_if.shadows is before:
        assert time.monotonic() < deadline
        rig.manager.on_schedule_end(base.ScheduleEndContext([], []))
    assert rig.manager.core.policy.name == "sieve"
    shadows = rig.manager.what_if.shadows
    names = [shadow.manager.policy.name for shadow in shadows.members]
    assert names == ["sieve", "hazard", "sieve"]
    assert shadows.num_looked_up == 0
    rig.manager.on_schedule_end(base.ScheduleEndContext([], []))
    assert rig.manager.what_if.shadows is shadows, "one change, one restart"


def test_shadows_follow_a_change_of_the_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched, "INTERVAL_S", 0.0)
    path = tmp_path / "live.json"
    rig = World(tmp_path, CAPACITY, what_if=SETTINGS, what_if_sample=1, live_settings=str(path))
    traffic(rig, at_once=True, count=20)
    path.write_text(f'{{"ram": {rig.manager.options.ram_bytes // 2}}}')
    deadline, before = time.monotonic() + PATIENCE_S, rig.manager.what_if.shadows
    while rig.manager.what_if.shadows is before:
        assert time.monotonic() < deadline
        rig.manager.on_schedule_end(base.ScheduleEndContext([], []))
    capacities = [shadow.manager.capacity_blocks for shadow in rig.manager.what_if.shadows.members]
    assert capacities == [CAPACITY // 2, CAPACITY // 2, 2 * CAPACITY]


def test_a_reset_forgets_the_shadows_blocks(tmp_path: Path) -> None:
    rig = World(tmp_path, CAPACITY, what_if=SETTINGS, what_if_sample=1)
    keys = [*map(key, range(10))]
    serve(rig, "before", keys, at_once=True)
    rig.manager.what_if.settle()
    rig.manager.reset_cache()
    assert serve(rig, "after", keys, at_once=True) == 0
    assert reported(rig.manager)["what_if_hit_ratio"]["current"] == 0.0


def test_an_error_in_the_shadows_does_not_stop_offloading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rig = World(tmp_path, CAPACITY, what_if=SETTINGS, what_if_sample=1)
    monkeypatch.setattr(rig.manager.what_if.shadows, "finished", None)
    keys = [*map(key, range(10))]
    assert [serve(rig, name, keys, at_once=True) for name in ("1", "2")] == [0, 10]
    assert not rig.manager.broken
    assert rig.manager.what_if.shadows is None


def test_the_usual_rate_depends_on_the_size_of_blocks(tmp_path: Path) -> None:
    rig = World(tmp_path, CAPACITY, what_if=SETTINGS)
    assert rig.manager.what_if.shadows.one_in == 3072  # the default for an unknown size


def test_without_the_option_there_are_no_shadows(tmp_path: Path) -> None:
    assert World(tmp_path, CAPACITY).manager.what_if is None


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"what_if": [{"policy": "hazardd"}]}, ["what_if[0].policy", "hazardd", "did you mean hazard?"]),
        ({"what_if": "capacity=2", "what_if_sample": 0}, ["what_if_sample", "0", "from 1 to 65536"]),
        (
            {"what_if": "capacity=2", "what_if_sample": 100_000},
            ["what_if_sample", "100000", "from 1 to 65536"],
        ),
        ({"what_if": [{"capacity": 1e9}]}, ["what_if[0].capacity", "1000000000.0", "up to 100"]),
        ({"what_if": "capacity=2", "store": "on-device-eviction"}, ["what_if", "capacity=2", "on-compute"]),
        ({"what_if": "capacity=2", "ram": "1GiB,shared=node"}, ["what_if", "capacity=2", "shared"]),
    ],
)
def test_invalid_options_are_named(given: dict[str, Any], named: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_options({"ram": "1GiB"} | given)
    assert all(text in str(raised.value) for text in named), raised.value
