"""Functions that append calls of the manager to the log: loads, stores, and methods whose kernels do not log.

Owns the content of these records. Does not know the layout of the ring (`core.log`), or its reader.
"""

from __future__ import annotations

from kvoffload.core.log import (
    ENDED,
    STORE_NUMBERS,
    Log,
    end_call,
    put_call,
    put_number,
    put_runs,
    put_slots,
    put_word,
)
from kvoffload.core.log import KEEP as LOG_KEEP
from kvoffload.core.request import Path
from kvoffload.core.state import Cache, Entering, Pinned
from kvoffload.structures.jit import inline, kernel


@inline
def log_load(log: Log, path: Path, kind: int, count: int, load: Pinned, result: int) -> None:
    """Append a load to the log: its slots, or `result` if `result` is negative, which means that the load
    failed.

    A successful load makes a plan. Plans are numbered in the order of the log.
    """
    place = put_call(log, path, kind, count, count + 1)
    if place < 0:
        return
    if result < 0:
        end_call(log, place, put_word(log, place, result))
        return
    log.num_plans += 1
    load.number = log.num_plans
    end_call(log, place, put_slots(log, load.slots, count, place))


@inline
def log_store(log: Log, path: Path, new: Entering, kind: int, stored: int) -> None:
    """Append a store to the log.

    A successful store makes a plan. Plans are numbered in the order of the log. The record has the counts,
    the slots, and the rows of missing blocks. The record of a failed store has only the negative code
    `stored`.
    """
    if kind == LOG_KEEP:
        put_number(log, path, kind, new.num_offered, new.num_missing)
        return
    most_more = STORE_NUMBERS + max(0, stored) + 2 * new.num_missing
    place = put_call(log, path, kind, new.num_offered, most_more)
    if place < 0:
        return
    if stored < 0:
        end_call(log, place, put_word(log, place, stored))
        return
    log.num_plans += 1
    new.number = log.num_plans
    put_word(log, place, stored)
    put_word(log, place + 1, new.num_missing)
    put_word(log, place + 2, new.num_dropped)
    put_word(log, place + 3, new.num_refused)
    put_word(log, place + 4, new.num_free)
    end = put_slots(log, new.slots, stored, place + STORE_NUMBERS)
    end_call(log, place, put_runs(log, new.rows, new.num_missing, end))


@kernel
def log_call(cache: Cache, path: Path, kind: int, count: int, result: int) -> None:
    """Append a call to the log. Called for methods whose own kernels do not log."""
    if cache.log.is_open and path.recorded != ENDED:
        put_number(cache.log, path, kind, count, result)
