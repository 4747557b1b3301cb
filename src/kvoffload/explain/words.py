"""The sentences of an explanation: descriptions of runs, and advice for each reason. Does not know tables."""

from __future__ import annotations

from typing import Final

from kvoffload.core import miss_reasons as reasons
from kvoffload.explain.explanation import Differing, Explanation, Run
from kvoffload.explain.misses import (
    AFTER_SHARED_PROMPT,
    CONTINUES,
    NEW_PROMPT,
    OTHER_TENANT,
    PREFIX_DIFFERS,
)
from kvoffload.explain.prompts import Difference
from kvoffload.text import counted, duration, percent

ADVICE: Final = {
    NEW_PROMPT: "none: no cache can serve a first use",
    CONTINUES: "none: new text of a conversation",
    PREFIX_DIFFERS: "put text that changes (a date, an id) behind text that stays; see the places below",
    AFTER_SHARED_PROMPT: "none for new conversations; see the places below if it is your template",
    OTHER_TENANT: "one cache_salt for requests that may share; else none",
    reasons.EVICTED: "more RAM, a tier behind RAM, or another policy",
    reasons.NOT_ADMITTED: "a rule that admits sooner, such as --admission all",
    reasons.REFUSED: "more RAM, or a smaller write_cost: the policy kept blocks worth more",
    reasons.NO_ROOM: "more RAM: the blocks of one request fill it",
    reasons.DAMAGED: "check the memory and the disks of the machine",
    reasons.NOT_OFFERED: "a larger device cache, or --store on-compute",
    reasons.BEHIND_A_GAP: "as for the missing block before: these blocks are kept without use",
    reasons.TIER_GAVE_UP: "more RAM: it had no room for all blocks of the tier",
    reasons.OTHER_ENGINE: "--routing prefix or session, --shared-ram, or a tier that the engines share",
    reasons.UNKNOWN: "please report this as a bug",
}
"""One line of advice for each reason that a replay can have."""


def sentence(run: Run, explained: Explanation) -> str:
    """Explain one run of missing blocks."""
    where = "" if run.decided_at is None else f" at request {run.decided_at:,}"
    known, uses = counted(run.first_block, "block"), counted(run.earlier_uses, "earlier request")
    texts = {
        NEW_PROMPT: "first use: no earlier prompt shares a block",
        CONTINUES: f"first use, behind {known} of an earlier prompt",
        AFTER_SHARED_PROMPT: f"first use, behind {known} that many prompts share",
        OTHER_TENANT: "an earlier request had the same tokens with another cache_salt",
        reasons.NOT_ADMITTED: f"{uses} had it; {explained.admission} did not admit it{where}",
        reasons.REFUSED: f"{uses} had it; {explained.policy} refused it{where}",
        reasons.NO_ROOM: f"no room{where}: the blocks of one request filled RAM",
        reasons.DAMAGED: f"damaged: the checksum did not match{where}",
        reasons.NOT_OFFERED: "never offered to RAM: it did not fit on the device",
        reasons.BEHIND_A_GAP: "still stored, but a block before it is missing",
        reasons.TIER_GAVE_UP: "a tier has it, but it was not promoted: RAM had no room",
        reasons.OTHER_ENGINE: "another engine computed it, and its RAM is separate",
        reasons.UNKNOWN: "unknown",
    }
    if run.reason == reasons.EVICTED:
        return _evicted(run)
    if run.reason == PREFIX_DIFFERS:
        if run.difference is not None:
            return difference_in_words(run.difference, run.nearest_request)
        begin = run.first_block * explained.block_tokens
        end = begin + explained.block_tokens - 1
        return (
            f"differs from request {run.nearest_request:,} in block {run.first_block:,} "
            f"(tokens {begin:,} to {end:,})"
        )
    return texts[run.reason]


def _evicted(run: Run) -> str:
    assert run.decided_at is not None
    kept, since = "", ""
    if run.stored_by is not None:
        if run.kept_s is not None and run.since_s is not None:
            kept, since = (
                f", {duration(run.kept_s)} after the store",
                f"{duration(run.since_s)} before this use",
            )
        else:
            kept = f", {counted(run.decided_at - run.stored_by, 'request')} after the store"
            since = f"{counted(run.request - run.decided_at, 'request')} before this use"
    text = f"evicted from RAM for request {run.decided_at:,}{kept}, {since}"
    if run.slowest not in (None, "ram"):
        text += f"; also from {run.slowest}"
    return text + (f"; kept with {run.kept_with:g} times the capacity" if run.kept_with else "")


def difference_in_words(difference: Difference, nearest: int | None) -> str:
    """Explain the first difference of two prompts."""
    ids = f"({_ids(difference.ours)} instead of {_ids(difference.theirs)})"
    if not difference.equal_after:
        return f"differs from request {nearest:,} at token {difference.start:,} {ids}"
    place = f"token {difference.start:,} differs"
    if difference.end > difference.start + 1:
        place = f"tokens {difference.start:,} to {difference.end - 1:,} differ"
    elif difference.end == difference.start:
        verb = "is" if difference.shift == -1 else "are"
        place = f"{counted(-difference.shift, 'token')} {verb} left out at token {difference.start:,}"
    moved = f", moved by {difference.shift:+,} tokens" if difference.shift else ""
    return (
        f"{place} from request {nearest:,} {ids}; the following {difference.equal_after:,} tokens are "
        f"equal{moved}"
    )


def _ids(tokens: list[int]) -> str:
    return " ".join(map(str, tokens)) or "nothing"


def place_in_words(place: Differing, block_tokens: int) -> str:
    """Describe the place at which the prompts of a group differ."""
    if place.token is not None:
        return f"token {place.token:,}"
    begin = place.block * block_tokens
    return f"block {place.block:,} (token {begin:,} to {begin + block_tokens - 1:,})"


def facts(explained: Explanation) -> list[str]:
    """Return sentences about the whole replay."""
    lines = []
    evicted = explained.evicted
    if evicted is not None:
        times = (
            f"{counted(evicted.kept_requests, 'request')} after the store, "
            f"{counted(evicted.since_requests, 'request')} before"
        )
        if evicted.kept_s is not None and evicted.since_s is not None:
            times = f"{duration(evicted.kept_s)} after the store, {duration(evicted.since_s)} before"
        lines.append(f"Evicted blocks left RAM {times} the use that missed them (medians).")
        if explained.tiers:
            places = ", ".join(f"{name} {count:,}" for name, count in evicted.slowest.items())
            lines.append(f"The slowest place that held them: {places}.")
    if explained.seen_before:
        uses = ", ".join(f"{count:,} had {number}" for number, count in explained.seen_before.items())
        lines.append(f"Earlier requests with the blocks that {explained.admission} did not admit: {uses}.")
    if explained.equal_tokens:
        lines.append(
            f"{explained.equal_tokens:,} tokens behind the differences of all requests are equal to those of "
            "an earlier prompt: prompts that change only at the end could hit them, if they are still stored."
        )
    served = explained.served
    if served is not None:
        sources = ", ".join(f"{source} {count:,}" for source, count in served.tokens.items() if count)
        lines.append(
            f"The recorded server had {sum(served.tokens.values()):,} tokens cached ({sources or 'none'}), "
            f"the replay {served.replayed_tokens:,}. The server had fewer in "
            f"{counted(served.requests_with_less, 'request')} ({counted(served.tokens_less, 'token')}) and "
            f"more in {counted(served.requests_with_more, 'request')} "
            f"({counted(served.tokens_more, 'token')})."
        )
    return lines


def capacity_rows(explained: Explanation) -> list[tuple[str, str, str, str, str]]:
    """Return the rows for a table of larger capacities.

    The five cells of a row are the capacity, the number of evicted blocks that become hits, their share of
    all evicted blocks, the number of all hits, and the hit ratio. The first row is the explained replay. The
    list is empty if no larger capacity was tried.
    """
    if explained.capacities is None:
        return []
    evicted = explained.reasons.get(reasons.EVICTED, 0)
    rows = [(1.0, 0, explained.hits)]
    rows += [(row.factor, row.evicted_hits, row.hits) for row in explained.capacities]
    return [
        (
            f"{factor:g} times",
            f"{evicted_hits:,}",
            percent(evicted_hits / max(1, evicted)),
            f"{hits:,}",
            percent(hits / max(1, explained.block_refs)),
        )
        for factor, evicted_hits, hits in rows
    ]
