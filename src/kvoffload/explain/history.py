"""History of each block in a replay, and the reason for each missing block.

`History` observes one replay, and records the last decision about each block. For each reference to a missing
block it records the reason, and the request during which this decision was made. It does not compare prompts,
so all first uses have the reason `NEVER_SEEN`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvoffload.core.miss_reasons import (
    BEHIND_A_GAP,
    DAMAGED,
    EVICTED,
    NEVER_SEEN,
    NO_ROOM,
    NOT_ADMITTED,
    NOT_OFFERED,
    REFUSED,
    TIER_GAVE_UP,
    UNKNOWN,
)
from kvoffload.replay.observer import IN_TIER, NOWHERE, Codes, Decision, Places
from kvoffload.traces.trace import Trace

NO_REQUEST = -1

_REASONS = ("", NEVER_SEEN, UNKNOWN, EVICTED, NOT_ADMITTED, REFUSED, NO_ROOM, DAMAGED, NOT_OFFERED,
            BEHIND_A_GAP, TIER_GAVE_UP)  # fmt: skip
NUMBER_OF = {name: number for number, name in enumerate(_REASONS)}
"""Mapping from each reason to its code in `History.reasons`, where 0 means a hit."""

_OF_DECISION = np.full(1 + max(Decision), NUMBER_OF[NOT_OFFERED], np.int8)
"""Array: the index is the last decision about an absent block (0 if there was none), the element is the
code of the reason for the miss. `STORED` and `PROMOTED` give `UNKNOWN`, because after them the block is
not absent."""
for _decision, _reason in (
    (Decision.STORED, UNKNOWN),
    (Decision.PROMOTED, UNKNOWN),
    (Decision.EVICTED, EVICTED),
    (Decision.NOT_ADMITTED, NOT_ADMITTED),
    (Decision.REFUSED, REFUSED),
    (Decision.NO_ROOM, NO_ROOM),
    (Decision.DAMAGED, DAMAGED),
):
    _OF_DECISION[_decision] = NUMBER_OF[_reason]


class History:
    """Observer of a replay that finds the reason for each missing block (`replay.observer.Observer`).

    Attributes:
        hits: shape ``(requests,)``, int32; number of leading blocks of each request that were hits.
        reasons: shape ``(block_refs,)``, int8; code of the reason (`NUMBER_OF`); 0 for a hit.
        caused_by: shape ``(block_refs,)``, int32; the request during which the last decision about the
            missing block was made, or `NO_REQUEST`.
        stored_at: shape ``(block_refs,)``, int32; the request during which the missing block was last stored
            in RAM, or `NO_REQUEST`.
        was_in_tier: shape ``(block_refs,)``, int8; number (from 1) of the tier that had the missing block
            most recently; the slowest of these tiers if several had it; 0 if no tier had it.

    Cost: a few array operations per request, and a few bytes per block and per block reference.
    """

    def __init__(self, trace: Trace) -> None:
        self._offsets: list[int] = trace.offsets.tolist()
        self._decision = np.zeros(trace.unique_blocks, np.int8)
        self._decided_at, self._stored_at = np.full((2, trace.unique_blocks), NO_REQUEST, np.int32)
        self._tier = np.zeros(trace.unique_blocks, np.int8)
        self._num_known = 0
        self._places_before = np.zeros(0, np.int8)
        self._mismatches_before = 0
        self.hits = np.zeros(trace.requests, np.int32)
        self.reasons, self.was_in_tier = np.zeros((2, trace.block_refs), np.int8)
        self.caused_by, self.stored_at = np.full((2, trace.block_refs), NO_REQUEST, np.int32)

    def arrives(self, request: int, codes: Codes, places: Places) -> None:
        if places.num_tiers:
            self._places_before, self._mismatches_before = places.of(codes), places.tier_mismatches

    def served(self, request: int, codes: Codes, num_hits: int, places: Places) -> None:
        self.hits[request] = num_hits
        missing = codes[num_hits:]
        if len(missing):
            at = slice(self._offsets[request] + num_hits, self._offsets[request + 1])
            self.reasons[at] = self._reasons_of(request, missing, places)
            self.caused_by[at], self.stored_at[at] = self._decided_at[missing], self._stored_at[missing]
            self.was_in_tier[at] = self._tier[missing]
        # Codes are numbered by first use. A first use may be a hit in a tier that other engines share.
        self._num_known = max(self._num_known, int(codes.max(initial=-1)) + 1)

    def decided(self, request: int, decision: Decision, codes: Codes) -> None:
        self._decision[codes], self._decided_at[codes] = decision, request
        if decision in (Decision.STORED, Decision.PROMOTED):
            self._stored_at[codes] = request

    def ended(self, codes: Codes, places: Places) -> None:
        if places.num_tiers:
            number = places.slowest_tiers(codes)
            self._tier[codes] = np.where(number, number, self._tier[codes])

    def _reasons_of(self, request: int, missing: Codes, places: Places) -> npt.NDArray[np.int8]:
        place = places.of(missing)
        decision = self._decision[missing]
        is_damaged = (decision == Decision.DAMAGED) & (self._decided_at[missing] == request)
        if places.num_tiers:
            # Before the lookup only a tier had the block. Now no place has it: the tier's read has failed.
            was_below = self._places_before[len(self._places_before) - len(missing) :] >= IN_TIER
            has_damage = places.tier_mismatches > self._mismatches_before
            gone = was_below & (place == NOWHERE)
        reasons = np.where(missing < self._num_known, _OF_DECISION[decision], NUMBER_OF[NEVER_SEEN])
        if places.num_tiers:
            reasons[gone] = NUMBER_OF[DAMAGED if has_damage else TIER_GAVE_UP]
        is_here = (place != NOWHERE) & ~is_damaged
        reasons[is_here] = NUMBER_OF[BEHIND_A_GAP]
        first_absent = int((~is_here).argmax()) if not is_here.all() else len(missing)
        # Before the first absent block, blocks in a tier were usable, but were not promoted.
        reasons[:first_absent][place[:first_absent] >= IN_TIER] = NUMBER_OF[TIER_GAVE_UP]
        return reasons.astype(np.int8)
