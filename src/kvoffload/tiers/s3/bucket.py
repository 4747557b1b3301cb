"""A client of an object store that speaks S3, on one thread.

Owns requests, their outcomes and what they cost. Does not know what an object means. Repeats a request only
if its keys have just been replaced, or an idle connection had been closed; after any other failure the client
is thrown away, with its connections.
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
    Nothing,
    Receiver,
    ResponseError,
    cause_of,
)
from kvoffload.tiers.s3.signing import Signed, Signer
from kvoffload.tiers.shared.connection import CONNECT_S
from kvoffload.tiers.valkey.resp import ServerError

_SIDE_BY_SIDE = 16
"""Requests of one client at a time."""
_CANCEL_AGAIN_S = 0.01
_ERROR_BYTES = 16 << 10
"""Read of an error's body, at most."""
_SKIPPED_BYTES = 64 << 10
_CODE = re.compile(rb"<Code>([A-Za-z0-9_.]{1,60})</Code>")
_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})", re.ASCII)
_PLAIN = {"", "identity", "aws-chunked"}
_CAUSE = re.compile(
    r"[A-Z][a-z ]+ \(os error \d+\)|dns error|invalid peer certificate: \w+|operation timed out"
)
_BAD_KEYS = {401, 403}
NO_BUCKET = "NoSuchBucket"

Bytes: TypeAlias = npt.NDArray[np.uint8]
Pieces: TypeAlias = Callable[[], Iterable[Buffer]]
"""Makes the body of a request."""


@dataclass(frozen=True)
class Prices:
    """What requests and bytes cost, in any currency.

    Attributes:
        per_1000_puts, per_1000_gets: of requests that store, and of others; deleting is free.
        per_gb_read: of bytes received.
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
        """What it comes to."""
        requests = self.puts * self.prices.per_1000_puts + self.gets * self.prices.per_1000_gets
        return requests / 1e3 + self.bytes_received * self.prices.per_gb_read / 1e9


class BucketError(ServerError):
    """What a server answers instead of what it was asked for.

    Attributes:
        code: of S3: ``NoSuchBucket``; where it says none, as `status`. status: of HTTP.
    """

    def __init__(self, code: str, status: str) -> None:
        super().__init__(f"{code} (status {status})")
        self.status = status


class Found(enum.Enum):
    """Outcome of reading an object.

    `OTHER_SIZE`: an object of another size than expected; no byte of it was received.
    """

    WHOLE = enum.auto()
    ABSENT = enum.auto()
    OTHER_SIZE = enum.auto()


class Span(NamedTuple):
    """A part of an object: bytes `begin` to `end`, of the `size` bytes that the object must have."""

    begin: int
    end: int
    size: int


class Bucket:
    """A client of one bucket, for one thread, as a `Line` holds it.

    `run` runs its requests, which are coroutines. They raise `BucketError` for an error of the server, and
    `OSError` for a response that does not arrive or breaks the protocol; neither text has a secret, the
    address of an object, or text of the server other than an error code. Memory is bounded by what a caller
    expects, not by what a server says or sends: an object of another size is refused by its headers, a
    response that goes on longer is cut off, and of an error 16 KiB are read. Redirections are not followed.

    Args:
        signer: signs requests; shared by clients.
        ledger: counts requests; shared by clients.
    """

    is_in_step = True

    def __init__(self, signer: Signer, ledger: Ledger) -> None:
        self._signer, self._ledger = signer, ledger
        self._loop = asyncio.new_event_loop()
        self._idle: list[HttpConnection] = []
        self._running: list[asyncio.Task[None]] = []
        self._aborted = False

    @property
    def has_received(self) -> bool:
        """True: a line does not repeat a batch that failed. A request is repeated here, where that helps."""
        return True

    @has_received.setter
    def has_received(self, value: bool) -> None:
        pass

    def run(self, requests: Iterable[Coroutine[Any, Any, None]], deadline: float) -> None:
        """Run these side by side until all have ended, or the deadline has come; then the others are given
        up.

        Raises: `TimeoutError`, or the first error of one; the others have ended all the same.
        """
        given = [*requests]
        try:
            if given:
                self._signer.refresh()
                self._loop.run_until_complete(self._run(given, deadline))
        finally:
            for request in given:
                request.close()

    async def get(self, name: str, span: Span, receiver: Receiver) -> Found:
        """Read a part of an object into `receiver`, if the object has the size that is expected.

        Raises: `ResponseError` for a response that is shorter than it says, or about another part. What has
        been received until then was in its place.
        """
        self._ledger.add(gets=1)
        part = _Part(span, receiver)
        headers = {"Range": f"bytes={span.begin}-{span.end - 1}"}
        try:
            if await self._ask("GET", name, part, headers) is None:
                return Found.ABSENT
        except BucketError as error:
            if error.status != "416":
                raise
            return Found.OTHER_SIZE
        finally:
            self._ledger.add(bytes_received=part.num_received)
        if part.is_of_other_size:
            return Found.OTHER_SIZE
        if part.num_left:
            raise ResponseError("the response is shorter than the part that was asked for")
        return Found.WHOLE

    async def value(self, name: str, num_bytes: int) -> tuple[Found, bytes]:
        """Read a small object, of which the size is known."""
        into = _Value(num_bytes)
        found = await self.get(name, Span(0, num_bytes, num_bytes), into)
        return found, bytes(into.data) if found is Found.WHOLE else b""

    async def size(self, name: str) -> int | None:
        """How long an object is; None if there is none."""
        self._ledger.add(gets=1)
        head = await self._ask("HEAD", name, Nothing())
        if head is not None and head.length is None:
            raise ResponseError("the response does not say how long the object is")
        return None if head is None else head.length

    async def put(self, name: str, length: int, pieces: Pieces, *, only_new: bool = False) -> None:
        """Store an object; with `only_new` not if there is one, where the server can be asked for that.

        Args:
            length: of all pieces together.
            pieces: makes the pieces, anew for each attempt.
        """
        self._ledger.add(puts=1)
        headers = {"Content-Length": str(length)} | ({"If-None-Match": "*"} if only_new else {})
        try:
            done = await self._ask("PUT", name, Nothing(), headers, pieces)
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
        """Delete an object, if there is one."""
        await self._ask("DELETE", name, Nothing())

    def abort(self) -> None:
        """Give up what is under way, from another thread."""
        self._aborted = True
        with contextlib.suppress(RuntimeError):  # it is closed
            self._loop.call_soon_threadsafe(self._give_up)

    def close(self) -> None:
        """Throw the client away. Idempotent."""
        if self._loop.is_closed():
            return
        for connection in self._idle:
            connection.close()
        self._idle.clear()
        self._loop.run_until_complete(asyncio.sleep(0))  # for transports to close their sockets
        self._loop.close()

    # ---- inside

    async def _run(self, requests: list[Coroutine[Any, Any, None]], deadline: float) -> None:
        gate = asyncio.Semaphore(_SIDE_BY_SIDE)

        async def one(request: Coroutine[Any, Any, None]) -> None:
            async with gate:
                await request

        self._running = [self._loop.create_task(one(request)) for request in requests]
        if self._aborted:
            self._give_up()
        _, late = await asyncio.wait(self._running, timeout=max(0.0, deadline - time.monotonic()))
        # Before Python 3.12 `asyncio.wait_for` may swallow a cancellation: cancel until all have ended.
        while pending := [task for task in self._running if not task.done()]:
            self._give_up()
            await asyncio.wait(pending, timeout=_CANCEL_AGAIN_S)
        # Read every exception: asyncio logs a traceback for each one that nobody has read.
        errors = [
            ConnectionAbortedError("the tier is closed") if task.cancelled() else task.exception()
            for task in self._running
        ]
        if late:
            raise TimeoutError("deadline exceeded")
        for error in errors:
            if error is not None:
                raise error

    def _give_up(self) -> None:
        for task in self._running:
            task.cancel()

    async def _ask(
        self,
        method: str,
        name: str,
        receiver: Receiver,
        headers: Mapping[str, str] | None = None,
        pieces: Pieces = tuple,
    ) -> Head | None:
        """Make a request; returns the head of the response, or None for an object that is not there."""
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
            if head.status not in _BAD_KEYS or not (may_repeat and self._signer.refresh(signed.version)):
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
            connection = self._taken()
            is_new = connection is None
            if connection is None:
                connection = await signed.host.connect(CONNECT_S)
            try:
                await connection.request(head, pieces(), answer.accept, is_head=method == "HEAD")
            except OSError:
                # Servers close connections that were idle; one finds out when one sends.
                if is_new or connection.has_begun:
                    raise
                continue
            if connection.is_usable:
                self._idle.append(connection)
            return

    def _taken(self) -> HttpConnection | None:
        """An idle connection that nothing has happened to."""
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
        self._error = _Value(_ERROR_BYTES)

    def accept(self, head: Head) -> Receiver:
        self.head = head
        if not 200 <= head.status < 300:
            return self._error
        if isinstance(self._receiver, _Part):
            return self._receiver.accept(head)
        return self._receiver

    @property
    def code(self) -> str:
        """The server's code for the error; empty if there is none."""
        found = _CODE.search(self._error.data)
        return found[1].decode() if found is not None else ""


class _Value:
    """Receives a few bytes, `most` at most."""

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


class _Part:
    """Receives a part of an object, out of a response with that part or with the whole object.

    Attributes:
        num_left: bytes that have not come. num_received: bytes that have.
        is_of_other_size: the object has another size than expected.
    """

    def __init__(self, span: Span, receiver: Receiver) -> None:
        self._span, self._receiver = span, receiver
        self._num_skipped = self.num_received = 0
        self._skipping: memoryview | None = None
        self.num_left = span.end - span.begin
        self.is_of_other_size = False

    def accept(self, head: Head) -> Receiver:
        """Check the head against the request."""
        span, content_range = self._span, head.headers.get("content-range")
        if head.headers.get("content-encoding", "").lower() not in _PLAIN:
            raise ResponseError("the object comes in an encoding")
        self._num_skipped = 0
        if content_range is None:
            if head.status != 200:
                raise ResponseError("a part without its place")
            self._num_skipped = span.begin
            self.is_of_other_size = head.length is not None and head.length != span.size
        else:
            found = _RANGE.fullmatch(content_range)
            if found is None:
                raise ResponseError("a part without its place")
            begin, last, size = map(int, found.groups())
            self.is_of_other_size = size != span.size
            length = span.end - span.begin
            if not self.is_of_other_size and (
                (begin, last + 1) != (span.begin, span.end) or head.length not in (None, length)
            ):
                raise ResponseError("another part than was asked for")
        return Nothing() if self.is_of_other_size else self

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
    """A failure, without what obstore quotes of requests and responses: those are signed."""
    causes = _CAUSE.findall(str(error)) if not isinstance(error, OSError) else []
    return ConnectionError(f"no answer that could be used: {causes[-1] if causes else cause_of(error)}")
