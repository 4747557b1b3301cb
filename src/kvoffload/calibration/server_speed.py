"""Measures prefill and decode speed of a running server with an OpenAI-compatible API, such as vLLM.

Sends random prompts of several lengths one at a time and times the streamed tokens.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kvoffload.calibration.fit import fit_prefill
from kvoffload.calibration.samples import quantity_of
from kvoffload.errors import ConfigError
from kvoffload.openai_server import NoAnswerError, OpenAIServer
from kvoffload.simulate.machine import Quantity

LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
"""Prompt lengths to measure, in tokens. Lengths above the model's maximum are skipped."""

_ANSWER_TOKENS = 32
_TIMEOUT_S = 300.0
_TOKEN_IDS = (100, 1000)
"""Range of the random token ids. All of them exist in every usual vocabulary."""


@dataclass(frozen=True)
class Answer:
    """Times of one streamed answer.

    Attributes:
        first_s: seconds to the first token.
        further_s: mean seconds for each further token; 0 if there was only one token.
    """

    first_s: float
    further_s: float


class Server:
    """The requests that a measurement sends to an OpenAI-compatible server.

    Reads the API key from ``OPENAI_API_KEY`` and never prints the key.

    Args:
        url: ``http://HOST:PORT``, with or without ``/v1``.
        model: name of a served model; None takes the server's first model.

    Raises:
        ConfigError: `url` does not answer or answers in another format, or the server does not have `model`.
    """

    def __init__(self, url: str, model: str | None = None) -> None:
        api_key = os.environ.get("OPENAI_API_KEY", "")
        self._http = OpenAIServer(url, api_key=api_key, timeout_s=_TIMEOUT_S)
        with self._refused():
            self.model, self.max_tokens = self._http.choose(model)

    def ask(self, tokens: Sequence[int]) -> Answer:
        """Send a prompt of token ids and time its answer."""
        body = {
            "model": self.model,
            "prompt": list(tokens),
            "max_tokens": _ANSWER_TOKENS,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
        }
        start = time.perf_counter()
        times = [time.perf_counter() for _ in self._token_events(body)]
        if not times:
            allowed = "the answer had no token; allowed: a server that streams"
            raise ConfigError("url", self._http.url, allowed)
        further_s = (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else 0.0
        return Answer(times[0] - start, further_s)

    def _token_events(self, body: dict[str, Any]) -> Iterator[None]:
        """Send a request; yield None at the arrival of each streamed event that has ``choices``."""
        with self._refused():
            for line in self._http.lines("/v1/completions", body):
                data = line.strip().removeprefix(b"data:").strip()
                if data and data != b"[DONE]" and line.startswith(b"data:"):
                    event = self._http.parsed("/v1/completions", data)
                    if isinstance(event, dict) and event.get("choices"):
                        yield None

    @contextmanager
    def _refused(self) -> Iterator[None]:
        try:
            yield
        except NoAnswerError as error:
            raise ConfigError("url", self._http.url, f"{error.path} {error.why}") from None


@dataclass(frozen=True)
class ServerTimes:
    """Times of a server's answers to prompts without a cached prefix, one request at a time.

    Attributes:
        model: name of the served model.
        rounds: for each round: (lengths of the prompts in tokens, seconds to the first token of each prompt).
        decode_rates: for each answer with two or more tokens, its generation speed in tokens/s.
    """

    model: str
    rounds: list[tuple[list[int], list[float]]]
    decode_rates: list[float]

    def speeds(self, step_tokens: int) -> dict[str, Quantity]:
        """Return `step_s`, `prefill_s_per_token`, `prefill_s_per_token_squared` and `decode_tokens_per_s`.

        A prefill quantity is fitted to all rounds together; its p10 and p90 are percentiles of the fits to
        single rounds. `decode_tokens_per_s` is the median over all answers. A step of the server computes at
        most `step_tokens` tokens.

        Raises:
            ConfigError: the time to the first token does not grow with the prompt's length, so a fit would
                give a prefill cost of 0.
        """
        tokens = [length for order, _ in self.rounds for length in order]
        seconds = [first_s for _, times in self.rounds for first_s in times]
        values = fit_prefill(tokens, seconds, step_tokens)
        if values[1] + values[2] <= 0.0:
            shortest, longest = (
                (
                    length,
                    1e3 * statistics.median(s for n, s in zip(tokens, seconds, strict=True) if n == length),
                )
                for length in (min(tokens), max(tokens))
            )
            allowed = (
                f"the first token takes {shortest[1]:.3g} ms after {shortest[0]} tokens and "
                f"{longest[1]:.3g} ms after {longest[0]}; allowed: an idle server whose time grows "
                "with the prompt; try longer prompts or more repeats"
            )
            raise ConfigError("url", self.model, allowed)
        fits = list(zip(*(fit_prefill(*times, step_tokens) for times in self.rounds), strict=True))
        label = f"{self.model}, time to first token of {len(tokens)} prompts, one at a time"
        names = ("step_s", "prefill_s_per_token", "prefill_s_per_token_squared")
        quantities = {name: quantity_of(fits[row], label, values[row]) for row, name in enumerate(names)}
        decode = quantity_of(self.decode_rates, f"{self.model}, one at a time")
        return quantities | {"decode_tokens_per_s": decode}


def time_server(
    server: Server,
    lengths: Sequence[int],
    repeats: int,
    report: Callable[[str], None] = lambda line: None,
) -> ServerTimes:
    """Send prompts of these lengths, one at a time, and time the answers.

    Each round sends a prompt of every length that the model accepts, in random order. Every prompt is random,
    so that no cache has it.

    Raises:
        ConfigError: the model accepts fewer than 3 of the lengths, or the server does not stream each token.
    """
    limit = server.max_tokens
    usable = [length for length in lengths if limit is None or length + _ANSWER_TOKENS <= limit]
    if len(usable) < 3:
        allowed = f"allowed: a model that takes 3 or more of these prompt lengths: {[*lengths]}"
        raise ConfigError("url", server.model, allowed)
    rng = random.Random()
    server.ask(_prompt(rng, usable[0]))
    times = ServerTimes(server.model, [], [])
    for number in range(repeats):
        order = rng.sample(usable, len(usable))
        answers = [server.ask(_prompt(rng, length)) for length in order]
        times.rounds.append((order, [answer.first_s for answer in answers]))
        times.decode_rates.extend(1.0 / answer.further_s for answer in answers if answer.further_s > 0)
        report(f"prompts of {usable[0]} to {usable[-1]} tokens: round {number + 1} of {repeats}")
    if not times.decode_rates:
        allowed = "it sent all tokens at once; allowed: a server that streams each token"
        raise ConfigError("url", server.model, allowed)
    return times


def _prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(*_TOKEN_IDS) for _ in range(length)]
