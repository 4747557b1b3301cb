"""Whole machines that share a server: managers with RAM in front of it, and replays; also while it dies."""

from __future__ import annotations

import io
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from kvoffload.cli.output import terminal_table
from kvoffload.cli.replay_table import work
from kvoffload.errors import ConfigError
from kvoffload.replay.data import DataPlane
from kvoffload.replay.replay import Replay, ReplayConfig
from kvoffload.replay.report import ReplayReport
from kvoffload.sweep.grid import Grid
from kvoffload.tiers.kinds.valkey import ValkeyOptions
from kvoffload.tiers.spec import TierOwner, parse_tiers
from kvoffload.traces.sessions import generate
from kvoffload.traces.trace import Trace
from kvoffload.traces.workloads import builtin
from support.fault_proxy import FaultProxy
from support.run_cli import kvoffload
from support.sampling import sampled
from support.sharing_rig import BLOCK_BYTES, HIT, MISS, RETRY, Machine, some_keys
from support.valkey_server import PATIENCE_S, Server, running


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("valkey")) as server:
        yield server


@pytest.fixture
def server(shared_server: Server) -> Server:
    shared_server.say("FLUSHALL")
    return shared_server


@pytest.fixture
def make() -> Iterator[Callable[..., Machine]]:
    made: list[Machine] = []

    def one(port: int, **options: Any) -> Machine:
        patient = {"timeout": PATIENCE_S, "probe_timeout": PATIENCE_S}
        made.append(Machine(ValkeyOptions(url=f"valkey://127.0.0.1:{port}/ns", **(patient | options))))
        return made[-1]

    yield one
    for machine in made:
        machine.manager.close(PATIENCE_S)


def test_events_tell_of_ram_and_of_what_this_machine_wrote_to_the_server(
    server: Server, make: Callable[..., Machine]
) -> None:
    first = make(server.port)
    first.serve(1, 2)
    first.rest()
    second = Machine(first.described, enable_events=True)
    second.serve(1, 2, 3, 4)
    second.rest()

    def told(medium: str) -> list[tuple[list[bytes], bool]]:
        return [([*event.keys], event.removed) for event in events if event.medium == medium]

    events = second.manager.take_events()
    assert {key for keys, removed in told("CPU") for key in keys if not removed} == {*some_keys(1, 2, 3, 4)}
    assert told("valkey") == [(some_keys(3, 4), False)], "1 and 2 are another's"
    second.manager.reset()
    assert second.manager.settle(PATIENCE_S)
    events = second.manager.take_events()
    assert told("valkey") == [(some_keys(3, 4), True)]
    assert second.manager.take_events() == []
    second.manager.close(PATIENCE_S)


def test_the_first_request_of_a_machine_hits_what_another_has_computed(
    server: Server, make: Callable[..., Machine]
) -> None:
    first, second = make(server.port), make(server.port)
    assert first.serve(*range(1, 21)) == 0
    first.rest()
    assert second.serve(*range(1, 25)) == 20
    assert second.manager.hit_blocks == [0, 20]
    second.rest()
    assert second.tier.stats().written == 4
    assert first.serve(*range(1, 21)) == 20
    assert first.manager.hit_blocks == [20, 0]


def test_key_by_key_as_vllm_asks(server: Server, make: Callable[..., Machine]) -> None:
    first, second = make(server.port), make(server.port)
    first.serve(*range(1, 21))
    first.rest()
    ctx = second.manager.begin_request("r", some_keys(*range(1, 25)))
    until = time.monotonic() + PATIENCE_S
    while RETRY in (found := [second.manager.lookup_key(key, ctx) for key in some_keys(*range(1, 25))]):
        second.manager.poll()
        assert time.monotonic() < until
        time.sleep(0.0005)
    assert found == [HIT] * 20 + [MISS] * 4
    assert second.tier.stats().probes == 24, "each block was asked for once"


def test_a_reset_of_one_is_a_reset_of_the_server_for_all(
    server: Server, make: Callable[..., Machine]
) -> None:
    first, second = make(server.port), make(server.port)
    first.serve(*range(1, 21))
    first.rest()
    second.manager.reset(drop_in_flight=True)
    assert second.serve(*range(1, 21)) == 0
    assert first.serve(*range(1, 21)) == 20, "its own RAM is its own affair"
    first.manager.reset(drop_in_flight=True)
    assert first.serve(*range(1, 21)) == 0


@pytest.mark.slow
def test_a_server_that_hangs_and_dies_under_load_costs_hits_and_nothing_else(
    tmp_path: Path, make: Callable[..., Machine]
) -> None:
    """Every request is answered with its own bytes; afterwards the server is used again."""
    with running(tmp_path) as server:
        machines = [make(server.port, timeout=0.3, probe_timeout=0.2) for _ in range(2)]
        chance = np.random.default_rng(7)
        over = threading.Event()
        problems: list[BaseException] = []

        def load(machine: Machine, seed: int) -> None:
            random = np.random.default_rng(seed)
            try:
                while not over.is_set():
                    begin = int(random.integers(1, 200))
                    machine.serve(*range(begin, begin + int(random.integers(1, 24))))
            except BaseException as problem:
                problems.append(problem)

        threads = [threading.Thread(target=load, args=(one, n)) for n, one in enumerate(machines)]
        for thread in threads:
            thread.start()
        for _ in range(3):
            with server.stopped():
                time.sleep(float(chance.uniform(0.1, 0.5)))
            time.sleep(0.2)
            server.stop()
            time.sleep(0.2)
            server.start()
            time.sleep(0.5)
        over.set()
        for thread in threads:
            thread.join()
        assert not problems
        for one in machines:
            one.rest()
            assert one.tier.stats().mismatches == 0
            assert one.manager.stats().writing == 0
        until = time.monotonic() + PATIENCE_S
        while not all(one.tier.is_open("read") for one in machines):
            for one in machines:
                one.tier.end_pauses()
            assert time.monotonic() < until


# ---- replays


@pytest.fixture(scope="module")
def small_chat() -> Trace:
    return generate(builtin("chat", sessions=100))


def replay(trace: Trace, port: int) -> ReplayReport:
    tiers = parse_tiers("tiers", f"valkey://127.0.0.1:{port}/replay")
    data = DataPlane(40, BLOCK_BYTES)
    try:
        return Replay(trace, ReplayConfig(40, tiers=tiers), data).run()
    finally:
        data.close()


def test_a_replay_with_a_server_is_one_with_a_tier_that_holds_all(server: Server, small_chat: Trace) -> None:
    found = replay(small_chat, server.port)
    planned = Replay(small_chat, ReplayConfig(40, tiers=parse_tiers("tiers", "1000000"))).run()
    assert found.mismatches_served == 0
    assert found.prefix_hit_ratio == planned.prefix_hit_ratio
    assert found.tiers[1].name == "valkey"
    assert found.tiers[1].hit_blocks == planned.tiers[1].hit_blocks > 0
    again = replay(small_chat, server.port)
    assert again.prefix_hit_ratio > found.prefix_hit_ratio, "it starts warm"


@pytest.mark.parametrize(
    "faults", sampled([{"flip_at": 300_001}, {"cut_after": 400_000}, {"delay_s": 0.001}], 3)
)
@pytest.mark.slow
def test_a_replay_through_a_bad_network_serves_nothing_wrong(
    server: Server, small_chat: Trace, faults: dict[str, Any]
) -> None:
    with FaultProxy(server.port) as proxy:
        proxy.set(**faults)
        assert replay(small_chat, proxy.port).mismatches_served == 0


def test_a_replay_gives_up_a_server_that_is_silent_and_says_so(
    server: Server, small_chat: Trace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Not after 150 s for each write; the report tells it from a server that has few blocks."""
    monkeypatch.setattr(ValkeyOptions, "silence_s", 0.05)
    tiers = parse_tiers("tiers", f"valkey://127.0.0.1:{server.port}/replay")
    data = DataPlane(40, BLOCK_BYTES)
    try:
        one = Replay(small_chat, ReplayConfig(40, tiers=tiers), data)
        with server.stopped():
            found = one.run()
    finally:
        data.close()
    (tier,) = found.tiers[1:]
    assert found.mismatches_served == 0
    assert (tier.hit_blocks, tier.outages) == (0, 1)
    assert tier.unanswered_blocks > 0
    assert tier.outage_s > 0.05
    assert [tier["outages"] for tier in json.loads(found.to_json())["tiers"]] == [0, 1]
    (said,) = [record.getMessage() for record in caplog.records]
    assert "is silent" in said
    assert "valkey was unavailable" in table_of(found)


def table_of(report: ReplayReport) -> str:
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(terminal_table(work(report)))
    return console.export_text()


@pytest.mark.slow
def test_the_command(server: Server, tmp_path: Path) -> None:
    trace = tmp_path / "small.jsonl"
    kvoffload("trace", "generate", "chat", "--sessions", "40", "--output", trace)
    arguments = ("replay", trace, "--capacity", "60", "--block-bytes", "4KiB", "--quiet", "--format", "json")
    done = kvoffload(*arguments, "--tier", f"valkey://127.0.0.1:{server.port}/ns?ttl=1h")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert [tier["name"] for tier in report["tiers"]] == ["ram", "valkey"]
    assert report["tiers"][1]["hit_blocks"] > 0
    assert report["optimum_hit_ratio"] == report["infinite_hit_ratio"], "it holds what it likes"
    done = kvoffload(*arguments, "--tier", "valkey://me:hunter2@h/n")
    assert done.returncode != 0
    assert "valkey://***@h/n" in done.stderr
    assert "hunter2" not in done.stderr + done.stdout
    assert "Traceback" not in done.stderr


def test_what_has_no_bytes_has_no_server() -> None:
    with pytest.raises(ConfigError, match="use simulated:CAPACITY"):
        parse_tiers("t", "valkey://h/n")[0].open(TierOwner(0, 8, "m"))
    with pytest.raises(ConfigError, match="a sweep replays without bytes; allowed: simulated:CAPACITY"):
        Grid(("lru",), tiers=("valkey://h/n",))
