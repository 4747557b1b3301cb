"""Two vLLM servers, run as on two machines, share a Valkey server before, during and after a kill under load.

The Valkey server is empty after the kill.
"""

from __future__ import annotations

import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

pytest.importorskip("vllm.v1", reason="vllm is not installed here: `make test-vllm` builds an environment")
from support import valkey_server
from support.vllm_api_server import Server, running, typed
from support.vllm_traffic import PATIENCE_S, Expected, random_prompts

# vLLM's warnings are not ours.
pytestmark = pytest.mark.filterwarnings("ignore")

NINE = 9
"""Whole blocks of each prompt; RAM has room for 24, and the engine for as many."""
SEVEN = 7
"""Prompts sent under load: slightly more than RAM and engine have room for together."""
CLIENTS = 4
WRITTEN, HITS, IS_LEFT_ALONE = (
    f"vllm:kvoffload_tier_{name}" for name in ("written_total", "hits_total", "circuit_open")
)
TOKENS_FROM_ELSEWHERE = "vllm:external_prefix_cache_hits_total"


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[valkey_server.Server]:
    (tmp_path / "valkey").mkdir()
    with valkey_server.running(tmp_path / "valkey") as server:
        yield server


@pytest.fixture
def servers(
    llama: Path, valkey: valkey_server.Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Server, Server]]:
    """Two servers, started by the line of docs/cluster.md with other sizes, names and time-outs.

    Each server has a copy of the model.
    """
    line = typed("docs/cluster.md")
    for documented, replacement in (
        ("64GiB", "3MiB"),
        ("valkey://cache:6379/", f"{valkey.url}/"),
        ("?ttl=7d", f"?ttl=7d&timeout={PATIENCE_S:.0f}s&probe_timeout={PATIENCE_S:.0f}s"),
    ):
        assert documented in line
        line = line.replace(documented, replacement)
    monkeypatch.setenv("KVOFFLOAD_TIER_DEADLINE_S", str(PATIENCE_S))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    models = llama, Path(shutil.copytree(llama, tmp_path / "copy"))
    with ExitStack() as stack, ThreadPoolExecutor(2) as starting:
        started = [
            starting.submit(stack.enter_context, running(model, tmp_path / f"{number}.log", line=line))
            for number, model in enumerate(models)
        ]
        first, second = (future.result()[0] for future in started)
        yield first, second


class Load:
    """Clients that send prompts one after the other until they are stopped.

    Attributes:
        answers: number of answers of each client. wrong: prompts with a wrong answer.
    """

    def __init__(self, servers: tuple[Server, Server], expected: Expected, num_prompts: int) -> None:
        self.answers = [0] * CLIENTS
        self.wrong: list[int] = []
        self._servers, self._expected, self._num_prompts = servers, expected, num_prompts
        self._is_over = threading.Event()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Send requests until the context ends; raises the error of a failed request."""
        with ThreadPoolExecutor(CLIENTS) as pool:
            clients = [pool.submit(self._client, number) for number in range(CLIENTS)]
            try:
                yield
            finally:
                self._is_over.set()
            for client in clients:
                client.result()

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        """Wait until `is_so`, and until each client has received three more answers."""
        before, until = [*self.answers], time.monotonic() + PATIENCE_S
        while not is_so() or any(now < then + 3 for now, then in zip(self.answers, before, strict=True)):
            assert time.monotonic() < until, self.answers
            time.sleep(0.05)

    def _client(self, number: int) -> None:
        chance, server = random.Random(number), self._servers[number % 2]
        while not self._is_over.is_set():
            row = chance.randrange(self._num_prompts)
            if server.stream(self._expected.prompts[row]) != self._expected.answers[row]:
                self.wrong.append(row)
            self.answers[number] += 1


def write(server: Server, expected: Expected, row: int) -> None:
    """Let a server compute a new prompt, and wait until its blocks are in Valkey."""
    before = server.metrics().get(WRITTEN, 0)
    server.serve_until(WRITTEN, before + NINE, [expected.prompts[row]])


def find(server: Server, expected: Expected, row: int) -> None:
    """Check that a server's first request for a prompt of the other server is answered from Valkey."""
    prompt, before = expected.prompts[row], server.metrics()
    assert server.stream(prompt) == expected.answers[row]
    taken = server.metrics()[TOKENS_FROM_ELSEWHERE] - before.get(TOKENS_FROM_ELSEWHERE, 0)
    assert taken == NINE * 32, "by vLLM's own count"
    # The second time the prompt is in the engine's own cache.
    after = server.serve_until(HITS, before.get(HITS, 0) + NINE, [prompt])
    assert after[HITS] == before.get(HITS, 0) + NINE


def wait_for_reads(servers: tuple[Server, Server], seed: int) -> None:
    """Wait until each server reads blocks of the other from Valkey again.

    After an outage the first probe and the first read of a server are attempts of a circuit breaker, and no
    request waits for an attempt. The necessary number of prompts depends on the failed calls.
    """
    deadline, prompts = time.monotonic() + PATIENCE_S, iter(random_prompts(seed, 200, NINE * 32 + 5))
    for writer, reader in (servers, servers[::-1]):
        before = reader.metrics().get(TOKENS_FROM_ELSEWHERE, 0)
        while reader.metrics().get(TOKENS_FROM_ELSEWHERE, 0) == before:
            assert time.monotonic() < deadline
            prompt = next(prompts)
            written = writer.metrics().get(WRITTEN, 0)
            writer.serve_until(WRITTEN, written + NINE, [prompt])
            reader.stream(prompt)


def test_a_server_hits_blocks_of_the_other_also_after_valkey_was_killed(
    servers: tuple[Server, Server], valkey: valkey_server.Server, on_llama: Expected
) -> None:
    first, second = servers
    write(first, on_llama, 0)
    find(second, on_llama, 0)
    load = Load(servers, on_llama, SEVEN)
    with load.running():
        # Afterwards most of the requested blocks are read from Valkey.
        load.wait_until(lambda: len(valkey.blocks()) == SEVEN * NINE)
        valkey.stop()
        load.wait_until(lambda: all(server.metrics()[IS_LEFT_ALONE] for server in servers))
    assert not load.wrong
    valkey.start()
    wait_for_reads(servers, seed=29)
    write(first, on_llama, SEVEN)
    write(second, on_llama, SEVEN + 1)
    find(first, on_llama, SEVEN + 1)
    find(second, on_llama, SEVEN)
