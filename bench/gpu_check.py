"""All checks that need a GPU, in one command: ``make gpu-check``, or ``python bench/gpu_check.py``.

Needs torch and numba, and no network. Takes some minutes, and longer if vLLM is installed. Without a GPU it
tests itself on CPU tensors; these figures are not valid for a GPU. Prints one page and a table of the parts
that passed, failed or did not run, with reasons. Writes the same as JSON. Exits with 1 if a part failed.

    equality    compares bytes: every copy method, both directions, layouts of several shapes
    bandwidth   our copies against one cudaMemcpyAsync of the same bytes between pinned memory and the device
    threshold   scattered blocks copied in runs, by kernels and through a buffer, to choose `RUN_BYTES`
    overlap     the share of a store that a computation hides: copied in runs, and by kernels
    checks      the host's time to verify a block
    open        `kvoffload.open` with tensors of an engine and models of transformers (`gpu_check_open.py`)
    vllm        the vLLM integration, each part in its own process (`gpu_check_vllm.py`): the copies, then
                engines with model runners V1 and V2, CUDA graphs, zeroing of new blocks, and two GPUs
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

if missing := [name for name in ("numpy", "numba", "torch") if importlib.util.find_spec(name) is None]:
    sys.exit(f"gpu-check: {', '.join(missing)} not installed for {sys.executable}: make gpu-check PYTHON=...")

import numpy as np
import numpy.typing as npt
import torch as untyped_torch

from kvoffload.transfer import copy_engine_for
from kvoffload.transfer import cuda as ways
from kvoffload.transfer.engine import byte_rows
from kvoffload.transfer.pinned import PinnedPools

torch: Any = untyped_torch
Rows = npt.NDArray[np.int64]
KIB, MIB = 1024, 1024 * 1024
EVERY_WAY = {"as planned": ways.RUN_BYTES, "runs": 0, "kernels": 1 << 62, "buffer": 1 << 62}
"""Copy methods by name, with the value of `RUN_BYTES` that forces them. The buffer also needs a pool that
kernels cannot access."""


@contextlib.contextmanager
def forced(way: str) -> Iterator[None]:
    """Force a copy method."""
    usual, mapped = ways.RUN_BYTES, PinnedPools.mapped
    ways.RUN_BYTES = EVERY_WAY[way]
    if way == "buffer":
        PinnedPools.mapped = lambda self, pool: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        ways.RUN_BYTES, PinnedPools.mapped = usual, mapped  # type: ignore[method-assign]


class Machine:
    """A device, or the host in its place."""

    def __init__(self, name: str) -> None:
        self.device = torch.device(name)
        self.is_gpu = self.device.type == "cuda"

    def wait(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize(self.device)

    def host_pool(self, num_blocks: int, block_bytes: int) -> npt.NDArray[np.uint8]:
        """Allocate unpinned memory: engines pin it themselves."""
        return np.zeros((num_blocks, block_bytes), np.uint8)

    def seconds(self, act: Callable[[], object], rounds: int = 5) -> float:
        """Median seconds of several rounds, without the first."""
        taken = []
        for _ in range(rounds + 1):
            self.wait()
            began = time.perf_counter()
            act()
            self.wait()
            taken.append(time.perf_counter() - began)
        return statistics.median(taken[1:])

    def describe(self) -> dict[str, Any]:
        facts = {"python": platform.python_version(), "torch": torch.__version__, "device": "CPU tensors"}
        if self.is_gpu:
            facts |= {
                "device": torch.cuda.get_device_name(self.device),
                "memory_gib": round(torch.cuda.get_device_properties(self.device).total_memory / 2**30),
                "cuda": torch.version.cuda,
            }
        return facts


def layouts(machine: Machine, num_blocks: int, block_bytes: int) -> Iterator[tuple[str, Any]]:
    """Generate tensors with a block in each row: several dtypes and shapes, packed and with gaps."""
    device = machine.device
    generator = torch.Generator().manual_seed(block_bytes)
    filled = torch.randint(0, 256, (num_blocks, 2, block_bytes), dtype=torch.uint8, generator=generator)
    filled = filled.to(device)
    yield "bytes", filled[:, 0].clone()
    yield (
        "bf16, tokens x heads x 64",
        filled[:, 0].clone().view(torch.bfloat16).view(num_blocks, -1, 64),
    )
    yield "with gaps", filled[:, 0]
    yield "keys of (blocks, 2, ...)", filled.view(torch.float16)[:, 1]


def rows_of(kind: str, num_rows: int, count: int) -> Rows:
    if kind == "neighbours":
        return np.arange(count) + 3
    if kind == "all but some":
        return np.delete(np.arange(num_rows), np.arange(0, num_rows, 7))[:count]
    return np.random.default_rng(count).permutation(num_rows)[:count]


def equality(machine: Machine, sizes: list[int]) -> dict[str, Any]:
    """Store blocks, load them into other rows, and compare with the result of a loop."""
    cases, wrong = 0, []
    every_way = EVERY_WAY if machine.is_gpu else ["as planned"]  # on CPU tensors there is one way
    for block_bytes in sizes:
        num_blocks = max(16, min(64, 64 * MIB // block_bytes))
        count = num_blocks // 2
        for layout, tensor in layouts(machine, num_blocks, block_bytes):
            before = byte_rows(tensor).cpu().numpy().copy()
            for kind in ("neighbours", "all but some", "scattered"):
                for way in every_way:
                    device_rows, slots = rows_of(kind, num_blocks, count), rows_of(kind, count + 8, count)
                    pool = machine.host_pool(count + 8, before.shape[1])
                    result = there_and_back(tensor, pool, device_rows, slots, way)
                    expected = before.copy()
                    expected[device_rows[::-1]] = before[device_rows]
                    sound = np.array_equal(pool[slots], before[device_rows])
                    cases += 1
                    if not sound or not np.array_equal(result, expected):
                        wrong.append(f"{block_bytes} bytes, {layout}, {kind}, {way}")
                    byte_rows(tensor).copy_(torch.from_numpy(before).to(machine.device))
    return {"cases": cases, "wrong": wrong}


def there_and_back(
    tensor: Any, pool: npt.NDArray[np.uint8], device_rows: Rows, slots: Rows, way: str
) -> npt.NDArray[np.uint8]:
    """Store rows, and load them in reverse order; returns the tensor's bytes."""
    engine = copy_engine_for(tensor)
    try:
        with forced(way):
            stored = engine.store(device_rows, pool, slots)
            stored.wait()
            engine.load(pool, slots, device_rows[::-1].copy()).wait()
        facts: npt.NDArray[np.uint8] = byte_rows(tensor).cpu().numpy()
        return facts
    finally:
        engine.close()


class Bench:
    """A device tensor and a pool of equal size, with timed copies between them."""

    def __init__(self, machine: Machine, block_bytes: int, total_bytes: int) -> None:
        self.machine, self.num_blocks = machine, total_bytes // block_bytes
        self.total_bytes = self.num_blocks * block_bytes
        self.tensor = torch.zeros(
            (2 * self.num_blocks, block_bytes), dtype=torch.uint8, device=machine.device
        )
        self.pool = machine.host_pool(self.num_blocks, block_bytes)
        self.engine = copy_engine_for(self.tensor)
        self.store(self.rows("neighbours"))

    def rows(self, kind: str) -> Rows:
        everywhere = np.arange(2 * self.num_blocks)
        return everywhere[: self.num_blocks] if kind == "neighbours" else everywhere[::2].copy()

    def store(self, device_rows: Rows) -> None:
        self.engine.store(device_rows, self.pool, np.arange(self.num_blocks)).wait()

    def load(self, device_rows: Rows) -> None:
        self.engine.load(self.pool, np.arange(self.num_blocks), device_rows).wait()

    def raw_gb_per_s(self) -> dict[str, float]:
        """Measure one copy of the same bytes, from and to pinned memory if there is a GPU."""
        pinned = torch.empty(self.total_bytes, dtype=torch.uint8, pin_memory=self.machine.is_gpu)
        flat = self.tensor.view(-1)[: self.total_bytes]
        seconds = {
            "store": self.machine.seconds(lambda: pinned.copy_(flat, non_blocking=True)),
            "load": self.machine.seconds(lambda: flat.copy_(pinned, non_blocking=True)),
        }
        return {verb: self.total_bytes / taken / 1e9 for verb, taken in seconds.items()}

    def gb_per_s(self, verb: str, kind: str) -> float:
        move, rows = getattr(self, verb), self.rows(kind)
        return self.total_bytes / self.machine.seconds(lambda: move(rows)) / 1e9


def bandwidth(machine: Machine, sizes: list[int], total_bytes: int) -> list[dict[str, Any]]:
    facts = []
    for block_bytes in sizes:
        bench = Bench(machine, block_bytes, total_bytes)
        row: dict[str, Any] = {"block_kib": block_bytes // KIB}
        for verb, raw in bench.raw_gb_per_s().items():
            row[f"raw {verb} GB/s"] = round(raw, 2)
            for kind in ("neighbours", "scattered"):
                row[f"{verb} {kind} of raw"] = round(bench.gb_per_s(verb, kind) / raw, 2)
        bench.engine.close()
        facts.append(row)
    return facts


def threshold(machine: Machine, sizes: list[int], total_bytes: int) -> list[dict[str, Any]]:
    """Compare the copy methods for scattered blocks of several sizes."""
    rows = []
    for block_bytes in sizes:
        bench = Bench(machine, block_bytes, total_bytes)
        row: dict[str, Any] = {"block_kib": block_bytes // KIB}
        for verb in ("store", "load"):
            for way in ("runs", "kernels", "buffer"):
                with forced(way):
                    row[f"{verb}, {way}, GB/s"] = round(bench.gb_per_s(verb, "scattered"), 1)
        row["runs now"] = block_bytes >= ways.RUN_BYTES
        bench.engine.close()
        rows.append(row)
    return rows


def overlap(machine: Machine, total_bytes: int) -> list[dict[str, Any]]:
    """Measure the overlap of a store with matrix products: 1 if fully hidden, 0 if they run in turn."""
    rows = [overlap_of(machine, total_bytes, 2 * MIB, "neighbours")]
    if machine.is_gpu:
        rows.append(overlap_of(machine, total_bytes, 64 * KIB, "scattered"))
    return rows


def overlap_of(machine: Machine, total_bytes: int, block_bytes: int, kind: str) -> dict[str, Any]:
    bench = Bench(machine, block_bytes, total_bytes)
    size = 4096 if machine.is_gpu else 512
    matrix = torch.rand((size, size), device=machine.device, dtype=torch.float32)
    rows, slots = bench.rows(kind), np.arange(bench.num_blocks)
    copying = machine.seconds(lambda: bench.store(rows))
    product_s = machine.seconds(lambda: matrix @ matrix)
    products = max(1, round(copying / product_s))

    def compute() -> None:
        for _ in range(products):
            matrix @ matrix

    def both() -> None:
        # Submitted first: it waits only for work that is already on the stream.
        transfer = bench.engine.store(rows, bench.pool, slots)
        compute()
        transfer.wait()

    computing, together = machine.seconds(compute), machine.seconds(both)
    bench.engine.close()
    hidden = (copying + computing - together) / min(copying, computing)
    return {
        "block_kib": block_bytes // KIB,
        "copy_ms": 1e3 * copying,
        "compute_ms": 1e3 * computing,
        "both_ms": 1e3 * together,
        "hidden": hidden,
    }


def checks(machine: Machine, sizes: list[int]) -> list[dict[str, Any]] | str:
    """Measure checksums of blocks in a pool, with one thread."""
    if importlib.util.find_spec("xxhash") is None:
        return "not measured: xxhash is not installed here"
    from kvoffload.tiers.checksum import checksums

    rows = []
    for block_bytes in sizes:
        pool = machine.host_pool(max(1, 128 * MIB // block_bytes), block_bytes)
        addresses = pool.ctypes.data + np.arange(len(pool)) * block_bytes
        seeds = np.arange(len(pool), dtype=np.uint64)
        taken = machine.seconds(lambda: checksums(addresses, block_bytes, seeds))  # noqa: B023
        rows.append({"block_kib": block_bytes // KIB, "us": round(1e6 * taken / len(pool), 1),
                      "GB/s": round(pool.nbytes / taken / 1e9, 1)})  # fmt: skip
    return rows


PART_LIMIT_S = 900.0
ENGINES = [
    *(["--runner", runner, "--graphs", graphs] for runner in ("V1", "V2") for graphs in ("off", "on")),
    ["--runner", "V1", "--graphs", "on", "--zeroing"],
    ["--runner", "V2", "--graphs", "on", "--zeroing"],
    ["--runner", "V2", "--graphs", "on", "--tp", "2"],
]
"""Arguments of the engines that are checked on a GPU."""
ON_THE_CPU = ["--requests", "24", "--documents", "5"]


def open_parts(is_gpu: bool) -> list[dict[str, Any]]:
    """Run the parts of `kvoffload.open` in a separate process."""
    missing = [name for name in ("msgspec", "xxhash") if importlib.util.find_spec(name) is None]
    if missing:
        why = f"{' and '.join(missing)} not installed for {sys.executable}"
        return [{"part": "open API", "status": "not run", "why": why}]
    return parts_of("gpu_check_open.py", ["--device", "cuda" if is_gpu else "cpu"])


def vllm_parts(is_gpu: bool) -> list[dict[str, Any]]:
    """Run the parts that need vLLM, each in a separate process."""
    if importlib.util.find_spec("vllm") is None:
        return [{"part": "vllm", "status": "not run", "why": f"vLLM is not installed for {sys.executable}"}]
    device = ["--device", "cuda" if is_gpu else "cpu"]
    script = "gpu_check_vllm.py"
    parts = parts_of(script, ["copies", *device])
    for arguments in ENGINES if is_gpu else [ON_THE_CPU]:
        parts += parts_of(script, ["engine", *device, *arguments])
    if not is_gpu:
        why = "no GPU here"
        parts += [
            {"part": f"engine {' '.join(arguments)}", "status": "not run", "why": why}
            for arguments in ENGINES
        ]
    return parts


def parts_of(script: str, arguments: list[str]) -> list[dict[str, Any]]:
    """Run a script beside this file; returns its parts, or a failure if its process wrote nothing."""
    path, name = Path(__file__).with_name(script), " ".join([script, *arguments])
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "parts.json"
        command = [sys.executable, str(path), *arguments, "--out", str(out)]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=PART_LIMIT_S, errors="replace", check=False
            )
            ending, lines = f"ended with {done.returncode}", (done.stdout + done.stderr).splitlines()
        except subprocess.TimeoutExpired:
            ending, lines = f"took more than {PART_LIMIT_S:.0f} s", []
        parts: list[dict[str, Any]] = json.loads(out.read_text()) if out.exists() else []
    if ending != "ended with 0" and not any(check["status"] == "failed" for check in parts):
        parts.append({"part": name, "status": "failed", "why": ending})
    for check in parts:
        if check["status"] == "failed":
            check["output"] = lines[-60:]
    return parts


def of_page(page: dict[str, Any]) -> list[dict[str, Any]]:
    """Convert the parts of the page to rows of the table."""
    wrong = page["equality"]["wrong"]
    rows = [
        {
            "part": "equality",
            "status": "failed" if wrong else "passed",
            "why": "; ".join(wrong[:5]),
            "cases": page["equality"]["cases"],
        }
    ]
    for name in ("bandwidth", "threshold", "overlap", "checks"):
        is_text = isinstance(page[name], str)
        rows.append(
            {"part": name, "status": "not run" if is_text else "ran", "why": page[name] if is_text else ""}
        )
    return rows


def table(parts: list[dict[str, Any]]) -> str:
    """Format the parts that passed, failed or did not run, with reasons."""
    width = max(len(check["part"]) for check in parts)
    lines = []
    for check in parts:
        extra = {key: value for key, value in check.items() if key not in ("part", "status", "why", "output")}
        numbers = "   ".join(f"{key} {value}" for key, value in extra.items())
        lines.append(f"  {check['part']:<{width}}  {check['status']:<10}  {check['why'] or numbers}")
        if check["why"] and numbers:
            lines.append(f"  {'':<{width}}  {'':<10}  {numbers}")
    return "\n".join(lines)


def report(page: dict[str, Any]) -> str:
    """Format the page."""
    lines = []
    for name, check in page.items():
        lines.append(f"\n{name}")
        for row in check if isinstance(check, list) else [check]:
            cells = row.items() if isinstance(row, dict) else [("", row)]
            lines.append("  " + "   ".join(f"{key} {_short(value)}" for key, value in cells))
    return "\n".join(lines)


def _short(value: object) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--total", type=int, help="MiB per copy; default: 1,024 on a GPU, 32 without")
    parser.add_argument("--out", type=Path, help="file for the JSON; default: standard output")
    chosen = parser.parse_args()
    machine = Machine(chosen.device)
    total_bytes = (chosen.total or (1024 if machine.is_gpu else 32)) * MIB
    sizes = [4 * KIB, 64 * KIB, 128 * KIB, 256 * KIB, 512 * KIB, MIB, 2 * MIB, 4 * MIB]
    page: dict[str, Any] = {"machine": machine.describe()}
    began = time.perf_counter()
    page["equality"] = equality(machine, sizes)
    page["bandwidth"] = bandwidth(machine, sizes, total_bytes)
    if machine.is_gpu:
        page["threshold"] = threshold(machine, sizes[1:], total_bytes)
    else:
        page["threshold"] = "not measured: on CPU tensors there is one way"
    page["overlap"] = overlap(machine, total_bytes)
    page["checks"] = checks(machine, sizes[1:])
    print(report(page), flush=True)
    page["parts"] = of_page(page) + open_parts(machine.is_gpu) + vllm_parts(machine.is_gpu)
    page["seconds"] = round(time.perf_counter() - began, 1)
    print(f"\nparts\n{table(page['parts'])}")
    text = json.dumps(page, indent=2)
    if chosen.out is not None:
        chosen.out.write_text(text + "\n")
    else:
        print(text)
    failed = [check["part"] for check in page["parts"] if check["status"] == "failed"]
    print(f"\n{len(failed)} of {len(page['parts'])} parts failed, after {page['seconds']} s")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
