"""A cluster whose network is partitioned: three network namespaces at a bridge, with the clients outside.

Each namespace has a master, and the replica of another master. Needs root and `ip`, as `test_partition.py`.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvoffload.tiers.shared.remote_errors import ServerError
from kvoffload.tiers.valkey.cluster_map import MapQuestion
from kvoffload.tiers.valkey.resp import Connection, Login
from support.network_namespaces import LATE, ip, made, wait_until
from support.sharing_client import CANARY, closed_at_the_end, some_keys
from support.valkey_client import Client
from support.valkey_server import PART_BY_PART, PATIENCE_S, Cluster, clustered

NUMBERS, NEW = [*range(1, 41)], [*range(101, 141)]
TIMEOUT_S, PROBE_S = 2.0, 1.0
OPTIONS = (*PART_BY_PART, "--protected-mode", "no")


class Archipelago:
    """Three network namespaces, and a bridge to this machine.

    Attributes:
        outside: address of this machine. hosts: address in each namespace.
        inside: begin of a command line that runs in each namespace.
    """

    def __init__(self) -> None:
        number = os.getpid() % 12_800
        self._names = [f"kvoffload-{number}-{row}" for row in range(3)]
        self._bridge, net = f"kvor{number}", f"10.{200 + number // 256}.{number % 256}"
        self.outside, *self.hosts = [f"{net}.{row}" for row in range(1, 5)]
        self.inside = [("ip", "netns", "exec", name) for name in self._names]
        try:
            ip("link", "add", self._bridge, "type", "bridge")
            ip("addr", "add", f"{self.outside}/24", "dev", self._bridge)
            ip("link", "set", self._bridge, "up")
            for row, (name, host) in enumerate(zip(self._names, self.hosts, strict=True)):
                ip("netns", "add", name)
                ip("link", "add", f"kvo{number}-{row}", "type", "veth", "peer", "name", "up0", "netns", name)
                ip("link", "set", f"kvo{number}-{row}", "up", "master", self._bridge)
                ip("-n", name, "addr", "add", f"{host}/24", "dev", "up0")
                for link in ("up0", "lo"):
                    ip("-n", name, "link", "set", link, "up")
        except BaseException:
            self.close()
            raise

    @contextmanager
    def cut(self, *pairs: tuple[int, int | None]) -> Iterator[None]:
        """Lose all packets between pairs of namespaces, in both directions; None is this machine."""
        ways = [(row, self.hosts[to] if to is not None else self.outside) for row, to in pairs]
        ways += [(to, self.hosts[row]) for row, to in pairs if to is not None]
        for row, host in ways:
            ip("-n", self._names[row], "route", "add", "blackhole", host)
        try:
            yield
        finally:
            for row, host in ways:
                ip("-n", self._names[row], "route", "del", "blackhole", host)

    def close(self) -> None:
        for name in self._names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)  # and its link with it
        subprocess.run(["ip", "link", "del", self._bridge], capture_output=True)


@pytest.fixture(scope="module")
def islands() -> Iterator[Archipelago]:
    yield from made(Archipelago)


@pytest.fixture
def cluster(islands: Archipelago, tmp_path: Path) -> Iterator[Cluster]:
    """A cluster whose replicas are in other namespaces than their masters."""
    places = [{"host": islands.hosts[row], "inside": islands.inside[row]} for row in (0, 1, 2, 1, 2, 0)]
    with clustered(tmp_path, *OPTIONS, places=places) as cluster:
        yield cluster


@pytest.fixture
def make(cluster: Cluster) -> Iterator[Callable[..., Client]]:
    def client(**options: Any) -> Client:
        machine = Client(cluster, **options)
        machine.reconnect()
        return machine

    yield from closed_at_the_end(client)


def read_in_time(client: Client) -> list[int]:
    """Read and probe within the deadlines; returns the served blocks, after which no row is written."""
    result = client.wait(client.begin_read(*NUMBERS))
    assert result.seconds < LATE * TIMEOUT_S
    served = client.check(result, *NUMBERS)
    client.pool[:] = CANARY  # the rows may have been reused
    begun = time.monotonic()
    client.probe(*NUMBERS)
    assert time.monotonic() - begun < LATE * PROBE_S
    assert (client.pool == CANARY).all()
    return served


def test_clients_cannot_reach_a_master(
    islands: Archipelago, cluster: Cluster, make: Callable[..., Client]
) -> None:
    """The cluster reaches the master, so there is no failover."""
    writer, client = make(), make(timeout=TIMEOUT_S, probe_timeout=PROBE_S)
    writer.write(*NUMBERS)
    lost = client.numbers_on(cluster.masters[0], NUMBERS)
    kept = [number for number in NUMBERS if number not in lost]
    assert lost
    assert read_in_time(client) == NUMBERS
    with islands.cut((0, None)):
        while client.tier.stats().circuit_open == 0:
            assert read_in_time(client) == kept
        assert client.tier.stats().circuit_open == 1, "the breakers of the other nodes are closed"
        assert client.presence(*lost) == [False] * len(lost), "at once"
        assert read_in_time(client) == kept
    client.reconnect()
    assert writer.read(*NUMBERS) == NUMBERS
    assert (client.pool == CANARY).all(), "late bytes are written nowhere"
    client.probe(*NUMBERS)
    assert read_in_time(client) == NUMBERS


@pytest.mark.slow
def test_cluster_cannot_reach_a_master(
    islands: Archipelago, cluster: Cluster, make: Callable[..., Client]
) -> None:
    """Clients write to the master until its replica takes over. Those blocks are lost."""
    writer, client = make(), make(timeout=TIMEOUT_S, probe_timeout=PROBE_S)
    writer.write(*NUMBERS)
    first, second, *_ = cluster.masters
    port, lost = cluster.servers[3].port, client.numbers_on(first, NEW)
    assert lost
    with islands.cut((0, 1), (0, 2)):
        assert client.write(*lost) == lost, "the master does not know of the partition yet"
        while port not in [master[1] for _, _, master, *_ in second.ask("CLUSTER", "SLOTS")]:
            assert {*read_in_time(client)} <= {*NUMBERS}
        cluster.wait(lambda: b"cluster_state:fail" in first.ask("CLUSTER", "INFO"))
        until = time.monotonic() + PATIENCE_S
        with (
            closing(Connection(first.host, first.port, Login(), until)) as connection,
            pytest.raises(ServerError, match="CLUSTERDOWN"),  # the old master does not know of the failover
        ):
            MapQuestion(deadline=until).run(connection)
        client.reconnect()
        wait_until(lambda: client.probe(*NUMBERS) == NUMBERS)
        assert read_in_time(client) == NUMBERS, "the replica has the blocks"
        client.reset()
        client.reconnect()
        assert read_in_time(client) == [], "not even from the old master"
    cluster.wait(lambda: b"role:slave" in first.ask("INFO", "replication"))
    for machine in (client, make(), writer):
        machine.reconnect()
        assert machine.read(*NUMBERS, *lost) == [], "no block of the old master returns"
    until = time.monotonic() + PATIENCE_S
    while writer.read(*NUMBERS) != NUMBERS:  # the map is old until a master corrects it
        writer.reconnect()
        writer.write(*NUMBERS)
        assert time.monotonic() < until


@pytest.mark.slow
def test_clients_cannot_reach_the_cluster(islands: Archipelago, make: Callable[..., Client]) -> None:
    writer, client = make(), make(timeout=TIMEOUT_S, probe_timeout=PROBE_S)
    writer.write(*NUMBERS)
    with islands.cut((0, None), (1, None), (2, None)):
        while client.tier.stats().circuit_open < 3:
            assert read_in_time(client) == []
        assert client.presence(*NUMBERS) == [False] * len(NUMBERS)
        _, taken = client.tier.submit_write(some_keys(*NUMBERS), client.pool, np.arange(len(NUMBERS)))
        assert not taken.any()
    client.reconnect()
    client.probe(*NUMBERS)
    assert (client.pool == CANARY).all()
    assert read_in_time(client) == NUMBERS
