"""A fake OpenAI-compatible server with a device cache and a tier, for tests of the canary.

Answers are a function of the prompt. Faults and noise change the log-probabilities of answers.
"""

from __future__ import annotations

import json
import random
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

VOCABULARY = 997


@dataclass
class FakeServer:
    """State of the server.

    Attributes:
        url: address, with ``/v1`` as users type it.
        tier_fault: added to the log-probability of the first token of an answer with tokens from the tier.
        device_fault: the same for the device's cache.
        noise: largest random change of a log-probability.
        has_tier, has_metrics, has_tokenize, has_logprobs: features.
        knows_salt: cached prompts are separated by ``cache_salt``.
        may_reset: ``POST /reset_prefix_cache`` is allowed.
        device_tokens: capacity of the device's cache, or of the caches of all engines.
        num_engines: number of engines that the metrics show.
        failing: HTTP status of all completions; 0 for none.
        dies_in_reply: completions end in the middle of the reply.
        api_key: required if not empty.
    """

    url: str = ""
    tier_fault: float = 0.0
    device_fault: float = 0.0
    noise: float = 0.0
    has_tier: bool = True
    has_metrics: bool = True
    has_tokenize: bool = True
    has_logprobs: bool = True
    knows_salt: bool = True
    may_reset: bool = True
    device_tokens: int = 2048
    num_engines: int = 1
    failing: int = 0
    dies_in_reply: bool = False
    api_key: str = ""
    metrics: dict[str, float] = field(default_factory=dict)
    num_requests: int = 0
    _device: OrderedDict[Any, None] = field(default_factory=OrderedDict)
    _tier: set[Any] = field(default_factory=set)
    _rng: random.Random = field(default_factory=lambda: random.Random(5))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        prompt = body["prompt"]
        ids = tuple(self.tokenize(prompt) if isinstance(prompt, str) else prompt)
        with self._lock:
            self.num_requests += 1
            fault = self._look_up((ids, body.get("cache_salt") if self.knows_salt else ""), len(ids))
            return self._answer(ids, body["max_tokens"], fault)

    def _look_up(self, key: Any, num_tokens: int) -> float:
        """Count a hit; returns the fault of the place where the prompt is."""
        fault = 0.0
        if key in self._device:
            self._count("vllm:prefix_cache_hits_total", num_tokens)
            fault = self.device_fault
        elif self.has_tier and key in self._tier:
            self._count("vllm:external_prefix_cache_hits_total", num_tokens)
            fault = self.tier_fault
        self._device[key] = None
        self._device.move_to_end(key)
        self._tier.add(key)
        while sum(len(ids) for ids, _ in self._device) > self.device_tokens and len(self._device) > 1:
            self._device.popitem(last=False)
        return fault

    def _count(self, name: str, amount: float) -> None:
        self.metrics[name] = self.metrics.get(name, 0) + amount

    def _answer(self, ids: tuple[int, ...], num_tokens: int, fault: float) -> dict[str, Any]:
        rng = random.Random(repr(ids))
        tokens, lists = [], []
        for position in range(num_tokens):
            row = {f" w{rng.randrange(VOCABULARY)}": -1.0 - rank for rank in range(5)}
            row = {token: logprob + self._rng.uniform(0, self.noise) for token, logprob in row.items()}
            if position == 0 and fault:
                first = next(iter(row))
                row[first] -= fault
            tokens.append(max(row, key=row.__getitem__))
            lists.append(row)
        logprobs = {
            "tokens": tokens,
            "top_logprobs": lists,
            "token_logprobs": [row[token] for row, token in zip(lists, tokens, strict=True)],
        }
        choice = {"text": "".join(tokens), "logprobs": logprobs if self.has_logprobs else None}
        return {"choices": [choice]}

    def tokenize(self, text: str) -> list[int]:
        return [sum(word.encode()) % VOCABULARY for word in text.split()]

    def reset(self) -> None:
        self._device.clear()

    def metrics_text(self) -> str:
        """Return the text of /metrics, with a cache of `device_tokens` in `num_engines` equal parts."""
        zero = dict.fromkeys(("vllm:prefix_cache_hits_total", "vllm:external_prefix_cache_hits_total"), 0.0)
        lines = ["# HELP vllm:prefix_cache_hits_total Hits.", "# TYPE vllm:prefix_cache_hits_total counter"]
        lines += [
            f'{name}{{model_name="a b",engine="0"}} {value}' for name, value in (zero | self.metrics).items()
        ]
        blocks = self.device_tokens // 16 // self.num_engines
        lines += [
            f'vllm:cache_config_info{{engine="{n}",block_size="16",num_gpu_blocks="{blocks}"}} 1.0'
            for n in range(self.num_engines)
        ]
        return "\n".join([*lines, ""])


class _Handler(BaseHTTPRequestHandler):
    fake: FakeServer

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self._send({"data": [{"id": "fake", "max_model_len": 512}, {"id": "other"}]})
        elif self.path == "/metrics" and self.fake.has_metrics:
            self._send(self.fake.metrics_text())
        else:
            self._send({"error": "not found"}, 404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        fake = self.fake
        if fake.api_key and self.headers.get("Authorization") != f"Bearer {fake.api_key}":
            self._send({"error": "wrong key"}, 401)
        elif self.path == "/v1/completions":
            self._send({"error": "overloaded"}, fake.failing) if fake.failing else self._send(
                fake.complete(body)
            )
        elif self.path == "/tokenize" and fake.has_tokenize:
            self._send({"tokens": fake.tokenize(body["prompt"])})
        elif self.path == "/reset_prefix_cache" and fake.may_reset:
            fake.reset()
            self._send({"success": True})
        else:
            self._send({"error": "not found"}, 404)

    def _send(self, content: Any, status: int = 200) -> None:
        data = content.encode() if isinstance(content, str) else json.dumps(content).encode()
        self.send_response(status)
        is_cut = self.fake.dies_in_reply and self.path == "/v1/completions"
        self.send_header("Content-Length", str(len(data) + is_cut))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


@contextmanager
def fake_server(**options: Any) -> Iterator[FakeServer]:
    """Run a server until the end of the block."""
    fake = FakeServer(**options)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"fake": fake}))
    fake.url = f"http://127.0.0.1:{server.server_port}/v1"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield fake
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
