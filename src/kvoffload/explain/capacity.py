"""Capacities at which missing blocks are hits: replays of the same configuration with larger caches.

Works for every policy and rule, because it replays them. Knows no reasons.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from kvoffload.replay.instances import replay_of
from kvoffload.replay.replay import ReplayConfig
from kvoffload.tiers.spec import SizedTierOptions
from kvoffload.traces.trace import Trace

FACTORS = (1.1, 1.3, 1.5, 2.0, 3.0, 5.0, 10.0)
"""Multiples of the capacity of RAM and of each tier behind it. The device stays as it is."""


def kept_with(
    trace: Trace, config: ReplayConfig, progress: Callable[[int], None] = lambda requests: None
) -> npt.NDArray[np.int8]:
    """Find the smallest capacity at which each block reference is a hit.

    Returns shape ``(block_refs,)``: position in `FACTORS`, from 1; 0 for none.

    Args:
        progress: receives the number of requests of all replays done; `num_replayed` is the total.

    Cost: one replay for each different capacity.
    """
    lengths = np.diff(trace.offsets)
    depth = np.arange(trace.block_refs) - np.repeat(trace.offsets[:-1], lengths)
    smallest = np.zeros(trace.block_refs, np.int8)
    hits: npt.NDArray[np.int32] | None = None
    for number, factor in enumerate(FACTORS, 1):
        done = (number - 1) * trace.requests
        larger = _larger(config, factor)
        # From here on every block fits, so further capacities decide alike.
        if hits is None or _larger(config, FACTORS[number - 2]).capacity_blocks < trace.unique_blocks:
            run = replay_of(trace, larger)
            run.run(lambda requests, done=done: progress(done + requests))  # type: ignore[misc]
            hits = run.hits_per_request
        smallest[(smallest == 0) & (depth < np.repeat(hits, lengths))] = number
    return smallest


def num_replayed(trace: Trace) -> int:
    """Return the number of requests that `kept_with` replays, of all replays together."""
    return len(FACTORS) * trace.requests


def _larger(config: ReplayConfig, factor: float) -> ReplayConfig:
    """Multiply the capacities of RAM and tiers, and round them up."""
    exact = Fraction(str(factor))
    tiers = tuple(
        replace(tier, capacity=str(math.ceil(tier.num_blocks * exact)))
        if isinstance(tier, SizedTierOptions)
        else tier
        for tier in config.tiers
    )
    return replace(config, capacity_blocks=math.ceil(config.capacity_blocks * exact), tiers=tiers)
