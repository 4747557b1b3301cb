"""A vLLM server with Prometheus: every query of the dashboard has data, and real faults raise alarms."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

pytest.importorskip("vllm.v1", reason="vllm is not installed here: `make test-vllm` builds an environment")
from kvoffload.canary.verdict import Verdict
from kvoffload.metrics.alarms import rule_file
from kvoffload.metrics.families import VLLM_PREFIX
from support import valkey_server
from support.dashboard import canary_metrics, queries, without_data
from support.disk_blocks import slab_in
from support.prometheus_server import Prometheus, hurried, program, running_prometheus, serving
from support.run_cli import kvoffload
from support.vllm_api_server import Server, running
from support.vllm_traffic import PATIENCE_S, Expected, random_prompts

# vLLM's warnings are not ours.
pytestmark = pytest.mark.filterwarnings("ignore")

WAIT_S = 150.0
"""Seconds until an alarm or a number must appear; a busy machine needs a minute."""
PAUSE_S = 0.1
"""Between two prompts: the test waits for Prometheus, which needs time and not more answers."""
SEVEN = 7
"""Prompts of nine whole blocks each: more than RAM and engine have room for, 24 blocks each."""
BLOCK_BYTES = 4 * 2 * 2 * 64 * 32 * 4


class Traffic:
    """A client that sends prompts one after the other until it is stopped.

    Attributes:
        wrong: prompts with a wrong answer.
        num_answers: number of answers.
    """

    def __init__(self, server: Server, expected: Expected) -> None:
        self._server, self._pairs = (
            server,
            list(zip(expected.prompts[:SEVEN], expected.answers, strict=False)),
        )
        self.wrong, self.num_answers = list[list[int]](), 0
        self._over = threading.Event()

    @contextmanager
    def running(self) -> Iterator[None]:
        thread = threading.Thread(target=self._run)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join(PATIENCE_S)

    def _run(self) -> None:
        for seed in itertools.count():
            if self._over.is_set():
                return
            # A new prompt in each round, because earlier prompts are soon in a tier and no longer stored.
            self._server.stream(random_prompts(seed, 1, 300)[0])
            for prompt, answer in self._pairs:
                if self._server.stream(prompt) != answer:
                    self.wrong.append(prompt)
                self.num_answers += 1
                self._over.wait(PAUSE_S)


def damage(directory: Path) -> None:
    """Flip a bit in every half block of the slab, except in its first blocks, which have the journal."""
    slab = slab_in(directory)
    with slab.open("r+b") as file:
        for at in range(slab.stat().st_size // 4, slab.stat().st_size, BLOCK_BYTES // 2):
            file.seek(at)
            byte = file.read(1)
            file.seek(at)
            file.write(bytes([byte[0] ^ 1]))


def wait_for_alarm(prometheus: Prometheus, name: str) -> str:
    """Return the summary of an alarm as soon as it fires."""
    deadline = time.monotonic() + WAIT_S
    while name not in (firing := prometheus.firing()):
        assert time.monotonic() < deadline, firing
        time.sleep(0.2)
    return str(firing[name]["annotations"]["summary"])


def wait_for_data(prometheus: Prometheus, wanted: set[str]) -> None:
    """Wait until each query has returned data at least once; rates of idle counters return none."""
    deadline = time.monotonic() + WAIT_S
    while wanted := wanted & without_data(prometheus, VLLM_PREFIX):
        assert time.monotonic() < deadline, wanted
        time.sleep(0.5)


def test_the_dashboard_has_data_and_faults_raise_alarms(
    llama: Path, on_llama: Expected, tmp_path: Path
) -> None:
    program("prometheus")
    (tmp_path / "valkey").mkdir()
    disk = tmp_path / "disk"
    with ExitStack() as stack:
        valkey = stack.enter_context(valkey_server.running(tmp_path / "valkey"))
        options = {
            "ram": "3MiB",
            "verify": "always",
            "audit": "share=0.2",
            "what_if": "capacity=2",
            "what_if_sample": 1,
            "tenants": {"team-a": {"max": "1MiB", "tiers": {"nvme": {"max": "8MiB"}}}},
            "tiers": [
                f"disk:{disk}:16MiB,max_write_bytes_per_day=1GiB,label=nvme",
                f"{valkey.url}/team-a",
            ],
        }
        server, _ = stack.enter_context(running(llama, tmp_path / "server.log", **options))
        canary = stack.enter_context(serving(canary_metrics(Verdict.EQUAL, time.time())))
        targets = {"vllm": server.url.removeprefix("http://"), "canary": canary}
        rules = hurried(rule_file(VLLM_PREFIX))
        prometheus = stack.enter_context(running_prometheus(tmp_path, targets, rules))
        traffic = Traffic(server, on_llama)
        stack.enter_context(traffic.running())
        (alerts,) = (query for query in queries() if "ALERTS" in query)
        # A sound server raises no alarm.
        wait_for_data(prometheus, set(queries()) - {alerts})
        assert not prometheus.firing()
        (engine,) = json.loads(kvoffload("top", server.url, "--once", "--format", "json").stdout)
        assert engine["engine"] == "m 0"
        assert engine["lookups"] > 0
        assert {tier["name"] for tier in engine["tiers"]} == {"nvme", "valkey"}
        with valkey.stopped():
            assert wait_for_alarm(prometheus, "KVOffloadTierUnreachable").startswith("1 servers of valkey")
            damage(disk)
            summary = wait_for_alarm(prometheus, "KVOffloadDamagedTier")
            assert "blocks of nvme failed their checksum" in summary
            wait_for_data(prometheus, {alerts})
    assert traffic.num_answers
    assert not traffic.wrong
