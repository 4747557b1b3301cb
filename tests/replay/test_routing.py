"""Routing of requests to replicas, and sessions at another load."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload.core.hints import Hints
from kvoffload.errors import ConfigError
from kvoffload.replay.routing import ROUTINGS, route
from kvoffload.sweep.task import Share, TraceSource, identified, load
from kvoffload.traces.formats.mooncake import write_trace
from kvoffload.traces.load import at_load
from kvoffload.traces.sessions import generate
from kvoffload.traces.statistics import turns
from kvoffload.traces.trace import Trace, TraceHints
from kvoffload.traces.workloads import builtin

CHAT = generate(builtin("chat", sessions=60))


def a_trace(*chains: list[int], times: list[int] | None = None) -> Trace:
    """Make a trace with one request for each chain of block ids."""
    ids, codes = list(dict.fromkeys(block for chain in chains for block in chain)), {}
    codes = {block: code for code, block in enumerate(ids)}
    return Trace(
        "by hand", 512, np.array(ids, np.int64),
        np.array([codes[block] for chain in chains for block in chain], np.int32),
        np.cumsum([0, *map(len, chains)]), np.array(times or range(len(chains)), np.int64),
        np.ones(len(chains), np.int64),
    )  # fmt: skip


@given(order=st.permutations(range(CHAT.requests)), count=st.integers(0, CHAT.requests))
def test_selected_requests_of_a_trace_are_a_valid_trace(order: list[int], count: int) -> None:
    hints = TraceHints.of(Hints(str(number % 3)) for number in range(CHAT.requests))
    whole = dataclasses.replace(CHAT, hints=hints)
    chosen = np.array(order[:count], np.int64)
    selected = whole.of_requests(chosen)
    assert selected.requests == count
    known: set[int] = set()
    for number, request in enumerate(chosen.tolist()):
        own = selected.refs[selected.offsets[number] : selected.offsets[number + 1]]
        original = whole.refs[whole.offsets[request] : whole.offsets[request + 1]]
        assert selected.block_ids[own].tolist() == whole.block_ids[original].tolist()
        assert selected.hints_of(number) == whole.hints_of(request)
        assert selected.timestamps_ms[number] == whole.timestamps_ms[request]
        for code in own.tolist():
            assert code <= len(known), "codes come in order of first appearance"
            known.add(code)
    assert len(known) == selected.unique_blocks


@pytest.mark.parametrize("routing", ROUTINGS)
def test_every_request_has_one_replica(routing: str) -> None:
    chosen = route(CHAT, 4, routing)
    assert chosen.shape == (CHAT.requests,)
    assert set(chosen.tolist()) == {0, 1, 2, 3}
    assert (route(CHAT, 4, routing) == chosen).all(), "equal on every call"
    assert (route(CHAT, 1, routing) == 0).all()


@pytest.mark.parametrize("routing", ["session", "prefix"])
def test_sessions_stay_whole(routing: str) -> None:
    chosen, sessions = route(CHAT, 3, routing), turns(CHAT).session_of
    for session in range(int(sessions.max()) + 1):
        assert len(set(chosen[sessions == session].tolist())) == 1


def test_random_routing_splits_sessions() -> None:
    chosen, sessions = route(CHAT, 3, "random"), turns(CHAT).session_of
    torn = [len(set(chosen[sessions == number].tolist())) > 1 for number in range(int(sessions.max()) + 1)]
    assert any(torn)


def test_prefix_routing_chooses_the_replica_with_the_prefix() -> None:
    # Both documents are requested again, in another order: round-robin would choose the wrong replicas.
    trace = a_trace([1, 2, 3, 10], [4, 5, 6, 11], [4, 5, 6, 12], [1, 2, 3, 13])
    assert route(trace, 2, "prefix").tolist() == [0, 1, 1, 0]
    assert route(trace, 2, "session").tolist() == [0, 1, 0, 1]


def test_a_common_prefix_does_not_overload_one_replica() -> None:
    trace = a_trace(*([1, 2, 3, number] for number in range(10, 110)))
    served = np.bincount(route(trace, 4, "prefix"), minlength=4)
    assert served.max() <= 1.6 * served.mean()


def test_invalid_routings_are_refused() -> None:
    with pytest.raises(
        ConfigError, match="routing: 'best' is invalid; allowed: prefix, session, round-robin, random"
    ):
        route(CHAT, 2, "best")
    with pytest.raises(ConfigError, match="instances: 0"):
        route(CHAT, 0, "session")


def test_load_moves_sessions_together_without_changing_them() -> None:
    packed = at_load(CHAT, 2)
    gaps = {}
    for trace in (CHAT, packed):
        ids = {tuple(trace.block_ids[trace.refs[a:b]].tolist()): time for a, b, time in zip(
            trace.offsets[:-1], trace.offsets[1:], trace.timestamps_ms.tolist(), strict=True)}  # fmt: skip
        gaps[trace is packed] = ids
    assert set(gaps[True]) == set(gaps[False]), "the same requests"
    assert (np.diff(packed.timestamps_ms) >= 0).all()
    sessions, times = turns(CHAT).session_of, CHAT.timestamps_ms
    first = times.min()
    for session in range(int(sessions.max()) + 1):
        own = np.flatnonzero(sessions == session)
        begin = times[own].min()
        for request in own.tolist():
            ids = tuple(CHAT.block_ids[CHAT.refs[CHAT.offsets[request] : CHAT.offsets[request + 1]]].tolist())
            expected = first + (begin - first) / 2 + (times[request] - begin)
            # `gaps` has only the last time of a repeated prompt.
            if gaps[False][ids] == times[request]:
                assert abs(gaps[True][ids] - expected) <= 1
    assert at_load(CHAT, 1) is CHAT
    assert np.ptp(at_load(CHAT, 0.5).timestamps_ms) > np.ptp(CHAT.timestamps_ms)


@pytest.mark.parametrize("load", [0, -1, float("nan"), float("inf")])
def test_invalid_loads_are_refused(load: float) -> None:
    with pytest.raises(ConfigError, match="load"):
        at_load(CHAT, load)


def test_shares_of_a_trace_add_up(tmp_path: pytest.TempPathFactory) -> None:
    path = str(tmp_path / "chat.jsonl")
    write_trace(CHAT, path)
    shares = [Share(2.0, "session", 3, number) for number in range(3)]
    sources = [identified(TraceSource(path, None, False, share)) for share in shares]
    assert len({source.digest for source in sources}) == 3
    loaded = [load(source) for source in sources]
    assert sum(share.requests for share in loaded) == CHAT.requests
    assert sum(share.block_refs for share in loaded) == CHAT.block_refs
