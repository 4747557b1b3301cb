"""The threads of one slab: some move blocks, and one makes them durable.

Owns the order that the crash contract rests on:

1. a slot is written only when the removal of the block that was in it is durable;
2. a block's entry is appended to the journal only when its data are durable;
3. a write is reported when its entry is durable.

One sync serves many blocks: the sync that makes the data of a batch durable also makes the entries of the
batch before durable. Does not know which slot a key is in, nor policies: it gets chunks and returns them.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvoffload.structures.keys import Keys
from kvoffload.tiers.base import Checksums
from kvoffload.tiers.disk.format import Records, SlabSlots
from kvoffload.tiers.disk.journal import Journal
from kvoffload.tiers.disk.layout import ACCESS, entry_dtype
from kvoffload.tiers.disk.slab import (
    SOUND,
    UNREADABLE,
    Outcomes,
    Positions,
    Scratch,
    Slab,
    now_s,
)
from kvoffload.tiers.rate_limited_log import RateLimitedLog
from kvoffload.transfer import Blocks

COMMIT_INTERVAL_S = 0.002
"""Time between two commits while writes run: each commit takes at least a page of the log."""
COMMIT_PACE = 32
"""Time between two commits, in durations of the last one: a sync delays the writes beside it."""
LONGEST_COMMIT_INTERVAL_S = 0.25
VOID_RETRY_S = 1.0
"""Time until the next attempt after the superblocks could not be written."""
ACCESS_INTERVAL_S = 1.0
"""How long accesses wait for a commit that includes them."""
MAX_PENDING_ACCESSES = 1 << 22

Stamps: TypeAlias = npt.NDArray[np.uint64]
_NO_SLOTS, _NO_STAMPS = np.empty(0, np.uint32), np.empty(0, np.uint64)


@dataclass(eq=False)
class Chunk:
    """Blocks that one thread reads or writes at once, slots ascending.

    Attributes:
        owner: the job that they belong to; not used here.
        index: their rows in the owner's arrays.
        outcomes: the outcome of each, set when the chunk is handed back.
        checksums: of a read: the expected ones; of a write: the real ones, set when it is handed back.
        stamps: of a write: when its blocks were first used.
        gate: of a write: how many removals must be durable before it.
    """

    owner: Any
    index: Positions
    writes: bool
    keys: Keys
    slots: Positions
    generations: npt.NDArray[np.uint64]
    pool: Blocks
    rows: Positions
    checksums: Checksums
    stamps: Stamps = field(default_factory=lambda: _NO_STAMPS)
    gate: int = 0
    written_at_s: int = 0
    outcomes: Outcomes = field(default_factory=lambda: np.empty(0, np.uint8))


@dataclass(eq=False)
class _Batch:
    """The contents of the next group of the journal."""

    removed: list[SlabSlots] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    accesses: list[tuple[SlabSlots, Stamps]] = field(default_factory=list)


class Pipeline:
    """Runs chunks; `deliver` gets each back when it has ended, on a thread of the pipeline.

    Reads go before writes, and one thread only reads, so that a load does not wait for stores. When the
    journal fails, writing ends for good: writes that have not been reported fail, and `broken` is set; reads
    and `void` still work.

    Thread: `submit`, `remove`, `access`, `drain` and `close` on one thread; only the last two wait.
    """

    def __init__(
        self,
        slab: Slab,
        journal: Journal,
        num_threads: int,
        deliver: Callable[[Chunk], None],
        log: RateLimitedLog,
    ) -> None:
        self._slab, self._journal, self._deliver, self._log = slab, journal, deliver, log
        self._num_threads = num_threads
        self._no_entries: Records = np.empty(0, entry_dtype(slab.layout.key_bytes))
        self._lock = threading.Lock()
        self._work, self._reading = threading.Condition(self._lock), threading.Condition(self._lock)
        self._commit, self._idle = threading.Condition(self._lock), threading.Condition(self._lock)
        self._reads, self._writes, self._gated = (deque[Chunk]() for _ in range(3))
        self._pending = _Batch()
        self._num_accesses, self._oldest_access = 0, 0.0
        self._num_under_way = self._num_writing = 0
        self._num_removals = self._num_durable = 0
        self._void_before = self._void_durable = np.uint64(slab.void_before)
        self._void_again = 0.0
        self._flushing = self._stopping = self._committing = self.broken = False
        self._threads = [
            threading.Thread(target=self._move_blocks, args=(n == 0 and num_threads > 1,), daemon=True,
                             name=f"kvoffload-disk-{n}")
            for n in range(num_threads)
        ]  # fmt: skip
        self._threads.append(
            threading.Thread(target=self._commit_batches, daemon=True, name="kvoffload-journal")
        )
        try:
            for thread in self._threads:
                thread.start()
        except RuntimeError:
            # The system has no more threads: those that run must not be left behind.
            self.close(None)
            raise

    # ---- the scheduler's side

    def submit(self, chunks: list[Chunk]) -> None:
        """Begin chunks: all of them reads, or all of them writes."""
        with self._lock:
            self._num_under_way += len(chunks)
            failed = chunks if self.broken and chunks[0].writes else []
            for chunk in chunks if not failed else []:
                if not chunk.writes:
                    self._reads.append(chunk)
                elif chunk.gate > self._num_durable:
                    self._gated.append(chunk)
                else:
                    self._writes.append(chunk)
            if not chunks[0].writes:
                self._reading.notify()
            self._work.notify(len(chunks))
            if self._gated:
                self._commit.notify()
        self._fail(failed)

    def remove(self, slots: SlabSlots) -> int:
        """These slots are now empty; returns the gate of the next write into them."""
        with self._lock:
            if not self.broken:
                self._pending.removed.append(slots)
            self._num_removals += len(slots)
            self._commit.notify()
            return self._num_removals

    def void(self, generation: int) -> None:
        """Blocks of a lower generation, also those in flight, are void; durably after a `drain`.

        Call `remove` after this for blocks that have an entry: their slots are not free before.
        """
        with self._lock:
            self._void_before = np.uint64(generation)
            self._commit.notify()

    def access(self, slots: SlabSlots, stamps: Stamps) -> None:
        """These slots were used (with `REUSE`) at these times: recorded with the next commit."""
        with self._lock:
            if self.broken or self._num_accesses + len(slots) > MAX_PENDING_ACCESSES:
                return
            if not self._pending.accesses:
                self._oldest_access = time.monotonic()
                self._commit.notify()
            self._pending.accesses.append((slots, stamps))
            self._num_accesses += len(slots)

    def drain(self, timeout_s: float | None) -> bool:
        """Wait until everything submitted has ended and is durable; False on time-out."""
        with self._lock:
            self._flushing = True
            self._commit.notify()
            try:
                return self._idle.wait_for(self._quiet, timeout_s)
            finally:
                self._flushing = False

    def close(self, timeout_s: float | None) -> bool:
        """Drain, and end the threads; False if some hang in a system call: those are left running.

        Args:
            timeout_s: how long to wait at most; None to wait until they have ended.
        """
        deadline = time.monotonic() + (threading.TIMEOUT_MAX if timeout_s is None else timeout_s)
        if not self._stopping:
            self.drain(timeout_s)
        with self._lock:
            self._stopping = True
            self._reading.notify_all()
            self._work.notify_all()
            self._commit.notify_all()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _quiet(self) -> bool:
        if self._num_under_way or self._void_before > self._void_durable:
            return False
        nothing_to_say = not (self._pending.removed or self._pending.chunks or self._pending.accesses)
        return self.broken or (nothing_to_say and not self._committing)

    # ---- threads that move blocks

    def _move_blocks(self, reads_only: bool) -> None:
        scratch, work = Scratch(self._slab), self._reading if reads_only else self._work
        while True:
            with self._lock:
                while not (self._reads or (self._writes and not reads_only)):
                    if self._stopping and (reads_only or self.broken or not self._gated):
                        return
                    work.wait()
                chunk = (self._reads or self._writes).popleft()
                self._num_writing += chunk.writes
                if chunk.writes and self._gated:
                    self._commit.notify()
            try:
                self._move(chunk, scratch)
            except Exception as error:
                # Not a failure of the medium, which is an outcome: a closed pool, no memory, our bug.
                chunk.outcomes = np.full(len(chunk.slots), UNREADABLE, np.uint8)
                self._log.warn("chunk", "disk tier: blocks could not be moved: %r", error)
            if not chunk.writes or not self._awaits_commit(chunk):
                self._hand_back([chunk])

    def _awaits_commit(self, chunk: Chunk) -> bool:
        """Whether a write that has ended has blocks to make durable."""
        with self._lock:
            self._num_writing -= 1
            self._commit.notify()
            if self.broken:
                chunk.outcomes[:] = UNREADABLE
            written = bool((chunk.outcomes == SOUND).any())
            if written:
                self._pending.chunks.append(chunk)
            return written

    def _move(self, chunk: Chunk, scratch: Scratch) -> None:
        blocks = chunk.keys, chunk.slots, chunk.generations
        if chunk.writes:
            chunk.written_at_s = now_s()
            written, chunk.checksums = self._slab.write_blocks(*blocks, chunk.pool, chunk.rows, scratch)
            chunk.outcomes = np.where(written, np.uint8(SOUND), np.uint8(UNREADABLE))
        else:
            chunk.outcomes = self._slab.read_blocks(*blocks, chunk.checksums, chunk.pool, chunk.rows, scratch)

    def _hand_back(self, chunks: list[Chunk]) -> None:
        for chunk in chunks:
            self._deliver(chunk)
        with self._lock:
            self._num_under_way -= len(chunks)
            self._idle.notify_all()

    # ---- the thread that makes them durable

    def _commit_batches(self) -> None:
        unsynced: _Batch | None = None
        while True:
            with self._lock:
                while not self._has_work():
                    # A write that is still under way must be made durable.
                    if self._stopping and not (self._gated or self._writes or self._num_writing):
                        return
                    self._commit.wait(self._seconds_to_wait())
                self._committing = True
                batch, self._pending, self._num_accesses = self._pending, _Batch(), 0
            began = time.monotonic()
            self._make_void()
            if self.broken:
                continue
            try:
                if batch.chunks or unsynced:
                    self._journal.sync()
                if unsynced:
                    self._durable(unsynced)
                    unsynced = None
                self._append(batch)
                unsynced = batch
                with self._lock:
                    more = bool(self._pending.chunks or self._pending.removed)
                if not more:
                    self._journal.sync()
                    self._durable(batch)
                    unsynced = None
            except Exception as error:
                self._break(error, [batch] if unsynced is None or unsynced is batch else [unsynced, batch])
                unsynced = None
                continue
            with self._lock:
                self._committing = unsynced is not None
                self._idle.notify_all()
                now = time.monotonic()
                pause = max(COMMIT_INTERVAL_S, min(COMMIT_PACE * (now - began), LONGEST_COMMIT_INTERVAL_S))
                self._commit.wait_for(self._writes_need_a_commit, pause)

    def _make_void(self) -> None:
        """Record in the superblocks what is void, even without a journal; repeated until it succeeds."""
        with self._lock:
            if not self._must_make_void():
                return
            generation = self._void_before
        try:
            self._slab.void(int(generation))
        except OSError as error:
            self._log.warn("void", "disk tier: a reset may be undone by a restart: %s", error)
            self._void_again = time.monotonic() + VOID_RETRY_S
            return
        with self._lock:
            self._void_durable = generation
            self._idle.notify_all()

    def _must_make_void(self) -> bool:
        return bool(self._void_before > self._void_durable) and time.monotonic() >= self._void_again

    def _writes_need_a_commit(self) -> bool:
        """Whether little or nothing is left to write before the next commit."""
        if self._stopping:
            return True
        if self._gated:
            return len(self._writes) < self._num_threads
        return not self._writes and self._num_writing == 0

    def _has_work(self) -> bool:
        pending = self._pending
        if pending.chunks or pending.removed or self._must_make_void():
            return True
        is_time = time.monotonic() >= self._oldest_access + ACCESS_INTERVAL_S
        return bool(pending.accesses) and (self._flushing or self._stopping or is_time)

    def _seconds_to_wait(self) -> float | None:
        """Seconds until there is work even without a notification; None if there will be none."""
        times = [self._oldest_access + ACCESS_INTERVAL_S] if self._pending.accesses else []
        if self._void_before > self._void_durable:
            times.append(self._void_again)
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _append(self, batch: _Batch) -> None:
        """Append a batch to the journal."""
        removed = np.concatenate([_NO_SLOTS, *batch.removed])
        entries = np.concatenate([self._no_entries, *(self._entries_of(chunk) for chunk in batch.chunks)])
        stamps = np.concatenate([_NO_STAMPS, *(stamps for _, stamps in batch.accesses)])
        first_stamp = int(stamps.min()) if len(stamps) else 0
        accessed = np.empty(len(stamps), ACCESS)
        accessed["slot"] = np.concatenate([_NO_SLOTS, *(slots for slots, _ in batch.accesses)])
        accessed["after"] = stamps - np.uint64(first_stamp)
        self._journal.append(removed, entries, accessed, first_stamp)

    def _entries_of(self, chunk: Chunk) -> Records:
        # Read after the batch was taken: a batch that empties a slot must not fill it again.
        written = (chunk.outcomes == SOUND) & (chunk.generations >= self._void_before)
        entries: Records = np.empty(int(np.count_nonzero(written)), self._no_entries.dtype)
        entries["slot"], entries["generation"] = chunk.slots[written], chunk.generations[written]
        entries["stamp"], entries["written_at_s"] = chunk.stamps[written], chunk.written_at_s
        entries["checksum"], entries["key"] = chunk.checksums[written], chunk.keys.words[written]
        entries["uses"] = 0
        return entries

    def _durable(self, batch: _Batch) -> None:
        """This batch is durable: report its writes, and allow writes into the slots that it emptied."""
        with self._lock:
            self._num_durable += sum(map(len, batch.removed))
            while self._gated and self._gated[0].gate <= self._num_durable:
                self._writes.append(self._gated.popleft())
                self._work.notify()
            if self._stopping:
                self._work.notify_all()
        self._hand_back(batch.chunks)

    def _break(self, error: Exception, batches: list[_Batch]) -> None:
        """The journal has failed: the state of the medium is unknown, so nothing more is written."""
        self._log.warn("journal", "disk tier: the journal failed, nothing is written from now on: %s", error)
        with self._lock:
            self.broken = True
            failed = [chunk for batch in (*batches, self._pending) for chunk in batch.chunks]
            failed += [*self._gated, *self._writes]
            self._gated.clear()
            self._writes.clear()
            self._pending, self._num_accesses = _Batch(), 0
            self._committing = False
            self._work.notify_all()
        self._fail(failed)

    def _fail(self, chunks: list[Chunk]) -> None:
        for chunk in chunks:
            chunk.outcomes = np.full(len(chunk.slots), UNREADABLE, np.uint8)
        self._hand_back(chunks)
