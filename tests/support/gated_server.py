"""A server in this process for a `RemoteTier`: each type of operation answers, fails, or hangs at a gate.

Nothing takes time: a failure is a deadline that is said to be over. A soak run can set the modes from a seed.
"""

from __future__ import annotations

import random
import threading
from typing import Any

from kvoffload.tiers.shared.batches import Greeting, Measurement, Probe, Read, Speech, Write
from kvoffload.tiers.shared.tier import RemoteOptions, RemoteTier
from kvoffload.transfer import Blocks

ANSWERS, FAILS, HANGS = "answers", "fails", "hangs"
BLOCK_BYTES = 64


class GatedServer:
    """What it has, and how it behaves.

    Attributes:
        modes: by type of operation (``greeting``, ``probe``, ``read``, ``write``); answers by default.
        gate: what hangs goes on when it is set.
        asked: by type, how often.
    """

    def __init__(self) -> None:
        self.modes: dict[str, str] = {}
        self.gate = threading.Event()
        self.asked: dict[str, int] = {}
        self.epoch: int | None = None
        self.blocks: dict[bytes, bytes] = {}
        self.lock = threading.Lock()

    def connect(self, deadline: float) -> GatedConnection:
        return GatedConnection(self)

    def tier(self, clock: Any, lines: int = 1, **options: Any) -> RemoteTier:
        """A tier in front of it, open."""
        tier = GatedTier(
            "gated",
            "nowhere",
            self.connect,
            RemoteOptions(**({"namespace": "ns", "timeout_s": 60.0, "probe_timeout_s": 60.0} | options)),
            block_bytes=BLOCK_BYTES,
            fingerprint="model",
            clock=clock,
            speech=GATED,
            lines=lines,
        )
        tier.wait_until_open(60.0)
        return tier


class GatedTier(RemoteTier):
    asks_persistence = False


class GatedConnection:
    """A connection to it."""

    is_in_step = True

    def __init__(self, server: GatedServer) -> None:
        self.server, self.has_received, self._aborted = server, False, False

    def meet(self, kind: str) -> GatedServer:
        """Behave as the server does for this type of operation."""
        server = self.server
        with server.lock:
            server.asked[kind] = server.asked.get(kind, 0) + 1
        mode = server.modes.get(kind, ANSWERS)
        if mode == FAILS:
            raise TimeoutError("its time was up")
        while mode == HANGS and not server.gate.wait(0.001):
            if self._aborted:
                raise ConnectionAbortedError
        return server

    def abort(self) -> None:
        self._aborted = True

    def close(self) -> None:
        """Nothing to do."""


class _Greeting(Greeting):
    def run(self, connection: Any) -> None:
        server = connection.meet("greeting")
        if self.is_reset or server.epoch is None:
            server.epoch = random.getrandbits(63)
        self.number = server.epoch


class _Probe(Probe):
    def run(self, connection: Any) -> None:
        server = connection.meet("probe")
        self.current[:] = True
        self.ok[:] = [name in server.blocks for name in self.epoch.names(self.keys)]


class _Read(Read):
    def run(self, connection: Any) -> None:
        server = connection.meet("read")
        self.current[:] = True
        pool: Blocks = self.pool
        for row, name in enumerate(self.epoch.names(self.keys)):
            block = server.blocks.get(name)
            self.absent[row], self.ok[row] = block is None, block is not None
            if block is not None:
                memoryview(pool[self.rows[row]])[:] = block


class _Write(Write):
    def run(self, connection: Any) -> None:
        server = connection.meet("write")
        self.current[:] = True
        for row, name in enumerate(self.epoch.names(self.keys)):
            server.blocks[name] = self.pool[self.rows[row]].tobytes()
            self.ok[row] = True


GATED = Speech(_Greeting, Measurement, _Probe, _Read, _Write)
