"""CPU time of `kvoffload explain` relative to a replay; docs/explain.md quotes it.

Runs in turns in one process: a replay, the same replay with explained misses, and replays with larger
capacities. Prints medians of the CPU time and their ratios.

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
from kvoffload.replay.config import ReplayConfig
from kvoffload.replay.replay import Replay
from kvoffload.traces.sources import load_trace


def cpu_s(work: Callable[[], object]) -> float:
    """Run `work`; returns seconds of CPU time of this thread."""
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
    seconds_of: dict[str, list[float]] = {side: [] for side in sides}
    for work in sides.values():
        work()  # compiles
    for _ in range(rounds):
        for side, work in sides.items():
            seconds_of[side].append(cpu_s(work))
    print(f"{trace.name}: {trace.requests:,} requests, {trace.block_refs:,} references, 5% RAM, lru")
    base = statistics.median(seconds_of["replay"])
    for side, seconds in seconds_of.items():
        median = statistics.median(seconds)
        print(f"{side:>18} {median:7.2f} s {median / base:6.2f} times the replay")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "chat", int(sys.argv[2]) if len(sys.argv) > 2 else 5)
