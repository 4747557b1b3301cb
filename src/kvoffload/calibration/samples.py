"""Repeated measurements, and what is said of them. Knows nothing of what is measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from kvoffload.simulate.machine import Quantity


def seconds_of(work: Callable[[], object], repeats: int) -> list[float]:
    """How long some work took, so many times, after once for warmth."""
    work()
    found = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        found.append(time.perf_counter() - began)
    return found


def measured(samples: Sequence[float], what: str, value: float | None = None) -> Quantity:
    """The median of some samples, or a value that was derived from all of them, and how much they vary."""
    p10, median, p90 = np.percentile(samples, (10, 50, 90)).tolist()
    source = f"measured: {what}, {len(samples)} times"
    return Quantity(median if value is None else value, p10, p90, source)


def rate_and_latency(
    many_s: Sequence[float], many_bytes: int, one_s: Sequence[float], one_bytes: int, what: str
) -> tuple[Quantity, Quantity]:
    """Bytes a second, from jobs of many blocks; and what a job of one block takes besides its bytes."""
    rate = measured([many_bytes / seconds for seconds in many_s], what)
    besides = [max(0.0, seconds - one_bytes / rate.value) for seconds in one_s]
    return rate, measured(besides, f"{what}, one block")
