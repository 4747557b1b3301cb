"""A server that machines share: its place, its protocol, and the options for its use. Does no I/O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from kvoffload.tiers.contract import TierStats
from kvoffload.tiers.producer_text import producer_of
from kvoffload.tiers.shared.connection import Connect
from kvoffload.tiers.shared.exchanges import (
    Exchange,
    Handshake,
    PersistenceQuestion,
    Probe,
    Read,
    Write,
)
from kvoffload.tiers.shared.identity import Keyspace

C = TypeVar("C", contravariant=True)


@dataclass(frozen=True, kw_only=True)
class RemoteOptions:
    """Options of a remote tier.

    Attributes:
        namespace: prefix of the blocks' names. The server can restrict a user to a prefix.
        fingerprint: identifies the producer of the blocks; equal on all machines that share the blocks.
        block_bytes: bytes of a block.
        timeout_s: longest duration of a read.
        probe_timeout_s: longest duration of a probe, and longest time that a request waits for its probes.
        ttl_s: lifetime of a block on the server in seconds; 0 if the server decides.
        write_timeout_s: longest duration of a write; None means five times `timeout_s`.
        gives_up_at_once: True if the first exceeded deadline opens the circuit breaker. Replays set this,
            because their deadlines are long.
        num_threads: number of connections for each type of operation (reads, writes, probes).
    """

    namespace: str
    fingerprint: str
    block_bytes: int
    timeout_s: float = 2.0
    probe_timeout_s: float = 0.05
    ttl_s: int = 0
    write_timeout_s: float | None = None
    gives_up_at_once: bool = False
    num_threads: int = 1

    @property
    def producer(self) -> bytes:
        """Digest of `fingerprint`. The names of all blocks contain it."""
        return producer_of(self.fingerprint)


class Dialect(Protocol[C]):
    """The client side of a server's protocol.

    Each method except `add_costs` performs one exchange by the exchange's deadline, and writes the results
    into the exchange. Thread: a connection thread. Raises: `OSError`, `ProtocolError`, `ServerError`,
    `CacheResetError`; the caller then closes the connection.

    Attributes:
        reports_persistence: True if the server can report whether it saves its contents to a disk.
    """

    reports_persistence: bool

    def handshake(self, connection: C, exchange: Handshake) -> None: ...
    def persistence(self, connection: C, exchange: PersistenceQuestion) -> None: ...
    def probe(self, connection: C, exchange: Probe) -> None: ...
    def read(self, connection: C, exchange: Read) -> None: ...
    def write(self, connection: C, exchange: Write) -> None: ...

    def add_costs(self, stats: TierStats) -> None:
        """Set those counters of `stats` that only this protocol has. Thread: the scheduler's."""


@dataclass(frozen=True)
class Server:
    """A server or a node of a cluster.

    Attributes:
        place: address and namespace, for messages.
        connect: connects to the server, by a deadline.
        dialect: performs exchanges over connections.
        keyspace: the epoch keys that this tier uses on the server; it also determines the names of blocks.
    """

    place: str
    connect: Connect[Any]
    dialect: Dialect[Any]
    keyspace: Keyspace

    def perform(self, connection: Any, exchange: Exchange) -> None:
        """Call the dialect's method for the class of the exchange."""
        match exchange:
            case Handshake():
                self.dialect.handshake(connection, exchange)
            case PersistenceQuestion():
                self.dialect.persistence(connection, exchange)
            case Probe():
                self.dialect.probe(connection, exchange)
            case Read():
                self.dialect.read(connection, exchange)
            case Write():
                self.dialect.write(connection, exchange)
            case _:
                raise AssertionError(type(exchange))
