"""Tiers behind one RAM pool: tiers per engine and shared tiers, against members of a real pool."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from kvoffload.errors import ConfigError
from kvoffload.replay.config import ReplayConfig, slots_needed
from kvoffload.replay.data import DataPlane
from kvoffload.replay.instances import SharedReplay, replay_of
from kvoffload.replay.replay import Replay
from kvoffload.replay.report import ReplayReport
from kvoffload.replay.routing import ROUND_ROBIN, ROUTINGS
from kvoffload.tiers.kinds.disk import DiskOptions
from kvoffload.tiers.kinds.simulated import SimulatedOptions
from kvoffload.tiers.spec import TierOptions, parse_tiers
from kvoffload.traces.format import read_trace
from kvoffload.traces.trace import Trace
from support.optimum_traces import trace_of
from support.pool_by_hand import check, members
from support.run_cli import kvoffload
from support.servers import running

BYTES = 64
OWN = "60,per_engine=true"


@pytest.fixture(scope="module")
def trace() -> Trace:
    """Generate conversations with a common prefix, in random order; each restarts at 24 blocks."""
    draw, new = random.Random(1), count(3)
    prompts, requests = [[0, 1, 2] for _ in range(12)], []
    for _ in range(300):
        number = draw.randrange(len(prompts))
        before = prompts[number] if len(prompts[number]) < 24 else [0, 1, 2]
        prompts[number] = [*before, *(next(new) for _ in range(draw.randint(1, 3)))]
        requests.append(tuple(prompts[number]))
    return trace_of(requests)


def shared(instances: int, capacity: int, tiers: Any, **more: Any) -> ReplayConfig:
    options = parse_tiers("tiers", tiers) if isinstance(tiers, str) else tuple(tiers)
    given = {"routing": ROUND_ROBIN, **more}
    return ReplayConfig(capacity, instances=instances, shared_ram=True, tiers=options, **given)


@contextmanager
def plane(trace: Trace, config: ReplayConfig) -> Iterator[DataPlane]:
    data = DataPlane(slots_needed(trace, config.pool_blocks), BYTES)
    yield data
    data.close()


def adds_up(report: ReplayReport) -> None:
    assert sum(tier.hit_blocks for tier in report.tiers) == report.offload_hit_blocks
    assert report.offload_hit_blocks + report.device_hit_blocks == report.prefix_hit_blocks
    assert report.prefix_hit_ratio <= report.optimum_hit_ratio <= report.infinite_hit_ratio
    assert report.blocks_written == report.tiers[0].blocks_written


# ---- by hand

SIX = [(1, 2), (3, 4), (1, 2), (1, 2), (3, 4), (1, 2)]
"""Requests of two engines in turn. RAM holds two blocks, each disk all blocks.

Request 2 promotes 1 and 2 from the disk of engine 0. Request 3 of engine 1 hits them in RAM; engine 1 also
writes them to its own disk. Request 4 misses 3 and 4, which are only on the disk of engine 1. Request 5 hits
1 and 2 on the disk of engine 1.
"""


def six(tiers: Any) -> tuple[Trace, ReplayConfig]:
    return trace_of(SIX), shared(2, 1, tiers)


def check_six(report: ReplayReport) -> None:
    assert [tier.hit_blocks for tier in report.tiers] == [2, 4]
    assert report.prefix_hit_blocks == 6
    assert report.hit_blocks_of_others == 2, "request 3"
    assert report.tiers[1].blocks_written == 2 + 2 + 2 + 2
    assert (report.blocks_promoted, report.blocks_written) == (4, 4 + 2 + 4)
    adds_up(report)


def test_each_engine_reads_its_own_tier_and_all_read_ram() -> None:
    trace, config = six("9,per_engine=true")
    run = Replay(trace, config)
    check_six(run.run())
    assert run.hits_per_request.tolist() == [0, 0, 2, 2, 0, 2]


def test_each_engine_has_its_own_directory_of_a_disk(tmp_path: Path) -> None:
    trace, config = six([DiskOptions(path=(str(tmp_path),), capacity="9")])
    with plane(trace, config) as data:
        report = Replay(trace, config, data).run()
    check_six(report)
    assert report.tiers[1].bytes_written == 8 * BYTES
    assert report.blocks_verified == 6
    assert sorted(path.name for path in tmp_path.iterdir()) == ["replica-0", "replica-1"]


def test_a_shared_tier_serves_all() -> None:
    trace, config = six("9")
    report = Replay(trace, config).run()
    assert [tier.hit_blocks for tier in report.tiers] == [2, 6]
    assert report.hit_blocks_of_others == 6, "requests 3, 4 and 5"
    assert report.tiers[1].blocks_written == 4


def test_each_engine_connects_to_a_server(tmp_path: Path) -> None:
    with running("valkey", tmp_path / "server", timeout="60s") as server:
        trace, config = six(server.url)
        with plane(trace, config) as data:
            report = Replay(trace, config, data).run()
    assert [tier.hit_blocks for tier in report.tiers] == [2, 6]
    assert report.hit_blocks_of_others == 6
    assert report.blocks_verified == 8
    adds_up(report)


def test_the_first_of_two_tiers_is_each_engines_own() -> None:
    trace, config = six("9+9")
    report = Replay(trace, config).run()
    assert [tier.hit_blocks for tier in report.tiers] == [2, 4, 2]
    assert [tier.blocks_written for tier in report.tiers[1:]] == [8, 4]


# ---- against members of a real pool

Tiers = tuple[str, str]
STACKS: list[Tiers] = [
    (OWN, ""),
    ("60,admission=reuse:2,policy=arc,per_engine=true", ""),
    ("20,per_engine=true+60,policy=hazard,per_engine=true", ""),
    ("", "150"),
    ("50", "150,admission=tinylfu"),
]
"""Tiers of each engine, and a tier of all engines."""


@pytest.mark.parametrize("tiers", STACKS, ids="+".join)
@pytest.mark.parametrize(
    ("policy", "admission", "queue"), [("lru", "all", 0), ("hazard", "reuse:2", 3), ("arc", "tinylfu", 1)]
)
def test_decides_as_the_engines_of_a_pool(
    trace: Trace, tiers: Tiers, policy: str, admission: str, queue: int
) -> None:
    own, of_all = (parse_tiers("tiers", text) if text else () for text in tiers)
    config = shared(3, 20, [*own, *of_all], policy=policy, admission=admission,
                    queue_requests=queue, device_blocks=10)  # fmt: skip
    with members(trace, config, own=own, shared=of_all) as managers:
        report = check(trace, config, managers, num_own_tiers=len(own))
    adds_up(report)
    assert report.tiers[0].hit_blocks > 0 < report.tiers[-1].hit_blocks
    assert 0 < report.hit_blocks_of_others < report.offload_hit_blocks


@pytest.mark.slow
def test_decides_as_the_engines_of_a_pool_with_disks(tmp_path: Path, trace: Trace) -> None:
    def on_disk(name: str) -> tuple[TierOptions, ...]:
        return (DiskOptions(path=(str(tmp_path / name),), capacity="60", admission="reuse:2"),)

    config, own = shared(3, 20, on_disk("replay"), queue_requests=2), on_disk("by hand")
    with plane(trace, config) as data, plane(trace, config) as of_twin:
        with members(trace, config, own=own, plane=of_twin) as managers:
            report = check(trace, config, managers, num_own_tiers=1, planes=(data, of_twin))
        assert data.mismatches_served == 0 < data.blocks_verified
    like = SimulatedOptions(capacity="60", admission="reuse:2", per_engine=True)
    simulated = Replay(trace, replace(config, tiers=(like,))).run()
    assert simulated.decisions_sha256 == report.decisions_sha256
    adds_up(report)


@pytest.mark.slow
@pytest.mark.trace
@pytest.mark.parametrize("policy", [pytest.param("lru", marks=pytest.mark.long), "hazard"])
def test_a_recording_equals_the_engines_of_a_pool(
    recorded_trace_path: Callable[[str], Path], policy: str
) -> None:
    trace, own = (
        read_trace(recorded_trace_path("conversation_first60")),
        parse_tiers("tiers", "3000,per_engine=true"),
    )
    config = shared(8, 1000, own, policy=policy, device_blocks=500, queue_requests=4)
    with members(trace, config, own=own) as managers:
        adds_up(check(trace, config, managers, num_own_tiers=1))


# ---- one pool and separate pools


@pytest.mark.parametrize("routing", ROUTINGS)
def test_a_pool_before_large_tiers_adds_hits(trace: Trace, routing: str) -> None:
    """An engine hits its own earlier blocks, and blocks of others that are in RAM."""
    hits = {}
    for is_shared in (False, True):
        config = replace(shared(3, 20, "100000,per_engine=true", routing=routing), shared_ram=is_shared)
        hits[is_shared] = replay_of(trace, config).run()
        adds_up(hits[is_shared])
    assert hits[True].prefix_hit_blocks > hits[False].prefix_hit_blocks
    assert hits[False].hit_blocks_of_others == 0 < hits[True].hit_blocks_of_others


def test_machines_have_pools_and_engines_have_tiers(trace: Trace) -> None:
    config = shared(4, 20, OWN, machines=2)
    report = SharedReplay(trace, config).run()
    adds_up(report)
    assert report.tiers[1].hit_blocks > 0
    alone = SharedReplay(trace, replace(config, machines=4, device_blocks=0)).run()
    separate = SharedReplay(trace, replace(config, machines=1, shared_ram=False)).run()
    assert alone.prefix_hit_blocks == separate.prefix_hit_blocks
    assert alone.tiers[1].blocks_written == separate.tiers[1].blocks_written


def test_a_server_behind_the_pools_of_two_machines_serves_all(trace: Trace) -> None:
    own = SharedReplay(trace, shared(4, 20, "100000,per_engine=true", machines=2)).run()
    report = SharedReplay(trace, shared(4, 20, "100000,per_engine=true+100000", machines=2)).run()
    adds_up(report)
    assert report.tiers[2].blocks_written == trace.unique_blocks < report.tiers[1].blocks_written
    assert report.tiers[2].hit_blocks == report.prefix_hit_blocks - own.prefix_hit_blocks > 0


# ---- the command


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    chat = tmp_path / "chat.jsonl"
    kvoffload("trace", "generate", "chat", "--sessions", "60", "--output", chat)
    arguments = (
        "replay",
        chat,
        "--capacity",
        "60",
        "--instances",
        "2",
        "--shared-ram",
        "--quiet",
        "--routing",
        "random",
    )
    disk = f"disk:{tmp_path / 'slab'}:400"
    done = kvoffload(*arguments, "--tier", disk, "--block-bytes", "4KiB", "--format", "json")
    assert done.returncode == 0, done.stderr
    assert (
        f"{tmp_path / 'slab'} takes up to 1.562 MiB in each of its subdirectories and stays; " in done.stderr
    )
    assert f"kvoffload disk rm {tmp_path / 'slab' / 'replica-1'}" in done.stderr
    report = json.loads(done.stdout)
    assert report["shared_ram"]
    assert sum(tier["hit_blocks"] for tier in report["tiers"]) == report["offload_hit_blocks"]
    again = kvoffload(*arguments, "--no-data", "--tier", "simulated:400,per_engine=true", "--format", "json")
    assert json.loads(again.stdout)["decisions_sha256"] == report["decisions_sha256"]
    table = kvoffload(*arguments, "--no-data", "--tier", "simulated:400,per_engine=true").stdout
    assert "one pool of 120 blocks" in table


def test_a_tier_of_an_engine_in_text() -> None:
    (tier,) = parse_tiers("tiers", "9,per_engine=true")
    assert parse_tiers("tiers", str(tier)) == (tier,)
    with pytest.raises(ConfigError, match="per_engine: 'maybe' is invalid; allowed: true, false"):
        parse_tiers("tiers", "9,per_engine=maybe")
