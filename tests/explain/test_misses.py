"""Reasons of missing blocks: by hand, against a naive twin, and sums for any configuration."""

from __future__ import annotations

import io
import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from kvoffload.core.miss_reasons import UNKNOWN
from kvoffload.explain.misses import (
    AFTER_SHARED_PROMPT,
    CONTINUES,
    NEW_PROMPT,
    PREFIX_DIFFERS,
    Misses,
    find_misses,
)
from kvoffload.replay.config import ReplayConfig
from kvoffload.replay.data import DataPlane
from kvoffload.replay.faults import parse_injection
from kvoffload.replay.instances import replay_of
from kvoffload.replay.replay import Replay
from kvoffload.replay.report import ReplayReport
from kvoffload.tiers.kinds.disk import DiskOptions
from kvoffload.tiers.spec import parse_tiers
from kvoffload.traces.format import read_trace
from kvoffload.traces.sessions import generate
from kvoffload.traces.sources import load_trace
from kvoffload.traces.trace import Trace
from kvoffload.traces.workloads import builtin
from support.naive.explain import explain_naively
from support.small_trace import trace_of

FEW = settings(max_examples=settings().max_examples // 4)
FIRST_USES = (NEW_PROMPT, CONTINUES, PREFIX_DIFFERS, AFTER_SHARED_PROMPT)


def named(misses: Misses) -> list[list[str]]:
    """Name the reasons of the missing blocks of each request."""
    offsets = misses.trace.offsets.tolist()
    return [
        [misses.name_at(ref) for ref in range(begin + hits, end)]
        for begin, end, hits in zip(offsets, offsets[1:], misses.hits.tolist(), strict=False)
    ]


def explained(trace: Trace, config: ReplayConfig) -> list[list[str]]:
    report, misses = find_misses(trace, config)
    assert sum(misses.counts().values()) == report.block_refs - report.prefix_hit_blocks
    return named(misses)


@st.composite
def prompts(draw: st.DrawFn) -> list[list[int]]:
    """Draw chained block ids of conversations that share a prefix, fork and return."""
    seed = draw(st.integers(0, 2**32))
    chance = random.Random(seed)
    note(f"seed {seed}")
    known: list[list[int]] = [[]]
    fresh = iter(range(1, 10**6))
    requests = []
    for _ in range(draw(st.integers(1, 30))):
        start = chance.choice(known)
        path = start[: chance.randrange(len(start) + 1)] if chance.random() < 0.5 else start
        path = path + [next(fresh) for _ in range(chance.randrange(5))]
        known.append(path)
        requests.append(path)
    return requests


CONFIGS = [
    ReplayConfig(4),
    ReplayConfig(7, "arc"),
    ReplayConfig(6, "s3fifo"),
    ReplayConfig(5, "hazard"),
    ReplayConfig(6, "lru", "reuse:2"),
    ReplayConfig(6, "sieve", "tinylfu"),
    ReplayConfig(6, "hazard,write_cost=0.5"),
    ReplayConfig(6, "gdsf", device_blocks=5),
    ReplayConfig(6, "lru", "reuse:2", 5),
    ReplayConfig(5, "lru", "all", 6, "on-device-eviction"),
    ReplayConfig(5, "2q", "reuse:2", 6, "on-device-eviction"),
]


def check_beside_the_twin(requests: list[list[int]], config: ReplayConfig) -> list[list[str]]:
    trace, log = trace_of(*requests), io.BytesIO()
    report = Replay(trace, config, decisions=log).run()
    watched, misses = find_misses(trace, config)
    assert watched.decisions_sha256 == report.decisions_sha256, "an observer must not change decisions"
    expected = explain_naively(
        requests,
        log.getvalue().decode(),
        device_blocks=config.device_blocks,
        has_rule=config.admission != "all",
    )
    assert named(misses) == expected
    return expected


@given(requests=prompts(), config=st.sampled_from(CONFIGS))
@FEW
def test_reasons_equal_a_naive_twin(requests: list[list[int]], config: ReplayConfig) -> None:
    check_beside_the_twin(requests, config)


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS, ids=lambda one: f"{one.policy}-{one.admission}-{one.store}")
@given(requests=prompts())
def test_reasons_equal_a_naive_twin_for_each_configuration(
    config: ReplayConfig, requests: list[list[int]]
) -> None:
    check_beside_the_twin(requests, config)


def test_refusals_of_the_policy_equal_a_naive_twin() -> None:
    trace = generate(builtin("chat", sessions=60))
    offsets = trace.offsets.tolist()
    requests = [trace.refs[begin:end].tolist() for begin, end in pairwise(offsets)]
    reasons = check_beside_the_twin(requests, ReplayConfig(trace.unique_blocks // 20, "hazard"))
    assert any("refused" in names for names in reasons)


BEHIND = ["", "simulated:3", "simulated:2,admission=reuse:2+simulated:9,policy=arc"]


@given(
    requests=prompts(),
    tiers=st.sampled_from(BEHIND),
    config=st.sampled_from(
        [
            *CONFIGS,
            ReplayConfig(4, queue_requests=3),
            ReplayConfig(4, decode_tokens_per_s=20.0),
            ReplayConfig(4, "lru", "all", 5, "on-device-eviction", decode_tokens_per_s=20.0),
        ]
    ),
)
@FEW
def test_reasons_add_up_behind_tiers(requests: list[list[int]], tiers: str, config: ReplayConfig) -> None:
    check_sums(requests, config, tiers)


@given(
    requests=prompts(),
    tiers=st.sampled_from(["", "simulated:6"]),
    shared_ram=st.booleans(),
    device_blocks=st.sampled_from([0, 4]),
)
@FEW
def test_reasons_add_up_over_engines(
    requests: list[list[int]], tiers: str, shared_ram: bool, device_blocks: int
) -> None:
    several = ReplayConfig(
        3, device_blocks=device_blocks, instances=3, routing="round-robin", shared_ram=shared_ram
    )
    check_sums(requests, several, tiers)


def check_sums(requests: list[list[int]], config: ReplayConfig, tiers: str) -> None:
    trace = trace_of(*requests)
    times, answers = 1000 * np.arange(trace.requests), np.full(trace.requests, 50)
    trace = replace(trace, timestamps_ms=times, output_tokens=answers)
    config = replace(config, tiers=tuple(parse_tiers("tiers", tiers)) if tiers else ())
    report, misses = find_misses(trace, config)
    counts = misses.counts()
    assert sum(counts.values()) == report.block_refs - report.prefix_hit_blocks
    assert UNKNOWN not in counts
    assert report.decisions_sha256 == replay_of(trace, config).run().decisions_sha256


def test_eviction_and_first_uses_by_hand() -> None:
    # Capacity 3, as in the test of the replay: request 1 replaces 3 with 4, request 2 replaces 4 and 2 with
    # 5 6, so request 3 misses 2.
    trace = trace_of([1, 2, 3], [1, 2, 4], [5, 6], [1, 2])
    _, misses = find_misses(trace, ReplayConfig(3))
    assert named(misses) == [["new_prompt"] * 3, ["prefix_differs"], ["new_prompt"] * 2, ["evicted"]]
    assert (misses.stored_at[-1], misses.caused_by[-1]) == (0, 2)
    assert misses.beginnings.nearest.tolist() == [-1, 0, -1, -1]


def test_refusals_of_the_admission_rule() -> None:
    trace = trace_of([1, 2], [1, 2], [1, 2])
    assert explained(trace, ReplayConfig(9, admission="reuse:2")) == [
        ["new_prompt"] * 2,
        ["not_admitted"] * 2,
        [],
    ]


def test_refusals_of_rule_and_policy_in_one_replay() -> None:
    trace = load_trace("rag")
    config = ReplayConfig(trace.unique_blocks // 20, "hazard,write_cost=2", "reuse:2")
    _, misses = find_misses(trace, config)
    counts = misses.counts()
    assert counts["not_admitted"] > 0
    assert counts["refused"] > 0
    assert UNKNOWN not in counts


def test_a_request_longer_than_ram_has_no_room() -> None:
    assert explained(trace_of([1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4]), ReplayConfig(2)) == [
        ["new_prompt"] * 4,
        ["no_room"] * 2,
        ["no_room"] * 2,
    ]


def test_blocks_behind_a_gap_are_separate_from_missing_blocks() -> None:
    # FIFO evicts the head 1 for 9, and keeps the tail.
    assert explained(trace_of([1, 2, 3], [9], [1, 2, 3]), ReplayConfig(3, "fifo")) == [
        ["new_prompt"] * 3,
        ["new_prompt"],
        ["evicted", "behind_a_gap", "behind_a_gap"],
    ]


def test_a_next_turn_continues() -> None:
    assert explained(trace_of([1, 2], [1, 2, 3, 4]), ReplayConfig(9))[1] == [CONTINUES] * 2


def test_blocks_that_never_fit_on_the_device_are_never_offered() -> None:
    trace = trace_of([1, 2, 3], [4], [1, 2, 3])
    config = ReplayConfig(9, device_blocks=2, store="on-device-eviction")
    assert explained(trace, config)[2] == ["not_offered"]


def test_another_engine_has_the_blocks() -> None:
    trace = trace_of([1, 2], [1, 2])
    config = ReplayConfig(9, instances=2, routing="round-robin")
    assert explained(trace, config) == [["new_prompt"] * 2, ["other_engine"] * 2]
    assert explained(trace, replace(config, shared_ram=True))[1] == []


def test_a_block_that_an_engine_has_only_loaded_is_evicted_later() -> None:
    # Engine 1 loads blocks 1 and 2 from the shared tier, and then misses no block until they are evicted.
    trace = trace_of([1, 2], [1, 2], [10, 11], [10, 11], [20, 21], [1, 2])
    tiers = tuple(parse_tiers("tiers", "simulated:2"))
    config = ReplayConfig(2, tiers=tiers, instances=2, routing="round-robin")
    assert explained(trace, config)[1::2] == [[], [], ["evicted"] * 2]


def test_a_tier_evicts_and_a_rule_of_a_tier_refuses() -> None:
    trace = trace_of([1], [2], [3], [1])
    _, misses = find_misses(trace, ReplayConfig(1, tiers=tuple(parse_tiers("tiers", "simulated:2"))))
    assert named(misses)[3] == ["evicted"]
    assert misses.was_in_tier[-1] == 1
    rule = tuple(parse_tiers("tiers", "simulated:9,admission=reuse:2"))
    _, refused = find_misses(trace, ReplayConfig(1, tiers=rule))
    assert named(refused)[3] == ["evicted"]
    assert refused.was_in_tier[-1] == 0


@pytest.mark.parametrize(("tiers", "slowest"), [("simulated:2+simulated:4", 2), ("simulated:4", 1)])
def test_the_slowest_tier_that_held_a_block_is_named(tiers: str, slowest: int) -> None:
    # Both tiers store block 1. The first tier, of two blocks, evicts it long before the second, of four.
    trace = trace_of(*([block] for block in (1, 2, 3, 4, 5, 6, 7, 8, 1)))
    _, misses = find_misses(trace, ReplayConfig(1, tiers=tuple(parse_tiers("tiers", tiers))))
    assert named(misses)[-1] == ["evicted"]
    assert misses.was_in_tier[-1] == slowest


def test_ram_without_room_for_all_blocks_of_a_tier() -> None:
    # The device evicts one block after the other, so the tier stores all four; RAM has room for two.
    trace = trace_of([1, 2, 3, 4], [9], [8], [7], [6], [1, 2, 3, 4])
    tiers = tuple(parse_tiers("tiers", "simulated:99"))
    config = ReplayConfig(2, device_blocks=4, store="on-device-eviction", tiers=tiers)
    assert explained(trace, config)[-1] == ["tier_gave_up"] * 2


@pytest.mark.parametrize("kind", ["bitflip", "zero", "swap"])
def test_damaged_blocks_are_named(kind: str) -> None:
    trace = generate(builtin("chat", sessions=150))
    capacity = trace.unique_blocks // 3
    data = DataPlane(capacity, 64, parse_injection(f"{kind}:0.05", 7))
    try:
        report, misses = find_misses(trace, ReplayConfig(capacity), data=data)
    finally:
        data.close()
    counts = misses.counts()
    assert counts["damaged"] == report.mismatches_caught > 0
    assert counts["behind_a_gap"] > 0, "sound blocks behind a damaged block are not used"
    assert UNKNOWN not in counts


def test_damage_on_a_disk_is_named(tmp_path: Path) -> None:
    trace = generate(builtin("chat", sessions=60))
    blocks = trace.unique_blocks
    disk = DiskOptions(path=(str(tmp_path),), capacity=str(blocks))
    config = ReplayConfig(blocks // 3, tiers=(disk,))

    def explained_with_bytes() -> tuple[ReplayReport, Misses]:
        data = DataPlane(config.capacity_blocks, 4096)
        try:
            return find_misses(trace, config, data=data)
        finally:
            data.close()

    explained_with_bytes()
    (slab,) = tmp_path.glob("*.slab")
    with slab.open("r+b") as file:
        size = slab.stat().st_size
        for offset in np.random.default_rng(3).integers(size // 2, size, 100).tolist():
            file.seek(offset)
            file.write(b"\xa5")
    report, misses = explained_with_bytes()
    counts = misses.counts()
    assert report.mismatches_served == 0
    assert report.tiers[1].mismatches_caught > 0
    assert counts["damaged"] > 0
    assert counts["behind_a_gap"] > 0
    assert UNKNOWN not in counts


def test_many_continuations_of_a_prompt_are_new_conversations() -> None:
    few = trace_of([1, 2], *([1, block] for block in range(10, 17)))
    many = trace_of([1, 2], *([1, block] for block in range(10, 18)))
    assert {name for names in explained(few, ReplayConfig(99))[1:] for name in names} == {PREFIX_DIFFERS}
    assert {name for names in explained(many, ReplayConfig(99))[1:] for name in names} == {
        AFTER_SHARED_PROMPT
    }


SET_UPS = [
    ("lru", "all", "on-compute", ""),
    ("hazard", "reuse:2", "on-compute", "simulated:10000"),
    ("arc", "tinylfu", "on-device-eviction", ""),
]
SHORT = [
    *(("conversation_first60", *set_up) for set_up in SET_UPS),
    ("agentic_12h", *SET_UPS[0]),
    ("agentic_3h", *SET_UPS[2]),
]
"""One case for each configuration and each recording."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "policy", "admission", "store", "tiers"),
    [
        pytest.param(name, *set_up, marks=[] if (name, *set_up) in SHORT else pytest.mark.long)
        for name in ("conversation_first60", "agentic_12h", "agentic_3h")
        for set_up in SET_UPS
    ],
)
def test_recordings(
    recorded_trace_path: Callable[[str], Path],
    name: str,
    policy: str,
    admission: str,
    store: str,
    tiers: str,
) -> None:
    trace = read_trace(recorded_trace_path(name))
    blocks = trace.unique_blocks // 20
    tier_options = tuple(parse_tiers("tiers", tiers)) if tiers else ()
    device_blocks = blocks // 2 if store == "on-device-eviction" else 0
    report, misses = find_misses(
        trace, ReplayConfig(blocks, policy, admission, device_blocks, store, tier_options)
    )
    counts = misses.counts()
    assert sum(counts.values()) == report.block_refs - report.prefix_hit_blocks
    assert UNKNOWN not in counts
    first_uses = sum(counts.get(kind, 0) for kind in FIRST_USES)
    assert first_uses == trace.unique_blocks
