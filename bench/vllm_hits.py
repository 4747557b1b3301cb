"""Hits of a recording in vLLM's real scheduler, for each offloading method, without a model.

    .venv-vllm/bin/python bench/vllm_hits.py RECORDING [--ram-blocks 4000 8000] [--sides "ours, lru"]

Each side has its own vLLM scheduler and connector, the same GPU blocks and the same RAM. A block of the
recording is a block of 16 tokens. Requests run in the recording's order, at most `--at-once` at a time;
transfers end one step after their start. Prints for each side: the shares of prompt blocks from the GPU's
cache and from RAM; the blocks copied to RAM; the CPU time of a request in the scheduler; our replay's
prediction of the hits.
"""

from __future__ import annotations

import argparse
import importlib
import random
import sys
import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash

from kvoffload.replay.config import ReplayConfig
from kvoffload.replay.replay import Replay
from kvoffload.traces.sources import load_trace
from kvoffload.traces.trace import Trace
from vllm_scheduler import Layout, Side

ROOT = Path(__file__).resolve().parent.parent
BLOCK_TOKENS, STEP_BLOCKS = 16, 16
_NATIVE = {"spec_name": "CPUOffloadingSpec"}
_OURS = {
    "spec_name": "KVOffloadSpec",
    "spec_module_path": "kvoffload.integrations.vllm",
    "connector": True,
    "prompt_only": True,
}
VICTIM = "on-device-eviction"
SIDES: dict[str, dict[str, Any] | None] = {
    "no offload": None,
    "vLLM native, lru": _NATIVE | {"eviction_policy": "lru"},
    "vLLM native, arc": _NATIVE | {"eviction_policy": "arc"},
    "vLLM simple, eager": {"simple": True},
    "vLLM simple, lazy": {"simple": True, "lazy_offload": True},
    "ours, lru": _OURS | {"policy": "lru"},
    "ours, hazard": _OURS | {"policy": "hazard"},
    "ours, lru, victim": _OURS | {"policy": "lru", "store": VICTIM},
    "ours, hazard, victim": _OURS | {"policy": "hazard", "store": VICTIM},
}


def prompts(trace: Trace) -> Iterator[list[int]]:
    """Yield the prompts: full blocks with distinct tokens, and one more token, which is computed."""
    for begin, end in pairwise(trace.offsets.tolist()):
        tokens = []
        for code in trace.refs[begin:end].tolist():
            block = random.Random(code)
            tokens += [block.randrange(1, 1000) for _ in range(BLOCK_TOKENS)]
        yield [*tokens, 7]


def without_long(trace: Trace, longest_blocks: int) -> Trace:
    """Remove empty requests, and requests too long to run in parallel on the GPU."""
    lengths = np.diff(trace.offsets)
    return trace.of_requests(np.flatnonzero((lengths > 0) & (lengths <= longest_blocks)))


def predicted(trace: Trace, options: dict[str, Any] | None, layout: Layout) -> tuple[float, float] | None:
    """Predict the shares of hits on the GPU and in RAM with our replay; None for vLLM's own managers."""
    if options is not None and options.get("spec_name") != "KVOffloadSpec":
        return None
    options = options or {}
    config = ReplayConfig(
        capacity_blocks=layout.ram_blocks if options else 1,
        policy=options.get("policy", "lru"),
        admission="all",
        device_blocks=layout.gpu_blocks,
        store=options.get("store", "on-compute"),
    )
    report = Replay(trace, config).run()
    hits = report.offload_hit_blocks if options else 0
    return report.device_hit_blocks / report.block_refs, hits / report.block_refs


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recording")
    parser.add_argument("--gpu-blocks", type=int, default=2000)
    parser.add_argument("--ram-blocks", type=int, nargs="+", default=[4000, 8000])
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument(
        "--requests", type=int, default=None, help="number of requests from the beginning; default: all"
    )
    parser.add_argument("--sides", nargs="+", default=[*SIDES], choices=[*SIDES], metavar="SIDE")
    chosen = parser.parse_args()
    sys.path.insert(0, str(ROOT / "tests"))
    tiny: Any = importlib.import_module("support.vllm_engine")
    init_none_hash(sha256)
    recording = load_trace(chosen.recording)
    longest = chosen.gpu_blocks // (2 * chosen.at_once)
    trace = without_long(recording, longest)
    if chosen.requests is not None:
        trace = trace.of_requests(np.arange(min(chosen.requests, trace.requests)))
    print(f"{trace.name}: {trace.requests:,} of {recording.requests:,} requests, {trace.block_refs:,} blocks")
    with tempfile.TemporaryDirectory() as directory:
        model = tiny.write_llama(Path(directory) / "llama", tiny.LLAMA | {"max_position_embeddings": 65536})
        for ram_blocks in chosen.ram_blocks:
            layout = Layout(
                BLOCK_TOKENS,
                STEP_BLOCKS * BLOCK_TOKENS,
                (longest + 2) * BLOCK_TOKENS,
                chosen.gpu_blocks,
                ram_blocks,
            )
            print(f"\nGPU {chosen.gpu_blocks:,} blocks, RAM {ram_blocks:,} blocks")
            print(f"{'':22s}    GPU    RAM    all   stored   CPU us   replay: GPU    RAM")
            for name in chosen.sides:
                options = SIDES[name]
                side = Side(model, options, layout)
                side.serve(prompts(trace), "r", chosen.at_once)
                total = trace.block_refs * BLOCK_TOKENS
                gpu, ram = side.num_device_hits / total, side.num_ram_hits / total
                expected = predicted(trace, options, layout)
                shown = "" if expected is None else f"{expected[0]:14.1%} {expected[1]:6.1%}"
                print(
                    f"{name:22s} {gpu:6.1%} {ram:6.1%} {gpu + ram:6.1%} {side.num_stored:8,} "
                    f"{1e6 * side.whole_s / trace.requests:8,.0f} {shown}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
