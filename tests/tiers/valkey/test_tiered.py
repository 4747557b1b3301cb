"""Whole machines before a server: the contract of tiered managers, events, and a replay with an outage."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from rich.console import Console

from kvoffload.cli.output import terminal_table
from kvoffload.cli.replay_table import work
from kvoffload.replay.report import ReplayReport
from kvoffload.tiers.kinds.valkey import ValkeyOptions
from kvoffload.traces.sessions import generate
from kvoffload.traces.trace import Trace
from kvoffload.traces.workloads import builtin
from support.sharing_rig import Machine, some_keys
from support.tiered_contract import TieredContract, replay
from support.valkey_server import PATIENCE_S, Server, running


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("valkey")) as server:
        yield server


@pytest.fixture
def server(shared_server: Server) -> Server:
    shared_server.execute("FLUSHALL")
    return shared_server


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[Server]:
    with running(tmp_path) as server:
        yield server


@pytest.fixture(scope="module")
def trace() -> Trace:
    return generate(builtin("chat", sessions=100))


class TestTieredServer(TieredContract):
    kind = "valkey"
    timeouts = (0.3, 0.2)
    network_faults: ClassVar = [{"flip_at": 300_001}, {"cut_after": 400_000}, {"delay_s": 0.001}]

    def described(self, port: int, **options: Any) -> ValkeyOptions:
        return ValkeyOptions(url=f"valkey://127.0.0.1:{port}/ns", **options)

    def url(self, port: int, namespace: str) -> str:
        return f"valkey://127.0.0.1:{port}/{namespace}?ttl=1h"

    def some_path(self, random: np.random.Generator) -> range:
        start = int(random.integers(1, 200))
        return range(start, start + int(random.integers(1, 24)))

    def test_replay_equals_a_replay_with_a_tier_for_all_blocks(self, server: Server, trace: Trace) -> None:
        url = self.url(server.port, "replay")
        first = replay(trace, url)
        self.check_replay(first, trace)
        assert replay(trace, url).prefix_hit_ratio > first.prefix_hit_ratio, "the server has the blocks"

    @pytest.mark.slow
    def test_command(self, server: Server, tmp_path: Path) -> None:
        self.check_command(server, tmp_path)

    def test_events_of_ram_and_of_own_writes_to_the_server(
        self, server: Server, make: Callable[..., Machine]
    ) -> None:
        first = make(server.port)
        first.serve(1, 2)
        first.rest()
        second = Machine(first.described, enable_events=True)
        second.serve(1, 2, 3, 4)
        second.rest()
        events = second.manager.take_events()
        stored = {key for keys, are_gone in changes(events, "CPU") for key in keys if not are_gone}
        assert stored == {*some_keys(1, 2, 3, 4)}
        assert changes(events, "valkey") == [(some_keys(3, 4), False)], "another machine has written 1 and 2"
        second.manager.reset()
        assert second.manager.settle(PATIENCE_S)
        events = second.manager.take_events()
        assert changes(events, "valkey") == [(some_keys(3, 4), True)]
        assert second.manager.take_events() == []
        second.manager.close(PATIENCE_S)

    def test_replay_reports_a_silent_server_as_an_outage(
        self, server: Server, trace: Trace, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The replay gives up the server long before the deadline of a write, 150 s."""
        tiers = ImpatientOptions(url=f"valkey://127.0.0.1:{server.port}/replay")
        report = replay(trace, tiers, during=server.stopped())
        (tier,) = report.tiers[1:]
        assert report.mismatches_served == 0
        assert (tier.hit_blocks, tier.outages) == (0, 1)
        assert tier.unanswered_blocks > 0
        assert tier.outage_s > ImpatientOptions.silence_s
        assert [tier["outages"] for tier in json.loads(report.to_json())["tiers"]] == [0, 1]
        messages = [record.getMessage() for record in caplog.records]
        assert len([message for message in messages if "is silent" in message]) == 1, messages
        assert "valkey was unavailable" in table_of(report)


class ImpatientOptions(ValkeyOptions):
    silence_s = 0.5


def changes(events: Sequence[Any], medium: str) -> list[tuple[list[bytes], bool]]:
    """Return the keys of the events of a medium, and True for removals."""
    return [([*event.keys], event.removed) for event in events if event.medium == medium]


def table_of(report: ReplayReport) -> str:
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(terminal_table(work(report)))
    return console.export_text()
