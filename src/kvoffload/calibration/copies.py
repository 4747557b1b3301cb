"""How fast blocks are copied: within RAM, and between RAM and a GPU, by the kernels of production."""

from __future__ import annotations

import numpy as np

from kvoffload.calibration.samples import measured, rate_and_latency, seconds_of
from kvoffload.simulate.machine import Quantity
from kvoffload.transfer import copy_blocks, copy_engine_for
from kvoffload.transfer.device import gpu_blocks


def memory_copies(block_bytes: int, num_blocks: int, repeats: int) -> dict[str, Quantity]:
    """RAM to RAM, one thread: `memory_copy_bytes_per_s`. Takes twice as much memory as is copied."""
    source, target = (np.ones((num_blocks, block_bytes), np.uint8) for _ in range(2))
    rows = np.arange(num_blocks)
    seconds = seconds_of(lambda: copy_blocks(source, rows, target, rows), repeats)
    rates = [num_blocks * block_bytes / one for one in seconds]
    return {"memory_copy_bytes_per_s": measured(rates, f"RAM to RAM, blocks of {block_bytes:,} bytes")}


def device_copies(block_bytes: int, num_blocks: int, repeats: int) -> dict[str, Quantity]:
    """RAM to the first GPU and back, pinned: `load_bytes_per_s`, `store_bytes_per_s`, `copy_latency_s`.

    Empty if torch is not here or sees no GPU.
    """
    device = gpu_blocks(num_blocks, block_bytes)
    if device is None:
        return {}
    engine = copy_engine_for(device)
    pool, rows, one = np.ones((num_blocks, block_bytes), np.uint8), np.arange(num_blocks), np.arange(1)
    try:
        loads = seconds_of(lambda: engine.load(pool, rows, rows).wait(), repeats)
        stores = seconds_of(lambda: engine.store(rows, pool, rows).wait(), repeats)
        single = seconds_of(lambda: engine.load(pool, one, one).wait(), repeats)
    finally:
        engine.close()
    total, what = num_blocks * block_bytes, f"blocks of {block_bytes:,} bytes"
    load, latency = rate_and_latency(loads, total, single, block_bytes, f"RAM to GPU, {what}")
    store = measured([total / seconds for seconds in stores], f"GPU to RAM, {what}")
    return {"load_bytes_per_s": load, "store_bytes_per_s": store, "copy_latency_s": latency}
