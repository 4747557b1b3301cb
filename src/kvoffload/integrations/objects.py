"""A store of byte objects in tiers, for engines that keep their own RAM.

SGLang's pages and LMCache's chunks are stored as objects. The module knows no engine: for it, an object is a
key and memory addresses. Owns the staging memory, the jobs, and the deadline of each call.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvoffload.structures.keys import Keys
from kvoffload.tiers.contract import NO_JOB, JobResult, Mask, SecondaryTier, TierStats
from kvoffload.tiers.guarded import GuardedTier
from kvoffload.tiers.rate_limited_log import RateLimitedLog
from kvoffload.transfer import Blocks
from kvoffload.transfer.copies import copy_blocks

OBJECT_KEY_BYTES = 32
KEY_BYTES = OBJECT_KEY_BYTES + 2
"""Length of a block's key in bytes. A block's key is the object's key, followed by the position of the
block in the object."""
MOST_PARTS = 1 << 16
STORE_DEADLINES = 5
"""Deadline of a store, divided by the deadline of a load."""
_BUFFERS = 4
"""Number of buffers in the staging memory. A call uses two of them: it copies one while a tier reads or
writes the other."""
_BATCHES_IN_FLIGHT = 2
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0001, 0.001
_DRAIN_S = 0.005
"""Longest time that `clear` waits for one tier, in seconds. Meanwhile it holds the lock, and calls of
other threads wait."""

Addresses = npt.NDArray[np.int64]


class Extents(NamedTuple):
    """The memory for a batch of objects that have equal sizes.

    An object consists of one or more extents, contiguous pieces of memory.

    Attributes:
        addresses: addresses of each object's extents, in order: shape ``(objects, extents)``, int64.
        sizes: bytes of each extent, equal for all objects.
    """

    addresses: Addresses
    sizes: tuple[int, ...]

    @property
    def object_bytes(self) -> int:
        """Bytes of an object."""
        return sum(self.sizes)

    def take(self, rows: slice | npt.NDArray[np.intp]) -> Extents:
        """Return the extents of the objects in these rows."""
        return Extents(self.addresses[rows], self.sizes)

    @classmethod
    def of_buffers(cls, addresses: Sequence[int], object_bytes: int) -> Extents:
        """Return the extents of objects that are contiguous in memory."""
        return cls(np.array(addresses, np.int64).reshape(-1, 1), (object_bytes,))


@dataclass(eq=False)
class ObjectPath:
    """Objects of one request, in order. The policies of the tiers learn from paths. Created by
    `ObjectStore.open_path`.

    Attributes:
        records: for each tier, its record of the path, in the order of the tiers.
        keys: keys of all blocks of the path, in order.
    """

    records: list[object]
    keys: list[bytes] = field(default_factory=list)


@dataclass(eq=False)
class _Job:
    """A job of tier number `lane` for the blocks `at` of a batch. `result` is None while the job runs."""

    lane: int
    number: int
    at: npt.NDArray[np.intp]
    result: JobResult | None = None


@dataclass(eq=False)
class _Batch:
    """Objects of a load or store that use one buffer.

    Attributes:
        objects: positions of the objects in the arguments of the call.
        keys: keys of all blocks. Each object has `parts` consecutive blocks.
        ok: mask of the blocks that are finished.
        tried: for each tier, a mask of the blocks that were requested from the tier.
        pool: memory that jobs read or fill. `_give_buffer` sets it.
        rows: for each block, its row in `pool`.
        is_staged: True if `pool` is a staging buffer, False if it is the caller's memory.
        jobs: jobs in flight.
        awaits_room: True if blocks could not be requested yet, because their tier had no room for more reads.
    """

    objects: slice
    keys: Keys
    parts: int
    ok: Mask
    tried: list[Mask]
    pool: Blocks
    rows: npt.NDArray[np.int64]
    is_staged: bool = True
    jobs: list[_Job] = field(default_factory=list)
    awaits_room: bool = False

    @property
    def ok_objects(self) -> Mask:
        """Mask of the objects whose blocks are all finished."""
        return _whole(self.ok, self.parts)


class ObjectStore:
    """A store of byte objects in tiers.

    If a call reaches its deadline, it returns with a partial result.

    An object is stored as blocks of `block_bytes`; the last block is padded. An object is present if all its
    blocks are present, even if different calls of `store` wrote them. The tiers verify each block that they
    read. A load tries the tiers in order. A store writes to all tiers.

    **Copies.** A load reads into staging memory, then copies the objects that are complete and sound to the
    caller's addresses. So a job that ends after the deadline cannot write to memory that the caller has
    reused. A store first copies objects into staging memory. With zero copy the tiers use the caller's memory
    directly; each extent must then have `block_bytes` bytes.

    Args:
        tiers: the tiers, from the fastest to the slowest. From now on the store owns them.
        block_bytes: size of a block, equal in all tiers.
        staging_bytes: size limit of the staging memory. An object that is larger is neither stored nor
            loaded.
        deadline_s: longest duration of a load, in seconds. A store may take `STORE_DEADLINES` times as long.
        zero_copy: True: use zero copy; then a call may wait without limit for a disk that hangs. False: do
            not use it. None: use it if every tier is shared.
        clock: function that returns monotonic seconds.

    Thread: any; only one thread at a time calls the tiers. No call raises an exception if a tier fails.
    """

    def __init__(
        self,
        tiers: Sequence[SecondaryTier],
        *,
        block_bytes: int,
        staging_bytes: int,
        deadline_s: float,
        zero_copy: bool | None = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tiers = [GuardedTier(tier, clock) for tier in tiers]
        self.block_bytes, self.deadline_s = block_bytes, deadline_s
        self._zero_copy = all(tier.shared for tier in self.tiers) if zero_copy is None else zero_copy
        self._clock = clock
        self._staging = _Staging(staging_bytes, block_bytes)
        self._lock = threading.Lock()
        self._jobs: dict[tuple[int, int], _Job] = {}
        self._closed = False
        self._num_clears = 0
        self._log = RateLimitedLog("kvoffload.objects")
        self.num_late = 0

    # ---- paths

    def open_path(self) -> ObjectPath:
        """Begin a path. Until `finish_path`, a `store` with this path evicts none of its objects."""
        with self._lock:
            return ObjectPath([tier.begin_request("") for tier in self.tiers])

    def extend_path(self, path: ObjectPath, keys: Sequence[bytes], object_bytes: int) -> None:
        """Append objects to a path."""
        if self.parts_of(object_bytes) > MOST_PARTS:
            return
        new = self._block_keys(keys, object_bytes)
        path.keys += new
        packed, whole = Keys.pack(new, KEY_BYTES), Keys.pack(path.keys, KEY_BYTES)
        with self._lock:
            for tier, record in zip(self.tiers, path.records, strict=True):
                tier.extend_path(record, whole)
                tier.contains(packed, record)

    def finish_path(self, path: ObjectPath) -> None:
        """End a path, and record one use of each of its objects.

        Policies that order by recency then have the first object of the path as the most recent one.
        """
        packed = Keys.pack(path.keys, KEY_BYTES)
        with self._lock:
            for tier, record in zip(self.tiers, path.records, strict=True):
                tier.finish_request(record, packed)

    # ---- objects

    def find(self, keys: Sequence[bytes], object_bytes: int) -> Mask:
        """Return a mask of the present objects. An object is present if each of its blocks is in some tier.

        Probes shared tiers for blocks whose presence is unknown to this process. Waits for the replies, but
        no longer than the longest `probe_timeout_s` of these tiers.
        """
        blocks = None if self._closed else self._blocks_of(keys, object_bytes)
        if blocks is None:
            return np.zeros(len(keys), np.bool_)
        is_present = np.zeros(len(blocks), np.bool_)
        probes = list[_Job]()
        until = self._clock()
        with self._lock:
            for lane, tier in enumerate(self.tiers):
                tier.missed(blocks)
                unknown = tier.unknown(blocks) if tier.shared else is_present
                if unknown.any() and (number := tier.submit_probe(blocks.take(unknown))) != NO_JOB:
                    probes.append(self._begin(lane, number, np.flatnonzero(unknown)))
                    until = max(until, self._clock() + tier.probe_timeout_s)
        self._wait(lambda: all(job.result is not None for job in probes), until)
        return self._present(blocks, self.parts_of(object_bytes))

    def stored(self, keys: Sequence[bytes], object_bytes: int) -> Mask:
        """Return a mask of the objects that are present as far as this process knows. Sends no probes.

        Directly after `store`, the mask is False for objects that a tier refused or failed to store.
        """
        if (blocks := self._blocks_of(keys, object_bytes)) is None:
            return np.zeros(len(keys), np.bool_)
        return self._present(blocks, self.parts_of(object_bytes))

    def load(self, keys: Sequence[bytes], memory: Extents) -> Mask:
        """Read objects into `memory`. Returns a mask of the objects that were found complete and sound.

        Without zero copy the memory of the other objects is unchanged. With zero copy its content is
        undefined.
        """
        until = self._clock() + self.deadline_s
        return self._run(
            keys, memory, until, self._begin_reads, lambda batch: self._end_load(batch, memory, until)
        )

    def store(self, keys: Sequence[bytes], memory: Extents, path: ObjectPath | None = None) -> Mask:
        """Write objects from `memory` to all tiers. Returns a mask of the objects that need no retry.

        - True: each block of the object is in some tier, or was refused by an admission rule or a policy.
        - False: a tier was busy, was full or failed, the deadline passed, or another thread called `clear`.
        """
        num_clears = self._num_clears
        until = self._clock() + STORE_DEADLINES * self.deadline_s

        def begin(batch: _Batch) -> None:
            if batch.is_staged:
                self._gather(batch, memory)
            self._begin_writes(batch, path, until, num_clears)

        return self._run(keys, memory, until, begin, lambda batch: self._end_jobs(batch, until))

    def delete(self, keys: Sequence[bytes], object_bytes: int) -> None:
        """Forget objects in all tiers."""
        if (blocks := self._blocks_of(keys, object_bytes)) is not None:
            with self._lock:
                for tier in self.tiers:
                    tier.delete(blocks)

    def clear(self, timeout_s: float = 10.0) -> bool:
        """Forget all objects. In a shared tier they are forgotten for all machines.

        A store that is running in another thread writes no further objects, because they may have been
        computed with the old weights. Returns False if a tier has not confirmed within `timeout_s`.

        Args:
            timeout_s: longest wait for the tiers, in seconds. Calls of other threads continue meanwhile.
        """
        with self._lock:
            self._num_clears += 1
            for tier in self.tiers:
                tier.clear()
        unconfirmed = [*self.tiers]

        def is_confirmed() -> bool:
            unconfirmed[:] = [tier for tier in unconfirmed if not tier.drain(_DRAIN_S)]
            return not unconfirmed

        return self._wait(is_confirmed, self._clock() + timeout_s)

    def stats(self) -> list[TierStats]:
        """Return a copy of the counters of each tier."""
        with self._lock:
            return [tier.stats() for tier in self.tiers]

    def close(self) -> None:
        """Make objects durable and close the tiers. Calls in other threads end with misses. Idempotent."""
        with self._lock:
            for tier in self.tiers:
                tier.close()
            # Set after the tiers are closed: until then calls must wait for jobs that use their memory.
            self._closed = True

    # ---- batches

    def _run(
        self,
        keys: Sequence[bytes],
        memory: Extents,
        until: float,
        begin: Callable[[_Batch], None],
        end: Callable[[_Batch], object],
    ) -> Mask:
        """Transfer objects in batches, several at once. Returns a mask of the finished objects.

        Args:
            begin: function that starts the jobs of a batch.
            end: function that waits for the jobs of a batch, until the deadline.
        """
        ok = np.zeros(len(keys), np.bool_)
        running = deque[_Batch]()

        def end_first() -> None:
            batch = running.popleft()
            end(batch)
            self._give_back(batch)
            ok[batch.objects] = batch.ok_objects

        for batch in self._batches(keys, memory):
            while not self._give_buffer(batch, memory):
                if running:
                    end_first()
                elif not self._may_wait(until):
                    return ok
            begin(batch)
            running.append(batch)
            if len(running) >= _BATCHES_IN_FLIGHT:
                end_first()
        while running:
            end_first()
        return ok

    def parts_of(self, object_bytes: int) -> int:
        """Return the number of blocks of an object."""
        return max(1, -(-object_bytes // self.block_bytes))

    def _block_keys(self, keys: Sequence[bytes], object_bytes: int) -> list[bytes]:
        ends = [number.to_bytes(2, "little") for number in range(self.parts_of(object_bytes))]
        return [key + end for key in keys for end in ends]

    def _blocks_of(self, keys: Sequence[bytes], object_bytes: int) -> Keys | None:
        """Return the keys of all blocks of the objects with these keys.

        Returns None if there are no objects, or if an object has more than `MOST_PARTS` blocks.
        """
        if not len(keys) or self.parts_of(object_bytes) > MOST_PARTS:
            return None
        return Keys.pack(self._block_keys(keys, object_bytes), KEY_BYTES)

    def _present(self, blocks: Keys, parts: int) -> Mask:
        is_present = np.zeros(len(blocks), np.bool_)
        with self._lock:
            for tier in self.tiers:
                is_present |= tier.contains(blocks)
        return _whole(is_present, parts)

    def _is_direct(self, memory: Extents) -> bool:
        return self._zero_copy and set(memory.sizes) == {self.block_bytes}

    def _batches(self, keys: Sequence[bytes], memory: Extents) -> Iterator[_Batch]:
        """Divide the objects of a call into batches that fit in a buffer. They get buffers later."""
        parts = self.parts_of(memory.object_bytes)
        if self._closed or not self.tiers or not len(keys):
            return
        if parts > MOST_PARTS:
            text = "an object of %d bytes has more than %d blocks of %d bytes: use larger blocks"
            self._log.error("too many", text, memory.object_bytes, MOST_PARTS, self.block_bytes)
            return
        each = len(keys)
        if not self._is_direct(memory):
            each = self._staging.objects_in_a_buffer(parts)
            if each == 0:
                text = "an object of %d bytes does not fit into the staging memory of %d bytes"
                self._log.error("too large", text, memory.object_bytes, self._staging.limit_bytes)
                return
        for start in range(0, len(keys), each):
            some = slice(start, min(start + each, len(keys)))
            blocks = Keys.pack(self._block_keys(keys[some], memory.object_bytes), KEY_BYTES)
            ok, *tried = (np.zeros(len(blocks), np.bool_) for _ in range(1 + len(self.tiers)))
            no_memory = np.empty((0, self.block_bytes), np.uint8)
            yield _Batch(some, blocks, parts, ok, tried, no_memory, np.arange(len(blocks)))

    def _give_buffer(self, batch: _Batch, memory: Extents) -> bool:
        """Assign memory to a batch. Returns False if all staging memory is in use."""
        if self._is_direct(memory):
            batch.is_staged = False
            batch.pool, batch.rows = _view(memory.addresses[batch.objects].reshape(-1), self.block_bytes)
            return True
        with self._lock:
            self._poll()
            buffer = self._staging.take(len(batch.keys))
        if buffer is not None:
            batch.pool = buffer
        return buffer is not None

    def _may_wait(self, until: float) -> bool:
        """Sleep for a moment and return True. At the deadline or after `close`, return False at once."""
        if self._closed or self._clock() >= until:
            return False
        time.sleep(_LONGEST_PAUSE_S)
        return True

    def _gather(self, batch: _Batch, memory: Extents) -> None:
        """Copy objects into the staging buffer."""
        for inside, outside, rows in self._copies(batch, memory, np.arange(len(batch.keys) // batch.parts)):
            copy_blocks(outside, rows, inside, np.arange(len(inside)))

    def _scatter(self, batch: _Batch, memory: Extents, which: npt.NDArray[np.intp]) -> None:
        """Copy the objects at positions `which` of a batch from the staging buffer to the caller's memory."""
        if len(which):
            for inside, outside, rows in self._copies(batch, memory, which):
                copy_blocks(inside, which, outside, rows)

    def _copies(
        self, batch: _Batch, memory: Extents, which: npt.NDArray[np.intp]
    ) -> Iterator[tuple[Blocks, Blocks, npt.NDArray[np.int64]]]:
        """Yield, for each extent: its part of the staging buffer as rows, a view of the caller's memory, and
        the rows of this view for the objects at the positions `which`.
        """
        flat = batch.pool.reshape(-1)
        count, stride = len(batch.keys) // batch.parts, batch.parts * self.block_bytes
        addresses = memory.addresses[batch.objects][which]
        start = 0
        for column, size in enumerate(memory.sizes):
            inside = np.ndarray((count, size), np.uint8, flat, start, (stride, 1))
            outside, rows = _view(addresses[:, column], size)
            yield inside, outside, rows
            start += size

    # ---- jobs

    def _begin(self, lane: int, number: int, at: npt.NDArray[np.intp]) -> _Job:
        job = self._jobs[lane, number] = _Job(lane, number, at)
        return job

    def _begin_reads(self, batch: _Batch) -> None:
        """Start to read each missing block from the first tier that has it, of the tiers not tried before."""
        with self._lock:
            missing, waiting = ~batch.ok, np.zeros(len(batch.ok), np.bool_)
            for job in batch.jobs:
                missing[job.at] = False
            for lane, tier in enumerate(self.tiers):
                wanted = missing & ~batch.tried[lane]
                if not wanted.any():
                    continue
                at = np.flatnonzero(wanted & tier.contains(batch.keys))
                room = tier.read_room(batch.keys.take(at))
                waiting[at[room:]] = True
                if not len(at := at[:room]):
                    continue
                batch.tried[lane][at] = True
                number = tier.submit_read(batch.keys.take(at), batch.pool, batch.rows[at])
                if number != NO_JOB:
                    batch.jobs.append(self._begin(lane, number, at))
                    missing[at] = False
            batch.awaits_room = bool((waiting & missing).any())

    def _end_load(self, batch: _Batch, memory: Extents, until: float) -> None:
        while batch.jobs or batch.awaits_room:
            has_waited = self._end_jobs(batch, until) if batch.jobs else self._may_wait(until)
            if not has_waited or self._clock() >= until:
                break
            with self._lock:
                self._poll()  # jobs of another call may have ended
            self._begin_reads(batch)
        if batch.is_staged:
            self._scatter(batch, memory, np.flatnonzero(batch.ok_objects))

    def _begin_writes(self, batch: _Batch, path: ObjectPath | None, until: float, num_clears: int) -> None:
        """Start to write to each tier the blocks that it does not have. Waits until `until` for room in its
        queue.

        Args:
            num_clears: number of `clear` calls before the store began. If the number grows, the store ends.
        """
        for lane, tier in enumerate(self.tiers):
            record = None if path is None else path.records[lane]
            with self._lock:
                left = np.flatnonzero(~tier.contains(batch.keys))
                batch.ok |= ~np.isin(np.arange(len(batch.keys)), left)
            while len(left):
                with self._lock:
                    self._poll()
                    if self._num_clears != num_clears:
                        return
                    room = min(tier.queue_room, len(left))
                    if room:
                        self._offer(batch, lane, tier, left[:room], record)
                left = left[room:]
                if room == 0 and not self._may_wait(until):
                    break

    def _offer(
        self, batch: _Batch, lane: int, tier: GuardedTier, at: npt.NDArray[np.intp], record: object | None
    ) -> None:
        before = tier.stats()
        number, accepted = tier.submit_write(batch.keys.take(at), batch.pool, batch.rows[at], record)
        if number != NO_JOB:
            batch.jobs.append(self._begin(lane, number, at[accepted]))
        after = tier.stats()
        if (after.dropped, after.failed, after.errors) == (before.dropped, before.failed, before.errors):
            # The tier's rule or policy has refused the blocks, or another call is writing them.
            batch.ok[at[~accepted]] = True

    def _end_jobs(self, batch: _Batch, until: float) -> bool:
        """Wait for the jobs of a batch. Returns False at the deadline.

        With zero copy, waits without a deadline, because the jobs use the caller's memory.
        """
        deadline = until if batch.is_staged else math.inf
        have_ended = self._wait(lambda: all(job.result is not None for job in batch.jobs), deadline)
        self._collect(batch)
        return have_ended

    def _collect(self, batch: _Batch) -> None:
        """Remove the ended jobs of a batch, and mark the blocks that they have transferred as finished."""
        with self._lock:
            for job in [job for job in batch.jobs if job.result is not None]:
                assert job.result is not None
                batch.ok[job.at[job.result.ok]] = True
                batch.jobs.remove(job)

    def _give_back(self, batch: _Batch) -> None:
        """Release the staging buffer of a batch. If jobs still use it, it is released when they end."""
        if not batch.is_staged:
            return
        with self._lock:
            if batch.jobs:
                self.num_late += 1
                self._log.warn(
                    "late", "%d jobs exceeded their deadline of %g s", len(batch.jobs), self.deadline_s
                )
            # Another thread may have polled since `_collect`. A job with a result no longer uses the buffer.
            if unended := [(job.lane, job.number) for job in batch.jobs if job.result is None]:
                self._staging.keep(batch.pool, unended)
            else:
                self._staging.put(batch.pool)

    def _poll(self) -> None:
        """Collect the results of the tiers. The caller holds the lock."""
        for lane, tier in enumerate(self.tiers):
            for result in tier.finished():
                job = self._jobs.pop((lane, result.job), None)
                if job is not None:
                    job.result = result
                self._staging.ended((lane, result.job))

    def _wait(self, condition: Callable[[], bool], until: float) -> bool:
        """Poll the tiers until `condition` is True. Returns False at the deadline or after `close`."""
        pause_s = _FIRST_PAUSE_S
        while True:
            with self._lock:
                self._poll()
                if condition():
                    return True
            if self._closed or self._clock() >= until:
                return False
            time.sleep(pause_s)
            pause_s = min(2.0 * pause_s, _LONGEST_PAUSE_S)


class _Staging:
    """Page-aligned buffers of whole blocks, allocated on demand up to a limit. Thread: one at a time."""

    def __init__(self, limit_bytes: int, block_bytes: int) -> None:
        self.limit_bytes, self._block_bytes = limit_bytes, block_bytes
        self._rows = max(1, limit_bytes // _BUFFERS // block_bytes)
        self._free: list[Blocks] = []
        self._allocated = 0
        self._late: list[tuple[Blocks, set[tuple[int, int]]]] = []

    def objects_in_a_buffer(self, parts: int) -> int:
        """Return how many objects of `parts` blocks fit in one buffer; 0 if an object exceeds the limit."""
        if parts * self._block_bytes > self.limit_bytes:
            return 0
        return max(1, self._rows // parts)

    def take(self, num_rows: int) -> Blocks | None:
        """Return a buffer with at least `num_rows` rows; None while all memory is in use."""
        for position, buffer in enumerate(self._free):
            if len(buffer) >= num_rows:
                return self._free.pop(position)
        size = max(num_rows, self._rows) * self._block_bytes
        while self._allocated + size > self.limit_bytes and self._free:
            self._allocated -= self._free.pop().nbytes
        if self._allocated and self._allocated + size > self.limit_bytes:
            return None
        memory = mmap.mmap(-1, size)
        self._allocated += size
        return np.frombuffer(memory, np.uint8).reshape(-1, self._block_bytes)

    def put(self, buffer: Blocks) -> None:
        """Release a buffer."""
        self._free.append(buffer)

    def keep(self, buffer: Blocks, jobs: Sequence[tuple[int, int]]) -> None:
        """Release a buffer only after `ended` has been called for all these jobs, which still use it."""
        self._late.append((buffer, {*jobs}))

    def ended(self, job: tuple[int, int]) -> None:
        """Record the end of a job. Releases the buffer kept for the job, unless another job still uses it."""
        for buffer, jobs in [entry for entry in self._late if job in entry[1]]:
            jobs.discard(job)
            if not jobs:
                self._late = [entry for entry in self._late if entry[0] is not buffer]
                self._free.append(buffer)


def _whole(blocks: Mask, parts: int) -> Mask:
    """Convert a mask of blocks to a mask of objects, which is True if all blocks of the object are True."""
    whole: Mask = np.logical_and.reduce(blocks.reshape(-1, parts), axis=1)
    return whole


def _view(addresses: Addresses, size: int) -> tuple[Blocks, npt.NDArray[np.int64]]:
    """Return memory at `addresses` as the rows of one array, `size` bytes each, and the row of each address.

    The array also has rows between the addresses. Each row begins one stride after the previous row, so rows
    may overlap. The stride divides all distances between the addresses. The caller must keep the memory
    alive.
    """
    first = int(addresses.min())
    offsets = addresses - first
    stride = math.gcd(4096, *(int(offset) for offset in np.unique(offsets)))
    num_rows = int(offsets.max()) // stride + 1
    memory: Any = (ctypes.c_uint8 * (int(offsets.max()) + size)).from_address(first)
    return np.ndarray((num_rows, size), np.uint8, memory, 0, (stride, 1)), offsets // stride
