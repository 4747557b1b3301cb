"""Interface of a server's protocol."""

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
        """Set the counters of `stats` that only this protocol has. Thread: the scheduler's."""


def perform(dialect: Dialect[C], connection: C, exchange: Exchange) -> None:
    """Call the dialect's method for the class of the exchange."""
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
