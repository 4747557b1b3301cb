"""vLLM's OpenAI server, as users run it: processes, HTTP, streams, metrics, and a kill."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from kvoffload.calibration import server as calibration
from kvoffload.integrations.vllm.pool import SHARED_MEMORY

pytest.importorskip("vllm.v1", reason="vllm is not installed here: `make test-vllm` builds an environment")
from traffic import ANSWER_TOKENS, PATIENCE_S, Expected

# vLLM's warnings are not ours.
pytestmark = pytest.mark.filterwarnings("ignore")

TYPED = "vllm serve MODEL "
FOUR = 4
"""Prompts of nine whole blocks each; the engine has room for two of them."""
BLOCK_BYTES = 4 * 2 * 2 * 64 * 32 * 4
"""Of four layers keys and values, of two heads 64 numbers for each of 32 tokens, in float32."""


class Server:
    """A server that runs, and what can be asked of it."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=PATIENCE_S) as response:
            return str(response.read().decode())

    def stream(self, prompt: list[int]) -> list[int]:
        """What the server says to a prompt, piece by piece, as tokens."""
        body = {"model": "m", "prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0, "stream": True}
        request = urllib.request.Request(
            self.url + "/v1/completions",
            json.dumps(body | {"ignore_eos": True}).encode(),
            {"Content-Type": "application/json"},
        )
        said = ""
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
            for line in response:
                data = line.decode().strip().removeprefix("data: ")
                if data and data != "[DONE]":
                    said += json.loads(data)["choices"][0]["text"]
        return [int(word.removeprefix("t")) for word in said.split()]

    def metrics(self) -> dict[str, float]:
        """Metrics by name, labels of vLLM's own left out."""
        found: dict[str, float] = {}
        for line in self.get("/metrics").splitlines():
            match = re.fullmatch(r"(vllm:[a-z_]+)\{(.*)\} (\S+)", line)
            if match:
                reason = re.search(r'(?:reason|name)="([^"]*)"', match[2].replace("model_name", ""))
                name = match[1] + (f":{reason[1]}" if reason else "")
                found[name] = found.get(name, 0.0) + float(match[3])
        return found

    def serve_until(self, metric: str, value: float, prompts: list[list[int]]) -> dict[str, float]:
        """The metrics as soon as this one is so large; they move only while requests are served."""
        deadline = time.monotonic() + PATIENCE_S
        while (metrics := self.metrics()).get(metric, 0) < value:
            assert time.monotonic() < deadline, metrics
            for prompt in prompts:
                self.stream(prompt)
        return metrics


def kill(process: Any) -> None:
    """Kill the server's processes, and wait until all of them are dead: only the first one is our child."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + PATIENCE_S
    while members := living(process.pid):
        assert time.monotonic() < deadline, f"processes {members} do not die"
        time.sleep(0.05)


def living(group: int) -> list[str]:
    """Processes of a group. Those that are dead and that nobody has asked about do not count."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, its_group, *_ = stat.read_text().rpartition(")")[2].split()
            if int(its_group) == group and state not in "ZX":
                found.append(stat.parent.name)
    return found


@contextmanager
def running(
    model: Path, log: Path, *, workers: int = 1, line: str = "", **options: Any
) -> Iterator[tuple[Server, Any]]:
    """A server with our offloading, until the block ends; then everything of it is killed.

    `line` is what a user types instead: ``vllm serve MODEL`` and our flag.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    transfer = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "engine_id": str(log.parent),  # the same again for each server of a test
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "spec_name": "KVOffloadSpec",
            "spec_module_path": "kvoffload.integrations.vllm",
            "ram": "16MiB",
            "policy": "arc",
            **options,
        },
    }
    settings = {
        "--model": model,
        "--served-model-name": "m",
        "--port": port,
        "--dtype": "float32",
        "--block-size": 32,
        "--max-model-len": 512,
        "--num-gpu-blocks-override": 24,
        "--max-num-seqs": 4,
        "--tensor-parallel-size": workers,
        "--prefix-caching-hash-algo": "sha256_cbor",
    }
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
    command += [str(part) for pair in settings.items() for part in pair]
    if line:
        # The CPU build has no `vllm serve`.
        assert line.startswith(TYPED), line
        command = ["bash", "-c", f"exec {shlex.join(command)} {line.removeprefix(TYPED)}"]
    else:
        command += ["--kv-transfer-config", json.dumps(transfer)]
    environment = os.environ | {
        "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])),
        "PYTHONPATH": os.pathsep.join(part for part in sys.path if part),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    }
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            server, deadline = Server(port), time.monotonic() + PATIENCE_S
            while True:
                assert process.poll() is None, log.read_text()[-5000:]
                assert time.monotonic() < deadline, log.read_text()[-5000:]
                try:
                    server.get("/health")
                    break
                except OSError:
                    time.sleep(0.5)
            yield server, process
        finally:
            kill(process)


def ours_in_shared_memory(directory: Path) -> list[Path]:
    """Pools of the servers of this test that still have a name."""
    digest = hashlib.sha256(str(directory).encode()).hexdigest()[:16]
    return [*SHARED_MEMORY.glob(f"*{digest}*")]


def test_a_second_life_answers_from_the_disk_of_the_first(
    llama: Path, on_llama: Expected, tmp_path: Path
) -> None:
    """A server is killed in traffic and leaves nothing in memory; the next one has its blocks from disk."""
    prompts, answers = on_llama.prompts[:FOUR], on_llama.answers[:FOUR]
    tier = {"type": "disk", "path": str(tmp_path / "disk"), "capacity": "32MiB"}
    options = {"tiers": [tier], "tier_deadline_s": PATIENCE_S}
    with running(llama, tmp_path / "first.log", **options) as (server, process):
        assert not ours_in_shared_memory(tmp_path), "the pool has no name any more"
        with ThreadPoolExecutor(FOUR) as clients:
            for _ in range(4):
                assert [*clients.map(server.stream, prompts)] == answers
        server.serve_until("vllm:kvoffload_tier_written_total", 36, prompts)
        metrics = server.serve_until("vllm:kvoffload_stored_blocks_total", 36, prompts)
        assert metrics["vllm:kvoffload_tier_written_total"] == 36
        assert metrics["vllm:kvoffload_stored_blocks_total"] == 36
        assert metrics["vllm:kvoffload_hit_blocks_total"] > 0
        assert metrics["vllm:kvoffload_capacity_blocks"] == 128
        assert metrics["vllm:kvoffload_ready_blocks"] == 36
        assert metrics["vllm:kv_offload_load_bytes_total"] > 0
        assert metrics["vllm:kv_offload_load_time_total"] > 0
        assert metrics["vllm:kv_offload_store_bytes_total"] == 36 * BLOCK_BYTES
        assert metrics["vllm:kvoffload_policy_state:target_t1_blocks"] >= 0
        greeting = (tmp_path / "first.log").read_text()
        assert re.search(
            r"kvoffload: 128 blocks of 32 tokens, room for 4,096 tokens in 0.02 GiB; policy arc", greeting
        )
        with ThreadPoolExecutor(FOUR) as clients:
            cut_off = [clients.submit(server.stream, prompt) for prompt in prompts]
            kill(process)
        for future, answer in zip(cut_off, answers, strict=True):
            said = [] if future.exception() else future.result()
            assert said == answer[: len(said)], "all have ended, none with something else"
    assert not ours_in_shared_memory(tmp_path)
    with running(llama, tmp_path / "second.log", **options) as (server, _):
        assert [server.stream(prompt) for prompt in prompts] == answers
        assert server.metrics()["vllm:kvoffload_tier_hits_total"] == 36
    assert not ours_in_shared_memory(tmp_path)


def test_two_workers_share_each_block(llama: Path, on_llama: Expected, tmp_path: Path) -> None:
    """Each holds half of the heads; blocks are verified. The answers are those of one."""
    prompts, answers = on_llama.prompts[:FOUR], on_llama.answers[:FOUR]
    with running(llama, tmp_path / "server.log", workers=2, verify="always") as (server, _):
        assert not ours_in_shared_memory(tmp_path)
        with ThreadPoolExecutor(FOUR) as clients:
            for _ in range(3):
                assert [*clients.map(server.stream, prompts)] == answers
        metrics = server.metrics()
        assert metrics["vllm:kvoffload_hit_blocks_total"] > 0
        assert metrics.get("vllm:kvoffload_verification_failures_total", 0) == 0
    assert not ours_in_shared_memory(tmp_path)


def test_calibrate_measures_a_server(llama: Path, tmp_path: Path) -> None:
    """Prompts as ids of tokens, as many as were meant, none of them in a cache; answers piece by piece."""
    with running(llama, tmp_path / "server.log") as (server, _):
        measured = calibration.Server(server.url)
        assert (measured.model, measured.max_tokens) == ("m", 512)
        before = server.metrics()
        found = calibration.server_speed(measured, (64, 128, 256, 400, 2048), 1, 2048)
        after = server.metrics()
    assert found["decode_tokens_per_s"].value > 0
    assert found["prefill_s_per_token"].value + found["prefill_s_per_token_squared"].value > 0
    computed, hits = "vllm:prompt_tokens_total", "vllm:prefix_cache_hits_total"
    assert after[computed] - before.get(computed, 0) == 64 + 64 + 128 + 256 + 400
    assert after[hits] == before.get(hits, 0)


def test_the_line_of_the_readme_is_what_a_shell_takes(
    llama: Path, on_llama: Expected, tmp_path: Path
) -> None:
    """As it stands there, but for the model, and for a size that every machine has."""
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    (line,) = (line for line in readme.splitlines() if line.startswith(TYPED))
    assert "--ram 64GiB" in line
    prompts, answers = on_llama.prompts[:FOUR], on_llama.answers[:FOUR]
    with running(llama, tmp_path / "server.log", line=line.replace("64GiB", "16MiB")) as (server, _):
        for _ in range(3):
            assert [server.stream(prompt) for prompt in prompts] == answers
        server.serve_until("vllm:kvoffload_hit_blocks_total", 1, prompts)
