"""The log of a manager's calls: a ring buffer of 32-bit words. The manager's kernels append records.

Owns the layout of records. Does not know files, threads, or the reader of the ring. A key is written once per
request, when it joins the request's path. After that, records refer to blocks by their positions on the path,
written as runs.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np

from kvoffload.core.request import HASH, Path
from kvoffload.structures.jit import I32Array, ReadI32Array, inline
from kvoffload.structures.structs import Struct


class Call(IntEnum):
    """The kind of a record, which is part of the record's first word. Kinds after `RESET` are not calls.

    The text below a kind explains the kind, or lists what a record of the kind contains.
    """

    EXTEND = 1
    """Records the new keys of a request's path when keys from `lookup_key`, which has no record of its own,
    join the path."""
    EXPECT = 2
    WITHDRAW = 3
    LOOKUP = 4
    TOUCH = 5
    TOUCH_PATH = 6
    """Records the path that `finish_request` received. The record `FINISH` of the request follows."""
    FINISH = 7
    PREPARE_LOAD = 8
    COMPLETE_LOAD = 9
    PIN = 10
    UNPIN = 11
    PREPARE_STORE = 12
    COMPLETE_STORE = 13
    KEEP = 14
    DISCARD = 15
    RESET = 16
    SET_HINTS = 17
    """The number that stands for the request's hints. Recorded when the hints are set: when the request
    begins or ends."""
    HINTS = 18
    """The text of hints, and the number that stands for them in later records."""
    DAMAGED = 19
    """The damaged rows of the following `COMPLETE_LOAD` or `UNPIN`."""
    RAISED = 20
    """The exception of the previous call."""
    BEGIN_POLICY_CHANGE = 21
    """The text of the new policy."""
    ADVANCE_POLICY_CHANGE = 22
    """The argument `num_blocks`."""
    TENANTS = 23
    """The quotas that `set_tenants` has set."""
    BEGIN_RESIZE = 24
    """The argument `num_blocks`."""
    ADVANCE_RESIZE = 25
    """The argument `num_blocks`."""


LOOKUP, TOUCH, TOUCH_PATH, FINISH, LAST_CALL = 4, 5, 6, 7, 16
PREPARE_LOAD, COMPLETE_LOAD, PIN, UNPIN = 8, 9, 10, 11
PREPARE_STORE, COMPLETE_STORE, KEEP = 12, 13, 14
"""The kinds as plain numbers, because kernels cannot read enumerations."""

KIND_BITS = 8
ADMITTED, FAILED = 1 << KIND_BITS, 2 << KIND_BITS
"""Flags in the word of the kind. `ADMITTED`: `prepare_store` was called with ``admitted=True``. `FAILED`: the
call raised an exception before its kernel recorded a result. Such a call has only extended the path."""

KIND, SUBJECT, NUM_NEW, NUM_RUNS, NUM_MORE, HEADER = 0, 1, 2, 3, 4, 5
"""Positions of the words of a record's header, which has `HEADER` words. `KIND`: kind and flags. `SUBJECT`:
number of the request or, if the call ends a plan, of the plan; otherwise 0. `NUM_NEW`: number of new keys
of the path. `NUM_RUNS`: number of runs. `NUM_MORE`: number of words after the runs. After the header come
the new keys, then the start and length of each run, then the other words."""

STORE_NUMBERS = 5
"""Number of words before the slots in the record of a store. The words are the numbers of stored, missing,
dropped and refused blocks and the number of used free slots."""
IS_PART = 2
"""Added to the success word (0 or 1) of a record that ends one part of a split plan."""
NO_REQUEST, ENDED = -1, -1
"""Special values. `NO_REQUEST`: ``Path.number`` of a call without a request. `ENDED`: ``Path.recorded`` after
`FINISH`."""
_LOST = -1
_LOW = 0xFFFFFFFF


class Log(Struct):
    """A ring buffer of records.

    Attributes:
        words: int32, shape ``(num_words,)``; `num_words` is a power of two. Word `i` of the log is at
            ``i % num_words``.
        head, tail: `head` is the number of words written since the log began, `tail` the number of words
            read.
        is_open: 1 while calls are recorded. If there is no room for a record, the log closes, because later
            records would be useless without this record.
        num_requests, num_plans, num_calls: number of requests, plans and calls recorded so far.
        key_words: number of 64-bit words written for each key; 0 to write only the key's hash.
    """

    words: I32Array
    head: int
    tail: int
    is_open: int
    num_requests: int
    num_plans: int
    num_calls: int
    key_words: int

    def __init__(self, num_words: int, key_words: int = 0) -> None:
        # Written now, so that no later call waits for the system to provide the pages.
        words = np.full(num_words, 0, np.int32)
        super().__init__(words=words, key_words=key_words, is_open=int(num_words > 0))

    def put(self, kind: int, subject: int, further: ReadI32Array) -> None:
        """Append a record without keys. Called from Python, for rare records."""
        if not self.is_open or self.head - self.tail + HEADER + len(further) > len(self.words):
            self.is_open = 0
            return
        record = np.array([kind, subject, 0, 0, len(further), *further.tolist()], np.int32)
        self.words[(self.head + np.arange(len(record))) % len(self.words)] = record
        self.num_calls += kind & ((1 << KIND_BITS) - 1) <= Call.RESET
        self.head += len(record)


@inline
def put_word(log: Log, at: int, value: int) -> int:
    log.words[at & (log.words.shape[0] - 1)] = value
    return at + 1


@inline
def _put_u64(log: Log, at: int, value: np.uint64) -> int:
    put_word(log, at, np.int32(value & np.uint64(_LOW)))
    put_word(log, at + 1, np.int32(value >> np.uint64(32)))
    return at + 2


@inline
def _put_new_keys(log: Log, path: Path, at: int) -> int:
    """Write the keys that joined the path since the request's last record, from word `at` on.

    Returns the position after the last word.
    """
    for position in range(path.recorded, path.length):
        if log.key_words == 0:
            at = _put_u64(log, at, path.records[position, HASH])
        for word in range(log.key_words):
            at = _put_u64(log, at, path.index.keys[position, word])
    path.recorded = path.length
    return at


@inline
def put_runs(log: Log, rows: I32Array, count: int, at: int) -> int:
    """Write ascending numbers as runs: start and length of each run, from word `at` on.

    Returns the position after the last word.
    """
    start = 0
    for row in range(1, count + 1):
        if row == count or rows[row] != rows[row - 1] + 1:
            put_word(log, at, rows[start])
            put_word(log, at + 1, row - start)
            at, start = at + 2, row
    return at


@inline
def has_room(log: Log, most: int) -> bool:
    """Return True if there is room for a record of `most` words. Otherwise close the log and return False."""
    if log.head + most - log.tail > log.words.shape[0]:
        log.is_open = 0
    return log.is_open != 0


@inline
def put_call(log: Log, path: Path, kind: int, count: int, most_more: int) -> int:
    """Write the header, the new keys and the runs of a call.

    The batch of the call has `count` keys, whose path positions are in ``path.positions``. The caller then
    writes up to `most_more` further words, and calls `end_call`. Returns the position of the further words,
    or `_LOST` if there is no room for the record.
    """
    num_new = path.length - path.recorded
    most = HEADER + 2 * max(1, log.key_words) * num_new + 2 * count + most_more
    if not has_room(log, most):
        return np.int64(_LOST)
    if path.number == 0:
        log.num_requests += 1
        path.number = log.num_requests
    start = log.head
    put_word(log, start + KIND, kind)
    put_word(log, start + SUBJECT, max(0, path.number))
    put_word(log, start + NUM_NEW, num_new)
    at = _put_new_keys(log, path, start + HEADER)
    end = put_runs(log, path.positions, count, at)
    put_word(log, start + NUM_RUNS, (end - at) // 2)
    log.num_calls += kind & ((1 << KIND_BITS) - 1) <= LAST_CALL
    return end


@inline
def end_call(log: Log, place: int, end: int) -> None:
    """Complete a record. Its arguments and results are the words from `place` to ``end - 1``."""
    put_word(log, log.head + NUM_MORE, end - place)
    log.head = end


@inline
def put_number(log: Log, path: Path, kind: int, count: int, number: int) -> None:
    """Append the record of a call with one further word."""
    place = put_call(log, path, kind, count, 1)
    if place != _LOST:
        end_call(log, place, put_word(log, place, number))


@inline
def put_slots(log: Log, slots: I32Array, count: int, at: int) -> int:
    """Write the first `count` entries of `slots` to the log, from word `at` on. Returns the position after
    the last word.
    """
    for row in range(count):
        put_word(log, at + row, slots[row])
    return at + count


@inline
def put_end(log: Log, kind: int, number: int, slots: I32Array, count: int, success: int) -> None:
    """Append the record of a call that ends a plan.

    A negative `number` means one part of a split plan. The record of a part also has the slots of the part.
    """
    is_part = number < 0
    num_slots = count if is_part else 0
    if not has_room(log, HEADER + 1 + num_slots):
        return
    start = log.head
    put_word(log, start + KIND, kind)
    put_word(log, start + SUBJECT, abs(number))
    for word in range(NUM_NEW, NUM_MORE):
        put_word(log, start + word, 0)
    log.num_calls += 1
    place = start + HEADER
    end_call(log, place, put_slots(log, slots, num_slots, put_word(log, place, success + IS_PART * is_part)))
