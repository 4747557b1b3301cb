"""Parts of shared tiers, without a server: names, headers, presence cache, circuit breaker, connections."""

from __future__ import annotations

import queue
import select
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import example, given
from hypothesis import strategies as st

from kvoffload.structures.keys import Keys
from kvoffload.tiers.producer_text import producer_of
from kvoffload.tiers.shared.circuit import CircuitBreaker
from kvoffload.tiers.shared.connection import ConnectionThread
from kvoffload.tiers.shared.exchanges import Exchange
from kvoffload.tiers.shared.identity import (
    HEADER,
    HEADER_BYTES,
    SingleEpoch,
    epoch_name,
    head_bytes,
    is_rest,
    rest_names,
)
from kvoffload.tiers.shared.presence import PresenceCache
from kvoffload.tiers.shared.remote_errors import ProtocolError, ServerError
from kvoffload.tiers.valkey import resp
from kvoffload.tiers.valkey.divisions import DividedEpoch, divisions_between, epoch_names, slot_of, tags
from kvoffload.tiers.valkey.resp import Connection, Login, command
from kvoffload.transfer.copies import address_of
from support.fault_proxy import split_replies
from support.valkey_server import self_signed

BLOCK_BYTES = 512
EPOCH = SingleEpoch("ns", producer_of("model"), 7)


def some_keys(*numbers: int) -> Keys:
    return Keys.pack([number.to_bytes(36, "big") for number in numbers], 36)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


# ---- names and headers


def test_names_and_headers_agree_with_docs_formats() -> None:
    """Machines with other versions of this code find and verify the same blocks."""
    producer = "9372c470eeadd5ecd9c3c74c2b3cb633"
    assert EPOCH.producer.hex() == producer
    assert epoch_name("ns", EPOCH.producer) == f"kvo1:ns:{producer}:epoch".encode()
    assert EPOCH.names(some_keys(258)) == [f"kvo1:ns:{producer}:0000000000000007:{'00' * 34}0102".encode()]
    (rest_name,) = rest_names(EPOCH.names(some_keys(258)))
    assert rest_name == EPOCH.names(some_keys(258))[0] + b"+"
    assert is_rest(rest_name)
    block = np.arange(BLOCK_BYTES, dtype=np.uint8).reshape(1, -1)
    (header,) = EPOCH.headers(some_keys(258), np.array([address_of(block)]), BLOCK_BYTES)
    assert (HEADER_BYTES, len(header.tobytes())) == (64, 64)
    assert header.tobytes().hex() == (
        "4b564f424c4f434b" "01000000" "40000000" "0002000000000000" + producer + "0700000000000000"
        "03397dc5519ef54bf6192f66b3a4fe6b"
    )  # fmt: skip
    # The library gives the same checksum, with a seed from the key and the epoch.
    place = xxhash.xxh3_64_intdigest(b"kvo1\0ns\0" + EPOCH.producer, 7)
    seed = int(header["key"]) ^ place
    assert int(header["checksum"]) == xxhash.xxh3_64_intdigest(block.tobytes(), seed)


def test_names_in_a_cluster_agree_with_docs_formats() -> None:
    producer = "9372c470eeadd5ecd9c3c74c2b3cb633"
    assert (tags()[0], tags()[1], tags()[255]) == ("0083c", "00462", "02c13")
    keys = some_keys(258)  # its digest begins with 0x4b
    assert epoch_names("ns", EPOCH.producer, [0x4B]) == [f"kvo1:ns:{producer}:epoch:{{4054c}}".encode()]
    epoch = DividedEpoch("ns", EPOCH.producer, (1, 0x4B), (9, 7))
    (name,) = epoch.names(keys)
    assert name == f"kvo1:ns:{producer}:0000000000000007:{{4054c}}:{'00' * 34}0102".encode()
    block = np.arange(BLOCK_BYTES, dtype=np.uint8).reshape(1, -1)
    at = np.array([address_of(block)])
    assert epoch.headers(keys, at, BLOCK_BYTES) == EPOCH.headers(keys, at, BLOCK_BYTES), (
        "as with a single epoch"
    )
    assert epoch.sound(keys, epoch.headers(keys, at, BLOCK_BYTES), at, BLOCK_BYTES).all()


def jemalloc_class(num_bytes: int) -> int:
    """Return the smallest size class (4 + k) * 2^m with room."""
    return next(size for m in range(2, 60) for size in ((4 + k) << m for k in range(4)) if size >= num_bytes)


def test_blocks_are_split_where_that_saves_memory() -> None:
    """Other versions of this code have to split at the same place, which docs/formats.md documents."""
    documented = {
        512: 512,
        24 << 10: 64,
        64 << 10: 64,
        512 << 10: 64,
        2 << 20: 64,
        640 * 1024 - 128: 655232,
    }
    assert {size: head_bytes(size) for size in documented} == documented
    assert head_bytes(9 << 18) == (1 << 18) + 64, "36 layers: the second value has 2 MiB"


@given(st.integers(1, 64 << 20))
def test_no_block_takes_much_more_than_its_bytes(block_bytes: int) -> None:
    """The server adds 10 to 60 bytes to a value."""
    head = head_bytes(block_bytes)
    assert 0 < head <= block_bytes
    if block_bytes >= 16 << 10:
        for added in (10, 60):
            values = [HEADER_BYTES + head, block_bytes - head][: 1 if head == block_bytes else 2]
            assert sum(jemalloc_class(value + added) for value in values) <= 1.1 * block_bytes


def test_each_division_has_a_slot_of_its_own() -> None:
    assert [slot_of(b"x{%b}:y" % tag.encode()) for tag in tags()] == [*range(0, 16384, 64)]
    assert [*divisions_between(0, 0)] == [0]
    assert [*divisions_between(1, 63)] == []
    assert [*divisions_between(1, 128)] == [1, 2]
    bounds = [0, 1, 64, 5461, 5462, 10923, 16383, 16384]
    shared = [d for a, b in pairwise(bounds) for d in divisions_between(a, b - 1)]
    assert shared == [*range(256)], "every division is in one range, wherever the ranges end"


def test_epoch_keys_of_a_divided_epoch() -> None:
    """The epoch knows two divisions; 200 blocks are in many divisions."""
    keys = some_keys(*range(200))
    divisions = keys.digests >> np.uint64(56)
    epoch = DividedEpoch("ns", EPOCH.producer, (int(divisions[0]), int(divisions[1])), (5, None))
    epoch_keys = epoch.epoch_keys(keys)
    assert len(epoch_keys.names) == len({*divisions.tolist()}) == len(epoch_keys.numbers)
    for row, division in enumerate(divisions.tolist()):
        assert epoch_keys.names[epoch_keys.row_of[row]] == epoch_names("ns", EPOCH.producer, [division])[0]
        assert epoch_keys.numbers[epoch_keys.row_of[row]] == (5 if division == divisions[0] else None)


def sealed(epoch: SingleEpoch = EPOCH, key: int = 1, fill: int = 5) -> tuple[Any, Any]:
    block = np.full((1, BLOCK_BYTES), fill, np.uint8)
    return epoch.headers(some_keys(key), np.array([address_of(block)]), BLOCK_BYTES), block


def is_sound(
    headers: Any, block: Any, epoch: SingleEpoch = EPOCH, key: int = 1, block_bytes: int = BLOCK_BYTES
) -> bool:
    return bool(epoch.sound(some_keys(key), headers, np.array([address_of(block)]), block_bytes)[0])


def test_block_is_sound_only_under_its_own_name() -> None:
    headers, block = sealed()
    assert is_sound(headers, block)
    epochs = [
        SingleEpoch("sn", EPOCH.producer, 7),
        SingleEpoch("ns", producer_of("other"), 7),
        SingleEpoch("ns", EPOCH.producer, 8),
    ]
    for other in epochs:
        assert not is_sound(headers, block, other)
        # Nor with correct fields of the header, except for the checksum.
        forged, _ = sealed(other)
        forged["checksum"] = headers["checksum"]
        assert not is_sound(forged, block, other)
    assert not is_sound(headers, block, key=2)
    assert not is_sound(headers, block, block_bytes=BLOCK_BYTES - 8)


@given(st.integers(0, (HEADER_BYTES + BLOCK_BYTES) * 8 - 1))
def test_no_flipped_bit_is_sound(bit: int) -> None:
    headers, block = sealed()
    flipped = headers.view(np.uint8) if bit < HEADER_BYTES * 8 else block[0]
    flipped[bit // 8 - (0 if bit < HEADER_BYTES * 8 else HEADER_BYTES)] ^= 1 << bit % 8
    assert not is_sound(headers, block)


def test_zeros_are_not_sound() -> None:
    assert not is_sound(np.zeros(1, HEADER), np.zeros((1, BLOCK_BYTES), np.uint8))


# ---- presence cache


def test_presence_cache_entries_expire() -> None:
    clock = Clock()
    cache = PresenceCache(clock, 1 << 10)
    digests = some_keys(1, 2, 3).digests
    assert not cache.known(digests).any()
    cache.learn(digests[:2], np.array([True, False]))
    assert cache.present(digests).tolist() == [True, False, False]
    assert cache.known(digests).tolist() == [True, True, False]
    clock.now += 6.0
    assert cache.known(digests).tolist() == [True, False, False]
    cache.forget(digests[:1])
    assert not cache.known(digests).any()
    cache.learn(digests, np.ones(3, np.bool_))
    clock.now += 59.0
    assert cache.present(digests).all()
    clock.now += 2.0
    assert not cache.known(digests).any()
    cache.learn(digests, np.ones(3, np.bool_))
    cache.clear()
    assert not cache.known(digests).any()


@given(st.lists(st.tuples(st.integers(0, 40), st.booleans()), max_size=60))
def test_presence_cache_is_bounded_and_exact(learnt: list[tuple[int, bool]]) -> None:
    """Compares with a dictionary: known blocks have the state that was learnt last."""
    cache, oracle = PresenceCache(Clock(), 8), dict[int, bool]()
    for number, present in learnt:
        cache.learn(some_keys(number).digests, np.array([present]))
        oracle[number] = present
        known = {n for n in range(41) if cache.known(some_keys(n).digests)[0]}
        assert number in known
        assert len(known) <= 8
        assert known <= set(oracle)
        assert all(cache.present(some_keys(n).digests)[0] == oracle[n] for n in known)


@given(st.lists(st.one_of(st.integers(0, 40), st.none()), max_size=60))
def test_cleared_presence_cache_knows_nothing(learnt: list[int | None]) -> None:
    """Compares with a set, in a table whose entries share places; None clears the cache."""
    cache, oracle = PresenceCache(Clock(), 8), set[int]()
    for number in learnt:
        if number is None:
            cache.clear()
            oracle.clear()
        else:
            cache.learn(some_keys(number).digests, np.ones(1, np.bool_))
            oracle.add(number)
        assert {n for n in range(41) if cache.known(some_keys(n).digests)[0]} <= oracle


def test_forget_keeps_other_blocks() -> None:
    cache = PresenceCache(Clock(), 1)
    first, second = some_keys(1).digests, some_keys(2).digests
    cache.learn(first, np.ones(1, np.bool_))
    cache.forget(second)
    assert cache.present(first)[0]


# ---- circuit breaker


def test_breaker_opens_after_three_failures_and_closes_after_one_reply() -> None:
    clock = Clock()
    breaker = CircuitBreaker(clock, chance=lambda: 0.5, longest_pause_s=30.0)
    for _ in range(2):
        breaker.failed()
        breaker.failed()
        assert not breaker.is_open
        breaker.succeeded()
    for _ in range(3):
        breaker.failed()
    for pause_s in (1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0):
        assert breaker.is_open
        assert not breaker.may_attempt
        breaker.failed()  # of an exchange from before the breaker opened
        clock.now += pause_s - 0.01
        assert not breaker.may_attempt
        clock.now += 0.02
        assert breaker.may_attempt
        breaker.failed()
    breaker.succeeded()
    assert not breaker.is_open
    for _ in range(3):
        breaker.failed()
    clock.now += 1.01
    assert breaker.may_attempt, "the first pause is short again"


def test_a_hundred_machines_reconnect_at_different_times() -> None:
    clock = Clock()
    tries = []
    for chance in (0.0, 0.25, 0.5, 0.99):
        breaker = CircuitBreaker(clock, chance=lambda chance=chance: chance)  # type: ignore[misc]
        for _ in range(3):
            breaker.failed()
        tries.append(breaker.next_attempt)
    assert tries == pytest.approx([clock.now + s for s in (0.5, 0.75, 1.0, 1.49)])


# ---- connections


@contextmanager
def server_that_sends(
    stream: bytes, *, step: int = 1 << 20, then_hangs: bool = False
) -> Iterator[Connection]:
    """Yield a connection to a server that sends these bytes, in pieces of `step` bytes."""
    listening = socket.create_server(("127.0.0.1", 0))
    over = threading.Event()

    def serve() -> None:
        client, _ = listening.accept()
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with suppress(ConnectionError):  # the client has closed the connection
            for start in range(0, len(stream), step):
                client.sendall(stream[start : start + step])
        if then_hangs:
            over.wait()
        client.close()

    thread = threading.Thread(target=serve)
    thread.start()
    connection = Connection("127.0.0.1", listening.getsockname()[1], Login(), patience())
    try:
        yield connection
    finally:
        over.set()
        connection.close()
        thread.join()
        listening.close()


def patience() -> float:
    return time.monotonic() + 60.0


def value(text: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(text), text)


def wait_for_bytes(connection: Connection) -> None:
    """Wait for bytes or the end of the stream."""
    assert select.select([connection._socket], [], [], 60.0)[0]


def take(connection: Connection, block_bytes: int = BLOCK_BYTES) -> tuple[Any, bytes, bytes]:
    header, row = bytearray(64), bytearray(block_bytes)
    parts = [memoryview(header), memoryview(row)]
    length = connection.value_into(parts, 2 * (len(header) + len(row)) - 1, patience())
    return length, bytes(header), bytes(row)


def test_unrequested_bytes_are_noticed() -> None:
    with server_that_sends(b"+OK\r\n", then_hangs=True) as connection:
        wait_for_bytes(connection)
        assert not connection.is_in_step, "in the kernel"
        assert connection.reply(patience()) == b"OK"
        assert connection.is_in_step
    with server_that_sends(b"+OK\r\n+OK\r\n", then_hangs=True) as connection:
        assert connection.reply(patience()) == b"OK"
        until = patience()
        while connection.is_in_step:  # the bytes may arrive in two pieces
            assert time.monotonic() < until
        connection.reply(patience())
        assert connection.is_in_step, "no reply was lost"
    with server_that_sends(b"") as connection:
        wait_for_bytes(connection)
        assert not connection.is_in_step, "the server has closed the connection"


@dataclass(eq=False, kw_only=True)
class Visit(Exchange):
    """An exchange that remembers its connection."""

    through: Any = None


def test_connection_with_unrequested_bytes_is_replaced() -> None:
    ended: queue.SimpleQueue[Exchange] = queue.SimpleQueue()

    def connect(_: float) -> Any:
        return SimpleNamespace(is_in_step=True, has_received=False, abort=int, close=int)

    def perform(connection: Any, exchange: Exchange) -> None:
        assert isinstance(exchange, Visit)
        exchange.through = connection

    def visit(**options: Any) -> Any:
        line.submit(Visit(deadline=patience(), **options))
        exchange = ended.get(timeout=60.0)
        assert isinstance(exchange, Visit)
        assert exchange.error is None
        return exchange.through

    line = ConnectionThread("visited", connect, perform, ended.put)
    try:
        first = visit()
        assert visit() is first
        first.is_in_step = False
        second = visit(closes_connection=True)
        assert second is not first
        assert visit() is not second
    finally:
        line.stop()
        assert line.join(60.0)


@pytest.mark.parametrize("step", [1, 7, 1 << 20])
def test_replies_of_any_type_are_read_in_any_pieces(step: int) -> None:
    big = b"x" * 10_000
    stream = b"*3\r\n:1\r\n*2\r\n$-1\r\n*0\r\n" + value(b"a\r\nb") + value(big) + b"*-1\r\n-NO way\r\n+OK\r\n"
    with server_that_sends(stream, step=step) as connection:
        assert connection.answer(patience()) == [1, [None, []], b"a\r\nb"]
        assert connection.answer(patience()) == big
        assert connection.answer(patience()) is None
        error = connection.answer(patience())
        assert isinstance(error, ServerError)
        assert error.code == "NO"
        assert connection.answer(patience()) == b"OK"


@pytest.mark.parametrize(
    "stream", [b"$2000000\r\n", b"*-2\r\n", b"*9999999\r\n", b"%1\r\n", b"*1\r\nx\r\n", b"*1\r\n" * 200_000]
)
def test_reply_is_bounded(stream: bytes) -> None:
    with server_that_sends(stream) as connection, pytest.raises(ProtocolError):
        connection.answer(patience())


def test_commands_are_encoded() -> None:
    assert command(b"SET", b"a\r\n", b"") == b"*3\r\n$3\r\nSET\r\n$3\r\na\r\n\r\n$0\r\n\r\n"


@given(st.integers(1, 700))
def test_values_are_read_in_any_pieces(step: int) -> None:
    body = bytes(range(64)) + b"\r\n$-1\r\n" * (BLOCK_BYTES // 8) + b"z" * (BLOCK_BYTES % 7)
    body = body.ljust(64 + BLOCK_BYTES, b"-")[: 64 + BLOCK_BYTES]
    stream = (
        b"+OK\r\n:1\r\n" + value(body) + b"$-1\r\n" + value(b"") + value(body[::-1]) + b"-ERR no\r\n:0\r\n"
    )
    with server_that_sends(stream, step=step) as connection:
        assert connection.reply(patience()) == b"OK"
        assert connection.reply(patience()) == 1
        assert take(connection) == (len(body), body[:64], body[64:])
        assert take(connection)[0] is None
        assert connection.reply(patience()) == b""
        assert take(connection) == (len(body), body[::-1][:64], body[::-1][64:])
        error = connection.reply(patience())
        assert isinstance(error, ServerError)
        assert (error.code, str(error)) == ("ERR", "ERR no")
        assert connection.reply(patience()) == 0
        with pytest.raises(ConnectionResetError):
            connection.reply(patience())


@given(st.integers(1, 60), st.integers(0, 900))
@example(3, 5)
def test_many_lines_are_read_in_any_pieces(step: int, count: int) -> None:
    lines = [b":%d" % (n % 2) if n % 7 else b"-ERR %d" % n for n in range(count)]
    stream = b"".join(b"%b\r\n" % line for line in lines)
    with server_that_sends(
        b"+first\r\n" + stream + b"+last\r\n", step=max(step, len(stream) // 200)
    ) as connection:
        assert connection.reply(patience()) == b"first"
        assert connection.lines(count, patience()) == lines
        assert connection.reply(patience()) == b"last"


def test_thread_is_woken_once_for_the_replies_of_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: waking up for each reply took as long as sending the blocks."""
    monkeypatch.setattr(resp, "SHORT_WAIT_S", 60.0)
    with server_that_sends(b"+OK\r\n" * 200, step=5, then_hangs=True) as connection:
        calls, receive = [], connection.receive
        monkeypatch.setattr(connection, "receive", lambda *args: (calls.append(args), receive(*args))[1])
        assert connection.lines(200, patience(), 5) == [b"+OK"] * 200
        assert len(calls) == 1


def test_shorter_replies_are_read_after_a_short_wait() -> None:
    with server_that_sends(b":1\r\n" * 50, then_hangs=True) as connection:
        assert connection.lines(50, patience(), 5000) == [b":1"] * 50
    with server_that_sends(b":1\r\n" * 49, then_hangs=True) as connection, pytest.raises(TimeoutError):
        connection.lines(50, time.monotonic() + 0.2, 5)


@pytest.mark.parametrize("step", [1, 7, 1 << 20])
def test_short_replies_are_read_in_any_pieces(step: int) -> None:
    stream = value(b"0123") + b"$-1\r\n-NO way\r\n" + value(b"") + value(b"9") + b":7\r\n"
    with server_that_sends(stream, step=step) as connection:
        first, second, error, *more_replies = connection.short_replies(5, patience())
        assert (first, second, *more_replies) == (b"0123", None, b"", b"9")
        assert isinstance(error, ServerError)
        assert connection.reply(patience()) == 7, "the next reply is left"


@pytest.mark.parametrize("stream", [b":1\r\n", b"$3\r\nab\r\n", b"$2\r\nabc\r\n", b"$x\r\n", b"\r\n"])
def test_reply_that_is_not_short_ends_the_connection(stream: bytes) -> None:
    with server_that_sends(stream) as connection, pytest.raises(ProtocolError):
        connection.short_replies(1, patience())


@pytest.mark.parametrize("length", [0, 1, 63, 575, 577, 1100])
def test_value_of_another_length_is_skipped(length: int) -> None:
    body = bytes(64) + b"x" * BLOCK_BYTES
    with server_that_sends(value(b"y" * length) + value(body)) as connection:
        assert take(connection)[0] == length
        assert take(connection) == (len(body), body[:64], body[64:])


@pytest.mark.parametrize(
    "stream",
    [
        b"$1152\r\n",  # twice as long as allowed
        b"$99999999999\r\n",
        b"$-2\r\n",
        b"$\r\n",
        b"$1_0\r\n",
        b"$ 5\r\n",
        b"+OK\r\n",
        b":1\r\n",
        b"*1\r\n$1\r\na\r\n",
        b"\r\n",
        b"HTTP/1.1 400 Bad Request\r\n",
        b"$576\r\n" + b"x" * 576 + b"zz",
        b"-" + b"x" * 5000,
    ],
)
def test_invalid_reply_ends_the_connection(stream: bytes) -> None:
    with server_that_sends(stream) as connection, pytest.raises(ProtocolError):
        take(connection)


@pytest.mark.parametrize("stream", [b"*1\r\n:1\r\n", b"$5000\r\n", b":x\r\n", b"%1\r\n", b"$3\r\nabcde"])
def test_invalid_small_reply_ends_the_connection(stream: bytes) -> None:
    with server_that_sends(stream) as connection, pytest.raises(ProtocolError):
        connection.reply(patience())


def test_endless_line_is_refused() -> None:
    with server_that_sends(b"-" + b"x" * 5000) as connection, pytest.raises(ProtocolError):
        connection.lines(1, patience())


@pytest.mark.parametrize("stream", [b"", b"$5", b"$576\r\n", b"$576\r\nsome of it", b"$576\r\n" + b"x" * 576])
def test_calls_end_by_their_deadlines(stream: bytes) -> None:
    parts = [memoryview(bytearray(64)), memoryview(bytearray(BLOCK_BYTES))]
    with server_that_sends(stream, then_hangs=True) as connection, pytest.raises(TimeoutError):
        connection.value_into(parts, 1 << 20, time.monotonic() + 0.2)
    with server_that_sends(stream, then_hangs=True) as connection, pytest.raises(TimeoutError):
        connection.reply(time.monotonic() - 1.0)


HEAD, REST = 9, 40
"""Bytes of the two values of a block."""
_VALUES = st.sampled_from(["there", "absent", "short", "long", "error", "there", "there"])


def reply_of(kind: str, length: int, number: int) -> bytes:
    """Return a reply whose bytes look like replies."""
    body = (b"%03d\r\n$-1\r\n$40\r\n" % number * 9)[:length]
    replies = {
        "absent": b"$-1\r\n",
        "error": b"-ERR no\r\n",
        "short": value(body[1:]),
        "long": value(body + b"x"),
    }
    return replies.get(kind, value(body))


def spaces(count: int, *lengths: int) -> list[list[list[memoryview]]]:
    return [[[memoryview(bytearray(length))] for length in lengths] for _ in range(count)]


def alone(connection: Connection, block: list[list[memoryview]], deadline: float) -> list[Any]:
    return [connection.value_into(value, 1 << 10, deadline) for value in block]


@given(
    st.lists(st.tuples(_VALUES, _VALUES), min_size=1, max_size=12),
    st.integers(1, 700),
    st.integers(1, 5),
    st.booleans(),
)
@example([("there", "there")] * 3 + [("there", "absent")], 1 << 20, 4, False)
@example([("absent", "absent")] * 12, 1 << 20, 12, True)
def test_blocks_arrive_together_or_alone(
    blocks: list[tuple[str, str]], step: int, at_once: int, is_one_value: bool
) -> None:
    """Complete blocks are read together; from the first unexpected reply on, values are read alone."""
    lengths = (HEAD,) if is_one_value else (HEAD, REST)
    replies = [
        [reply_of(kind, length, number) for kind, length in zip(kinds, lengths, strict=False)]
        for number, kinds in enumerate(blocks)
    ]
    stream = b"+first\r\n" + b"".join(map(b"".join, replies)) + b"+last\r\n"
    blocks_read: list[list[object]] = []
    with server_that_sends(stream, step=max(step, len(stream) // 20), then_hangs=True) as connection:
        assert connection.reply(patience()) == b"first"
        while len(blocks_read) < len(blocks):
            rows = spaces(min(at_once, len(blocks) - len(blocks_read)), *lengths)
            came = connection.blocks_into(rows, patience())
            blocks_read += [[bytes(views[0]) for views in row] for row in rows[:came]]
            if came < len(rows):
                kinds = blocks[len(blocks_read)][: len(lengths)]
                assert kinds != ("there",) * len(lengths)
                read = alone(connection, rows[came], patience())
                blocks_read.append([bytes(views[0]) if length == len(views[0]) else None
                              for length, views in zip(read, rows[came], strict=True)])  # fmt: skip
        assert connection.reply(patience()) == b"last"
    for number, (kinds, row) in enumerate(zip(blocks, blocks_read, strict=True)):
        for kind, length, value_read in zip(kinds, lengths, row, strict=False):
            body = reply_of("there", length, number).partition(b"\r\n")[2][:-2]
            assert value_read == (body if kind == "there" else None)


@pytest.mark.parametrize("then_hangs", [True, False])
@pytest.mark.parametrize("cut", [0, 1, 30, 61, 62, 123, 124, 150, 185])
def test_blocks_that_arrived_before_the_end_are_served(cut: int, then_hangs: bool) -> None:
    blocks = b"".join(reply_of("there", length, n) for n in range(3) for length in (HEAD, REST))
    each, rows = len(blocks) // 3, spaces(3, HEAD, REST)
    assert each == 62, "as in the parameters"
    with server_that_sends(blocks[:cut], then_hangs=then_hangs) as connection:
        error = TimeoutError if then_hangs else ConnectionResetError
        deadline = time.monotonic() + (0.2 if then_hangs else 60.0)
        if cut < each:
            with pytest.raises(error):
                connection.blocks_into(rows, deadline)
            return
        assert connection.blocks_into(rows, deadline) == cut // each
        assert [bytes(row[1][0])[:3] for row in rows[: cut // each]] == [b"000", b"001", b"002"][
            : cut // each
        ]
        with pytest.raises(error):
            alone(connection, rows[cut // each], deadline)


@pytest.mark.parametrize(
    "stream", [b"$9\r\n123456789zz", b"$x\r\n", b"$99999999\r\n", b"HTTP/1.1 400 Bad\r\n"]
)
def test_invalid_reply_ends_the_connection_before_its_block(stream: bytes) -> None:
    good = reply_of("there", HEAD, 7)
    rows = spaces(3, HEAD)
    with server_that_sends(good + stream + b"\r\n" * 40) as connection:
        assert connection.blocks_into(rows, patience()) == 1
        with pytest.raises(ProtocolError):
            connection.value_into(rows[1][0], 1 << 10, patience())


def test_send_over_tls_ends_at_its_deadline(tmp_path: Path) -> None:
    """The server reads slowly."""
    pem, key = self_signed(tmp_path)
    server_context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_context.load_cert_chain(pem, key)
    listening, over = socket.create_server(("127.0.0.1", 0)), threading.Event()

    def serve() -> None:
        client, _ = listening.accept()
        with suppress(OSError), server_context.wrap_socket(client, server_side=True) as stream:
            while not over.wait(0.02):
                stream.recv(1 << 14)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    login = Login(tls=ssl.create_default_context(cafile=pem))
    connection = Connection("127.0.0.1", listening.getsockname()[1], login, patience())
    begun = time.monotonic()
    with pytest.raises(TimeoutError):
        connection.send([bytes(64 << 20)], begun + 0.2)
    assert time.monotonic() - begun < 20.0, "80 s at the pace of this server"
    over.set()
    connection.close()
    thread.join(60.0)
    listening.close()


def test_alert_before_the_end_of_a_tls_connection_is_raised(tmp_path: Path) -> None:
    """With TLS 1.3 a server refuses the client's certificate after the client's handshake has ended."""
    pem, key = self_signed(tmp_path)
    server_context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_context.load_cert_chain(pem, key)
    server_context.verify_mode = ssl.CERT_REQUIRED
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            client, _ = listening.accept()
            with suppress(OSError):
                server_context.wrap_socket(client, server_side=True)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        login = Login(tls=ssl.create_default_context(cafile=pem))
        connection = Connection("127.0.0.1", listening.getsockname()[1], login, patience())
        thread.join(60.0)
        with pytest.raises(ssl.SSLError, match="certificate required"):
            connection.send([b"x"] * 10_000, patience())
        connection.close()


def test_text_of_a_login_has_no_password() -> None:
    login = Login("user", "hunter2")
    assert "hunter2" not in f"{login} {login!r} {[login]}"


def test_proxy_splits_replies() -> None:
    replies = [b"+OK\r\n", b"$-1\r\n", b"$4\r\na\r\nb\r\n", b":12\r\n", b"-ERR x\r\n"]
    stream = b"".join(replies)
    for cut in range(len(stream) + 1):
        first, remainder = split_replies(stream[:cut])
        second, end = split_replies(remainder + stream[cut:])
        assert (first + second, end) == (replies, b"")
