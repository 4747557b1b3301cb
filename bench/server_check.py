"""Real servers against replays of their recordings: `kvoffload simulate --check`, as a user runs it.

    .venv-vllm/bin/python bench/server_check.py RECORDING... [--requests 120] [--load 0.4] [--ram-blocks 1000]

Calibrates the machine with a first server (``kvoffload calibrate``). Then, for each recording and store mode,
starts vLLM's server on the CPU with a tiny model and sends the first requests of the recording at their
times, scaled to `--load` of the server's prefill speed. Runs ``kvoffload simulate`` and ``kvoffload replay``
with ``--check`` on the server's own recording. A block has 32 tokens. Times need an idle machine.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from kvoffload.calibration.copy_speed import memory_copies
from kvoffload.simulate.machine import Quantity, read_machine
from kvoffload.traces.sources import load_trace
from kvoffload.traces.trace import Trace

ROOT = Path(__file__).resolve().parent.parent
BLOCK_TOKENS, STEP_TOKENS, MAX_RUNNING, ANSWER_TOKENS = 32, 512, 4, 4
LONGEST_BLOCKS, BLOCK_BYTES, BYTES_PER_TOKEN = 120, 128 << 10, 4096
MODES = (("lru", "on-compute"), ("hazard", "on-compute"), ("lru", "on-device-eviction"))
OURS = {
    "kv_connector": "KVOffloadConnector",
    "kv_connector_module_path": "kvoffload.integrations.vllm.connector",
}


def support(name: str) -> Any:
    sys.path.insert(0, str(ROOT / "tests"))
    return importlib.import_module(f"support.{name}")


def prompts(trace: Trace) -> list[list[int]]:
    """Return the prompts: full blocks with distinct tokens, and one more token."""
    token_lists = []
    for begin, end in pairwise(trace.offsets.tolist()):
        tokens = [7]
        for code in trace.refs[begin:end].tolist():
            block = random.Random(code)
            tokens += [block.randrange(8, 1000) for _ in range(BLOCK_TOKENS)]
        token_lists.append([*tokens[1:], 7])
    return token_lists


def flags(gpu_blocks: int) -> dict[str, Any]:
    return {
        "--max-model-len": 4096,
        "--num-gpu-blocks-override": gpu_blocks,
        "--max-num-seqs": MAX_RUNNING,
        "--max-num-batched-tokens": STEP_TOKENS,
    }


def kvoffload(*words: object) -> tuple[int, str]:
    """Run a command; return its exit code and output."""
    start = "import sys; from kvoffload.cli.main import main; sys.exit(main())"
    command = [sys.executable, "-c", start, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True)
    if not done.stdout:
        raise SystemExit(f"{' '.join(command)}: {done.stderr}")
    return done.returncode, done.stdout


def calibrated(model: Path, directory: Path, chosen: argparse.Namespace) -> tuple[Path, float]:
    """Measure a server; return the file of the machine, and the prefill seconds per prompt token."""
    machine = directory / "machine.json"
    start = support("vllm_api_server").running
    with start(model, directory / "log", flags=flags(chosen.gpu_blocks), fresh=True) as (server, _):
        kvoffload(
            "calibrate", "--url", server.url, "--out", machine, "--block-bytes", BLOCK_BYTES,
            "--step-tokens", STEP_TOKENS, "--total-bytes", "64MiB", "--repeats", 5, "--quiet",
        )  # fmt: skip
    # Without a GPU, copies to the device are copies in memory.
    measured, copies = read_machine(machine), memory_copies(BLOCK_BYTES, 64, 20)["memory_copy_bytes_per_s"]
    latency = Quantity(1e-3, 1e-3, 1e-3, "assumed")
    complete = msgspec.structs.replace(
        measured, load_bytes_per_s=copies, store_bytes_per_s=copies, copy_latency_s=latency
    )
    machine.write_bytes(complete.to_json())
    assert complete.prefill_s_per_token is not None
    return machine, complete.prefill_s_per_token.value


def serve(server: Any, trace: Trace, s_per_token: float, load: float) -> None:
    """Send all requests at the recording's times, scaled so that prefill without a cache takes `load`."""
    work_s = trace.block_refs * BLOCK_TOKENS * s_per_token
    arrivals = trace.timestamps_ms - trace.timestamps_ms[0]
    scale = work_s / load / max(1, int(arrivals[-1]))
    begin, threads = time.monotonic(), []
    for prompt, arrival in zip(prompts(trace), (arrivals * scale).tolist(), strict=True):
        time.sleep(max(0.0, begin + arrival - time.monotonic()))
        threads.append(threading.Thread(target=ask, args=(server, prompt)))
        threads[-1].start()
    for thread in threads:
        thread.join()


def ask(server: Any, prompt: list[int]) -> None:
    body = {"model": "m", "prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True}
    urllib = importlib.import_module("urllib.request")
    request = urllib.Request(
        f"{server.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.urlopen(request, timeout=600) as response:
        response.read()


def compare(recording: Path, server: Any, machine: Path, mode: tuple[str, str], chosen: Any) -> list[str]:
    """Return a line for each command: served and predicted values of the compared quantities."""
    common = [
        recording, "--policy", mode[0], "--store", mode[1], "--capacity", chosen.ram_blocks,
        "--device-blocks", chosen.gpu_blocks - 1, "--bytes-per-token", BYTES_PER_TOKEN,
        "--check", server.url, "--format", "json", "--quiet",
    ]  # fmt: skip
    timed = ["--machine", machine, "--max-running", MAX_RUNNING, "--step-tokens", STEP_TOKENS]
    lines = []
    for command, options in (("simulate", timed), ("replay", ["--no-data"])):
        code, output = kvoffload(command, *common, *options)
        check = json.loads(output)["check"]
        cells = [
            f"{row['name']} {row['server']:.4g} / {row['predicted']:.4g} ({100 * row['difference']:+.1f})"
            for row in check["rows"][2:]
        ]
        lines.append(f"  {command:8s} {check['verdict']:9s} {code}  " + "  ".join(cells + check["settings"]))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recordings", nargs="+")
    parser.add_argument("--requests", type=int, default=120)
    parser.add_argument("--load", type=float, default=0.4, help="share of the prefill speed without a cache")
    parser.add_argument("--gpu-blocks", type=int, default=400)
    parser.add_argument("--ram-blocks", type=int, default=1000)
    chosen = parser.parse_args()
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = support("vllm_engine").write_llama(directory / "llama")
        machine, s_per_token = calibrated(model, directory, chosen)
        print(f"{1 / s_per_token:,.0f} prompt tokens/s; server / predicted (difference in points or %)")
        for name in chosen.recordings:
            whole = load_trace(name)
            lengths = np.diff(whole.offsets)
            trace = whole.of_requests(np.flatnonzero((lengths > 0) & (lengths <= LONGEST_BLOCKS)))
            trace = trace.of_requests(np.arange(min(chosen.requests, trace.requests)))
            for number, mode in enumerate(MODES):
                recording = directory / f"{trace.name}-{number}.jsonl"
                with support("vllm_api_server").running(
                    model, directory / "log", connector=OURS, flags=flags(chosen.gpu_blocks), fresh=True,
                    policy=mode[0], store=mode[1], ram=chosen.ram_blocks * BLOCK_BYTES, record=str(recording),
                ) as (server, _):  # fmt: skip
                    serve(server, trace, s_per_token, chosen.load)
                    time.sleep(1.0)  # the recorder writes its buffer
                    print(f"{trace.name}, {trace.requests} requests, {mode[0]}, {mode[1]}")
                    print("\n".join(compare(recording, server, machine, mode, chosen)), flush=True)


if __name__ == "__main__":
    main()
