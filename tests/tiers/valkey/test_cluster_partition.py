"""A cluster whose network is cut: three network namespaces at one bridge, in each a master and the replica of
another one; clients are outside. Needs root and `ip`, as `test_partition.py`.
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

from kvoffload.tiers.shared.errors import ServerError
from kvoffload.tiers.valkey.cluster_map import MapQuestion
from kvoffload.tiers.valkey.divisions import division_of
from kvoffload.tiers.valkey.resp import Connection, Login
from support.network_namespaces import LATE, ip, made, wait_until
from support.sharing_client import CANARY, some_keys
from support.valkey_client import Client
from support.valkey_server import PATIENCE_S, Cluster, Server, clustered

NUMBERS, NEW = [*range(1, 41)], [*range(101, 141)]
TIMEOUT_S, PROBE_S = 0.5, 0.2
PART_BY_PART = ("--cluster-require-full-coverage", "no", "--protected-mode", "no")


class Archipelago:
    """Three network namespaces, and the bridge between them and us.

    Attributes:
        outside: our address. hosts: the address in each. inside: what a command begins with that is run
            there.
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
        """Between these, None for us, packets vanish in both directions, and nobody says so."""
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
    """A replica is not where its master is."""
    places = [{"host": islands.hosts[row], "inside": islands.inside[row]} for row in (0, 1, 2, 1, 2, 0)]
    with clustered(tmp_path, *PART_BY_PART, places=places) as cluster:
        yield cluster


@pytest.fixture
def make(cluster: Cluster) -> Iterator[Callable[..., Client]]:
    made: list[Client] = []

    def one(**options: Any) -> Client:
        made.append(Client(cluster, **options))
        come_back(made[-1])
        return made[-1]

    yield one
    for client in made:
        client.tier.close()


def come_back(client: Client) -> None:
    """Until all nodes are found, and answer."""
    until = time.monotonic() + PATIENCE_S
    while not client.tier.is_whole():
        client.tier.end_pauses()
        client.believes(*NUMBERS)
        assert time.monotonic() < until
        time.sleep(0.01)


def blocks_of(client: Client, server: Server, numbers: list[int]) -> list[int]:
    homes = client.tier.homes[division_of(some_keys(*numbers))]
    place = f"{server.host}:{server.port}/"
    return [
        n for n, home in zip(numbers, homes, strict=True) if client.tier.nodes[home].place.startswith(place)
    ]


def read_in_time(client: Client) -> list[int]:
    """A read and a probe end by their deadlines; what is served is right; nothing is written afterwards."""
    result = client.wait(client.begin_read(*NUMBERS))
    assert result.seconds < LATE * TIMEOUT_S
    served = client.check(result, *NUMBERS)
    client.pool[:] = CANARY  # its rows are others' now
    begun = time.monotonic()
    client.probe(*NUMBERS)
    assert time.monotonic() - begun < LATE * PROBE_S
    assert (client.pool == CANARY).all()
    return served


def test_a_master_that_clients_do_not_reach(
    islands: Archipelago, cluster: Cluster, make: Callable[..., Client]
) -> None:
    """Its cluster reaches it: nobody takes over."""
    writer, client = make(), make(timeout=TIMEOUT_S, probe_timeout=PROBE_S)
    writer.write(*NUMBERS)
    lost = blocks_of(client, cluster.masters[0], NUMBERS)
    others = [number for number in NUMBERS if number not in lost]
    assert lost
    assert read_in_time(client) == NUMBERS
    with islands.cut((0, None)):
        while client.tier.stats().circuit_open == 0:
            assert read_in_time(client) == others
        assert client.tier.stats().circuit_open == 1, "of the others nobody knows any ill"
        assert client.believes(*lost) == [False] * len(lost), "at once"
        assert read_in_time(client) == others
    come_back(client)
    assert writer.read(*NUMBERS) == NUMBERS
    assert (client.pool == CANARY).all(), "what comes late is written nowhere"
    client.probe(*NUMBERS)
    assert read_in_time(client) == NUMBERS


@pytest.mark.slow
def test_a_master_that_its_cluster_does_not_reach(
    islands: Archipelago, cluster: Cluster, make: Callable[..., Client]
) -> None:
    """Clients reach it, until its replica has taken over; what it is told meanwhile is lost, and a miss."""
    writer, client = make(), make(timeout=TIMEOUT_S, probe_timeout=PROBE_S)
    writer.write(*NUMBERS)
    first, second, *_ = cluster.masters
    port, lost = cluster.servers[3].port, blocks_of(client, first, NEW)
    assert lost
    with islands.cut((0, 1), (0, 2)):
        assert client.write(*lost) == lost, "it does not know yet"
        while port not in [one[2][1] for one in second.ask("CLUSTER", "SLOTS")]:
            assert {*read_in_time(client)} <= {*NUMBERS}
        cluster.wait(lambda: b"cluster_state:fail" in first.ask("CLUSTER", "INFO"))
        until = time.monotonic() + PATIENCE_S
        with (
            closing(Connection(first.host, first.port, Login(), until)) as connection,
            pytest.raises(ServerError, match="CLUSTERDOWN"),  # it does not know who has taken over
        ):
            MapQuestion(deadline=until).run(connection)
        come_back(client)
        wait_until(lambda: client.probe(*NUMBERS) == NUMBERS)
        assert read_in_time(client) == NUMBERS, "its replica has them"
        client.tier.clear()
        assert client.tier.drain(PATIENCE_S)
        come_back(client)
        assert read_in_time(client) == [], "not even from the old master"
    cluster.wait(lambda: b"role:slave" in first.ask("INFO", "replication"))
    for one in (client, make(), writer):
        come_back(one)
        assert one.read(*NUMBERS, *lost) == [], "what the old master had does not come back"
    until = time.monotonic() + PATIENCE_S
    while writer.read(*NUMBERS) != NUMBERS:  # its map is old until a master has said so
        come_back(writer)
        writer.write(*NUMBERS)
        assert time.monotonic() < until


@pytest.mark.slow
def test_a_cluster_that_nobody_reaches(islands: Archipelago, make: Callable[..., Client]) -> None:
    writer, client = make(), make(timeout=TIMEOUT_S, probe_timeout=PROBE_S)
    writer.write(*NUMBERS)
    with islands.cut((0, None), (1, None), (2, None)):
        while client.tier.stats().circuit_open < 3:
            assert read_in_time(client) == []
        assert client.believes(*NUMBERS) == [False] * len(NUMBERS)
        _, taken = client.tier.submit_write(some_keys(*NUMBERS), client.pool, np.arange(len(NUMBERS)))
        assert not taken.any()
    come_back(client)
    client.probe(*NUMBERS)
    assert (client.pool == CANARY).all()
    assert read_in_time(client) == NUMBERS
