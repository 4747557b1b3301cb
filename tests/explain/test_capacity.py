"""Larger capacities at which missing blocks are hits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kvoffload.explain.capacity import FACTORS, kept_with, num_replayed
from kvoffload.replay.replay import Replay, ReplayConfig
from kvoffload.tiers.spec import parse_tiers
from kvoffload.traces.sessions import generate
from kvoffload.traces.workloads import builtin
from support.small_trace import trace_of


def test_the_smallest_capacity_by_hand() -> None:
    # Ten blocks of others lie between the two uses of block 1: RAM of 11 blocks keeps it, RAM of 10 does not.
    trace = trace_of([1], *([other] for other in range(2, 12)), [1])
    assert FACTORS[:2] == (1.1, 1.3)
    assert kept_with(trace, ReplayConfig(10))[-1] == 1
    assert kept_with(trace, ReplayConfig(7))[-1] == 1 + FACTORS.index(1.5)
    assert kept_with(trace, ReplayConfig(1))[-1] == 0
    assert not kept_with(trace, ReplayConfig(10))[:-1].any()


def test_capacities_are_those_of_replays() -> None:
    trace = generate(builtin("chat", sessions=60))
    tiers = tuple(parse_tiers("tiers", "simulated:100,policy=arc"))
    config = ReplayConfig(50, "hazard", "reuse:2", tiers=tiers)
    found = kept_with(trace, config)
    double = replace(
        config, capacity_blocks=100, tiers=tuple(parse_tiers("tiers", "simulated:200,policy=arc"))
    )
    run = Replay(trace, double)
    run.run()
    lengths = np.diff(trace.offsets)
    depth = np.arange(trace.block_refs) - np.repeat(trace.offsets[:-1], lengths)
    is_hit = depth < np.repeat(run.hits_per_request, lengths)
    number = 1 + FACTORS.index(2.0)
    assert (is_hit <= ((found > 0) & (found <= number))).all()
    assert (is_hit[found == number]).all()


def test_progress_ends_at_the_total() -> None:
    trace = trace_of([1, 2], [3], [1, 2])
    done: list[int] = []
    kept_with(trace, ReplayConfig(1), done.append)
    assert done == sorted(done)
    assert done[-1] <= num_replayed(trace)
