"""A real vLLM engine replays a cut of a recorded trace: without offloading, with vLLM's manager, with ours.

    KVOFFLOAD_TRACES=... .venv-vllm/bin/python bench/vllm_engine.py [--rounds 3] [--device cuda]

The cut consists of 300 requests of 16 parallel sessions from the second half of the agentic recording, each
cut to its first 32 blocks. A block of the trace (512 tokens) becomes a block of the engine (32 tokens) with
token ids derived from its number, so that shared blocks stay shared. The model is the tiny model of
tests/vllm, in one thread, in bf16; answers are not compared.

With ``--device cuda`` a block keeps its 512 tokens, and the model has the shape of Llama 3.2 3B with random
weights. All engines share the GPU; each needs 6 GiB and its KV cache.

Each side is an engine in a separate process. The engines take turns, with one slice of the trace per turn, so
that changes of the machine's speed affect all. Ratios are medians, relative to vLLM's LRU on the same slice
in the same round. Hits vary slightly between rounds with the timing of transfers.

`manager` is the CPU time of all calls of the offloading manager on the scheduler's thread; `lookup` is the
part of it in which the connector determines the length of a hit. `--keyed` adds our manager with one lookup
per key.
"""

from __future__ import annotations

import argparse
import importlib
import json
import lzma
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
BLOCK_TOKENS, VOCABULARY, ANSWER_TOKENS, AT_ONCE = 32, 1024, 4, 2
SESSIONS = 16

_OURS = {"spec_name": "KVOffloadSpec", "spec_module_path": "kvoffload.integrations.vllm"}
_NATIVE = {"spec_name": "NativeOnCPU", "spec_module_path": "vllm_native"}
_CONNECTOR = "kvoffload.integrations.vllm.connector"
_VICTIM = {"store": "on-device-eviction"}
SIDES: dict[str, dict[str, Any] | None] = {
    "no offload": None,
    "vLLM lru": _NATIVE | {"eviction_policy": "lru"},
    "vLLM arc": _NATIVE | {"eviction_policy": "arc"},
    "ours lru": _OURS | {"policy": "lru", "connector": True},
    "ours hazard": _OURS | {"policy": "hazard", "connector": True},
    "ours victim lru": _OURS | _VICTIM | {"policy": "lru", "connector": True},
    "ours victim hazard": _OURS | _VICTIM | {"policy": "hazard", "connector": True},
}
KEYED = {"ours lru, key by key": _OURS | {"policy": "lru"}}
BASE = "vLLM lru"
_NATIVE_ON_GPU = {"spec_name": "CPUOffloadingSpec", "spec_module_path": "vllm.v1.kv_offload.cpu.spec"}

LLAMA_3B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 3072,
    "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24, "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128_256, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0,
    "hidden_act": "silu", "tie_word_embeddings": True, "torch_dtype": "bfloat16", "bos_token_id": 0,
    "eos_token_id": 1,
}  # fmt: skip


class Scale(NamedTuple):
    """Sizes for a device, and the model. `block_tokens` are the tokens of a trace's block."""

    block_tokens: int
    engine_block_tokens: int
    step_tokens: int
    model: dict[str, Any]

    @property
    def block_bytes(self) -> int:
        """Bytes of KV for a trace's block."""
        heads = self.model["num_key_value_heads"] * self.model["head_dim"] * self.model["num_hidden_layers"]
        return int(2 * 2 * heads * self.block_tokens)


def scale_of(device: str) -> Scale:
    """Return the sizes for ``cpu`` or ``cuda``."""
    if device == "cuda":
        return Scale(512, 16, 8192, LLAMA_3B)
    return Scale(BLOCK_TOKENS, BLOCK_TOKENS, 8 * BLOCK_TOKENS, tiny().LLAMA)


def cut(path: Path, requests: int, longest: int) -> list[list[int]]:
    """Return the block numbers of each request."""
    with lzma.open(path, "rt") as lines:
        rows = [json.loads(line) for line in lines]
    sessions: list[str] = []
    selected: list[list[int]] = []
    middle = rows[len(rows) // 2]["timestamp"]
    for row in rows:
        if row["timestamp"] < middle:
            continue
        if row["session"] not in sessions and len(sessions) < SESSIONS:
            sessions.append(row["session"])
        blocks = row["hash_ids"][: min(longest, row["input_length"] // 512)]
        if row["session"] in sessions and blocks:
            selected.append(blocks)
        if len(selected) == requests:
            break
    return selected


def prompt_of(blocks: list[int], block_tokens: int = BLOCK_TOKENS) -> list[int]:
    """Return token ids; equal blocks have equal tokens."""
    prompt: list[int] = []
    for block in blocks:
        rng = random.Random(block)
        prompt += [rng.randrange(2, VOCABULARY) for _ in range(block_tokens)]
    return prompt


def tiny() -> Any:
    """Return the model and the engine class of tests/vllm."""
    sys.path.insert(0, str(ROOT / "tests"))
    return importlib.import_module("support.vllm_engine")


# ---- one engine, in a separate process


class Clock:
    """Sums the CPU time of a set of calls; nested calls count once."""

    def __init__(self) -> None:
        self.seconds, self._depth = 0.0, 0

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a call to measure its CPU time."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            start = time.thread_time()
            try:
                return call(*args, **kwargs)
            finally:
                self._depth -= 1
                if self._depth == 0:
                    self.seconds += time.thread_time() - start

        return timed


_CALLS = (
    *("lookup", "lookup_prefix", "prepare_load", "complete_load", "prepare_store", "complete_store"),
    *("store_dropped", "keep_dropped", "touch", "on_new_request", "on_request_finished"),
    *("on_schedule_end", "take_events", "get_load_source", "get_stats"),
)


class Side:
    """An engine that replays slices, with its measurements.

    Attributes:
        clock: CPU time of the measured calls.
    """

    def __init__(self, model: Path, offload: dict[str, Any] | None, options: argparse.Namespace) -> None:
        scale = scale_of(options.device)
        per_block = scale.block_tokens // scale.engine_block_tokens
        settings: dict[str, Any] = {
            "dtype": "bfloat16",
            "block_size": scale.engine_block_tokens,
            "num_gpu_blocks_override": options.gpu_blocks * per_block + 1,
            "max_model_len": options.longest * scale.block_tokens + 64,
            "max_num_batched_tokens": scale.step_tokens,
        }
        if options.device == "cuda":
            # Without a measurement of free memory, because other engines start at the same time.
            kv_bytes = (options.gpu_blocks + 1) * scale.block_bytes
            settings |= {
                "load_format": "dummy",
                "gpu_memory_utilization": 0.05,
                "kv_cache_memory_bytes": kv_bytes,
            }
        if offload is not None:
            connector = offload.pop("connector", False)
            offload["cpu_bytes_to_use"] = options.ram_blocks * scale.block_bytes
            if options.device == "cuda" and offload["spec_name"] == _NATIVE["spec_name"]:
                offload |= _NATIVE_ON_GPU
            settings["connector"] = connector
        self.engine = tiny().Engine(model, offload, **settings)
        self.offloads = offload is not None
        self.clock = time.perf_counter
        self.hits: dict[str, tuple[int, int]] = {}
        self.manager, self.lookup = Clock(), Clock()
        if offload is not None:
            self._watch(self.engine.connector.connector_scheduler)
        else:
            self._watch_plain()

    def _watch(self, scheduler: Any) -> None:
        manager = scheduler.manager
        for name in _CALLS:
            if hasattr(manager, name):
                setattr(manager, name, self.manager.around(getattr(manager, name)))
        scheduler._lookup = self.lookup.around(scheduler._lookup)
        matched = scheduler.get_num_new_matched_tokens

        def recorded(request: Any, num_computed_tokens: int, *args: Any, **kwargs: Any) -> Any:
            matched_tokens, later = matched(request, num_computed_tokens, *args, **kwargs)
            if matched_tokens is not None:
                self.hits.setdefault(request.request_id, (num_computed_tokens, matched_tokens))
            return matched_tokens, later

        scheduler.get_num_new_matched_tokens = recorded

    def _watch_plain(self) -> None:
        cache = self.engine.core.scheduler.kv_cache_manager
        computed = cache.get_computed_blocks

        def recorded(request: Any, *args: Any, **kwargs: Any) -> Any:
            result = computed(request, *args, **kwargs)
            self.hits.setdefault(request.request_id, (result[1], 0))
            return result

        cache.get_computed_blocks = recorded

    def replay(self, name: str, prompts: list[list[int]]) -> dict[str, Any]:
        """Serve these prompts, `AT_ONCE` at a time; returns the measurements."""
        from vllm import SamplingParams

        llm, waiting = self.engine.llm.llm_engine, list(enumerate(prompts))
        sent: dict[str, float] = {}
        first: dict[str, float] = {}
        sampling = SamplingParams(
            temperature=0.0, max_tokens=ANSWER_TOKENS, ignore_eos=True, detokenize=False
        )
        self.hits.clear()
        before = (self.manager.seconds, self.lookup.seconds)
        running: set[str] = set()
        start, start_cpu = self.clock(), time.process_time()
        while waiting or running:
            while waiting and len(running) < AT_ONCE:
                number, prompt = waiting.pop(0)
                request = f"{name}-{number}"
                sent[request] = self.clock()
                llm.add_request(request, {"prompt_token_ids": prompt}, sampling)
                running.add(request)
            for output in llm.step():
                if output.outputs[0].token_ids:
                    first.setdefault(output.request_id, self.clock() - sent[output.request_id])
                if output.finished:
                    running.discard(output.request_id)
        seconds, cpu_seconds = self.clock() - start, time.process_time() - start_cpu
        if self.offloads:
            self.engine.drain()
        return {
            "seconds": seconds,
            "cpu_seconds": cpu_seconds,
            "tokens": sum(map(len, prompts)),
            "device_hit_tokens": sum(device for device, _ in self.hits.values()),
            "ram_hit_tokens": sum(ram for _, ram in self.hits.values()),
            "ttft": sorted(first.values()),
            "manager_seconds": self.manager.seconds - before[0],
            "lookup_seconds": self.lookup.seconds - before[1],
        }

    def forget(self) -> None:
        """Empty all caches before the next round."""
        self.engine.llm.reset_prefix_cache(reset_connector=True)


def serve(options: argparse.Namespace) -> None:
    """Replay the parent's slices: reads a slice per line, writes its measurements as a line."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    block_tokens = scale_of(options.device).block_tokens
    requests = cut(options.trace, options.requests, options.longest)
    prompts = [prompt_of(blocks, block_tokens) for blocks in requests]
    offload = (SIDES | KEYED)[options.side]
    side = Side(options.model, dict(offload) if offload else None, options)
    side.replay("warm-up", [prompt_of(list(range(-5, 0)), block_tokens)] * 3)
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        round_number, start, stop = json.loads(line)
        if start == 0:
            side.forget()
        print(
            json.dumps(side.replay(f"{round_number}-{start}", prompts[start:stop])), file=answers, flush=True
        )


# ---- all engines


class Process:
    """An engine in a separate process. It prints a line when it is ready."""

    script = __file__

    def __init__(self, side: str, model: Path, options: argparse.Namespace) -> None:
        environment = os.environ | {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "OMP_NUM_THREADS": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "PYTHONPATH": os.pathsep.join([str(ROOT / "bench"), *sys.path[1:]]),
        }
        arguments = [sys.executable, self.script, "--side", side, "--model", str(model)]
        for name in ("trace", "requests", "longest", "gpu_blocks", "ram_blocks", "device"):
            arguments += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  (as long as the process)
        self._process = subprocess.Popen(
            arguments,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment,
        )

    def answer(self) -> str:
        """Return the next line that the process prints."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            sys.exit(f"an engine ended:\n{self._log.read()[-4000:]}")
        return line

    def replay(self, *slice_of_round: int) -> dict[str, Any]:
        """Let the process replay a slice."""
        assert self._process.stdin is not None
        print(json.dumps(slice_of_round), file=self._process.stdin, flush=True)
        measurements: dict[str, Any] = json.loads(self.answer())
        return measurements

    def close(self) -> None:
        """Let the process end."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def wait(self) -> None:
        """Wait for the end of the process; kill it after a minute."""
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def model_for(device: str, directory: Path) -> Path:
    """Write the model of a device; on a GPU only its shape, because its weights are random."""
    if device == "cpu":
        path: Path = tiny().write_llama(directory)
        return path
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(LLAMA_3B))
    return directory


def run(options: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """Run every slice of every round on each side in turn; returns side -> measurements of its slices."""
    names = [
        name
        for name in (SIDES | (KEYED if options.keyed else {}))
        if not options.only or name in options.only
    ]
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as directory:
        model = model_for(options.device, Path(directory) / "model")
        engines = {name: Process(name, model, options) for name in names}
        for name, engine in engines.items():
            engine.answer()
            print(f"{name}: ready", file=sys.stderr)
        for round_number in range(options.rounds):
            for start in range(0, options.requests, options.slice):
                # Random order: the processor's caches are cold for the first side.
                for name in random.Random(start).sample(names, len(names)):
                    stop = min(start + options.slice, options.requests)
                    results[name].append(engines[name].replay(round_number, start, stop))
                    print(f"round {round_number + 1}, {stop}: {name}", file=sys.stderr)
        for engine in engines.values():
            engine.close()
        for engine in engines.values():
            engine.wait()
    return results


def summary(results: dict[str, list[dict[str, Any]]], rounds: int) -> list[dict[str, Any]]:
    """Return a row for each side."""
    rows = []
    base = results.get(BASE)
    for name, slices in results.items():
        total = {key: sum(measured[key] for measured in slices) for key in slices[0] if key != "ttft"}
        ttft = [seconds for measured in slices for seconds in measured["ttft"]]
        row = {
            "side": name,
            "device_hit_tokens": total["device_hit_tokens"] // rounds,
            "ram_hit_tokens": total["ram_hit_tokens"] // rounds,
            "hit_ratio": (total["device_hit_tokens"] + total["ram_hit_tokens"]) / total["tokens"],
            "ttft_ms": 1e3 * statistics.median(ttft),
            "ttft_p90_ms": 1e3 * statistics.quantiles(ttft, n=10)[8],
            "tokens_per_s": total["tokens"] / total["seconds"],
            "tokens_per_cpu_s": total["tokens"] / total["cpu_seconds"],
            "manager_us_per_request": 1e6 * total["manager_seconds"] / len(ttft),
            "lookup_us_per_request": 1e6 * total["lookup_seconds"] / len(ttft),
        }
        if base is not None:
            speed = [b["seconds"] / a["seconds"] for a, b in zip(slices, base, strict=True)]
            first = [
                statistics.median(b["ttft"]) / statistics.median(a["ttft"])
                for a, b in zip(slices, base, strict=True)
            ]
            row |= {"throughput_ratio": statistics.median(speed), "ttft_ratio": statistics.median(first)}
        rows.append(row)
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table of docs/performance.md."""
    print("| side | hit ratio | GPU hit tokens | RAM hit tokens | TTFT p50 / p90 ms | tokens/s | throughput "
          "| TTFT | manager µs/request | lookup µs/request |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|---|---|")
    unknown = float("nan")
    for row in rows:
        cells = [
            row["side"],
            f"{row['hit_ratio']:.3f}",
            f"{row['device_hit_tokens']:,}",
            f"{row['ram_hit_tokens']:,}",
            f"{row['ttft_ms']:.0f} / {row['ttft_p90_ms']:.0f}",
            f"{row['tokens_per_s']:,.0f}",
            f"{row.get('throughput_ratio', unknown):.2f}x",
            f"{row.get('ttft_ratio', unknown):.2f}x",
            f"{row['manager_us_per_request']:,.0f}",
            f"{row['lookup_us_per_request']:,.0f}",
        ]
        print(f"| {' | '.join(cells)} |")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the trace and the engines."""
    traces = Path(os.environ.get("KVOFFLOAD_TRACES", ROOT.parent / "shared" / "traces"))
    parser.add_argument("--trace", type=Path, default=traces / "agentic_coding" / "agentic_3h.jsonl.xz")
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--longest", type=int, default=32, help="blocks kept of each request")
    parser.add_argument("--gpu-blocks", type=int, default=100)
    parser.add_argument("--ram-blocks", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--slice", type=int, default=50, help="requests per turn")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser)
    parser.add_argument("--only", action="append", help="side to run; repeatable")
    parser.add_argument(
        "--keyed", action="store_true", help="also run our manager with vLLM's connector, one lookup per key"
    )
    parser.add_argument("--format", choices=["table", "json"], default="table")
    options = parser.parse_args()
    if options.side:
        serve(options)
        return
    rows = summary(run(options), options.rounds)
    if options.format == "json":
        print(json.dumps(rows, indent=2))
    else:
        show(rows)


if __name__ == "__main__":
    main()
