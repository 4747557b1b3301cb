"""A machine that shares blocks in a server, or in a cluster of servers, for tests."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from kvoffload.tiers.kinds.valkey import ValkeyOptions
from kvoffload.tiers.shared.identity import rest_names
from kvoffload.tiers.spec import TierOwner
from kvoffload.tiers.valkey.cluster import ClusterTier
from kvoffload.tiers.valkey.divisions import division_of
from support.fault_proxy import FaultProxy
from support.sharing_client import SharingClient, some_keys
from support.valkey_server import PATIENCE_S, Cluster, Server

BLOCK_BYTES = 24 * 1024


class Client(SharingClient):
    """A machine before a server, a cluster or a proxy, or before any server or cluster by URL.

    The deadlines are `PATIENCE_S` by default; `options` are fields of `ValkeyOptions`.
    """

    def __init__(
        self,
        server: Server | Cluster | FaultProxy | str,
        *,
        fingerprint: str = "model",
        namespace: str = "ns",
        block_bytes: int = BLOCK_BYTES,
        on_unavailable: Any = None,
        **options: Any,
    ) -> None:
        patient = {"timeout": PATIENCE_S, "probe_timeout": PATIENCE_S}
        if isinstance(server, FaultProxy):
            server = f"valkey://127.0.0.1:{server.port}"
        url = f"{server if isinstance(server, str) else server.url}/{namespace}"
        owner = TierOwner(block_bytes, 36, fingerprint, on_unavailable=on_unavailable)
        super().__init__(ValkeyOptions(url=url, **(patient | options)).open(owner), block_bytes)
        self.wait_for_persistence()

    def wait_for_persistence(self) -> None:
        """Wait for the replies about persistence, because tests count replies, and cut them."""
        until = time.monotonic() + PATIENCE_S
        while any(node.peer.persistence_question is not None for node in self.parts):
            assert not self.tier.finished()
            assert time.monotonic() < until
            time.sleep(0.0005)

    def use_long_deadlines(self) -> None:
        """Set the deadlines to `PATIENCE_S`, after a test has waited for short deadlines."""
        for tier in {self.tier, *self.parts}:
            tier.options = dataclasses.replace(
                tier.options, timeout_s=PATIENCE_S, probe_timeout_s=PATIENCE_S, write_timeout_s=PATIENCE_S
            )

    @property
    def parts(self) -> list[Any]:
        return [*self.tier.nodes.values()] if isinstance(self.tier, ClusterTier) else [self.tier]

    def is_well(self) -> bool:
        if isinstance(self.tier, ClusterTier):
            self.presence(1)  # lets the tier read the map
        are_open = super().is_well()
        return are_open and (not isinstance(self.tier, ClusterTier) or self.tier.is_whole())

    def part_of(self, number: int) -> Any:
        """Return the tier of the node that has a block according to this machine's map, or the only tier."""
        if not isinstance(self.tier, ClusterTier):
            return self.tier
        return self.tier.nodes[self.tier.homes[division_of(some_keys(number))[0]]]

    def numbers_on(self, server: Server, numbers: list[int]) -> list[int]:
        """Return the blocks that are on this server according to this machine's map."""
        place = f"{server.host}:{server.announced_port}/"
        return [number for number in numbers if self.part_of(number).place.startswith(place)]

    def name(self, number: int) -> bytes:
        epoch = self.part_of(number).peer.epoch
        assert epoch is not None
        name: bytes = epoch.names(some_keys(number))[0]
        return name

    def names(self, number: int) -> list[bytes]:
        return [self.name(number), *rest_names([self.name(number)])]

    def epoch_key(self, number: int) -> bytes:
        key: bytes = self.part_of(number).peer.epoch.epoch_keys(some_keys(number)).names[0]
        return key
