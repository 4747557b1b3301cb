"""The host of a bucket, and connections to it, with or without TLS. Does not know requests."""

from __future__ import annotations

import asyncio
import ssl
import time
from typing import Any
from urllib.parse import urlsplit

from kvoffload.tiers.s3.http import HttpConnection
from kvoffload.tiers.shared.addresses import Addresses, SocketAddress

_POLL_S = 0.005


class Host:
    """A host that accepts HTTP connections, with or without TLS.

    The first connection waits until the host name is resolved. Later connections use the cached addresses
    without waiting.

    Args:
        scheme: ``http`` or ``https``.
        authority: ``HOST`` or ``HOST:PORT``.
        addresses: resolves names; for tests.

    Thread: any.
    """

    def __init__(self, scheme: str, authority: str, addresses: Addresses | None = None) -> None:
        parts = urlsplit(f"{scheme}://{authority}")
        self.authority = authority
        self.host, self.port = parts.hostname or "", parts.port or (443 if scheme == "https" else 80)
        self._tls = ssl.create_default_context() if scheme == "https" else None
        self._addresses = addresses or Addresses()

    async def connect(self, within_s: float) -> HttpConnection:
        """Try the host's addresses one after the other, and connect to the first that accepts.

        Args:
            within_s: time limit in seconds for all addresses together. Name resolution is not included.

        Raises: `OSError` if the name cannot be resolved, or no address accepts in time.
        """
        while not (addresses := self._addresses.known(self.host, self.port)):
            await asyncio.sleep(_POLL_S)
        until = time.monotonic() + within_s
        error: OSError = ConnectionError("no address accepts connections")
        for number, address in enumerate(addresses):
            share_s = (until - time.monotonic()) / (len(addresses) - number)
            try:
                return await asyncio.wait_for(self._connect(address), max(0.0, share_s))
            except asyncio.TimeoutError:
                error = ConnectionError(f"no connection within {within_s:g} s")
            except OSError as problem:
                error = problem
        self._addresses.renew(self.host, self.port)
        raise error

    async def _connect(self, address: SocketAddress) -> HttpConnection:
        secure: dict[str, Any] = {} if self._tls is None else {"ssl": self._tls, "server_hostname": self.host}
        loop = asyncio.get_running_loop()
        _, (host, port, *_) = address
        _, made = await loop.create_connection(HttpConnection, host, port, **secure)
        return made
