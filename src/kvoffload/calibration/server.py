"""How fast a running server computes prompts and generates: the OpenAI-compatible API of vLLM and its like.

Sends random prompts of several lengths, alone, streamed, and takes the time to the first token. Knows HTTP;
what the times mean is for `fit`.
"""

from __future__ import annotations

import http.client
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import msgspec

from kvoffload.calibration.fit import fit_prefill
from kvoffload.calibration.samples import measured
from kvoffload.errors import ConfigError
from kvoffload.simulate.machine import Quantity
from kvoffload.tiers.spec import redacted

LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
"""Tokens of the prompts that are tried, as far as the model takes them."""

_ANSWER_TOKENS = 32
_TIMEOUT_S = 300.0
_TOKEN_IDS = (100, 1000)
"""Ids that every vocabulary has."""


@dataclass(frozen=True)
class Answer:
    """One streamed answer: seconds to its first token, and for each further one; 0 if there was none."""

    first_s: float
    further_s: float


class Server:
    """An OpenAI-compatible server.

    Args:
        url: ``http://HOST:PORT``, with or without ``/v1``.
        model: the name that it serves; None asks, and takes the first.

    A key for it is read from ``OPENAI_API_KEY``, and never shown. Raises: `ConfigError` for the field ``url``
    if it does not answer, or not as such a server does.
    """

    def __init__(self, url: str, model: str | None = None) -> None:
        self._shown = redacted(url)
        parts = urlsplit(url)
        try:
            host, port = parts.hostname, parts.port
        except ValueError:
            host, port = None, None
        if parts.scheme not in ("http", "https") or not host:
            raise ConfigError("url", self._shown, "allowed: http://HOST:PORT, https://HOST")
        self._secure, self._host, self._port = parts.scheme == "https", host, port
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        listed = self._json("GET", "/v1/models").get("data") or [{}]
        served = next((one for one in listed if model in (None, one.get("id"))), None)
        if served is None:
            names = ", ".join(str(one.get("id")) for one in listed)
            raise ConfigError("model", model, f"the server has: {names}")
        self.model = str(served.get("id"))
        longest = served.get("max_model_len")
        self.max_tokens: int | None = longest if isinstance(longest, int) else None

    def ask(self, tokens: Sequence[int]) -> Answer:
        """Send a prompt of these ids; how long its answer took."""
        body = {
            "model": self.model,
            "prompt": list(tokens),
            "max_tokens": _ANSWER_TOKENS,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
        }
        began = time.perf_counter()
        times = [time.perf_counter() for _ in self._events(body)]
        if not times:
            raise ConfigError("url", self._shown, "allowed: a server that streams; its answer had no token")
        further = (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else 0.0
        return Answer(times[0] - began, further)

    def _events(self, body: dict[str, Any]) -> Iterator[None]:
        """One for each piece of a streamed answer that has text, or ends it."""
        with closing(self._connect()) as connection:
            response = self._request(connection, "POST", "/v1/completions", msgspec.json.encode(body))
            try:
                for line in response:
                    data = line.strip().removeprefix(b"data:").strip()
                    if data and data != b"[DONE]" and line.startswith(b"data:"):
                        piece = msgspec.json.decode(data)
                        if isinstance(piece, dict) and piece.get("choices"):
                            yield None
            except (OSError, http.client.HTTPException, msgspec.MsgspecError) as error:
                raise self._unusable(error) from None

    def _json(self, method: str, path: str) -> dict[str, Any]:
        with closing(self._connect()) as connection:
            response = self._request(connection, method, path)
            try:
                return msgspec.json.decode(response.read(), type=dict[str, Any])
            except (OSError, http.client.HTTPException, msgspec.MsgspecError) as error:
                raise self._unusable(error) from None

    def _connect(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        return kind(self._host, self._port, timeout=_TIMEOUT_S)

    def _request(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: bytes | None = None
    ) -> http.client.HTTPResponse:
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("OPENAI_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        try:
            connection.request(method, self._path + path, body, headers)
            response = connection.getresponse()
            if response.status != http.client.OK:
                said = response.read(300).decode(errors="replace").replace("\n", " ")
                raise ConfigError("url", self._shown, f"{path} answers {response.status}: {said}")
        except (OSError, http.client.HTTPException) as error:
            raise self._unusable(error) from None
        return response

    def _unusable(self, error: Exception) -> ConfigError:
        what = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        return ConfigError("url", self._shown, f"allowed: an OpenAI-compatible server that answers ({what})")


def server_speed(
    server: Server,
    lengths: Sequence[int],
    repeats: int,
    step_tokens: int,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Quantity]:
    """`prefill_s_per_token` and its like, and `decode_tokens_per_s`, of one request alone.

    Each round has all lengths, in an order of its own; each prompt is new, so that no cache has it. Of the
    rounds the spread is said, the values are fitted to all of them.
    """
    most = server.max_tokens
    wanted = [length for length in lengths if most is None or length + _ANSWER_TOKENS <= most]
    if len(wanted) < 3:
        raise ConfigError("url", server.model, f"a model that takes 3 of these lengths: {[*lengths]}")
    rng = random.Random()
    server.ask(_prompt(rng, wanted[0]))
    rounds = list[tuple[list[int], list[float]]]()
    decode = list[float]()
    for number in range(repeats):
        order = rng.sample(wanted, len(wanted))
        answers = [server.ask(_prompt(rng, length)) for length in order]
        rounds.append((order, [answer.first_s for answer in answers]))
        decode += [1.0 / answer.further_s for answer in answers if answer.further_s > 0]
        say(f"prompts of {wanted[0]} to {wanted[-1]} tokens: round {number + 1} of {repeats}")
    if not decode:
        raise ConfigError("url", server.model, "a server that streams token by token: it sent all at once")
    tokens = [length for order, _ in rounds for length in order]
    seconds = [one for _, firsts in rounds for one in firsts]
    values = fit_prefill(tokens, seconds, step_tokens)
    spread = list(zip(*(fit_prefill(*one, step_tokens) for one in rounds), strict=True))
    what = f"{server.model}, time to first token of {len(tokens)} prompts, one at a time"
    names = ("step_s", "prefill_s_per_token", "prefill_s_per_token_squared")
    found = {name: measured(spread[row], what, values[row]) for row, name in enumerate(names)}
    return found | {"decode_tokens_per_s": measured(decode, f"{server.model}, one at a time")}


def _prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(*_TOKEN_IDS) for _ in range(length)]
