"""Plans with one RAM pool per host: hits by hand, replays of all engines, refused configurations."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvoffload.errors import ConfigError
from kvoffload.integrations.vllm.shared.options import parse_options
from kvoffload.plan.clock import Clock
from kvoffload.plan.evidence import gather
from kvoffload.plan.fleet import Fleet, Purchase
from kvoffload.plan.plan import Plan
from kvoffload.plan.prices import Ram, as_toml
from kvoffload.plan.rows import Setup
from kvoffload.plan.setups import Setups
from kvoffload.plan.targets import Target
from kvoffload.replay.config import ReplayConfig
from kvoffload.replay.instances import SharedReplay, replay_of
from kvoffload.replay.replay import Replay
from kvoffload.replay.routing import ROUTINGS, route
from kvoffload.sweep.measuring import Work
from kvoffload.sweep.task import TraceSource
from kvoffload.tiers.spec import parse_tiers
from kvoffload.traces.sessions import generate
from kvoffload.traces.sources import load_trace
from kvoffload.traces.trace import Trace
from kvoffload.traces.workloads import builtin
from support.plan_rows import MIB, PLAIN, fleet, planned, prices, words, written
from support.run_cli import kvoffload
from support.shared_plans import NOTHING_IN, REQUESTS, asked_twice, by_hand, row_of, server
from support.simulated_machine import machine

BOTH = Setups(("on-compute", "on-device-eviction"), ("lru",), ("all",), ("lru",), ("all",), ("all",))


def two(**others: Any) -> Fleet:
    """Two engines of one host, GPUs of 5 blocks each, random routing."""
    ram = Ram(module="100MiB", price=100, slots=8)
    options: dict[str, Any] = {"gpus": 2, "replicas": 2, "routing": "random", "shared_ram": True, **others}
    return fleet(prices(ram), **options)


# ---- several machines in a replay


@pytest.fixture(scope="module")
def workload() -> Trace:
    return generate(builtin("chat", sessions=150))


@pytest.mark.parametrize("routing", ROUTINGS)
def test_each_machine_has_a_pool(workload: Trace, routing: str) -> None:
    config = ReplayConfig(100, device_blocks=60, instances=6, routing=routing, shared_ram=True, machines=3)
    run = replay_of(workload, config)
    assert isinstance(run, SharedReplay)
    report = run.run()
    machine_of = route(workload, 6, routing) // 2
    config_of_host = ReplayConfig(100, device_blocks=60, instances=2, shared_ram=True)
    apart = []
    for number in range(3):
        requests = np.flatnonzero(machine_of == number)
        own = workload.of_requests(requests)
        apart.append(Replay(own, config_of_host, engine_of=route(workload, 6, routing)[requests] % 2))
    reports = [replay.run() for replay in apart]
    assert report.prefix_hit_blocks == sum(own_report.prefix_hit_blocks for own_report in reports)
    assert report.hit_blocks_of_others == sum(own_report.hit_blocks_of_others for own_report in reports)
    assert report.blocks_written == sum(own_report.blocks_written for own_report in reports)
    assert (report.instances, report.shared_ram) == (6, True)
    assert report.prefix_hit_ratio <= report.optimum_hit_ratio < report.infinite_hit_ratio
    hits = [own.tolist() for replay in apart for own in replay.hits_of_instances]
    assert [own.tolist() for own in run.hits_of_instances] == hits
    assert len(hits) == 6


def test_one_engine_per_machine_shares_nothing(workload: Trace) -> None:
    private = ReplayConfig(100, device_blocks=60, instances=3)
    pools = ReplayConfig(100, device_blocks=60, instances=3, shared_ram=True, machines=3)
    pooled, expected = replay_of(workload, pools).run(), replay_of(workload, private).run()
    assert pooled.decisions_sha256 == expected.decisions_sha256
    tiers = parse_tiers("tiers", "300")
    pools = ReplayConfig(50, tiers=tiers, instances=4, routing="random", shared_ram=True, machines=2)
    report = replay_of(workload, pools).run()
    assert report.tiers[1].hit_blocks > 0
    assert report.tiers[0].hit_blocks + report.tiers[1].hit_blocks == report.offload_hit_blocks
    assert report.prefix_hit_ratio <= report.optimum_hit_ratio


@pytest.mark.parametrize(("machines", "shared"), [(2, False), (3, True), (0, True)])
def test_invalid_numbers_of_machines_are_refused(machines: int, shared: bool) -> None:
    with pytest.raises(ConfigError, match="machines: "):
        ReplayConfig(1, instances=4, shared_ram=shared, machines=machines)


# ---- by hand


def test_a_pool_saves_blocks_of_other_engines(twice: str) -> None:
    again = asked_twice()[1]
    answer = planned(twice, two(), of_ceiling=1.0)
    row = answer.chosen
    assert row.purchase.modules <= 4
    assert row.shared_ram
    assert row.saved == row.by_ram == answer.ceiling == again / REQUESTS
    assert answer.ceiling_apart == row.by_gpus == 0
    size = row.ram_bytes // MIB
    (sentence,) = [sentence for sentence in answer.words if sentence.startswith("One pool of ")]
    points = f"{100 * again / REQUESTS:.1f} points more "
    assert sentence.startswith(
        f"One pool of {size} MiB for 2 engines instead of 2 of {size // 2} MiB saves {points}"
    )
    assert sentence.endswith("; separate RAM saves most with lru, on-compute.")
    modules = f"{row.ram_modules} module" + "s" * (row.ram_modules > 1)
    assert (
        f"Use lru, on-compute, shared RAM: RAM takes each block when it is computed. That is {modules} of"
        in (words(answer))
    )
    assert "in the host, as one pool that its 2 engines share." in words(answer)
    assert any(assumption.name == "RAM pools" for assumption in answer.assumptions)


def test_a_pool_that_saves_less_is_reported(tmp_path: Path) -> None:
    """Each engine repeats ten blocks: five fit into its GPU, and five into its victim tier."""
    trace = written(tmp_path / "loops.jsonl", [(n // 2 % 10 + 10 * (n % 2),) for n in range(400)])
    of = replace(two(routing="round-robin"), prices=prices(Ram(module="10MiB", price=100, slots=1)))
    answer = planned(trace, of, BOTH)
    assert str(answer.chosen.setup) == "lru, on-device-eviction"
    assert answer.chosen.saved == 0.95
    (sentence,) = [sentence for sentence in answer.words if sentence.startswith("One pool of ")]
    begin = "One pool of 10 MiB for 2 engines instead of 2 of 5 MiB would save 95.0 points less (likely"
    assert sentence.startswith(begin)
    assert {row.shared_ram for row in answer.rows} == {False, True}
    assert not any(row.shared_ram and row.store == "on-device-eviction" for row in answer.rows)


ON_TWO_HOSTS = {"gpus": 4, "replicas": 4, "gpus_per_host": 2, "routing": "session"}


@pytest.mark.parametrize("options", [{}, ON_TWO_HOSTS])
def test_rows_are_replays_of_all_engines(chat: str, options: dict[str, Any]) -> None:
    options = dict(options)
    per_host = options.pop("gpus_per_host", 8)
    ram = Ram(module="200MiB", price=100, slots=2)
    of = fleet(prices(ram, gpus_per_host=per_host), 100 * MIB,
               **{"gpus": 2, "replicas": 2, "routing": "random", "shared_ram": True, **options})  # fmt: skip
    evidence = gather(TraceSource(chat, None, False), of, is_shared=True)
    setup = Setup("on-compute", "lru", "all", shared_ram=True)
    measured, trace = row_of(evidence, of, Purchase(2, 0), setup), load_trace(chat)
    config = ReplayConfig(
        of.blocks(of.ram_bytes(Purchase(2, 0))), device_blocks=of.device_blocks, instances=of.replicas,
        routing=of.routing, shared_ram=True, machines=of.hosts,
    )  # fmt: skip
    report = replay_of(trace, config).run()
    row = measured.row
    assert row.saved == report.prefix_hit_blocks / trace.block_refs
    assert row.by_ram == pytest.approx(report.offload_hit_blocks / trace.block_refs)
    assert row.by_gpus == pytest.approx(evidence.device_share)
    assert row.saved <= row.optimum <= evidence.ceiling
    assert row.optimum == pytest.approx(report.optimum_hit_ratio)
    assert len(measured.hits) == len(evidence.refs)
    apart = row_of(evidence, of, Purchase(2, 0), Setup("on-compute", "lru", "all")).row
    assert (apart.by_gpus, apart.ram_blocks) == (pytest.approx(row.by_gpus), row.ram_blocks)


@pytest.mark.slow
def test_pools_and_servers_can_be_combined(chat: str) -> None:
    for_sale = prices(Ram(module="1GiB", price=100, slots=4), server=server())
    of = fleet(for_sale, 20 * MIB, gpus=4, replicas=4, routing="random", shared_ram=True)
    evidence = gather(TraceSource(chat, None, False), of, is_shared=True)
    alone = row_of(evidence, of, Purchase(1, 0), Setup("on-compute", "lru", "all", shared_ram=True))
    useless = Setup("on-compute", "lru", "all", server_admission=NOTHING_IN, shared_ram=True)
    assert row_of(evidence, of, Purchase(1, 0, 1), useless).row.saved == alone.row.saved
    answer = planned(chat, of, BOTH)
    assert any(row.servers and row.shared_ram for row in answer.rows)
    assert not any(row.ssd_drives and row.shared_ram for row in answer.rows)


def test_a_pool_has_the_whole_link_of_its_host(chat: str) -> None:
    """Regression: all engines of a pool shared the link of one engine."""
    of = fleet(
        prices(server=server()), 200 * MIB, gpus=4, replicas=4, routing="random", shared_ram=True,
        machine=machine(prefill_s_per_token=1e-4),
    )  # fmt: skip
    evidence = gather(TraceSource(chat, None, False), of, is_shared=True)
    rates = []
    for shared in (True, False):
        setup = Setup("on-compute", "lru", "all", server_admission="all", shared_ram=shared)
        row = row_of(evidence, of, Purchase(1, 0, 1), setup).row
        rate = Clock(of.machine, of, evidence).timing_of(row).machine.disk_read_bytes_per_s
        rates.append(rate.value)
    assert rates[0] == 4 * rates[1]


def test_a_sample_is_searched_and_compared_on_all_sessions(twice: str) -> None:
    plan = Plan(
        TraceSource(twice, None, False), two(), Target(of_ceiling=0.9), PLAIN, work=Work(jobs=1), one_in=2
    )
    answer = plan.run()
    assert answer.chosen.shared_ram
    assert any(row.shared_ram for row in answer.sampled)
    assert answer.chosen.one_in == 1


def test_without_the_option_no_pool_is_considered(twice: str) -> None:
    answer = planned(twice, two(shared_ram=False))
    assert not any(row.shared_ram for row in answer.rows)
    assert "pool" not in words(answer)


def test_a_pool_is_timed_with_its_engines(twice: str) -> None:
    on = by_hand()
    answer = planned(twice, two(machine=on), of_ceiling=1.0)
    assert answer.chosen.shared_ram
    assert answer.in_time is not None
    assert (answer.in_time.all_engines, answer.in_time.engines) == (True, 2)
    assert answer.in_time.with_offload.offload_hit_blocks
    answer = planned(twice, two(machine=on), ttft_p90_s=1000.0)
    assert not any(row.shared_ram for row in answer.rows)
    assert any(
        sentence.startswith("With a target in seconds no RAM pools are searched")
        for sentence in answer.cannot_tell
    )


def test_a_fleet_without_several_engines_in_a_host_is_refused() -> None:
    for replicas, per_host in ((1, 8), (4, 1), (2, 1)):
        why = "shared-ram: True is invalid; it needs equally many engines in each host, 2 or more"
        with pytest.raises(ConfigError, match=why):
            fleet(prices(gpus_per_host=per_host), gpus=4, replicas=replicas, shared_ram=True)


@pytest.mark.slow
def test_the_command(twice: str, tmp_path: Path) -> None:
    (tmp_path / "prices.toml").write_bytes(as_toml(two().prices).encode())
    arguments = ("plan", twice, "--bytes-per-token", "2048", "--gpus", "2", "--kv-per-gpu", "5MiB",
                 "--replicas", "2", "--routing", "random", "--prices", str(tmp_path / "prices.toml"),
                 "--policies", "lru", "--admissions", "all", "--target-of-ceiling", "1", "--jobs", "1",
                 "--quiet")  # fmt: skip
    done = kvoffload(*arguments, "--shared-ram", "--format", "json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["chosen"]["shared_ram"]
    flag = shlex.split(answer["vllm"])[1]
    options = parse_options(json.loads(flag)["kv_connector_extra_config"])
    assert (options.ram.shared, options.ram.size) == ("node", answer["chosen"]["ram_bytes"])
    done = kvoffload(*arguments, "--replicas", "1", "--shared-ram")
    assert "shared-ram: True is invalid; it needs equally many engines" in done.stderr
