"""The sample of a shadow: one block in `one_in`, chosen by the hash of its key.

A key stands for the whole prefix that ends in its block, so all requests with a prefix agree about which of
its blocks are sampled, and the sampled blocks of a request are again a chain: a shorter prefix for a smaller
cache. A sample of whole requests or sessions would need many more of them: it takes or leaves a shared system
prompt whole.

Source: SHARDS, Waldspurger et al., FAST'15.
"""

from __future__ import annotations

import numpy as np

from kvoffload.core.request import FULL, HASH, Path, RequestContext, place_of
from kvoffload.structures.index import copy_key, remove_hashed
from kvoffload.structures.jit import I64Array, inline, kernel


class Sampled:
    """The sampled blocks of one request. Memory is reused: `take` replaces the request by another.

    Attributes:
        request: a context whose path has the sampled keys, in prefix order.
        num_blocks: number of sampled blocks.
        first: number of leading sampled blocks that were not looked up, because the device holds them.
        end: end of the looked-up sampled blocks. Later blocks, such as generated blocks, were only stored.
        num_looked_up: number of all looked-up blocks of the request, sampled or not.
    """

    __slots__ = ("end", "first", "num_blocks", "num_looked_up", "request")

    def __init__(self, key_bytes: int) -> None:
        self.request = RequestContext("", key_bytes)
        self.num_blocks = self.first = self.end = self.num_looked_up = 0

    def take(
        self, ctx: RequestContext, one_in: int, seed: int, num_skipped: int = -1, asked_end: int = -1
    ) -> None:
        """Sample the path of a request.

        Args:
            num_skipped: number of leading blocks that were not looked up; -1: the blocks before the request's
                first `lookup`, or all without one.
            asked_end: position after the last looked-up block; -1: the end of the path.

        Cost: a nanosecond for each block of the path.
        """
        while True:
            own = self.request
            result = _sample(ctx.memory, own.memory, one_in, seed, num_skipped, asked_end, _RESULT)
            if result != FULL:
                break
            self.request = RequestContext("", ctx.key_bytes, None, 2 * own.room)
        self.request.hints = ctx.hints
        self.num_blocks, (self.first, self.end, self.num_looked_up) = result, _RESULT.tolist()


_RESULT = np.zeros(3, np.int64)


@inline
def _is_sampled(h: np.uint64, one_in: int, seed: int) -> bool:
    # Mixed once more, because an index uses the same bits of the hash.
    mixed = (h ^ np.uint64(seed)) * np.uint64(0x94D049BB133111EB)
    mixed = (mixed ^ (mixed >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    is_sampled: bool = (mixed >> np.uint64(32)) * np.uint64(one_in) < np.uint64(1 << 32)
    return is_sampled


@kernel
def _sample(
    path: Path, sample: Path, one_in: int, seed: int, num_skipped: int, asked_end: int, result: I64Array
) -> int:
    """Replace the keys of `sample` by the sampled keys of a path; return their number, or `FULL`.

    `result`: number of sampled keys that are on the device, end of the looked-up sampled keys, and number of
    all looked-up keys.
    """
    records, first, end, length, room = path.records, 0, 0, 0, sample.records.shape[0]
    on_device = min(num_skipped, path.length)
    if num_skipped < 0:
        on_device = path.on_device if path.was_asked else path.length
    asked = path.length if asked_end < 0 else max(on_device, min(asked_end, path.length))
    for position in range(sample.length - 1, -1, -1):
        remove_hashed(sample.index, position, sample.records[position, HASH])
    sample.length = 0
    for position in range(path.length):
        if not _is_sampled(records[position, HASH], one_in, seed):
            continue
        if length == room:
            sample.length = length
            return FULL
        copy_key(sample.index.keys, length, path.index.keys, position)
        length += place_of(sample, length, length) == length
        first += position < on_device
        end += position < asked
    sample.length, sample.on_device = length, first
    result[0], result[1], result[2] = first, end, asked - on_device
    return length
