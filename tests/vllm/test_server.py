"""vLLM's OpenAI server, as users run it: processes, HTTP, streams, metrics, and a kill."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvoffload.integrations.vllm.pool import SHARED_MEMORY
from kvoffload.tiers.disk.inspection import opened
from kvoffload.tiers.disk.slab import SLAB_NAME

pytest.importorskip("vllm.v1", reason="vllm is not installed here: `make test-vllm` builds an environment")
from traffic import random_prompts

PROMPTS = random_prompts(seed=9, count=4, length=300)
START_TIMEOUT_S, ANSWER_TIMEOUT_S = 240, 60


class Server:
    """A server that runs, and what can be asked of it."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=ANSWER_TIMEOUT_S) as response:
            return str(response.read().decode())

    def stream(self, prompt: list[int]) -> str:
        """What the server says to a prompt, piece by piece."""
        body = {"model": "m", "prompt": prompt, "max_tokens": 12, "temperature": 0, "stream": True}
        request = urllib.request.Request(
            self.url + "/v1/completions",
            json.dumps(body | {"ignore_eos": True}).encode(),
            {"Content-Type": "application/json"},
        )
        said, pieces = "", 0
        with urllib.request.urlopen(request, timeout=ANSWER_TIMEOUT_S) as response:
            for line in response:
                data = line.decode().strip().removeprefix("data: ")
                if data and data != "[DONE]":
                    said += json.loads(data)["choices"][0]["text"]
                    pieces += 1
        assert pieces >= 6
        return said

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


@contextmanager
def running(model: Path, log: Path, *, workers: int = 1, **options: Any) -> Iterator[tuple[Server, Any]]:
    """A server with our offloading, until the block ends; then everything of it is killed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    transfer = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "engine_id": "the-same-again",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "spec_name": "KVOffloadSpec",
            "spec_module_path": "kvoffload.integrations.vllm",
            "ram": "8MiB",
            "policy": "arc",
            **options,
        },
    }
    settings = {
        "--model": model,
        "--served-model-name": "m",
        "--port": port,
        "--dtype": "bfloat16",
        "--block-size": 32,
        "--max-model-len": 512,
        "--num-gpu-blocks-override": 24,
        "--max-num-seqs": 4,
        "--tensor-parallel-size": workers,
        "--prefix-caching-hash-algo": "sha256_cbor",
        "--kv-transfer-config": json.dumps(transfer),
    }
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
    command += [str(part) for pair in settings.items() for part in pair]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(part for part in sys.path if part),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(["0"] * workers),
    }
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            server, deadline = Server(port), time.monotonic() + START_TIMEOUT_S
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
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def ours_in_shared_memory() -> list[str]:
    return [file.name for file in SHARED_MEMORY.iterdir() if file.name.startswith("kvoffload")]


def test_server_is_killed_and_starts_again(llama: Path, tmp_path: Path) -> None:
    """One worker; then, with the same name, two workers that share each block, and verification."""
    with running(llama, tmp_path / "first.log") as (server, process):
        assert not ours_in_shared_memory(), "the pool has no name any more"
        with ThreadPoolExecutor(4) as clients:
            first = list(clients.map(server.stream, PROMPTS))
            again = [list(clients.map(server.stream, PROMPTS)) for _ in range(3)]
        assert all(said == first for said in again)
        metrics = server.metrics()
        assert metrics["vllm:kvoffload_hit_blocks_total"] > 0
        assert metrics["vllm:kvoffload_stored_blocks_total"] == 36
        assert metrics["vllm:kvoffload_capacity_blocks"] == 128
        assert metrics["vllm:kvoffload_ready_blocks"] == 36
        assert metrics["vllm:kv_offload_load_bytes_total"] > 0
        assert metrics["vllm:kv_offload_load_time_total"] > 0
        assert metrics["vllm:kv_offload_store_bytes_total"] == 36 * 65536
        assert metrics["vllm:kvoffload_policy_state:target_t1_blocks"] >= 0
        greeting = (tmp_path / "first.log").read_text()
        assert re.search(
            r"kvoffload: 128 blocks of 32 tokens, room for 4,096 tokens in 0.01 GiB; policy arc", greeting
        )
        with ThreadPoolExecutor(4) as clients:
            cut_off = [clients.submit(server.stream, prompt) for prompt in PROMPTS]
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        assert all(future.exception() or future.result() for future in cut_off), "all ended"
    assert not ours_in_shared_memory()
    with running(llama, tmp_path / "second.log", workers=2, verify="always") as (server, _):
        assert not ours_in_shared_memory()
        with ThreadPoolExecutor(4) as clients:
            first = list(clients.map(server.stream, PROMPTS))
            again = [list(clients.map(server.stream, PROMPTS)) for _ in range(2)]
        assert all(said == first for said in again)
        metrics = server.metrics()
        assert metrics["vllm:kvoffload_hit_blocks_total"] > 0
        assert metrics.get("vllm:kvoffload_verification_failures_total", 0) == 0
    assert not ours_in_shared_memory()


def test_a_second_life_answers_from_the_disk_of_the_first(llama: Path, tmp_path: Path) -> None:
    """A server is killed; the next one has its blocks. Then the slab is damaged, and only hits are fewer."""
    disk = tmp_path / "disk"
    options = {"tiers": [{"type": "disk", "path": str(disk), "capacity": "16MiB"}]}
    with running(llama, tmp_path / "first.log", **options) as (server, process):
        first = [server.stream(prompt) for prompt in PROMPTS]
        deadline = time.monotonic() + ANSWER_TIMEOUT_S
        while server.metrics().get("vllm:kvoffload_tier_written_total", 0) < 36:
            assert time.monotonic() < deadline, server.metrics()
            server.stream(PROMPTS[0])
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    with running(llama, tmp_path / "second.log", **options) as (server, _):
        assert [server.stream(prompt) for prompt in PROMPTS] == first
        hits = server.metrics()["vllm:kvoffload_tier_hits_total"]
    assert hits == 36
    with opened(disk) as (slab, found):
        offsets = [slab.layout.slot_offset(slot) for slot in found.contents.slots().tolist()]
    with (disk / SLAB_NAME).open("r+b") as file:
        for offset in offsets[::3]:
            file.seek(offset + 1000)
            file.write(b"\x5a" * 512)
    with running(llama, tmp_path / "third.log", **options) as (server, _):
        assert [server.stream(prompt) for prompt in PROMPTS] == first
        metrics = server.metrics()
    assert metrics.get("vllm:kvoffload_tier_hits_total", 0) < 36
    assert metrics["vllm:kvoffload_tier_mismatches_total"] > 0
