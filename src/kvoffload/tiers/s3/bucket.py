"""A client of an S3 bucket, on one thread.

Owns requests with their outcomes and costs. Knows no blocks. A failed request is repeated once in two cases:
the credentials have changed meanwhile, or the server reports an internal error (status 500; Amazon asks
clients to repeat such requests). If an idle connection turns out to be closed, the request is sent over
another connection. After any other failure, the caller must discard the client.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import re
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvoffload.tiers.s3.http import (
    Buffer,
    Head,
    HttpConnection,
    NoReceiver,
    Receiver,
    ResponseError,
    cause_of,
)
from kvoffload.tiers.s3.signing import Signed, Signer
from kvoffload.tiers.shared.certificates import CertificateError
from kvoffload.tiers.shared.connection import CONNECT_S
from kvoffload.tiers.shared.remote_errors import ServerError

MOST_AT_ONCE = 16
"""Limit of concurrent requests of one client."""
_CANCEL_AGAIN_S = 0.01
_ERROR_BYTES = 16 << 10
"""Limit of bytes that are read from the body of an error response."""
_SKIPPED_BYTES = 64 << 10
_CODE = re.compile(rb"<Code>([A-Za-z0-9_.]{1,60})</Code>")
_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})", re.ASCII)
_PLAIN = {"", "identity", "aws-chunked"}
_CAUSE = re.compile(
    r"[A-Z][a-z ]+ \(os error \d+\)|dns error|invalid peer certificate: \w+|operation timed out"
)
_BAD_KEYS = {401, 403}
_INTERNAL_ERROR = 500
NO_BUCKET = "NoSuchBucket"

Bytes: TypeAlias = npt.NDArray[np.uint8]
Pieces: TypeAlias = Callable[[], Iterable[Buffer]]
"""Function that creates the body of a request. Called once for each attempt."""


@dataclass(frozen=True)
class Prices:
    """Prices of requests and bytes, in any currency.

    Attributes:
        per_1000_puts: price of 1,000 write requests.
        per_1000_gets: price of 1,000 read or probe requests. Deletions are free.
        per_gb_read: price of 10^9 received bytes.
    """

    per_1000_puts: float
    per_1000_gets: float
    per_gb_read: float


@dataclass(eq=False)
class Ledger:
    """Counts the requests of several clients. Thread: any."""

    prices: Prices
    puts: int = 0
    gets: int = 0
    bytes_received: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, *, puts: int = 0, gets: int = 0, bytes_received: int = 0) -> None:
        with self._lock:
            self.puts += puts
            self.gets += gets
            self.bytes_received += bytes_received

    @property
    def cost(self) -> float:
        """Cost of the requests and bytes counted so far."""
        requests = self.puts * self.prices.per_1000_puts + self.gets * self.prices.per_1000_gets
        return requests / 1e3 + self.bytes_received * self.prices.per_gb_read / 1e9


class BucketError(ServerError):
    """An error response of the server.

    Attributes:
        code: S3 error code, for example ``NoSuchBucket``; equal to `status` if the response has no code.
        status: HTTP status.
    """

    def __init__(self, code: str, status: str) -> None:
        super().__init__(f"{code} (status {status})")
        self.code, self.status = code, status


class Found(enum.Enum):
    """Outcome of reading an object.

    - `WHOLE`: all requested bytes were received.
    - `ABSENT`: the object does not exist.
    - `OTHER_SIZE`: the object does not have the expected size. None of its bytes were used.
    """

    WHOLE = enum.auto()
    ABSENT = enum.auto()
    OTHER_SIZE = enum.auto()


class Span(NamedTuple):
    """The bytes `begin` to ``end - 1`` of an object; `size` is the expected size of the whole object."""

    begin: int
    end: int
    size: int


class Bucket:
    """A client of one bucket, used by one thread. Implements `Connection`, for a `ConnectionThread`.

    Requests are coroutines, which `run` performs. A request raises `BucketError` for an error response, and
    `OSError` for a missing or invalid response. Error messages contain no secret, no address of an object,
    and no server text except an error code.

    The memory use is bounded: an object of an unexpected size is rejected as soon as its headers arrive, a
    response that is too long is cut, and error bodies are read up to 16 KiB. Redirections are not followed.

    Args:
        signer: signs requests; several clients may share a signer.
        ledger: counts requests; several clients may share a ledger.
    """

    is_in_step = has_received = True

    def __init__(self, signer: Signer, ledger: Ledger) -> None:
        self._signer, self._ledger = signer, ledger
        self._loop = asyncio.new_event_loop()
        self._idle: list[HttpConnection] = []
        self._running: list[asyncio.Task[None]] = []
        self._aborted = False

    def run(
        self, requests: Iterable[Coroutine[Any, Any, None]], deadline: float, most_at_once: int = MOST_AT_ONCE
    ) -> None:
        """Perform requests concurrently and wait for all. At the deadline, abort unfinished requests.

        Raises: `TimeoutError` if a request was unfinished at the deadline; otherwise the first error of a
            request.
        """
        coroutines = [*requests]
        # `ConnectionThread` repeats an exchange without a reply; this class repeats requests itself.
        self.has_received = True
        try:
            if coroutines:
                self._signer.refresh()
                self._loop.run_until_complete(self._run(coroutines, deadline, most_at_once))
        finally:
            for coroutine in coroutines:
                coroutine.close()

    async def get(self, name: str, span: Span, receiver: Receiver) -> Found:
        """Read the bytes of `span` into `receiver`, if the object has the expected size.

        Raises: `ResponseError` if the response is too short, or its range is not `span`. The bytes that
            `receiver` got before the error are bytes of the span.
        """
        self._ledger.add(gets=1)
        span_receiver = _SpanReceiver(span, receiver)
        headers = {"Range": f"bytes={span.begin}-{span.end - 1}"}
        try:
            if await self._request("GET", name, span_receiver, headers) is None:
                return Found.ABSENT
        except BucketError as error:
            if error.status != "416":
                raise
            return Found.OTHER_SIZE
        finally:
            self._ledger.add(bytes_received=span_receiver.num_received)
        if span_receiver.is_of_other_size:
            return Found.OTHER_SIZE
        if span_receiver.num_left:
            raise ResponseError("the response is shorter than the requested range")
        return Found.WHOLE

    async def value(self, name: str, num_bytes: int) -> tuple[Found, bytes]:
        """Read a small object of `num_bytes`. The bytes are empty unless the outcome is `Found.WHOLE`."""
        into = ValueReceiver(num_bytes)
        outcome = await self.get(name, Span(0, num_bytes, num_bytes), into)
        return outcome, bytes(into.data) if outcome is Found.WHOLE else b""

    async def size(self, name: str) -> int | None:
        """Return the size of an object; None if it does not exist."""
        self._ledger.add(gets=1)
        head = await self._request("HEAD", name, NoReceiver())
        if head is not None and head.length is None:
            raise ResponseError("the response to HEAD has no content length")
        return None if head is None else head.length

    async def put(self, name: str, length: int, pieces: Pieces, *, only_new: bool = False) -> None:
        """Store an object.

        Args:
            length: total bytes of the pieces.
            pieces: creates the pieces of the object. Called once for each attempt.
            only_new: True to leave an existing object unchanged. A server without support for this condition
                replaces the object.
        """
        self._ledger.add(puts=1)
        headers = {"Content-Length": str(length)} | ({"If-None-Match": "*"} if only_new else {})
        try:
            done = await self._request("PUT", name, NoReceiver(), headers, pieces)
        except BucketError as error:
            if only_new and error.status in ("412", "409"):
                return
            if not only_new or error.status != "501":
                raise
            await self.put(name, length, pieces)
        else:
            if done is None:
                raise BucketError(NO_BUCKET, "404")

    async def delete(self, name: str) -> None:
        """Delete an object if it exists."""
        await self._request("DELETE", name, NoReceiver())

    def abort(self) -> None:
        """Abort the requests in progress. Thread: any."""
        self._aborted = True
        with contextlib.suppress(RuntimeError):  # it is closed
            self._loop.call_soon_threadsafe(self._cancel_all)

    def close(self) -> None:
        """Close all connections. Idempotent."""
        if self._loop.is_closed():
            return
        for connection in self._idle:
            connection.close()
        self._idle.clear()
        self._loop.run_until_complete(asyncio.sleep(0))  # for transports to close their sockets
        self._loop.close()

    # ---- inside

    async def _run(
        self, requests: list[Coroutine[Any, Any, None]], deadline: float, most_at_once: int
    ) -> None:
        gate = asyncio.Semaphore(most_at_once)

        async def run_gated(request: Coroutine[Any, Any, None]) -> None:
            async with gate:
                await request

        self._running = [self._loop.create_task(run_gated(request)) for request in requests]
        if self._aborted:
            self._cancel_all()
        _, late = await asyncio.wait(self._running, timeout=max(0.0, deadline - time.monotonic()))
        # Cancel until all tasks have ended: before Python 3.12 `asyncio.wait_for` may swallow a cancellation.
        while pending := [task for task in self._running if not task.done()]:
            self._cancel_all()
            await asyncio.wait(pending, timeout=_CANCEL_AGAIN_S)
        # Read every exception, because asyncio logs a traceback for each unread exception.
        errors = [
            ConnectionAbortedError("the tier is closed") if task.cancelled() else task.exception()
            for task in self._running
        ]
        if late:
            raise TimeoutError("deadline exceeded")
        for error in errors:
            if error is not None:
                raise error

    def _cancel_all(self) -> None:
        for task in self._running:
            task.cancel()

    async def _request(
        self,
        method: str,
        name: str,
        receiver: Receiver,
        headers: Mapping[str, str] | None = None,
        pieces: Pieces = tuple,
    ) -> Head | None:
        """Send a request; return the head of the response, or None if the object does not exist.

        Repeats the request once in two cases: the server reports an internal error, or the server refuses the
        credentials and the credentials file has new ones.
        """
        for may_repeat in (True, False):
            answer = _Answer(receiver)
            try:
                signed = await self._signer.sign(method, name)
                await self._exchange(method, signed, headers or {}, pieces, answer)
            except (TimeoutError, ServerError):
                raise
            except Exception as error:
                raise _without_secrets(error) from None
            head = answer.head
            if 200 <= head.status < 300:
                return head
            has_new_keys = head.status in _BAD_KEYS and may_repeat and self._signer.refresh(signed.version)
            if not (has_new_keys or head.status == _INTERNAL_ERROR):
                break
        code = answer.code or str(head.status)
        if head.status == 404 and code != NO_BUCKET:
            return None
        raise BucketError(code, str(head.status))

    async def _exchange(
        self, method: str, signed: Signed, headers: Mapping[str, str], pieces: Pieces, answer: _Answer
    ) -> None:
        """Send a request over an idle connection or a new one, and receive the response."""
        all_headers = {
            "Host": signed.host.authority,
            "User-Agent": "kvoffload",
            "Accept-Encoding": "identity",
        }
        all_headers |= headers
        lines = [
            f"{method} {signed.target} HTTP/1.1",
            *(f"{name}: {value}" for name, value in all_headers.items()),
        ]
        head = ("\r\n".join(lines) + "\r\n\r\n").encode("ascii")
        while True:
            connection = self._take_idle()
            is_new = connection is None
            if connection is None:
                connection = await signed.host.connect(CONNECT_S)
            try:
                await connection.request(head, pieces(), answer.accept, is_head=method == "HEAD")
            except OSError:
                # Servers close idle connections. Only the next request notices it.
                if is_new or connection.has_begun:
                    raise
                continue
            if connection.is_usable:
                self._idle.append(connection)
            return

    def _take_idle(self) -> HttpConnection | None:
        """Return an idle connection that is open and has received no unexpected bytes, or None."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_usable and connection.is_quiet:
                return connection
            connection.close()
        return None


class _Answer:
    """The response to a request: its head, and the code of an error."""

    head: Head

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._error = ValueReceiver(_ERROR_BYTES)

    def accept(self, head: Head) -> Receiver:
        self.head = head
        if not 200 <= head.status < 300:
            return self._error
        if isinstance(self._receiver, _SpanReceiver):
            return self._receiver.accept(head)
        return self._receiver

    @property
    def code(self) -> str:
        """S3 error code in the response's body; empty if the body has no code."""
        match = _CODE.search(self._error.data)
        return match[1].decode() if match is not None else ""


class ValueReceiver:
    """Receives a body of at most `most` bytes. `data` returns the bytes received so far."""

    def __init__(self, most: int) -> None:
        self._memory = memoryview(bytearray(most))
        self._fill = 0

    @property
    def data(self) -> memoryview:
        return self._memory[: self._fill]

    def room(self) -> memoryview:
        return self._memory[self._fill :]

    def add(self, count: int) -> None:
        self._fill += count


class _SpanReceiver:
    """Receives a span of an object, from a response with the span or with the whole object.

    Attributes:
        num_left: number of missing bytes of the span.
        num_received: number of received bytes, including bytes before the span.
        is_of_other_size: True if the object does not have the expected size.
    """

    def __init__(self, span: Span, receiver: Receiver) -> None:
        self._span, self._receiver = span, receiver
        self._num_skipped = self.num_received = 0
        self._skipping: memoryview | None = None
        self.num_left = span.end - span.begin
        self.is_of_other_size = False

    def accept(self, head: Head) -> Receiver:
        """Check the head of the response against the span; returns the receiver of the body."""
        span, content_range = self._span, head.headers.get("content-range")
        if head.headers.get("content-encoding", "").lower() not in _PLAIN:
            raise ResponseError("the object has a content encoding")
        self._num_skipped = 0
        if content_range is None:
            if head.status != 200:
                raise ResponseError("a partial response without a content range")
            self._num_skipped = span.begin
            self.is_of_other_size = head.length is not None and head.length != span.size
        else:
            match = _RANGE.fullmatch(content_range)
            if match is None:
                raise ResponseError("an invalid content range")
            begin, last, size = map(int, match.groups())
            self.is_of_other_size = size != span.size
            length = span.end - span.begin
            if not self.is_of_other_size and (
                (begin, last + 1) != (span.begin, span.end) or head.length not in (None, length)
            ):
                raise ResponseError("a range that was not requested")
        return NoReceiver() if self.is_of_other_size else self

    def room(self) -> memoryview:
        if self._num_skipped:
            if self._skipping is None:
                self._skipping = memoryview(bytearray(_SKIPPED_BYTES))
            return self._skipping[: self._num_skipped]
        return self._receiver.room()[: self.num_left]

    def add(self, count: int) -> None:
        self.num_received += count
        if self._num_skipped:
            self._num_skipped -= count
        else:
            self.num_left -= count
            self._receiver.add(count)


def _without_secrets(error: Exception) -> Exception:
    """Return an error that quotes no request or response, because these may contain signatures.

    A `CertificateError` contains only text of OpenSSL, and is returned unchanged.
    """
    if isinstance(error, CertificateError):
        return error
    causes = _CAUSE.findall(str(error)) if not isinstance(error, OSError) else []
    return ConnectionError(f"no usable response: {causes[-1] if causes else cause_of(error)}")
