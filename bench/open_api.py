"""Speed of the open API: load and store of 64 blocks by layout, and a miss without bytes.

python bench/open_api.py [--repeats 20]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import kvoffload
from kvoffload.transfer import copy_blocks

BLOCKS, TOKENS, LAYERS, HEADS, DIM = 64, 16, 32, 8, 128
LAYOUTS = {
    "paged": ("block token head dim", (2 * BLOCKS, TOKENS, HEADS, DIM)),
    "stacked": ("kv block token head dim", (2, 2 * BLOCKS, TOKENS, HEADS, DIM)),
    "contiguous": ("batch head token dim", (1, HEADS, 2 * BLOCKS * TOKENS, DIM)),
    "MLA": ("block token dim", (2 * BLOCKS, TOKENS, 2 * HEADS * DIM)),
}


def seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure(name: str, repeats: int) -> None:
    axes, shape = LAYOUTS[name]
    pairs = "head" in axes and "kv" not in axes
    made = [np.ones(shape, np.uint16).view(np.float16) for _ in range(LAYERS * (1 + pairs))]
    kv: Any = list(zip(made[::2], made[1::2], strict=True)) if pairs else made
    layout = kvoffload.KVLayout.of(kv, axes, TOKENS)
    place: dict[str, Any] = {"row": 0} if "batch" in axes else {"block_ids": [*range(0, 2 * BLOCKS, 2)]}
    stores, loads = [], []
    with kvoffload.open(model="bench", layout=layout, ram=4 * BLOCKS * layout.block_bytes) as cache:
        for number in range(repeats):
            tokens = np.arange(BLOCKS * TOKENS) + 10_000 * number
            for _ in range(2):  # a miss, then a hit
                with cache.request(tokens) as request:
                    loads.append(seconds(lambda: request.load_into(kv, **place)))
                    stores.append(seconds(lambda: request.store_from(kv, **place)))
    size = BLOCKS * layout.block_bytes
    store, load = statistics.median(stores[::2]), statistics.median(loads[1::2])
    print(
        f"{name:<11} store {1e3 * store:6.1f} ms {size / store / 1e9:5.1f} GB/s   load {1e3 * load:6.1f} ms "
        f"{size / load / 1e9:5.1f} GB/s   miss {1e3 * statistics.median(loads[::2]):.2f} ms"
    )


def copy_alone(repeats: int) -> None:
    """Measure one copy of the same bytes between two arrays: the upper limit."""
    a, b = (np.ones((2 * BLOCKS, 1 << 21), np.uint8) for _ in range(2))
    rows = np.arange(0, 2 * BLOCKS, 2)
    taken = statistics.median(seconds(lambda: copy_blocks(a, rows, b, rows)) for _ in range(repeats))
    speed = BLOCKS * (1 << 21) / taken / 1e9
    print(f"one copy of {BLOCKS} blocks of 2 MiB: {1e3 * taken:.1f} ms, {speed:.1f} GB/s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    copy_alone(options.repeats)
    for layout_name in LAYOUTS:
        measure(layout_name, options.repeats)
