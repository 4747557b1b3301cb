"""The sample of a shadow: one block in `one_in`, chosen by the hash of its key.

A key identifies its block and the whole prefix before the block. Therefore, if two requests share a prefix,
the same blocks of the prefix are sampled in both. The sampled blocks of a request form a path that is shorter
by the factor `one_in`, and the shadow's cache is smaller by the same factor. A sample of whole requests or
sessions would need to be much larger, because it would contain all blocks of a shared system prompt, or none.

A sample holds 64-bit hashes of keys. The keys in a shadow have 8 bytes, and the same hashes as the original
keys. Therefore policies and indexes make the same decisions as with the original keys.

Source: SHARDS, Waldspurger et al., FAST'15.
"""

from __future__ import annotations

import numpy as np

from kvoffload.core.hints import NO_HINTS, Hints, Labels
from kvoffload.core.kernels.whole_requests import ASKED_END, END_LABEL, END_ROW, LABEL, NUM_COLUMNS, ON_DEVICE
from kvoffload.core.request import FULL, HASH, Path, RequestContext
from kvoffload.structures.index import words_with_hash
from kvoffload.structures.jit import I64Matrix, U64Array, inline, kernel
from kvoffload.structures.keys import Keys
from kvoffload.structures.structs import Struct

KEY_BYTES = 8
"""Length of the keys in shadows, in bytes."""
MOST_REQUESTS, ROOM, MOST_ROOM = 4096, 16384, 65536
"""`MOST_REQUESTS`: limit of the requests in a sample. `ROOM`: initial capacity of a sample, in blocks.
`MOST_ROOM`: limit of the capacity, except for a sample of one request."""


class Recorded(Struct):
    """The sampled blocks of requests, for kernels.

    Attributes:
        hashes: hashes of the sampled keys, one request after the other; the keys of a request are in prefix
            order.
        requests: a row for each request with sampled blocks; `whole_requests.live_all` documents the columns.
        num_keys, num_requests: number of elements of `hashes`, and of rows of `requests`, that are in use.
        num_looked_up: number of looked-up blocks of all requests, sampled or not.
        longest: largest number of sampled blocks of a request.
        one_in: one block in this many is sampled.
        seed: selects the sampled blocks.
    """

    hashes: U64Array
    requests: I64Matrix
    num_keys: int
    num_requests: int
    num_looked_up: int
    longest: int
    one_in: int
    seed: int


class Sample:
    """The sampled blocks of the requests that were added since the last `clear`.

    Args:
        one_in, seed: see `Recorded`.

    Attributes:
        state: the sampled blocks of the requests.
        hints: the hints of each request with sampled blocks.

    Thread: one at a time. Memory: at most `MOST_ROOM` hashes, with one exception: if the sample is empty, a
    request with more hashes is recorded, too.
    """

    def __init__(self, one_in: int, seed: int) -> None:
        self.state = Recorded(
            hashes=np.zeros(ROOM, np.uint64),
            requests=np.zeros((MOST_REQUESTS, NUM_COLUMNS), np.int64),
            one_in=one_in,
            seed=seed,
        )
        self.hints = list[Hints]()

    def take(self, ctx: RequestContext, labels: Labels, num_skipped: int = -1, asked_end: int = -1) -> bool:
        """Add a request; return False if there is no room.

        Args:
            ctx: a finished request.
            labels: assigns numbers to the hints.
            num_skipped: number of leading blocks that were not looked up. -1 means the blocks before the
                request's first `lookup`, or all blocks if there was no lookup.
            asked_end: index after the last looked-up block. -1 means the end of the request's path.

        Cost: a nanosecond for each block of the path.
        """
        state, hints = self.state, ctx.hints
        result = _record(ctx.memory, state.memory, num_skipped, asked_end)
        while result == FULL:
            if not self._grow(ctx.length):
                return False
            state = self.state
            result = _record(ctx.memory, state.memory, num_skipped, asked_end)
        if result:
            self.hints.append(hints)
            if hints is not NO_HINTS:
                row = state.requests[result - 1]
                row[LABEL], row[END_LABEL] = labels.number(hints.at_begin), labels.number(hints)
        return True

    def _grow(self, num_more: int) -> bool:
        """Enlarge the sample for `num_more` more blocks; return False if it already has its largest size."""
        old = self.state
        if old.num_requests == MOST_REQUESTS or (old.num_requests and len(old.hashes) >= MOST_ROOM):
            return False
        room = max(2 * len(old.hashes), 1 << (old.num_keys + num_more - 1).bit_length())
        if old.num_requests:
            room = min(room, MOST_ROOM)
        hashes = np.zeros(room, np.uint64)
        hashes[: old.num_keys] = old.hashes[: old.num_keys]
        self.state = Recorded(**{**old.contents(), "hashes": hashes})
        return True

    def keys(self) -> Keys:
        """Return the keys that shadows use for the recorded blocks. Their hashes are `Recorded.hashes`."""
        return Keys(words_with_hash(self.state.hashes[: self.state.num_keys]), KEY_BYTES)

    def clear(self) -> None:
        """Forget all requests."""
        state = self.state
        state.num_keys = state.num_requests = state.num_looked_up = state.longest = 0
        self.hints.clear()


@inline
def _mixed(seed: int) -> np.uint64:
    product = (np.uint64(seed) + np.uint64(0x9E3779B97F4A7C15)) * np.uint64(0xD6E8FEB86659FD93)
    mixed: np.uint64 = product ^ (product >> np.uint64(32))
    return mixed


@kernel
def _record(path: Path, sample: Recorded, num_skipped: int, asked_end: int) -> int:
    """Append the sampled hashes of a path.

    Returns the number of requests in the sample; 0 if no block of the path is sampled; `FULL` if there is no
    room.
    """
    records, hashes, seed = path.records, sample.hashes, _mixed(sample.seed)
    limit = np.uint64(0xFFFFFFFFFFFFFFFF) // np.uint64(sample.one_in)
    count, room = path.length, hashes.shape[0]
    on_device = min(num_skipped, count)
    if num_skipped < 0:
        on_device = path.on_device if path.was_asked else count
    asked = count if asked_end < 0 else max(on_device, min(asked_end, count))
    if sample.num_requests == sample.requests.shape[0]:
        return FULL
    start = sample.num_keys
    end, first, asked_to = start, start, start
    for position in range(count):
        h = records[position, HASH]
        # Compares a product of the hash, because the index and policies already use the bits of the hash.
        if (h ^ seed) * np.uint64(0x94D049BB133111EB) <= limit:
            if end == room:
                return FULL
            hashes[end] = h
            end += 1
            first += position < on_device
            asked_to += position < asked
    sample.num_looked_up += asked - on_device
    if end == start:
        return 0
    request = sample.requests[sample.num_requests]
    request[END_ROW], request[ON_DEVICE], request[ASKED_END] = end, first - start, asked_to - start
    request[LABEL] = request[END_LABEL] = 0
    sample.num_keys, sample.longest = end, max(sample.longest, end - start)
    sample.num_requests += 1
    return sample.num_requests
