"""A thread with one connection. The thread performs exchanges one after the other. Knows no blocks."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Generic, Protocol, TypeAlias, TypeVar

from kvoffload.tiers.shared.exchanges import Exchange
from kvoffload.tiers.shared.remote_errors import QueuedTooLongError

CONNECT_S = 0.5


class Connection(Protocol):
    """A connection to a server, after login.

    Attributes:
        has_received: True if a byte has arrived since `ConnectionThread` last set this to False. If no byte
            of a reply has arrived, the thread may repeat the exchange on a new connection.
        is_in_step: True if every reply has been read and the server has not closed the connection.
    """

    has_received: bool

    @property
    def is_in_step(self) -> bool: ...
    def abort(self) -> None:
        """Make the exchange in progress fail. Thread: any."""

    def close(self) -> None: ...


C = TypeVar("C", bound=Connection)
Connect: TypeAlias = Callable[[float], C]
"""Function that connects to a server and logs in. Its argument is the deadline (of `time.monotonic`)."""


class ConnectionThread(Generic[C]):
    """Performs exchanges in order, and passes each exchange that has ended to `deliver`.

    An exchange ends by its deadline, even if the network fails. The connection is closed before a failed
    exchange is delivered, so that nothing writes to the exchange's rows afterwards. To drop an exchange from
    the queue, the tier claims it (`Exchange.claim`); the thread skips claimed exchanges.

    Args:
        name: name of the thread.
        perform: performs an exchange over a connection.
        deliver: called on the connection thread with each exchange that has ended.

    Thread: one thread calls `submit`, `reconnect` and `stop`; none of them waits.
    """

    def __init__(
        self,
        name: str,
        connect: Connect[C],
        perform: Callable[[C, Exchange], None],
        deliver: Callable[[Exchange], None],
    ) -> None:
        self._connect, self._perform, self._deliver = connect, perform, deliver
        self._queue: queue.SimpleQueue[Exchange | None] = queue.SimpleQueue()
        self._connection: C | None = None
        self._stopping = self._is_busy = self._must_reconnect = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread if it has not started. Raises `RuntimeError` if the system refuses the thread."""
        if self._thread.ident is None:
            self._thread.start()

    def submit(self, exchange: Exchange) -> None:
        """Queue an exchange; starts the thread if necessary. If the start fails, the exchange fails."""
        try:
            self.start()
        except RuntimeError as error:
            if exchange.claim():
                exchange.error, exchange.ended = error, time.monotonic()
                self._deliver(exchange)
            return
        self._queue.put(exchange)

    def reconnect(self) -> None:
        """Use a new connection from the next exchange on."""
        self._must_reconnect = True

    @property
    def load(self) -> int:
        """Approximate number of exchanges that are queued or in progress."""
        return self._queue.qsize() + self._is_busy

    def stop(self) -> None:
        """Abort the exchange in progress and end the thread."""
        self._stopping = True
        self._queue.put(None)
        connection = self._connection
        if connection is not None:
            connection.abort()

    def join(self, timeout_s: float) -> bool:
        """Wait for the end of the thread; return False on time-out."""
        if self._thread.ident is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # ---- on the thread

    def _run(self) -> None:
        while True:
            exchange = self._queue.get()
            if exchange is None:
                self._close()
                return
            if not exchange.claim():
                continue  # the tier has dropped it
            self._is_busy = True
            try:
                if time.monotonic() >= exchange.deadline:
                    raise QueuedTooLongError("deadline exceeded while queued")
                self._run_one(exchange)
            except Exception as error:
                # After any error, the next bytes on this connection may belong to an abandoned request.
                exchange.error = error
                self._close()
            if exchange.closes_connection:
                self._close()
            exchange.ended = time.monotonic()
            self._is_busy = False
            self._deliver(exchange)
            del exchange  # it may be the last reference to the rows of the pool

    def _run_one(self, exchange: Exchange) -> None:
        if self._must_reconnect:
            self._must_reconnect = False
            self._close()
        if self._connection is not None and not self._connection.is_in_step:
            self._close()  # the next bytes would belong to another request
        if self._connection is not None:
            self._connection.has_received = False
            try:
                self._perform(self._connection, exchange)
                return
            except ConnectionError:
                # Servers and proxies close idle connections. Only the next request notices it, so the
                # exchange is repeated once on a new connection.
                if self._connection.has_received:
                    raise
                self._close()
        if not self._stopping:
            self._connection = self._connect(min(exchange.deadline, time.monotonic() + CONNECT_S))
        if self._stopping or self._connection is None:  # name resolution may have taken long
            raise ConnectionAbortedError("the tier is closed")
        self._perform(self._connection, exchange)

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
