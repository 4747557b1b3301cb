"""S3 requests that perform the exchanges of a shared tier: handshake, probe, read, write.

Owns the names and contents of objects (docs/formats.md), and the conditions under which a block counts as
read, written or present.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from kvoffload.tiers.contract import Mask, TierStats
from kvoffload.tiers.s3.bucket import MOST_AT_ONCE, Bucket, BucketError, Bytes, Found, Ledger, Span
from kvoffload.tiers.s3.http import Buffer
from kvoffload.tiers.shared.exchanges import BlockExchange, Handshake, PersistenceQuestion, Probe, Read, Write
from kvoffload.tiers.shared.groups import BlockGroups, ObjectPart
from kvoffload.tiers.shared.identity import (
    FORMAT,
    HEADER,
    HEADER_BYTES,
    Epoch,
    SingleEpoch,
    SingleKeyspace,
    epoch_number,
)
from kvoffload.tiers.shared.remote_errors import FULL, CacheResetError, ProtocolError, ServerError
from kvoffload.tiers.shared.remote_tier import RemoteTier
from kvoffload.tiers.shared.server import RemoteOptions, Server
from kvoffload.transfer.copies import address_of, copy_blocks

_NUM_THREADS = 4
_EPOCH_BYTES = 16
WINDOW_BYTES = 1 << 20
_FULL = {"507", "503", "429", "QuotaExceeded"}
"""Codes and statuses of a server that is full or overloaded."""

Request: TypeAlias = Coroutine[Any, Any, None]


def s3_tier(
    name: str,
    place: str,
    connect: Callable[[float], Bucket],
    options: RemoteOptions,
    *,
    ledger: Ledger,
    group_blocks: int = 1,
    **arguments: Any,
) -> RemoteTier:
    """Create a tier in a bucket.

    Args:
        ledger: counts the requests of all connections.
        group_blocks: number of blocks in an object, equal on all machines. If it is 1, callers need not call
            `extend_path`.
        arguments: other arguments of `RemoteTier`.
    """
    epoch_key = epoch_name(options.namespace, options.producer)
    keyspace = SingleKeyspace(options.namespace, options.producer, (epoch_key,))
    server = Server(place, connect, S3(ledger, group_blocks), keyspace)
    options = replace(options, num_threads=_NUM_THREADS)
    return RemoteTier(name, server, options, groups=BlockGroups(group_blocks), **arguments)


def epoch_name(namespace: str, producer: bytes) -> bytes:
    """Return the name of the object with the epoch. Lifecycle rules that expire blocks must not match it."""
    return f"{namespace}/{FORMAT}/epochs/{producer.hex()}".encode()


def about_name(epoch: str) -> str:
    """Return the name of the object with the producer's text. `epoch` is the name from `epoch_name`."""
    place, _, producer = epoch.rpartition("/epochs/")
    return f"{place}/abouts/{producer}"


def object_name(epoch: Epoch, name: str) -> str:
    """Return the name of an object with blocks."""
    assert isinstance(epoch, SingleEpoch)
    place = f"{epoch.namespace}/{FORMAT}/blocks/{epoch.producer.hex()}/{epoch.number:016x}"
    return f"{place}/{name[:2]}/{name}"


@dataclass(eq=False)
class S3:
    """Performs exchanges with a bucket. Implements `Dialect`.

    Attributes:
        ledger: counts the requests of all connections.
        group_blocks: number of blocks in an object.
        window_bytes: size of the pieces in which blocks are verified, or copied for sending.
        most_at_once: limit of concurrent requests of one client.
    """

    ledger: Ledger
    group_blocks: int = 1
    window_bytes: int = WINDOW_BYTES
    most_at_once: int = MOST_AT_ONCE
    reports_persistence: bool = False

    def add_costs(self, stats: TierStats) -> None:
        stats.puts, stats.gets, stats.cost = self.ledger.puts, self.ledger.gets, self.ledger.cost

    def persistence(self, connection: Bucket, exchange: PersistenceQuestion) -> None:
        """Send no request, because a bucket does not lose a reset that it has confirmed."""

    def handshake(self, connection: Bucket, exchange: Handshake) -> None:
        connection.run([_handshake(connection, exchange)], exchange.deadline)

    def probe(self, connection: Bucket, exchange: Probe) -> None:
        self._run(connection, exchange, [self._look(connection, exchange, group, exchange.ok)
                                         for group in exchange.objects])  # fmt: skip

    def read(self, connection: Bucket, exchange: Read) -> None:
        try:
            self._run(connection, exchange, [self._get(connection, exchange, group)
                                             for group in exchange.objects])  # fmt: skip
        finally:
            damaged = [group for group in exchange.objects if exchange.damaged[group.rows].any()]
            for group in damaged:
                exchange.deleted[group.rows] = True
        if damaged:
            names = [object_name(exchange.epoch, group.name) for group in damaged]
            connection.run(map(connection.delete, names), exchange.deadline, self.most_at_once)

    def write(self, connection: Bucket, exchange: Write) -> None:
        self._run(connection, exchange, [self._look(connection, exchange, group, exchange.was_there)
                                         for group in exchange.objects])  # fmt: skip
        exchange.ok |= exchange.was_there
        missing = [group for group in exchange.objects if not exchange.was_there[group.rows].any()]
        requests = [self._put(connection, exchange, group) for group in missing]
        connection.run(requests, exchange.deadline, self.most_at_once)

    def _object_bytes(self, exchange: BlockExchange) -> int:
        """Return the size of each object of the tier, in bytes. An object of another size is damaged."""
        return self.group_blocks * (HEADER_BYTES + exchange.block_bytes)

    def _run(self, bucket: Bucket, exchange: BlockExchange, requests: Iterable[Request]) -> None:
        """Perform requests, and read the epoch at the same time.

        If the epoch has changed or cannot be read, no result counts. Otherwise the results of successful
        requests count, even if other requests fail. Raises the first error after all requests have ended.
        """
        assert isinstance(exchange.epoch, SingleEpoch)
        name = epoch_name(exchange.epoch.namespace, exchange.epoch.producer).decode()
        epochs: list[int | None] = []

        async def read_epoch() -> None:
            _, value = await bucket.value(name, _EPOCH_BYTES)
            epochs.append(epoch_number(value))

        try:
            bucket.run([read_epoch(), *requests], exchange.deadline, self.most_at_once)
        finally:
            if epochs != [exchange.epoch.number]:
                exchange.ok[:] = False
                if epochs:
                    raise CacheResetError
        for group in exchange.objects:
            exchange.current[group.rows] = True

    async def _look(self, bucket: Bucket, exchange: BlockExchange, group: ObjectPart, present: Mask) -> None:
        # An object of another size is damaged, and counts as absent. A write replaces it; a read deletes it.
        size = await bucket.size(object_name(exchange.epoch, group.name))
        present[group.rows] = size == self._object_bytes(exchange)

    async def _get(self, bucket: Bucket, read: Read, group: ObjectPart) -> None:
        begin, end = int(group.at[0]), int(group.at[-1]) + 1
        stride = HEADER_BYTES + read.block_bytes
        span = Span(begin * stride, end * stride, self._object_bytes(read))
        receiver = _BlockReceiver(read, group, begin, end, self.window_bytes)
        outcome = await bucket.get(object_name(read.epoch, group.name), span, receiver)
        if outcome is Found.ABSENT:
            read.absent[group.rows] = True
        elif outcome is Found.OTHER_SIZE:
            read.damaged[group.rows] = True

    async def _put(self, bucket: Bucket, write: Write, group: ObjectPart) -> None:
        name, size = object_name(write.epoch, group.name), self._object_bytes(write)
        try:
            await bucket.put(name, size, lambda: _pieces(write, group, self.window_bytes))
        except BucketError as error:
            if not {error.code, error.status} & _FULL:
                raise
            write.refused = ServerError(f"{FULL} {error}")
        else:
            write.ok[group.rows] = True


class _BlockReceiver:
    """Receives blocks of an object. Verifies a few blocks at a time, while they are in the CPU's cache.

    Args:
        begin, end: range of the received blocks: positions in the object, `end` excluded.
        window_bytes: number of bytes to verify at a time.
    """

    def __init__(self, read: Read, group: ObjectPart, begin: int, end: int, window_bytes: int) -> None:
        self._read, self._part, self._at, self._end = read, group, begin, end
        self._stride = HEADER_BYTES + read.block_bytes
        self._most = min(max(1, window_bytes // self._stride), end - begin)
        self._window: Bytes | None = None
        self._memory = memoryview(b"")
        self._fill = 0

    def room(self) -> memoryview:
        if self._window is None:  # allocated only for an object that exists
            self._window = np.empty((self._most, self._stride), np.uint8)
            self._memory = memoryview(self._window.reshape(-1))  # type: ignore[arg-type]
        return self._memory[self._fill : self._stride * min(self._most, self._end - self._at)]

    def add(self, count: int) -> None:
        assert self._window is not None
        self._fill += count
        num_blocks = min(self._most, self._end - self._at)
        if self._fill == self._stride * num_blocks:
            self._take(self._at, self._window[:num_blocks])
            self._at, self._fill = self._at + num_blocks, 0

    def _take(self, begin: int, received: Bytes) -> None:
        """Verify received blocks, and copy the sound blocks into their rows of the pool.

        Args:
            begin: position of the first received block in the object.
            received: shape ``(n, bytes of header and block)``.

        Raises: `TimeoutError` after the deadline, before anything is copied: the read's job may have ended at
            the deadline, so that its rows may hold other blocks now.
        """
        read, group = self._read, self._part
        if time.monotonic() >= read.deadline:
            raise TimeoutError("deadline exceeded")
        first, last = np.searchsorted(group.at, [begin, begin + len(received)])
        rows, at = group.rows[first:last], group.at[first:last] - begin
        headers = np.ascontiguousarray(received[at, :HEADER_BYTES]).view(HEADER).reshape(-1)
        addresses = address_of(received) + at * self._stride + HEADER_BYTES
        sound = read.epoch.sound(read.keys.take(rows), headers, addresses, read.block_bytes)
        read.damaged[rows] = ~sound
        copy_blocks(received[:, HEADER_BYTES:], at[sound], read.pool, read.rows[rows[sound]])
        read.ok[rows[sound]] = True


def _pieces(write: Write, group: ObjectPart, window_bytes: int) -> Iterator[Buffer]:
    """Yield the body of an object: each block after its header, about `window_bytes` at a time.

    Small pieces stay in the CPU's cache. The pieces are copies, because an aborted PUT may still read its
    buffer after the rows were reused.
    """
    stride = HEADER_BYTES + write.block_bytes
    most = max(1, window_bytes // stride)
    for first in range(0, len(group.rows), most):
        rows = group.rows[first : first + most]
        data = np.empty((len(rows), stride), np.uint8)
        headers = write.epoch.headers(write.keys.take(rows), write.addresses(rows), write.block_bytes)
        data[:, :HEADER_BYTES] = headers.view(np.uint8).reshape(-1, HEADER_BYTES)
        copy_blocks(write.pool, write.rows[rows], data[:, HEADER_BYTES:], np.arange(len(data)))
        yield memoryview(data.reshape(-1))  # type: ignore[arg-type]


async def _handshake(bucket: Bucket, exchange: Handshake) -> None:
    name, new = exchange.epoch_keys[0].decode(), b"%016x" % secrets.randbits(64)
    about, before = exchange.about, b""
    if exchange.is_reset:
        _, before = await bucket.value(name, _EPOCH_BYTES)
        await bucket.put(name, len(new), lambda: [new])
    else:
        outcome, _ = await bucket.value(name, _EPOCH_BYTES)
        if outcome is Found.ABSENT:
            # If several machines find no epoch, the first creates it, and all read it.
            await bucket.put(name, len(new), lambda: [new], only_new=True)
            if about:
                with contextlib.suppress(BucketError):
                    await bucket.put(about_name(name), len(about), lambda: [about])
    outcome, value = await bucket.value(name, _EPOCH_BYTES)
    if before and value == before:  # the old epoch would make the blocks visible that the reset must forget
        raise ProtocolError("the server has acknowledged a new epoch, but still has the old epoch")
    if outcome is Found.ABSENT:
        raise ProtocolError("the server has no epoch, although it was just created")
    number = epoch_number(value)
    if number is None:
        raise ProtocolError(
            f"the epoch, object {name}, is damaged: it must be 16 hexadecimal digits; "
            "reset the cache, or delete the object"
        )
    exchange.numbers = (number,)
