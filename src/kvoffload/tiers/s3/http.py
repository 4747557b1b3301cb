"""HTTP/1.1 requests with bounded memory.

Owns the framing of requests and responses. Does not know S3, addresses, deadlines or connection pools. The
receiver of a response provides the memory for the body, so that no server can make this module allocate much.
"""

from __future__ import annotations

import asyncio
import os
import re
import select
import socket
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol, TypeAlias

_HEAD_BYTES = 32 << 10
"""Limit of a response's status line and headers together. Amazon sends less than 1 KiB."""
_SCRATCH_BYTES = 64 << 10
_FRAMING_BYTES, _DATA_A_FRAMING_BYTE = 8 << 10, 16
"""Limit of framing in a chunked body: 8 KiB, plus one byte for each 16 bytes of data. Without a limit, a
server that sends chunks of one byte would cost seconds of CPU time."""
_INTERIM_RESPONSES = 8
_SEND_BYTES = 256 << 10
_STATUS = re.compile(rb"HTTP/1\.[01] ([1-5]\d\d)(?: [^\r\n]*)?")
_LENGTH = re.compile(r"\d{1,18}", re.ASCII)
_CHUNK_SIZE = re.compile(rb"([0-9a-fA-F]{1,15})[ \t]*(?:;[^\r\n]*)?")
_NO_BODY = {204, 304}

Buffer: TypeAlias = "bytes | memoryview"


class ResponseError(ConnectionError):
    """A response that violates the protocol or ends too early. The connection must be closed."""


class Head(NamedTuple):
    """Status and headers of a response.

    Attributes:
        headers: values of the headers, by name in lower case.
        length: content length; None if the server sends no content length.
    """

    status: int
    headers: dict[str, str]
    length: int | None


class Receiver(Protocol):
    """Receives the body of a response."""

    def room(self) -> memoryview:
        """Return memory for the next bytes; empty if the receiver is full."""

    def add(self, count: int) -> None:
        """Record that the next `count` bytes have been written to the memory that `room` returned."""


class NoReceiver:
    """Receiver that accepts no bytes, for responses without a body."""

    def room(self) -> memoryview:
        return memoryview(b"")

    def add(self, count: int) -> None:
        raise AssertionError("there was no room")


Accept: TypeAlias = Callable[[Head], Receiver]
"""Callback that gets the head of the final response, and returns the receiver of the body. An exception from
the callback ends the request."""


class HttpConnection(asyncio.BufferedProtocol):
    """A connection over an asyncio transport, plain or TLS, for one request at a time.

    Attributes:
        is_usable: True if another request may be sent.
        has_begun: True if a byte of the last request's response has been received.

    Thread: the event loop's.
    """

    def __init__(self) -> None:
        self.is_usable = True
        self._loop = asyncio.get_running_loop()
        self._scratch = bytearray(_SCRATCH_BYTES)
        self._view = memoryview(self._scratch)
        self._transport: asyncio.Transport | None = None
        self._may_write: asyncio.Future[None] | None = None
        self._done: asyncio.Future[None] | None = None
        self._receiver: Receiver = NoReceiver()
        self._begin(False, lambda head: self._receiver)

    async def request(
        self, head: bytes, body: Iterable[Buffer], accept: Accept, *, is_head: bool = False
    ) -> None:
        """Send a request and receive the response. Cancellation closes the connection.

        Args:
            head: request line and headers, up to the empty line.
            body: pieces of the body. The next piece is created when earlier pieces have been sent. Pieces
                must not change until the request has ended.
            is_head: True for the method ``HEAD``, whose response has no body.

        Raises: `ResponseError`, `ConnectionError`, and the exceptions of `accept`.
        """
        if not self.is_usable:  # a new connection may end before its first request
            raise ResponseError("the connection was closed before the request")
        self._begin(is_head, accept)
        self._done = done = self._loop.create_future()
        self.is_usable = False
        try:
            await self._send(head, body, done)
            await done
        except BaseException:
            self.close()
            raise
        finally:
            self._done = None
            self._receiver = NoReceiver()
            if done.done() and not done.cancelled():
                done.exception()  # it may have been set while sending failed

    @property
    def is_quiet(self) -> bool:
        """True if neither a byte nor the end of the stream has arrived since the last response."""
        end = self._transport.get_extra_info("socket") if self._transport is not None else None
        if end is None or end.fileno() < 0:
            return False
        poll = select.poll()
        poll.register(end.fileno(), select.POLLIN | select.POLLHUP | select.POLLERR)
        return not poll.poll(0)

    def close(self) -> None:
        """Close the connection at once. Idempotent."""
        self.is_usable = False
        if self._transport is not None:
            self._transport.abort()

    # ---- sending

    async def _send(self, head: bytes, body: Iterable[Buffer], done: asyncio.Future[None]) -> None:
        assert self._transport is not None
        self._transport.write(head)
        for piece in body:
            view = memoryview(piece)
            for at in range(0, len(view), _SEND_BYTES):
                self._transport.write(view[at : at + _SEND_BYTES])
                if self._may_write is not None:
                    await asyncio.wait((self._may_write, done), return_when=asyncio.FIRST_COMPLETED)
                if done.done():  # the server has answered before it has the whole body
                    self.close()
                    return

    def pause_writing(self) -> None:
        self._may_write = self._loop.create_future()

    def resume_writing(self) -> None:
        if self._may_write is not None and not self._may_write.done():
            self._may_write.set_result(None)
        self._may_write = None

    # ---- receiving

    def _begin(self, is_head: bool, accept: Accept) -> None:
        self._accept, self._is_head = accept, is_head
        self._receiver = NoReceiver()
        self._fill = self._num_interim = 0
        self.has_begun = self._in_body = self._keeps = False
        self._num_left: int | None = None
        self._chunks: _Chunks | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._done is None or self._done.done() or self._chunks is not None:
            return self._view
        if not self._in_body:
            return self._view[self._fill : _HEAD_BYTES]
        room = self._receiver.room()
        if self._num_left is not None:
            room = room[: self._num_left]
        return room if len(room) else self._view

    def buffer_updated(self, nbytes: int) -> None:
        if self._done is None or self._done.done():
            self.close()  # unexpected bytes
            return
        self.has_begun = True
        try:
            if self._chunks is not None:
                self._take_chunks(self._view[:nbytes])
            elif self._in_body:
                self._receiver.add(nbytes)
                self._num_left = None if self._num_left is None else self._num_left - nbytes
                self._end_body()
            else:
                self._fill += nbytes
                self._take_head()
        except Exception as error:
            self._fail(error)

    def eof_received(self) -> bool:
        return False  # the transport is closed

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_usable = False
        if self._done is not None and not self._done.done():
            if self._in_body and self._num_left is None and self._chunks is None and exc is None:
                self._finish(keeps=False)
            else:
                self._fail(ResponseError("the connection was closed before the end of the response"))
        self.resume_writing()

    def _take_head(self) -> None:
        """Parse the head once it is complete. The bytes behind the head belong to the body.

        Skips interim responses (status 1xx).
        """
        while (end := self._scratch.find(b"\r\n\r\n", 0, self._fill)) >= 0:
            head, remaining = bytes(self._view[:end]), bytes(self._view[end + 4 : self._fill])
            status, headers = _parsed(head)
            if status >= 200:
                self._begin_body(status, headers, remaining)
                return
            self._num_interim += 1
            if self._num_interim > _INTERIM_RESPONSES or status == 101:
                raise ResponseError("too many interim responses")
            self._view[: len(remaining)] = remaining
            self._fill = len(remaining)
        if self._fill >= _HEAD_BYTES:
            raise ResponseError(f"the headers are longer than {_HEAD_BYTES} bytes")

    def _begin_body(self, status: int, headers: dict[str, str], remaining: bytes) -> None:
        length, encoding = _length_of(headers), headers.get("transfer-encoding", "")
        if encoding and (encoding.lower() != "chunked" or length is not None):
            raise ResponseError("a transfer encoding other than chunked, or with a content length")
        self._keeps = "close" not in headers.get("connection", "").lower()
        self._receiver = self._accept(Head(status, headers, length))
        self._in_body = True
        if self._is_head or status in _NO_BODY:
            length, encoding = 0, ""
        self._num_left = length
        if encoding:
            self._chunks = _Chunks()
            self._take_chunks(memoryview(remaining))
            return
        data = memoryview(remaining)
        if length is not None and len(data) > length:
            self._keeps, data = False, data[:length]
        taken = _copy(data, self._receiver)
        if self._num_left is not None:
            self._num_left -= taken
        self._end_body()

    def _take_chunks(self, data: memoryview) -> None:
        assert self._chunks is not None
        remaining = self._chunks.feed(data, self._receiver)
        if self._chunks.is_over:
            self._finish(keeps=self._keeps and remaining == 0)
        elif not len(self._receiver.room()) and not self._chunks.is_at_end:
            self._finish(keeps=False)

    def _end_body(self) -> None:
        """End the response if it is complete, or if the receiver is full."""
        if self._num_left == 0:
            self._finish(keeps=self._keeps)
        elif not len(self._receiver.room()):
            self._finish(keeps=False)

    def _finish(self, *, keeps: bool) -> None:
        assert self._done is not None
        self._done.set_result(None)
        self.is_usable = keeps
        if not keeps:
            self.close()

    def _fail(self, error: Exception) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)
        self.close()


class _Chunks:
    """Decodes a chunked body.

    Attributes:
        is_at_end: True after the last chunk, which has size 0.
        is_over: True after the trailers behind the last chunk.
    """

    def __init__(self) -> None:
        self.is_at_end = self.is_over = False
        self._num_left = 0
        self._line = bytearray()
        self._is_after_data = False
        self._num_framing = self._num_data = 0

    def feed(self, data: memoryview, receiver: Receiver) -> int:
        """Decode `data` until `receiver` is full or the body ends; returns how many bytes follow the body."""
        while len(data) and not self.is_over:
            if self._num_left:
                taken = _copy(data[: self._num_left], receiver)
                if not taken:
                    return 0
                self._num_left -= taken
                self._num_data += taken
                data = data[taken:]
                self._is_after_data = self._num_left == 0
            else:
                data = self._take_line(data)
        return len(data)

    def _take_line(self, data: memoryview) -> memoryview:
        """Consume bytes of a framing line, at most up to its end; returns the remaining bytes."""
        piece = bytes(data[:_FRAMING_BYTES])
        end = piece.find(b"\n")
        taken = len(piece) if end < 0 else end + 1
        self._line += piece[:taken]
        self._num_framing += taken
        if self._num_framing > _FRAMING_BYTES + self._num_data // _DATA_A_FRAMING_BYTE:
            raise ResponseError("too much framing in a chunked body")
        if end >= 0:
            line = bytes(self._line).removesuffix(b"\n").removesuffix(b"\r")
            self._line.clear()
            self._take_whole_line(line)
        return data[taken:]

    def _take_whole_line(self, line: bytes) -> None:
        if self._is_after_data:
            if line:
                raise ResponseError("a chunk is longer than its size")
            self._is_after_data = False
        elif self.is_at_end:
            self.is_over = not line
        else:
            match = _CHUNK_SIZE.fullmatch(line)
            if match is None:
                raise ResponseError("a chunk without a size")
            self._num_left = int(match[1], 16)
            self.is_at_end = self._num_left == 0


def _copy(data: memoryview, receiver: Receiver) -> int:
    """Copy bytes to a receiver while it has room; returns the number of copied bytes."""
    at = 0
    while at < len(data) and len(room := receiver.room()):
        count = min(len(room), len(data) - at)
        room[:count] = data[at : at + count]
        receiver.add(count)
        at += count
    return at


def _parsed(head: bytes) -> tuple[int, dict[str, str]]:
    first, *lines = head.split(b"\r\n")
    status = _STATUS.fullmatch(first)
    if status is None:
        raise ResponseError("an invalid status line")
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.decode("latin-1").partition(":")
        name, value = name.lower(), value.strip(" \t")
        if not colon or not name or name != name.strip():
            raise ResponseError("an invalid header")
        if (
            name in ("content-length", "transfer-encoding", "content-range")
            and headers.get(name, value) != value
        ):
            raise ResponseError(f"two different {name} headers")
        headers[name] = value
    return int(status[1]), headers


def _length_of(headers: dict[str, str]) -> int | None:
    length = headers.get("content-length")
    if length is None:
        return None
    if _LENGTH.fullmatch(length) is None:
        raise ResponseError("an invalid content length")
    return int(length)


def cause_of(error: Exception) -> str:
    """Describe a failure in the words of the system, OpenSSL or this module.

    Quotes no data that were sent or received.
    """
    if isinstance(error, socket.gaierror):
        return "the name of the server cannot be resolved"
    if isinstance(error, OSError) and error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)
    return str(error) if isinstance(error, ConnectionError) else type(error).__name__
