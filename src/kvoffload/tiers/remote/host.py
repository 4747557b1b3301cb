"""The host of a bucket: its IP addresses, and connections to it.

Owns name resolution and TLS. Does not know what is sent over a connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import ssl
import threading
import time
from typing import Any
from urllib.parse import urlsplit

from kvoffload.tiers.remote.http import HttpConnection

_RENEW_S, _RETRY_S, _POLL_S = 60.0, 1.0, 0.005
_MOST_ADDRESSES = 16


class Host:
    """A host that accepts HTTP connections, with or without TLS.

    A thread resolves the name. The addresses are kept, and renewed in the background: only the first request
    waits for a name server, and not longer than its own deadline.

    Args:
        scheme: ``http`` or ``https``. authority: ``HOST`` or ``HOST:PORT``.

    Thread: any.
    """

    def __init__(self, scheme: str, authority: str) -> None:
        parts = urlsplit(f"{scheme}://{authority}")
        self.authority = authority
        self.host, self.port = parts.hostname or "", parts.port or (443 if scheme == "https" else 80)
        self._tls = ssl.create_default_context() if scheme == "https" else None
        self._lock = threading.Lock()
        self._is_resolving = False
        self._found: tuple[str, ...] = ()
        self._error: OSError | None = None
        self._renew_at = 0.0
        with contextlib.suppress(ValueError):
            self._found, self._renew_at = (str(ipaddress.ip_address(self.host)),), float("inf")

    async def connect(self, within_s: float) -> HttpConnection:
        """Connect to the first address that accepts. Addresses share the time; to find them takes its own.

        Raises: `OSError`.
        """
        addresses = await self._addresses()
        until = time.monotonic() + within_s
        error: OSError = ConnectionError("no address answers")
        for number, address in enumerate(addresses):
            share_s = (until - time.monotonic()) / (len(addresses) - number)
            try:
                return await asyncio.wait_for(self._connect(address), max(0.0, share_s))
            except asyncio.TimeoutError:
                error = ConnectionError(f"no connection within {within_s:g} s")
            except OSError as problem:
                error = problem
        self._renew_at = min(self._renew_at, time.monotonic() + _RETRY_S)
        raise error

    async def _connect(self, address: str) -> HttpConnection:
        secure: dict[str, Any] = {} if self._tls is None else {"ssl": self._tls, "server_hostname": self.host}
        loop = asyncio.get_running_loop()
        _, made = await loop.create_connection(HttpConnection, address, self.port, **secure)
        return made

    async def _addresses(self) -> tuple[str, ...]:
        if time.monotonic() >= self._renew_at:
            with self._lock:
                if not self._is_resolving:
                    self._is_resolving, self._error = True, None
                    threading.Thread(target=self._resolve, name="kvoffload-resolve", daemon=True).start()
        while not self._found:
            if self._error is not None:
                raise self._error
            await asyncio.sleep(_POLL_S)
        return self._found

    def _resolve(self) -> None:
        """Look up the addresses. Runs on its own thread, because a lookup cannot be interrupted."""
        try:
            found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
            self._found = tuple(dict.fromkeys(str(one[4][0]) for one in found))[:_MOST_ADDRESSES]
            self._renew_at = time.monotonic() + _RENEW_S
        except OSError as error:
            self._error = error
            self._renew_at = time.monotonic() + (_RETRY_S if self._found else 0.0)
        finally:
            with self._lock:
                self._is_resolving = False
