"""Interface of a protocol: it performs exchanges over its own type of connection."""

from __future__ import annotations

from typing import Protocol, TypeVar

from kvoffload.tiers.contract import TierStats
from kvoffload.tiers.shared.exchanges import (
    Exchange,
    Handshake,
    PersistenceQuestion,
    Probe,
    Read,
    Write,
)

C = TypeVar("C", contravariant=True)


class Dialect(Protocol[C]):
    """The client side of a server's protocol. Methods run on connection threads, except `add_costs`.

    Each method performs one exchange until its deadline and writes the results into it. Raises `OSError`,
    `ProtocolError`, `ServerError`, `CacheResetError`; then the connection is closed.

    Attributes:
        reports_persistence: the server can report its persistence.
    """

    reports_persistence: bool

    def handshake(self, connection: C, exchange: Handshake) -> None: ...
    def persistence(self, connection: C, exchange: PersistenceQuestion) -> None: ...
    def probe(self, connection: C, exchange: Probe) -> None: ...
    def read(self, connection: C, exchange: Read) -> None: ...
    def write(self, connection: C, exchange: Write) -> None: ...

    def add_costs(self, stats: TierStats) -> None:
        """Set the counters that only this protocol has. Thread: scheduler's."""


def perform(dialect: Dialect[C], connection: C, exchange: Exchange) -> None:
    """Perform an exchange with the method for its class."""
    match exchange:
        case Handshake():
            dialect.handshake(connection, exchange)
        case PersistenceQuestion():
            dialect.persistence(connection, exchange)
        case Probe():
            dialect.probe(connection, exchange)
        case Read():
            dialect.read(connection, exchange)
        case Write():
            dialect.write(connection, exchange)
        case _:
            raise AssertionError(type(exchange))
