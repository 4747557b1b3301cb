"""Measures block copies from RAM to RAM and between RAM and a GPU, with the copy kernels of `transfer`."""

from __future__ import annotations

import numpy as np

from kvoffload.calibration.samples import quantity_of, rate_and_latency, seconds_of
from kvoffload.simulate.machine import Quantity
from kvoffload.transfer import copy_blocks, copy_engine_for
from kvoffload.transfer.device import gpu_blocks


def memory_copies(block_bytes: int, num_blocks: int, repeats: int) -> dict[str, Quantity]:
    """Measure `memory_copy_bytes_per_s` of one thread. Needs ``2 * num_blocks * block_bytes`` of memory."""
    source, target = (np.ones((num_blocks, block_bytes), np.uint8) for _ in range(2))
    rows = np.arange(num_blocks)
    samples = seconds_of(lambda: copy_blocks(source, rows, target, rows), repeats)
    rates = [num_blocks * block_bytes / seconds for seconds in samples]
    return {"memory_copy_bytes_per_s": quantity_of(rates, f"RAM to RAM, blocks of {block_bytes:,} bytes")}


def device_copies(block_bytes: int, num_blocks: int, repeats: int) -> dict[str, Quantity]:
    """Measure `load_bytes_per_s`, `store_bytes_per_s` and `copy_latency_s` between RAM and the first GPU.

    The RAM is pinned. Returns an empty dict if torch is not installed or sees no GPU.
    """
    device = gpu_blocks(num_blocks, block_bytes)
    if device is None:
        return {}
    engine = copy_engine_for(device)
    pool, rows, row = np.ones((num_blocks, block_bytes), np.uint8), np.arange(num_blocks), np.arange(1)
    try:
        loads = seconds_of(lambda: engine.load(pool, rows, rows).wait(), repeats)
        stores = seconds_of(lambda: engine.store(rows, pool, rows).wait(), repeats)
        single_loads = seconds_of(lambda: engine.load(pool, row, row).wait(), repeats)
    finally:
        engine.close()
    total, size = num_blocks * block_bytes, f"blocks of {block_bytes:,} bytes"
    load, latency = rate_and_latency(loads, total, single_loads, block_bytes, f"RAM to GPU, {size}")
    store = quantity_of([total / seconds for seconds in stores], f"GPU to RAM, {size}")
    return {"load_bytes_per_s": load, "store_bytes_per_s": store, "copy_latency_s": latency}
