"""Reasons why a block of a prompt was missing. Live metrics and `explain` report these reasons.

Owns the names and descriptions of the reasons. Does not know managers, engines or traces.
"""

from __future__ import annotations

from typing import Final

NEVER_SEEN: Final = "never_seen"
NOT_ADMITTED: Final = "not_admitted"
REFUSED: Final = "refused"
EVICTED: Final = "evicted"
DAMAGED: Final = "damaged"
NO_ROOM: Final = "no_room"
TIER_GAVE_UP: Final = "tier_gave_up"
BEHIND_A_GAP: Final = "behind_a_gap"
NOT_OFFERED: Final = "not_offered"
OTHER_ENGINE: Final = "other_engine"
IN_FLIGHT: Final = "in_flight"
FAILED_STORE: Final = "failed_store"
RESET: Final = "reset"
UNKNOWN: Final = "unknown"
AUDIT: Final = "audit"
BUSY: Final = "busy"
KEPT_OUT: Final = "kept_out"
PAUSED: Final = "paused"

REASONS: Final = {
    NEVER_SEEN: "no earlier request had this block",
    NOT_ADMITTED: "an earlier request had this block, and the admission rule did not admit it",
    REFUSED: "the eviction policy refused this block when it was offered",
    EVICTED: "the block was stored, and was evicted before this use",
    DAMAGED: "the block was stored, and its bytes failed the checksum",
    NO_ROOM: "the block was offered while no slot could be freed for it",
    TIER_GAVE_UP: "a tier had the block and did not deliver it: deadline, not worth it, full or circuit open",
    BEHIND_A_GAP: "the block is stored, and an earlier block of the prompt is missing",
    NOT_OFFERED: "the block was computed, and never offered to the cache: it did not fit on the device",
    OTHER_ENGINE: "another engine has computed the block, and this engine has not",
    IN_FLIGHT: "the block was still being stored or promoted",
    FAILED_STORE: "the copy of the block to the cache failed",
    RESET: "the block was stored, and the cache was reset before this use",
    UNKNOWN: "the record of this block was dropped, or there was none: its history is unknown",
}
"""Mapping: reason -> description in one line. A missing block has exactly one reason."""

LIVE_REASONS: Final = {reason: text for reason, text in REASONS.items() if reason != OTHER_ENGINE} | {
    NOT_OFFERED: "the device dropped the block before it was offered",
    AUDIT: "the request was computed on purpose, to audit its stored blocks",
    BUSY: "the block is stored; the shared pool's lock, or room to verify the block, was not free in time",
    KEPT_OUT: "the request has an adapter, and may not use a pool that engines share",
    PAUSED: "offloading is paused after an internal error",
}
"""Reasons that a running engine reports. `OTHER_ENGINE` is not among them, because an engine knows only its
own requests."""
