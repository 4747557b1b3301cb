"""A network partition: a server in a network namespace, behind a pair of virtual links.

While the link is down, packets are lost and no connection is refused or reset. Bytes in flight arrive when
the link is up again. The tests need root and `ip`, and are skipped without.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import pytest

from support.network_namespaces import LATE, PROBE_S, TIMEOUT_S, ip, made, wait_until
from support.pauses import end_pauses
from support.sharing_client import CANARY, closed_at_the_end, some_keys
from support.valkey_client import Client
from support.valkey_server import PATIENCE_S, Server, running

BLOCK_BYTES = 64 << 10
RATE = "40mbit"
"""Bandwidth at which 60 blocks take 0.8 s."""
NUMBERS = [*range(1, 61)]


class Island:
    """A network namespace, and the link to the namespace.

    Attributes:
        host: the address in the namespace. inside: begin of a command line that runs in the namespace.
    """

    def __init__(self) -> None:
        number = os.getpid() % 16_000
        self.name, self._here, self._there = f"kvoffload-{number}", f"kvoa{number}", f"kvob{number}"
        third, fourth = divmod(4 * number, 256)
        here, self.host = f"10.{77 + third // 256}.{third % 256}.{fourth + 1}", ""
        self.host = here.rsplit(".", 1)[0] + f".{fourth + 2}"
        self.inside = ("ip", "netns", "exec", self.name)
        ip("netns", "add", self.name)
        try:
            ip("link", "add", self._here, "type", "veth", "peer", "name", self._there, "netns", self.name)
            ip("addr", "add", f"{here}/30", "dev", self._here)
            ip("link", "set", self._here, "up")
            ip("-n", self.name, "addr", "add", f"{self.host}/30", "dev", self._there)
            self.set_link("up")
        except BaseException:
            self.close()
            raise

    def set_link(self, state: str) -> None:
        """Set the link ``up`` or ``down``; while down, packets are lost in both directions."""
        ip("-n", self.name, "link", "set", self._there, state)

    def slow_down(self) -> None:
        """Limit the bandwidth, so that a test can cut the link during a job."""
        limit = ("root", "tbf", "rate", RATE, "burst", "64kb", "latency", "1s")
        for before, link in (((), self._here), (self.inside, self._there)):
            done = subprocess.run([*before, "tc", "qdisc", "add", "dev", link, *limit], capture_output=True)
            if done.returncode != 0:
                pytest.skip(f"tc cannot limit a link here: {done.stderr.decode()}")

    def close(self) -> None:
        subprocess.run(["ip", "netns", "del", self.name], capture_output=True)  # and its link with it


@pytest.fixture(scope="module")
def shared_island() -> Iterator[Island]:
    yield from made(Island)


@pytest.fixture(scope="module")
def server(shared_island: Island, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    place = {"host": shared_island.host, "inside": shared_island.inside}
    with running(tmp_path_factory.mktemp("valkey"), "--protected-mode", "no", **place) as server:
        shared_island.slow_down()
        yield server


@pytest.fixture
def island(shared_island: Island) -> Iterator[Island]:
    yield shared_island
    shared_island.set_link("up")


@pytest.fixture
def make(server: Server) -> Iterator[Callable[..., Client]]:
    yield from closed_at_the_end(partial(Client, server, block_bytes=BLOCK_BYTES))


def wait_until_breaker_opens(client: Client) -> None:
    """Read until the breaker opens; then everything is a miss at once."""
    while client.tier.is_open():
        assert client.read(1) == client.probe(1) == []
    assert client.tier.stats().circuit_open == 1
    assert client.presence(1, 2) == [False, False]


def wait_until_breaker_closes(client: Client, island: Island) -> None:
    """Check that a lost handshake changes nothing, and that a handshake over the link closes the breaker."""
    end_pauses(client.tier)
    client.presence(1)
    wait_until(lambda: bool(client.tier.jobs.ended))
    assert client.presence(1) == [False]
    assert client.tier.stats().circuit_open == 1
    island.set_link("up")
    until = time.monotonic() + PATIENCE_S
    while not client.tier.is_open():
        end_pauses(client.tier)
        assert time.monotonic() < until
        time.sleep(0.01)
    assert client.tier.stats().circuit_open == 0


@pytest.mark.slow
def test_partition_during_a_read(island: Island, make: Callable[..., Client]) -> None:
    writer, client = make(), make(timeout=TIMEOUT_S, probe_timeout=PROBE_S)
    writer.write(*NUMBERS)
    job = client.begin_read(*NUMBERS)
    wait_until(lambda: bool((client.pool[5] != CANARY).any()))
    island.set_link("down")
    result = client.wait(job)
    assert result.seconds < LATE * TIMEOUT_S
    served = client.check(result, *NUMBERS)
    assert served == NUMBERS[: len(served)], "blocks that arrived before the cut are served"
    assert 5 <= len(served) < 60
    begun = time.monotonic()
    assert client.probe(99) == []
    assert time.monotonic() - begun < LATE * PROBE_S
    wait_until_breaker_opens(client)
    # The rows may have been reused: bytes that arrive when the link is up again are written nowhere.
    client.pool[:] = CANARY
    wait_until_breaker_closes(client, island)
    assert writer.read(*NUMBERS) == NUMBERS, "the link is up"
    assert (client.pool == CANARY).all()
    client.use_long_deadlines()
    client.forget()
    assert client.read(*NUMBERS) == NUMBERS


def test_partition_during_a_write(island: Island, make: Callable[..., Client], server: Server) -> None:
    server.execute("FLUSHALL")
    client, other = make(timeout=0.3, probe_timeout=PROBE_S), make()
    for row, number in enumerate(NUMBERS):
        client.pool[row].view(np.uint16)[:] = number
    job, taken = client.tier.submit_write(some_keys(*NUMBERS), client.pool, np.arange(60))
    assert taken.all()
    time.sleep(0.1)
    island.set_link("down")
    result = client.wait(job)
    assert result.seconds < LATE * 5 * 0.3
    assert not result.ok.all()
    # The rows may have been reused. The sockets of the kernel have a copy of the written bytes.
    client.pool[:] = CANARY
    wait_until_breaker_opens(client)
    wait_until_breaker_closes(client, island)
    other.wait_until_open()
    there = other.probe(*NUMBERS)
    assert other.read(*there) == there, "every block has its own bytes"
    assert other.tier.stats().mismatches == 0
    assert (client.pool == CANARY).all()
    client.use_long_deadlines()
    client.forget()
    absent = [number for number in NUMBERS if number not in there][:5]
    assert client.write(*absent) == absent, "no block counts as in flight any more"
