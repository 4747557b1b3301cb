"""Quotas in a replay: hits by hand, sums that equal the totals, and contradictory options."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvoffload.core.tenants import Quota
from kvoffload.errors import ConfigError
from kvoffload.replay.config import ReplayConfig
from kvoffload.replay.instances import replay_of
from kvoffload.replay.replay import Replay
from kvoffload.replay.report import TenantReport
from kvoffload.simulate.config import Timing
from kvoffload.simulate.timed import replay_in_time
from kvoffload.tiers.spec import parse_tiers
from kvoffload.traces.sources import load_trace
from kvoffload.traces.trace import Trace
from support.run_cli import kvoffload
from support.simulated_machine import BLOCK_BYTES, INSTANT, machine

HOT, SCANNED, ROUNDS = 8, 10, 10
"""Each of 10 rounds requests the same 8 blocks for tenant `a`, then 10 new blocks for the scan."""


def requests(*, names: bool = True) -> str:
    lines = []
    for number in range(ROUNDS):
        hot = {"hash_ids": list(range(HOT)), "input_length": 512 * HOT, "tenant": "a"}
        first = 1000 + SCANNED * number
        scan = {"hash_ids": list(range(first, first + SCANNED)), "input_length": 512 * SCANNED, "tenant": "b"}
        for request in (hot, scan):
            line: dict[str, Any] = {"timestamp": 1000 * len(lines), "output_length": 1, **request}
            if not names:
                del line["tenant"]
            lines.append(json.dumps(line))
    return "\n".join(lines)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "scan.jsonl").write_text(requests())
    return tmp_path / "scan.jsonl"


@pytest.fixture
def trace(path: Path) -> Trace:
    return load_trace(str(path))


def by_tenant(trace: Trace, quotas: Mapping[str, Quota], **config: Any) -> dict[str, TenantReport]:
    report = replay_of(trace, ReplayConfig(10, tenants=quotas, **config)).run()
    assert sum(row.block_refs for row in report.tenants) == trace.block_refs
    assert sum(row.prefix_hit_blocks for row in report.tenants) == report.prefix_hit_blocks
    assert sum(row.blocks_evicted for row in report.tenants) == report.blocks_evicted
    return {row.tenant: row for row in report.tenants}


def test_without_quotas_the_scan_takes_every_hit(trace: Trace) -> None:
    report = Replay(trace, ReplayConfig(10)).run()
    assert (report.prefix_hit_blocks, report.tenants) == (0, [])


@pytest.mark.parametrize("policy", ["lru", "arc", "s3fifo", "hazard"])
def test_a_minimum_keeps_the_blocks_of_its_tenant(trace: Trace, policy: str) -> None:
    rows = by_tenant(trace, {"a": Quota(HOT)}, policy=policy)
    assert [*rows] == ["a", "other"]
    assert rows["a"].block_refs == HOT * ROUNDS
    assert rows["a"].prefix_hit_blocks == HOT * (ROUNDS - 1)
    assert (rows["a"].blocks_held, rows["a"].blocks_evicted) == (HOT, 0)
    assert (rows["other"].prefix_hit_blocks, rows["other"].blocks_held) == (0, 2)


def test_a_maximum_limits_its_tenant(trace: Trace) -> None:
    rows = by_tenant(trace, {"b": Quota(0, 2), "other": Quota(1, None)})
    assert [*rows] == ["b", "other"]
    assert (rows["b"].max_blocks, rows["b"].blocks_held) == (2, 2)
    assert rows["other"].prefix_hit_blocks == HOT * (ROUNDS - 1)
    assert rows["other"].min_blocks == 1


def test_quotas_hold_with_tiers_and_with_several_engines(trace: Trace) -> None:
    quotas = {"a": Quota(HOT)}
    rows = by_tenant(trace, quotas, tiers=parse_tiers("tiers", "simulated:4"))
    assert rows["a"].prefix_hit_blocks == HOT * (ROUNDS - 1)
    rows = by_tenant(trace, quotas, instances=2, routing="round-robin")
    assert rows["a"].prefix_hit_blocks == HOT * (ROUNDS - 1), "the first engine serves all requests of a"
    assert rows["other"].blocks_held == 10, "the second engine serves the whole scan"


def test_a_capacity_beyond_all_blocks_needs_no_minimum(trace: Trace) -> None:
    config = ReplayConfig(1000, tenants={"a": Quota(600), "b": Quota(0, 2)})
    report = Replay(trace, config).run()
    assert [row.blocks_held for row in report.tenants] == [HOT, 2, 0]
    assert report.tenants[0].min_blocks == 600


def test_contradictory_quotas_are_refused() -> None:
    for config, message in (
        (
            {"store": "on-device-eviction", "device_blocks": 4},
            "no quotas, because dropped blocks belong to no",
        ),
        ({"instances": 2, "shared_ram": True}, "because the engines of a pool have shares instead"),
        ({"capacity_blocks": 7}, "the minimums add up to more than the capacity of 7"),
    ):
        with pytest.raises(ConfigError, match=message):
            ReplayConfig(**{"capacity_blocks": 10, "tenants": {"a": Quota(8)}, **config})  # type: ignore[arg-type]


def replayed(path: Path, quotas: object, *extra: str) -> Any:
    return kvoffload(
        "replay", path, "--capacity", "10", "--no-data", "--quiet", "--tenants", json.dumps(quotas), *extra
    )


def test_the_command_takes_the_quotas_of_an_engine(path: Path) -> None:
    done = replayed(path, {"a": {"min": "8MiB"}, "b": {"max": "5%"}}, "--bytes-per-token", "2KiB",
                    "--format", "json")  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["tenants"]
    assert [(row["tenant"], row["min_blocks"], row["max_blocks"]) for row in rows] == [
        ("a", 8, None), ("b", 0, 5), ("other", 0, None),
    ]  # fmt: skip
    assert rows[0]["prefix_hit_blocks"] == HOT * (ROUNDS - 1)
    shown = replayed(path, {"a": {"min": 8}})
    assert "Tenant" in shown.stdout
    assert "90.0%" in shown.stdout


def test_invalid_quotas_are_a_one_line_error(path: Path) -> None:
    for quotas, extra, message in (
        ({"a": {"least": 3}}, (), "tenants.a.least: 3 is invalid; no such option; allowed: min, max"),
        ({"a": {"min": "1GiB"}}, (), "a size needs the bytes of a token"),
        ({"a": {"min": 6}, "b": {"min": 5}}, (), "the minimums add up to more than the capacity of 10"),
        ({"a": {"min": 8}}, ("--store", "on-device-eviction", "--device-blocks", "4"), "there are no quotas"),
        ([], (), "tenants: [] is invalid; allowed: {"),
    ):
        done = replayed(path, quotas, *extra)
        assert (done.returncode, done.stdout) == (2, ""), done
        assert message in done.stderr


# ---- quotas of tiers

TIER = {"tiers": parse_tiers("tiers", "simulated:8"), "tenants": {"a": Quota()}}


@pytest.mark.parametrize(
    ("quotas", "saved"), [({}, 0), ({"simulated": {"a": Quota(HOT)}}, HOT * (ROUNDS - 1))]
)
def test_a_minimum_of_a_tier_keeps_blocks_evicted_by_ram(trace: Trace, quotas: Any, saved: int) -> None:
    report = Replay(trace, ReplayConfig(10, tier_tenants=quotas, **TIER)).run()  # type: ignore[arg-type]
    assert report.tiers[1].hit_blocks == saved
    assert report.tenants[0].prefix_hit_blocks == saved
    held = {row.tenant: (row.min_blocks, row.blocks_held) for row in report.tiers[1].tenants}
    assert held == ({"a": (HOT, HOT), "other": (0, 0)} if quotas else {})


def test_the_command_takes_quotas_of_tiers(path: Path) -> None:
    quotas = {"a": {"tiers": {"simulated": {"min": 8, "max": "10%"}}}}
    done = replayed(path, quotas, "--tier", "simulated:12", "--format", "json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["tiers"][1]["tenants"]
    assert rows[0] == {
        "tenant": "a",
        "min_blocks": 8,
        "max_blocks": 10,
        "blocks_held": 8,
        "blocks_evicted": 0,
    }
    done = replayed(path, quotas, "--tier", "simulated:7")
    assert "the minimums add up to more than the capacity of 7" in done.stderr
    done = replayed(path, quotas)
    assert "tenants: 'simulated' is invalid; allowed as tiers: none" in done.stderr


# ---- the same quotas in other commands

INSTANT_COPIES = machine(
    load_bytes_per_s=INSTANT,
    store_bytes_per_s=INSTANT,
    disk_read_bytes_per_s=INSTANT,
    disk_write_bytes_per_s=INSTANT,
)


@pytest.mark.parametrize(("quotas", "saved"), [({}, 0), ({"a": Quota(HOT)}, (HOT - 1) * (ROUNDS - 1))])
def test_a_timed_replay_keeps_quotas(trace: Trace, quotas: Mapping[str, Quota], saved: int) -> None:
    """The last block of each prompt is always computed."""
    config = ReplayConfig(10, device_blocks=11, tenants=quotas)
    report = replay_in_time(trace, config, Timing(INSTANT_COPIES, BLOCK_BYTES, at_once=1))
    assert report.with_offload.offload_hit_blocks == saved


@pytest.mark.parametrize("blocks", [12, 5000])
def test_a_timed_replay_keeps_quotas_of_tiers(trace: Trace, blocks: int) -> None:
    """A tier with room for all blocks ignores minimums, like RAM."""
    tiers, tenants = parse_tiers("tiers", f"simulated:{blocks}"), {"a": Quota(), "b": Quota()}
    config = ReplayConfig(12, device_blocks=11, tiers=tiers, tenants=tenants)
    hits = []
    for quotas in ({}, {"simulated": {"a": Quota(0, 2), "b": Quota(blocks - 2)}}):
        timing = Timing(INSTANT_COPIES, BLOCK_BYTES, at_once=1)
        report = replay_in_time(trace, replace(config, tier_tenants=quotas), timing)
        hits.append(report.with_offload.tiers[1].hit_blocks)
    assert hits[1] == 0 < hits[0]


def test_simulate_and_explain_take_the_quotas_of_replay(path: Path) -> None:
    quotas = ("--tenants", json.dumps({"a": {"min": "8MiB"}}))
    sizes = ("--capacity", "10", "--bytes-per-token", "2KiB", "--quiet", "--format", "json")
    explained, bare = (
        json.loads(kvoffload("explain", path, *sizes, *extra).stdout) for extra in (quotas, ())
    )
    assert (explained["hits"], bare["hits"]) == (HOT * (ROUNDS - 1), 0)
    assert explained["reasons"] == {"new_prompt": HOT + SCANNED * ROUNDS}
    assert bare["reasons"]["evicted"] == HOT * (ROUNDS - 1)
    simulated, bare = (
        json.loads(kvoffload("simulate", path, *sizes, "--device-blocks", "11", *extra).stdout)
        for extra in (quotas, ())
    )
    assert simulated["with_offload"]["offload_hit_blocks"] == (HOT - 1) * (ROUNDS - 1)
    assert bare["with_offload"]["offload_hit_blocks"] == 0


@pytest.mark.parametrize("command", ["replay", "simulate", "explain"])
def test_invalid_quotas_are_a_one_line_error_in_every_command(path: Path, command: str) -> None:
    sizes = ("--capacity", "10", "--bytes-per-token", "2KiB", "--device-blocks", "11", "--quiet")
    for quotas, extra, message in (
        ({"a": {"least": 3}}, (), "tenants.a.least: 3 is invalid; no such option; allowed: min, max"),
        ({"a": {"min": 8}}, ("--store", "on-device-eviction"), "there are no quotas"),
        ({"a": {"tiers": {"disk": {}}}}, (), "tenants: 'disk' is invalid; allowed as tiers: none"),
    ):
        done = kvoffload(command, path, *sizes, "--tenants", json.dumps(quotas), *extra)
        assert (done.returncode, done.stdout) == (2, ""), done
        assert message in done.stderr
        assert len(done.stderr.splitlines()) == 1
