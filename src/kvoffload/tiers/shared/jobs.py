"""Exchanges in flight, and the connection threads that perform them.

Owns the threads and the limit of bytes in flight. Does not evaluate results.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Set
from typing import Any

from kvoffload.tiers.shared.connection import ConnectionThread
from kvoffload.tiers.shared.exchanges import PROBE, READ, WRITE, BlockExchange, Exchange
from kvoffload.tiers.shared.remote_errors import NotSentError, QueuedTooLongError
from kvoffload.tiers.shared.server import RemoteOptions, Server

IN_FLIGHT_BYTES = 256 << 20
_EXPIRE_EVERY_S = 0.005


class Jobs:
    """The reads, writes and probes in flight, and their connection threads.

    Reads, writes and probes have separate threads. Each exchange goes to the thread of its type that has the
    fewest exchanges.

    Args:
        name: the tier's name, part of the threads' names.
        group_blocks: number of blocks that must be written together. This many blocks may always be in
            flight, whatever `in_flight_bytes` is.

    Attributes:
        in_flight: exchanges by job number.
        ended: exchanges that have ended and wait to be processed; connection threads append to it.
        in_flight_bytes: largest number of bytes of blocks in flight. Reads and writes each have this limit.

    Thread: the scheduler's.
    """

    def __init__(self, name: str, server: Server, options: RemoteOptions, group_blocks: int = 1) -> None:
        self._block_bytes, self._group_blocks = options.block_bytes, group_blocks
        self.in_flight: dict[int, BlockExchange] = {}
        self.in_flight_bytes = IN_FLIGHT_BYTES
        self.ended: deque[Exchange] = deque()  # `append` and `popleft` are atomic
        self._num_blocks = {READ: 0, WRITE: 0}
        self._last_job = 0
        self._expire_at = 0.0
        self._threads = {
            kind: [
                ConnectionThread(
                    f"kvoffload-{name}-{kind}", server.connect, server.perform, self.ended.append
                )
                for _ in range(options.num_threads)
            ]
            for kind in (PROBE, READ, WRITE)
        }

    def next_job(self) -> int:
        """Allocate the number of a new job."""
        self._last_job += 1
        return self._last_job

    def room(self, kind: str) -> int:
        """Return how many blocks may be submitted now in an operation of type `kind`, `READ` or `WRITE`."""
        most = max(self._group_blocks, self.in_flight_bytes // self._block_bytes)
        return max(0, most - self._num_blocks[kind])

    def submit(self, exchange: BlockExchange) -> int:
        """Register an exchange about blocks, and send it; return the number of its job."""
        self.in_flight[exchange.job] = exchange
        self._count(exchange, len(exchange.keys))
        self.send(exchange.kind, exchange)
        return exchange.job

    def send(self, kind: str, exchange: Exchange) -> None:
        """Send an exchange of any class over a connection for operations of type `kind`."""
        min(self._threads[kind], key=lambda thread: thread.load).submit(exchange)

    def take_ended(self) -> Iterator[Exchange]:
        """Yield the exchanges that have ended, after dropping queued exchanges past their deadlines."""
        if self.in_flight and (now := time.monotonic()) >= self._expire_at:
            self._expire_at = now + _EXPIRE_EVERY_S
            late = [exchange for exchange in self.in_flight.values() if now >= exchange.deadline]
            self._drop(late, QueuedTooLongError("deadline exceeded while queued"))
        while self.ended:
            exchange = self.ended.popleft()
            yield exchange

    def remove(self, exchange: BlockExchange) -> None:
        """Remove an exchange that has ended from `in_flight`."""
        del self.in_flight[exchange.job]
        self._count(exchange, -len(exchange.keys))

    def drop_queued(self, kinds: Set[str]) -> None:
        """Drop the queued exchanges of these types, with a `NotSentError`."""
        queued = [exchange for exchange in self.in_flight.values() if exchange.kind in kinds]
        self._drop(queued, NotSentError("not sent: the circuit breaker has opened"))

    def reconnect(self) -> None:
        """Perform later exchanges over new connections."""
        for thread in self._all_threads():
            thread.reconnect()

    def start(self) -> None:
        """Start all threads that have not started.

        Raises: `RuntimeError` if a thread cannot be started; `start` may then be called again.
        """
        for thread in self._all_threads():
            thread.start()

    def stop(self) -> None:
        """Abort the exchanges in progress and stop the threads, without waiting for their end."""
        for thread in self._all_threads():
            thread.stop()

    def join(self, until: float) -> None:
        """After `stop`, wait until all threads have ended, or until the time `until` (`time.monotonic`)."""
        for thread in self._all_threads():
            thread.join(max(0.0, until - time.monotonic()))

    def _count(self, exchange: BlockExchange, count: int) -> None:
        if exchange.kind in self._num_blocks:
            self._num_blocks[exchange.kind] += count

    def _drop(self, exchanges: list[BlockExchange], why: Exception) -> None:
        for exchange in exchanges:
            if exchange.claim():
                exchange.error, exchange.ended = why, time.monotonic()
                self.ended.append(exchange)

    def _all_threads(self) -> list[ConnectionThread[Any]]:
        return [thread for threads in self._threads.values() for thread in threads]
