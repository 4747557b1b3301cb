"""Fits a built-in workload to a recording. Searches for the parameters with the least distance from it.

`likeness` defines the distance of two traces. docs/workloads.md lists the limits of a fit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from kvoffload.errors import ConfigError, TraceError
from kvoffload.traces.likeness import comparable, distance, features
from kvoffload.traces.sessions import generate
from kvoffload.traces.statistics import Percentiles, TraceStatistics, describe, turns
from kvoffload.traces.trace import Trace
from kvoffload.traces.workloads import LogNormal, Workload, builtin

_TRIAL_REFS = 200_000
"""Approximate limit of the block references that a trial generates. If the recording is larger, a trial has
fewer sessions, but the same number of sessions per minute, so that equally many sessions overlap."""
_FEWEST_SESSIONS = 60
_DIRECT_ROUNDS, _SEARCH_STEPS = 6, (1.4, 1.12)
_P90_OF_NORMAL = 1.2816
_SHAPES = (1.5, 2.0, 3.0, 4.0, 7.0, 20.0, 1000.0)

_PROMPT = "tokens of a prompt, p90"
_TEXTS = ("first_tokens", "turn_tokens", "answer_tokens", "document_tokens", "summary_tokens")

_SCALED = (
    "first_tokens", "turn_tokens", "think_time_s", "answer_tokens", "shared_prompt_tokens", "turns",
    "shared_prompts", "documents", "document_tokens", "fork_share", "sub_agent_share", "summary_tokens",
    "context_limit_tokens", "sessions_per_minute",
)  # fmt: skip
"""Parameters that the search multiplies by factors. Of a `LogNormal`, it multiplies the median, and for the
parameters in `_SIGMAS` also the sigma."""
_SIGMAS = ("first_tokens", "turn_tokens", "think_time_s", "document_tokens")


@dataclass(frozen=True)
class Fit:
    """Result of a fit.

    Attributes:
        workload: the fitted workload, at the size and load of the recording, with blocks of about 512 tokens.
        distance: mean factor by which the features of recording and workload differ (`likeness.distance`).
            It is 1 if the features are equal.
        recorded: features of the recording.
        fitted: features of the fitted workload.
        trials: number of workloads that the search generated.
    """

    workload: Workload
    distance: float
    recorded: dict[str, float]
    fitted: dict[str, float]
    trials: int


def fit(trace: Trace, like: str) -> Fit:
    """Fit the built-in workload that `like` names to a recording. The result is deterministic.

    The search has two steps. A trial generates a workload and computes its distance from the recording.

    1. Set parameters from statistics of the recording, and correct them by trials.
    2. Try each parameter slightly larger and smaller, and keep changes that reduce the distance.

    All trials use the seed 0.

    Cost: about 100 trials of at most 200,000 references: half a minute to a minute.

    Raises:
        ConfigError: there is no such workload.
        TraceError: the recording is too small.
    """
    preset, trace = builtin(like), comparable(trace)
    search = _Search(trace, describe(trace))
    for workload in search.starts(preset):
        for _ in range(_DIRECT_ROUNDS):
            workload = search.corrected(workload)
    search.improve()
    fitted = _sized_features(describe(generate(search.best)))
    return Fit(search.best, distance(search.recorded, fitted), search.recorded, fitted, search.trials)


@dataclass(frozen=True)
class _Means:
    """Means of a trace that determine parameters of a workload."""

    requests_per_session: float
    requests: float
    distance_tokens: float
    first_tokens: float
    next_tokens: float
    shared_tokens: float

    @classmethod
    def of(cls, trace: Trace, statistics: TraceStatistics, share: float = 1.0) -> _Means:
        inferred, tokens = turns(trace), trace.block_tokens
        is_first = inferred.previous_turn < 0
        new = inferred.new_blocks * tokens
        return cls(
            statistics.mean_turns,
            statistics.requests / share,
            statistics.reuse_distance_blocks.p50 * tokens,
            float(new[is_first].mean()) if is_first.any() else 0.0,
            float(new[~is_first].mean()) if not is_first.all() else 0.0,
            statistics.shared_by_sessions * statistics.block_refs * tokens / max(statistics.requests, 1),
        )


class _Search:
    """State of a search.

    Attributes:
        best: the workload with the smallest distance so far.
        least: distance of `best`.
        recorded: features of the recording.
        trials: number of trials so far.
    """

    def __init__(self, trace: Trace, statistics: TraceStatistics) -> None:
        if statistics.requests < 20 or statistics.duration_s <= 0 or not statistics.block_refs:
            raise TraceError(f"{trace.name}: too small to fit: 20 requests at different times are needed")
        self.recorded, self.trials, self.least = _sized_features(statistics), 0, math.inf
        self.best: Workload
        self._statistics, self._target = statistics, _Means.of(trace, statistics)
        self._share = min(1.0, _TRIAL_REFS / trace.block_refs)
        self._longest_tokens = (trace.longest_request + 1) * trace.block_tokens
        self._block_tokens = trace.block_tokens
        self._answers = _log_normal(statistics.output_tokens)

    def starts(self, preset: Workload) -> Iterator[Workload]:
        """Yield the workloads from which the search starts.

        - The preset.
        - The preset with texts as long as in the recording.
        - Two workloads with statistics of the recording. One has the longest request as its context limit,
          the second about the 90th percentile of the requests' lengths.
        """
        recorded, tokens = self._statistics, self._block_tokens
        named = replace(
            preset,
            name=f"like-{preset.name}",
            block_tokens=tokens,
            sessions=recorded.sessions,
            sessions_per_minute=60 * recorded.sessions / recorded.duration_s,
        )
        yield named
        usual = features(describe(generate(replace(preset, block_tokens=tokens))))
        yield _lengthened(named, self.recorded[_PROMPT] / usual[_PROMPT])
        for limit in (self._longest_tokens, int(1.05 * recorded.blocks_per_request.p90 * tokens)):
            limit = max(limit, 4 * tokens)
            summary = _times(preset.summary_tokens, limit / preset.context_limit_tokens)
            yield self._with_statistics(replace(named, context_limit_tokens=limit, summary_tokens=summary))

    def _with_statistics(self, workload: Workload) -> Workload:
        recorded = self._statistics
        return replace(
            workload,
            turns=max(1.0, recorded.mean_turns),
            think_time_s=_log_normal(recorded.turn_gap_s, least=0.5),
            answer_tokens=self._answers,
            first_tokens=_log_normal(recorded.new_blocks_first_turn, unit=self._block_tokens),
        )

    def corrected(self, workload: Workload) -> Workload:
        """Try a workload; return a copy with parameters whose means should be closer to the recording's."""
        got, want = self._try(workload), self._target
        changes: dict[str, Any] = {
            "turn_tokens": _times(workload.turn_tokens, _step(want.next_tokens, got.next_tokens)),
        }
        # Not with forks or sub-agents, because inferred sessions are then shorter than those of the workload.
        if not workload.fork_share and not workload.sub_agent_share:
            longer = _step(want.requests_per_session - 1, got.requests_per_session - 1)
            # Bounded, because some recordings cannot be matched by any number of turns.
            changes["turns"] = min(1 + (workload.turns - 1) * longer, 4 * want.requests_per_session)
        if workload.documents_per_session:
            first = _step(want.first_tokens, got.first_tokens)
            changes["document_tokens"] = _times(workload.document_tokens, first)
            fewer = _step(got.shared_tokens, want.shared_tokens)
            changes["documents"] = max(workload.documents_per_session, round(workload.documents * fewer))
        else:
            changes["first_tokens"] = _times(
                workload.first_tokens, _step(want.first_tokens, got.first_tokens)
            )
            longer_prompt = _step(want.shared_tokens, got.shared_tokens)
            changes["shared_prompt_tokens"] = round(max(1, workload.shared_prompt_tokens) * longer_prompt)
        # The number of requests determines the number of sessions, and the reuse distance determines their
        # rate, so that quiet hours of a recording do not lower the load.
        sessions = workload.sessions * _step(want.requests, got.requests)
        changes["sessions_per_minute"] = workload.sessions_per_minute * _step(
            want.distance_tokens, got.distance_tokens
        )
        return replace(workload, sessions=max(1, round(sessions)), **changes)

    def improve(self) -> None:
        """Try each parameter slightly larger and smaller, and keep improvements. Repeat in smaller steps."""
        for factor in _SEARCH_STEPS:
            for name in (*_SCALED, *(f"{name}.sigma" for name in _SIGMAS), "turns_shape"):
                best = self.best
                for changes in self._changes(best, name, factor):
                    with suppress(ConfigError):  # Impossible workloads are skipped.
                        self._try(replace(best, **changes))
                    if self.best is not best:
                        break

    def _changes(self, best: Workload, name: str, factor: float) -> Iterator[dict[str, Any]]:
        for by in (factor, 1 / factor):
            if name == "turns_shape":
                place = int(np.searchsorted(_SHAPES, best.turns_shape)) + (1 if by > 1 else -1)
                if 0 <= place < len(_SHAPES):
                    yield {"turns_shape": _SHAPES[place]}
                continue
            field, _, sigma = name.partition(".")
            value = getattr(best, field)
            if isinstance(value, LogNormal):
                moved = LogNormal(value.median, min(4.0, value.sigma * by)) if sigma else _times(value, by)
                yield {field: moved}
            elif value:
                yield {field: round(value * by) if isinstance(value, int) else value * by}

    def _try(self, workload: Workload) -> _Means:
        """Generate a trace of a workload; return the trace's means. If it is the best so far, keep it."""
        workload = _rounded(workload)
        sessions = max(_FEWEST_SESSIONS, round(workload.sessions * self._share))
        share = sessions / workload.sessions
        self.trials += 1
        trial = generate(replace(workload, sessions=sessions))
        statistics = describe(trial)
        reached = _sized_features(statistics)
        # Features are independent of the number of requests.
        ratio = statistics.requests / share / self._statistics.requests
        total = distance(self.recorded, reached) * math.exp(abs(math.log(ratio)) / len(reached))
        if total < self.least:
            self.least, self.best = total, workload
        return _Means.of(trial, statistics, share)


def _lengthened(workload: Workload, factor: float) -> Workload:
    """Scale the lengths of all texts and the context limit."""
    changes: dict[str, Any] = {name: _times(getattr(workload, name), factor) for name in _TEXTS}
    for name in ("shared_prompt_tokens", "context_limit_tokens"):
        changes[name] = round(getattr(workload, name) * factor)
    if not workload.documents:
        del changes["document_tokens"]
    return replace(workload, **changes)


def _sized_features(statistics: TraceStatistics) -> dict[str, float]:
    """Compute the features of a trace, with reuse distances in tokens instead of shares of all blocks."""
    values, tokens = features(statistics), statistics.block_tokens
    for name, value in statistics.reuse_distance_blocks._asdict().items():
        if values.pop(f"blocks used until reuse, {name}, of all", None) is not None:
            values[f"tokens used until reuse, {name}"] = max(1.0, value * tokens)
    return values


def _rounded(workload: Workload) -> Workload:
    """Round each parameter to four digits, so that the printed parameters give the same workload."""
    changes: dict[str, Any] = {}
    for field in fields(workload):
        value = getattr(workload, field.name)
        if isinstance(value, LogNormal):
            changes[field.name] = LogNormal(*(float(f"{number:.4g}") for number in value))
        elif isinstance(value, float):
            changes[field.name] = float(f"{value:.4g}")
    return replace(workload, **changes)


def _step(wanted: float, got: float) -> float:
    """Return a factor by which to correct a parameter. It is damped, because parameters affect each other."""
    if wanted <= 0 or got <= 0:
        return 1 / 3 if wanted <= 0 < got else 3.0 if got <= 0 < wanted else 1.0
    return min(3.0, max(1 / 3, math.exp(0.8 * math.log(wanted / got))))


def _times(quantity: LogNormal, factor: float) -> LogNormal:
    return LogNormal(min(1e8, max(1.0, quantity.median * factor)), quantity.sigma)


def _log_normal(percentiles: Percentiles, unit: int = 1, least: float = 1.0) -> LogNormal:
    """Fit a `LogNormal` to the median and the 90th percentile. Block sizes distort lower percentiles."""
    median, high = (max(least, value * unit) for value in (percentiles.p50, percentiles.p90))
    return LogNormal(median, round(min(3.0, math.log(high / median) / _P90_OF_NORMAL), 3))
