"""Two of vLLM's servers, as two machines run them, share a Valkey server: before it is killed under load,
while it is dead, and when it is back with nothing in it.
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
"""Prompts that are asked for under load: a few more than RAM and engine have room for together."""
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
    for theirs, ours in (
        ("64GiB", "3MiB"),
        ("valkey://cache:6379/", f"{valkey.url}/"),
        ("?ttl=7d", f"?ttl=7d&timeout={PATIENCE_S:.0f}s&probe_timeout={PATIENCE_S:.0f}s"),
    ):
        assert theirs in line
        line = line.replace(theirs, ours)
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
        """At the end every request has been answered, or the error of one that was not is raised."""
        with ThreadPoolExecutor(CLIENTS) as pool:
            clients = [pool.submit(self._client, number) for number in range(CLIENTS)]
            try:
                yield
            finally:
                self._is_over.set()
            for client in clients:
                client.result()

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        """Until it is so, and each client has had three answers since this was called."""
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
    """A prompt that no one has asked for is computed, and is in Valkey at the end."""
    before = server.metrics().get(WRITTEN, 0)
    server.serve_until(WRITTEN, before + NINE, [expected.prompts[row]])


def find(server: Server, expected: Expected, row: int) -> None:
    """The first request for a prompt that the other server has computed is answered, and not computed."""
    prompt, before = expected.prompts[row], server.metrics()
    assert server.stream(prompt) == expected.answers[row]
    taken = server.metrics()[TOKENS_FROM_ELSEWHERE] - before.get(TOKENS_FROM_ELSEWHERE, 0)
    assert taken == NINE * 32, "by vLLM's own count"
    # Asked for once more it is in the engine's own cache.
    after = server.serve_until(HITS, before.get(HITS, 0) + NINE, [prompt])
    assert after[HITS] == before.get(HITS, 0) + NINE


def wait_for_reads(servers: tuple[Server, Server], seed: int) -> None:
    """Wait until each server reads from Valkey again what the other one has computed.

    After an outage the first probe and the first read of a server are attempts of a circuit breaker, and no
    request waits for an attempt. How many prompts that takes depends on the calls that had failed.
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


def test_what_one_server_computes_the_other_finds_also_after_valkey_was_killed(
    servers: tuple[Server, Server], valkey: valkey_server.Server, on_llama: Expected
) -> None:
    first, second = servers
    write(first, on_llama, 0)
    find(second, on_llama, 0)
    load = Load(servers, on_llama, SEVEN)
    with load.running():
        # Then most of what is asked for is read from there.
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
