"""Similarity of traces of any size. Computes features of each trace, and the distance of the features."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from kvoffload.traces.block_size import DEFAULT_BLOCK_TOKENS
from kvoffload.traces.sessions import generate
from kvoffload.traces.statistics import TraceStatistics, describe
from kvoffload.traces.trace import Trace, codes_by_appearance, offsets_of
from kvoffload.traces.workloads import BUILTIN, builtin

_LEAST_SHARE = 0.005
"""Least value of a feature that is a share. Smaller shares are raised to it, because the distance is computed
from quotients of features, and a feature must not be 0.
"""


def features(statistics: TraceStatistics) -> dict[str, float]:
    """Compute the features of a trace: lengths in tokens, times in seconds, and shares.

    All features are above 0 and independent of the number of requests.
    """
    tokens, unique = statistics.block_tokens, max(statistics.unique_blocks, 1)
    sizes = {
        "tokens of a prompt, p50": statistics.blocks_per_request.p50 * tokens,
        "tokens of a prompt, p90": statistics.blocks_per_request.p90 * tokens,
        "new tokens of a first turn, p50": statistics.new_blocks_first_turn.p50 * tokens,
        "new tokens of a next turn, p90": statistics.new_blocks_next_turn.p90 * tokens,
        "tokens of an answer, p50": statistics.output_tokens.p50,
        "turns of a session, mean": statistics.mean_turns,
        "turns of a session, p90": statistics.turns_per_session.p90,
        "seconds between turns, p50": statistics.turn_gap_s.p50,
        "seconds until reuse, p50": statistics.reuse_time_s.p50,
        "seconds until reuse, p90": statistics.reuse_time_s.p90,
    }
    shares = {
        "ceiling": statistics.ceiling,
        "repeated in a session": statistics.repeated_in_session,
        "shared by sessions": statistics.shared_by_sessions,
        "blocks used until reuse, p50, of all": statistics.reuse_distance_blocks.p50 / unique,
        "blocks used until reuse, p90, of all": statistics.reuse_distance_blocks.p90 / unique,
    }
    return {
        **{name: max(value, 1.0) for name, value in sizes.items()},
        **{name: max(value, _LEAST_SHARE) for name, value in shares.items()},
    }


def distance(first: Mapping[str, float], second: Mapping[str, float]) -> float:
    """Compute the distance of two traces from their features; 1 if the features are equal.

    For each feature, the larger of the two values is divided by the smaller. The distance is the geometric
    mean of these quotients.
    """
    logs = [abs(math.log(value / second[name])) for name, value in first.items()]
    return math.exp(sum(logs) / len(logs))


def comparable(trace: Trace) -> Trace:
    """Prepare a trace for comparison with workloads: blocks of about 512 tokens, no named sessions.

    To merge `n` blocks into one, only every n-th id of a request is kept. This id also identifies the larger
    block, because it identifies the whole prefix up to the block's end.
    """
    trace = trace if trace.sessions is None else replace(trace, sessions=None)
    several = DEFAULT_BLOCK_TOKENS // trace.block_tokens
    if several < 2:
        return trace
    codes, refs, _ = codes_by_appearance(trace.refs[trace.depths % several == several - 1])
    return replace(
        trace,
        block_tokens=several * trace.block_tokens,
        block_ids=trace.block_ids[codes],
        refs=refs,
        offsets=offsets_of(np.diff(trace.offsets) // several),
    )


def resemblance(trace: Trace) -> dict[str, float]:
    """Return the distance of a trace to each built-in workload, nearest first. The result is deterministic.

    Sessions are inferred, in the trace and in the workloads. Cost: a second to generate the workloads, and a
    call of `describe` for each.
    """
    trace = comparable(trace)
    own = features(describe(trace))
    distances = {
        name: distance(own, features(describe(generate(builtin(name, block_tokens=trace.block_tokens)))))
        for name in BUILTIN
    }
    return dict(sorted(distances.items(), key=lambda item: item[1]))
