"""Replays the workload of LMCache's pull request 4499, "eviction-aware policy for lazy offload".

    python bench/lmcache_4499.py [--seeds 5]

Prints the hits of the replay and of the text. The text specifies 14 concurrent SWE-agent trajectories of 4 to
158 steps, at a constant rate of steps, with prompts of at most 34,600 tokens; 2,212 requests; 182.6 GiB of
distinct KV, 36.7 GiB live; RAM of 40, 20 and 10 GiB. The GPU alone serves 0.308 of the tokens, also with 10
GiB of RAM: the prefix that all requests share. "External" is the share of the other tokens that RAM serves:
(0.776 - 0.308) / (1 - 0.308) is the text's 0.677.

The text omits the lengths of the trajectories, the model, and the size of the GPU's cache. Assumptions: the
number of steps is log-normal within these limits, with a median that makes about 36.7 GiB live; prompts grow
by equal steps; a token has as many bytes as make the distinct KV 182.6 GiB. The GPU's cache is fitted to one
number of the text, 0.450. Eager storing is `lru` on-compute; eviction-aware storing is `lru`
on-device-eviction.
"""

from __future__ import annotations

import argparse
import random
import statistics
from typing import NamedTuple

import numpy as np

from kvoffload.replay.config import ReplayConfig
from kvoffload.replay.replay import Replay
from kvoffload.traces.trace import Trace

GIB = 2**30
SLOTS, REQUESTS, LONGEST_TOKENS = 14, 2212, 34_600
DISTINCT_BYTES = 182.6 * GIB
SHORTEST_STEPS, LONGEST_STEPS = 4, 158
LOG_MEDIAN, SPREAD = 3.9, 0.8
"""Parameters of the log-normal number of steps."""
BLOCK_TOKENS = 64
SHARED_TOKENS = 5440
"""The prefix that all prompts share: 0.308 of all tokens."""
FIRST_TOKENS, STEP_TOKENS = SHARED_TOKENS + 1024, 540
PUBLISHED = {40: (0.677, 0.852), 20: (0.003, 0.450), 10: (0.000, 0.121)}
"""External hits by GiB of RAM: eager, eviction-aware."""
FITTED_GIB = 20
SIDES = {
    "eager": ("lru", "on-compute"),
    "evicted": ("lru", "on-device-eviction"),
    "hazard": ("hazard", "on-device-eviction"),
}


class Setting(NamedTuple):
    """A trace, the bytes of a block, and the capacity of the GPU in blocks."""

    trace: Trace
    block_bytes: float
    gpu_blocks: int


def steps_of(rng: random.Random) -> int:
    while True:
        steps = round(rng.lognormvariate(LOG_MEDIAN, SPREAD))
        if SHORTEST_STEPS <= steps <= LONGEST_STEPS:
            return steps


def chains(rng: random.Random) -> list[list[int]]:
    """Generate prompts as chains of block ids: 14 sessions in turns; a new one replaces a finished one."""
    shared = list(range(SHARED_TOKENS // BLOCK_TOKENS))
    next_id, requests = len(shared), list[list[int]]()
    sessions: list[tuple[list[int], int, float]] = []
    while len(requests) < REQUESTS:
        while len(sessions) < SLOTS:
            steps = steps_of(rng)
            # All trajectories grow by the same step, up to the longest prompt.
            a_step = min(STEP_TOKENS, (LONGEST_TOKENS - FIRST_TOKENS) / steps)
            sessions.append(([*shared], steps, a_step))
        for row in range(SLOTS):
            path, steps_left, a_step = sessions[row]
            if not steps_left:
                continue
            tokens = FIRST_TOKENS if len(path) == len(shared) else len(path) * BLOCK_TOKENS + a_step
            new = max(1, round(tokens / BLOCK_TOKENS) - len(path))
            path = [*path, *range(next_id, next_id + new)]
            next_id += new
            requests.append(path)
            sessions[row] = path, steps_left - 1, a_step
        sessions = [session for session in sessions if session[1]]
    return requests[:REQUESTS]


def trace_of(requests: list[list[int]]) -> Trace:
    """Convert chains to a trace. Ids must count up in order of first appearance."""
    refs = np.array([block for path in requests for block in path], np.int32)
    return Trace(
        name="lmcache-4499",
        block_tokens=BLOCK_TOKENS,
        block_ids=np.arange(int(refs.max()) + 1, dtype=np.int64),
        refs=refs,
        offsets=np.cumsum([0, *map(len, requests)], dtype=np.int64),
        timestamps_ms=np.arange(len(requests), dtype=np.int64) * 1000,
        output_tokens=np.ones(len(requests), np.int64),
    )


def setting(seed: int) -> Setting:
    """Make a trace, and fit the GPU's blocks to the text's external hits with 20 GiB of RAM."""
    trace = trace_of(chains(random.Random(seed)))
    made = Setting(trace, DISTINCT_BYTES / trace.unique_blocks, 1)
    low, high = 1, round(40 * GIB / made.block_bytes)
    while high - low > high // 100:
        middle = (low + high) // 2
        _, external = served(made._replace(gpu_blocks=middle), FITTED_GIB, "evicted")
        low, high = (middle, high) if external < PUBLISHED[FITTED_GIB][1] else (low, middle)
    return made._replace(gpu_blocks=high)


def served(given: Setting, ram_gib: int, side: str) -> tuple[float, float]:
    """Replay; returns the share of all blocks that the GPU serves, and the external hits."""
    policy, store = SIDES[side]
    ram_blocks = round(ram_gib * GIB / given.block_bytes)
    config = ReplayConfig(ram_blocks, policy=policy, device_blocks=given.gpu_blocks, store=store)
    report = Replay(given.trace, config).run()
    return (
        report.device_hit_blocks / report.block_refs,
        report.offload_hit_blocks / (report.block_refs - report.device_hit_blocks),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=5)
    settings = [setting(seed) for seed in range(parser.parse_args().seeds)]
    gpu_gib = [given.gpu_blocks * given.block_bytes / GIB for given in settings]
    print(f"seeds 0 to {len(settings) - 1}; the GPU has {min(gpu_gib):.1f} to {max(gpu_gib):.1f} GiB")
    print("external hits: text, mean and range of the replays; hazard on-device-eviction for comparison")
    for ram_gib, (eager, evicted) in PUBLISHED.items():
        cells = [f"RAM {ram_gib} GiB"]
        for side, published in (("eager", eager), ("evicted", evicted), ("hazard", None)):
            external = [served(given, ram_gib, side)[1] for given in settings]
            text = "" if published is None else f"{published:.3f}, "
            bounds = f"({min(external):.3f} to {max(external):.3f})"
            cells.append(f"{side} {text}{statistics.mean(external):.3f} {bounds}")
        print("   ".join(cells))


if __name__ == "__main__":
    main()
