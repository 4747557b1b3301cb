"""Cost of `kvoffload explain` relative to the replay that it explains; docs/explain.md quotes it.

Alternates both sides in one process and prints medians of the CPU time and their ratios: a replay, the same
replay with its misses explained, and the replays with larger capacities.

    python bench/explain.py                  built-in chat
    python bench/explain.py TRACE [ROUNDS]   a recording
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

from kvoffload.explain.capacity import larger_hits
from kvoffload.explain.misses import find_misses
from kvoffload.replay.replay import Replay, ReplayConfig
from kvoffload.traces.sources import load_trace


def cpu_s(work: Callable[[], object]) -> float:
    """Seconds of CPU time of this thread."""
    start = time.thread_time()
    work()
    return time.thread_time() - start


def main(name: str, rounds: int) -> None:
    trace = load_trace(name)
    config = ReplayConfig(max(1, trace.unique_blocks // 20))
    sides: dict[str, Callable[[], object]] = {
        "replay": lambda: Replay(trace, config).run(),
        "explained": lambda: find_misses(trace, config),
        "larger capacities": lambda: larger_hits(trace, config),
    }
    found: dict[str, list[float]] = {side: [] for side in sides}
    for work in sides.values():
        work()  # compiles
    for _ in range(rounds):
        for side, work in sides.items():
            found[side].append(cpu_s(work))
    print(f"{trace.name}: {trace.requests:,} requests, {trace.block_refs:,} references, 5% RAM, lru")
    base = statistics.median(found["replay"])
    for side, seconds in found.items():
        median = statistics.median(seconds)
        print(f"{side:>18} {median:7.2f} s {median / base:6.2f} times the replay")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "chat", int(sys.argv[2]) if len(sys.argv) > 2 else 5)
