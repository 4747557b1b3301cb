"""Hits with larger capacities: replays a trace with the same configuration and larger caches.

Replays each capacity separately, and therefore works for every policy and admission rule. Does not know why
blocks were missing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from kvoffload.replay.config import ReplayConfig
from kvoffload.replay.instances import replay_of
from kvoffload.tiers.spec import SizedTierOptions
from kvoffload.traces.trace import Trace

FACTORS = (1.1, 1.3, 1.5, 2.0, 3.0, 5.0, 10.0)
"""Multiples of the capacity of RAM and of each tier behind RAM. The capacity of the device is not changed."""


def larger_hits(
    trace: Trace, config: ReplayConfig, progress: Callable[[int], None] = lambda requests: None
) -> npt.NDArray[np.int32]:
    """Replay a trace at each larger capacity, and count the hits of each request.

    A hit is a block from the cached beginning of the request. A request may have fewer hits at a larger
    capacity, because some policies are not monotone.

    Args:
        progress: called with the number of requests replayed so far, in all replays together; `num_replayed`
            when all are finished.

    Returns: number of hits, shape ``(len(FACTORS), requests)``.

    Cost: one replay for each capacity, except capacities that exceed a capacity at which all blocks fit.
    """
    hits = np.zeros((len(FACTORS), trace.requests), np.int32)
    for number, factor in enumerate(FACTORS):
        # If every block fits, a larger capacity changes nothing.
        if number and _larger(config, FACTORS[number - 1]).capacity_blocks >= trace.unique_blocks:
            hits[number] = hits[number - 1]
            progress((number + 1) * trace.requests)
            continue
        done = number * trace.requests
        run = replay_of(trace, _larger(config, factor))
        run.run(lambda requests, done=done: progress(done + requests))  # type: ignore[misc]
        hits[number] = run.hits_per_request
    return hits


def num_replayed(trace: Trace) -> int:
    """Return the number of requests in all replays of `larger_hits` together."""
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
