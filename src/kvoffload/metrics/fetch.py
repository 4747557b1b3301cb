"""Downloads a server's metrics, with one deadline for the whole reply."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from http.client import HTTPException, IncompleteRead
from typing import Any
from urllib.parse import urlsplit

from kvoffload.errors import ConfigError, UnavailableError
from kvoffload.tiers.spec import redacted

MAX_BYTES = 32 << 20
"""Longest accepted reply, in bytes. The metrics of an engine have about 100 KiB."""
_CHUNK_BYTES = 1 << 16


def metrics_url(address: str, *, field: str = "url") -> str:
    """Complete an address: ``HOST:PORT``, ``http://HOST:PORT`` and ``.../v1`` become ``.../metrics``.

    Raises: `ConfigError` for anything but an HTTP address.
    """
    try:
        parts = urlsplit(address if "://" in address else f"http://{address}")
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_address = False
    if not is_address or parts.username is not None:
        why = "allowed: an HTTP address without user name and password, such as http://localhost:8000/metrics"
        raise ConfigError(field, redacted(address), why)
    path = parts.path.rstrip("/")
    if not path or path.endswith("/v1"):
        path = path.removesuffix("/v1") + "/metrics"
    return parts._replace(path=path).geturl()


def fetch(address: str, timeout_s: float, *, field: str = "url") -> str:
    """Return the metrics text of a server.

    Args:
        address: see `metrics_url`.
        timeout_s: time limit for the whole reply, in seconds. If the server stops sending in the middle of
            the reply, the call may take up to twice this time.
        field: name of the option that contains the address. Error messages mention this name.

    Raises: `UnavailableError` if the server does not send a complete reply of at most `MAX_BYTES`;
    `ConfigError` if the address is not an HTTP address.
    """
    url, until = metrics_url(address, field=field), time.monotonic() + timeout_s
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as response:
            return _read(response, until).decode(errors="replace")
    except urllib.error.HTTPError as error:
        why = f"the server answers HTTP {error.code} {error.reason}"
    except IncompleteRead:
        why = "the server's answer is incomplete"
    except TimeoutError:
        why = f"no complete answer in {timeout_s:g} s"
    except (OSError, ValueError, HTTPException) as error:  # HTTPException: not HTTP
        reason = getattr(error, "reason", error)
        why = f"no answer ({getattr(reason, 'strerror', None) or str(reason) or type(error).__name__})"
    raise UnavailableError(field, url, why)


def _read(response: Any, until: float) -> bytes:
    parts, num_bytes = [], 0
    # `read1` returns the bytes that have arrived: a slow server cannot prolong the wait byte by byte.
    while part := response.read1(_CHUNK_BYTES):
        parts.append(part)
        num_bytes += len(part)
        if num_bytes > MAX_BYTES:
            raise ValueError(f"more than {MAX_BYTES:,} bytes: these are no metrics")
        if time.monotonic() > until:
            raise TimeoutError
    expected = response.headers.get("Content-Length", "")
    if expected.isdecimal() and num_bytes < int(expected):
        raise IncompleteRead(b"".join(parts), int(expected) - num_bytes)
    return b"".join(parts)
