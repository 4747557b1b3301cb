"""Explanation of a replay's missing blocks, as JSON: reasons, runs, places at which prompts differ, and the
hits with larger capacities.

Summarizes the results of `explain.misses`. Does not format text.
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from kvoffload._version import __version__
from kvoffload.core.miss_reasons import EVICTED, NOT_ADMITTED
from kvoffload.explain.capacity import FACTORS
from kvoffload.explain.history import NO_REQUEST
from kvoffload.explain.misses import AFTER_SHARED_PROMPT, HOPELESS, MEANINGS, NUMBERS, PREFIX_DIFFERS, Misses
from kvoffload.explain.prompts import Difference
from kvoffload.replay.config import ReplayConfig
from kvoffload.replay.report import ReplayReport
from kvoffload.text import Report
from kvoffload.traces.statistics import turns
from kvoffload.traces.trace import Trace

_Int64s = npt.NDArray[np.int64]


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """Consecutive missing blocks of one request that have the same reason. Attributes that do not apply
    are null.

    Requests and blocks are numbered from 0. The number of a request is its position in the trace. The
    attributes from `earlier_uses` to `kept_with` describe the first block of the run.

    Attributes:
        request: the request.
        arrived_s: seconds from the first request to the arrival of this request.
        first_block, blocks, tokens: number of the first block, number of blocks, and number of tokens of the
            run.
        earlier_uses: number of earlier requests that had the first block.
        stored_by: the request that stored the first block.
        decided_at: the request during which the first block was evicted, refused or dropped.
        kept_s: seconds from `stored_by` to `decided_at`; null without times.
        since_s: seconds from `decided_at` to this request; null without times.
        slowest: name of the slowest tier that held the evicted block; ``ram`` if only RAM held it.
        kept_with: the smallest tried multiple of the replay's capacity at which the first block would be a
            hit.
        nearest_request: the earlier request with which this request is compared (`prompts.Beginnings`).
        difference: the first tokens that differ from `nearest_request`, if the recording has token ids.
    """

    request: int
    arrived_s: float
    first_block: int
    blocks: int
    tokens: int
    reason: str
    earlier_uses: int
    stored_by: int | None = None
    decided_at: int | None = None
    kept_s: float | None = None
    since_s: float | None = None
    slowest: str | None = None
    kept_with: float | None = None
    nearest_request: int | None = None
    difference: Difference | None = None


class Differing(msgspec.Struct, frozen=True, kw_only=True):
    """A group of requests that begin alike and then differ from earlier prompts at the same place.

    Attributes:
        reason: ``prefix_differs`` or ``after_shared_prompt``.
        block: number of the first differing block.
        token: number of the first differing token; null without token ids.
        requests: number of requests in the group.
        blocks: number of missing blocks of these requests from the difference on.
        equal_tokens: number of tokens after the difference that are equal to the earlier prompt again, summed
            over the requests; null without token ids.
        in_session: number of requests in the group that differ from an earlier prompt of their own session.
        request: the request in the group with the most missing blocks.
        nearest_request: the earlier request with which `request` is compared.
        difference: the difference between `request` and `nearest_request`, if the recording has token ids.
    """

    reason: str
    block: int
    token: int | None
    requests: int
    blocks: int
    equal_tokens: int | None
    in_session: int
    request: int
    nearest_request: int
    difference: Difference | None


class Evicted(msgspec.Struct, frozen=True, kw_only=True):
    """Summary of the missing blocks that had been evicted.

    Attributes:
        slowest: mapping: name of the slowest tier that held the block (``ram`` if only RAM held it) -> number
            of blocks.
        kept_s: median time from the store to the eviction, in seconds; null without times.
        since_s: median time from the eviction to the next use, in seconds; null without times.
        kept_requests, since_requests: the same two medians, measured in requests instead of seconds.
    """

    slowest: dict[str, int]
    kept_s: float | None
    since_s: float | None
    kept_requests: int
    since_requests: int


class LargerCapacity(msgspec.Struct, frozen=True, kw_only=True):
    """Hits of a second replay, in which RAM and all tiers with a capacity are larger by the same factor.

    Attributes:
        factor: larger capacity, divided by the capacity of the explained replay.
        evicted_hits: number of hits at the larger capacity that are misses with the reason ``evicted`` in the
            explained replay.
        hits: number of all hits. It can be smaller than at a smaller capacity, because some policies are not
            monotone.
    """

    factor: float
    evicted_hits: int
    hits: int


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """Prompt tokens that the recorded server found in its caches, compared with the hits of the replay.

    Attributes:
        tokens: mapping: source (``gpu``, ``host`` or a tier) -> number of tokens.
        replayed_tokens: number of tokens that were hits in the replay.
        requests_with_less: number of requests that had at least one block fewer on the server than in the
            replay.
        tokens_less: sum over these requests of the tokens that were hits in the replay but not on the server.
        requests_with_more: number of requests that had at least one block more on the server than in the
            replay.
        tokens_more: sum over these requests of the tokens that were hits on the server but not in the replay.
    """

    tokens: dict[str, int]
    replayed_tokens: int
    requests_with_less: int
    tokens_less: int
    requests_with_more: int
    tokens_more: int


class Explanation(Report, frozen=True, kw_only=True):
    """Reasons for all missing blocks of one replay. Its attributes are the keys of the JSON object.

    Attributes:
        tiers: names of the tiers behind RAM.
        hits: number of block references that were served.
        misses: number of block references that were not served.
        reasons: mapping from each reason that occurs to its number of missing blocks. The sum is `misses`.
        meanings: mapping from each reason that occurs to a sentence that explains the reason.
        capacities: hits with each larger capacity, in ascending order; null if no larger capacity was tried.
        seen_before: for misses of blocks that were not admitted: mapping from the number of earlier requests
            with the block, as text, to the number of misses.
        differing: places at which prompts differ, in descending order of `equal_tokens`, then `blocks`.
        num_differing: number of all places at which prompts differ, also those not listed in `differing`.
        equal_tokens: sum of `Differing.equal_tokens` of all places; null without token ids.
        runs: the longest runs. Runs that a cache or another form of the prompt could have avoided come first.
            If a single request is explained: all runs of this request, in the order of the blocks.
        num_runs: number of all runs, also of those not listed in `runs`.
        decisions_sha256: digest of the replay's decisions. ``kvoffload replay`` prints the same digest.
    """

    trace: str
    policy: str
    admission: str
    capacity_blocks: int
    device_blocks: int
    store: str
    tiers: list[str]
    instances: int
    block_tokens: int
    requests: int
    block_refs: int
    hits: int
    misses: int
    reasons: dict[str, int]
    meanings: dict[str, str]
    has_times: bool
    has_token_ids: bool
    evicted: Evicted | None
    capacities: list[LargerCapacity] | None
    seen_before: dict[str, int]
    differing: list[Differing]
    num_differing: int
    equal_tokens: int | None
    served: Served | None
    num_runs: int
    runs: list[Run]
    decisions_sha256: str
    version: str = __version__


def explain(
    report: ReplayReport,
    misses: Misses,
    config: ReplayConfig,
    *,
    has_token_ids: bool = False,
    top: int = 20,
    request: int | None = None,
) -> Explanation:
    """Summarize the misses of a replay.

    Args:
        misses: the misses. `Misses.larger_hits` is set if larger capacities were tried.
        top: largest number of runs (`Run`) and of differing places (`Differing`) to list.
        request: number of a request; then the result lists all runs of this request, and no others. None: the
            result lists the longest runs of all requests.
    """
    trace, counts = misses.trace, misses.counts()
    facts = _Facts(misses, [tier.name for tier in report.tiers[1:]])
    starts, ends = _runs(misses)
    # First uses that no cache can serve come last.
    is_hopeless = np.isin(misses.reasons[starts], [NUMBERS[reason] for reason in HOPELESS])
    chosen = np.lexsort((starts - ends, is_hopeless))[:top]
    if request is not None:
        chosen = np.flatnonzero(facts.request_of[starts] == request)
    differing = _differing(misses)
    return Explanation(
        trace=trace.name,
        policy=report.policy,
        admission=config.admission,
        capacity_blocks=config.capacity_blocks,
        device_blocks=config.device_blocks,
        store=config.store,
        tiers=facts.tiers,
        instances=config.instances,
        block_tokens=trace.block_tokens,
        requests=trace.requests,
        block_refs=trace.block_refs,
        hits=int(misses.hits.sum()),
        misses=sum(counts.values()),
        reasons=counts,
        meanings={name: MEANINGS[name] for name in counts},
        has_times=facts.has_times,
        has_token_ids=has_token_ids,
        evicted=facts.evicted(),
        capacities=facts.capacities(),
        seen_before=facts.seen_before(),
        differing=differing[:top],
        num_differing=len(differing),
        equal_tokens=sum(place.equal_tokens or 0 for place in differing) if has_token_ids else None,
        served=_served(misses),
        num_runs=len(starts),
        runs=[facts.run(int(starts[number]), int(ends[number])) for number in chosen],
        decisions_sha256=report.decisions_sha256,
    )


def _runs(misses: Misses) -> tuple[_Int64s, _Int64s]:
    """Return the runs of missing blocks: for each run the position of its first reference, and of its end.

    A run consists of consecutive references of one request with the same reason.
    """
    reasons = misses.reasons
    is_new = np.ones(len(reasons), np.bool_)
    is_new[1:] = reasons[1:] != reasons[:-1]
    is_new[misses.trace.offsets[:-1][np.diff(misses.trace.offsets) > 0]] = True
    starts = np.flatnonzero(is_new)
    ends = np.append(starts[1:], len(reasons))
    is_missing = reasons[starts] > 0
    return starts[is_missing], ends[is_missing]


class _Facts:
    """Computes the facts about missing blocks that an explanation lists."""

    def __init__(self, misses: Misses, tiers: list[str]) -> None:
        trace = misses.trace
        self._misses, self._trace, self.tiers = misses, trace, tiers
        self.request_of = trace.request_of
        self.has_times = trace.duration_s > 0
        self._first_ms = int(trace.timestamps_ms.min(initial=0)) if trace.requests else 0
        self._rank = _ranks(trace)

    def evicted(self) -> Evicted | None:
        """Summarize the misses with the reason ``evicted``; None if there are none."""
        misses = self._misses
        refs = np.flatnonzero(misses.reasons == NUMBERS[EVICTED])
        if len(refs) == 0:
            return None
        stored, decided, now = misses.stored_at[refs], misses.caused_by[refs], self.request_of[refs]
        by_place = np.bincount(misses.was_in_tier[refs], minlength=1 + len(self.tiers)).tolist()
        names = ["ram", *self.tiers]
        return Evicted(
            slowest={name: count for name, count in zip(names, by_place, strict=True) if count},
            kept_s=self._median_s(stored, decided),
            since_s=self._median_s(decided, now),
            kept_requests=int(np.median(decided - stored)),
            since_requests=int(np.median(now - decided)),
        )

    def capacities(self) -> list[LargerCapacity] | None:
        """Count the hits at each larger capacity; None if none was tried."""
        misses = self._misses
        if misses.larger_hits is None:
            return None
        refs = np.flatnonzero(misses.reasons == NUMBERS[EVICTED])
        request = self.request_of[refs]
        depth = refs - self._trace.offsets[request]
        return [
            LargerCapacity(
                factor=factor,
                evicted_hits=int(np.count_nonzero(depth < hits[request])),
                hits=int(hits.sum()),
            )
            for factor, hits in zip(FACTORS, misses.larger_hits, strict=True)
        ]

    def seen_before(self) -> dict[str, int]:
        """Return how often the blocks that were not admitted had been referenced before.

        ``{"1": 12, "2": 3}`` means 12 misses of blocks with one earlier reference, and 3 of blocks with two.
        """
        refs = np.flatnonzero(self._misses.reasons == NUMBERS[NOT_ADMITTED])
        counts = np.bincount(self._rank[refs]).tolist()
        return {str(uses): count for uses, count in enumerate(counts) if count}

    def run(self, start: int, end: int) -> Run:
        """Describe the run of missing references from `start` to `end`."""
        misses, trace, request = self._misses, self._trace, int(self.request_of[start])
        reason, compared = misses.name_at(start), misses.beginnings
        decided, stored = int(misses.caused_by[start]), int(misses.stored_at[start])
        differs = reason in (PREFIX_DIFFERS, AFTER_SHARED_PROMPT)
        is_evicted = reason == EVICTED
        first_block, known = start - int(trace.offsets[request]), decided != NO_REQUEST
        return Run(
            request=request,
            arrived_s=(int(trace.timestamps_ms[request]) - self._first_ms) / 1000,
            first_block=first_block,
            blocks=end - start,
            tokens=(end - start) * trace.block_tokens,
            reason=reason,
            earlier_uses=int(self._rank[start]),
            stored_by=stored if stored != NO_REQUEST else None,
            decided_at=decided if known else None,
            kept_s=self._seconds(stored, decided) if is_evicted else None,
            since_s=self._seconds(decided, request) if known else None,
            slowest=["ram", *self.tiers][misses.was_in_tier[start]] if is_evicted else None,
            kept_with=self._kept_with(request, first_block),
            nearest_request=int(compared.nearest[request]) if differs else None,
            difference=compared.differences.get(request) if differs else None,
        )

    def _kept_with(self, request: int, block: int) -> float | None:
        """Return the smallest of `FACTORS` with which a block is a hit; None if it is a miss with all of
        them.
        """
        if self._misses.larger_hits is None:
            return None
        of_request = zip(FACTORS, self._misses.larger_hits[:, request].tolist(), strict=True)
        return next((factor for factor, hits in of_request if block < hits), None)

    def _seconds(self, earlier: int, later: int) -> float | None:
        times = self._trace.timestamps_ms
        return (int(times[later]) - int(times[earlier])) / 1000 if self.has_times else None

    def _median_s(self, earlier: npt.NDArray[np.integer], later: npt.NDArray[np.integer]) -> float | None:
        times = self._trace.timestamps_ms
        return float(np.median(times[later] - times[earlier])) / 1000 if self.has_times else None


def _ranks(trace: Trace) -> _Int64s:
    """Return, for each reference, the number of earlier references to the same block."""
    order = np.argsort(trace.refs, kind="stable")
    counts = np.bincount(trace.refs, minlength=trace.unique_blocks)
    ranks = np.empty(trace.block_refs, np.int64)
    ranks[order] = np.arange(trace.block_refs) - np.repeat(np.cumsum(counts) - counts, counts)
    return ranks


def _differing(misses: Misses) -> list[Differing]:
    """Group the requests that differ from an earlier prompt, by reason and by the place of the difference."""
    trace, compared = misses.trace, misses.beginnings
    request_of = trace.request_of
    groups: dict[tuple[str, int, int | None], list[int]] = {}
    blocks = np.zeros(trace.requests, np.int64)
    for reason in (PREFIX_DIFFERS, AFTER_SHARED_PROMPT):
        first_uses = np.bincount(request_of[misses.reasons == NUMBERS[reason]], minlength=trace.requests)
        blocks += first_uses
        for request in np.flatnonzero(first_uses).tolist():
            known, difference = int(compared.known[request]), compared.differences.get(request)
            parent = int(trace.refs[trace.offsets[request] + known - 1]) if known else NO_REQUEST
            # Behind a shared prompt all prompts differ, so single tokens are no useful place.
            is_placed = difference is not None and reason == PREFIX_DIFFERS
            token = difference.start if difference is not None and is_placed else None
            groups.setdefault((reason, parent, token), []).append(request)
    previous = turns(trace).previous_turn
    of_groups = [
        _group(misses, reason, requests, blocks, previous) for (reason, _, _), requests in groups.items()
    ]
    return sorted(of_groups, key=lambda group: (-(group.equal_tokens or 0), -group.blocks, group.request))


def _group(misses: Misses, reason: str, requests: list[int], blocks: _Int64s, previous: _Int64s) -> Differing:
    compared, lengths = misses.beginnings, np.diff(misses.trace.offsets)
    largest = max(requests, key=lambda request: (blocks[request], -request))
    known, difference = int(compared.known[largest]), compared.differences.get(largest)
    if reason == AFTER_SHARED_PROMPT:
        difference = None
    differences = [compared.differences[request] for request in requests if difference is not None]
    before = previous[requests]
    return Differing(
        reason=reason,
        block=known if difference is None else difference.start // misses.trace.block_tokens,
        token=None if difference is None else difference.start,
        requests=len(requests),
        blocks=int(blocks[requests].sum()),
        equal_tokens=None if difference is None else sum(one.equal_after for one in differences),
        in_session=int(np.count_nonzero((before != NO_REQUEST) & (lengths[before] > known))),
        request=largest,
        nearest_request=int(compared.nearest[largest]),
        difference=difference,
    )


def _served(misses: Misses) -> Served | None:
    trace = misses.trace
    if trace.served_tokens is None:
        return None
    served = np.zeros(trace.requests, np.int64) + sum(trace.served_tokens.values())
    replayed = misses.hits.astype(np.int64) * trace.block_tokens
    less = replayed - served
    is_less, is_more = less >= trace.block_tokens, less <= -trace.block_tokens
    return Served(
        tokens={source: int(tokens.sum()) for source, tokens in trace.served_tokens.items()},
        replayed_tokens=int(replayed.sum()),
        requests_with_less=int(is_less.sum()),
        tokens_less=int(less[is_less].sum()),
        requests_with_more=int(is_more.sum()),
        tokens_more=-int(less[is_more].sum()),
    )
