"""Our block copies against one memcpy of the same bytes: ``python bench/copies.py [--format json]``.

All candidates run in turns in one process, so that changes of the machine's speed affect all. Ratios of the
medians are valid on other machines, absolute times are not. Copies go between a device of 512 MiB and a pool
of 256 MiB, both populated and far larger than any processor cache. Takes less than a minute.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from kvoffload.replay.content import fill, matches
from kvoffload.structures.keys import Keys
from kvoffload.tiers.memory import MemoryTier
from kvoffload.transfer import copy_blocks, copy_engine_for

Bytes = npt.NDArray[np.uint8]
Rows = npt.NDArray[np.int64]

KIB, MIB = 1024, 1024 * 1024
TOTAL_BYTES = 256 * MIB
BLOCK_BYTES = (4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, 2 * MIB)
ROUNDS = 5


def measure(candidates: dict[str, Callable[[], Any]], rounds: int = ROUNDS) -> dict[str, float]:
    """Run each candidate once per round; returns median seconds without the first round."""
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(rounds + 1):
        for name, candidate in candidates.items():
            start = time.perf_counter()
            candidate()
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(taken[1:]) for name, taken in seconds.items()}


def memcpy(dst: Bytes, src: Bytes) -> None:
    """Call the C library's memcpy once."""
    ctypes.memmove(dst.ctypes.data, src.ctypes.data, dst.nbytes)


def rows_for(scattered: bool, num_blocks: int) -> tuple[Rows, Rows]:
    """Choose rows of the device, which has twice as many blocks, and slots of the pool."""
    if not scattered:
        return np.arange(num_blocks) + num_blocks // 2, np.arange(num_blocks)
    random = np.random.default_rng(0)
    return random.permutation(2 * num_blocks)[:num_blocks], random.permutation(num_blocks)


def row_loop(src: Bytes, src_rows: Rows, dst: Bytes, dst_rows: Rows) -> None:
    for src_row, dst_row in zip(src_rows.tolist(), dst_rows.tolist(), strict=True):
        dst[dst_row] = src[src_row]


def fancy(src: Bytes, src_rows: Rows, dst: Bytes, dst_rows: Rows) -> None:
    dst[dst_rows] = src[src_rows]


def copies_of(blocks: Bytes, slots: Bytes, pattern: str, torch: Any) -> dict[str, Callable[[], Any]]:
    """All methods for one pattern, by name.

    A gather collects scattered rows of the device into neighbouring slots; a scatter is the reverse. `take`
    and `index_select` only gather, `index_copy_` only scatters.
    """
    rows, order = rows_for(pattern != "neighbours", len(slots))
    dense = np.arange(len(slots))
    src_rows = dense if pattern == "scatter" else rows
    dst_rows = dense if pattern in ("gather", "neighbours") else order
    copy = (blocks, src_rows, slots, dst_rows)
    candidates: dict[str, Callable[[], Any]] = {
        "memcpy": partial(memcpy, slots, blocks[: len(slots)]),
        "kvoffload": partial(copy_blocks, *copy),
        "row loop": partial(row_loop, *copy),
        "fancy": partial(fancy, *copy),
    }
    if pattern == "gather":
        candidates["take"] = partial(blocks.take, src_rows, 0, slots, "clip")
    if torch is not None:
        tensor, pool = torch.from_numpy(blocks), torch.from_numpy(slots)
        engine = copy_engine_for(tensor.view(torch.bfloat16))
        candidates["kvoffload, tensor"] = partial(engine.store, src_rows, slots, dst_rows)
        if pattern == "gather":
            index = torch.from_numpy(src_rows)
            candidates["index_select"] = partial(torch.index_select, tensor, 0, index, out=pool)
        if pattern == "scatter":
            index = torch.from_numpy(dst_rows)
            candidates["index_copy_"] = partial(pool.index_copy_, 0, index, tensor[: len(slots)])
    return candidates


def bench_copies(device: Bytes, pool: Bytes, torch: Any) -> list[dict[str, Any]]:
    """Measure each method's share of memcpy's speed, by block size and pattern."""
    results = []
    for block_bytes in BLOCK_BYTES:
        blocks, slots = device.reshape(-1, block_bytes), pool.reshape(-1, block_bytes)
        for pattern in ("neighbours", "gather", "scatter", "both"):
            taken = measure(copies_of(blocks, slots, pattern, torch))
            results.append(
                {
                    "block_bytes": block_bytes,
                    "pattern": pattern,
                    "memcpy_gb_per_s": round(pool.nbytes / taken["memcpy"] / 1e9, 2),
                    "ratios": {name: round(taken["memcpy"] / t, 3) for name, t in taken.items()},
                }
            )
    return results


def bench_tier(blocks: Bytes) -> dict[str, Any]:
    """Measure GB/s of generated contents, of the RAM tier with and without checksums, of the check alone."""
    num_blocks, block_bytes = len(blocks) // 4, blocks.shape[1]
    rows = np.random.default_rng(0).permutation(num_blocks)
    keys = Keys.pack([number.to_bytes(36, "big") for number in range(num_blocks)], 36)
    checked, plain = MemoryTier(num_blocks, block_bytes), MemoryTier(num_blocks, block_bytes, verify=False)
    batch = (keys, rows[::-1].copy(), blocks, rows)
    taken = measure(
        {
            "fill": partial(fill, keys, blocks, rows),
            "matches": partial(matches, keys, blocks, rows),
            "write": partial(checked.write, *batch),
            "verify": partial(checked.verify_slots, *batch[:2]),
            "read": partial(checked.read, *batch),
            "write, no checksum": partial(plain.write, *batch),
            "read, no checksum": partial(plain.read, *batch),
        }
    )
    rates = {name: round(num_blocks * block_bytes / t / 1e9, 2) for name, t in taken.items()}
    checked.close()
    plain.close()
    return {"block_bytes": block_bytes, "gb_per_s": rates}


def machine() -> dict[str, Any]:
    """Describe the machine."""
    processor = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as lines:
            models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
        processor = models[0] if models else processor
    return {"processor": processor, "cores": os.cpu_count(), "python": platform.python_version()}


def size(num_bytes: int) -> str:
    return f"{num_bytes // MIB} MiB" if num_bytes >= MIB else f"{num_bytes // KIB} KiB"


def table(rows: list[list[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows
    )


def print_report(report: dict[str, Any]) -> None:
    print("{processor}, {cores} cores, Python {python}".format(**report["machine"]))
    print(report["torch"])
    names = list(
        dict.fromkeys(name for row in report["copies"] for name in row["ratios"] if name != "memcpy")
    )
    print(f"\nSpeed relative to one memcpy of {size(TOTAL_BYTES)} (above 1.00: faster)\n")
    head = ["block", "pattern", "memcpy GB/s", *names]
    body = [
        [size(row["block_bytes"]), row["pattern"], f"{row['memcpy_gb_per_s']:.1f}"]
        + [f"{row['ratios'][name]:.2f}" if name in row["ratios"] else "" for name in names]
        for row in report["copies"]
    ]
    print(table([head, *body]))
    print("\nContents and RAM tier, scattered blocks, GB/s\n")
    names = list(report["tier"][0]["gb_per_s"])
    body = [
        [size(row["block_bytes"]), *(f"{row['gb_per_s'][name]:.1f}" for name in names)]
        for row in report["tier"]
    ]
    print(table([["block", *names], *body]))
    worst = report["worst_ratio_from_64_kib"]
    print(f"\nWorst ratio for blocks of 64 KiB and more: {worst:.2f} (target 0.75)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--format", choices=("terminal", "json"), default="terminal")
    arguments = parser.parse_args()
    torch: Any = None
    note = "torch is not installed: no rows for torch"
    if importlib.util.find_spec("torch"):
        torch = importlib.import_module("torch")
        torch.set_num_threads(1)
        note = f"torch {torch.__version__}, one thread"
    device, pool = np.ones(2 * TOTAL_BYTES, np.uint8), np.ones(TOTAL_BYTES, np.uint8)
    copies = bench_copies(device, pool, torch)
    report = {
        "machine": machine(),
        "torch": note,
        "copies": copies,
        "tier": [bench_tier(device.reshape(-1, block_bytes)) for block_bytes in BLOCK_BYTES],
        "worst_ratio_from_64_kib": min(
            row["ratios"][name]
            for row in copies
            for name in row["ratios"]
            if row["block_bytes"] >= 64 * KIB and name.startswith("kvoffload")
        ),
    }
    if arguments.format == "json":
        json.dump(report, sys.stdout, indent=2)
        print()
    else:
        print_report(report)


if __name__ == "__main__":
    main()
