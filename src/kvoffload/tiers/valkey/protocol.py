"""Commands of RESP2 that perform exchanges: handshake, probe, read, write.

Owns the commands, and the conditions under which a block counts as read, written or present. Every exchange
about blocks first reads the epoch. If another machine has reset the cache, no block of the exchange counts.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvoffload.tiers.contract import Mask, TierStats
from kvoffload.tiers.shared.exchanges import BlockExchange, Handshake, PersistenceQuestion, Probe, Read, Write
from kvoffload.tiers.shared.identity import (
    HEADER,
    HEADER_BYTES,
    EpochKeys,
    SingleKeyspace,
    about_name,
    epoch_name,
    epoch_number,
    head_bytes,
    rest_names,
)
from kvoffload.tiers.shared.remote_errors import FULL, CacheResetError, ProtocolError, ServerError
from kvoffload.tiers.shared.remote_tier import RemoteTier
from kvoffload.tiers.shared.server import RemoteOptions, Server
from kvoffload.tiers.valkey.persistence import ask_persistence
from kvoffload.tiers.valkey.resp import MOST_AT_ONCE, Block, Connection, command

WINDOW_BYTES = 4 << 20
"""Default of `Resp.window_bytes`. The blocks of a window are verified while they are in the CPU's cache."""
_READ_ONLY = {FULL, "MISCONF"}
"""Error codes of servers that refuse writes, but serve blocks. A server replies `MISCONF` if it cannot save
to its disk.

`READONLY` is not in the set, because it comes from a replica, which may have missed the last reset."""
_ABOUT_S = b"2592000"
"""Time to live of the text about a producer, 30 days in seconds. Each handshake stores the text again."""


def valkey_tier(
    name: str,
    place: str,
    connect: Callable[[float], Connection],
    options: RemoteOptions,
    **arguments: Any,
) -> RemoteTier:
    """Create a tier in one server that speaks RESP2. `arguments` are passed to `RemoteTier`."""
    epoch_key = epoch_name(options.namespace, options.producer)
    keyspace = SingleKeyspace(options.namespace, options.producer, (epoch_key,))
    return RemoteTier(name, Server(place, connect, Resp(), keyspace), options, **arguments)


@dataclass(eq=False)
class Resp:
    """Client side of RESP2, the protocol of Redis and Valkey servers. Implements `Dialect`.

    Attributes:
        window_bytes: largest size of a window's blocks, in bytes. A window is the blocks whose commands are
            sent as one pipeline. A write reads all replies to a window before it sends the next window. A
            read requests the next window before it receives the present one.
        most_at_once: largest number of blocks that the client receives together.
    """

    window_bytes: int = WINDOW_BYTES
    most_at_once: int = MOST_AT_ONCE
    reports_persistence: bool = True

    def add_costs(self, stats: TierStats) -> None:
        """Do nothing, because requests to a server cost no money."""

    def persistence(self, connection: Connection, exchange: PersistenceQuestion) -> None:
        ask_persistence(connection, exchange)

    # ---- handshake

    def handshake(self, connection: Connection, exchange: Handshake) -> None:
        # If several machines find no epoch, the first creates it, and all read it. Of two concurrent resets
        # the later counts.
        first, deadline = exchange.epoch_keys[0], exchange.deadline
        options = () if exchange.is_reset else (b"NX",)
        commands = [command(b"SET", key, b"%016x" % secrets.randbits(64), *options) + command(b"GET", key)
                    for key in exchange.epoch_keys]  # fmt: skip
        if exchange.about:
            commands.append(command(b"SET", about_name(first), exchange.about, b"EX", _ABOUT_S))
        connection.send([b"".join(commands), _rights_commands(first)], deadline)
        epochs = [_read_epoch(connection, exchange) for _ in exchange.epoch_keys]
        if exchange.about:
            connection.reply(deadline)  # an error is ignored: only `inspect` reads the text
        _check_rights(connection, deadline)
        elsewhere = [epoch for epoch in epochs if isinstance(epoch, ServerError)]
        if len(elsewhere) == len(epochs):
            raise elsewhere[0]
        if exchange.is_reset and exchange.num_replicas:
            _wait_for_replicas(connection, exchange)
        exchange.numbers = tuple(None if isinstance(epoch, ServerError) else epoch for epoch in epochs)

    # ---- blocks

    def probe(self, connection: Connection, exchange: Probe) -> None:
        exchange.ok = self._present(connection, exchange, exchange.epoch.names(exchange.keys))

    def read(self, connection: Connection, exchange: Read) -> None:
        names, reading = exchange.epoch.names(exchange.keys), _Reading(connection, exchange)
        try:
            windows = [*self._windows(exchange, len(names))]
            for number, window in enumerate(windows):
                if number == 0:
                    self._request(connection, exchange, names, window)
                if number + 1 < len(windows):
                    # Requested before this window is received, so that the server never waits.
                    self._request(connection, exchange, names, windows[number + 1])
                keys = exchange.epoch.epoch_keys(exchange.keys[window])
                exchange.current[window] = _check_epoch(connection, exchange, keys)
                reading.receive(window, self.most_at_once)
        finally:
            reading.verify()
        _delete_damaged(connection, exchange, names)
        # The blocks may be sound if the replies belonged to other requests.
        exchange.closes_connection = bool(exchange.damaged.any())

    def write(self, connection: Connection, exchange: Write) -> None:
        names = exchange.epoch.names(exchange.keys)
        exchange.was_there = self._present(connection, exchange, names)
        exchange.ok |= exchange.was_there
        missing = np.flatnonzero(exchange.current & ~exchange.was_there)
        for window in self._windows(exchange, len(missing)):
            _store(connection, exchange, names, missing[window])
            if exchange.refused is not None and not exchange.refused.is_elsewhere:
                return

    def _windows(self, exchange: BlockExchange, count: int) -> Iterator[slice]:
        size = max(1, self.window_bytes // max(1, exchange.block_bytes))
        return (slice(start, min(start + size, count)) for start in range(0, count, size))

    def _present(self, connection: Connection, exchange: BlockExchange, names: list[bytes]) -> Mask:
        """Check the epoch, and return a mask of the blocks that the server has."""
        keys, values = exchange.epoch.epoch_keys(exchange.keys), _values(exchange, names)
        commands = _commands(b"GET", keys.names) + _commands(b"EXISTS", *values)
        connection.send([b"".join(commands)], exchange.deadline)
        exchange.current = _check_epoch(connection, exchange, keys)
        present = np.zeros(len(names), np.bool_)
        all_values = b":%d" % len(values)
        for row, line in enumerate(connection.lines(len(names), exchange.deadline)):
            if line == all_values:
                present[row] = True
            elif line[:1] == b"-":
                exchange.refused = connection.error(line)
            elif line not in (b":0", b":1"):
                raise _unexpected(line)
        return present & exchange.current

    def _request(self, connection: Connection, exchange: Read, names: list[bytes], window: slice) -> None:
        """Send the commands that read the epoch and the blocks of a window."""
        keys = exchange.epoch.epoch_keys(exchange.keys[window])
        # All values of a block, then the values of the next block, as they are received.
        gets = [_commands(b"GET", value_names) for value_names in _values(exchange, names[window])]
        block_gets = [get for block in zip(*gets, strict=True) for get in block]
        connection.send([b"".join(_commands(b"GET", keys.names) + block_gets)], exchange.deadline)


class _Reading:
    """Receives and verifies the blocks of a read over one connection."""

    def __init__(self, connection: Connection, read: Read) -> None:
        self._connection, self._read = connection, read
        self._headers = np.zeros(len(read.keys), HEADER)
        self._header_bytes = memoryview(self._headers.view(np.uint8))  # type: ignore[arg-type]
        self._arrived: list[int] = []

    def receive(self, window: slice, most_at_once: int) -> None:
        """Receive and verify the blocks of a window, several at a time.

        If a block is absent or has another length, it is received alone. Because more such blocks may follow,
        only one block is received next; then the number of blocks doubles each time, up to `most_at_once`.
        """
        read, row, at_once = self._read, window.start, most_at_once
        while row < window.stop:
            blocks = [self._parts(at) for at in range(row, min(row + at_once, window.stop))]
            count = self._connection.blocks_into(blocks, read.deadline)
            self._arrived += (row + np.flatnonzero(read.current[row : row + count])).tolist()
            row, at_once = row + count, min(2 * at_once, most_at_once)
            if count < len(blocks):
                self._receive_one(row)
                row, at_once = row + 1, 1
        self.verify()

    def verify(self) -> None:
        """Verify the headers and checksums of the blocks that have arrived since the last call."""
        at, read = np.array(self._arrived, np.int64), self._read
        self._arrived.clear()
        if len(at):
            keys, headers = read.keys.take(at), self._headers[at]
            read.ok[at] = read.epoch.sound(keys, headers, read.addresses(at), read.block_bytes)
            read.damaged[at] = ~read.ok[at]

    def _parts(self, row: int) -> Block:
        """Return the memory into which the values of a block are received."""
        at, head, block = HEADER_BYTES * row, head_bytes(self._read.block_bytes), self._read.row(row)
        first = [self._header_bytes[at : at + HEADER_BYTES], block[:head]]
        return [first] if head == self._read.block_bytes else [first, [block[head:]]]

    def _receive_one(self, row: int) -> None:
        values, read = self._parts(row), self._read
        most = 2 * (HEADER_BYTES + read.block_bytes)  # a longer value violates the protocol
        replies = [self._connection.value_into(value, most, read.deadline) for value in values]
        errors = [reply for reply in replies if isinstance(reply, ServerError)]
        if errors:
            read.refused = errors[0]
        elif not read.current[row]:
            pass
        elif None in replies:
            read.absent[row] = True
        elif replies != [sum(map(len, value)) for value in values]:
            read.damaged[row] = True
        else:
            self._arrived.append(row)


def _values(exchange: BlockExchange, names: list[bytes]) -> list[list[bytes]]:
    """Return the names of the blocks' first values and, if blocks have second values, the names of these."""
    is_whole = head_bytes(exchange.block_bytes) == exchange.block_bytes
    return [names] if is_whole else [names, rest_names(names)]


def _check_epoch(connection: Connection, exchange: BlockExchange, keys: EpochKeys) -> Mask:
    """Receive the epoch numbers; returns a mask of the blocks whose epoch is as expected.

    Raises: `CacheResetError` if an epoch has changed; `ServerError` for an error reply, unless the reply
        means that another node has the hash slot.
    """
    confirmed, was_reset = np.zeros(len(keys.names), np.bool_), False
    replies = connection.short_replies(len(keys.names), exchange.deadline)
    for row, (reply, expected) in enumerate(zip(replies, keys.numbers, strict=True)):
        if isinstance(reply, ServerError):
            exchange.refused = reply
            if not reply.is_elsewhere:
                raise reply
        elif expected is not None:
            confirmed[row] = epoch_number(reply) == expected
            was_reset |= not confirmed[row]
    if was_reset:
        raise CacheResetError
    of_blocks: Mask = confirmed[keys.row_of]
    return of_blocks


def _delete_damaged(connection: Connection, read: Read, names: list[bytes]) -> None:
    damaged = np.flatnonzero(read.damaged).tolist()
    if damaged:
        values = _values(read, [names[row] for row in damaged])
        connection.send([b"".join(_commands(b"DEL", *values))], read.deadline)
        for line in connection.lines(len(damaged), read.deadline):
            if line[:1] not in (b":", b"-"):
                raise _unexpected(line)


def _store(connection: Connection, write: Write, names: list[bytes], at: npt.NDArray[np.int64]) -> None:
    """Send the blocks with the indices `at`, then read all replies."""
    per_block = 1 if head_bytes(write.block_bytes) == write.block_bytes else 2
    connection.send(_set_commands(write, names, at), write.deadline)
    lines = connection.lines(per_block * len(at), write.deadline, len(b"+OK\r\n"))
    if lines.count(b"+OK") == len(lines):
        write.ok[at] = True
        return
    for line in lines:
        if line[:1] == b"-":
            write.refused = connection.error(line)
        elif line != b"+OK":
            raise _unexpected(line)
    stored = [b"+OK"] * per_block
    write.ok[at] = [lines[n : n + per_block] == stored for n in range(0, len(lines), per_block)]


def _set_commands(write: Write, names: list[bytes], at: npt.NDArray[np.int64]) -> list[bytes | memoryview]:
    """Return the SET commands of the blocks `at` as buffers, which alternate between framing and values."""
    headers = write.epoch.headers(write.keys.take(at), write.addresses(at), write.block_bytes).tobytes()
    options = [b"EX", b"%d" % write.ttl_s] if write.ttl_s else []
    end = b"\r\n" + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in options)
    begin = b"*%d\r\n$3\r\nSET\r\n" % (3 + len(options))
    head = head_bytes(write.block_bytes)
    # Equal for all blocks: the bytes before a name, and between the name and the value.
    before = b"%b%b$%d\r\n" % (end, begin, len(names[0]))
    between = b"\r\n$%d\r\n" % (HEADER_BYTES + head)
    before_rest = b"%b%b$%d\r\n" % (end, begin, len(names[0]) + 1)
    buffers: list[bytes | memoryview] = []
    for number, row in enumerate(at.tolist()):
        name, block = names[row], write.row(row)
        header = headers[number * HEADER_BYTES : (number + 1) * HEADER_BYTES]
        if head == write.block_bytes:
            buffers += (b"%b%b%b%b" % (before, name, between, header), block)
        else:
            (second,) = rest_names([name])
            between_rest = b"\r\n$%d\r\n" % (write.block_bytes - head)
            buffers += (b"%b%b%b%b" % (before, name, between, header), block[:head],
                        b"%b%b%b" % (before_rest, second, between_rest), block[head:])  # fmt: skip
    first = buffers[0]
    buffers[0] = first[len(end) :]
    buffers.append(end)
    return buffers


def _commands(verb: bytes, *names: list[bytes]) -> list[bytes]:
    """Encode several commands with the same verb.

    ``names[i][j]`` is argument `i` of command `j`. All names in one list must have equal lengths.
    """
    if not names[0]:
        return []
    begin = b"*%d\r\n$%d\r\n%b\r\n" % (1 + len(names), len(verb), verb)
    form = begin + b"".join([b"$%d\r\n%%b\r\n" % len(column[0]) for column in names])
    return [form % row for row in zip(*names, strict=True)]


def _read_epoch(connection: Connection, exchange: Handshake) -> int | ServerError:
    """Read the replies to SET and GET of an epoch key; returns the epoch.

    If another node of the cluster has the key, returns the error reply that says so. Raises any other error
    reply, and `ProtocolError` if the epoch is missing or invalid.
    """
    replies = [connection.reply(exchange.deadline) for _ in ("SET", "GET")]
    is_read_only = isinstance(replies[0], ServerError) and replies[0].code in _READ_ONLY
    if is_read_only and not exchange.is_reset and (number := epoch_number(replies[1])) is not None:
        return number
    for reply in replies:
        if isinstance(reply, ServerError):
            if not reply.is_elsewhere:
                raise reply
            return reply
    number = epoch_number(replies[1])
    if number is None:
        raise ProtocolError(
            "the epoch was evicted at once" if replies[1] is None else
            "the epoch in the server is not 16 hexadecimal digits; reset the cache to replace it"
        )  # fmt: skip
    return number


def _wait_for_replicas(connection: Connection, exchange: Handshake) -> None:
    """Wait until `exchange.num_replicas` replicas have acknowledged the reset. Uses the command ``WAIT``.

    Raises: `TimeoutError` if fewer replicas have acknowledged in time; `ServerError` if the server refuses.
    """
    patience_ms = max(1, int(1e3 * (exchange.deadline - time.monotonic()) / 2))
    connection.send([command(b"WAIT", b"%d" % exchange.num_replicas, b"%d" % patience_ms)], exchange.deadline)
    count = connection.reply(exchange.deadline)
    if isinstance(count, ServerError):
        raise count
    if not isinstance(count, int):
        raise ProtocolError("the reply to WAIT is not a number")
    if count < exchange.num_replicas:
        raise TimeoutError(f"{count} of {exchange.num_replicas} replicas have the reset")


def _rights_commands(epoch_key: bytes) -> bytes:
    """Return EXISTS and DEL commands on unused keys, which check the user's permissions.

    If a permission is missing, the handshake fails. Without this check, a missing permission for EXISTS would
    let every probe fail, and a missing permission for DEL would leave damaged blocks on the server.

    The keys of EXISTS are in two hash slots unless the epoch key has a tag. So a node of a cluster that is
    used as a single server replies CROSSSLOT, even if the node has the slot of the epoch key.
    """
    name, other = epoch_key + b":rights:1", epoch_key + b":rights:2"
    return command(b"EXISTS", name, other) + command(b"DEL", name)


def _check_rights(connection: Connection, deadline: float) -> None:
    """Read the replies to `_rights_commands`.

    Raises `ServerError` for an error reply, unless the reply means that another node has the hash slot.
    """
    for reply in [connection.reply(deadline) for _ in ("EXISTS", "DEL")]:
        if isinstance(reply, ServerError) and not reply.is_elsewhere:
            raise reply


def _unexpected(line: bytes) -> ProtocolError:
    return ProtocolError(f"an unexpected reply that begins with {line[:1]!r}")
