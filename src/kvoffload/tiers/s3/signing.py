"""Signed addresses of objects in a bucket, and keys that change while an engine runs.

Owns the credentials in use. Makes no requests: obstore computes signatures, and finds the keys of a machine's
role.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from kvoffload.errors import ConfigError
from kvoffload.tiers.rate_limited_log import RateLimitedLog
from kvoffload.tiers.s3.host import Host

_VALID = timedelta(minutes=15)
"""Lifetime of a signature; Amazon accepts clocks that differ by as much."""

Keys = dict[str, str]


class Signed(NamedTuple):
    """A request's address.

    Attributes:
        target: path and query of the request line; the query has the signature.
        version: of the keys that signed it.
    """

    host: Host
    target: str
    version: int


async def _on_a_thread(do: Callable[[], str]) -> str:
    """Run a call that may wait for the network on a daemon thread, so that a deadline can abandon it.

    Not `sign_async` of obstore: 2 of 25 processes that ended just after it were aborted.
    """
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[str] = loop.create_future()

    def finish(url: str, error: Exception | None) -> None:
        if not outcome.done():
            outcome.set_exception(error) if error is not None else outcome.set_result(url)

    def run() -> None:
        url, error = "", None
        try:
            url = do()
        except Exception as problem:
            error = problem
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(finish, url, error)

    threading.Thread(target=run, name="kvoffload-sign", daemon=True).start()
    return await outcome


class Signer:
    """Signs requests with the present keys. Thread: any.

    Args:
        make_store: makes a store of obstore with these keys; without keys, obstore detects them.
        read_keys: reads the keys of a file; raises `ConfigError` if it has none. None: there is no file.
        file: its path; the file is read again when it has changed.
    """

    def __init__(
        self, make_store: Callable[[Keys], Any], read_keys: Callable[[], Keys] | None = None, file: str = ""
    ) -> None:
        import obstore

        self._library, self._make_store, self._read_keys, self._file = obstore, make_store, read_keys, file
        self._lock = threading.Lock()
        self._log = RateLimitedLog("kvoffload.remote")
        self._hosts: dict[tuple[str, str], Host] = {}
        self._stamp, self._version = self._stamped(), 0
        self._keys = read_keys() if read_keys is not None else {}
        self._store = make_store(self._keys)
        # With keys at hand a signature is arithmetic. Those of a role are asked for, over the network.
        self._is_at_hand = bool(self._keys) or "AWS_ACCESS_KEY_ID" in os.environ

    async def sign(self, method: str, name: str) -> Signed:
        """Sign a request. Raises what obstore raises where it finds no keys."""
        version = self._version
        store = self._store

        def signed() -> str:
            url: str = self._library.sign(store, method, name, _VALID)
            return url

        url = signed() if self._is_at_hand else await _on_a_thread(signed)
        parts = urlsplit(url)
        host = self._hosts.get((parts.scheme, parts.netloc))
        if host is None:
            host = self._hosts[parts.scheme, parts.netloc] = Host(parts.scheme, parts.netloc)
        return Signed(host, f"{parts.path}?{parts.query}", version)

    def refresh(self, refused: int | None = None) -> bool:
        """Read the file of the keys again, if it has changed since, or the server has refused its keys.

        Args:
            refused: version of the keys that were refused.

        Returns: whether the keys are others than those. A file without keys, for example one that is being
        written, changes nothing.
        """
        if self._read_keys is None:
            return False
        with self._lock:
            stamp = self._stamped()
            if stamp != self._stamp or refused == self._version:
                self._read(self._read_keys, stamp)
            return refused is not None and refused != self._version

    def _read(self, read_keys: Callable[[], Keys], stamp: tuple[int, ...]) -> None:
        try:
            keys = read_keys()
        except ConfigError as error:
            self._log.warn("keys", "tier s3: the keys that were read before are kept: %s", error)
            return
        self._stamp = stamp
        if keys != self._keys:
            self._keys, self._store = keys, self._make_store(keys)
            self._version += 1

    def _stamped(self) -> tuple[int, ...]:
        """Return a value that changes with the file or the link to it."""
        try:
            status = os.stat(self._file) if self._file else None
        except OSError:
            status = None
        return (status.st_mtime_ns, status.st_size, status.st_ino) if status is not None else ()
