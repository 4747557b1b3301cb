"""A machine that shares blocks in a server, or a cluster of them, for tests."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from kvoffload.tiers.contract import JobResult
from kvoffload.tiers.kinds.valkey import ValkeyOptions
from kvoffload.tiers.shared.identity import rest_names
from kvoffload.tiers.spec import TierOwner
from support.fault_proxy import FaultProxy
from support.sharing_client import CANARY, SharingClient, some_keys
from support.valkey_server import PATIENCE_S, Cluster, Server

BLOCK_BYTES = 24 * 1024


class Client(SharingClient):
    """A machine before a server, a cluster, or a proxy."""

    def __init__(
        self,
        place: Server | Cluster | FaultProxy,
        *,
        fingerprint: str = "model",
        namespace: str = "ns",
        block_bytes: int = BLOCK_BYTES,
        **options: Any,
    ) -> None:
        patient = {"timeout": PATIENCE_S, "probe_timeout": PATIENCE_S}
        address = f"valkey://127.0.0.1:{place.port}" if isinstance(place, FaultProxy) else place.url
        described = ValkeyOptions(url=f"{address}/{namespace}", **(patient | options))
        super().__init__(described.open(TierOwner(block_bytes, 36, fingerprint)), block_bytes)
        self._wait_for_the_question()

    def _wait_for_the_question(self) -> None:
        """Wait until the servers have said whether they save: tests count replies, and cut them."""
        until = time.monotonic() + PATIENCE_S
        nodes = [*getattr(self.tier, "nodes", {0: self.tier}).values()]
        while any(node.peer.persistence_question is not None for node in nodes):
            assert not self.tier.finished()
            assert time.monotonic() < until
            time.sleep(0.0005)

    def check(self, result: JobResult, *numbers: int) -> list[int]:
        good = [row for row in range(len(numbers)) if result.ok[row]]
        for row in good:
            assert (self.pool[row].view(np.uint16) == numbers[row]).all(), "a wrong block was served"
        assert (self.pool[len(numbers) :] == CANARY).all()
        return [numbers[row] for row in good]

    def name(self, number: int) -> bytes:
        epoch = self.tier.peer.epoch
        assert epoch is not None
        return epoch.names(some_keys(number))[0]

    def names(self, number: int) -> list[bytes]:
        """Of both values of a block."""
        return [self.name(number), *rest_names([self.name(number)])]

    def whole(self, server: Server, number: int) -> bytes:
        """Header and block, as they are there."""
        return b"".join(map(server.value, self.names(number)))

    def come_to_terms(self, is_open: bool = True) -> None:
        """Wait until the tier is open, or closed."""
        until = time.monotonic() + PATIENCE_S
        while self.tier.is_open("read") is not is_open:
            assert time.monotonic() < until
            time.sleep(0.001)

    def try_again_now(self) -> None:
        """End all pauses."""
        self.tier.end_pauses()

    def come_back(self) -> None:
        """Wait until the tier is open, without pauses."""
        until = time.monotonic() + PATIENCE_S
        while not self.tier.is_open("read"):
            self.try_again_now()
            assert time.monotonic() < until
            time.sleep(0.001)
