"""Replays with tiers behind RAM: simulated tiers, and a real disk with real bytes, cold and warm."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvoffload.core.tenants import Quota
from kvoffload.errors import ConfigError
from kvoffload.replay.config import ReplayConfig
from kvoffload.replay.data import DataPlane
from kvoffload.replay.faults import parse_injection
from kvoffload.replay.replay import Replay
from kvoffload.replay.report import ReplayReport
from kvoffload.sweep.grid import Grid
from kvoffload.sweep.measuring import Work
from kvoffload.sweep.sweep import Sweep
from kvoffload.tiers import kinds
from kvoffload.tiers.kinds.disk import DiskOptions
from kvoffload.tiers.kinds.simulated import SimulatedOptions
from kvoffload.tiers.offer import MOST_QUOTAS
from kvoffload.tiers.spec import TierOptions, parse_tier, parse_tiers
from kvoffload.traces.sessions import generate
from kvoffload.traces.sources import load_trace
from kvoffload.traces.trace import Trace
from kvoffload.traces.workloads import builtin
from kvoffload.whatif import WhatIf
from support.run_cli import kvoffload

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


def disk(path: Path, blocks: int, **options: str) -> tuple[TierOptions, ...]:
    return (DiskOptions(path=(str(path),), capacity=str(blocks), **options),)


def simulated(*blocks: int) -> tuple[TierOptions, ...]:
    return tuple(SimulatedOptions(capacity=str(block)) for block in blocks)


@pytest.mark.parametrize("device_blocks", [0, 300])
@pytest.mark.parametrize("name", ["chat", "rag"])
@pytest.mark.slow
def test_ram_and_an_lru_tier_hit_as_much_as_one_lru_of_the_tiers_size(name: str, device_blocks: int) -> None:
    """The tier holds all blocks of RAM, and both see every use. Exact if requests fit into RAM."""
    trace = load_trace(name)
    small, large = trace.unique_blocks // 50, trace.unique_blocks // 10
    tiered = Replay(trace, ReplayConfig(small, device_blocks=device_blocks, tiers=simulated(large))).run()
    alone = Replay(trace, ReplayConfig(large, device_blocks=device_blocks)).run()
    assert tiered.prefix_hit_blocks == alone.prefix_hit_blocks
    assert sum(tier.hit_blocks for tier in tiered.tiers) == tiered.offload_hit_blocks
    assert [tier.name for tier in tiered.tiers] == ["ram", "simulated"]
    assert tiered.tiers[0].hit_blocks > 0
    assert tiered.tiers[1].hit_blocks > 0


@pytest.mark.parametrize("store", ["on-compute", "on-device-eviction"])
@pytest.mark.parametrize(("policy", "admission"), [("lru", "all"), ("hazard", "all"), ("arc", "reuse:2")])
def test_every_policy_and_rule_runs_in_ram_and_in_a_tier(
    small_chat: Trace, policy: str, admission: str, store: str
) -> None:
    tiers = parse_tiers("tiers", f"simulated:100+simulated:300,policy={policy},admission={admission}")
    config = ReplayConfig(50, policy, admission, 40, store, tiers)
    report = Replay(small_chat, config).run()
    assert report.prefix_hit_ratio <= report.optimum_hit_ratio
    assert [tier.name for tier in report.tiers] == ["ram", "simulated 1", "simulated 2"]
    assert report.decisions_sha256 == Replay(small_chat, config).run().decisions_sha256


def test_a_disk_serves_every_byte_and_decides_as_simulated(small_chat: Trace, tmp_path: Path) -> None:
    on_disk = run(small_chat, ReplayConfig(300, tiers=disk(tmp_path, 1500)))
    plain = Replay(small_chat, ReplayConfig(300, tiers=simulated(1500))).run()
    assert on_disk.mismatches_served == 0
    assert on_disk.decisions_sha256 == plain.decisions_sha256
    assert [tier.hit_blocks for tier in on_disk.tiers] == [tier.hit_blocks for tier in plain.tiers]
    ram, disk_report = on_disk.tiers
    assert disk_report.name == "disk"
    assert disk_report.bytes_read == disk_report.hit_blocks * BLOCK_BYTES > 0
    assert disk_report.bytes_written == disk_report.blocks_written * BLOCK_BYTES > 0
    assert ram.bytes_read == on_disk.offload_hit_blocks * BLOCK_BYTES


def test_a_second_run_starts_warm(small_chat: Trace, tmp_path: Path) -> None:
    config = ReplayConfig(600, tiers=disk(tmp_path, small_chat.unique_blocks))
    cold, warm = run(small_chat, config), run(small_chat, config)
    assert cold.prefix_hit_ratio == cold.infinite_hit_ratio
    assert warm.prefix_hit_blocks == small_chat.block_refs, "the first run stored every block"
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


def test_a_refused_replay_opens_no_disk(small_chat: Trace, tmp_path: Path) -> None:
    settings = (WhatIf(policy="nonsense"),)
    with pytest.raises(ConfigError, match="nonsense"):
        run(small_chat, ReplayConfig(300, tiers=disk(tmp_path, 1500), what_if=settings))
    assert not any(tmp_path.iterdir())
    with pytest.raises(ConfigError, match="tenants: 'ssd' is invalid; allowed as tiers: disk"):
        ReplayConfig(300, tiers=disk(tmp_path, 1500), tier_tenants={"ssd": {"a": Quota(1)}})
    with pytest.raises(ConfigError, match="tenants: 'a' is invalid; a tenant of a tier needs a quota of RAM"):
        ReplayConfig(300, tiers=disk(tmp_path, 1500), tier_tenants={"disk": {"a": Quota(1)}})


def test_a_replay_whose_quotas_a_tier_refuses_closes_its_tiers(small_chat: Trace, tmp_path: Path) -> None:
    quotas = {f"tenant-{number}": Quota() for number in range(MOST_QUOTAS + 1)}
    config = ReplayConfig(300, tiers=disk(tmp_path, 1500), tenants=quotas, tier_tenants={"disk": quotas})
    with pytest.raises(ConfigError, match=f"for a tier allowed: up to {MOST_QUOTAS}") as refused:
        run(small_chat, config)
    assert run(small_chat, ReplayConfig(300, tiers=disk(tmp_path, 1500))).mismatches_served == 0
    assert refused.value.field == "tenants"


@pytest.mark.parametrize("kind", ["bitflip", "swap", "zero", "torn"])
def test_damage_in_ram_never_reaches_the_disk_as_sound(tmp_path: Path, kind: str) -> None:
    trace = generate(builtin("chat", sessions=60))
    report = run(trace, ReplayConfig(300, tiers=disk(tmp_path, 1500)), f"{kind}:0.05")
    assert report.damage_injected > 0
    assert report.mismatches_served == 0
    assert sum(tier.hit_blocks for tier in report.tiers) == report.offload_hit_blocks


# ---- specifications of tiers


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("disk:/x", "tier: 'disk:/x' is invalid; its capacity is missing; allowed: disk:PATH:CAPACITY, such"),
        ("disk::10%", "tier.path: missing; give a directory"),
        ("ssd:/x:10%", "tier.type: 'ssd' is invalid; allowed: disk, s3, simulated"),
        ("simulated:/x:10%", "tier.path: ['/x'] is invalid; there is no such option"),
        ("disk:/x:ten", "tier.capacity: 'ten' is invalid; allowed: a size"),
        ("disk:/x:10%,policy", "'policy' is no option; allowed: "),
        ("disk:/x:10%,colour=red", "tier.colour: 'red' is invalid; there is no such option"),
        (
            "disk:/x:10%,policy=lru,colour=red",
            "tier.policy: 'lru,colour=red' is invalid; 'colour' is unknown or given twice",
        ),
        ("disk:/x|/x:10%", "allowed: a directory, or a list of directories, each once"),
        ("disk", "allowed: disk:PATH:CAPACITY, or simulated:CAPACITY in a replay without data"),
    ],
)
def test_invalid_tiers_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_tier("tier", text)
    assert message in str(refused.value)


def test_a_tier_is_parsed_and_printed() -> None:
    text = "disk:/data/a:b:10%,policy=s3fifo,small_share=0.2,admission=reuse:2"
    options = {"policy": "s3fifo,small_share=0.2", "admission": "reuse:2"}
    tier = parse_tier("tier", text)
    assert tier == DiskOptions(path=("/data/a:b",), capacity="10%", **options)
    assert parse_tier("tier", {"type": "disk", "path": "/data/a:b", "capacity": "10%", **options}) == tier
    assert parse_tier("tier", str(tier)) == tier
    assert tier.in_blocks(4096, 1000).num_blocks == 100
    assert parse_tiers("tiers", "disk:/a|/b:5GiB,salt=2+disk:/c+d:1TiB") == (
        DiskOptions(path=("/a", "/b"), capacity="5GiB", salt="2"),
        DiskOptions(path=("/c+d",), capacity="1TiB"),
    )


URL_KIND = """
from dataclasses import dataclass
from kvoffload.tiers.spec import TierOptions

@dataclass(frozen=True, kw_only=True)
class FarOptions(TierOptions):
    name = "far"
    schemes = ("far", "fars", "far+wide")
    url: str
    ttl: int = 0
    password_file: str = ""

    def open(self, owner):
        raise AssertionError
"""


@pytest.fixture
def far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "far.py").write_text(URL_KIND)
    monkeypatch.setattr(kinds, "__path__", [*kinds.__path__, str(tmp_path)])
    yield
    sys.modules.pop("kvoffload.tiers.kinds.far", None)


@pytest.mark.usefixtures("far")
@pytest.mark.parametrize(
    "url", ["far://host:6379/ns", "fars://a,b:1/x,y", "far+wide://a:1,b:2/ns", "far://[::1]:1/n"]
)
def test_a_url_is_parsed_and_printed(url: str) -> None:
    tier: Any = parse_tier("tier", f"{url}?ttl=7&password_file=/run/key")
    assert type(tier).__name__ == "FarOptions"
    assert (tier.url, tier.ttl, tier.password_file) == (url, 7, "/run/key")
    assert str(tier) == f"{url}?ttl=7&password_file=/run/key"
    assert parse_tier("tier", str(tier)) == tier
    assert parse_tier("tier", {"type": "far", "url": url, "ttl": 7, "password_file": "/run/key"}) == tier
    assert parse_tier("tier", {"url": f"{url}?ttl=7", "password_file": "/run/key"}) == tier
    assert parse_tiers("tiers", f"disk:/a+b:5GiB+{url}?ttl=7&password_file=/run/key+100") == (
        DiskOptions(path=("/a+b",), capacity="5GiB"),
        tier,
        parse_tier("tier", "simulated:100"),
    )
    assert tier.in_blocks(4096, 10) == tier
    assert tier.num_blocks >= 1 << 30


@pytest.mark.usefixtures("far")
@pytest.mark.parametrize(
    ("tier", "message"),
    [
        ("valke://host:6379/ns", "tier.type: 'valke://host:6379/ns' is invalid; allowed: "),
        ("valke://host:6379/ns", "far://, fars://, far+wide"),
        ("farr://host/ns", "tier.type: 'farr://host/ns' is invalid; allowed: "),
        ("far://host/ns?tll=7", "tier.tll: '7' is invalid; there is no such option (did you mean ttl?)"),
        ("far://host/ns?ttl=soon", "tier.ttl: 'soon' is invalid; allowed: a whole number"),
        ("far://host/ns?ttl=1&ttl=2", "tier.ttl: '2' is invalid; ttl is given twice"),
        ("far://host/ns?ttl", "tier.ttl: '' is invalid; allowed: a whole number"),
        ({"type": "far", "url": "far://host/ns?ttl=1", "ttl": 2}, "tier.ttl: '1' is invalid; ttl is gi"),
        ("far://host/ns?password=hunter2", "tier.password: '***' is invalid; a secret belongs in the "),
        ({"type": "far", "url": "far://h/n", "auth_token": "hunter2"}, "tier.auth_token: '***' is inval"),
        ("farr://me:hunter2@host/ns", "tier.type: 'farr://***@host/ns' is invalid"),
        ("farr://me:hun/ter2@host/ns?ttl=1", "tier.type: 'farr://***@host/ns?ttl=1'"),
        ({"type": "farr://:hunter2@host/ns"}, "tier.type: 'farr://***@host/ns'"),
    ],
)  # fmt: skip
def test_invalid_urls_are_refused_without_printing_secrets(tier: object, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_tier("tier", tier)
    assert message in str(refused.value)
    assert not re.search("hun/?ter2", str(refused.value))


def test_a_disk_needs_bytes(tmp_path: Path, small_chat: Trace) -> None:
    with pytest.raises(ConfigError, match="use simulated:100"):
        Replay(small_chat, ReplayConfig(10, tiers=disk(tmp_path, 100)))


def test_a_new_module_adds_a_kind_of_tier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_chat: Trace
) -> None:
    """A tier needs no other change than its module in the room."""
    (tmp_path / "toy.py").write_text(
        "from dataclasses import dataclass\n"
        "from kvoffload.tiers.kinds.simulated import SimulatedOptions\n\n"
        "@dataclass(frozen=True, kw_only=True)\n"
        "class ToyOptions(SimulatedOptions):\n"
        "    name = 'toy'\n"
        "    colour: str = 'red'\n"
    )
    monkeypatch.setattr(kinds, "__path__", [*kinds.__path__, str(tmp_path)])
    tiers = parse_tiers("tiers", "toy:100,colour=blue")
    assert str(tiers[0]) == "toy:100,colour=blue"
    assert Replay(small_chat, ReplayConfig(10, tiers=tiers)).run().tiers[1].blocks_written > 0
    monkeypatch.delitem(sys.modules, "kvoffload.tiers.kinds.toy")
    (tmp_path / "toy.py").unlink()
    with pytest.raises(ConfigError, match="allowed: disk, s3, simulated, valkey, module"):
        parse_tiers("tiers", "toy:100")


def test_the_command_prints_hits_by_tier(tmp_path: Path) -> None:
    trace = tmp_path / "small.jsonl"
    kvoffload("trace", "generate", "chat", "--sessions", "60", "--output", trace)
    arguments = ("replay", trace, "--capacity", "60", "--block-bytes", "4KiB", "--quiet")
    done = kvoffload(*arguments, "--tier", f"disk:{tmp_path / 'slab'}:400")
    assert done.returncode == 0, done.stderr
    for words in ("ram (lru, all, 60 blocks)", "disk", "written to disk", "mismatches caught by disk"):
        assert words in done.stdout, words
    slab = tmp_path / "slab"
    assert f"{slab} takes up to 1.562 MiB and stays; delete it with: kvoffload disk rm {slab}" in done.stderr
    done = kvoffload(*arguments, "--tiers", f"disk:{slab}:400+simulated:5", "--format", "json", "--no-data")
    assert "a replay without data has no bytes to store" in done.stderr
    done = kvoffload(*arguments, "--tier", f"disk:{tmp_path / 'slab'}:400", "--format", "json")
    tiers = json.loads(done.stdout)["tiers"]
    assert set(tiers[1]) == {
        "name", "hit_blocks", "blocks_written", "blocks_evicted", "bytes_written", "bytes_read",
        "mismatches_caught", "requests", "cost", "outages", "outage_s", "unanswered_blocks", "tenants",
    }  # fmt: skip
    done = kvoffload(*arguments, "--tier", f"disk:{trace}:400")
    assert done.returncode != 0
    assert "a directory" in done.stderr
    assert "Traceback" not in done.stderr


# ---- sweeps


@pytest.mark.slow
def test_a_sweep_over_tiers_equals_replays(small_chat: Trace) -> None:
    grid = Grid(
        ("lru", "arc"), capacities=("60",), tiers=("none", "100", "100,policy=arc,admission=reuse:2+400")
    )
    rows = Sweep(["chat"], grid, work=Work(jobs=1, resamples=100)).run().rows
    chat = load_trace("chat")
    assert [(row.tiers, row.tier_blocks, row.policy) for row in rows] == [
        (tiers, blocks, policy)
        for tiers, blocks in (("none", 0), ("100", 100), ("100,policy=arc,admission=reuse:2+400", 500))
        for policy in ("lru", "arc")
    ]
    stack = parse_tiers("tiers", "100,policy=arc,admission=reuse:2+400")
    report = Replay(chat, ReplayConfig(60, "arc", tiers=stack)).run()
    row = rows[-1]
    assert row.prefix_hit_ratio == report.prefix_hit_ratio
    assert row.decisions_sha256 == report.decisions_sha256
    assert row.optimum_hit_ratio == report.optimum_hit_ratio
    assert row.tier_hit_ratio == sum(tier.hit_blocks for tier in report.tiers[1:]) / chat.block_refs
    assert row.tier_writes_per_ref == sum(tier.blocks_written for tier in report.tiers[1:]) / chat.block_refs
    assert rows[0].tier_hit_ratio == rows[0].tier_writes_per_ref == 0.0
    assert rows[4].baseline == "lru, all"


@pytest.mark.parametrize("tiers", ["", "10%,policy=lruu", "10%,admission=reuse:x", "ten", "10%++20%"])
def test_invalid_axes_of_tiers_are_refused(tiers: str) -> None:
    with pytest.raises(ConfigError, match="tiers"):
        Grid(("lru",), tiers=(tiers,))


def test_a_sweep_keeps_no_blocks() -> None:
    """The sweep is refused before it reads a trace."""
    with pytest.raises(ConfigError, match=r"tiers: 'disk:/x:10%' .* allowed: simulated:10%$"):
        Grid(("lru",), tiers=("none", "disk:/x:10%"))
