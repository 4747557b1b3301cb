"""Replays with shadows: estimates, and unchanged decisions."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from kvoffload.errors import ConfigError
from kvoffload.replay.config import ReplayConfig
from kvoffload.replay.replay import Replay
from kvoffload.tiering.tiered_manager import TieredManager
from kvoffload.tiers.kinds.simulated import SimulatedOptions
from kvoffload.traces.sources import load_trace
from kvoffload.whatif import WhatIf
from support.run_cli import kvoffload

CONFIG = ReplayConfig(300, device_blocks=50)
SETTINGS = (WhatIf(policy="arc"), WhatIf(capacity=2.0))
TRIED = replace(CONFIG, what_if=SETTINGS)


def test_without_sampling_the_estimates_are_the_hit_ratios_of_full_replays() -> None:
    trace = load_trace("chat").of_requests(range(400))  # type: ignore[arg-type]
    report = Replay(trace, replace(TRIED, what_if_sample=1)).run()
    looked_up = report.block_refs - report.device_hit_blocks
    assert report.what_if_sample == 1
    for row, setting in zip(report.what_if, (WhatIf(), *SETTINGS), strict=True):
        config = replace(
            CONFIG, policy=setting.policy or "lru", capacity_blocks=round(300 * setting.capacity)
        )
        full = Replay(trace, config).run()
        assert row.hit_ratio == pytest.approx(full.offload_hit_blocks / looked_up), row.setting


def test_shadows_change_no_decision() -> None:
    trace = load_trace("chat").of_requests(range(200))  # type: ignore[arg-type]
    plain, tried = Replay(trace, CONFIG).run(), Replay(trace, TRIED).run()
    assert plain.decisions_sha256 == tried.decisions_sha256
    assert (plain.what_if, plain.what_if_sample, tried.what_if_sample) == ([], 0, 8)


def test_shadows_of_a_replay_with_tiers_refuse_no_blocks_unasked() -> None:
    trace = load_trace("chat").of_requests(range(50))  # type: ignore[arg-type]
    config = replace(TRIED, policy="hazard", tiers=(SimulatedOptions(capacity="900"),))
    replay = Replay(trace, config)
    assert isinstance(replay.manager, TieredManager)
    assert not replay.manager.ram_manager.refuses_unasked
    assert replay.shadows is not None
    assert not any(shadow.manager.refuses_unasked for shadow in replay.shadows.members)


def test_the_command_shows_every_setting() -> None:
    arguments = (
        "replay",
        "chat",
        "--no-data",
        "--quiet",
        "--what-if",
        "policy=arc",
        "--what-if",
        "capacity=2x",
    )
    done = kvoffload(*arguments)
    assert done.returncode == 0, done.stderr
    assert "What if: hits of the blocks looked up in RAM, by a sample of 1 in 8" in done.stdout
    assert all(label in done.stdout for label in ("current", "policy=arc", "capacity=2", "±"))
    report = msgspec.json.decode(kvoffload(*arguments, "--format", "json").stdout)
    assert [row["setting"] for row in report["what_if"]] == ["current", "policy=arc", "capacity=2"]
    assert all(0 <= row["hit_ratio"] <= 1 and row["error"] > 0 for row in report["what_if"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--what-if", "policy=x"), "what-if[0].policy: 'x' is invalid; allowed: "),
        (
            ("--what-if", "capacity=2", "--instances", "2"),
            "instances: 2 is invalid; with what-if allowed: 1",
        ),
        (
            ("--what-if", "capacity=2", "--store", "on-device-eviction", "--device-blocks", "50"),
            "store: 'on-device-eviction' is invalid; with what-if allowed: on-compute",
        ),
        (("--what-if", "capacity=2", "--what-if-sample", "0"), "what-if-sample: 0 is invalid"),
        (
            ("--what-if", "capacity=2", "--what-if-sample", "100000"),
            "what-if-sample: 100000 is invalid; allowed: a whole number from 1 to 65536",
        ),
    ],
)
def test_invalid_options_are_one_message(arguments: tuple[str, ...], message: str) -> None:
    done = kvoffload("replay", "chat", "--no-data", *arguments)
    assert done.returncode != 0
    assert done.stderr.count(message) == 1, done.stderr


def test_shadows_of_a_victim_tier_are_refused() -> None:
    with pytest.raises(ConfigError, match="store: 'on-device-eviction' is invalid; with what-if allowed"):
        replace(TRIED, store="on-device-eviction")
