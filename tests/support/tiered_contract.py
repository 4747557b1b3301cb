"""Tests that managers with RAM, and replays, pass in front of a server and of a bucket.

A test file derives a class from `TieredContract`, with the options of its tier, and provides the fixtures
`server`, `own_server` (which a test may kill) and `trace`.
"""

from __future__ import annotations

import json
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from kvoffload.errors import ConfigError
from kvoffload.replay.config import ReplayConfig
from kvoffload.replay.data import DataPlane
from kvoffload.replay.replay import Replay
from kvoffload.replay.report import ReplayReport
from kvoffload.sweep.grid import Grid
from kvoffload.tiers.spec import TierOptions, TierOwner, parse_tiers
from kvoffload.traces.trace import Trace
from support.background_load import background_load
from support.fault_proxy import FaultProxy
from support.pauses import end_pauses
from support.run_cli import kvoffload
from support.sharing_rig import BLOCK_BYTES, HIT, MISS, RETRY, Machine, some_keys
from support.valkey_server import PATIENCE_S

REPLAY_SLOTS = 40


def replay(
    trace: Trace,
    tiers: str | TierOptions,
    data: bool = True,
    during: AbstractContextManager[None] | None = None,
) -> ReplayReport:
    """Replay a trace with RAM of 40 blocks and these tiers behind RAM.

    Args:
        data: False for a replay without bytes.
        during: a context in which the replay runs; its tiers have been opened before.
    """
    described = parse_tiers("tiers", tiers) if isinstance(tiers, str) else [tiers]
    plane = DataPlane(REPLAY_SLOTS, BLOCK_BYTES) if data else None
    try:
        prepared = Replay(trace, ReplayConfig(REPLAY_SLOTS, tiers=described), plane)
        with during or nullcontext():
            return prepared.run()
    finally:
        if plane is not None:
            plane.close()


class TieredContract:
    """Tests of machines that share a server.

    Attributes:
        kind: name of the tier in reports.
        timeouts: deadlines of a read and a probe while the server hangs and dies.
        network_faults: settings of `FaultProxy` for replays through a bad network.
    """

    kind: ClassVar[str]
    timeouts: ClassVar[tuple[float, float]]
    network_faults: ClassVar[list[dict[str, Any]]]

    @abstractmethod
    def described(self, port: int, **options: Any) -> TierOptions:
        """Return options of a tier before the server or proxy at a port."""

    @abstractmethod
    def url(self, port: int, namespace: str) -> str:
        """Return a tier as users write it."""

    def whole(self, num_blocks: int) -> int:
        """Return the number of a path's blocks that the server can have."""
        return num_blocks

    @pytest.fixture
    def make(self) -> Iterator[Callable[..., Machine]]:
        machines: list[Machine] = []

        def make(port: int, **options: Any) -> Machine:
            patient = {"timeout": PATIENCE_S, "probe_timeout": PATIENCE_S}
            machines.append(Machine(self.described(port, **(patient | options))))
            return machines[-1]

        yield make
        for machine in machines:
            machine.manager.close(PATIENCE_S)

    # ---- managers

    def test_first_request_hits_blocks_of_another_machine(
        self, server: Any, make: Callable[..., Machine]
    ) -> None:
        first, second, num_shared = make(server.port), make(server.port), self.whole(22)
        assert first.serve(*range(1, 23)) == 0
        first.rest()
        assert second.serve(*range(1, 28)) == num_shared
        assert second.manager.hit_blocks == [0, num_shared]
        second.rest()
        assert second.tier.stats().written == self.whole(27) - num_shared
        assert first.serve(*range(1, 23)) == 22
        assert first.manager.hit_blocks == [22, 0]

    def test_prefix_above_the_limit_in_flight_is_read_in_parts(
        self, server: Any, make: Callable[..., Machine]
    ) -> None:
        first, second, num_shared = make(server.port), make(server.port), self.whole(22)
        first.serve(*range(1, 23))
        first.rest()
        second.tier.jobs.in_flight_bytes = 3 * BLOCK_BYTES
        assert second.serve(*range(1, 23)) == num_shared
        assert second.manager.counts.lost == 0

    def test_lookup_key_by_key_asks_for_each_block_once(
        self, server: Any, make: Callable[..., Machine]
    ) -> None:
        """vLLM asks key by key."""
        first, second = make(server.port), make(server.port)
        first.serve(*range(1, 21))
        first.rest()
        keys = some_keys(*range(1, 25))
        ctx = second.manager.begin_request("r", keys)
        until = time.monotonic() + PATIENCE_S
        while RETRY in (results := [second.manager.lookup_key(key, ctx) for key in keys]):
            second.manager.poll()
            assert time.monotonic() < until
            time.sleep(0.0005)
        assert results == [HIT] * 20 + [MISS] * 4
        assert second.tier.stats().probes == 24

    def test_reset_of_one_machine_resets_the_server_for_all(
        self, server: Any, make: Callable[..., Machine]
    ) -> None:
        first, second = make(server.port), make(server.port)
        first.serve(*range(1, 21))
        first.rest()
        second.manager.reset(drop_in_flight=True)
        assert second.serve(*range(1, 21)) == 0
        assert first.serve(*range(1, 21)) == 20, "the RAM of the other machine is not reset"
        first.manager.reset(drop_in_flight=True)
        assert first.serve(*range(1, 21)) == 0

    @pytest.mark.slow
    def test_server_that_hangs_and_dies_under_load(
        self, own_server: Any, make: Callable[..., Machine]
    ) -> None:
        """Every request gets its own bytes, and afterwards the server is used again."""
        timeout, probe_timeout = self.timeouts
        machines = [make(own_server.port, timeout=timeout, probe_timeout=probe_timeout) for _ in range(2)]

        def serve(machine: Machine) -> Callable[[np.random.Generator], object]:
            return lambda random: machine.serve(*self.some_path(random))

        chance = np.random.default_rng(7)
        with background_load([serve(machine) for machine in machines]):
            for _ in range(3):
                with own_server.stopped():
                    time.sleep(float(chance.uniform(0.1, 0.5)))
                time.sleep(0.2)
                own_server.stop()
                time.sleep(0.2)
                own_server.start()
                time.sleep(0.5)
        until = time.monotonic() + PATIENCE_S
        for machine in machines:
            machine.rest()
            assert machine.tier.stats().mismatches == 0
            assert machine.manager.stats().writing == 0
            while not machine.tier.is_open("read"):
                end_pauses(machine.tier)
                assert time.monotonic() < until

    def some_path(self, random: np.random.Generator) -> range:
        """Return a path that the server can have."""
        return range(1, 4 + int(random.integers(1, 24)))

    # ---- replays

    def check_replay(self, shared: ReplayReport, trace: Trace) -> None:
        """Check that a replay equals a replay with a tier for all blocks."""
        planned = replay(trace, "1000000", data=False)
        assert shared.mismatches_served == 0
        assert shared.prefix_hit_ratio == planned.prefix_hit_ratio
        assert shared.tiers[1].name == self.kind
        assert shared.tiers[1].hit_blocks == planned.tiers[1].hit_blocks > 0

    @pytest.mark.slow
    def test_replay_through_a_bad_network_serves_nothing_wrong(self, server: Any, trace: Trace) -> None:
        for number, faults in enumerate(self.network_faults):
            with FaultProxy(server.port) as proxy:
                proxy.set(**faults)
                report = replay(trace, self.url(proxy.port, f"bad-network-{number}"))
                assert report.mismatches_served == 0

    def check_command(self, server: Any, directory: Path) -> dict[str, Any]:
        """Run the command ``replay`` with the tier; returns the report of the tier."""
        trace = directory / "small.jsonl"
        kvoffload("trace", "generate", "chat", "--sessions", "40", "--output", trace)
        size = ("--capacity", "60", "--block-bytes", "4KiB")
        arguments = ("replay", trace, *size, "--quiet", "--format", "json")
        done = kvoffload(*arguments, "--tier", self.url(server.port, "ns"))
        assert done.returncode == 0, done.stderr
        report = json.loads(done.stdout)
        ram, tier = report["tiers"]
        assert (ram["name"], tier["name"]) == ("ram", self.kind)
        assert tier["hit_blocks"] > 0
        assert report["optimum_hit_ratio"] == report["infinite_hit_ratio"], "the server has no known capacity"
        done = kvoffload(*arguments, "--tier", self.url_with_password())
        assert done.returncode != 0
        assert self.url_with_password().replace("me:hunter2", "***") in done.stderr
        assert "hunter2" not in done.stderr + done.stdout
        assert "Traceback" not in done.stderr
        tier_report: dict[str, Any] = tier
        return tier_report

    def url_with_password(self) -> str:
        url, _, _ = self.url(1, "n").partition("?")
        scheme, _, address = url.partition("://")
        return f"{scheme}://me:hunter2@{address}"

    def test_tier_without_data_is_refused(self) -> None:
        url = self.url(1, "n")
        with pytest.raises(ConfigError, match="use simulated:CAPACITY"):
            parse_tiers("t", url)[0].open(TierOwner(0, 8, "m"))
        with pytest.raises(ConfigError, match="a sweep replays without bytes; allowed: simulated:CAPACITY"):
            Grid(("lru",), tiers=(url,))
