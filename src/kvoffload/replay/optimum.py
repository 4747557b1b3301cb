"""The best that any policy could do: what a replay's hit ratio is measured against.

Works on a whole trace, offline. Knows nothing of managers, slots or policies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvoffload.core.jit import (
    I64,
    I64_ARRAY,
    READONLY_I32_ARRAY,
    READONLY_I64_ARRAY,
    U64_ARRAY,
    inline,
    kernel,
)
from kvoffload.errors import ConfigError
from kvoffload.replay.trace import Trace

_Int64s = npt.NDArray[np.int64]

_NEVER = -1


@dataclass(frozen=True)
class OptimumResult:
    """What the optimum reaches on one trace.

    Attributes:
        prefix_hit_blocks: block references served from the cache; no policy serves more.
        blocks_written: blocks stored, of which none is useless: a later request has it.
    """

    prefix_hit_blocks: int
    blocks_written: int


def optimum(trace: Trace, capacity_blocks: int) -> OptimumResult:
    """Run MIN with bypass: of the resident blocks and the request's, keep those that are used soonest.

    Between blocks that are used next by the same request, the deeper one goes. Ids are chained, so a
    block is used no earlier than its parent: MIN never drops a parent before its child, the resident
    blocks of a request are always its head, and the hits are an exact upper bound for prefix hits.

    Args:
        capacity_blocks: Blocks that fit into the cache; `ConfigError` if negative.

    Cost: O(1) per reference; 0.1 s and 30 MB per million references. Source: Belady, IBM Systems
    Journal 5(2), 1966. Differs: decides once per request, and may refuse a block.
    """
    if capacity_blocks < 0:
        raise ConfigError("capacity_blocks", capacity_blocks, "at least 0")
    starts = _tree_starts(trace.block_refs)
    bits = np.zeros(starts[-1], np.uint64)
    hits, written = _min_with_bypass(
        trace.refs, trace.offsets, bits, starts, _next_uses(trace.refs), capacity_blocks
    )
    return OptimumResult(int(hits), int(written))


def infinite(trace: Trace) -> OptimumResult:
    """The optimum of a cache that everything fits into: each block misses once."""
    uses = np.bincount(trace.refs, minlength=trace.unique_blocks)
    return OptimumResult(trace.block_refs - trace.unique_blocks, int(np.count_nonzero(uses > 1)))


def _next_uses(refs: npt.NDArray[np.int32]) -> _Int64s:
    """For each position in `refs`, the next position of the same block, or `_NEVER`."""
    by_block = np.argsort(refs, kind="stable")
    same = refs[by_block[1:]] == refs[by_block[:-1]]
    next_use = np.full(len(refs), _NEVER, np.int64)
    next_use[by_block[:-1][same]] = by_block[1:][same]
    return next_use


def _tree_starts(positions: int) -> _Int64s:
    """Where each level of a tree over `positions` bits begins, the leaves first, and where the last ends."""
    starts, words = [0], max(positions, 1)
    while len(starts) == 1 or words > 1:
        words = (words + 63) // 64
        starts.append(starts[-1] + words)
    return np.array(starts, np.int64)


# A block in the cache is a bit at the *position* in `refs` where it is used next. Positions order blocks
# by next use and, within a request, by depth: the victim of MIN is simply the highest bit. Nothing is
# ever re-sorted, and no entry goes stale as it would in a heap.
#
# The bits form a tree of 64-bit words: a word of level `n + 1` says which words of level `n` are not
# zero, so that the highest bit is found, set or cleared in one step per level.


@inline
def _insert(bits: Any, starts: Any, position: int) -> None:
    for level in range(len(starts) - 1):
        bits[starts[level] + (position >> 6)] |= np.uint64(1) << np.uint64(position & 63)
        position >>= 6


@inline
def _remove(bits: Any, starts: Any, position: int) -> None:
    for level in range(len(starts) - 1):
        word = starts[level] + (position >> 6)
        bits[word] &= ~(np.uint64(1) << np.uint64(position & 63))
        if bits[word] != 0:
            return
        position >>= 6


@inline
def _highest(bits: Any, starts: Any) -> int:
    position = 0
    for level in range(len(starts) - 2, -1, -1):
        word = bits[starts[level] + position]
        position <<= 6
        for step in (32, 16, 8, 4, 2, 1):
            if word >> np.uint64(step) != 0:
                word >>= np.uint64(step)
                position += step
    return position


@kernel((READONLY_I32_ARRAY, READONLY_I64_ARRAY, U64_ARRAY, I64_ARRAY, I64_ARRAY, I64))
def _min_with_bypass(
    refs: Any, offsets: Any, bits: Any, starts: Any, next_use: Any, capacity: int
) -> tuple[int, int]:
    hits = written = resident = 0
    for request in range(len(offsets) - 1):
        begin, end = offsets[request], offsets[request + 1]
        found = begin
        while found < end and bits[found >> 6] >> np.uint64(found & 63) & np.uint64(1):
            _remove(bits, starts, found)
            found += 1
        hits += found - begin
        resident -= found - begin
        # From the head on: a child is used no earlier than its parent, so the first block that is not
        # worth keeping ends the request.
        for position in range(begin, end):
            if next_use[position] == _NEVER:
                break
            if resident == capacity:
                victim = _highest(bits, starts) if capacity > 0 else _NEVER
                if victim < next_use[position]:
                    break
                _remove(bits, starts, victim)
                resident -= 1
            _insert(bits, starts, next_use[position])
            resident += 1
            written += position >= found
    return hits, written
