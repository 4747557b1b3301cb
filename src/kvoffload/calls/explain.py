"""The first difference between a recording and its replay, as a report for a reader."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvoffload.core.log import STORE_NUMBERS, Call
from kvoffload.core.manager import OffloadingManager
from kvoffload.core.plans import LoadPlan, StorePlan
from kvoffload.core.slots import WRITING
from kvoffload.structures.index import ABSENT
from kvoffload.structures.keys import Keys

MOST_BLOCKS = 256


@dataclass
class Difference:
    """The first call whose result differs.

    Attributes:
        call: number of the call in its file, from 1.
        kind: name of the call.
        request: number of the request. For a call that ends a plan: number of the plan.
        time_ns: time at which the record was written, in nanoseconds since 1970.
        expected, found: results in the recording and in the replay.
        blocks: states of the call's blocks in the replay, after the call.
        calls: the latest calls of the request.
        recording: name of the file.
    """

    call: int
    kind: str
    request: int
    time_ns: int
    expected: dict[str, Any]
    found: dict[str, Any]
    blocks: list[dict[str, Any]] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    recording: str = ""


def result_of(
    call: Call, words: list[int], manager: OffloadingManager, plan: LoadPlan | StorePlan | None
) -> dict[str, Any]:
    """Convert the words of a result to named values. `plan` is the plan that the replayed call returned, if
    any.
    """
    if call is Call.LOOKUP and words:
        is_pending, ready = words[0] < 0, max(words[0], ~words[0])
        return {"num_ready": ready, "stopped_by_pending": is_pending}
    if call in (Call.PREPARE_LOAD, Call.PIN):
        return {"slots": words}
    if call is not Call.PREPARE_STORE or not words:
        return {"result": words}
    if words[0] < 0:
        return {"stored": None}
    stored, missing, dropped, refused, num_free = words[:STORE_NUMBERS]
    slots = words[STORE_NUMBERS : STORE_NUMBERS + stored]
    return {
        "stored": stored,
        "missing": missing,
        "dropped": dropped,
        "refused": refused,
        "slots": slots,
        "evicted": _evicted(manager, slots[num_free:], plan),
        "missing_rows": words[STORE_NUMBERS + stored :],
    }


def _evicted(manager: OffloadingManager, slots: list[int], plan: LoadPlan | StorePlan | None) -> list[str]:
    """Return, in hexadecimal, the keys of the blocks that were in these slots before the call."""
    evicted: dict[int, bytes] = {}
    if isinstance(plan, StorePlan) and plan.num_evicted:
        evicted = dict(zip(plan.slots[-plan.num_evicted :].tolist(), plan.evicted, strict=True))
    known = [slot for slot in slots if slot < manager.capacity_blocks]
    return [(evicted.get(slot) or manager.index.key_at(slot)).hex() for slot in known]


def block_states(manager: OffloadingManager, keys: Keys) -> list[dict[str, Any]]:
    """Describe the first `MOST_BLOCKS` blocks of a batch: key, slot, state, pins."""
    shown = keys[:MOST_BLOCKS]
    blocks = []
    for key, slot in zip(shown, manager.slots_of(shown).tolist(), strict=True):
        block: dict[str, Any] = {"key": key.hex(), "state": "absent"}
        if slot != ABSENT:
            pins = int(manager.slots.ref_cnt[slot])
            block |= {"state": "in flight" if pins == WRITING else "ready", "slot": slot}
            if pins > 0:
                block["pins"] = pins
        blocks.append(block)
    return blocks
