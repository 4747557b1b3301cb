"""Simulates the LRU device caches in front of the replayed tiers: the blocks that they serve and drop.

After every request, the engine's device holds the request's blocks, no matter whether they were loaded or
computed. Therefore the device's hits and drops depend only on the trace, and are computed before the tiers
are replayed. The result equals a run of an `OffloadingManager` with the policy ``lru``, but takes a fraction
of the time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvoffload.structures.jit import I32Matrix, I64Array, ReadI32Array, ReadI64Array, kernel
from kvoffload.structures.lists import LIST, PREV, UNLISTED, Lists, push_head, unlink
from kvoffload.traces.trace import Trace, offsets_of

_Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True)
class DeviceRun:
    """Hits of the simulated device caches, and the blocks that these devices dropped.

    Attributes:
        served: for each request, the number of its leading blocks that the device of its engine served.
        dropped: all drops of blocks, in order. A drop is given by the index in `Trace.refs` of the block's
            last use before the drop. A block that never entered, because there was no room, also counts as
            dropped.
        offsets: shape ``(requests + 1,)``. Request `i` caused the drops ``dropped[offsets[i]:offsets[i +
            1]]``.
    """

    served: _Int64s
    dropped: _Int64s
    offsets: _Int64s

    def is_served(self, trace: Trace) -> npt.NDArray[np.bool_]:
        """Return a mask of the trace's block references, True for each reference that a device serves."""
        return trace.depths < self.served[trace.request_of]


def run_device(trace: Trace, device_blocks: int) -> DeviceRun:
    """Simulate an LRU device cache with a capacity of `device_blocks` blocks, which may be 0.

    For each request, the device serves its leading resident blocks. Then the missing blocks enter, the first
    one first, until the device is full of blocks of this request. Finally all blocks of the request become
    the most recent blocks, and the first block becomes the most recent of all. Therefore a block is dropped
    before its parent.

    Cost: O(1) per block reference. Memory: 20 bytes per unique block, 8 bytes per reference.
    """
    return _run_requests(trace.refs, trace.offsets, trace.unique_blocks, device_blocks)


def run_devices(trace: Trace, device_blocks: int, engine_of: npt.NDArray[np.int32] | None) -> DeviceRun:
    """Simulate the device caches of several engines. Each device has `device_blocks` blocks.

    Args:
        engine_of: for each request, the number of its engine, counted from 0. None: one engine serves all
            requests.

    Cost: the cost of `run_device`, and O(unique blocks) for each engine.
    """
    if engine_of is None:
        return run_device(trace, device_blocks)
    served, counts = np.zeros((2, trace.requests), np.int64)
    runs = list[tuple[_Int64s, _Int64s, DeviceRun]]()
    for engine in range(int(engine_of.max(initial=-1)) + 1):
        requests = np.flatnonzero(engine_of == engine)
        offsets, places = trace.places_of(requests)
        run = _run_requests(trace.refs[places], offsets, trace.unique_blocks, device_blocks)
        served[requests], counts[requests] = run.served, np.diff(run.offsets)
        runs.append((requests, places, run))
    ends = offsets_of(counts)
    dropped = np.empty(ends[-1], np.int64)
    for requests, places, run in runs:
        begins = np.repeat(ends[:-1][requests] - run.offsets[:-1], counts[requests])
        dropped[begins + np.arange(len(begins))] = places[run.dropped]
    return DeviceRun(served, dropped, ends)


def _run_requests(
    refs: npt.NDArray[np.int32], request_offsets: _Int64s, unique_blocks: int, device_blocks: int
) -> DeviceRun:
    served = np.zeros(len(request_offsets) - 1, np.int64)
    # Large enough: a block is dropped at most once per reference.
    dropped = np.empty(len(refs), np.int64)
    offsets = np.zeros(len(request_offsets), np.int64)
    order, last_use = Lists(unique_blocks, 1), np.zeros(unique_blocks, np.int64)
    _run(refs, request_offsets, order.links, last_use, device_blocks, served, dropped, offsets)
    return DeviceRun(served, dropped[: offsets[-1]], offsets)


class Device:
    """Replays the result of a device simulation one request at a time.

    Args:
        run: result of `run_device` or `run_devices`. If it covers the devices of several engines, only the
            method `served` may be called.
    """

    def __init__(self, trace: Trace, run: DeviceRun) -> None:
        self._refs, self._dropped = trace.refs, run.dropped
        self._begins: list[int] = trace.offsets.tolist()
        self._served: list[int] = run.served.tolist()
        self._offsets: list[int] = run.offsets.tolist()
        self._holds = np.zeros(trace.unique_blocks, np.bool_)

    def contains(self, codes: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
        """Return a mask of the blocks `codes`: True for those on the device after the last `serve`."""
        return self._holds.take(codes)

    def served(self, request: int) -> int:
        """Return the number of the request's leading blocks that are on its device when it arrives."""
        return self._served[request]

    def serve(self, request: int) -> npt.NDArray[np.int32]:
        """Serve the next request; returns the codes of the blocks that the device evicts, warmest first.

        The result does not include blocks that never entered the device because there was no room.
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
    """Simulate the device cache of one engine; return the number of drops.

    Args:
        refs, offsets: the engine's requests, as in `Trace`.
        links: links of a `Lists` for the recency order of resident blocks; empty at the call.
        last_use: scratch memory: for each code, the index in `refs` of the block's last use.
        capacity: blocks of the device.
        served, dropped, ends: receive the results: `served`, `dropped` and `offsets` of a `DeviceRun`.
    """
    sentinel = links.shape[0] - 1
    num_dropped = 0
    for request in range(len(offsets) - 1):
        begin, end = offsets[request], offsets[request + 1]
        found = begin
        while found < end and links[refs[found], LIST] != UNLISTED:
            found += 1
        served[request] = found - begin
        # The request's blocks leave the order first, so that only other blocks are dropped for its blocks.
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
