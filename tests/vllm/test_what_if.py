"""`what_if` in the plug-in: shadows beside the serving manager, their gauges, and their failures."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from kvoffload.errors import ConfigError
from kvoffload.integrations.vllm.shared.options import parse_options
from support.vllm_world import World, base, key

pytestmark = [pytest.mark.filterwarnings("ignore")]
PREFIX = "vllm:kvoffload_"
CAPACITY = 64
SETTINGS = [{"policy": "hazard"}, {"capacity": 4.0}]


def reported(manager: Any) -> dict[str, dict[str, float]]:
    """Return the gauges of the next report: name -> setting -> value."""
    manager.metrics.interval_s, manager._what_if._reported_s = 0.0, -1e9
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
    found = reported(rig.manager)
    assert 0.1 < share < 0.9
    assert found["what_if_hit_ratio"]["current"] == pytest.approx(share, abs=1e-4)
    assert found["what_if_hit_ratio"]["capacity=4"] > share
    assert found["what_if_gain"]["capacity=4"] > found["what_if_gain_error"]["capacity=4"]
    assert set(found["what_if_hit_ratio"]) == {"current", "policy=hazard", "capacity=4"}
    assert all(0 < error < 1 for error in found["what_if_hit_ratio_error"].values())


def test_a_reset_forgets_the_shadows_blocks(tmp_path: Path) -> None:
    rig = World(tmp_path, CAPACITY, what_if=SETTINGS, what_if_sample=1)
    keys = [*map(key, range(10))]
    serve(rig, "before", keys, at_once=True)
    rig.manager._what_if.shadows.work()
    rig.manager.reset_cache()
    assert serve(rig, "after", keys, at_once=True) == 0
    assert reported(rig.manager)["what_if_hit_ratio"]["current"] == 0.0


def test_an_error_in_the_shadows_does_not_stop_offloading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rig = World(tmp_path, CAPACITY, what_if=SETTINGS, what_if_sample=1)
    monkeypatch.setattr(rig.manager._what_if.shadows, "finished", None)
    keys = [*map(key, range(10))]
    assert [serve(rig, name, keys, at_once=True) for name in ("1", "2")] == [0, 10]
    assert not rig.manager.broken
    assert rig.manager._what_if.shadows is None


def test_the_usual_rate_depends_on_the_size_of_blocks(tmp_path: Path) -> None:
    rig = World(tmp_path, CAPACITY, what_if=SETTINGS)
    assert rig.manager._what_if.shadows.one_in == 2048  # this world has no size


def test_without_the_option_there_are_no_shadows(tmp_path: Path) -> None:
    assert World(tmp_path, CAPACITY).manager._what_if is None


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"what_if": [{"policy": "hazardd"}]}, ["what_if[0].policy", "hazardd", "did you mean hazard?"]),
        ({"what_if": "capacity=2", "what_if_sample": 0}, ["what_if_sample", "0", "1 or more"]),
        ({"what_if": "capacity=2", "store": "on-device-eviction"}, ["what_if", "capacity=2", "on-compute"]),
        ({"what_if": "capacity=2", "ram": "1GiB,shared=node"}, ["what_if", "capacity=2", "shared"]),
    ],
)
def test_mistakes_are_named(given: dict[str, Any], named: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_options({"ram": "1GiB"} | given)
    assert all(part in str(raised.value) for part in named), raised.value
