"""LRU device cache in front of a replay: the blocks that it serves and drops.

After every request the device holds the request's blocks, whether loaded or computed. So hits and drops
depend only on the trace, and are computed before the replay of the tiers. The result equals a run of an
`OffloadingManager` with ``lru``, in a fraction of the time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvoffload.structures.jit import I32Matrix, I64Array, ReadI32Array, ReadI64Array, kernel
from kvoffload.structures.lists import LIST, PREV, UNLISTED, Lists, push_head, unlink
from kvoffload.traces.trace import Trace

_Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True)
class DeviceRun:
    """Hits and drops of a device cache. References are positions in `Trace.refs`.

    Attributes:
        served: shape ``(requests,)``; length of each request's head that was on the device.
        dropped: last reference of each dropped block, in the order of the drops. A block that found no room
            counts as dropped.
        offsets: shape ``(requests + 1,)``; request `i` caused the drops
            ``dropped[offsets[i]:offsets[i + 1]]``.
    """

    served: _Int64s
    dropped: _Int64s
    offsets: _Int64s


def run_device(trace: Trace, device_blocks: int) -> DeviceRun:
    """Run an LRU device cache of `device_blocks` blocks, 0 or more.

    A request hits its leading run of resident blocks. Then its missing blocks enter, the head first, until
    the device is full of this request's blocks. Then all its blocks become the most recent, with the head as
    the most recent. So a block is never more recent than its parent, and the device always holds the head of
    a chain.

    Cost: O(1) per reference. Memory: 12 bytes per unique block, 8 per reference and per drop.
    """
    served = np.zeros(trace.requests, np.int64)
    # A block is dropped at most once per reference.
    dropped = np.empty(trace.block_refs, np.int64)
    offsets = np.zeros(trace.requests + 1, np.int64)
    order = Lists(trace.unique_blocks, 1)
    last_use = np.zeros(trace.unique_blocks, np.int64)
    _run(trace.refs, trace.offsets, order.links, last_use, device_blocks, served, dropped, offsets)
    return DeviceRun(served, dropped[: offsets[-1]], offsets)


class Device:
    """Device cache of a replay, advanced one request at a time. Arguments as for `run_device`."""

    def __init__(self, trace: Trace, device_blocks: int) -> None:
        run = run_device(trace, device_blocks)
        self._refs, self._dropped = trace.refs, run.dropped
        self._begins: list[int] = trace.offsets.tolist()
        self._served: list[int] = run.served.tolist()
        self._offsets: list[int] = run.offsets.tolist()
        self._holds = np.zeros(trace.unique_blocks, np.bool_)

    def contains(self, codes: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
        """Return a mask of the blocks that are on the device after the last served request."""
        return self._holds.take(codes)

    def served(self, request: int) -> int:
        """Return the length of the request's head that is on the device when the request arrives."""
        return self._served[request]

    def serve(self, request: int) -> npt.NDArray[np.int32]:
        """Advance by the next request. Returns the evicted blocks, warmest first.

        Blocks that never entered for lack of room are not returned.
        """
        begin, end = self._begins[request : request + 2]
        places = self._dropped[self._offsets[request] : self._offsets[request + 1]]
        self._holds[self._refs[begin:end]] = True
        dropped = self._refs.take(places)
        self._holds[dropped] = False
        return dropped[places < begin][::-1]


@kernel
def _run(
    refs: ReadI32Array,
    offsets: ReadI64Array,
    links: I32Matrix,
    last_use: I64Array,
    capacity: int,
    served: I64Array,
    dropped: I64Array,
    ends: I64Array,
) -> int:
    sentinel = links.shape[0] - 1
    num_dropped = 0
    for request in range(len(offsets) - 1):
        begin, end = offsets[request], offsets[request + 1]
        found = begin
        while found < end and links[refs[found], LIST] != UNLISTED:
            found += 1
        served[request] = found - begin
        # Other blocks may use the room that the request's own blocks leave free.
        for position in range(begin, end):
            if links[refs[position], LIST] != UNLISTED:
                unlink(links, refs[position])
        fits = min(end, begin + capacity)
        while links[sentinel, LIST] > capacity - (fits - begin):
            coldest = links[sentinel, PREV]
            unlink(links, coldest)
            dropped[num_dropped] = last_use[coldest]
            num_dropped += 1
        for position in range(fits, end):
            dropped[num_dropped] = position
            num_dropped += 1
        for position in range(fits - 1, begin - 1, -1):
            push_head(links, sentinel, refs[position])
            last_use[refs[position]] = position
        ends[request + 1] = num_dropped
    return num_dropped
