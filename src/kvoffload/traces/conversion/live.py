"""Batches of KV events from vLLM's ZMQ publisher. The only file that knows `zmq`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from signal import SIGINT, signal
from threading import Event, current_thread, main_thread

import msgspec

from kvoffload.errors import ConfigError

_SCHEMES = ("tcp://", "ipc://", "inproc://")
_POLL_MS = 200


def is_address(text: str) -> bool:
    """Whether a source is a publisher and not a file."""
    return text.startswith(_SCHEMES)


def batches(address: str, lost: list[int]) -> Iterator[tuple[int, bytes]]:
    """What a publisher sends, as JSON, numbered from 1, until Ctrl-C.

    Args:
        lost: its first element counts batches that the publisher numbered and that did not come.

    Thread: the main one takes Ctrl-C as the end, between two batches; in others close the iterator.
    Raises: `ConfigError` for an address that cannot be used, and without the library.
    """
    try:
        import zmq
    except ImportError:
        why = "KV events come over ZMQ: pip install 'kvoffload[zmq]'"
        raise ConfigError("source", address, why) from None
    with zmq.Context() as context, context.socket(zmq.SUB) as socket, _until_interrupted() as over:
        socket.setsockopt(zmq.LINGER, 0)
        socket.subscribe(b"")
        try:
            socket.connect(address)
        except zmq.ZMQError as error:
            raise ConfigError("source", address, f"allowed: tcp://host:port ({error})") from None
        number, expected = 0, None
        while not over.is_set():
            if not socket.poll(_POLL_MS):
                continue
            _, sequence, payload = socket.recv_multipart()
            found = int.from_bytes(sequence, "big")
            if expected is not None and found > expected:
                lost[0] += found - expected
            expected = found + 1
            number += 1
            yield number, msgspec.json.encode(_printable(msgspec.msgpack.decode(payload)))


@contextmanager
def _until_interrupted() -> Iterator[Event]:
    """Set by Ctrl-C, which would otherwise end the work in the middle of a batch."""
    over = Event()
    if current_thread() is not main_thread():
        yield over
        return
    before = signal(SIGINT, lambda *_: over.set())
    try:
        yield over
    finally:
        signal(SIGINT, before)


def _printable(value: object) -> object:
    """Hashes that are bytes, as text."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, list):
        return [_printable(one) for one in value]
    if isinstance(value, dict):
        return {name: _printable(one) for name, one in value.items()}
    return value
