"""An in-process server for a `RemoteTier`: each type of operation is answered, fails, or hangs at a gate.

A failure is a deadline exceeded, without delay. A soak run can set the modes from a seed.
"""

from __future__ import annotations

import random
import threading
from typing import Any

from kvoffload.tiers.contract import TierStats
from kvoffload.tiers.producer_text import producer_of
from kvoffload.tiers.shared.exchanges import Handshake, PersistenceQuestion, Probe, Read, Write
from kvoffload.tiers.shared.groups import BlockGroups
from kvoffload.tiers.shared.identity import SingleKeyspace
from kvoffload.tiers.shared.remote_tier import RemoteTier
from kvoffload.tiers.shared.server import RemoteOptions, Server

ANSWERS, FAILS, HANGS = "answers", "fails", "hangs"
BLOCK_BYTES = 64


class GatedServer:
    """The contents of a server, and its behaviour.

    Attributes:
        modes: mode by type of operation (``handshake``, ``probe``, ``read``, ``write``); answers by default.
        gate: hanging operations continue when this event is set.
        num_operations: number of operations by type.
    """

    def __init__(self) -> None:
        self.modes: dict[str, str] = {}
        self.gate = threading.Event()
        self.num_operations: dict[str, int] = {}
        self.epoch: int | None = None
        self.blocks: dict[bytes, bytes] = {}
        self.lock = threading.Lock()

    def connect(self, deadline: float) -> GatedConnection:
        return GatedConnection(self)

    def tier(
        self,
        clock: Any,
        chance: Any = random.random,
        lines: int = 1,
        groups: BlockGroups | None = None,
        **options: Any,
    ) -> RemoteTier:
        """Return an open tier before the server."""
        usual = {
            "namespace": "ns", "fingerprint": "model", "block_bytes": BLOCK_BYTES,
            "timeout_s": 60.0, "probe_timeout_s": 60.0, "num_threads": lines,
        }  # fmt: skip
        keyspace = SingleKeyspace("ns", producer_of("model"), (b"epoch",))
        tier = RemoteTier(
            "gated",
            Server("nowhere", self.connect, GatedDialect(), keyspace),
            RemoteOptions(**(usual | options)),
            clock=clock,
            chance=chance,
            groups=groups,
        )
        tier.wait_until_open(60.0)
        return tier


class GatedConnection:
    """A connection to the server."""

    is_in_step = True

    def __init__(self, server: GatedServer) -> None:
        self.server, self.has_received, self._aborted = server, False, False

    def meet(self, kind: str) -> GatedServer:
        """Behave as the server does for this type of operation."""
        server = self.server
        with server.lock:
            server.num_operations[kind] = server.num_operations.get(kind, 0) + 1
        mode = server.modes.get(kind, ANSWERS)
        if mode == FAILS:
            raise TimeoutError("deadline exceeded")
        while mode == HANGS and not server.gate.wait(0.001):
            if self._aborted:
                raise ConnectionAbortedError
        return server

    def abort(self) -> None:
        self._aborted = True

    def close(self) -> None:
        """Do nothing."""


class GatedDialect:
    """Performs exchanges in memory. As `Dialect`."""

    reports_persistence = False

    def add_costs(self, stats: TierStats) -> None:
        """Add nothing."""

    def persistence(self, connection: GatedConnection, exchange: PersistenceQuestion) -> None:
        """Do nothing."""

    def handshake(self, connection: GatedConnection, exchange: Handshake) -> None:
        server = connection.meet("handshake")
        if exchange.is_reset or server.epoch is None:
            server.epoch = random.getrandbits(63)
        exchange.numbers = (server.epoch,)

    def probe(self, connection: GatedConnection, exchange: Probe) -> None:
        server = connection.meet("probe")
        exchange.current[:] = True
        exchange.ok[:] = [name in server.blocks for name in exchange.epoch.names(exchange.keys)]

    def read(self, connection: GatedConnection, exchange: Read) -> None:
        server = connection.meet("read")
        exchange.current[:] = True
        for row, name in enumerate(exchange.epoch.names(exchange.keys)):
            block = server.blocks.get(name)
            exchange.absent[row], exchange.ok[row] = block is None, block is not None
            if block is not None:
                exchange.row(row)[:] = block

    def write(self, connection: GatedConnection, exchange: Write) -> None:
        server = connection.meet("write")
        exchange.current[:] = True
        for row, name in enumerate(exchange.epoch.names(exchange.keys)):
            server.blocks[name] = bytes(exchange.row(row))
            exchange.ok[row] = True
