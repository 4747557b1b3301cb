"""Independent recomputation of hits, prices and waits, to compare with kvoffload's results.

Imports nothing from kvoffload. Reads Mooncake's JSONL and replays it through ordered dictionaries.

    python bench/independent.py TRACE.jsonl --device 1907 --ram 6553
    kvoffload plan TRACE.jsonl ... --format json > plan.json
    python bench/independent.py TRACE.jsonl --plan plan.json --block-bytes 67108864 --gpu-tokens-per-s 30909

The first form prints LRU's prefix-hit ratio: of the GPU alone, with RAM that stores on compute, and with RAM
as a victim tier. The second form recomputes a plan for one engine and prints the largest differences. It
recomputes hits and writes of every row with ``lru`` in RAM and without SSDs; drive writes, GPUs and price of
every row. `waits` is a queue with one server, for the GPU alone.
"""

from __future__ import annotations

import argparse
import json
import lzma
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

BLOCK_TOKENS = 512
DAY_S = 86_400


class Request(NamedTuple):
    at_s: float
    blocks: list[int]
    answer_tokens: int


class Counts(NamedTuple):
    """Block references of a replay: all, served by the GPU, served by RAM; blocks written to RAM."""

    refs: int
    by_gpu: int
    by_ram: int
    written: int

    @property
    def saved(self) -> float:
        return (self.by_gpu + self.by_ram) / self.refs


def read(path: Path) -> list[Request]:
    """Read a recording: full blocks only, in order of arrival."""
    with lzma.open(path, "rt") if path.suffix == ".xz" else path.open() as lines:
        rows = [json.loads(line) for line in lines]
    rows = [row for row in rows if "timestamp" in row]  # not the header
    requests = [
        Request(
            row["timestamp"] / 1000,
            row["hash_ids"][: row["input_length"] // BLOCK_TOKENS],
            row.get("output_length", 0),
        )
        for row in rows
    ]
    return sorted(requests, key=lambda request: request.at_s)


class LRU:
    """LRU cache of blocks, coldest first."""

    def __init__(self, size: int) -> None:
        self.size, self.blocks = size, OrderedDict[int, None]()

    def run(self, blocks: Iterable[int]) -> int:
        """Count the leading blocks that are cached."""
        length = 0
        for block in blocks:
            if block not in self.blocks:
                break
            length += 1
        return length

    def use(self, blocks: list[int]) -> tuple[list[int], int]:
        """Insert as many of a request's blocks as fit, the first warmest.

        Returns: the evicted blocks of other requests, coldest first, and the number of new blocks.
        """
        head, own = blocks[: self.size], set(blocks)
        new = sum(block not in self.blocks for block in head)
        for block in blocks[self.size :]:
            self.blocks.pop(block, None)
        coldest = (block for block in self.blocks if block not in own)
        evicted = [*islice(coldest, max(0, len(self.blocks) + new - self.size))]
        for block in evicted:
            del self.blocks[block]
        for block in reversed(head):
            self.blocks[block] = None
            self.blocks.move_to_end(block)
        return evicted, new

    def push(self, blocks: list[int]) -> int:
        """Insert dropped blocks, coldest first, only the warmest if not all fit.

        Returns: the number of new blocks.
        """
        new = 0
        for block in blocks[max(0, len(blocks) - self.size) :]:
            new += block not in self.blocks
            self.blocks[block] = None
            self.blocks.move_to_end(block)
        while len(self.blocks) > self.size:
            self.blocks.popitem(last=False)
        return new


def on_compute(requests: Iterable[Request], device: int, ram: int) -> Counts:
    """Store every computed block in RAM, independent of the GPU. A prefix continues from the GPU into RAM."""
    gpu, below = LRU(device), LRU(ram)
    refs = by_gpu = by_ram = written = 0
    for request in requests:
        blocks = request.blocks
        first = gpu.run(blocks)
        by_gpu, by_ram = by_gpu + first, by_ram + below.run(blocks[first:])
        refs += len(blocks)
        gpu.use(blocks)
        written += below.use(blocks)[1]
    return Counts(refs, by_gpu, by_ram, written)


def victim(requests: Iterable[Request], device: int, ram: int) -> Counts:
    """Store the GPU's evicted blocks in RAM. A loaded block leaves RAM."""
    gpu, below = LRU(device), LRU(ram)
    refs = by_gpu = by_ram = written = 0
    for request in requests:
        blocks = request.blocks
        first = gpu.run(blocks)
        loaded = below.run(blocks[first:])
        by_gpu, by_ram = by_gpu + first, by_ram + loaded
        refs += len(blocks)
        dropped, _ = gpu.use(blocks)
        for block in blocks[first : first + loaded]:
            del below.blocks[block]
        written += below.push(dropped)
    return Counts(refs, by_gpu, by_ram, written)


STORES: dict[str, Callable[[Iterable[Request], int, int], Counts]] = {
    "on-compute": on_compute,
    "on-device-eviction": victim,
}


def waits(requests: list[Request], device: int, work_s: Callable[[int, int], float]) -> list[float]:
    """Compute times to first token of a GPU that computes one prompt after another, in seconds.

    Args:
        work_s: seconds to compute the tokens from the first position to the second.
    """
    gpu, free_at, seconds = LRU(device), 0.0, []
    for request in requests:
        # The last block is always computed.
        cached = min(gpu.run(request.blocks), len(request.blocks) - 1)
        tokens = max(1, BLOCK_TOKENS * len(request.blocks))
        free_at = max(free_at, request.at_s) + work_s(max(0, cached) * BLOCK_TOKENS, tokens)
        seconds.append(free_at - request.at_s)
        gpu.use(request.blocks)
    return seconds


def differences(
    plan: dict[str, Any], requests: list[Request], block_bytes: int, gpu_tokens_per_s: float = 0.0
) -> Iterator[tuple[str, float, int]]:
    """Compare a plan for one engine; yields each quantity, its largest relative difference, and its rows."""
    seconds = requests[-1].at_s - requests[0].at_s
    tokens = BLOCK_TOKENS * sum(len(request.blocks) for request in requests)
    errors_by_name: dict[str, list[float]] = {}

    def compare(name: str, plan_value: float, own_value: float) -> None:
        errors_by_name.setdefault(name, []).append(
            abs(plan_value - own_value) / max(abs(own_value), 1e-12) if plan_value != own_value else 0.0
        )

    assumptions = {assumption["name"]: assumption["value"] for assumption in plan["assumptions"]}
    for row in plan["rows"]:
        gpu_seconds = (row["saved"] - row["by_gpus"]) * tokens / seconds
        if gpu_tokens_per_s:
            compare("GPUs", row["gpus_worth"], gpu_seconds / gpu_tokens_per_s)
            compare("GPU-hours a day", row["gpu_hours_a_day"], 24 * gpu_seconds / gpu_tokens_per_s)
        ram, ssd = (
            float(assumptions[name].split()[0].replace(",", "")) for name in ("ram.price", "ssd.price")
        )
        if not row["servers"]:
            compare("price", row["price"], row["ram_modules"] * ram + row["ssd_drives"] * ssd)
        if row["ssd_drives"]:
            written = row["ssd_write_bytes_per_s"] * DAY_S
            compare("drive writes a day", row["drive_writes_a_day"], written / row["ssd_bytes"])
        plain = (row["policy"], row["admission"]) == ("lru", "all") and not row["shared_ram"]
        if plain and not row["ssd_drives"] and not row["servers"]:
            counts = STORES[row["store"]](requests, row["device_blocks"], row["ram_blocks"])
            compare("saved", row["saved"], counts.saved)
            compare("by GPU", row["by_gpus"], counts.by_gpu / counts.refs)
            # Not compared: our victim tier keeps a loaded block until it needs the slot, and saves a write.
            if row["store"] == "on-compute":
                compare(
                    "written to RAM", row["ram_write_bytes_per_s"], counts.written * block_bytes / seconds
                )
    for name, errors in errors_by_name.items():
        yield name, max(errors), len(errors)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path)
    parser.add_argument("--device", type=int, default=0, help="blocks of the GPU")
    parser.add_argument("--ram", type=int, default=0, help="blocks of RAM")
    parser.add_argument("--plan", type=Path, help="output of `kvoffload plan --format json` for one engine")
    parser.add_argument("--block-bytes", type=int, default=0)
    parser.add_argument("--gpu-tokens-per-s", type=float, default=0.0)
    args = parser.parse_args()
    requests = read(args.trace)
    if args.plan is not None:
        plan = json.loads(args.plan.read_text())
        for name, error, rows in differences(plan, requests, args.block_bytes, args.gpu_tokens_per_s):
            print(f"{name}: {rows} rows, largest relative difference {error:.2g}")
        return
    unlimited = sum(len(request.blocks) for request in requests)
    print(f"ceiling: {on_compute(requests, 0, unlimited).saved:.5f}")
    print(f"GPU alone: {on_compute(requests, args.device, 0).saved:.5f}")
    for store, run in STORES.items():
        print(f"lru, {store}: {run(requests, args.device, args.ram).saved:.5f}")


if __name__ == "__main__":
    main()
