"""Replays with tiers behind RAM: simulated ones, and a real disk with real bytes, cold and warm."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from kvoffload.errors import ConfigError
from kvoffload.replay.data import DataPlane
from kvoffload.replay.faults import parse_injection
from kvoffload.replay.replay import Replay, ReplayConfig
from kvoffload.replay.report import ReplayReport
from kvoffload.replay.tiers import TierConfig, parse_tier
from kvoffload.sweep.grid import Grid
from kvoffload.sweep.sweep import Sweep
from kvoffload.traces.sessions import generate
from kvoffload.traces.sources import load_trace
from kvoffload.traces.trace import Trace
from kvoffload.traces.workloads import builtin
from test_cli import kvoffload

BLOCK_BYTES = 4096


@pytest.fixture(scope="module")
def small_chat() -> Trace:
    return generate(builtin("chat", sessions=150))


def run(trace: Trace, config: ReplayConfig, damage: str | None = None) -> ReplayReport:
    data = DataPlane(config.capacity_blocks, BLOCK_BYTES, parse_injection(damage, 1) if damage else None)
    try:
        return Replay(trace, config, data).run()
    finally:
        data.close()


def disk(path: Path, blocks: int, **options: str) -> tuple[TierConfig, ...]:
    return (TierConfig(blocks, path=str(path), **options),)


@pytest.mark.parametrize("device_blocks", [0, 300])
@pytest.mark.parametrize("name", ["chat", "rag"])
def test_ram_and_a_tier_of_lru_hit_what_one_lru_of_the_tiers_size_hits(name: str, device_blocks: int) -> None:
    """The tier holds all that RAM holds, and both see every use: exact, where requests fit into RAM."""
    trace = load_trace(name)
    small, large = trace.unique_blocks // 50, trace.unique_blocks // 10
    behind = Replay(trace, ReplayConfig(small, device_blocks=device_blocks, tiers=(TierConfig(large),))).run()
    alone = Replay(trace, ReplayConfig(large, device_blocks=device_blocks)).run()
    assert behind.prefix_hit_blocks == alone.prefix_hit_blocks
    assert sum(tier.hit_blocks for tier in behind.tiers) == behind.offload_hit_blocks
    assert [tier.name for tier in behind.tiers] == ["ram", "simulated"]
    assert behind.tiers[0].hit_blocks > 0
    assert behind.tiers[1].hit_blocks > 0


@pytest.mark.parametrize("store", ["on-compute", "on-device-eviction"])
@pytest.mark.parametrize(("policy", "admission"), [("lru", "all"), ("hazard", "all"), ("arc", "reuse:2")])
def test_any_policy_and_rule_at_both_places(
    small_chat: Trace, policy: str, admission: str, store: str
) -> None:
    tiers = (TierConfig(100), TierConfig(300, policy, admission))
    config = ReplayConfig(50, policy, admission, 40, store, tiers)
    report = Replay(small_chat, config).run()
    assert report.prefix_hit_ratio <= report.optimum_hit_ratio
    assert [tier.name for tier in report.tiers] == ["ram", "simulated", "simulated"]
    assert report.decisions_sha256 == Replay(small_chat, config).run().decisions_sha256


def test_a_disk_serves_every_byte_and_decides_as_simulated(small_chat: Trace, tmp_path: Path) -> None:
    on_disk = run(small_chat, ReplayConfig(300, tiers=disk(tmp_path, 1500)))
    simulated = Replay(small_chat, ReplayConfig(300, tiers=(TierConfig(1500),))).run()
    assert on_disk.mismatches_served == 0
    assert on_disk.decisions_sha256 == simulated.decisions_sha256
    assert [tier.hit_blocks for tier in on_disk.tiers] == [tier.hit_blocks for tier in simulated.tiers]
    ram, behind = on_disk.tiers
    assert behind.name == "disk"
    assert behind.bytes_read == behind.hit_blocks * BLOCK_BYTES > 0
    assert behind.bytes_written == behind.blocks_written * BLOCK_BYTES > 0
    assert ram.bytes_read == on_disk.offload_hit_blocks * BLOCK_BYTES


def test_a_second_run_starts_warm(small_chat: Trace, tmp_path: Path) -> None:
    config = ReplayConfig(600, tiers=disk(tmp_path, small_chat.unique_blocks))
    cold, warm = run(small_chat, config), run(small_chat, config)
    assert cold.prefix_hit_ratio == cold.infinite_hit_ratio
    assert warm.prefix_hit_blocks == small_chat.block_refs, "every block was there before"
    assert warm.tiers[1].blocks_written == 0
    assert warm.mismatches_served == 0


def test_a_damaged_slab_costs_hits_and_serves_nothing_wrong(small_chat: Trace, tmp_path: Path) -> None:
    config = ReplayConfig(600, tiers=disk(tmp_path, small_chat.unique_blocks))
    run(small_chat, config)
    (slab,) = tmp_path.glob("*.slab")
    with slab.open("r+b") as file:
        size = slab.stat().st_size
        for offset in np.random.default_rng(3).integers(size // 2, size, 400).tolist():
            file.seek(offset)
            file.write(b"\xa5")
    warm = run(small_chat, config)
    assert warm.mismatches_served == 0
    assert warm.tiers[1].mismatches_caught > 0
    assert warm.infinite_hit_ratio < warm.prefix_hit_ratio < 1.0


@pytest.mark.parametrize("kind", ["bitflip", "swap", "zero", "torn"])
def test_damage_in_ram_never_reaches_the_disk_as_sound(small_chat: Trace, tmp_path: Path, kind: str) -> None:
    report = run(small_chat, ReplayConfig(300, tiers=disk(tmp_path, 1500)), f"{kind}:0.05")
    assert report.damage_injected > 0
    assert report.mismatches_served == 0
    assert sum(tier.hit_blocks for tier in report.tiers) == report.offload_hit_blocks


# ---- what users type


@pytest.mark.parametrize(
    ("text", "with_data", "message"),
    [
        ("disk:/x", True, "disk:PATH:CAPACITY"),
        ("disk::10%", True, "disk:PATH:CAPACITY"),
        ("ssd:/x:10%", True, "disk:PATH:CAPACITY or simulated:CAPACITY"),
        ("simulated:10", True, None),
        ("simulated:/x:10%", True, "disk:PATH:CAPACITY or simulated:CAPACITY"),
        ("disk:/x:10%", False, "take simulated:CAPACITY"),
        ("disk:/x:ten", True, "a number of blocks"),
        ("disk:/x:10%,policy", True, "'policy' is no option of it"),
        ("disk:/x:10%,colour=red", True, "'colour=red' is no option of it; allowed: policy=, admission="),
    ],
)
def test_a_tier_that_cannot_be_is_refused(text: str, with_data: bool, message: str | None) -> None:
    if message is None:
        assert parse_tier(text, 4096, 1000, with_data=with_data) == TierConfig(10)
        return
    with pytest.raises(ConfigError) as refused:
        parse_tier(text, 4096, 1000, with_data=with_data)
    assert "tier" in str(refused.value)
    assert message in str(refused.value)


def test_a_tier_as_users_type_it() -> None:
    text = "disk:/data/a:b:10%,policy=arc,admission=reuse:2"
    assert parse_tier(text, 4096, 1000, with_data=True) == TierConfig(100, "arc", "reuse:2", "/data/a:b")


def test_the_command_prints_hits_by_tier(tmp_path: Path) -> None:
    trace = tmp_path / "small.jsonl"
    kvoffload("trace", "generate", "chat", "--sessions", "60", "--output", trace)
    arguments = ("replay", trace, "--capacity", "60", "--block-bytes", "4KiB", "--quiet")
    done = kvoffload(*arguments, "--tier", f"disk:{tmp_path / 'slab'}:400")
    assert done.returncode == 0, done.stderr
    for words in ("ram (lru, all, 60 blocks)", "disk", "written to disk", "mismatches caught by disk"):
        assert words in done.stdout, words
    done = kvoffload(*arguments, "--tier", f"disk:{tmp_path / 'slab'}:400", "--format", "json")
    tiers = json.loads(done.stdout)["tiers"]
    assert set(tiers[1]) == {
        "name", "hit_blocks", "blocks_written", "blocks_evicted", "bytes_written", "bytes_read",
        "mismatches_caught",
    }  # fmt: skip
    done = kvoffload(*arguments, "--tier", f"disk:{trace}:400")
    assert done.returncode != 0
    assert "a directory" in done.stderr
    assert "Traceback" not in done.stderr


# ---- sweeps


@pytest.mark.slow
def test_a_sweep_over_tiers_says_what_replays_say(small_chat: Trace) -> None:
    grid = Grid(("lru", "arc"), capacities=("60",), tiers=("none", "100", "100:arc:reuse:2+400"))
    rows = Sweep(["chat"], grid, jobs=1, resamples=100).run().rows
    chat = load_trace("chat")
    assert [(row.tiers, row.tier_blocks, row.policy) for row in rows] == [
        (tiers, blocks, policy)
        for tiers, blocks in (("none", 0), ("100", 100), ("100:arc:reuse:2+400", 500))
        for policy in ("lru", "arc")
    ]
    stack = (TierConfig(100, "arc", "reuse:2"), TierConfig(400))
    report = Replay(chat, ReplayConfig(60, "arc", tiers=stack)).run()
    row = rows[-1]
    assert row.prefix_hit_ratio == report.prefix_hit_ratio
    assert row.decisions_sha256 == report.decisions_sha256
    assert row.optimum_hit_ratio == report.optimum_hit_ratio
    assert row.tier_hit_ratio == sum(tier.hit_blocks for tier in report.tiers[1:]) / chat.block_refs
    assert row.tier_writes_per_ref == sum(tier.blocks_written for tier in report.tiers[1:]) / chat.block_refs
    assert rows[0].tier_hit_ratio == rows[0].tier_writes_per_ref == 0.0
    assert rows[4].baseline == "lru, all"


@pytest.mark.parametrize("tiers", ["", "10%:lruu", "10%:lru:reuse:x", "ten", "10%++20%"])
def test_an_axis_of_tiers_that_cannot_be(tiers: str) -> None:
    with pytest.raises(ConfigError, match="tiers"):
        Grid(("lru",), tiers=(tiers,))
