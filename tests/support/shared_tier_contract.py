"""Tests that every shared tier passes, before one server and before a bucket.

A test file derives a class from `SharedTierContract` and provides the fixture `rig`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from kvoffload.tiers.contract import NO_JOB
from support.fault_proxy import FaultProxy
from support.sharing_client import CANARY, some_keys
from support.valkey_server import PATIENCE_S

BLOCKS = [*range(1, 9)]
"""Two whole groups of a bucket."""


@dataclass
class Rig:
    """Machines that share one server.

    Attributes:
        server: has `stopped()`.
        proxy: a proxy before the server.
        connect: makes a machine before the server.
        connect_through_proxy: makes a machine before the proxy.
    """

    server: Any
    proxy: FaultProxy
    connect: Callable[..., Any]
    connect_through_proxy: Callable[..., Any]


class SharedTierContract:
    """Tests of sharing, resets and faults of the network."""

    @pytest.mark.parametrize(
        "options", [{"fingerprint": "other weights"}, {"namespace": "tenant-b"}, {"identity": "x"}]
    )
    def test_foreign_blocks_are_not_served(self, rig: Rig, options: dict[str, str]) -> None:
        rig.connect().write(*BLOCKS)
        other = rig.connect(**options)
        assert other.probe(1) == []
        assert other.read(1) == []

    def test_several_machines_write_the_same_blocks_at_once(self, rig: Rig) -> None:
        clients = [rig.connect() for _ in range(3)]
        threads = [threading.Thread(target=client.write, args=BLOCKS) for client in clients]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for client in clients:
            assert client.read(*BLOCKS) == BLOCKS

    def test_admission_counts_a_request_once(self, rig: Rig) -> None:
        client = rig.connect(admission="reuse:2")
        first = client.record = client.record or client.tier.begin_request("first")
        assert client.write(*BLOCKS) == client.write(*BLOCKS) == []
        client.tier.finish_request(first, some_keys(*BLOCKS))
        assert client.tier.stats().refused == 2 * len(BLOCKS)
        client.record = client.tier.begin_request("second")
        assert client.write(*BLOCKS) == BLOCKS

    def test_a_closed_tier_is_empty_and_raises_nothing(self, rig: Rig) -> None:
        client = rig.connect()
        client.write(*BLOCKS[:4])
        with rig.server.stopped():
            job = client.begin_read(1)
            client.tier.close()
            client.tier.close()
        assert not client.wait(job).ok.any()
        assert client.believes(1) == [False]
        assert client.write(*BLOCKS[4:]) == client.read(1) == client.probe(1) == []
        assert (client.pool[1:] == CANARY).all()
        assert not [t for t in threading.enumerate() if t.name.startswith("kvoffload-") and not t.daemon]

    def test_no_read_after_a_confirmed_reset_returns_an_older_block(self, rig: Rig) -> None:
        client, other = rig.connect(), rig.connect()
        client.write(*BLOCKS)
        assert other.read(*BLOCKS) == BLOCKS
        with rig.server.stopped():
            client.tier.clear()
            assert client.believes(1) == [False], "closed until the server has confirmed the reset"
            assert client.read(*BLOCKS) == []
            assert not client.tier.drain(0.01)
        assert client.tier.drain(PATIENCE_S)
        assert client.believes(1) == [None]
        assert other.believes(1) == [True], "the other machine does not know of the reset"
        assert other.read(*BLOCKS) == []
        other.come_back()
        assert other.believes(1, 8) == [None, None]
        assert other.write(*BLOCKS[:4]) == BLOCKS[:4]
        assert client.probe(*BLOCKS) == BLOCKS[:4]

    @pytest.mark.parametrize("operation", ["probe", "write"])
    def test_the_first_operation_notices_a_reset(self, rig: Rig, operation: str) -> None:
        client, other = rig.connect(), rig.connect()
        other.write(*BLOCKS[:4])
        client.tier.clear()
        assert client.tier.drain(PATIENCE_S)
        assert getattr(other, operation)(*BLOCKS) == [], "no result of an exchange that began before counts"
        other.come_back()
        assert other.believes(1) == [None]
        assert client.probe(1) == []

    def test_a_slow_network_is_only_slow(self, rig: Rig) -> None:
        client = rig.connect_through_proxy()
        client.write(*BLOCKS[:4])
        rig.proxy.set(delay_s=0.01, bytes_per_s=2e6)
        assert client.read(*BLOCKS[:4]) == BLOCKS[:4]

    def test_a_connection_that_was_closed_while_idle_costs_nothing(self, rig: Rig) -> None:
        client = rig.connect_through_proxy()
        client.write(*BLOCKS[:4])
        for _ in range(3):
            rig.proxy.drop_connections()
            time.sleep(0.1)  # for the client to notice it
            assert client.read(1, 2) == [1, 2]
            assert client.probe(9) == []
            client.tier.presence.forget(some_keys(9).digests)
        assert client.tier.stats().failed == 0

    def test_a_dead_server_is_not_asked_and_is_found_again(self, rig: Rig) -> None:
        client = rig.connect_through_proxy()
        client.write(*BLOCKS[:4])
        rig.proxy.set(refuse=True)
        rig.proxy.drop_connections()
        for _ in range(3):
            assert client.read(1) == []
        until = time.monotonic() + PATIENCE_S
        while client.tier.is_open():
            assert time.monotonic() < until
        assert client.tier.stats().circuit_open == 1
        connections = rig.proxy.num_connections
        assert client.write(*BLOCKS[4:]) == client.read(1) == client.probe(1) == []
        assert client.tier.submit_probe(some_keys(1)) == NO_JOB
        assert client.believes(1, 9) == [False, False], "no request waits for it"
        assert client.tier.stats().dropped == 4
        assert rig.proxy.num_connections == connections
        rig.proxy.set()
        client.come_back()
        assert client.tier.stats().circuit_open == 0
        assert client.probe(1) == [1]
        assert client.read(1) == [1]
