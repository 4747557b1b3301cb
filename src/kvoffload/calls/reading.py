"""Reader of recorded calls: decodes the records of manager calls in a file.

A record consists of 32-bit words. `core.log` defines its layout. The last words of a record,
`Record.further`, hold arguments or results. Their meaning depends on the call:

- `LOOKUP`: the number `n` of ready blocks, or ``-1 - n`` if the block after the ready blocks is in flight.
- `PREPARE_LOAD`, `PIN`: the slots of the blocks, or only ``-1 - n`` if block `n` was not ready.
- `PREPARE_STORE`: five counts (stored blocks, missing blocks, dropped blocks, refused blocks, used free
  slots), then the slots of the stored blocks, then runs of the missing blocks' rows (positions in the call's
  batch of keys). If there was no room (the call returned ``None``): only -1. If the policy named a wrong
  victim: one number, -2 or less.
- `COMPLETE_LOAD`, `UNPIN`, `COMPLETE_STORE`: 1 for success, 0 for a failed store. If the call completes only
  a part of a plan: 3 instead of 1 and 2 instead of 0, then the slots of the part.
- `KEEP`, `DISCARD`: the number that the call returned.
- `RESET`: the argument ``drop_in_flight``, 0 or 1.

Texts are UTF-8, padded with zero bytes. Requests and plans are numbered from 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from kvoffload.calls.file_format import FrameReader
from kvoffload.core.log import HEADER, KIND_BITS, Call
from kvoffload.structures.index import words_with_hash
from kvoffload.structures.jit import I32Array, U64Matrix


class Record(NamedTuple):
    """A decoded record.

    Attributes:
        number: number of the call, from 1. A record without a call, such as hints, has the number of the next
            call.
        call: kind of the record.
        flags: sum of `ADMITTED` and `FAILED`, or 0.
        subject: number of the request. For a call that ends a plan: number of the plan.
        new_keys: keys that this call appends to the request's path, packed.
        runs: the call's blocks, as runs of positions on the request's path: start and length of each run.
        further: further words: arguments and results, see the module.
        time_ns: time at which the record's last frame was written, nanoseconds since 1970.
        num_words: length of the record.
    """

    number: int
    call: Call
    flags: int
    subject: int
    new_keys: U64Matrix
    runs: list[int]
    further: I32Array
    time_ns: int
    num_words: int


class DamagedError(ValueError):
    """A frame has a correct checksum but invalid words."""


def read_records(reader: FrameReader) -> Iterator[Record]:
    """Yield the records of a file, in order. Raises `DamagedError` if a frame has invalid words."""
    key_words, number = reader.header.key_words, 1
    unread = np.empty(0, np.int32)
    for frame, time_ns in reader.frames():
        words, at = np.concatenate([unread, frame]) if len(unread) else frame, 0
        while (record := _record(words, at, key_words, number, time_ns)) is not None:
            yield record
            number += record.call <= Call.RESET
            at += record.num_words
        unread = words[at:]


def _record(words: I32Array, at: int, key_words: int, number: int, time_ns: int) -> Record | None:
    """Decode the record that starts at ``words[at]``. Return None if the record is incomplete."""
    if at + HEADER > len(words):
        return None
    kind, subject, num_new, num_runs, num_more = words[at : at + HEADER].tolist()
    if min(num_new, num_runs, num_more) < 0:
        raise DamagedError(f"call {number}: negative sizes {num_new}, {num_runs}, {num_more}")
    try:
        call = Call(kind & ((1 << KIND_BITS) - 1))
    except ValueError:
        raise DamagedError(f"call {number}: kind {kind} is unknown") from None
    runs_at = at + HEADER + 2 * max(1, key_words) * num_new
    further_at = runs_at + 2 * num_runs
    end = further_at + num_more
    if end > len(words):
        return None
    return Record(
        number,
        call,
        kind >> KIND_BITS << KIND_BITS,
        subject,
        _keys(words[at + HEADER : runs_at], key_words),
        words[runs_at:further_at].tolist(),
        words[further_at:end],
        time_ns,
        end - at,
    )


def _keys(words: I32Array, key_words: int) -> U64Matrix:
    """Return packed keys. If the file records only hashes, each hash becomes a key of 8 bytes."""
    values = words.copy().view(np.uint64)
    return words_with_hash(values) if key_words == 0 else values.reshape(-1, key_words)
