"""Signed addresses of objects in a bucket. The credentials may change while an engine runs.

Owns the credentials in use. obstore computes the signatures. This needs no network, with one exception: for
the credentials of a machine's role, obstore sends requests.
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
"""Lifetime of a signature. In addition, Amazon tolerates a clock that differs by up to 15 minutes."""

Keys = dict[str, str]


class Signed(NamedTuple):
    """The signed address of a request.

    Attributes:
        target: path and query of the request line; the query contains the signature.
        version: version of the signing keys; increases with each change of the keys.
    """

    host: Host
    target: str
    version: int


async def _on_a_thread(call: Callable[[], str]) -> str:
    """Run `call`, which may wait for the network, on a daemon thread, so that a deadline can abandon it.

    obstore's `sign_async` is not used: of 25 processes that called it shortly before they ended, 2 crashed.
    """
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[str] = loop.create_future()

    def finish(url: str, error: Exception | None) -> None:
        if not outcome.done():
            outcome.set_exception(error) if error is not None else outcome.set_result(url)

    def run() -> None:
        url, error = "", None
        try:
            url = call()
        except Exception as problem:
            error = problem
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(finish, url, error)

    threading.Thread(target=run, name="kvoffload-sign", daemon=True).start()
    return await outcome


class Signer:
    """Signs requests with the current credentials, and updates them from the credentials file. Thread: any.

    Args:
        make_store: creates an obstore store with the given credentials. If they are empty, obstore takes
            credentials from the environment or from the machine's role.
        read_keys: reads the credentials in `file`, or raises `ConfigError`; None if there is no file.
        file: path of the credentials file, or empty. `refresh` reads the file again after a change.
    """

    def __init__(
        self, make_store: Callable[[Keys], Any], read_keys: Callable[[], Keys] | None = None, file: str = ""
    ) -> None:
        import obstore

        self._library, self._make_store, self._read_keys, self._file = obstore, make_store, read_keys, file
        self._lock = threading.Lock()
        self._log = RateLimitedLog("kvoffload.remote")
        self._hosts: dict[tuple[str, str], Host] = {}
        self._stamp, self._version = self._file_stamp(), 0
        self._keys = read_keys() if read_keys is not None else {}
        self._store = make_store(self._keys)
        # With known keys a signature is arithmetic. The keys of a role are fetched over the network.
        self._knows_keys = bool(self._keys) or "AWS_ACCESS_KEY_ID" in os.environ

    async def sign(self, method: str, name: str) -> Signed:
        """Sign a request for the object `name`. Raises obstore's exception if there are no keys."""
        version = self._version
        store = self._store

        def signed() -> str:
            url: str = self._library.sign(store, method, name, _VALID)
            return url

        url = signed() if self._knows_keys else await _on_a_thread(signed)
        parts = urlsplit(url)
        host = self._hosts.get((parts.scheme, parts.netloc))
        if host is None:
            host = self._hosts[parts.scheme, parts.netloc] = Host(parts.scheme, parts.netloc)
        return Signed(host, f"{parts.path}?{parts.query}", version)

    def refresh(self, refused: int | None = None) -> bool:
        """Read the key file again if the file has changed, or if the server has refused the present keys.

        Args:
            refused: version of the refused keys, or None.

        Returns: True if the keys have changed since version `refused`. While the file has no keys, for
            example during a rewrite, the present keys stay.
        """
        if self._read_keys is None:
            return False
        with self._lock:
            stamp = self._file_stamp()
            if stamp != self._stamp or refused == self._version:
                self._read(self._read_keys, stamp)
            return refused is not None and refused != self._version

    def _read(self, read_keys: Callable[[], Keys], stamp: tuple[int, ...]) -> None:
        try:
            keys = read_keys()
        except ConfigError as error:
            self._log.warn("keys", "tier s3: the previous keys stay in use: %s", error)
            return
        self._stamp = stamp
        if keys != self._keys:
            self._keys, self._store = keys, self._make_store(keys)
            self._version += 1

    def _file_stamp(self) -> tuple[int, ...]:
        """Return a value that changes with the file's content or link; empty if there is no file."""
        try:
            status = os.stat(self._file) if self._file else None
        except OSError:
            status = None
        return (status.st_mtime_ns, status.st_size, status.st_ino) if status is not None else ()
