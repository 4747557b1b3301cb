"""Statistics of a trace: lengths, sessions, and reuse of blocks. Does not count hits; these need a replay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvoffload.structures.jit import I64Array, ReadI32Array, ReadI64Array, inline, long_kernel
from kvoffload.traces.trace import Trace

_Int64s = npt.NDArray[np.int64]

_NONE = -1
_SHARED_PROMPT_FAN_OUT = 8


class Percentiles(NamedTuple):
    """Percentiles of a distribution. All are 0 if there are no values."""

    p10: float
    p25: float
    p50: float
    p75: float
    p90: float
    p99: float


@dataclass(frozen=True)
class TraceStatistics:
    """Statistics of a trace, as `describe` computes them.

    If the recording does not name its *sessions* (`Trace.sessions`), they are inferred. A request that begins
    with all blocks of an earlier request is the next turn of the earlier request's session, unless the
    earlier request ends with a *shared prompt*. A block belongs to a shared prompt if more than eight
    different blocks follow it in the trace. A drawback of this rule is that users who ask the same question
    about a document count as one session.

    The inference for a request is *unambiguous* in two cases. In the first case, the request has blocks, and
    shares no blocks with earlier requests except a shared prompt. In the second case, the request is the only
    continuation of exactly one earlier request.

    Attributes:
        duration_s: time from the first arrival to the last.
        blocks_per_request: number of full blocks of a request, including the blocks of a shared prefix.
        output_tokens: number of tokens generated per request.
        sessions: number of sessions; inferred sessions include sub-agents.
        named_share: share of the requests whose session the recording names.
        unambiguous_share: of the requests without a named session, the share whose inference is unambiguous;
            None if all sessions are named.
        turns_per_session, mean_turns: percentiles and mean of the number of requests of a session.
        turn_gap_s: time from a turn to the next turn.
        new_blocks_first_turn, new_blocks_next_turn: number of blocks of a request that no earlier request
            had; the first is for the first requests of sessions, the second for all later requests.
        concurrent_sessions: mean number of sessions in progress. A session is in progress from its first to
            its last request.
        reuse_time_s: time from a use of a block to its next use.
        reuse_distance_blocks: number of distinct blocks used between two uses of a block. A request uses its
            last block first. An LRU cache hits if its capacity is larger than this distance.
        ceiling: share of the references whose block was used before. This is the hit ratio of an unlimited
            cache.
        repeated_in_session: share of the references whose block was first used by an earlier request of the
            same session.
        shared_by_sessions: share of the references whose block was first used by another session.
        blocks_of_several_sessions: share of the blocks that more than one session uses.
        share_outside_blocks: share of the prompt tokens that are in no whole block; None if it is unknown.
    """

    requests: int
    block_refs: int
    unique_blocks: int
    block_tokens: int
    skipped_lines: int
    duration_s: float
    blocks_per_request: Percentiles
    output_tokens: Percentiles
    sessions: int
    named_share: float
    unambiguous_share: float | None
    turns_per_session: Percentiles
    mean_turns: float
    turn_gap_s: Percentiles
    new_blocks_first_turn: Percentiles
    new_blocks_next_turn: Percentiles
    concurrent_sessions: float
    reuse_time_s: Percentiles
    reuse_distance_blocks: Percentiles
    ceiling: float
    repeated_in_session: float
    shared_by_sessions: float
    blocks_of_several_sessions: float
    share_outside_blocks: float | None


@dataclass(frozen=True)
class Turns:
    """The sessions of a trace, which are named or inferred (see `TraceStatistics`).

    Attributes:
        first_seen: for each code (see `Trace`), the index of its first use in `Trace.refs`.
        new_blocks: for each request, the number of its blocks that no earlier request had.
        previous_turn: for each request, the index of the request that it continues, or -1. In a named
            session, this is the inferred request if it belongs to the session, or else the session's latest
            earlier request.
        session_of: for each request, the number of its session.
        is_named: for each request, True if the recording names its session.
        is_unambiguous: for each request, True if the inference of its previous turn is unambiguous.
        is_shared_prompt: for each code, True if more than eight different blocks follow the block.
    """

    first_seen: _Int64s
    new_blocks: _Int64s
    previous_turn: _Int64s
    session_of: _Int64s
    is_named: npt.NDArray[np.bool_]
    is_unambiguous: npt.NDArray[np.bool_]
    is_shared_prompt: npt.NDArray[np.bool_]


def turns(trace: Trace) -> Turns:
    """Find the sessions of a trace. Cost: about 0.05 s per million block references."""
    lengths, request_of = np.diff(trace.offsets), trace.request_of
    first_seen = _first_positions(trace)
    new_blocks = np.bincount(request_of[first_seen], minlength=trace.requests)
    fan_out = _fan_out(trace, first_seen)
    previous_turn, is_unambiguous = _previous_turns(
        trace, request_of, first_seen, lengths - new_blocks, fan_out
    )
    named = np.full(trace.requests, _NONE, np.int64) if trace.sessions is None else trace.sessions
    previous_turn = _in_named_sessions(previous_turn, named)
    session_of = _sessions(previous_turn, named)
    is_shared_prompt = fan_out > _SHARED_PROMPT_FAN_OUT
    return Turns(
        first_seen, new_blocks, previous_turn, session_of, named != _NONE, is_unambiguous, is_shared_prompt
    )


def describe(trace: Trace) -> TraceStatistics:
    """Compute the statistics of a trace. Cost: about 0.15 s per million block references."""
    lengths, inferred = np.diff(trace.offsets), turns(trace)
    request_of, new_blocks, session_of = trace.request_of, inferred.new_blocks, inferred.session_of
    previous_turn = inferred.previous_turn
    is_next = previous_turn != _NONE
    is_inferred = ~inferred.is_named
    num_turns = np.bincount(session_of)
    times_ms = trace.timestamps_ms
    duration_ms = int(times_ms.max(initial=0) - times_ms.min(initial=2**62)) if trace.requests else 0
    span_ms = _spans(session_of, times_ms)
    used_before, reuse_distance = _reuses(trace)
    origin = session_of[request_of[inferred.first_seen]]
    is_repeated = used_before != _NONE
    by_others = session_of[request_of] != origin[trace.refs]
    is_common = np.zeros(trace.unique_blocks, np.bool_)
    is_common[trace.refs[by_others]] = True
    num_refs = max(trace.block_refs, 1)
    return TraceStatistics(
        requests=trace.requests,
        block_refs=trace.block_refs,
        unique_blocks=trace.unique_blocks,
        block_tokens=trace.block_tokens,
        skipped_lines=trace.skipped_lines,
        duration_s=duration_ms / 1000,
        blocks_per_request=_percentiles(lengths),
        output_tokens=_percentiles(trace.output_tokens),
        sessions=len(num_turns),
        named_share=int(inferred.is_named.sum()) / max(trace.requests, 1),
        unambiguous_share=float(inferred.is_unambiguous[is_inferred].mean()) if is_inferred.any() else None,
        turns_per_session=_percentiles(num_turns),
        mean_turns=trace.requests / max(len(num_turns), 1),
        turn_gap_s=_percentiles((times_ms - times_ms[previous_turn])[is_next], unit=1000),
        new_blocks_first_turn=_percentiles(new_blocks[~is_next]),
        new_blocks_next_turn=_percentiles(new_blocks[is_next]),
        concurrent_sessions=int(span_ms.sum()) / duration_ms if duration_ms else float(len(num_turns)),
        reuse_time_s=_percentiles(
            (times_ms[request_of] - times_ms[used_before])[used_before != _NONE], unit=1000
        ),
        reuse_distance_blocks=_percentiles(reuse_distance[reuse_distance != _NONE]),
        ceiling=int(is_repeated.sum()) / num_refs,
        repeated_in_session=int((is_repeated & ~by_others).sum()) / num_refs,
        shared_by_sessions=int(by_others.sum()) / num_refs,
        blocks_of_several_sessions=int(is_common.sum()) / max(trace.unique_blocks, 1),
        share_outside_blocks=trace.share_outside_blocks,
    )


def _percentiles(values: _Int64s, unit: int = 1) -> Percentiles:
    """Compute the percentiles of `values`, without interpolation, in multiples of `unit`."""
    if len(values) == 0:
        return Percentiles(0, 0, 0, 0, 0, 0)
    percentiles = np.percentile(values, (10, 25, 50, 75, 90, 99), method="inverted_cdf").tolist()
    return Percentiles(*(value / unit if unit > 1 else value for value in percentiles))


def _first_positions(trace: Trace) -> _Int64s:
    """Return, for each code, the index in `Trace.refs` of its first use."""
    first = np.empty(trace.unique_blocks, np.int64)
    first[trace.refs[::-1]] = np.arange(trace.block_refs - 1, -1, -1)
    return first


def _fan_out(trace: Trace, first_seen: _Int64s) -> _Int64s:
    """Return, for each code, how many different blocks directly follow this block in the requests."""
    is_head = np.zeros(trace.block_refs + 1, np.bool_)
    is_head[trace.offsets[:-1]] = True
    parents = trace.refs[first_seen[~is_head[first_seen]] - 1]
    return np.bincount(parents, minlength=trace.unique_blocks)


def _previous_turns(
    trace: Trace, request_of: _Int64s, first_seen: _Int64s, shared: _Int64s, fan_out: _Int64s
) -> tuple[_Int64s, npt.NDArray[np.bool_]]:
    """Return two arrays: `Turns.previous_turn` as if no session were named, and `Turns.is_unambiguous`.

    `shared` is, for each request, the number of leading blocks that earlier requests used.
    """
    starts = trace.offsets[:-1]
    previous = np.full(trace.requests, _NONE, np.int64)
    candidates = np.flatnonzero(shared > 0)
    deepest_known = trace.refs[starts[candidates] + shared[candidates] - 1]
    origin = request_of[first_seen[deepest_known]]
    # A request continues another request if its deepest known block is the last block of the other request,
    # and first occurred there.
    continues = first_seen[deepest_known] == trace.offsets[origin + 1] - 1
    is_shared_prompt = fan_out[deepest_known] > _SHARED_PROMPT_FAN_OUT
    continues &= ~is_shared_prompt
    previous[candidates[continues]] = origin[continues]
    lengths = np.diff(trace.offsets)
    ends = np.bincount(trace.refs[trace.offsets[1:][lengths > 0] - 1], minlength=trace.unique_blocks)
    is_unambiguous = (shared == 0) & (lengths > 0)
    is_only_one = continues & (fan_out[deepest_known] == 1) & (ends[deepest_known] == 1)
    is_unambiguous[candidates[is_only_one | is_shared_prompt]] = True
    return previous, is_unambiguous


def _in_named_sessions(inferred: _Int64s, named: npt.NDArray[np.integer]) -> _Int64s:
    """Return `Turns.previous_turn`, which prefers previous turns in the same named session.

    Args:
        inferred: for each request, the inferred previous turn, or `_NONE`.
        named: for each request, the number of its named session, or `_NONE`.
    """
    by_session = np.argsort(named, kind="stable")
    follows = np.flatnonzero(named[by_session[1:]] == named[by_session[:-1]])
    latest = np.full(len(named), _NONE, np.int64)
    latest[by_session[follows + 1]] = by_session[follows]
    is_within = (inferred != _NONE) & (named[inferred] == named)
    previous: _Int64s = np.where((named == _NONE) | is_within, inferred, latest)
    return previous


def _sessions(previous_turn: _Int64s, named: npt.NDArray[np.integer]) -> _Int64s:
    """Return the number of each request's session. Sessions are numbered in order of their first requests."""
    session_of: list[int] = []
    number_of: dict[int, int] = {}
    sessions = 0
    for previous, name in zip(previous_turn.tolist(), named.tolist(), strict=True):
        known = number_of.get(name) if name != _NONE else None
        if known is None and previous != _NONE:
            known = session_of[previous]
        session_of.append(sessions if known is None else known)
        sessions += known is None
        if name != _NONE:
            number_of[name] = session_of[-1]
    return np.array(session_of, np.int64)


def _spans(session_of: _Int64s, times_ms: _Int64s) -> _Int64s:
    """Return, for each session, the time in ms from its first to its last request."""
    sessions = int(session_of.max(initial=_NONE)) + 1
    first, last = np.full(sessions, 2**62), np.zeros(sessions, np.int64)
    np.minimum.at(first, session_of, times_ms)
    np.maximum.at(last, session_of, times_ms)
    span_ms: _Int64s = last - first
    return span_ms


def _reuses(trace: Trace) -> tuple[_Int64s, _Int64s]:
    """Return two arrays about the previous use of each reference's block; `_NONE` if there was none.

    The first array has the index of the request that used the block before. The second has the reuse
    distance.
    """
    used_before = np.full(trace.block_refs, _NONE, np.int64)
    distance = np.full(trace.block_refs, _NONE, np.int64)
    last_request = np.full(trace.unique_blocks, _NONE, np.int64)
    last_access = np.zeros(trace.unique_blocks, np.int64)
    counts = np.zeros(trace.block_refs + 1, np.int64)
    _measure_reuses(trace.refs, trace.offsets, last_request, last_access, counts, used_before, distance)
    return used_before, distance


@inline
def _add(counts: Any, access: int, amount: int) -> None:
    while access < len(counts):
        counts[access] += amount
        access += access & -access


# Accesses are numbered from 1. Each block has a mark at the number of its last access. The number of marks
# after a block's own mark is the number of distinct blocks used since. `counts` is a Fenwick tree that counts
# marks (Fenwick, Software 24(3), 1994).
@long_kernel
def _measure_reuses(
    refs: ReadI32Array,
    offsets: ReadI64Array,
    last_request: I64Array,
    last_access: I64Array,
    counts: I64Array,
    used_before: I64Array,
    distance: I64Array,
) -> None:
    access = marked = 0
    for request in range(len(offsets) - 1):
        for position in range(offsets[request + 1] - 1, offsets[request] - 1, -1):
            code = refs[position]
            access += 1
            if last_request[code] == _NONE:
                marked += 1
            else:
                up_to_own, node = 0, last_access[code]
                while node > 0:
                    up_to_own += counts[node]
                    node -= node & -node
                used_before[position] = last_request[code]
                distance[position] = marked - up_to_own
                _add(counts, last_access[code], -1)
            _add(counts, access, 1)
            last_request[code], last_access[code] = request, access
