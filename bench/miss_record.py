"""CPU time of explained misses: ``python bench/miss_record.py [--rounds N] [--capacity N]``.

Two managers serve the same requests in turns in one process, one with `explain_misses`. The requests are
those of `control_plane.py`, on a full cache, and requests of new blocks, the worst case: every block is
explained, and every stored block evicts another. The unit is CPU time of the thread. A ratio is the median of
all rounds; the lowest and highest are in brackets.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
from collections.abc import Callable

from control_plane import GROUP, KEY_BYTES, copy_of, fill_blocks, workload
from kvoffload.core.manager import OffloadingManager

Request = list[bytes]
POLICIES = ("lru", "arc")
ROUND_BLOCKS = 100_000


def life(manager: OffloadingManager, keys: Request, explains: bool) -> int:
    """Serve a request; return its CPU time in ns."""
    start = time.thread_time_ns()
    ctx = manager.begin_request("request")
    num_ready = manager.lookup(keys, ctx).num_ready
    if explains:
        manager.count_misses(ctx, num_ready)
    if num_ready:
        manager.complete_load(manager.prepare_load(keys[:num_ready], ctx))
    plan = manager.prepare_store(keys, ctx)
    assert plan is not None
    manager.complete_store(plan)
    manager.finish_request(ctx)
    return time.thread_time_ns() - start


def all_new(length: int) -> Callable[[int], list[Request]]:
    """Return a source of requests of new blocks."""

    def requests(seed: int) -> list[Request]:
        rng = random.Random(seed)
        return [
            [rng.randbytes(KEY_BYTES - len(GROUP)) + GROUP for _ in range(length)]
            for _ in range(ROUND_BLOCKS // length)
        ]

    return requests


def ratios(
    sides: list[Callable[[Request], int]], requests: Callable[[int], list[Request]], rounds: int
) -> tuple[list[float], list[float]]:
    """Return the ratio of the second side to the first of each round, and the first side's ns per block."""
    found, per_block = [], []
    for number in range(rounds):
        spent, blocks = [0, 0], 0
        for turn, request in enumerate(requests(number + 1)):
            for side in (0, 1) if turn % 2 else (1, 0):
                spent[side] += sides[side](copy_of(request))
            blocks += len(request)
        found.append(spent[1] / spent[0])
        per_block.append(spent[0] / blocks)
    return found, per_block


def measure(policy: str, capacity: int, rounds: int) -> None:
    """Print a line for each kind of request."""
    managers = [
        OffloadingManager(capacity, key_bytes=KEY_BYTES, policy=policy, explain_misses=explains)
        for explains in (False, True)
    ]
    for request in workload(capacity, 0, fill_blocks(capacity)):
        for manager in managers:
            life(manager, copy_of(request), False)
    plain, explaining = managers
    sides: dict[str, list[Callable[[Request], int]]] = {
        "recorded": [lambda keys: life(plain, keys, False), lambda keys: life(explaining, keys, False)],
        "and explained": [lambda keys: life(plain, keys, False), lambda keys: life(explaining, keys, True)],
    }
    kinds = {
        "mixed": lambda seed: list(workload(capacity, seed, ROUND_BLOCKS)),
        "16 new": all_new(16),
        "512 new": all_new(512),
    }
    for kind, requests in kinds.items():
        for name, pair in sides.items():
            found, per_block = ratios(pair, requests, rounds)
            print(
                f"{policy:4} {capacity:>9,} blocks  {kind:8} {name:14} {statistics.median(found):.3f} "
                f"({min(found):.3f} to {max(found):.3f})  of {min(per_block):.0f} ns a block",
                flush=True,
            )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--capacity", type=int, action="append")
    arguments = parser.parse_args()
    gc.disable()
    for capacity in arguments.capacity or (10_000, 100_000, 1_000_000):
        for policy in POLICIES:
            measure(policy, capacity, arguments.rounds)


if __name__ == "__main__":
    main()
