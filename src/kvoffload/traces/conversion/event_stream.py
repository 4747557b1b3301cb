"""Live batches of KV events from vLLM's ZMQ publisher. The only file that imports `zmq`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from signal import SIGINT, signal
from threading import Event, current_thread, main_thread

import msgspec

from kvoffload.errors import ConfigError

_SCHEMES = ("tcp://", "ipc://", "inproc://")
_POLL_MS = 200
_NUM_PARTS = 3
"""Number of parts of a message. The parts are topic, sequence number and payload."""
_NO_BATCH = b"null"


def is_address(text: str) -> bool:
    """Return True if a text is the address of a KV event publisher, such as ``tcp://host:port``."""
    return text.startswith(_SCHEMES)


def batches(address: str, lost: list[int]) -> Iterator[tuple[int, bytes]]:
    """Yield the batches of a publisher as JSON, numbered from 1, until Ctrl-C.

    If a message is not a batch, for example because another program publishes at the address, yields
    ``null``.

    Args:
        lost: a list with one element, to which the number of lost batches is added. Batches are lost if the
            sequence numbers have gaps.

    Thread: any. On the main thread Ctrl-C ends the iteration between two batches; on another thread, close
    the iterator.
    Raises: `ConfigError` for an unusable address, or if `zmq` is not installed.
    """
    try:
        import zmq
    except ImportError:
        why = "live KV events need ZMQ: pip install 'kvoffload[zmq]'"
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
            number += 1
            batch, parts = _NO_BATCH, socket.recv_multipart()
            if len(parts) == _NUM_PARTS and (batch := _as_json(parts[2])) != _NO_BATCH:
                received = int.from_bytes(parts[1], "big")
                if expected is not None and received > expected:
                    lost[0] += received - expected
                expected = received + 1
            yield number, batch


@contextmanager
def _until_interrupted() -> Iterator[Event]:
    """Yield an event. Ctrl-C sets it, instead of interrupting the processing of a batch."""
    over = Event()
    if current_thread() is not main_thread():
        yield over
        return
    before = signal(SIGINT, lambda *_: over.set())
    try:
        yield over
    finally:
        signal(SIGINT, before)


def _as_json(payload: bytes) -> bytes:
    """Convert a payload from MessagePack to JSON; return `_NO_BATCH` if this is impossible."""
    try:
        return msgspec.json.encode(_printable(msgspec.msgpack.decode(payload)))
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError):
        return _NO_BATCH


def _printable(value: object) -> object:
    """Convert bytes, such as hashes, to hexadecimal text."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, list):
        return [_printable(element) for element in value]
    if isinstance(value, dict):
        return {name: _printable(element) for name, element in value.items()}
    return value
