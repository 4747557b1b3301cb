"""Parameters of a built-in workload that make it like a recording.

Owns the search. What alike means stands in `likeness`; docs/workloads.md says what a likeness cannot tell.
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
"""References of a trial: of a larger recording it has a part of the sessions, at the same load. At a part of
the load fewer sessions would run side by side, and less than one is none."""
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
"""Parameters that the search multiplies. Of two numbers, the median; `_SIGMAS` has the other."""
_SIGMAS = ("first_tokens", "turn_tokens", "think_time_s", "document_tokens")


@dataclass(frozen=True)
class Fit:
    """What was found.

    Attributes:
        workload: at the size and load of the recording, in blocks of 512 tokens or nearly so.
        distance: by which factor the features are apart in the mean: 1 is equal (`likeness.distance`).
        recorded, fitted: features of the recording, and of the workload at its size.
        trials: workloads that were generated.
    """

    workload: Workload
    distance: float
    recorded: dict[str, float]
    fitted: dict[str, float]
    trials: int


def fit(trace: Trace, like: str) -> Fit:
    """Fit the built-in workload `like` to a recording. Deterministic: equal traces give equal fits.

    First parameters are set from what the recording shows of them, and corrected by what comes out; then
    each is tried a little larger and smaller, as long as that helps. The dice are those of seed 0.

    Cost: about 100 trials of 200,000 references at most: half a minute to a minute.
    Raises: `ConfigError` for a name, `TraceError` for a recording with too little in it.
    """
    preset, trace = builtin(like), comparable(trace)
    search = _Search(trace, describe(trace))
    for workload in search.beginnings(preset):
        for _ in range(_DIRECT_ROUNDS):
            workload = search.corrected(workload)
    search.improve()
    fitted = _at_a_size(describe(generate(search.best)))
    return Fit(search.best, distance(search.recorded, fitted), search.recorded, fitted, search.trials)


@dataclass(frozen=True)
class _Means:
    """What the parameters of a workload are about, in the mean: not bent by the size of a block."""

    requests_per_session: float
    requests: float
    distance_tokens: float
    first_tokens: float
    next_tokens: float
    shared_tokens: float

    @classmethod
    def of(cls, trace: Trace, statistics: TraceStatistics, part: float = 1.0) -> _Means:
        found, tokens = turns(trace), trace.block_tokens
        is_first = found.previous_turn < 0
        new = found.new_blocks * tokens
        return cls(
            statistics.mean_turns,
            statistics.requests / part,
            statistics.reuse_distance_blocks.p50 * tokens,
            float(new[is_first].mean()) if is_first.any() else 0.0,
            float(new[~is_first].mean()) if not is_first.all() else 0.0,
            statistics.shared_by_sessions * statistics.block_refs * tokens / max(statistics.requests, 1),
        )


class _Search:
    """The best workload so far.

    Attributes:
        best, least: the workload, and its distance.
        recorded: the features to be reached. trials: so far.
    """

    def __init__(self, trace: Trace, statistics: TraceStatistics) -> None:
        if statistics.requests < 20 or statistics.duration_s <= 0 or not statistics.block_refs:
            raise TraceError(f"{trace.name}: too little to fit: 20 requests, at different times, with blocks")
        self.recorded, self.trials, self.least = _at_a_size(statistics), 0, math.inf
        self.best: Workload
        self._statistics, self._wanted = statistics, _Means.of(trace, statistics)
        self._share = min(1.0, _TRIAL_REFS / trace.block_refs)
        self._longest_tokens = (trace.longest_request + 1) * trace.block_tokens
        self._block_tokens = trace.block_tokens
        self._answers = _log_normal(statistics.output_tokens)

    def beginnings(self, preset: Workload) -> Iterator[Workload]:
        """Where a search may begin: at the preset, at it with longer texts, and with what can be read off.

        Contexts may end where the longest one does, or be compacted where most end.
        """
        found, tokens = self._statistics, self._block_tokens
        named = replace(preset, name=f"like-{preset.name}", block_tokens=tokens)
        named = replace(
            named, sessions=found.sessions, sessions_per_minute=60 * found.sessions / found.duration_s
        )
        yield named
        usual = features(describe(generate(replace(preset, block_tokens=tokens))))
        yield _lengthened(named, self.recorded[_PROMPT] / usual[_PROMPT])
        for limit in (self._longest_tokens, int(1.05 * found.blocks_per_request.p90 * tokens)):
            limit = max(limit, 4 * tokens)
            summary = _times(preset.summary_tokens, limit / preset.context_limit_tokens)
            yield self._read_off(replace(named, context_limit_tokens=limit, summary_tokens=summary))

    def _read_off(self, workload: Workload) -> Workload:
        found = self._statistics
        return replace(
            workload,
            turns=max(1.0, found.mean_turns),
            think_time_s=_log_normal(found.turn_gap_s, least=0.5),
            answer_tokens=self._answers,
            first_tokens=_log_normal(found.new_blocks_first_turn, unit=self._block_tokens),
        )

    def corrected(self, workload: Workload) -> Workload:
        """Try it, and return it with each parameter moved by what its mean is short of."""
        got, want = self._try(workload), self._wanted
        changes: dict[str, Any] = {
            "turn_tokens": _times(workload.turn_tokens, _step(want.next_tokens, got.next_tokens)),
        }
        # Where sessions fork and have sub-agents, fewer turns follow each other than they have.
        if not workload.fork_share and not workload.sub_agent_share:
            longer = _step(want.requests_per_session - 1, got.requests_per_session - 1)
            # A bound, for recordings that no number of turns explains.
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
            more = _step(want.shared_tokens, got.shared_tokens)
            changes["shared_prompt_tokens"] = round(max(1, workload.shared_prompt_tokens) * more)
        # How many, by all requests; how close to each other, by what comes between two uses of a block: a
        # recording with quiet hours is as busy as its busy ones.
        sessions = workload.sessions * _step(want.requests, got.requests)
        changes["sessions_per_minute"] = workload.sessions_per_minute * _step(
            want.distance_tokens, got.distance_tokens
        )
        return replace(workload, sessions=max(1, round(sessions)), **changes)

    def improve(self) -> None:
        """Try each parameter a little larger and smaller, in ever smaller steps, as long as that helps."""
        for factor in _SEARCH_STEPS:
            for name in (*_SCALED, *(f"{name}.sigma" for name in _SIGMAS), "turns_shape"):
                best = self.best
                for changes in self._changes(best, name, factor):
                    with suppress(ConfigError):  # What is no workload is no better one.
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
            field, _, part = name.partition(".")
            value = getattr(best, field)
            if isinstance(value, LogNormal):
                moved = LogNormal(value.median, min(4.0, value.sigma * by)) if part else _times(value, by)
                yield {field: moved}
            elif value:
                yield {field: round(value * by) if isinstance(value, int) else value * by}

    def _try(self, workload: Workload) -> _Means:
        """Generate it at the size of a trial, and remember it if it is the best."""
        workload = _rounded(workload)
        sessions = max(_FEWEST_SESSIONS, round(workload.sessions * self._share))
        part = sessions / workload.sessions
        small = replace(workload, sessions=sessions)
        self.trials += 1
        made = generate(small)
        statistics = describe(made)
        found = _at_a_size(statistics)
        # Features do not see how many requests there are.
        more = statistics.requests / part / self._statistics.requests
        far = distance(self.recorded, found) * math.exp(abs(math.log(more)) / len(found))
        if far < self.least:
            self.least, self.best = far, workload
        return _Means.of(made, statistics, part)


def _lengthened(workload: Workload, factor: float) -> Workload:
    """With texts that many times as long, and room for them."""
    changes: dict[str, Any] = {name: _times(getattr(workload, name), factor) for name in _TEXTS}
    for name in ("shared_prompt_tokens", "context_limit_tokens"):
        changes[name] = round(getattr(workload, name) * factor)
    if not workload.documents:
        del changes["document_tokens"]
    return replace(workload, **changes)


def _at_a_size(statistics: TraceStatistics) -> dict[str, float]:
    """The features, with distances in tokens: a workload is to be as busy as the recording."""
    found, tokens = features(statistics), statistics.block_tokens
    for name, value in statistics.reuse_distance_blocks._asdict().items():
        if found.pop(f"blocks used until reuse, {name}, of all", None) is not None:
            found[f"tokens used until reuse, {name}"] = max(1.0, value * tokens)
    return found


def _rounded(workload: Workload) -> Workload:
    """With four digits of each parameter: what is printed is what was tried."""
    changes: dict[str, Any] = {}
    for field in fields(workload):
        value = getattr(workload, field.name)
        if isinstance(value, LogNormal):
            changes[field.name] = LogNormal(*(float(f"{part:.4g}") for part in value))
        elif isinstance(value, float):
            changes[field.name] = float(f"{value:.4g}")
    return replace(workload, **changes)


def _step(wanted: float, got: float) -> float:
    """A factor towards what is wanted, careful: parameters pull at each other."""
    if wanted <= 0 or got <= 0:
        return 1 / 3 if wanted <= 0 < got else 3.0 if got <= 0 < wanted else 1.0
    return min(3.0, max(1 / 3, math.exp(0.8 * math.log(wanted / got))))


def _times(quantity: LogNormal, factor: float) -> LogNormal:
    return LogNormal(min(1e8, max(1.0, quantity.median * factor)), quantity.sigma)


def _log_normal(found: Percentiles, unit: int = 1, least: float = 1.0) -> LogNormal:
    """Through the median and the 90th percentile: small numbers are bent by the size of a block."""
    median, high = (max(least, value * unit) for value in (found.p50, found.p90))
    return LogNormal(median, round(min(3.0, math.log(high / median) / _P90_OF_NORMAL), 3))
