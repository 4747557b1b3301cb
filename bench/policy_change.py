"""Time of a policy change or a resize: ``python bench/policy_change.py [--blocks N ...]``.

A full manager serves requests of 64 blocks while its policy changes, or while its pool shrinks to half and
grows again, 512 blocks per step. The tables show CPU times of the scheduler's thread: the preparation (in
production in another thread), the begin, the median and longest step, and the ratio of a request during the
change to a request before it.
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
SIZED = ["lru", "arc", "hazard", "gdsf"]
PAIRS = [("lru", "hazard"), ("hazard", "lru"), ("arc", "hazard"), ("lru", "s3fifo"), ("gdsf", "lru")]


def timed_ms(call: Callable[[], object]) -> float:
    """Return the CPU time of a call on this thread, in ms."""
    start = time.thread_time_ns()
    call()
    return (time.thread_time_ns() - start) / 1e6


class Traffic:
    """Requests with random prompts, twice as many blocks as the capacity."""

    def __init__(self, manager: OffloadingManager, seed: int) -> None:
        self.manager, self.rng = manager, random.Random(seed)
        words = np.random.default_rng(seed).integers(1, 1 << 62, (2 * manager.capacity_blocks, 4))
        self.words = words.astype(np.uint64)

    def request(self) -> None:
        first = self.rng.randrange(len(self.words) // REQUEST) * REQUEST
        keys, manager = Keys(self.words[first : first + REQUEST], KEY_BYTES), self.manager
        ctx = manager.begin_request("request", keys)
        ready = manager.lookup(keys, ctx).num_ready
        if ready:
            manager.complete_load(manager.prepare_load(keys[:ready], ctx))
        if (plan := manager.prepare_store(keys, ctx)) is not None:
            manager.complete_store(plan)
        manager.finish_request(ctx)


def full_manager(num_blocks: int, policy: str, seed: int) -> tuple[OffloadingManager, Traffic, float]:
    """Return a full manager, its traffic, and the time of a request in ms."""
    manager = OffloadingManager(num_blocks, key_bytes=KEY_BYTES, policy=policy)
    traffic = Traffic(manager, seed)
    for _ in range(4 * num_blocks // REQUEST):
        traffic.request()
    return manager, traffic, statistics.median(timed_ms(traffic.request) for _ in range(200))


def steps_of(traffic: Traffic, advance: Callable[[int], bool]) -> tuple[list[float], list[float]]:
    """Serve a request before each step until no step is left; return the times of steps and requests."""
    steps, during, goes_on = [], [], True

    def step() -> None:
        nonlocal goes_on
        goes_on = advance(STEP)

    while goes_on:
        during.append(timed_ms(traffic.request))
        steps.append(timed_ms(step))
    return steps, during


def line(num_blocks: int, name: str, times: tuple[float, float], steps: list[float], request: float) -> str:
    """Format a line of the table. `times`: ms of the preparation and of the begin."""
    return (
        f"{num_blocks:>10,}  {name:<16} {times[0]:8.1f} {times[1]:8.2f} {len(steps):8,} "
        f"{statistics.median(steps):8.2f} {max(steps):8.2f} {request:8.2f}x"
    )


def measure(num_blocks: int, old: str, new: str, seed: int) -> str:
    """Change a policy once; return a line of the table."""
    manager, traffic, before = full_manager(num_blocks, old, seed)
    change = None

    def prepare() -> None:
        nonlocal change
        change = manager.prepare_policy_change(new)

    prepare_ms = timed_ms(prepare)
    assert change is not None
    begin_ms = timed_ms(lambda: manager.begin_policy_change(change))
    steps, during = steps_of(traffic, manager.advance_policy_change)
    assert manager.policy.name == new
    times = prepare_ms, begin_ms
    return line(num_blocks, f"{old} to {new}", times, steps, statistics.median(during) / before)


def measure_resize(num_blocks: int, policy: str, seed: int) -> list[str]:
    """Shrink a pool to half, then let it grow; return the lines of the table."""
    manager, traffic, before = full_manager(num_blocks, policy, seed)
    lines = []
    for name, size in (("shrinks", num_blocks // 2), ("grows", num_blocks)):
        begin_ms = timed_ms(lambda size=size: manager.begin_resize(size))  # type: ignore[misc]
        steps, during = steps_of(traffic, manager.advance_resize)
        assert manager.usable_blocks == size
        ratio = statistics.median(during) / before
        lines.append(line(num_blocks, f"{policy} {name}", (0.0, begin_ms), steps, ratio))
    return lines


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
        for policy in SIZED:
            print(*measure_resize(num_blocks, policy, options.seed), sep="\n", flush=True)


if __name__ == "__main__":
    main()
