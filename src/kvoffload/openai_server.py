"""HTTP client of an OpenAI-compatible server: JSON, streamed answers, the list of models.

Owns address, API key, deadline and errors. Knows neither prompts nor answers.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from kvoffload.errors import ConfigError, KVOffloadError
from kvoffload.tiers.shared.printable import MASK, printable
from kvoffload.tiers.spec import redacted

_CHUNK_BYTES = 1 << 16
_MOST_BYTES = 64 << 20
"""Longest accepted reply, in bytes."""


class NoAnswerError(KVOffloadError):
    """A server that does not answer a request, or gives an unusable answer.

    Attributes:
        path: the request's path.
        why: the reason of the failure. The message has the address, the path and this reason.
        status: HTTP status of an error reply; None for any other problem.
    """

    def __init__(self, url: str, path: str, why: str, status: int | None = None) -> None:
        self.path, self.why, self.status = path, why, status
        super().__init__(f"{url}{path} {why}")


class OpenAIServer:
    """An OpenAI-compatible server. Each request has its own connection. Redirects are not followed.

    Args:
        url: ``http://HOST:PORT``, with or without ``/v1``.
        api_key: sent with every request, and never shown. Empty: no key is sent.
        timeout_s: limit of a whole reply, in seconds, and of each line of a streamed answer. If a server
            stops sending, a request may take up to three times as long.

    Attributes:
        url: the address without user, password and ``/v1``, for messages.

    Thread: any. Every method raises `NoAnswerError` if the server gives no usable answer.

    Raises: `ConfigError` if `url` has another form.
    """

    def __init__(self, url: str, *, api_key: str = "", timeout_s: float) -> None:
        self.url = str(redacted(url)).rstrip("/").removesuffix("/v1")
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError:
            host = None
        if not host or parts.scheme not in ("http", "https"):
            raise ConfigError("url", redacted(url), "allowed: http://HOST:PORT, https://HOST")
        is_secure = parts.scheme == "https"
        self._kind = http.client.HTTPSConnection if is_secure else http.client.HTTPConnection
        self._host, self._port, self._timeout_s = host, port, timeout_s
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self._api_key = api_key.strip()
        if not all("!" <= character <= "~" for character in self._api_key):
            raise ConfigError("OPENAI_API_KEY", MASK, "allowed: printable ASCII characters")

    def get(self, path: str, body: object = None) -> bytes:
        """Return the reply to a GET request or, with a body, to a POST request with this JSON body."""
        until = time.monotonic() + self._timeout_s
        with self._response(path, body) as response:
            chunks, num_bytes = list[bytes](), 0
            # `read1` returns the bytes that have arrived: a slow server cannot extend the deadline.
            while chunk := response.read1(_CHUNK_BYTES):
                chunks.append(chunk)
                num_bytes += len(chunk)
                if num_bytes > _MOST_BYTES:
                    raise NoAnswerError(self.url, path, f"answers with more than {_MOST_BYTES >> 20} MiB")
                if time.monotonic() > until:
                    raise TimeoutError
            if response.length:
                raise http.client.IncompleteRead(b"", response.length)
        return b"".join(chunks)

    def json(self, path: str, body: object = None) -> Any:
        """Return the reply of `get`, parsed."""
        return self.parsed(path, self.get(path, body))

    def parsed(self, path: str, content: bytes) -> Any:
        """Parse JSON from the reply of this path. An empty reply counts as ``{}``."""
        try:
            return json.loads(content or b"{}")
        except (ValueError, RecursionError):
            why = f"did not answer with JSON: '{self._printable(content)}'"
            raise NoAnswerError(self.url, path, why) from None

    def lines(self, path: str, body: object) -> Iterator[bytes]:
        """Yield the lines of the streamed reply to a POST request, when they arrive."""
        with self._response(path, body) as response:
            yield from response

    def choose(self, model: str | None) -> tuple[str, int | None]:
        """Return a served model's name, and its longest context in tokens (None if unknown).

        Args:
            model: name of a model; None for the server's first model.

        Raises: `ConfigError` if the server does not have the model.
        """
        path = "/v1/models"
        try:
            rows = {str(row["id"]): row for row in self.json(path)["data"]}
        except (TypeError, KeyError):
            rows = {}
        if not rows:
            raise NoAnswerError(self.url, path, "lists no model")
        name = next(iter(rows)) if model is None else model
        if name not in rows:
            raise ConfigError("model", name, f"allowed: {', '.join(map(printable, rows))}")
        longest = rows[name].get("max_model_len")
        return name, longest if type(longest) is int and longest > 0 else None

    @contextmanager
    def _response(self, path: str, body: object) -> Iterator[http.client.HTTPResponse]:
        """Send a request and yield the response.

        Raises: `NoAnswerError` if the status is not 2xx, and for every failure until the context ends.
        """
        headers = {"Content-Type": "application/json"}
        if self._api_key:
            headers["Authorization"] = f"Bearer {self._api_key}"
        method, data = ("GET", None) if body is None else ("POST", json.dumps(body).encode())
        connection = self._kind(self._host, self._port, timeout=self._timeout_s)
        try:
            connection.request(method, self._path + path, data, headers)
            with connection.getresponse() as response:
                if response.status // 100 != 2:
                    why = f"answers HTTP {response.status}: {self._printable(response.read1(_CHUNK_BYTES))}"
                    raise NoAnswerError(self.url, path, why, response.status)
                yield response
        except TimeoutError:
            why = f"does not answer in {self._timeout_s:g} s"
            raise NoAnswerError(self.url, path, why) from None
        except (OSError, ValueError, http.client.HTTPException) as error:
            # ValueError: a host or key with characters that HTTP does not allow.
            reason = getattr(error, "strerror", None) or self._printable(error) or type(error).__name__
            raise NoAnswerError(self.url, path, f"does not answer: {reason}") from None
        finally:
            connection.close()

    def _printable(self, text: object) -> str:
        return printable(text, self._api_key)
