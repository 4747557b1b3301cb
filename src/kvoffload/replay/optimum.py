"""The best that any policy could do: what a replay's hit ratio is measured against.

Works on a whole trace, offline. Knows nothing of managers, slots or policies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvoffload.core.plans import ON_COMPUTE, ON_DEVICE_EVICTION, STORES
from kvoffload.errors import ConfigError
from kvoffload.replay.device import DeviceRun, run_device
from kvoffload.structures.jit import BoolArray, I64Array, ReadI64Array, U64Array, inline, long_kernel
from kvoffload.traces.trace import Trace

_Int64s = npt.NDArray[np.int64]

_NEVER = -1


@dataclass(frozen=True)
class OptimumResult:
    """What the optimum reaches on one trace.

    Attributes:
        prefix_hit_blocks: block references served, by device and tier together; no policy serves more.
        blocks_written: blocks stored in the tier, of which none is useless: a later request has it. That
            many are enough; whether fewer would do is not said.
        device_hit_blocks: those of the hits that the device served.
    """

    prefix_hit_blocks: int
    blocks_written: int
    device_hit_blocks: int = 0


def optimum(
    trace: Trace, capacity_blocks: int, device_blocks: int = 0, store: str = ON_COMPUTE
) -> OptimumResult:
    """Run MIN with bypass: of the resident blocks and those on offer, keep those that are needed soonest.

    An exact bound: no policy and no admission rule gets more prefix hits out of this capacity, and one
    that knew the future would get these. Why:

    - What an LRU device in front serves and drops depends on the trace alone (`replay.device`). A use
      that it does not serve can be a hit only if the tier has held the block *all the time since the
      block was last on offer*: that is one span of time, worth one hit. Before that it is not needed.
    - No policy serves more such uses than there are spans of which at most `capacity_blocks` overlap.
      Keeping the spans that end soonest finds the most of them: Belady's rule is the classic greedy
      choice of intervals. Between spans that end in the same request the deeper block's ends later.
    - Ids are chained: a request that has a block has its parent, and a device drops a block before its
      parent. So of two spans that end in one request the deeper block's holds the other one, MIN gives
      it up first, what the tier holds of what a request needs is always a leading run, and all of these
      uses are prefix hits.

    The one thing that surprises: with `on-compute`, a block that the device will serve the next time
    need not be held until then, for that request offers it again. Belady's rule by the next use *of the
    tier*, which is the obvious thing to write and is what other simulators call OPT behind a device,
    holds it. It is up to 0.01 of the references below this bound on the recorded traces: not a bound.

    Args:
        capacity_blocks: blocks that fit into the tier; `ConfigError` if negative.
        device_blocks: blocks of an LRU device cache in front, 0 for none; `ConfigError` if negative.
        store: one of `STORES`. ``on-compute``: each request offers all of its blocks, also those that
            the device has. ``on-device-eviction``: a block is offered when the device drops it, or has
            no room for it; what the tier delivers is on the device again. The same without a device.

    Cost: O(1) per reference; 0.15 s and 50 MB per million references. Source: Belady, IBM Systems
    Journal 5(2), 1966. Differs: decides once per request, and may refuse a block.
    """
    for field, value in (("capacity_blocks", capacity_blocks), ("device_blocks", device_blocks)):
        if value < 0:
            raise ConfigError(field, value, "at least 0")
    if store not in STORES:
        raise ConfigError("store", store, f"allowed: {', '.join(STORES)}")
    num_refs = trace.block_refs
    device = run_device(trace, device_blocks) if device_blocks else None
    served = np.zeros(trace.requests, np.int64) if device is None else device.served
    offered, ends = np.arange(num_refs, dtype=np.int64), trace.offsets
    next_place = _next_uses(trace.refs)
    if device is not None:
        if store == ON_DEVICE_EVICTION:
            offered, ends = device.dropped, device.offsets
        _move_idle(next_place, trace.offsets, device)
    starts = _tree_starts(2 * num_refs if device is not None else num_refs)
    hits, written = _min_with_bypass(
        trace.offsets,
        served,
        offered,
        ends,
        next_place,
        np.zeros(starts[-1], np.uint64),
        starts,
        np.zeros(trace.longest_request, np.bool_),
        capacity_blocks,
    )
    on_device = int(served.sum())
    return OptimumResult(on_device + int(hits), int(written), on_device)


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


def _move_idle(next_place: _Int64s, offsets: _Int64s, device: DeviceRun) -> None:
    """Where the device serves the next use, move that place behind all others (see below)."""
    num_refs = len(next_place)
    by_device = np.zeros(num_refs + 1, np.bool_)
    by_device[:-1] = np.arange(num_refs) < np.repeat(offsets[:-1] + device.served, np.diff(offsets))
    # The place that stands for never, -1, finds the last entry, which is False.
    next_place[by_device[next_place]] += num_refs


def _tree_starts(positions: int) -> _Int64s:
    """Where each level of a tree over `positions` bits begins, the leaves first, and where the last ends."""
    starts, words = [0], max(positions, 1)
    while len(starts) == 1 or words > 1:
        words = (words + 63) // 64
        starts.append(starts[-1] + words)
    return np.array(starts, np.int64)


# A block in the cache is a bit at its *place*: the position in the trace where it is used next. Places
# order blocks by next use and, within a request, by depth: the victim of MIN is simply the highest bit.
# Nothing is ever re-sorted, and no entry goes stale as it would in a heap.
#
# A block whose next use the device serves is idle: it is worth nothing to the tier until it is offered
# again by that use. If it is here it may stay for as long as no other block needs the room, which saves
# writing it again; its place is its next use plus the length of the trace, behind all that are worth
# something.
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


@long_kernel
def _min_with_bypass(
    offsets: ReadI64Array,
    served: I64Array,
    offered: I64Array,
    ends: ReadI64Array,
    next_place: I64Array,
    bits: U64Array,
    starts: I64Array,
    was_here: BoolArray,
    capacity: int,
) -> tuple[int, int]:
    idle = len(next_place)
    hits = written = resident = 0
    for request in range(len(offsets) - 1):
        begin, end = offsets[request], offsets[request + 1]
        needed = begin + served[request]
        for position in range(begin, end):
            place = position if position >= needed else position + idle
            here = bits[place >> 6] >> np.uint64(place & 63) & np.uint64(1) != 0
            was_here[position - begin] = here
            if here:
                _remove(bits, starts, place)
                resident -= 1
                hits += position >= needed
        highest = _NEVER
        for i in range(ends[request], ends[request + 1]):
            position = offered[i]
            place = next_place[position]
            new = position < begin or not was_here[position - begin]
            if place == _NEVER or (place >= idle and new):
                continue
            if resident == capacity:
                if highest == _NEVER and capacity > 0:
                    highest = _highest(bits, starts)
                if highest < place:
                    continue
                _remove(bits, starts, highest)
                resident -= 1
            _insert(bits, starts, place)
            resident += 1
            highest = _NEVER
        for i in range(ends[request], ends[request + 1]):
            position = offered[i]
            place = next_place[position]
            if 0 <= place < idle and bits[place >> 6] >> np.uint64(place & 63) & np.uint64(1):
                written += position < begin or not was_here[position - begin]
    return hits, written
