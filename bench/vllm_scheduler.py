"""CPU time of a request in vLLM's real scheduler, for each offloading method, without a model.

    .venv-vllm/bin/python bench/vllm_scheduler.py [--rounds 5]

Each side has its own vLLM scheduler and connector, in one process, and the same number of blocks in RAM. A
step is `schedule` and `update_from_output`; the model's answers are constant, and transfers end one step
after their start. The sides take turns, with one round of requests per turn.

Prints two kinds of tables:

- CPU time of a request with a short answer. *whole*: CPU time of a request in both calls, minus the time
  without offloading. *manager*: CPU time in calls of the offloading manager, from a second scheduler whose
  manager is timed. Ratios are medians, relative to vLLM's LRU in the same round.
- CPU time of a step in which each running request generates one token. *added*: the step's time minus the
  time without offloading.
"""

from __future__ import annotations

import argparse
import importlib
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.simple_kv_offload.metadata import (
    INVALID_JOB_ID,
    SimpleCPUOffloadMetadata,
    SimpleCPUOffloadWorkerMetadata,
)
from vllm.v1.structured_output import StructuredOutputManager

ROOT = Path(__file__).resolve().parent.parent
HEADS, HEAD_BYTES = 4, 16
"""A block of 16 tokens has 4 KiB, one page. Our slots are full pages: smaller blocks would waste our RAM."""
ANSWER_TOKENS, AT_ONCE = 4, 4
GPU_PROMPTS, RAM_PROMPTS = 6, 40
"""Capacity of the GPU's cache and of RAM, in prompts."""

_OURS = {"spec_name": "KVOffloadSpec", "spec_module_path": "kvoffload.integrations.vllm", "policy": "lru"}
_CONNECTOR = "kvoffload.integrations.vllm.connector"
NATIVE = "vLLM lru"
SIDES: dict[str, dict[str, Any] | None] = {
    "no offload": None,
    NATIVE: {"spec_name": "CPUOffloadingSpec", "eviction_policy": "lru"},
    "ours, key by key": _OURS,
    "ours": _OURS | {"connector": True},
    "ours, victim": _OURS | {"connector": True, "store": "on-device-eviction"},
}
SIMPLE: dict[str, dict[str, Any] | None] = {"vLLM simple, eager": {"simple": True}}
MANAGER_CALLS = (
    "on_new_request", "lookup", "lookup_prefix", "prepare_load", "touch", "complete_load", "prepare_store",
    "complete_store", "on_request_finished", "take_events", "on_schedule_end", "get_stats",
    "has_pending_work", "get_load_source", "store_dropped", "keep_dropped",
)  # fmt: skip


class Traffic(NamedTuple):
    """A kind of traffic. `prompts`: number of repeated prompts; 0 if every prompt is new."""

    step_tokens: int
    prompt_tokens: int
    block_tokens: int
    prompts: int

    def __str__(self) -> str:
        hits = "many hits" if self.prompts else "few hits"
        sizes = f"steps of {self.step_tokens:,}, prompts of {self.prompt_tokens:,}"
        return f"{sizes}, blocks of {self.block_tokens}, {hits}"


TRAFFIC = (
    Traffic(256, 1024, 32, 0),
    Traffic(2048, 8192, 16, 0),
    Traffic(8192, 8192, 16, 0),
    Traffic(2048, 8192, 16, 24),
)


class Layout(NamedTuple):
    """Sizes of a scheduler and of RAM: tokens of a block, of a step and of the longest request; blocks.

    `running`: requests that may run at a time.
    """

    block_tokens: int
    step_tokens: int
    max_model_tokens: int
    gpu_blocks: int
    ram_blocks: int
    running: int = AT_ONCE
    answer_tokens: int = ANSWER_TOKENS

    @classmethod
    def of(cls, traffic: Traffic) -> Layout:
        per_prompt = traffic.prompt_tokens // traffic.block_tokens
        return cls(
            traffic.block_tokens,
            traffic.step_tokens,
            traffic.prompt_tokens + 64,
            GPU_PROMPTS * per_prompt,
            RAM_PROMPTS * per_prompt,
        )

    def transfer(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return vLLM's ``--kv-transfer-config`` of a side."""
        extra = dict(options)
        simple, connector = extra.pop("simple", False), extra.pop("connector", False)
        is_ours = extra.get("spec_name") == "KVOffloadSpec"
        ram_bytes = self.ram_blocks * 2 * HEADS * HEAD_BYTES * 2 * self.block_tokens
        extra["ram" if is_ours else "cpu_bytes_to_use"] = ram_bytes
        name = "KVOffloadConnector" if connector else "OffloadingConnector"
        return {
            "kv_connector": "SimpleCPUOffloadConnector" if simple else name,
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
            **({"kv_connector_module_path": _CONNECTOR} if connector else {}),
        }


class Side:
    """A scheduler with its connector, and fakes of the model and the transfers.

    Attributes:
        whole_s: CPU seconds in calls of the scheduler.
        manager_s: CPU seconds in calls of the offloading manager; 0 without `times_manager`. The clock takes
            about 1 us a call, and vLLM's own manager is called for each block.
        decode_s: CPU seconds of each step in which all requests that may run generate one token.
        num_stored: blocks copied to RAM.
        num_device_hits, num_ram_hits: prompt tokens.
    """

    def __init__(
        self, model: Path, options: dict[str, Any] | None, layout: Layout, times_manager: bool = False
    ) -> None:
        tokens, num_blocks = layout.block_tokens, layout.gpu_blocks
        self._config = EngineArgs(
            model=str(model),
            skip_tokenizer_init=True,
            block_size=tokens,
            enable_prefix_caching=True,
            max_num_seqs=layout.running,
            max_num_batched_tokens=layout.step_tokens,
            max_model_len=layout.max_model_tokens,
            kv_transfer_config=None if options is None else layout.transfer(options),
        ).create_engine_config()
        self._config.cache_config.num_gpu_blocks = num_blocks
        spec = FullAttentionSpec(
            block_size=tokens, num_kv_heads=HEADS, head_size=HEAD_BYTES, dtype=torch.bfloat16
        )
        block_bytes = 2 * HEADS * HEAD_BYTES * 2 * tokens
        tensors = [KVCacheTensor(num_blocks * block_bytes, ["layer"], num_blocks * block_bytes, block_bytes)]
        self._scheduler = Scheduler(
            self._config,
            KVCacheConfig(num_blocks, tensors, [KVCacheGroupSpec(["layer"], spec)]),
            StructuredOutputManager(self._config),
            block_size=tokens,
            log_stats=True,
        )
        self._layout, self._hasher = layout, get_request_block_hasher(tokens, sha256)
        self._ended: tuple[dict[int, int], set[str]] = {}, set()
        self.manager_s = self.whole_s = 0.0
        self.decode_s: list[float] = []
        self.num_stored = self.num_device_hits = self.num_ram_hits = 0
        side = getattr(self._scheduler.connector, "connector_scheduler", None)
        if times_manager and side is not None:
            self._time(side.manager)

    def _time(self, manager: Any) -> None:
        for name in MANAGER_CALLS:
            call = getattr(manager, name, None)
            if call is not None:
                setattr(manager, name, self._timed(call))

    def _timed(self, call: Any) -> Any:
        def timed(*given: Any, **named: Any) -> Any:
            began = time.thread_time()
            try:
                return call(*given, **named)
            finally:
                self.manager_s += time.thread_time() - began

        return timed

    def serve(self, prompts: Iterable[list[int]], names: str, at_once: int | None = None) -> None:
        """Serve requests; adds their CPU time, stored blocks and hits to the attributes.

        Args:
            at_once: requests in the scheduler at a time; None for all.
        """
        numbered = iter(enumerate(prompts))
        while self._add(numbered, names, at_once) or self._scheduler.has_requests():
            began = time.thread_time()
            step = self._scheduler.schedule()
            step_s = time.thread_time() - began
            answers = self._answers(step)
            began = time.thread_time()
            outputs = self._scheduler.update_from_output(step, answers)
            step_s += time.thread_time() - began
            self.whole_s += step_s
            if list(step.num_scheduled_tokens.values()) == [1] * self._layout.running:
                self.decode_s.append(step_s)
            for output in outputs.values():
                self._count_hits(output.scheduler_stats)

    def _add(self, prompts: Iterator[tuple[int, list[int]]], names: str, at_once: int | None) -> bool:
        """Add the next requests while there is room; returns False if none was added."""
        has_added = False
        while at_once is None or len(self._scheduler.requests) < at_once:
            if (following := next(prompts, None)) is None:
                break
            number, prompt = following
            sampling = SamplingParams(max_tokens=self._layout.answer_tokens, ignore_eos=True)
            name = f"{names}-{number}"
            self._scheduler.add_request(Request(name, prompt, sampling, None, block_hasher=self._hasher))
            has_added = True
        return has_added

    def _count_hits(self, stats: Any) -> None:
        if stats is not None:
            self.num_device_hits += stats.prefix_cache_stats.hits
            if stats.connector_prefix_cache_stats is not None:
                self.num_ram_hits += stats.connector_prefix_cache_stats.hits

    def _answers(self, step: Any) -> ModelRunnerOutput:
        """Return a token for every request with a computed prompt, and end the last step's transfers."""
        names = list(step.num_scheduled_tokens)
        sampled = []
        for name in names:
            request = self._scheduler.requests[name]
            done = request.num_computed_tokens
            sampled.append([7] if done >= request.num_tokens else [])
        jobs, received = self._ended
        output = None
        if self._scheduler.connector is not None:
            self._ended = self._begun(step.kv_connector_metadata)
            is_simple = isinstance(step.kv_connector_metadata, SimpleCPUOffloadMetadata)
            ended = SimpleCPUOffloadWorkerMetadata(jobs) if is_simple else OffloadingWorkerMetadata(jobs)
            output = KVConnectorOutput(finished_recving=received or None, kv_connector_worker_meta=ended)
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: row for row, name in enumerate(names)},
            sampled_token_ids=sampled,
            kv_connector_output=output,
        )

    def _begun(self, meta: Any) -> tuple[dict[int, int], set[str]]:
        """Count a step's new stores; returns the step's jobs, and the requests with new loads."""
        if isinstance(meta, SimpleCPUOffloadMetadata):
            self.num_stored += len(meta.store_gpu_blocks)
            jobs = {} if meta.store_event == INVALID_JOB_ID else {meta.store_event: 1}
            return jobs, set(meta.load_event_to_reqs.get(meta.load_event, ()))
        self.num_stored += sum(len(job.src_spec.block_ids) for job in meta.store_jobs.values())
        loads = {job.req_id for job in meta.load_jobs.values()}
        return dict.fromkeys({**meta.load_jobs, **meta.store_jobs}, 1), loads

    def reset(self) -> None:
        """Reset the measurements."""
        self.manager_s = self.whole_s = 0.0


def measure(model: Path, traffic: Traffic, rounds: int, requests: int) -> None:
    """Measure a kind of traffic and print its rows."""
    layout = Layout.of(traffic)
    sides = {name: Side(model, options, layout) for name, options in SIDES.items()}
    timed = {name: Side(model, options, layout, times_manager=True) for name, options in SIDES.items()}
    chance = random.Random(11)

    def prompt(seed: int) -> list[int]:
        tokens = random.Random(seed)
        return [tokens.randrange(1, 1000) for _ in range(traffic.prompt_tokens)]

    known = [prompt(number) for number in range(traffic.prompts)]
    whole: dict[str, list[float]] = {name: [] for name in sides}
    manager: dict[str, list[float]] = {name: [] for name in sides}
    # Not counted: rounds that fill RAM.
    warm_up = -(-RAM_PROMPTS // requests)
    for number in range(warm_up + rounds):
        served = [
            chance.choice(known) if known else prompt(10**6 * (number + 1) + row) for row in range(requests)
        ]
        for name, side in sides.items():
            for either in (side, timed[name]):
                either.reset()
                either.serve(served, f"{number}")
            if number >= warm_up:
                whole[name].append(1e6 * side.whole_s / requests)
                manager[name].append(1e6 * timed[name].manager_s / requests)
    print(f"\n{traffic}: us a request, {rounds} rounds of {requests}")
    base = whole["no offload"]
    over = {name: [a - b for a, b in zip(times, base, strict=True)] for name, times in whole.items()}
    print(f"{'no offload':18s} whole {statistics.median(base):7,.0f}")
    for name in sides:
        if name == "no offload":
            continue
        cells = []
        for label, times in (("whole", over), ("manager", manager)):
            ratio = statistics.median(a / b for a, b in zip(times[name], times[NATIVE], strict=True))
            cells.append(f"{label} {statistics.median(times[name]):7,.0f} ({ratio:.2f})")
        print(f"{name:18s} " + "   ".join(cells), flush=True)


def measure_answers(model: Path, running: int, prompt_tokens: int, rounds: int) -> None:
    """Measure steps in which `running` requests generate answers, and print a row for each side."""
    answer_tokens, block_tokens = 200, 16
    blocks = running * (prompt_tokens + answer_tokens + 2 * block_tokens) // block_tokens
    layout = Layout(
        *(block_tokens, 8192, prompt_tokens + answer_tokens + 64, blocks, blocks), running, answer_tokens
    )
    chance = random.Random(11)
    sides = {name: Side(model, options, layout) for name, options in (SIDES | SIMPLE).items()}
    steps_us: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds):
        prompts = [[chance.randrange(1, 1000) for _ in range(prompt_tokens)] for _ in range(running)]
        for name, side in sides.items():
            side.decode_s = []
            side.serve(prompts, f"{number}")
            steps_us[name].append(1e6 * statistics.median(side.decode_s))
    print(f"\n{running} requests generate answers, prompts of {prompt_tokens:,}: us a step, {rounds} rounds")
    base, native = steps_us["no offload"], steps_us[NATIVE]
    print(f"{'no offload':18s} whole {statistics.median(base):7,.0f}")
    for name, times in steps_us.items():
        if name != "no offload":
            added = [a - b for a, b in zip(times, base, strict=True)]
            ratio = statistics.median(a / (n - b) for a, n, b in zip(added, native, base, strict=True))
            print(f"{name:18s} added {statistics.median(added):7,.0f} ({ratio:.2f})", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--only", type=int, nargs="*", help="indices of the tables, from 0")
    chosen = parser.parse_args()
    sys.path.insert(0, str(ROOT / "tests"))
    tiny: Any = importlib.import_module("support.vllm_engine")
    init_none_hash(sha256)
    with tempfile.TemporaryDirectory() as directory:
        model = tiny.write_llama(Path(directory) / "llama", tiny.LLAMA | {"max_position_embeddings": 16384})
        for number, traffic in enumerate(TRAFFIC):
            if chosen.only is None or number in chosen.only:
                measure(model, traffic, chosen.rounds, chosen.requests)
        if chosen.only is None or len(TRAFFIC) in chosen.only:
            measure_answers(model, running=128, prompt_tokens=2048, rounds=chosen.rounds)


if __name__ == "__main__":
    main()
