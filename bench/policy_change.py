"""Time of a policy change: ``python bench/policy_change.py [--blocks N ...]``.

A full manager serves requests of 64 blocks while its policy changes, 512 blocks a step. The table has CPU
times of the scheduler's thread: the begin, the median and longest step, and a request during the change as a
multiple of a request before. In production another thread prepares the change.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable

import numpy as np

from kvoffload.core.manager import OffloadingManager
from kvoffload.structures.keys import Keys

REQUEST, STEP, KEY_BYTES = 64, 512, 32
PAIRS = [("lru", "hazard"), ("hazard", "lru"), ("arc", "hazard"), ("lru", "s3fifo"), ("gdsf", "lru")]


def timed_ms(call: Callable[[], object]) -> float:
    """Return the CPU time of a call on this thread."""
    start = time.thread_time_ns()
    call()
    return (time.thread_time_ns() - start) / 1e6


class Traffic:
    """Requests of a few popular and many new prompts."""

    def __init__(self, manager: OffloadingManager, seed: int) -> None:
        self.manager, self.rng = manager, random.Random(seed)
        words = np.random.default_rng(seed).integers(1, 1 << 62, (2 * manager.capacity_blocks, 4))
        self.words = words.astype(np.uint64)

    def request(self) -> None:
        """Serve one request."""
        first = self.rng.randrange(len(self.words) // REQUEST) * REQUEST
        keys, manager = Keys(self.words[first : first + REQUEST], KEY_BYTES), self.manager
        ctx = manager.begin_request("request", keys)
        ready = manager.lookup(keys, ctx).num_ready
        if ready:
            manager.complete_load(manager.prepare_load(keys[:ready], ctx))
        if (plan := manager.prepare_store(keys, ctx)) is not None:
            manager.complete_store(plan)
        manager.finish_request(ctx)


def measure(num_blocks: int, old: str, new: str, seed: int) -> str:
    """Change a policy once; return a line of the table."""
    manager = OffloadingManager(num_blocks, key_bytes=KEY_BYTES, policy=old)
    traffic = Traffic(manager, seed)
    for _ in range(4 * num_blocks // REQUEST):
        traffic.request()
    before = statistics.median(timed_ms(traffic.request) for _ in range(200))
    prepare_ms = 0.0
    change = None

    def prepare() -> None:
        nonlocal change
        change = manager.prepare_policy_change(new)

    prepare_ms = timed_ms(prepare)
    assert change is not None
    begin_ms = timed_ms(lambda: manager.begin_policy_change(change))
    steps, during, goes_on = [], [], True

    def advance() -> None:
        nonlocal goes_on
        goes_on = manager.advance_policy_change(STEP)

    while goes_on:
        during.append(timed_ms(traffic.request))
        steps.append(timed_ms(advance))
    assert manager.policy.name == new
    return (
        f"{num_blocks:>10,}  {old + ' to ' + new:<16} {prepare_ms:8.1f} {begin_ms:8.2f} {len(steps):8,} "
        f"{statistics.median(steps):8.2f} {max(steps):8.2f} {statistics.median(during) / before:8.2f}x"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--blocks", type=int, nargs="+", default=[32_768, 131_072])
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    print(f"seed {options.seed}; ms of CPU time")
    print(
        f"{'blocks':>10}  {'policies':<16} {'prepare':>8} {'begin':>8} {'steps':>8} {'median':>8} "
        f"{'longest':>8} {'request':>8}"
    )
    for num_blocks in options.blocks:
        for old, new in PAIRS:
            print(measure(num_blocks, old, new, options.seed), flush=True)


if __name__ == "__main__":
    main()
