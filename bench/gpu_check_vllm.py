"""The parts of ``make gpu-check`` that need vLLM: copies by vLLM's kernels, and engines under stress.

    python bench/gpu_check_vllm.py copies --device cuda --out FILE
    python bench/gpu_check_vllm.py engine --device cuda --runner V2 --graphs on --tp 1 [--zeroing] --out FILE

`bench/gpu_check.py` starts a process for each part, so that an error of the device ends only that part. FILE
is a JSON list of the parts that passed, failed or did not run.

    copies   compares `DeviceCopies`, and `HostCopies` without a GPU, with a loop: int8 tensors, pages of 4
             to 256 KiB, one and three blocks in a chunk, few and many blocks, pinned and unpinned pool.
             Then measures their speed, and on a GPU the speed of kvoffload's kernels for the same blocks.
    engine   compares the certain tokens of a tiny model's answers: without offloading, with `on-compute`
             and with `on-device-eviction`. bfloat16 on a GPU, float32 on the CPU. A quarter of the requests
             is audited: stored blocks must equal computed blocks up to rounding. Then two engines use one
             shared pool in turn. With --zeroing the engine zeroes new blocks, as for recurrent state.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from gpu_check_parts import Part, PartsFile, part

ROOT = Path(__file__).resolve().parent.parent
KIB = 1024
PAGES_KIB = (4, 16, 27, 28, 64, 256)
"""Page sizes. vLLM loads 16 or more blocks of less than 28 KiB with a Triton kernel."""
BF16_MARGIN = 0.3
"""Least lead of a certain token in log-probability, in bfloat16; rounding moves a logit by up to 0.06."""

AUDIT = {"share": 0.25, "on_difference": "count"}
"""Recompute a quarter of the requests with hits and compare with the stored blocks. Finds a copy that did not
wait for the computation, even if no answer is wrong."""

SHARED = {"size": "64MiB", "shared": "node", "keep": "1min"}
"""A pool that outlives its first engine: the second engine registers the same memory, and loads the blocks of
the first."""

ENOUGH_REQUESTS = 100
"""With fewer requests, possibly none is audited."""

MOST_ATTEMPTS = 5
"""Possibly no request loads, because the order of transfers depends on the machine. Then the engine's prefix
cache is reset and the requests are repeated, at most this many times in all."""


# ---- copies


def caches(device: str, page_bytes: int, num_blocks: int, seed: int) -> Any:
    """Return ``CanonicalKVCaches`` with two KV groups over three tensors, one of them with padding."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    tensors = [
        torch.randint(-128, 128, (num_blocks, page_bytes), generator=generator, dtype=torch.int8).to(device)
        for _ in range(3)
    ]
    groups = [[(0, page_bytes), (1, page_bytes - 64)], [(2, page_bytes)]]
    return SimpleNamespace(
        tensors=[SimpleNamespace(tensor=tensor, page_size_bytes=page_bytes) for tensor in tensors],
        group_data_refs=[
            [SimpleNamespace(tensor_idx=tensor, page_size_bytes=size, mapping=None) for tensor, size in group]
            for group in groups
        ],
    )


class Case:
    """Transfer to a pool and back."""

    def __init__(self, device: str, page_bytes: int, per_chunk: int, chunks: int, directory: Path) -> None:
        from vllm.v1.kv_offload.base import GPULoadStoreSpec

        from kvoffload.integrations.vllm.shared.pool import SharedPool
        from kvoffload.integrations.vllm.worker_side.layout import Layout
        from kvoffload.integrations.vllm.worker_side.slots_spec import SlotsSpec

        rng = np.random.default_rng(page_bytes + per_chunk + chunks)
        sizes, num_slots = [chunks * per_chunk, per_chunk], chunks + 1
        num_blocks = 2 * sum(sizes)
        self.device = device
        self.caches = caches(device, page_bytes, num_blocks, seed=chunks)
        self.layout = Layout.of(self.caches, per_chunk)
        self.pool = SharedPool.attach(
            f"gpu-check-{os.getpid()}-{page_bytes}-{per_chunk}-{chunks}",
            member=0,
            num_members=2,
            num_parts=2,
            part_bytes=self.layout.part_bytes,
            capacity_bytes=(num_slots + 3) * (2 * self.layout.part_bytes + 4096),
            directory=directory,
        )
        order = rng.permutation(num_blocks)
        self.stored, self.loaded = (
            GPULoadStoreSpec(rows.tolist(), sizes, [0, 0])
            for rows in (order[: sum(sizes)], order[sum(sizes) :])
        )
        self.slots = SlotsSpec(rng.permutation(self.pool.num_slots)[:num_slots].astype(np.int32))

    def bytes_of(self) -> list[Any]:
        return [tensor.tensor.cpu().numpy().copy() for tensor in self.caches.tensors]

    def expected(self, before: list[Any]) -> tuple[Any, list[Any]]:
        """Compute the pool after the store and the tensors after the load, with loops."""
        pool = np.zeros_like(self.pool.part(1))
        after = [tensor.copy() for tensor in before]
        for move, back in zip(self._moves(self.stored), self._moves(self.loaded), strict=True):
            for region in self.layout.regions[move.group]:
                begin = region.start + move.inner * region.stride
                for block, slot, target in zip(move.blocks, move.slots, back.blocks, strict=True):
                    taken = before[region.tensor][block, : region.num_bytes]
                    pool[slot, begin : begin + region.num_bytes] = taken.view(np.uint8)
                    after[region.tensor][target, : region.num_bytes] = taken
        return pool, after

    def _moves(self, engine: Any) -> Iterator[Any]:
        return self.layout.moves(engine, self.slots.block_ids)

    def run(self, copies: Any) -> list[str]:
        """Store and load with these copies; returns the differences."""
        before = self.bytes_of()
        pool, after = self.expected(before)
        wrong = []
        for job, begin, arguments in (
            (1, copies.store, (self.stored, self.slots)),
            (2, copies.load, (self.loaded, self.slots)),
        ):
            begin(job, *arguments)
            copies.wait({job})
            (result,) = copies.finished()
            if result.job != job or result.error is not None:
                wrong.append(f"job {job}: {result}")
            if job == 1 and not np.array_equal(self.pool.part(1), pool):
                wrong.append("stored bytes")
        if not all(
            np.array_equal(actual, expected) for actual, expected in zip(self.bytes_of(), after, strict=True)
        ):
            wrong.append("loaded bytes")
        if self.pool.part(0).any():
            wrong.append("the other worker's part")
        copies.close()
        self.pool.close()
        return wrong


def makers(device: str) -> Iterator[tuple[str, str, Callable[[Case], Any]]]:
    """Yield the copies to compare with loops: name, device of the tensors, and function."""
    from kvoffload.integrations.vllm.worker_side.copies import HostCopies

    yield "on the host", "cpu", lambda case: HostCopies(case.caches, case.layout, case.pool.part(1))
    if device == "cpu":
        return
    cuda: Any = importlib.import_module("kvoffload.integrations.vllm.worker_side.cuda")
    pin = cuda.host_register

    def make(case: Case, pinned: bool) -> Any:
        cuda.host_register = pin if pinned else lambda address, num_bytes: False
        try:
            return cuda.DeviceCopies(case.caches, case.layout, case.pool, 1)
        finally:
            cuda.host_register = pin

    yield "pinned pool", device, partial(make, pinned=True)
    yield "unpinned pool", device, partial(make, pinned=False)


def check_copies(device: str) -> Iterator[Part]:
    """Check each kind of copies and pool; yields one part per kind."""
    for name, where, make in makers(device):
        cases, kernels, wrong = 0, 0, []
        for page_kib, per_chunk, chunks in itertools.product(PAGES_KIB, (1, 3), (2, 24)):
            with tempfile.TemporaryDirectory(dir=shared_memory()) as directory:
                case = Case(where, page_kib * KIB, per_chunk, chunks, Path(directory))
                copies = make(case)
                loading = getattr(copies, "_loading", None)
                kernels += isinstance(getattr(loading, "_swap_blocks_batch", None), partial)
                differences = case.run(copies)
            cases += 1
            label = f"{page_kib} KiB, {per_chunk} a chunk, {chunks} chunks"
            wrong += [f"{label}: {difference}" for difference in differences]
        status, why = "failed" if wrong else "passed", "; ".join(wrong[:5])
        yield part(f"copies of vLLM, {name}", status, why, cases=cases, wrong=len(wrong), with_triton=kernels)
    if device == "cpu":
        yield part("copies of vLLM on a device", "not run", "vLLM's copies need a GPU")


SPEED_PAGES_KIB = (16, 64, 256)
SPEED_LAYERS, SPEED_BYTES, SPEED_ROUNDS = 28, 256 * 1024 * KIB, 5


def check_speed(device: str) -> Iterator[Part]:
    """Measure stores and loads of scattered blocks of 28 layers; yields one part per page size."""
    import torch

    from kvoffload.integrations.vllm.worker_side.copies import HostCopies

    for page_kib in SPEED_PAGES_KIB:
        page_bytes = page_kib * KIB
        num_blocks = SPEED_BYTES // (page_bytes * SPEED_LAYERS) // (1 if device != "cpu" else 16)
        tensors = [
            torch.ones((2 * num_blocks, page_bytes), dtype=torch.int8, device=device)
            for _ in range(SPEED_LAYERS)
        ]
        caches = SimpleNamespace(
            tensors=[SimpleNamespace(tensor=tensor, page_size_bytes=page_bytes) for tensor in tensors],
            group_data_refs=[
                [
                    SimpleNamespace(tensor_idx=layer, page_size_bytes=page_bytes, mapping=None)
                    for layer in range(SPEED_LAYERS)
                ]
            ],
        )
        with tempfile.TemporaryDirectory(dir=shared_memory()) as directory:
            speeds = _speeds(device, caches, num_blocks, Path(directory), HostCopies)
        yield part(f"speed of the plug-in's copies, pages of {page_kib} KiB", "ran", "", **speeds)


def _speeds(device: str, caches: Any, num_blocks: int, directory: Path, on_host: Any) -> dict[str, float]:
    """Return GB/s: the plug-in's copies (on a GPU vLLM's), and on a GPU also kvoffload's kernels."""
    import torch
    from vllm.v1.kv_offload.base import GPULoadStoreSpec

    from kvoffload.integrations.vllm.shared.pool import SharedPool
    from kvoffload.integrations.vllm.worker_side.layout import Layout
    from kvoffload.integrations.vllm.worker_side.slots_spec import SlotsSpec

    layout = Layout.of(caches, 1)
    pool = SharedPool.attach(
        f"gpu-check-{os.getpid()}-speed", member=0, num_members=1, num_parts=1, part_bytes=layout.part_bytes,
        capacity_bytes=(num_blocks + 3) * (layout.part_bytes + 4096), directory=directory,
    )  # fmt: skip
    rng = np.random.default_rng(num_blocks)
    rows, slots = rng.permutation(2 * num_blocks)[:num_blocks], rng.permutation(pool.num_slots)[:num_blocks]
    blocks, in_pool = GPULoadStoreSpec(rows.tolist(), [num_blocks], [0]), SlotsSpec(slots.astype(np.int32))
    if device == "cpu":
        copies = on_host(caches, layout, pool.part(0))
    else:
        cuda: Any = importlib.import_module("kvoffload.integrations.vllm.worker_side.cuda")
        copies = cuda.DeviceCopies(caches, layout, pool, 0)
    jobs = itertools.count(1)

    def run(begin: Any, *arguments: Any) -> None:
        job = next(jobs)
        begin(job, *arguments)
        copies.wait({job})
        (result,) = copies.finished()
        assert result.error is None, result

    num_bytes = num_blocks * SPEED_LAYERS * caches.tensors[0].page_size_bytes
    calls: dict[str, Callable[[], None]] = {
        "store, GB/s": lambda: run(copies.store, blocks, in_pool),
        "load, GB/s": lambda: run(copies.load, blocks, in_pool),
    }
    if device != "cpu":
        calls |= _kernel_calls(caches, layout, pool, rows, slots.astype(np.int64))
    speeds = {name: round(num_bytes / median_seconds(call) / 1e9, 1) for name, call in calls.items()}
    if device != "cpu":
        torch.cuda.synchronize()
    copies.close()
    pool.close()
    return speeds


def _kernel_calls(
    caches: Any, layout: Any, pool: Any, rows: Any, slots: Any
) -> dict[str, Callable[[], None]]:
    """Return copies of the same blocks by `copy_by_kernels`."""
    import torch

    from kvoffload.transfer.cuda import copy_by_kernels
    from kvoffload.transfer.pinned import PinnedPools

    tensors = [cache.tensor.view(torch.uint8) for cache in caches.tensors]
    mapped = PinnedPools(tensors[0].device).mapped(pool.part(0))
    if mapped is None:
        return {}
    pairs = [
        (tensor, mapped[:, start : start + tensor.shape[1]])
        for tensor, start in zip(tensors, layout.starts, strict=True)
    ]

    def store() -> None:
        for tensor, in_slots in pairs:
            copy_by_kernels(tensor, rows, in_slots, slots)
        torch.cuda.synchronize()

    def load() -> None:
        for tensor, in_slots in pairs:
            copy_by_kernels(in_slots, slots, tensor, rows)
        torch.cuda.synchronize()

    return {"store, kernels, GB/s": store, "load, kernels, GB/s": load}


def median_seconds(call: Callable[[], None]) -> float:
    taken = []
    for _ in range(SPEED_ROUNDS + 1):
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
    return sorted(taken[1:])[SPEED_ROUNDS // 2]


def shared_memory() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


# ---- engines


def settings_of(chosen: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of `LLM`."""
    settings: dict[str, Any] = {
        "max_num_batched_tokens": 128,
        "num_gpu_blocks_override": 48,
        "enforce_eager": chosen.graphs == "off",
        "tensor_parallel_size": chosen.tp,
    }
    if chosen.device != "cpu":
        settings |= {"dtype": "bfloat16", "block_size": 16}
        settings |= {"num_gpu_blocks_override": 96}
        # No measurement of free memory at the start: other processes may use the device.
        settings |= {"gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 2**28}
    if chosen.tp > 1:
        settings["distributed_executor_backend"] = "mp"
    return settings


def check_engine(chosen: argparse.Namespace) -> Iterator[Part]:
    """Compare an engine in each store mode with two runs of an engine without offloading."""
    conftest, traffic = of_tests("engine"), of_tests("traffic")
    margin, shortest = (traffic.CERTAIN_MARGIN, 2) if chosen.device == "cpu" else (BF16_MARGIN, 1)
    settings, name = settings_of(chosen), label(chosen)
    with tempfile.TemporaryDirectory() as directory:
        os.environ["XDG_CACHE_HOME"] = f"{directory}/cache"
        model = conftest.write_llama(Path(directory) / "llama")
        engine: Any = conftest.Engine(model, None, **settings)
        chats = traffic.conversations(2, documents=chosen.documents, turns=4)
        prompts, answers = traffic.certain_answers(
            engine, chats, 8, margin=margin, shortest=shortest, least=0.1
        )
        control = drive(engine, prompts, answers, chosen)
        engine.close()
        known = sum(map(len, answers))
        yield part(
            f"{name}, no offloading",
            "passed" if not control.wrong else "not judged",
            "" if not control.wrong else "answers depend on the batch: BF16_MARGIN is too small",
            requests=control.finished,
            wrong=len(control.wrong),
            prompts=len(prompts),
            certain_tokens=known,
        )
        for store in ("on-compute", "on-device-eviction"):
            with zeroing(chosen.zeroing):
                options = {"ram": "64MiB", "store": store, "audit": AUDIT}
                engine = conftest.Engine(model, options, connector=True, **settings)
            yield judged(f"{name}, {store}", engine, prompts, answers, chosen, bool(control.wrong))
            engine.close()
        if chosen.tp == 1 and not chosen.zeroing and chosen.graphs == "off":
            for number in ("first", "second"):
                engine = conftest.Engine(model, {"ram": SHARED, "audit": AUDIT}, connector=True, **settings)
                named = f"{name}, {number} engine of a shared pool"
                yield judged(named, engine, prompts, answers, chosen, bool(control.wrong))
                engine.close()


def judged(
    name: str, engine: Any, prompts: Any, answers: Any, chosen: argparse.Namespace, is_unsure: bool
) -> Part:
    """Drive an engine with offloading, and compare."""
    is_late = bool(getattr(engine.worker, "fences_come_late", False)) if chosen.tp == 1 else None
    outcome = drive(engine, prompts, answers, chosen)
    for attempt in range(1, MOST_ATTEMPTS):
        if engine.manager.core.stats().loaded:
            break
        engine.forget_device()
        again = drive(engine, prompts, answers, chosen, attempt=attempt)
        outcome.finished += again.finished
        outcome.preempted += again.preempted
        outcome.wrong += again.wrong
    stats = engine.manager.core.stats()
    if chosen.tp == 1:
        of_tests("traffic").check_nothing_is_left(engine)
    status, why = ("failed", "wrong answers") if outcome.wrong else ("passed", "")
    if outcome.wrong and is_unsure:
        status, why = "not judged", "the engine without offloading also gives other answers"
    if not stats.loaded:
        status, why = "failed", "nothing was loaded"
    audited = engine.manager.audits.results
    if audited["different"] or audited["unjudged"]:
        status, why = "failed", "stored blocks differ from computed ones"
    if chosen.requests >= ENOUGH_REQUESTS and not audited["equal"] + audited["close"]:
        status, why = "failed", "nothing was audited"
    if chosen.zeroing and chosen.runner == "V2" and is_late is False:
        status, why = "failed", "the worker detected runner V1 instead of V2"
    return part(
        name,
        status,
        why,
        requests=outcome.finished,
        wrong=len(outcome.wrong),
        preempted=outcome.preempted,
        stored=stats.stored,
        loaded=stats.loaded,
        audited=dict(audited),
        largest_difference=engine.manager.audits.largest,
        fences_come_late=is_late,
    )


def drive(engine: Any, prompts: Any, answers: Any, chosen: argparse.Namespace, *, attempt: int = 0) -> Any:
    """Serve random requests. Each attempt has its own seed, and therefore its own request names."""
    seed = chosen.seed + 1_000 * attempt
    return of_tests("traffic").drive(engine, prompts, answers, seed, chosen.requests)


def zeroing(wanted: bool) -> Any:
    """Return a context in which new engines zero new blocks, or an empty context."""
    return of_tests("copy_orders").zeroing_of_new_blocks() if wanted else contextlib.nullcontext()


def of_tests(name: str) -> Any:
    """Import a module of tests/support."""
    return importlib.import_module(f"support.vllm_{name}")


def label(chosen: argparse.Namespace) -> str:
    if chosen.device == "cpu":
        return "engine on the CPU, float32"
    text = f"engine, runner {chosen.runner}, CUDA graphs {chosen.graphs}, bf16"
    return text + (f", TP={chosen.tp}" if chosen.tp > 1 else "") + (", zeroing" if chosen.zeroing else "")


def why_not(chosen: argparse.Namespace) -> str:
    """Return the reason why this part cannot run, or an empty string."""
    from vllm import __version__
    from vllm.platforms import current_platform

    from kvoffload.integrations.vllm.shared.versions import SINCE_CONNECTOR, minor

    if (minor(__version__) or SINCE_CONNECTOR) < SINCE_CONNECTOR:
        return f"vLLM {__version__} is older than 0.32"
    if current_platform.is_cpu() != (chosen.device == "cpu"):
        return f"this vLLM is built for {current_platform.device_name}"
    if chosen.what == "engine":
        missing = [name for name in ("pytest", "safetensors") if importlib.util.find_spec(name) is None]
        if missing:
            return f"{' and '.join(missing)} not installed"
        if chosen.tp > 1:
            import torch

            if torch.cuda.device_count() < chosen.tp:
                return f"{torch.cuda.device_count()} GPU here, TP={chosen.tp} needs {chosen.tp}"
    return ""


def checks_of(name: str, chosen: argparse.Namespace) -> Iterator[Part]:
    """Run the chosen checks, unless something is missing here."""
    if reason := why_not(chosen):
        yield part(name, "not run", reason)
    elif chosen.what == "engine":
        yield from check_engine(chosen)
    else:
        yield from check_copies(chosen.device)
        yield from check_speed(chosen.device)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("copies", "engine"))
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--runner", default="V2", choices=("V1", "V2"))
    parser.add_argument("--graphs", default="off", choices=("on", "off"))
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--zeroing", action="store_true")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--documents", type=int, default=40, help="documents, with four prompts each")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args()
    if chosen.device != "cpu":
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1" if chosen.runner == "V2" else "0"
    if chosen.what == "engine" and importlib.util.find_spec("pytest") is not None:
        # Before torch: sets the environment that engines need.
        sys.path.insert(0, str(ROOT / "tests"))
        of_tests("engine")
        if chosen.device != "cpu":
            del os.environ["TORCHDYNAMO_DISABLE"]  # CUDA graphs are captured around compiled pieces
    name = label(chosen) if chosen.what == "engine" else "copies of vLLM"
    parts = PartsFile(chosen.out)
    parts.run(name, checks_of(name, chosen))
    return parts.exit_code()


if __name__ == "__main__":
    raise SystemExit(main())
