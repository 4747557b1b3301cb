"""The thread that makes blocks durable, and says when a slot may be written again.

Owns the order that the crash contract rests on:

1. a slot is written only when the removal of the block that was in it is durable;
2. a block's entry is appended to the journal only when its data are durable;
3. a write is reported when its entry is durable.

One sync serves many blocks: the sync that makes the data of a batch durable also makes the entries of the
batch before durable. Does not move blocks, nor know which slot a key is in.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from kvoffload.tiers.disk.chunk import NO_STAMPS, Chunk, Stamps
from kvoffload.tiers.disk.format import Records, SlabSlots
from kvoffload.tiers.disk.journal import Journal
from kvoffload.tiers.disk.layout import ACCESS, entry_dtype
from kvoffload.tiers.disk.slab import SOUND, UNREADABLE, Slab
from kvoffload.tiers.rate_limited_log import RateLimitedLog

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

_NO_SLOTS = np.empty(0, np.uint32)


class Movers(Protocol):
    """The threads that write blocks, as the committer sees them. All but `hand_back` need its lock."""

    num_threads: int
    """How many there are."""
    num_writing: int
    """Writes that a thread is moving."""

    def num_queued(self) -> int:
        """Writes that no thread has begun."""

    def release(self, chunk: Chunk) -> None:
        """The slots of this write may be written now."""

    def give_up(self) -> list[Chunk]:
        """The writes that no thread has begun: the journal has failed, so they never will be."""

    def hand_back(self, chunks: list[Chunk]) -> None:
        """These have ended. Takes the lock."""


@dataclass(eq=False)
class _Batch:
    """The contents of the next group of the journal."""

    removed: list[SlabSlots] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    accesses: list[tuple[SlabSlots, Stamps]] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not (self.removed or self.chunks or self.accesses)


class Committer:
    """Collects what has happened to slots, and writes it to the journal in batches.

    When the journal fails, writing ends for good: writes that have not been reported fail, and `broken` is
    set; `void` still works.

    Thread: `remove`, `void` and `access` on the scheduler's; they do not wait. Methods that say so are called
    with `lock` held.

    Attributes:
        lock: guards everything here, and the queues of the movers.
        settled: notified whenever something has ended or become durable.
        thread: the thread that commits; started by the movers.
        broken: the journal has failed.
    """

    def __init__(self, slab: Slab, journal: Journal, log: RateLimitedLog) -> None:
        self._slab, self._journal, self._log = slab, journal, log
        self._no_entries: Records = np.empty(0, entry_dtype(slab.layout.key_bytes))
        self.lock = threading.Lock()
        self._wake, self.settled = threading.Condition(self.lock), threading.Condition(self.lock)
        self._movers: Movers
        self._pending, self._under_way = _Batch(), list[_Batch]()
        self._gated = deque[Chunk]()
        self._num_accesses, self._oldest_access = 0, 0.0
        self._num_removals = self._num_durable = 0
        self._void_before = self._void_durable = np.uint64(slab.void_before)
        self._void_again = 0.0
        self._flushing = self._stopping = self._committing = self.broken = False
        self.thread = threading.Thread(target=self._commit_batches, daemon=True, name="kvoffload-journal")

    def start(self, movers: Movers) -> None:
        """Begin, with the threads that move blocks. Raises `RuntimeError` if there can be no thread."""
        self._movers = movers
        self.thread.start()

    # ---- the scheduler's side

    def remove(self, slots: SlabSlots) -> int:
        """These slots are now empty; returns the gate of the next write into them."""
        with self.lock:
            if not self.broken:
                self._pending.removed.append(slots)
            self._num_removals += len(slots)
            self._wake.notify()
            return self._num_removals

    def void(self, generation: int) -> None:
        """Blocks of a lower generation, also those in flight, are void; durably once it is `quiet`.

        Call `remove` after this for blocks that have an entry: their slots are not free before.
        """
        with self.lock:
            self._void_before = np.uint64(generation)
            self._wake.notify()

    def access(self, slots: SlabSlots, stamps: Stamps) -> None:
        """These slots were used (with `REUSE`) at these times: recorded with the next commit."""
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
        """Keep a write until the slots that it goes to may be written; False if they may be already."""
        if chunk.gate <= self._num_durable:
            return False
        self._gated.append(chunk)
        self._wake.notify()
        return True

    def begun(self) -> None:
        """A mover has taken a write: others may wait for removals that the next commit makes durable."""
        if self._gated:
            self._wake.notify()

    def written(self, chunk: Chunk) -> bool:
        """A mover has written a chunk; False if it has nothing to make durable, and has ended."""
        self._wake.notify()
        if self.broken:
            chunk.outcomes[:] = UNREADABLE
        is_awaited = bool((chunk.outcomes == SOUND).any())
        if is_awaited:
            self._pending.chunks.append(chunk)
        return is_awaited

    @property
    def may_release(self) -> bool:
        """Whether there are writes that wait here, and will go on."""
        return bool(self._gated) and not self.broken

    @property
    def quiet(self) -> bool:
        """Whether all that it was told is durable; without a journal, whether all that can be is."""
        if self._void_before > self._void_durable:
            return False
        return self.broken or (self._pending.is_empty and not self._committing)

    def flush(self, flushing: bool) -> None:
        """Whether somebody waits until it is `quiet`: accesses do not wait for company then."""
        self._flushing = flushing
        self._wake.notify()

    def stop(self) -> None:
        """End the thread when nothing is left to make durable."""
        self._stopping = True
        self._wake.notify_all()

    # ---- its thread

    def _commit_batches(self) -> None:
        while self._take_batch():
            began = time.monotonic()
            self._make_void()
            if self.broken:
                self._under_way.clear()
                continue
            try:
                self._commit()
            except Exception as error:
                self._break(error)
                continue
            with self.lock:
                self._committing = bool(self._under_way)
                self.settled.notify_all()
                now = time.monotonic()
                pause = max(COMMIT_INTERVAL_S, min(COMMIT_PACE * (now - began), LONGEST_COMMIT_INTERVAL_S))
                self._wake.wait_for(self._writes_need_a_commit, pause)

    def _take_batch(self) -> bool:
        """Wait for something to commit, and take it; False if there will be nothing any more."""
        with self.lock:
            while not self._has_work():
                # A write that is still under way must be made durable.
                movers = self._movers
                if self._stopping and not (self._gated or movers.num_queued() or movers.num_writing):
                    return False
                self._wake.wait(self._seconds_to_wait())
            self._committing = True
            self._under_way.append(self._pending)
            self._pending, self._num_accesses = _Batch(), 0
            return True

    def _commit(self) -> None:
        """Append the newest batch when its data are durable. If another one waits, its sync serves both."""
        *earlier, batch = self._under_way
        if batch.chunks or earlier:
            self._journal.sync()
        for durable in earlier:
            self._durable(durable)
        self._append(batch)
        with self.lock:
            more = bool(self._pending.chunks or self._pending.removed)
        if not more:
            self._journal.sync()
            self._durable(batch)

    def _make_void(self) -> None:
        """Record in the superblocks what is void, even without a journal; repeated until it succeeds."""
        with self.lock:
            if not self._must_make_void():
                return
            generation = self._void_before
        try:
            self._slab.void(int(generation))
        except OSError as error:
            self._log.warn("void", "disk tier: a reset may be undone by a restart: %s", error)
            self._void_again = time.monotonic() + VOID_RETRY_S
            return
        with self.lock:
            self._void_durable = generation
            self.settled.notify_all()

    def _must_make_void(self) -> bool:
        return bool(self._void_before > self._void_durable) and time.monotonic() >= self._void_again

    def _writes_need_a_commit(self) -> bool:
        """Whether little or nothing is left to write before the next commit."""
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
        """Seconds until there is work even without a notification; None if there will be none."""
        times = [self._oldest_access + ACCESS_INTERVAL_S] if self._pending.accesses else []
        if self._void_before > self._void_durable:
            times.append(self._void_again)
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _append(self, batch: _Batch) -> None:
        """Append a batch to the journal."""
        removed = np.concatenate([_NO_SLOTS, *batch.removed])
        entries = np.concatenate([self._no_entries, *(self._entries_of(chunk) for chunk in batch.chunks)])
        stamps = np.concatenate([NO_STAMPS, *(stamps for _, stamps in batch.accesses)])
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
        with self.lock:
            self._under_way.remove(batch)
            self._num_durable += sum(map(len, batch.removed))
            while self._gated and self._gated[0].gate <= self._num_durable:
                self._movers.release(self._gated.popleft())
        self._movers.hand_back(batch.chunks)

    def _break(self, error: Exception) -> None:
        """The journal has failed: the state of the medium is unknown, so nothing more is written."""
        self._log.warn("journal", "disk tier: the journal failed, nothing is written from now on: %s", error)
        with self.lock:
            self.broken = True
            failed = [chunk for batch in (*self._under_way, self._pending) for chunk in batch.chunks]
            failed += [*self._gated, *self._movers.give_up()]
            self._gated.clear()
            self._under_way.clear()
            self._pending, self._num_accesses = _Batch(), 0
            self._committing = False
        fail(failed)
        self._movers.hand_back(failed)


def fail(chunks: list[Chunk]) -> None:
    """None of these blocks was moved."""
    for chunk in chunks:
        chunk.outcomes = np.full(len(chunk.slots), UNREADABLE, np.uint8)
