"""Repeated time measurements and their statistics."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from kvoffload.simulate.machine import Quantity


def seconds_of(work: Callable[[], object], repeats: int) -> list[float]:
    """Run `work` once to warm up, then time it `repeats` times; returns seconds."""
    work()
    samples = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        samples.append(time.perf_counter() - start)
    return samples


def quantity_of(samples: Sequence[float], label: str, value: float | None = None) -> Quantity:
    """Summarize samples as median, p10 and p90. `value`, if given, replaces the median."""
    p10, median, p90 = np.percentile(samples, (10, 50, 90)).tolist()
    source = f"measured: {label}, {len(samples)} times"
    return Quantity(median if value is None else value, p10, p90, source)


def rate_and_latency(
    batch_s: Sequence[float], batch_bytes: int, block_s: Sequence[float], block_bytes: int, label: str
) -> tuple[Quantity, Quantity]:
    """Return the transfer rate of batches, in bytes/s, and the latency of one block, in seconds.

    The latency is the time of a single block minus its transfer time at that rate.

    Args:
        batch_s, block_s: measured times of batches, and of single blocks.
        batch_bytes, block_bytes: bytes of a batch, and of a block.
        label: description of the measurement, for the field `source` of the quantities.
    """
    rate = quantity_of([batch_bytes / seconds for seconds in batch_s], label)
    latencies = [max(0.0, seconds - block_bytes / rate.value) for seconds in block_s]
    return rate, quantity_of(latencies, f"{label}, one block")
