"""A network that is cut in two: a server in a network namespace, reached over a pair of virtual links.

When its link is down packets vanish, and nobody says so: no connection is refused or reset, and what was on
its way comes when the link is back. Needs root and `ip`; elsewhere these tests are skipped.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from support.network_namespaces import LATE, PROBE_S, TIMEOUT_S, ip, made, wait_until
from support.sharing_client import CANARY, some_keys
from support.valkey_client import Client
from support.valkey_server import PATIENCE_S, Server, running

BLOCK_BYTES = 64 << 10
RATE = "40mbit"
"""60 blocks take 0.8 s: time to cut the link in the middle."""
NUMBERS = [*range(1, 61)]


class Island:
    """A network namespace of our own, and the only way to it.

    Attributes:
        host: the address there. inside: what a command begins with that is run there.
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
        """``up``, or ``down``: packets vanish, in both directions."""
        ip("-n", self.name, "link", "set", self._there, state)

    def slow_down(self) -> None:
        """So that there is a middle of things."""
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
    made: list[Client] = []

    def one(**options: Any) -> Client:
        made.append(Client(server, block_bytes=BLOCK_BYTES, **options))
        return made[-1]

    yield one
    for client in made:
        client.tier.close()


def opens(client: Client) -> None:
    """Nobody asks any more, and everything is a miss at once."""
    while client.tier.is_open():
        assert client.read(1) == client.probe(1) == []
    assert client.tier.stats().circuit_open == 1
    assert client.believes(1, 2) == [False, False]


def closes(client: Client, island: Island) -> None:
    """A greeting that is not answered changes nothing; one that is opens the tier again."""
    client.try_again_now()
    client.believes(1)
    wait_until(lambda: bool(client.tier.jobs.ended))
    assert client.believes(1) == [False]
    assert client.tier.stats().circuit_open == 1
    island.set_link("up")
    until = time.monotonic() + PATIENCE_S
    while not client.tier.is_open():
        client.try_again_now()
        assert time.monotonic() < until
        time.sleep(0.01)
    assert client.tier.stats().circuit_open == 0


@pytest.mark.slow
def test_a_partition_while_reading(island: Island, make: Callable[..., Client]) -> None:
    writer, client = make(), make(timeout=TIMEOUT_S, probe_timeout=PROBE_S)
    writer.write(*NUMBERS)
    job = client.begin_read(*NUMBERS)
    wait_until(lambda: bool((client.pool[5] != CANARY).any()))
    island.set_link("down")
    result = client.wait(job)
    assert result.seconds < LATE * TIMEOUT_S
    served = client.check(result, *NUMBERS)
    assert served == NUMBERS[: len(served)], "what arrived before counts"
    assert 5 <= len(served) < 60
    begun = time.monotonic()
    assert client.probe(99) == []
    assert time.monotonic() - begun < LATE * PROBE_S
    opens(client)
    # The rows are others' now: what was on its way, and comes when the link is back, is written nowhere.
    client.pool[:] = CANARY
    closes(client, island)
    assert writer.read(*NUMBERS) == NUMBERS, "the link is as it was"
    assert (client.pool == CANARY).all()
    client.tier.options = writer.tier.options
    client.tier.presence.clear()
    assert client.read(*NUMBERS) == NUMBERS


def test_a_partition_while_writing(island: Island, make: Callable[..., Client], server: Server) -> None:
    server.say("FLUSHALL")
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
    # The rows are others' now. What is in the sockets of the kernel is a copy of what they were.
    client.pool[:] = CANARY
    opens(client)
    closes(client, island)
    other.come_to_terms()
    there = other.probe(*NUMBERS)
    assert other.read(*there) == there, "each has its own bytes"
    assert other.tier.stats().mismatches == 0
    assert set(client.tier._writing) == set()
    assert (client.pool == CANARY).all()
