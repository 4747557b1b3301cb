"""Hits of replays with larger capacities."""

from __future__ import annotations

from dataclasses import replace

from kvoffload.explain.capacity import FACTORS, larger_hits, num_replayed
from kvoffload.replay.config import ReplayConfig
from kvoffload.replay.replay import Replay
from kvoffload.tiers.spec import parse_tiers
from kvoffload.traces.sessions import generate
from kvoffload.traces.workloads import builtin
from support.small_trace import trace_of


def test_hits_at_each_capacity_by_hand() -> None:
    # Ten other blocks are used between the uses of block 1: RAM of 11 blocks keeps it, RAM of 10 does not.
    trace = trace_of([1], *([other] for other in range(2, 12)), [1])
    assert FACTORS[:2] == (1.1, 1.3)
    assert larger_hits(trace, ReplayConfig(10))[:, -1].tolist() == [1] * len(FACTORS)
    of_seven = [int(factor >= 1.5) for factor in FACTORS]
    assert larger_hits(trace, ReplayConfig(7))[:, -1].tolist() == of_seven
    assert not larger_hits(trace, ReplayConfig(1))[:, -1].any()
    assert not larger_hits(trace, ReplayConfig(10))[:, :-1].any()


def test_hits_that_a_larger_capacity_loses() -> None:
    # Belady's anomaly: FIFO with 3 blocks hits 1, 2 and 5; with 4 blocks it hits the first 1 and 2.
    trace = trace_of(*([block] for block in (1, 2, 3, 4, 1, 2, 5, 1, 2, 3, 4, 5)))
    hits = larger_hits(trace, ReplayConfig(3, "fifo"))
    assert hits[0].tolist() == [0] * 4 + [1, 1] + [0] * 6
    assert hits[-1].tolist() == [0] * 4 + [1, 1, 0] + [1] * 5


def test_hits_equal_replays_with_larger_capacities() -> None:
    trace = generate(builtin("chat", sessions=60))
    tiers = tuple(parse_tiers("tiers", "simulated:100,policy=arc"))
    config = ReplayConfig(50, "hazard", "reuse:2", tiers=tiers)
    double = replace(
        config, capacity_blocks=100, tiers=tuple(parse_tiers("tiers", "simulated:200,policy=arc"))
    )
    run = Replay(trace, double)
    run.run()
    hits = larger_hits(trace, config)
    assert hits[FACTORS.index(2.0)].tolist() == run.hits_per_request.tolist()


def test_progress_ends_at_the_total() -> None:
    trace = trace_of([1, 2], [3], [1, 2])
    done: list[int] = []
    larger_hits(trace, ReplayConfig(1), done.append)
    assert done == sorted(done)
    assert done[-1] == num_replayed(trace)
