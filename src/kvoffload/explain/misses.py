"""The missing blocks of a replay, each with exactly one reason.

Combines the histories of all managers (`explain.history`) with the comparison of prompts (`explain.prompts`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from kvoffload.core.miss_reasons import NEVER_SEEN, OTHER_ENGINE, REASONS
from kvoffload.explain.history import NO_REQUEST, NUMBER_OF, History
from kvoffload.explain.prompts import Beginnings, BlockTokens, beginnings
from kvoffload.replay.config import ReplayConfig
from kvoffload.replay.data import DataPlane
from kvoffload.replay.instances import SharedReplay, has_one_manager
from kvoffload.replay.replay import Replay
from kvoffload.replay.report import ReplayReport
from kvoffload.traces.trace import Trace

NEW_PROMPT: Final = "new_prompt"
CONTINUES: Final = "continues"
PREFIX_DIFFERS: Final = "prefix_differs"
AFTER_SHARED_PROMPT: Final = "after_shared_prompt"
OTHER_TENANT: Final = "other_tenant"

MEANINGS: Final = {
    NEW_PROMPT: "first use, in a prompt that shares no block with an earlier prompt",
    CONTINUES: "first use, behind an earlier prompt: a next turn, or a longer prompt",
    AFTER_SHARED_PROMPT: "first use, behind a beginning that more than eight prompts continue differently",
    PREFIX_DIFFERS: "first use, in a prompt that begins like an earlier prompt and then differs from it",
    OTHER_TENANT: "first use with this cache_salt; an earlier request had the same prefix with another one",
    **{name: meaning for name, meaning in REASONS.items() if name != NEVER_SEEN},
}
"""Mapping from each reason to a sentence that explains it. The first five reasons are the possible reasons
of a first use; they replace the reason `NEVER_SEEN` of `History`."""

HOPELESS: Final = (NEW_PROMPT, CONTINUES, AFTER_SHARED_PROMPT)
"""Reasons of first uses that no cache could have served."""

_NAMES = list(MEANINGS)
NUMBERS = {name: number for number, name in enumerate(_NAMES, 1)}
"""Mapping from each reason to its code in `Misses.reasons`, where 0 is a hit."""


@dataclass(frozen=True)
class Misses:
    """All missing block references of a replay.

    In arrays of shape ``(block_refs,)`` only the elements with ``reasons > 0`` are valid.

    Attributes:
        hits: shape ``(requests,)``; number of leading blocks of each request that were hits.
        reasons: shape ``(block_refs,)``; code of the reason (`NUMBERS`); 0 for a hit.
        caused_by, stored_at, was_in_tier: as in `History`.
        larger_hits: number of hits of each request at each larger capacity (`explain.capacity.larger_hits`);
            None if no larger capacity was tried.
        beginnings: the comparison of each prompt with earlier prompts.
    """

    trace: Trace
    hits: npt.NDArray[np.int32]
    reasons: npt.NDArray[np.int8]
    caused_by: npt.NDArray[np.int32]
    stored_at: npt.NDArray[np.int32]
    was_in_tier: npt.NDArray[np.int8]
    beginnings: Beginnings
    larger_hits: npt.NDArray[np.int32] | None = None

    def counts(self) -> dict[str, int]:
        """Return the number of missing blocks for each reason. The most frequent reason comes first."""
        numbers = np.bincount(self.reasons, minlength=len(_NAMES) + 1).tolist()
        counts = {name: count for name, count in zip(_NAMES, numbers[1:], strict=True) if count}
        assert sum(counts.values()) == self.trace.block_refs - int(self.hits.sum()), counts
        return dict(sorted(counts.items(), key=lambda item: -item[1]))

    def name_at(self, ref: int) -> str:
        """Return the reason of a missing block reference."""
        return _NAMES[int(self.reasons[ref]) - 1]


def find_misses(
    trace: Trace,
    config: ReplayConfig,
    *,
    tokens: BlockTokens | None = None,
    data: DataPlane | None = None,
    progress: Callable[[int], None] = lambda requests: None,
) -> tuple[ReplayReport, Misses]:
    """Replay a trace, and find the reason for each missing block.

    Args:
        tokens: as for `beginnings`.
        data: as for `Replay`. Allowed only with one manager.
        progress: as for `Replay.run`.

    Cost: about three times the cost of the replay.
    """
    histories = list[tuple[History, npt.NDArray[np.int64]]]()

    def observe(own: Trace, requests: npt.NDArray[np.int64]) -> History:
        histories.append((History(own), requests))
        return histories[-1][0]

    run: Replay | SharedReplay
    if has_one_manager(config):
        run = Replay(trace, config, data, observer=observe(trace, np.arange(trace.requests)))
    else:
        run = SharedReplay(trace, config, observe=observe)
    report = run.run(progress)
    misses = _joined(trace, histories, beginnings(trace, tokens))
    misses.counts()
    return report, misses


def _joined(
    trace: Trace, histories: list[tuple[History, npt.NDArray[np.int64]]], compared: Beginnings
) -> Misses:
    """Merge the histories of several managers. First uses get one of the first five reasons of `MEANINGS`."""
    hits = np.zeros(trace.requests, np.int32)
    reasons, was_in_tier = np.zeros((2, trace.block_refs), np.int8)
    caused_by, stored_at = np.full((2, trace.block_refs), NO_REQUEST, np.int32)
    renumbered = np.zeros(len(NUMBER_OF), np.int8)
    for name, number in NUMBER_OF.items():
        renumbered[number] = NUMBERS.get(name, 0)
    for history, requests in histories:
        _, at = trace.places_of(requests)
        hits[requests] = history.hits
        of_own = renumbered[history.reasons]
        of_own[history.reasons == NUMBER_OF[NEVER_SEEN]] = NUMBERS[OTHER_ENGINE]
        reasons[at], was_in_tier[at] = of_own, history.was_in_tier
        for whole, own in ((caused_by, history.caused_by), (stored_at, history.stored_at)):
            whole[at] = np.where(own >= 0, requests[own], NO_REQUEST)
    request_of = trace.request_of
    is_first = (reasons == NUMBERS[OTHER_ENGINE]) & (trace.depths >= compared.known[request_of])
    reasons[is_first] = _kinds(trace, compared)[request_of[is_first]]
    reasons[is_first & compared.other_tenant[trace.refs]] = NUMBERS[OTHER_TENANT]
    return Misses(trace, hits, reasons, caused_by, stored_at, was_in_tier, compared)


def _kinds(trace: Trace, compared: Beginnings) -> npt.NDArray[np.int64]:
    """Return, for each request, the code (`NUMBERS`) of the reason that the first uses in its prompt have."""
    kinds = np.where(compared.nearest != NO_REQUEST, NUMBERS[PREFIX_DIFFERS], NUMBERS[NEW_PROMPT])
    is_alike = np.zeros(trace.requests, np.bool_)
    for request, difference in compared.differences.items():
        is_alike[request] = difference.equal_after >= trace.block_tokens
    kinds[compared.shares & ~is_alike] = NUMBERS[AFTER_SHARED_PROMPT]
    kinds[compared.continues] = NUMBERS[CONTINUES]
    return kinds
