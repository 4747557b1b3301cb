"""The thread that makes blocks durable and decides when a slot may be written again.

Owns the order of operations on which the guarantees after a crash depend:

1. A slot is written only after the removal of its former block is durable.
2. A block's entry is appended to the journal only after the block's data are durable.
3. A write is reported as finished only after the block's entry is durable.

While batches follow each other, one sync serves two of them: it makes the entries of the first batch durable,
and the data of the next batch.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from kvoffload.tiers.disk.chunk import NO_STAMPS, Chunk, Stamps
from kvoffload.tiers.disk.journal import Journal
from kvoffload.tiers.disk.slab import SOUND, UNREADABLE, Slab
from kvoffload.tiers.disk.slab_format import Records, SlabSlots
from kvoffload.tiers.disk.slab_layout import ACCESS, entry_dtype
from kvoffload.tiers.rate_limited_log import RateLimitedLog

COMMIT_INTERVAL_S = 0.002
"""Shortest pause between two commits while writes are in progress, in seconds. A shorter pause would waste
space in the log, because each commit fills at least one page."""
COMMIT_PACE = 32
"""Pause between two commits, as a multiple of the last commit's duration. The pause keeps syncs, which delay
all other writes, to a small part of the time.
"""
LONGEST_COMMIT_INTERVAL_S = 0.25
VOID_RETRY_S = 1.0
"""Pause after a failed write of the superblocks, in seconds."""
ACCESS_INTERVAL_S = 1.0
"""Longest time in seconds from an access (a use of a block) to its commit."""
MAX_PENDING_ACCESSES = 1 << 22

_NO_SLOTS = np.empty(0, np.uint32)


class Movers(Protocol):
    """Interface to the threads that move blocks. All methods except `end` require the committer's lock."""

    num_threads: int
    """Number of threads."""
    num_writing: int
    """Number of write chunks that threads are moving now."""

    def num_queued(self) -> int:
        """Return the number of queued write chunks."""

    def release(self, chunk: Chunk) -> None:
        """Queue a held write chunk, whose slots may be written now."""

    def cancel_queued(self) -> list[Chunk]:
        """Remove and return the queued write chunks."""

    def end(self, chunks: list[Chunk]) -> None:
        """Deliver the outcomes of chunks to their jobs. Acquires the lock.

        Called when the blocks of the chunks are durable, or when their writes have failed.
        """


@dataclass(eq=False)
class _Batch:
    """Contents of the next journal group."""

    removed: list[SlabSlots] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    accesses: list[tuple[SlabSlots, Stamps]] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not (self.removed or self.chunks or self.accesses)


class Committer:
    """Collects changes of slots and writes them to the journal in batches.

    A failure of the journal sets `broken`. From then on nothing is committed, and all unfinished and later
    writes fail. Only `void` still works.

    Thread: `start`, `remove`, `void` and `access` on the scheduler's thread; they do not wait for the disk.
    Callers of the other methods must hold `lock`.

    Attributes:
        lock: guards the committer's state and the queues of the pipeline.
        settled: condition, notified whenever a chunk was delivered or a change has become durable.
        thread: the thread that commits; `start` starts it.
        broken: True after a failure of the journal.
    """

    def __init__(self, slab: Slab, journal: Journal, log: RateLimitedLog) -> None:
        self._slab, self._journal, self._log = slab, journal, log
        self._no_entries: Records = np.empty(0, entry_dtype(slab.layout.key_bytes))
        self.lock = threading.Lock()
        self._wake, self.settled = threading.Condition(self.lock), threading.Condition(self.lock)
        self._movers: Movers
        self._pending, self._in_flight = _Batch(), list[_Batch]()
        self._gated = deque[Chunk]()
        self._num_accesses, self._oldest_access = 0, 0.0
        self._num_removals = self._durable_removals = 0
        self._void_before = self._void_durable = np.uint64(slab.void_before)
        self._void_again = 0.0
        self._flushing = self._stopping = self._committing = self.broken = False
        self.thread = threading.Thread(target=self._commit_batches, daemon=True, name="kvoffload-journal")

    def start(self, movers: Movers) -> None:
        """Start the thread. Raises `RuntimeError` if the system cannot start a thread."""
        self._movers = movers
        self.thread.start()

    # ---- the scheduler's side

    def remove(self, slots: SlabSlots) -> int:
        """Record that slots were emptied; return their gate, the number of all removals so far.

        The slots may be written when the number of durable removals reaches their gate.
        """
        with self.lock:
            if not self.broken:
                self._pending.removed.append(slots)
            self._num_removals += len(slots)
            self._wake.notify()
            return self._num_removals

    def void(self, generation: int) -> None:
        """Invalidate all blocks with a generation below `generation`, including blocks in flight.

        The change is durable once `is_settled` is True. To reuse the blocks' slots, call `remove` afterwards.
        """
        with self.lock:
            self._void_before = np.uint64(generation)
            self._wake.notify()

    def access(self, slots: SlabSlots, stamps: Stamps) -> None:
        """Queue accesses for the next commit; drop them if too many are queued, or if the journal is broken.

        Each element of `slots` is a slot number, with the flag `REUSE` if the access counts as a use.
        """
        with self.lock:
            if self.broken or self._num_accesses + len(slots) > MAX_PENDING_ACCESSES:
                return
            if not self._pending.accesses:
                self._oldest_access = time.monotonic()
                self._wake.notify()
            self._pending.accesses.append((slots, stamps))
            self._num_accesses += len(slots)

    # ---- the movers' side, with the lock held

    def hold(self, chunk: Chunk) -> bool:
        """Hold a write chunk until its slots may be written. Returns False if the chunk need not be held."""
        if chunk.gate <= self._durable_removals:
            return False
        self._gated.append(chunk)
        self._wake.notify()
        return True

    def note_started(self) -> None:
        """Wake the committer if chunks are held. Called when a mover has taken a write chunk."""
        if self._gated:
            self._wake.notify()

    def note_written(self, chunk: Chunk) -> bool:
        """Queue a written chunk for the next commit; return False if no block of the chunk needs a commit."""
        self._wake.notify()
        if self.broken:
            chunk.outcomes[:] = UNREADABLE
        needs_commit = bool((chunk.outcomes == SOUND).any())
        if needs_commit:
            self._pending.chunks.append(chunk)
        return needs_commit

    @property
    def will_release(self) -> bool:
        """True if chunks are held and will be released later."""
        return bool(self._gated) and not self.broken

    @property
    def is_settled(self) -> bool:
        """True if all changes are durable. If the journal is broken, True if the last `void` is durable."""
        if self._void_before > self._void_durable:
            return False
        return self.broken or (self._pending.is_empty and not self._committing)

    def flush(self, flushing: bool) -> None:
        """Commit pending accesses at once if `flushing` is True, as for a drain; otherwise after a pause."""
        self._flushing = flushing
        self._wake.notify()

    def stop(self) -> None:
        """Ask the thread to end once all writes have ended and all changes are durable."""
        self._stopping = True
        self._wake.notify_all()

    # ---- its thread

    def _commit_batches(self) -> None:
        while self._take_batch():
            began = time.monotonic()
            self._make_void()
            if self.broken:
                self._in_flight.clear()
                continue
            try:
                self._commit()
            except Exception as error:
                self._break(error)
                continue
            with self.lock:
                self._committing = bool(self._in_flight)
                self.settled.notify_all()
                now = time.monotonic()
                pause = max(COMMIT_INTERVAL_S, min(COMMIT_PACE * (now - began), LONGEST_COMMIT_INTERVAL_S))
                self._wake.wait_for(self._writes_need_a_commit, pause)

    def _take_batch(self) -> bool:
        """Wait for a batch and add it to the batches in flight; returns False if the thread must end."""
        with self.lock:
            while not self._has_work():
                # Writes in flight must still be made durable.
                movers = self._movers
                if self._stopping and not (self._gated or movers.num_queued() or movers.num_writing):
                    return False
                self._wake.wait(self._seconds_to_wait())
            self._committing = True
            self._in_flight.append(self._pending)
            self._pending, self._num_accesses = _Batch(), 0
            return True

    def _commit(self) -> None:
        """Sync the newest batch's data, then append its entries.

        If another batch waits, the sync of its data makes the entries of this batch durable, too. Otherwise a
        second sync follows.
        """
        *earlier, batch = self._in_flight
        if batch.chunks or earlier:
            self._journal.sync()
        for durable in earlier:
            self._end_batch(durable)
        self._append(batch)
        with self.lock:
            is_next_waiting = bool(self._pending.chunks or self._pending.removed)
        if not is_next_waiting:
            self._journal.sync()
            self._end_batch(batch)

    def _make_void(self) -> None:
        """Write the generation of the last `void` to the superblocks, unless this is done or not yet due.

        After a failed write, the next one is due after `VOID_RETRY_S`. Works with a broken journal, too.
        """
        with self.lock:
            if not self._must_make_void():
                return
            generation = self._void_before
        try:
            self._slab.void(int(generation))
        except OSError as error:
            self._log.warn(
                "void", "disk tier: a restart may undo the reset: superblocks not written: %s", error
            )
            self._void_again = time.monotonic() + VOID_RETRY_S
            return
        with self.lock:
            self._void_durable = generation
            self.settled.notify_all()

    def _must_make_void(self) -> bool:
        return bool(self._void_before > self._void_durable) and time.monotonic() >= self._void_again

    def _writes_need_a_commit(self) -> bool:
        """Return True if the next commit should start now, False if it should wait for more writes."""
        if self._stopping:
            return True
        if self._gated:
            return self._movers.num_queued() < self._movers.num_threads
        return self._movers.num_queued() == 0 and self._movers.num_writing == 0

    def _has_work(self) -> bool:
        pending = self._pending
        if pending.chunks or pending.removed or self._must_make_void():
            return True
        is_time = time.monotonic() >= self._oldest_access + ACCESS_INTERVAL_S
        return bool(pending.accesses) and (self._flushing or self._stopping or is_time)

    def _seconds_to_wait(self) -> float | None:
        """Return the seconds until the next access or void is due; None if none is pending."""
        times = [self._oldest_access + ACCESS_INTERVAL_S] if self._pending.accesses else []
        if self._void_before > self._void_durable:
            times.append(self._void_again)
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _append(self, batch: _Batch) -> None:
        removed = np.concatenate([_NO_SLOTS, *batch.removed])
        entries = np.concatenate([self._no_entries, *(self._entries_of(chunk) for chunk in batch.chunks)])
        stamps = np.concatenate([NO_STAMPS, *(stamps for _, stamps in batch.accesses)])
        first_stamp = int(stamps.min()) if len(stamps) else 0
        accessed = np.empty(len(stamps), ACCESS)
        accessed["slot"] = np.concatenate([_NO_SLOTS, *(slots for slots, _ in batch.accesses)])
        accessed["after"] = stamps - np.uint64(first_stamp)
        self._journal.append(removed, entries, accessed, first_stamp)

    def _entries_of(self, chunk: Chunk) -> Records:
        # `_void_before` must be read after the batch was taken, because a batch must not fill a slot that it
        # empties.
        written = (chunk.outcomes == SOUND) & (chunk.generations >= self._void_before)
        entries: Records = np.empty(int(np.count_nonzero(written)), self._no_entries.dtype)
        entries["slot"], entries["generation"] = chunk.slots[written], chunk.generations[written]
        entries["stamp"], entries["written_at_s"] = chunk.stamps[written], chunk.written_at_s
        entries["checksum"], entries["key"] = chunk.checksums[written], chunk.keys.words[written]
        entries["uses"] = 0
        return entries

    def _end_batch(self, batch: _Batch) -> None:
        """Deliver the writes of a durable batch. Release held writes that waited for the batch's removals."""
        with self.lock:
            self._in_flight.remove(batch)
            self._durable_removals += sum(map(len, batch.removed))
            while self._gated and self._gated[0].gate <= self._durable_removals:
                self._movers.release(self._gated.popleft())
        self._movers.end(batch.chunks)

    def _break(self, error: Exception) -> None:
        """Stop writing after a failure of the journal, because the state of the medium is unknown."""
        self._log.warn("journal", "disk tier: the journal failed, no more blocks are written: %s", error)
        with self.lock:
            self.broken = True
            failed = [chunk for batch in (*self._in_flight, self._pending) for chunk in batch.chunks]
            failed += [*self._gated, *self._movers.cancel_queued()]
            self._gated.clear()
            self._in_flight.clear()
            self._pending, self._num_accesses = _Batch(), 0
        fail(failed)
        self._movers.end(failed)


def fail(chunks: list[Chunk]) -> None:
    """Set the outcome of all blocks of these chunks to `UNREADABLE`."""
    for chunk in chunks:
        chunk.outcomes = np.full(len(chunk.slots), UNREADABLE, np.uint8)
