"""Built-in workloads: equal bytes on every machine, effects of parameters, resemblance to recordings."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from kvoffload.errors import ConfigError
from kvoffload.replay.optimum import infinite, optimum
from kvoffload.traces.formats.mooncake import write_trace
from kvoffload.traces.sessions import _exp, generate
from kvoffload.traces.statistics import Percentiles, describe, turns
from kvoffload.traces.trace import Trace
from kvoffload.traces.workloads import BUILTIN, LogNormal, Workload, builtin
from support.small_trace import trace_of

FINGERPRINTS = {
    "agent": "1eb4a0f26ee9d25199ef531f3d6a9012e3dca59c3ad90e992bfcf4a1ca2cba46",
    "chat": "f84edf6ff5c30c5958b000b017771f99957ca9f368a05ea972ebb59e1ca5920a",
    "rag": "bd9735e6590e4bd28e49ada35e93aef9f94f3a67c71ed7905f4e176d60c2fd26",
}
"""sha256 of the trace file. Change one only with a line in the changelog: golden numbers depend on it."""


@pytest.mark.parametrize("name", FINGERPRINTS)
def test_fingerprint(tmp_path: Path, name: str) -> None:
    path = tmp_path / "trace.jsonl"
    write_trace(generate(builtin(name)), path)
    assert hashlib.sha256(path.read_bytes()).hexdigest() == FINGERPRINTS[name]


def lengths(trace: Trace) -> list[int]:
    return sorted(np.diff(trace.offsets).tolist())


def plain(**parameters: Any) -> Workload:
    """A workload with constant lengths: prompt 10 tokens, first message 20, later messages 5, answers 5."""
    usual: dict[str, Any] = {
        "sessions": 20,
        "sessions_per_minute": 1,
        "turns": 3,
        "turns_shape": 1000,
        "think_time_s": LogNormal(10, 0),
        "shared_prompts": 1,
        "shared_prompt_tokens": 10,
        "first_tokens": LogNormal(20, 0),
        "turn_tokens": LogNormal(5, 0),
        "answer_tokens": LogNormal(5, 0),
        "summary_tokens": LogNormal(2, 0),
        "block_tokens": 1,
    }
    return Workload(name="plain", **{**usual, **parameters})


def test_a_turn_adds_answer_and_message() -> None:
    trace = generate(plain())
    assert set(lengths(trace)) <= {30 + 10 * turn for turn in range(20)}
    assert set(trace.output_tokens.tolist()) == {5}
    assert trace.timestamps_ms.tolist() == sorted(trace.timestamps_ms.tolist())


def test_turns_have_the_same_mean_for_every_shape() -> None:
    for shape in (3, 1000):
        trace = generate(plain(sessions=4000, turns=2.5, turns_shape=shape))
        assert trace.requests / 4000 == pytest.approx(2.5, rel=0.05)
    assert generate(plain(turns=1)).requests == 20


def test_single_turns_share_only_the_prompt() -> None:
    trace = generate(plain(turns=1))
    assert trace.unique_blocks == 10 + 20 * 20
    # Three prompts; the first is the most frequent.
    trace = generate(plain(turns=1, sessions=600, shared_prompts=3))
    roots = np.bincount(trace.refs[trace.offsets[:-1]])
    assert sorted(roots[roots > 0].tolist()) == pytest.approx(
        [600 * 2 / 11, 600 * 3 / 11, 600 * 6 / 11], rel=0.2
    )


def test_documents_are_between_prompt_and_message() -> None:
    documents = {"documents": 1, "documents_per_session": 1, "document_tokens": LogNormal(7, 0)}
    trace = generate(plain(turns=1, **documents))
    assert set(lengths(trace)) == {37}
    assert trace.unique_blocks == 17 + 20 * 20


def test_load_changes_only_the_times() -> None:
    slow, fast = (generate(plain(sessions=200, sessions_per_minute=load)) for load in (1, 20))
    assert lengths(slow) == lengths(fast)
    assert slow.timestamps_ms[-1] == pytest.approx(200 * 60_000, rel=0.05)
    assert fast.timestamps_ms[-1] == pytest.approx(10 * 60_000, rel=0.05)
    assert describe(fast).concurrent_sessions > 5 * describe(slow).concurrent_sessions


def test_a_compacted_context_has_the_prompt_and_a_summary() -> None:
    trace = generate(plain(turns=50, context_limit_tokens=60))
    assert max(lengths(trace)) == 60
    # 30, 40, 50, 60; then the answer does not fit: prompt, summary, answer and message are 22, 32, 42, 52.
    # Then the message does not fit: 10 + 2 + 5.
    assert min(lengths(trace)) == 17
    assert min(lengths(generate(plain(first_tokens=LogNormal(1000, 0), context_limit_tokens=60)))) < 60


def test_forks_return_to_an_earlier_turn() -> None:
    def is_longest_yet(trace: Trace) -> bool:
        return bool(np.all(np.diff(np.diff(trace.offsets)) > 0))

    alone = {"sessions": 1, "sessions_per_minute": 0.0001, "turns": 40, "seed": 3}
    assert is_longest_yet(generate(plain(**alone)))
    assert not is_longest_yet(generate(plain(**alone, fork_share=0.3)))


def test_sub_agents_are_sessions_within_sessions() -> None:
    without, with_agents = (
        generate(plain(sessions=300, turns=10, sub_agent_share=share, sub_agent_turns=4))
        for share in (0, 0.5)
    )
    # Nine turns of a session have a following turn; half of them start a sub-agent.
    assert with_agents.requests / without.requests == pytest.approx(1 + 9 * 0.5 * 4 / 10, rel=0.15)


def test_different_seeds_give_different_traces() -> None:
    chat, again, other = (generate(builtin("chat", seed=seed)) for seed in (0, 0, 1))
    assert np.array_equal(chat.refs, again.refs)
    assert not np.array_equal(chat.refs[:1000], other.refs[:1000])
    assert other.block_refs == pytest.approx(chat.block_refs, rel=0.15)


def test_exp_needs_no_libm() -> None:
    for x in (-3.0, -0.5, 0.0, 1.0, 3.0):
        assert _exp(x) == pytest.approx(math.exp(x), rel=0.002)


def test_random_numbers_are_those_that_python_guarantees() -> None:
    random = Random(0).random
    assert [random() for _ in range(3)] == [0.8444218515250481, 0.7579544029403025, 0.420571580830845]


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"sessions": 0}, "sessions: 0 is invalid; allowed: at least 1 and below 1e9"),
        ({"turns": 0.5}, "turns: 0.5 is invalid; allowed: at least 1 and below 1e9"),
        ({"turns": math.inf}, "turns: inf is invalid; allowed: at least 1 and below 1e9"),
        ({"turns_shape": 1}, "turns_shape: 1 is invalid; allowed: above 1"),
        ({"seed": -1}, "seed: -1 is invalid; allowed: at least 0 and below 1e9"),
        ({"sessions_per_minute": 0}, "sessions_per_minute: 0 is invalid; allowed: above 0"),
        (
            {"sessions_per_minute": math.nan},
            "sessions_per_minute: nan is invalid; allowed: at least 0 and below 1e9",
        ),
        ({"fork_share": 0.6}, "fork_share: 0.6 is invalid; allowed: 0 to 0.5"),
        (
            {"think_time_s": LogNormal(0, 1)},
            "think_time_s: (0, 1) is invalid; allowed: median above 0, sigma from 0 to 4",
        ),
        (
            {"documents_per_session": 1},
            "documents_per_session: 1 is invalid; allowed: at most `documents`",
        ),
    ],
)
def test_invalid_parameters_are_refused(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        builtin("chat", **parameters)
    assert str(error.value) == message


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"workload: 'cat' is invalid; allowed: agent, chat, rag"):
        builtin("cat")
    with pytest.raises(ConfigError, match=r"workload parameter: 'turn' is invalid; allowed: sessions, "):
        builtin("chat", turn=3)


# Numbers of the recordings, so that the test needs no recordings: prefix-hit ratio of the optimum at 1, 2, 5
# and 10 % of the unique blocks, and of the infinite cache. See docs/workloads.md.
RECORDED = {"chat": (0.200, 0.265, 0.346, 0.361, 0.361), "agent": (None, None, 0.920, 0.954, 0.959)}


@pytest.mark.parametrize("name", RECORDED)
def test_the_optimum_resembles_the_optimum_of_the_recording(name: str) -> None:
    trace = generate(builtin(name))
    results = [optimum(trace, trace.unique_blocks * percent // 100) for percent in (1, 2, 5, 10)]
    for result, recorded in zip([*results, infinite(trace)], RECORDED[name], strict=True):
        if recorded is not None:
            assert result.prefix_hit_blocks / trace.block_refs == pytest.approx(recorded, abs=0.05)


@pytest.mark.parametrize(("name", "most"), [("agent", 150_000), ("chat", 60_000), ("rag", 80_000)])
def test_defaults_are_small_enough_to_replay_with_real_bytes(name: str, most: int) -> None:
    assert most * 0.6 < generate(BUILTIN[name]).block_refs < most


def test_statistics_of_a_trace_made_by_hand() -> None:
    requests = [[0, 1, 2], [0, 3], [0, 1, 2, 4, 5], [0, 1, 2, 4, 5]]
    trace = Trace(
        name="hand",
        block_tokens=512,
        block_ids=np.arange(6),
        refs=np.array([0, 1, 2, 0, 3, 0, 1, 2, 4, 5, 0, 1, 2, 4, 5], np.int32),
        offsets=np.cumsum([0, *map(len, requests)], dtype=np.int64),
        timestamps_ms=np.array([0, 1000, 3000, 7000]),
        output_tokens=np.array([1, 2, 3, 4]),
    )
    statistics = describe(trace)
    assert (statistics.requests, statistics.block_refs, statistics.unique_blocks) == (4, 15, 6)
    assert (statistics.duration_s, statistics.sessions, statistics.mean_turns) == (7.0, 2, 2.0)
    assert statistics.turns_per_session == Percentiles(1, 1, 1, 3, 3, 3)
    assert statistics.turn_gap_s == Percentiles(3, 3, 3, 4, 4, 4)
    assert statistics.new_blocks_first_turn == Percentiles(1, 1, 1, 3, 3, 3)
    assert statistics.new_blocks_next_turn == Percentiles(0, 0, 0, 2, 2, 2)
    assert statistics.concurrent_sessions == 1.0
    # Block 0 after 1, 2 and 4 s; 1 and 2 after 3 and 4 s; 4 and 5 after 4 s.
    assert statistics.reuse_time_s == Percentiles(1, 3, 4, 4, 4, 4)
    # Tail first: 2 1 0, 3 0, 5 4 2 1 0, 5 4 2 1 0.
    # Stack distances: 0: 3; 2: 1 0 3 5 4; 1: 0 3 5 4 2; 0: 5 4 2 1; then four others each.
    assert statistics.reuse_distance_blocks == Percentiles(1, 4, 4, 4, 5, 5)
    # Nine references are repeated; the second request repeats a block of another session.
    assert (statistics.ceiling, statistics.repeated_in_session, statistics.shared_by_sessions) == (
        9 / 15,
        8 / 15,
        1 / 15,
    )
    assert statistics.blocks_of_several_sessions == 1 / 6


def test_named_sessions_replace_inferred_sessions() -> None:
    """The second request shares no block, and the third extends the first request of another session."""
    requests = [[0, 1], [2], [0, 1, 3], [0, 1, 3, 4], [5]]
    trace = dataclasses.replace(trace_of(*requests), sessions=np.array([0, 0, 1, 1, -1], np.int32))
    result = turns(trace)
    assert result.previous_turn.tolist() == [-1, 0, -1, 2, -1]
    assert result.session_of.tolist() == [0, 0, 1, 1, 2]
    assert turns(trace_of(*requests)).session_of.tolist() == [0, 1, 0, 0, 2]
    statistics = describe(trace)
    assert (statistics.sessions, statistics.named_share, statistics.unambiguous_share) == (3, 0.8, 1.0)
    everywhere = dataclasses.replace(trace, sessions=np.zeros(5, np.int32))
    assert describe(everywhere).unambiguous_share is None


def test_a_request_without_a_name_joins_the_session_that_it_continues() -> None:
    trace = dataclasses.replace(trace_of([0], [0, 1], [9], [7]), sessions=np.array([4, -1, 4, -1], np.int32))
    assert turns(trace).session_of.tolist() == [0, 0, 0, 1]


UNAMBIGUOUS = {
    "new blocks": ([[0], [1]], [True, True]),
    "one turn after the other": ([[0], [0, 1], [0, 1, 2]], [True, True, True]),
    "a fork": ([[0], [0, 1], [0, 2]], [True, False, False]),
    "two equal prompts": ([[0], [0], [0, 1]], [True, False, False]),
    "a common beginning": ([[0, 1], [0, 2]], [True, False]),
    "a shared prompt": ([[0, n] for n in range(1, 10)], [True] * 9),
    "shorter than a block": ([[], [0]], [False, True]),
}


@pytest.mark.parametrize(("requests", "certain"), UNAMBIGUOUS.values(), ids=UNAMBIGUOUS)
def test_inferred_sessions_can_be_ambiguous(requests: list[list[int]], certain: list[bool]) -> None:
    assert turns(trace_of(*requests)).is_unambiguous.tolist() == certain
    assert describe(trace_of(*requests)).unambiguous_share == pytest.approx(sum(certain) / len(certain))


def test_statistics_of_an_empty_trace() -> None:
    empty = np.zeros(0, np.int64)
    nothing = Trace("nothing", 512, empty, empty.astype(np.int32), np.zeros(1, np.int64), empty, empty)
    assert describe(nothing).reuse_time_s == Percentiles(0, 0, 0, 0, 0, 0)
    assert optimum(nothing, 5) == infinite(nothing)
