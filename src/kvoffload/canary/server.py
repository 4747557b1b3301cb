"""Client of an OpenAI-compatible server: completions with log-probabilities, metrics, resets."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from dataclasses import astuple, dataclass
from http.client import HTTPException
from typing import Any

from kvoffload.canary.answers import Answer
from kvoffload.canary.prompts import Prompt
from kvoffload.errors import CanaryError
from kvoffload.metrics.scrape import Sample, samples, sums

_NUM_LOGPROBS = 5
_MOST_TEXT = 300


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
        """Return the increase of all counters since an earlier reading."""
        return self.plus(Counters(*(None if value is None else -value for value in astuple(before))))

    def plus(self, other: Counters) -> Counters:
        """Return the sum of two readings."""
        pairs = zip(astuple(self), astuple(other), strict=True)
        return Counters(*(None if None in pair else sum(pair) for pair in pairs))


class Pace:
    """A rate limit of sent tokens. Thread: any."""

    def __init__(self, max_tokens_per_s: float | None) -> None:
        self._max_tokens_per_s, self._next, self._lock = max_tokens_per_s, time.monotonic(), threading.Lock()

    def wait(self, num_tokens: int) -> None:
        """Wait until these tokens may be sent."""
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

    Thread: any. Every method raises `CanaryError` if the server gives no usable answer.
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
        self.url = url.rstrip("/").removesuffix("/v1")
        self._api_key, self._timeout_s, self._pace = api_key, timeout_s, pace or Pace(None)
        self._tier_hits_metric = tier_hits_metric
        self.max_model_tokens: int | None = None
        self.model = self._choose(model)
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
        return Counters(*(metrics.get(name, metrics.get(f"{name}_total")) for name in names))

    def metrics(self) -> dict[str, float]:
        """Return the Prometheus metrics, summed over labels; empty if the server has none."""
        return sums(self._samples())

    def device_tokens(self) -> tuple[int | None, int | None]:
        """Return the sizes of a block and of the device's KV cache, in tokens. Unknown sizes are None."""
        for sample in self._samples():
            if sample.name == "vllm:cache_config_info":
                labels = sample.labels
                block, blocks = labels.get("block_size", ""), labels.get("num_gpu_blocks", "")
                if block.isdecimal():
                    return int(block), int(block) * int(blocks) if blocks.isdecimal() else None
        return None, None

    def reset_device_cache(self) -> bool:
        """Empty the device's prefix cache; return False if the server does not allow it."""
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
        return False

    # ---- HTTP

    def _choose(self, model: str | None) -> str:
        models = self._json("/v1/models")
        try:
            rows = {str(row["id"]): row for row in models["data"]}
        except (TypeError, KeyError):
            rows = {}
        if model is None and not rows:
            raise CanaryError(f"{self.url}/v1/models lists no model; give --model")
        if model is not None and model not in rows:
            raise CanaryError(f"model {model!r} is not served; allowed: {', '.join(rows) or 'none'}")
        name = model or next(iter(rows))
        longest = rows[name].get("max_model_len")
        self.max_model_tokens = longest if isinstance(longest, int) else None
        return name

    def _samples(self) -> list[Sample]:
        try:
            scraped = self._get("/metrics").decode(errors="replace")
        except CanaryError as error:
            if error.status is None:
                raise
            return []
        return samples(scraped)

    def _json(self, path: str, body: object = None) -> Any:
        content = self._get(path, body)
        try:
            return json.loads(content or b"{}")
        except ValueError:
            shown = content[:_MOST_TEXT].decode(errors="replace")
            raise CanaryError(f"{self.url}{path} did not answer with JSON: {shown!r}") from None

    def _get(self, path: str, body: object = None) -> bytes:
        headers = {"Content-Type": "application/json"}
        if self._api_key:
            headers["Authorization"] = f"Bearer {self._api_key}"
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(self.url + path, data, headers)
            with urllib.request.urlopen(request, timeout=self._timeout_s) as response:
                content: bytes = response.read()
                return content
        except urllib.error.HTTPError as error:
            shown = error.read()[:_MOST_TEXT].decode(errors="replace")
            raise CanaryError(f"{self.url}{path}: HTTP {error.code}: {shown}", error.code) from None
        except (OSError, ValueError, HTTPException) as error:  # HTTPException: half a reply
            reason = getattr(error, "reason", error)
            raise CanaryError(f"{self.url}{path} does not answer: {reason}") from None


def _answer(reply: Any, prompt: Prompt) -> Answer:
    try:
        logprobs = reply["choices"][0]["logprobs"]
        tokens = [str(token) for token in logprobs["tokens"]]
        # For some tokens servers send no list.
        most_probable = [dict(row or {}) for row in logprobs["top_logprobs"]]
        for row, token, logprob in zip(most_probable, tokens, logprobs["token_logprobs"], strict=True):
            if logprob is not None:
                row.setdefault(token, logprob)
    except (KeyError, IndexError, TypeError, ValueError):
        raise CanaryError(
            f"the answer to prompt {prompt.name} has no log-probabilities; the server must support "
            "`logprobs` of /v1/completions"
        ) from None
    return Answer(tokens, most_probable)
