"""CPU time of shadows: ``python bench/what_if.py [--rounds N] [--capacity N] [--sample N]``.

Two managers with a full cache serve the workload of `control_plane.py` in turns in one process, one of them
with four shadows and the shadow of the current setting. Shadows run in their own thread, which is idle when
the other manager's turn begins. Prints the additional CPU time of the manager's thread, and of both threads,
as shares of the CPU time without shadows. The clock is read once per 16 requests, because that is slow on
some machines. A number is the median of the rounds; the lowest and highest are in brackets. The plug-in for
vLLM is not measured.
"""

from __future__ import annotations

import argparse
import gc
import logging
import statistics
import time
from itertools import islice

from control_plane import KEY_BYTES, copy_of, fill_blocks, workload
from kvoffload.core.manager import OffloadingManager
from kvoffload.whatif import Shadows
from kvoffload.whatif.background import Background, Task
from kvoffload.whatif.live_shadows import LiveShadows
from kvoffload.whatif.setting import WhatIfParser

SETTINGS = "policy=hazard;policy=arc;capacity=0.5;capacity=2"
SAMPLES = (8, 128, 192)
BATCH, ROUND_BLOCKS = 16, 400_000
GOAL = 0.05


class Timed(Background):
    """Background thread that measures the CPU time of its tasks."""

    spent_ns = 0

    def run(self, task: Task) -> None:
        super().run(lambda: self._timed(task))

    def _timed(self, task: Task) -> None:
        start = time.thread_time_ns()
        task()
        self.spent_ns += time.thread_time_ns() - start


class Library:
    """The life of a request with the library's manager."""

    name = "library"

    def __init__(self, capacity: int, one_in: int | None) -> None:
        self.manager = OffloadingManager(capacity, key_bytes=KEY_BYTES)
        self.shadows: LiveShadows | None = None
        self.background = Timed("shadows")
        if one_in is not None:
            settings = WhatIfParser().parse("what_if", SETTINGS)
            shadows = Shadows(settings, capacity, one_in=one_in)
            self.shadows = LiveShadows(shadows, 0.0, logging.getLogger("bench"), self.background)

    def life(self, keys: list[bytes]) -> None:
        """Serve a request."""
        manager = self.manager
        ctx = manager.begin_request("", keys)
        num_ready = manager.lookup(keys, ctx).num_ready
        if num_ready:
            manager.complete_load(manager.prepare_load(keys[:num_ready], ctx))
        plan = manager.prepare_store(keys, ctx)
        assert plan is not None
        manager.complete_store(plan)
        manager.finish_request(ctx)
        if self.shadows is not None:
            self.shadows.finished(ctx)

    def step(self) -> None:
        """End a step, in which shadows may work."""
        if self.shadows is not None:
            self.shadows.work()


def measure(kind: type[Library], capacity: int, rounds: int, one_in: int) -> None:
    """Measure one sampling rate and print a line."""
    sides = [kind(capacity, rate) for rate in (None, one_in)]
    for request in workload(capacity, 0, fill_blocks(capacity)):
        for side in sides:
            side.life(copy_of(request))
            side.step()
    own, both, per_block = [], [], []
    for number in range(rounds):
        spent, blocks, stream, turn = [0, 0], 0, workload(capacity, number + 1, ROUND_BLOCKS), 0
        sides[1].background.wait()
        before = sides[1].background.spent_ns
        while batch := [*islice(stream, BATCH)]:
            blocks += sum(map(len, batch))
            turn += 1
            for which in (0, 1) if turn % 2 else (1, 0):
                own_keys, side = [*map(copy_of, batch)], sides[which]
                start = time.thread_time_ns()
                for keys in own_keys:
                    side.life(keys)
                    side.step()
                spent[which] += time.thread_time_ns() - start
                side.background.wait()
        shadows = sides[1].shadows
        assert shadows is not None
        shadows.settle()
        own.append(spent[1] / spent[0] - 1)
        both.append(own[-1] + (sides[1].background.spent_ns - before) / spent[0])
        per_block.append(spent[0] / blocks)
    print(
        f"{sides[0].name:8} {capacity:>9,} blocks  1 in {one_in:<4} own thread {spread(own)}  "
        f"both threads {spread(both)}  of {statistics.median(per_block):.0f} ns a block",
        flush=True,
    )


def spread(ratios: list[float]) -> str:
    """Format the median, the range, and the verdict against the goal."""
    reached = "reached" if statistics.median(ratios) <= GOAL else "NOT REACHED"
    return f"{statistics.median(ratios):6.1%} ({min(ratios):.1%} to {max(ratios):.1%}) {reached}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--capacity", type=int, action="append")
    parser.add_argument("--sample", type=int, action="append")
    arguments = parser.parse_args()
    gc.disable()
    print(f"four shadows: {SETTINGS}; goal: at most {GOAL:.0%} of the manager's CPU time")
    for capacity in arguments.capacity or (100_000, 1_000_000):
        for one_in in arguments.sample or SAMPLES:
            measure(Library, capacity, arguments.rounds, one_in)


if __name__ == "__main__":
    main()
