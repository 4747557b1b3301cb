"""A bucket: one client of an object store that speaks S3, on one thread.

Owns requests and what they cost. Does not know what an object means, and never tries again: after a failure
the client is thrown away, with its connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvoffload.tiers.remote.resp import ServerError

_SIDE_BY_SIDE = 16
"""Requests of one client at a time."""
_STATUS = re.compile(r"status code: (\d+)")
_CODE = re.compile(r"<Code>(\w{1,60})</Code>")
_CAUSE = re.compile(
    r"[A-Z][a-z ]+ \(os error \d+\)|dns error|invalid peer certificate: \w+|operation timed out"
)
_NO_RANGES = "Received non-partial response when range requested"
NO_BUCKET = "NoSuchBucket"

Bytes = npt.NDArray[np.uint8]


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


class _NoRangesError(Exception):
    """The server has answered with a whole object where a part was asked for."""


class Bucket:
    """A client of one bucket, for one thread, as a `Line` holds it.

    Its requests are coroutines that `run` runs. They raise `BucketError` for what the server answers, and
    `OSError` for what does not arrive; no text of either has a secret or the address of an object. Bytes are
    received into memory of the client, and are never its caller's: what arrives too late is nobody's.

    Args:
        store: of obstore, which tries once.
        ledger: counts its requests.
    """

    has_received = True
    """A failed request is not made again."""
    is_in_step = True

    def __init__(self, store: Any, ledger: Ledger) -> None:
        import obstore

        self._store, self._ledger, self._library = store, ledger, obstore
        self._loop = asyncio.new_event_loop()
        self._running: list[asyncio.Task[None]] = []
        self._aborted = False

    def run(self, requests: Iterable[Coroutine[Any, Any, None]], deadline: float) -> None:
        """Run these side by side until all have ended, or the deadline has come; then the others are given
        up.

        Raises: `TimeoutError`, or the first error of one; the others have ended all the same.
        """
        given = [*requests]
        try:
            if given:
                self._loop.run_until_complete(self._run(given, deadline))
        finally:
            for request in given:
                request.close()

    async def get(self, name: str, span: tuple[int, int] | None = None) -> tuple[Bytes, int] | None:
        """The bytes of an object, or of a span of it, and how long it is; None if there is none."""
        options: Any = {} if span is None else {"range": span}
        self._ledger.add(gets=1)

        async def received() -> tuple[Bytes, int]:
            found = await self._library.get_async(self._store, name, options=options)
            data = np.frombuffer(memoryview(await found.bytes_async()), np.uint8)
            return data, int(found.meta["size"])

        answer: tuple[Bytes, int] | None
        try:
            answer = await self._said(received)
        except _NoRangesError:
            answer = await self.get(name)
            return None if answer is None or span is None else (answer[0][slice(*span)], answer[1])
        if answer is not None:
            self._ledger.add(bytes_received=len(answer[0]))
        return answer

    async def size(self, name: str) -> int | None:
        """How long an object is; None if there is none."""
        self._ledger.add(gets=1)
        found = await self._said(lambda: self._library.head_async(self._store, name))
        return None if found is None else int(found["size"])

    async def put(self, name: str, data: bytes | Bytes, *, only_new: bool = False) -> None:
        """Store an object; with `only_new` not if there is one, where the server can be asked for that."""
        self._ledger.add(puts=1)
        mode: Any = "create" if only_new else "overwrite"
        try:
            done = await self._said(
                lambda: self._library.put_async(self._store, name, data, mode=mode, use_multipart=False)
            )
        except BucketError as error:
            if not only_new or error.status != "501":
                raise
            await self.put(name, data)
        else:
            if done is None:
                raise BucketError(NO_BUCKET, "404")

    async def delete(self, name: str) -> None:
        """Delete an object, if there is one."""
        await self._said(lambda: self._library.delete_async(self._store, name))

    def abort(self) -> None:
        """Give up what is under way, from another thread."""
        self._aborted = True
        with contextlib.suppress(RuntimeError):  # it is closed
            self._loop.call_soon_threadsafe(self._give_up)

    def close(self) -> None:
        """Throw the client away. Idempotent."""
        self._loop.close()
        self._store = None

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
        self._give_up()
        await asyncio.gather(*self._running, return_exceptions=True)
        if late:
            raise TimeoutError("its time was up")
        for task in self._running:
            if task.cancelled():
                raise ConnectionAbortedError("the tier is closed")
            if (error := task.exception()) is not None:
                raise error

    def _give_up(self) -> None:
        for task in self._running:
            task.cancel()

    async def _said(self, ask: Callable[[], Any]) -> Any:
        """The answer; None for what is not there, or was there already."""
        errors = self._library.exceptions
        try:
            return await ask()
        except errors.AlreadyExistsError:
            return False
        except FileNotFoundError as error:
            if NO_BUCKET in str(error):
                raise BucketError(NO_BUCKET, "404") from None
            return None
        except (errors.BaseError, OSError, ValueError) as error:
            raise _without_secrets(error) from None


def _without_secrets(error: Exception) -> Exception:
    """What may be said of an error: codes of the server, and the cause of a failure. What the library says
    quotes requests and answers, and those have what they were signed with."""
    text = str(error)
    if _NO_RANGES in text:
        return _NoRangesError()
    status, code = _STATUS.search(text), _CODE.search(text)
    if status is not None:
        return BucketError(code[1] if code is not None else status[1], status[1])
    causes = _CAUSE.findall(text)
    return ConnectionError(f"no answer that could be used: {causes[-1] if causes else type(error).__name__}")
