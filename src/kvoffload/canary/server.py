"""Client of an OpenAI-compatible server: completions with log-probabilities, metrics, resets."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from typing import Any

from kvoffload.canary.answers import Answer
from kvoffload.canary.prompts import Prompt
from kvoffload.errors import CanaryError
from kvoffload.metrics.scrape import Sample, samples, sums
from kvoffload.openai_server import NoAnswerError, OpenAIServer

_NUM_LOGPROBS = 5
_SIZES = ("block_size", "num_gpu_blocks")
"""Labels of ``vllm:cache_config_info``, vLLM's metric of the cache configuration: tokens in a block, number
of blocks."""
_MOST_DIGITS = 19


@dataclass(frozen=True)
class Counters:
    """Counters of a server; None where the server has no such metric.

    Attributes:
        tier_tokens: prompt tokens loaded from the tiers behind the device.
        device_tokens: prompt tokens found in the device's prefix cache.
        preemptions: number of preempted requests. Blocks of a preempted request may be loaded again from the
            tiers, and vLLM does not count these loads as hits.
    """

    tier_tokens: float | None
    device_tokens: float | None
    preemptions: float | None

    @property
    def used_tiers(self) -> bool:
        """True if an answer may have come from the tiers."""
        return bool(self.tier_tokens or self.preemptions)

    def since(self, before: Counters) -> Counters:
        """Return the increase of all counters since an earlier reading.

        Raises: `CanaryError` if a counter has decreased.
        """
        increase = self.plus(Counters(*(None if value is None else -value for value in astuple(before))))
        if any(value is not None and value < 0 for value in astuple(increase)):
            raise CanaryError(
                "a counter of the server decreased during the run: the server was restarted, or several "
                "servers answer at this address; run the canary again, with the address of one server"
            )
        return increase

    def plus(self, other: Counters) -> Counters:
        """Return the sum of two readings."""
        pairs = zip(astuple(self), astuple(other), strict=True)
        return Counters(*(None if None in pair else sum(pair) for pair in pairs))


class Pace:
    """A rate limit of sent tokens. Thread: any."""

    def __init__(self, max_tokens_per_s: float | None) -> None:
        self._max_tokens_per_s, self._next, self._lock = max_tokens_per_s, time.monotonic(), threading.Lock()

    def wait(self, num_tokens: int) -> None:
        """Wait until the rate limit allows `num_tokens` more tokens to be sent."""
        if self._max_tokens_per_s is None:
            return
        with self._lock:
            begin = max(self._next, time.monotonic())
            self._next = begin + num_tokens / self._max_tokens_per_s
        time.sleep(max(0.0, begin - time.monotonic()))


class Server:
    """An OpenAI-compatible server.

    Args:
        url: with or without ``/v1``.
        model: name of the model; None for the first model of the server.
        timeout_s: longest duration of a request.
        tier_hits_metric: Prometheus counter of tokens loaded from tiers; None for vLLM's counter.

    Attributes:
        url: the address without user, password and ``/v1``.
        max_model_tokens: longest context in tokens; None if unknown.

    Thread: any. Every method raises `CanaryError` if the server gives no usable answer.

    Raises: `ConfigError` for an invalid `url`, or a `model` that is not served.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        api_key: str = "",
        timeout_s: float = 120.0,
        tier_hits_metric: str | None = None,
        pace: Pace | None = None,
    ) -> None:
        self._http = OpenAIServer(url, api_key=api_key, timeout_s=timeout_s)
        self.url, self._timeout_s, self._pace = self._http.url, timeout_s, pace or Pace(None)
        self._tier_hits_metric = tier_hits_metric
        with _as_canary_error():
            self.model, self.max_model_tokens = self._http.choose(model)
        self.tokens_sent, self._counting = 0, threading.Lock()

    # ---- completions

    def complete(self, prompt: Prompt, *, answer_tokens: int, salt: str) -> Answer:
        """Return the completion of a prompt at temperature 0.

        Args:
            salt: value of ``cache_salt``. Servers that support it share no cached blocks between requests
                with different salts.
        """
        content = prompt.content if isinstance(prompt.content, str) else list(prompt.content)
        num_tokens = len(content) // 4 if isinstance(content, str) else len(content)
        self._pace.wait(num_tokens)
        with self._counting:
            self.tokens_sent += num_tokens
        body = {
            "model": self.model,
            "prompt": content,
            "max_tokens": answer_tokens,
            "temperature": 0,
            "logprobs": _NUM_LOGPROBS,
            "ignore_eos": True,
            "cache_salt": salt,
        }
        return _answer(self._json("/v1/completions", body), prompt)

    def tokenize(self, text: str) -> list[int] | None:
        """Return the token ids of a text, or None if the server has no ``/tokenize``."""
        body = {"model": self.model, "prompt": text, "add_special_tokens": False}
        try:
            reply = self._json("/tokenize", body)
        except CanaryError as error:
            if error.status is None:
                raise
            return None
        tokens = reply.get("tokens") if isinstance(reply, dict) else None
        is_ids = isinstance(tokens, list) and all(isinstance(token, int) for token in tokens)
        return tokens if is_ids else None

    # ---- what the server reports

    def counters(self) -> Counters:
        """Read the counters of hits and preemptions."""
        metrics = self.metrics()
        names = (
            self._tier_hits_metric or "vllm:external_prefix_cache_hits",
            "vllm:prefix_cache_hits",
            "vllm:num_preemptions",
        )
        counts = (metrics.get(name, metrics.get(f"{name}_total")) for name in names)
        return Counters(*(count if count is not None and math.isfinite(count) else None for count in counts))

    def metrics(self) -> dict[str, float]:
        """Return the Prometheus metrics, summed over labels; empty if the server has none."""
        return sums(self._samples())

    def device_tokens(self) -> tuple[int | None, int | None]:
        """Return the tokens of one block, and the tokens that the KV caches of all engines hold together.

        A server with several engines has one cache for each engine. Unknown sizes are None.
        """
        configs = [sample.labels for sample in self._samples() if sample.name == "vllm:cache_config_info"]
        sizes = [
            tuple(
                int(text) if text.isdecimal() and len(text) < _MOST_DIGITS else 0
                for text in (labels.get(name, "") for name in _SIZES)
            )
            for labels in configs
        ]
        if not sizes or not all(block for block, _ in sizes):
            return None, None
        tokens = (
            sum(block * blocks for block, blocks in sizes) if all(blocks for _, blocks in sizes) else None
        )
        return sizes[0][0], tokens

    def reset_device_cache(self) -> bool:
        """Empty the device's prefix cache; return False if the server does not allow it.

        Raises `CanaryError` if running requests hold blocks until the time-out.
        """
        until = time.monotonic() + self._timeout_s
        while time.monotonic() < until:
            try:
                reply = self._json("/reset_prefix_cache", {})
            except CanaryError as error:
                if error.status is None:
                    raise
                return False
            if not isinstance(reply, dict) or reply.get("success", True):
                return True
            time.sleep(0.1)  # transfers still hold blocks
        raise CanaryError(
            f"{self.url}/reset_prefix_cache has not emptied the device's cache in {self._timeout_s:g} s: "
            "running requests hold blocks"
        )

    # ---- requests

    def _samples(self) -> list[Sample]:
        try:
            with _as_canary_error():
                scraped = self._http.get("/metrics").decode(errors="replace")
        except CanaryError as error:
            if error.status is None:
                raise
            return []
        return samples(scraped)

    def _json(self, path: str, body: object) -> Any:
        with _as_canary_error():
            return self._http.json(path, body)


@contextmanager
def _as_canary_error() -> Iterator[None]:
    try:
        yield
    except NoAnswerError as error:
        raise CanaryError(str(error), error.status) from None


def _answer(reply: Any, prompt: Prompt) -> Answer:
    try:
        logprobs = reply["choices"][0]["logprobs"]
        tokens = [str(token) for token in logprobs["tokens"]]
        # For some tokens servers send no list.
        most_probable = [
            {token: _number(logprob) for token, logprob in (row or {}).items()}
            for row in logprobs["top_logprobs"]
        ]
        for row, token, logprob in zip(most_probable, tokens, logprobs["token_logprobs"], strict=True):
            if logprob is not None:
                row.setdefault(token, _number(logprob))
    except (AttributeError, KeyError, IndexError, TypeError, ValueError):
        raise CanaryError(
            f"the answer to prompt {prompt.name} has no log-probabilities; the server must support "
            "`logprobs` of /v1/completions"
        ) from None
    return Answer(tokens, most_probable)


def _number(logprob: object) -> float:
    """Return a log-probability. Converts null to ``-inf``, because JSON has no infinity.

    Raises `TypeError` if the value is neither null nor a number.
    """
    if logprob is None:
        return -math.inf
    if isinstance(logprob, bool) or not isinstance(logprob, (int, float)):
        raise TypeError("not a number")
    return logprob
